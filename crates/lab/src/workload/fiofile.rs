//! A job file of the user's: its jobs are run as they are, on the lab's disk instead of the files that it names.

use std::path::Path;

use ringtap_guest::fio::Report;

use super::fio;
use super::job::{Target, escape};
use super::machine::Machine;
use super::{Client, Listed, Measured, Settings, Workload};
use crate::error::{Error, Result};
use crate::sample::Metric;

/// Keys that say where the I/O goes or how it is printed: the lab's, not the file's.
const OURS: [&str; 8] = [
    "filename",
    "directory",
    "filename_format",
    "uri",
    "output",
    "output-format",
    "size",
    "filesize",
];

/// Keys that say what is done to the disk, when, and how it is counted; not those by which fio opens, writes or removes
/// files of its own, or runs programs. A list of what may be: a later fio has keys that nobody has looked at.
#[rustfmt::skip]
const KEYS: &[&str] = &[
    "allrandrepeat", "ba", "blockalign", "blocksize", "blocksize_range", "blocksize_unaligned", "bs", "bs_is_seq_rand",
    "bs_unaligned", "bsrange", "bssplit", "buffer_compress_chunk", "buffer_compress_percentage", "buffer_pattern", "buffered",
    "bwavgtime", "clat_percentiles", "clocksource", "cmdprio", "cmdprio_bssplit", "cmdprio_class", "cmdprio_percentage",
    "continue_on_error", "cpumask", "cpus_allowed", "cpus_allowed_policy", "dedupe_global", "dedupe_mode", "dedupe_percentage",
    "dedupe_working_set_percentage", "description", "direct", "disable_bw_measurement", "disable_clat", "disable_lat",
    "disable_slat", "disk_util", "do_verify", "end_fsync", "exit_what", "exitall", "exitall_on_error", "fadvise_hint",
    "fallocate", "fdatasync", "file_service_type", "fixedbufs", "flow", "flow_id", "flow_sleep", "force_async", "fsync",
    "fsync_on_close", "group_reporting", "gtod_cpu", "gtod_reduce", "hipri", "hugepage-size", "ignore_error", "invalidate",
    "io_limit", "io_size", "io_submit_mode", "iodepth", "iodepth_batch", "iodepth_batch_complete",
    "iodepth_batch_complete_max", "iodepth_batch_complete_min", "iodepth_batch_submit", "iodepth_low", "ioengine", "iomem",
    "iopsavgtime", "kb_base", "lat_percentiles", "latency_percentile", "latency_run", "latency_target", "latency_window",
    "lockmem", "loops", "max_latency", "max_open_zones", "mem", "name", "new_group", "nice", "nonvectored", "norandommap", "nowait",
    "nrfiles", "numa_cpu_nodes", "numa_mem_policy", "number_ios", "numjobs", "offset", "offset_align", "offset_increment",
    "openfiles", "overwrite", "percentage_random", "percentile_list", "pre_read", "prio", "prioclass", "random_distribution",
    "random_generator", "randrepeat", "randseed", "ramp_time", "rate", "rate_cycle", "rate_ignore_thinktime", "rate_iops",
    "rate_iops_min", "rate_min", "rate_process", "ratecycle", "ratemin", "readwrite", "refill_buffers", "registerfiles", "runtime", "rw",
    "rw_sequencer", "rwmixread", "rwmixwrite", "scramble_buffers", "serialize_overlap", "significant_figures",
    "slat_percentiles", "sqthread_poll", "sqthread_poll_cpu", "startdelay", "steadystate", "steadystate_duration",
    "steadystate_ramp_time", "stonewall", "sync", "sync_file_range", "thinktime", "thinktime_blocks", "thinktime_blocks_type",
    "thinktime_iotime", "thinktime_spin", "thread", "time_based", "trim_backlog", "trim_backlog_batch", "trim_percentage",
    "uncached", "unified_rw_reporting", "unit_base", "verify", "verify_backlog", "verify_fatal", "verify_interval",
    "verify_pattern", "wait_for", "wait_for_previous", "zero_buffers", "zonemode", "zonerange", "zonesize", "zoneskip",
];

/// Engines that do their I/O on the file of `filename`.
const ENGINES: [&str; 10] = [
    "io_uring", "libaio", "mmap", "posixaio", "psync", "pvsync", "pvsync2", "splice", "sync",
    "vsync",
];

/// Why a line may not be run, if so.
fn refusal(line: &str) -> Option<String> {
    // fio ends a line at either, wherever it stands.
    let line = line.split([';', '#']).next().unwrap_or("").trim();
    let (key, value) = line.split_once('=').unwrap_or((line, ""));
    let (key, value) = (key.trim(), value.trim());
    if key.is_empty() || key.starts_with('[') || OURS.contains(&key) {
        return None;
    }
    if line.starts_with("include") {
        return Some("includes another file; put it in".into());
    }
    if !KEYS.contains(&key) {
        return Some(format!("{key} reaches beyond the disk, or is not known here; remove it"));
    }
    if key == "ioengine" && !ENGINES.contains(&value) {
        return Some(format!(
            "the engine {value} is not known to stay on the disk; these are: {}",
            ENGINES.join(", ")
        ));
    }
    // mmap:FILE has its buffers in a file, which is overwritten; a variable may say so.
    if ["mem", "iomem"].contains(&key) && value.contains([':', '$']) {
        return Some(format!("{key}={value} writes to a file; give only the kind of memory"));
    }
    None
}

/// Reads and checks a job file: at least one job, and nothing that goes elsewhere than to the disk.
pub fn check(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).map_err(Error::file("read the fio job file", path))?;
    let refuse = |line: usize, why: String| {
        Err(Error::Plan(format!("fio job file {} line {line}: {why}", path.display())))
    };
    let mut jobs = 0;
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix('[') {
            let Some(name) = name.strip_suffix(']') else {
                return refuse(at + 1, format!("{line:?} does not end with ]"));
            };
            jobs += usize::from(name != "global");
        }
        if let Some(why) = refusal(line) {
            return refuse(at + 1, why);
        }
    }
    if jobs == 0 {
        return refuse(text.lines().count(), "there is no job in it, only [name] makes one".into());
    }
    Ok(text)
}

/// The job file for one target: the user's lines, with the target and the disk's size in every section.
pub fn rewrite(text: &str, target: &Target, settings: &Settings) -> String {
    let own_engine = !matches!(target, Target::Path(_));
    let mut out = String::new();
    for line in text.lines() {
        let trimmed = line.trim();
        let key = trimmed.split('=').next().unwrap_or("").trim();
        // What is elsewhere has one engine of fio's, and no flags of open().
        let engine = own_engine && ["ioengine", "direct", "buffered"].contains(&key);
        if OURS.contains(&key) || engine {
            continue;
        }
        out += line;
        out.push('\n');
        if trimmed.starts_with('[') && trimmed != "[global]" {
            match target {
                Target::Path(path) => out += &format!("filename={}\n", escape(path)),
                Target::Nbd(uri) => out += &format!("ioengine=nbd\nuri={uri}\n"),
                Target::Rbd { image, .. } => {
                    out += &format!("ioengine=rbd\npool=rbd\nclientname=admin\nrbdname={image}\n");
                }
            }
            out += &format!("size={}\nlat_percentiles=1\n", settings.size);
        }
    }
    out
}

/// Reads fio's JSON: all jobs together.
pub fn parse(text: &str) -> Result<Measured> {
    let wrong = |found: String| Error::Output { what: "fio's JSON", found };
    let report = Report::parse(text)?;
    let jobs = report.jobs()?;
    let (mut iops, mut bytes, mut ios, mut asked) = (0.0, 0.0, 0.0, 0.0);
    let mut worst: Option<f64> = None;
    for job in jobs {
        job.succeeded()?;
        for side in [&job.read, &job.write] {
            iops += side.iops.unwrap_or(0.0);
            bytes += side.bw_bytes.unwrap_or(0.0);
            ios += side.total_ios;
            asked += side.io_bytes;
            if let Some(p99) = side.lat_ns.percentile(99.0).filter(|_| side.total_ios >= 1e4) {
                worst = Some(worst.map_or(p99, |worst| worst.max(p99)));
            }
        }
        if job.missed_steady_state() {
            return Err(wrong(format!("job {:?} did not reach its steady state", job.name)));
        }
    }
    if ios == 0.0 {
        return Err(wrong("not one I/O was done".into()));
    }
    let mut measured = Measured { ios: Some(ios), asked: Some(asked), ..Measured::default() };
    measured.metrics.insert(Metric::Iops, iops.into());
    measured.metrics.insert(Metric::Bandwidth, bytes.into());
    if let Some(worst) = worst {
        measured.metrics.insert(Metric::P99, worst.into());
    }
    measured.note = Some(format!("{} jobs together; p99 is the worst job's", jobs.len()));
    Ok(measured)
}

/// The workload of a job file.
pub struct JobFile {
    listed: Listed,
    path: &'static str,
}

impl JobFile {
    /// Of that name, which runs the file at `path`.
    pub fn new(name: &'static str, path: &'static str) -> JobFile {
        let title = Box::leak(format!("fio job file {path}").into_boxed_str());
        let listed = Listed { name, title, group: None, headline: fio::IOPS, quick: false };
        JobFile { listed, path }
    }
}

impl Workload for JobFile {
    fn listed(&self) -> &Listed {
        &self.listed
    }
    fn client(&self) -> Client {
        Client::Fio
    }
    fn seconds(&self, _: &Settings) -> f64 {
        10.0
    }
    fn run(&self, machine: &dyn Machine) -> Result<Measured> {
        let text = check(Path::new(self.path))?;
        parse(&machine.job_file(&rewrite(&text, &machine.target(), machine.settings()))?)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const FILE: &str = "[global]\nbs=4k\ndirect=1\nioengine=libaio\nruntime=1\n[a]\nrw=randread\nfilename=/etc/passwd\n[b]\nrw=randwrite\ntime_based\n";

    fn settings() -> Settings {
        let run = Duration::from_secs(1);
        Settings { size: 1 << 20, run, ramp: Duration::ZERO, seed: 1, capacity: None }
    }

    #[test]
    fn the_users_jobs_go_to_the_labs_disk() {
        let text = rewrite(FILE, &Target::Path("/d:x".into()), &settings());
        assert!(!text.contains("passwd") && text.matches("filename=/d\\:x").count() == 2, "{text}");
        assert!(text.contains("ioengine=libaio"));
        let nbd = rewrite(FILE, &Target::Nbd("nbd+unix:///?socket=/s".into()), &settings());
        assert!(
            !nbd.contains("libaio") && !nbd.contains("direct") && nbd.matches("uri=").count() == 2
        );
    }

    #[test]
    fn fio_takes_what_is_written_and_its_json_is_read() {
        if crate::process::find("fio").is_none() {
            eprintln!("skipped: fio is not installed");
            return;
        }
        let dir = tempfile::Builder::new().tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let disk = dir.path().join("disk");
        std::fs::write(&disk, vec![1; 1 << 20]).unwrap();
        let text = FILE.replace("runtime=1", "number_ios=50").replace("time_based\n", "");
        let job = dir.path().join("job.fio");
        let target = Target::Path(disk.display().to_string());
        std::fs::write(&job, rewrite(&text, &target, &settings())).unwrap();
        let output = std::process::Command::new("fio")
            .arg("--output-format=json")
            .arg(&job)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let measured = parse(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert_eq!((measured.ios, measured.asked), (Some(100.0), Some(100.0 * 4096.0)));
        assert!(parse("{\"jobs\": []}").is_err() && parse("").is_err());
    }

    #[test]
    fn a_steady_state_that_was_not_reached_is_no_result() {
        let text = |attained| {
            format!(
                r#"note of the engine {{"jobs": [{{"jobname": "a", "error": 0, "steadystate": {{"ss": "bw:10%", "attained": {attained}}},
                "read": {{"iops": 10.5, "bw": 42, "bw_bytes": 43008, "total_ios": 50}}, "write": {{"iops": 0.0, "bw_bytes": 0, "total_ios": 0}}}}]}}"#
            )
        };
        let measured = parse(&text(1)).unwrap();
        assert_eq!(measured.metrics[&Metric::Bandwidth].value, 43_008.0, "bytes, not KiB");
        assert!(!measured.metrics.contains_key(&Metric::P99), "fifty I/Os have no p99");
        assert!(parse(&text(0)).unwrap_err().to_string().contains("steady state"));
    }

    #[test]
    fn a_file_without_jobs_or_with_commands_is_refused_with_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.fio");
        let check = |text: &str| {
            std::fs::write(&path, text).unwrap();
            check(&path)
        };
        assert!(check(FILE).is_ok());
        assert!(check("[global]\nbs=4k\n").unwrap_err().to_string().contains("no job"));
        let error = check("[a]\nexec_prerun=rm -rf /\n").unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("exec_prerun"), "{error}");
        assert!(check("[a\n").is_err());
    }

    #[test]
    fn what_goes_elsewhere_than_to_the_disk_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.fio");
        let check = |line: &str| {
            std::fs::write(&path, format!("[a]\nrw=randwrite\n{line}\n")).unwrap();
            check(&path)
        };
        for line in [
            "opendir=/home",
            "opendir = /home",
            "write_iolog=/etc/x",
            "write_bw_log=x",
            "verify_dump",
            "verify_state_save=1",
            "unlink=1",
            "file_append=1",
            "fill_device=1",
            "merge_blktrace_file=/x",
            "cgroup=x",
            "mem=mmap:/home/x",
            "iomem=$X",
            "ioengine=exec",
            "ioengine=filedelete",
            "ioengine=external:/x.so",
            "ioengine=net # a comment",
            "ioengine=$E",
            "include other.fio",
            "${KEY}=1",
        ] {
            let error = check(line).expect_err(line).to_string();
            assert!(error.contains("line 3"), "{error}");
        }
        for line in [
            "; a comment",
            "# opendir=/x",
            "ioengine=libaio ; a comment",
            "mem = mmap",
            "readwrite=read",
            "bssplit=4k/50:64k/50",
            "filename=/etc/passwd",
            "stonewall",
            "time_based",
        ] {
            check(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        }
    }
}
