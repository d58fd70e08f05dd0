//! Workloads inside a guest: scripts for its shell, and what they print.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ringtap_guest::{Guest as Machine, standby};

use crate::error::{Error, Result};
use crate::process;
use crate::run::scratch::settle;
use crate::run::{Mark, meter};
use crate::sample::Layer;
use crate::stop::Stop;
use crate::workload::fio::Target;
use crate::workload::{
    Kind, Measured, Settings, Workload, archive, bonnie, dd, filecopy, fio, fiofile, rated,
    snapshot,
};

/// Where a file system is mounted in the guest.
pub const PLACE: &str = "/mnt/disk";

/// Tries to read the guest's clock.
const CLOCK_TRIES: u32 = 3;

/// Runs scripts in the guest and looks out for the wish to end.
pub struct Shell<'a> {
    /// The guest.
    pub machine: &'a Machine,
    /// The wish.
    pub stop: &'a Stop,
    /// Lines before each script.
    first: &'a str,
}

impl<'a> Shell<'a> {
    /// A shell in that guest.
    pub fn new(machine: &'a Machine, stop: &'a Stop) -> Shell<'a> {
        Shell { machine, stop, first: "" }
    }

    /// The same, with lines before each script.
    pub fn after(self, first: &'a str) -> Shell<'a> {
        Shell { first, ..self }
    }
}

impl Shell<'_> {
    /// Runs a script that must succeed.
    pub fn run(&self, script: &str, limit: Duration) -> Result<process::Output> {
        self.timed(script, limit).map(|(output, _)| output)
    }

    /// The same, with the time that it took by this machine's clock.
    pub fn timed(&self, script: &str, limit: Duration) -> Result<(process::Output, Duration)> {
        let (output, _) = self.finished(script, limit)?;
        let elapsed = output.elapsed;
        Ok((process::Output { stdout: output.stdout, stderr: output.stderr }, elapsed))
    }

    /// Runs a script that must succeed, and says when it was seen to have ended.
    fn finished(
        &self,
        script: &str,
        limit: Duration,
    ) -> Result<(ringtap_guest::Output, SystemTime)> {
        let job = match self.first {
            "" => self.machine.start(script)?,
            first => self.machine.start(&format!("{first}\n{script}"))?,
        };
        let until = Instant::now() + limit;
        while !job.is_done() && Instant::now() < until {
            self.stop.check()?;
            std::thread::sleep(Duration::from_millis(5));
        }
        let end = SystemTime::now();
        // What a job printed comes a moment after its end.
        let left = until.saturating_duration_since(Instant::now()) + Duration::from_secs(5);
        let output = job.wait(left).and_then(ringtap_guest::Output::success)?;
        Ok((output, end))
    }

    /// By how many milliseconds the guest's clock is ahead of this machine's: of a few tries that which took least.
    pub fn clock_ahead(&self) -> Result<f64> {
        let mut best: Option<(Duration, f64)> = None;
        for _ in 0..CLOCK_TRIES {
            let (output, end) = self.finished("exec date +%s%N", Duration::from_secs(60))?;
            let (elapsed, end) =
                (output.elapsed, end.duration_since(UNIX_EPOCH).unwrap_or_default());
            let there: f64 = output.stdout.trim().parse().map_err(|_| Error::Output {
                what: "the guest's clock",
                found: format!("{:?}", output.stdout),
            })?;
            let here = end.as_secs_f64() * 1e3 - elapsed.as_secs_f64() * 500.0;
            if best.is_none_or(|(least, _)| elapsed < least) {
                best = Some((elapsed, there / 1e6 - here));
            }
        }
        Ok(best.map_or(0.0, |(_, ahead)| ahead))
    }
}

/// Where a workload runs.
pub struct Place<'a> {
    /// The guest.
    pub shell: &'a Shell<'a>,
    /// The block device.
    pub device: &'a str,
    /// The block device below it, whose traffic is counted.
    pub base: &'a str,
    /// The disk's file on this machine.
    pub disk: &'a Path,
    /// The binary that has the lab's tools.
    pub tool: &'a Path,
    /// Bytes of the guest's memory.
    pub memory: u64,
    /// From where costs and bytes count.
    pub mark: &'a Mark<'a>,
}

/// Runs one workload on a block device of the guest.
pub fn measure(workload: &Workload, settings: &Settings, place: &Place<'_>) -> Result<Measured> {
    let target = Target::Path(place.device.into());
    match workload.kind {
        Kind::BonnieRuns => bonnie_runs(settings, place),
        Kind::Bonnie(mode) => {
            let shape = bonnie::shape(settings.size, mode);
            let command = line("bonnie++", &bonnie::args(PLACE, shape));
            let (output, disk) = on_file_system(place, &command)?;
            Ok(Measured { disk, ..bonnie::parse(&output.stdout, shape, place.memory)? })
        }
        Kind::FileCopy { durable } => {
            let words = filecopy::args(PLACE, durable, settings);
            let (output, disk) = on_file_system(place, &tool(place, &words))?;
            Ok(Measured { disk, ..filecopy::parse(&output.stdout, durable)? })
        }
        Kind::Archive => archive_run(settings, place),
        kind => run(kind, workload.name, &target, settings, place),
    }
}

/// What passed the disk since its statistics said `before`.
fn passed(place: &Place<'_>, before: Option<String>) -> Option<Layer> {
    before.zip(statistics(place)).and_then(|(then, now)| meter::between(&then, &now))
}

fn statistics(place: &Place<'_>) -> Option<String> {
    let name = place.base.rsplit('/').next()?;
    let script = format!("cat /sys/block/{name}/stat");
    place.shell.run(&script, Duration::from_secs(20)).ok().map(|output| output.stdout)
}

/// Before the lines that tell the statistics of the disk.
const COUNTS: &str = "ringtap counts ";

/// Runs a script, and counts in the same breath what passes the disk meanwhile: each script of its own costs the guest
/// some ten processes.
fn counted(
    place: &Place<'_>,
    script: &str,
    limit: Duration,
) -> Result<(process::Output, Option<Layer>)> {
    let name = place.base.rsplit('/').next().unwrap_or_default();
    let count = format!("read -r counts </sys/block/{name}/stat; echo \"{COUNTS}$counts\"");
    let output =
        place.shell.run(&format!("{count}\n{script}\nstatus=$?\n{count}\nexit $status"), limit)?;
    let (counts, rest): (Vec<&str>, Vec<&str>) =
        output.stdout.split_inclusive('\n').partition(|line| line.starts_with(COUNTS));
    let texts: Vec<&str> = counts.iter().filter_map(|line| line.strip_prefix(COUNTS)).collect();
    let disk = match texts[..] {
        [before, after] => meter::between(before, after),
        _ => None,
    };
    Ok((process::Output { stdout: rest.concat(), ..output }, disk))
}

/// A command line of fio's, run by the one that stands by.
pub fn fio_line(words: &[String]) -> String {
    standby::call(&line("fio", words))
}

fn run(
    kind: Kind,
    name: &str,
    target: &Target,
    settings: &Settings,
    place: &Place<'_>,
) -> Result<Measured> {
    let (shell, device) = (place.shell, place.device);
    // A disk that is emulated on a translated processor, beside other work, may need a fifth of a second for a write.
    let patience = if shell.machine.accelerator() == "tcg" { 480 } else { 120 };
    let limit = Duration::from_secs(patience) + 3 * (settings.run + settings.ramp);
    let (measured, disk) = match kind {
        Kind::Fio(job) => {
            let mut words = fio::args(job, target, settings);
            // User-Mode Linux runs on this machine's processor as it is.
            words.extend(fio::clock().filter(|_| shell.machine.accelerator() == "uml"));
            if shell.machine.accelerator() == "tcg" {
                words.push(fio::TRANSLATED_CLOCK.into());
            }
            let (output, disk) = counted(place, &fio_line(&words), limit)?;
            (fio::parse(&output.stdout, job, settings)?, disk)
        }
        Kind::FioFile(path) => {
            let text = fiofile::check(Path::new(path))?;
            let script = format!(
                "cat >/tmp/job.fio <<'END OF JOB'\n{}END OF JOB\nfio --output-format=json /tmp/job.fio",
                fiofile::rewrite(&text, target, settings)
            );
            let (output, disk) = counted(place, &script, Duration::from_secs(3600))?;
            (fiofile::parse(&output.stdout)?, disk)
        }
        Kind::Rated(percent) => {
            let words = rated::args(target, "/tmp/rated", percent, settings);
            let log = rated::log_file("/tmp/rated");
            let script = format!(
                "{} >/tmp/rated.json && cat /tmp/rated.json && echo ==== && cat {log}; rm -f /tmp/rated*",
                fio_line(&words)
            );
            let ahead = shell.clock_ahead()?;
            let (output, disk) = counted(place, &script, limit)?;
            let behind = output.stdout.split_once("\n====\n");
            let (json, log) = behind.ok_or_else(|| Error::Output {
                what: "fio's log",
                found: "nothing behind its JSON".into(),
            })?;
            (rated::parse(json, log, percent, settings, ahead)?, disk)
        }
        Kind::DdThroughput(flag) => {
            let (block, count, note) = dd::throughput_shape(settings.size, place.memory / 4);
            let words = dd::throughput_args(device, block, count, flag);
            let (output, disk) = counted(place, &line("LC_ALL=C dd", &words), limit)?;
            (dd::throughput(&output.stderr, block * count, note)?, disk)
        }
        Kind::DdLatency(flag) => {
            // dd tells how far it came when it is interrupted.
            let bounded = format!("LC_ALL=C timeout -s INT {} dd", dd::SMALL_SECONDS);
            let script = line(&bounded, &dd::latency_args(device, flag)) + " || [ $? = 124 ]";
            let (output, disk) = counted(place, &script, limit)?;
            (dd::latency(&output.stderr)?, disk)
        }
        Kind::SnapshotLife => {
            let script = snapshot::script(device, settings.size);
            let (output, disk) = counted(place, &script, limit)?;
            (snapshot::parse(&output.stdout, settings.size)?, disk)
        }
        _ => return Err(Error::Plan(format!("{name} is none of a guest's own workloads"))),
    };
    Ok(Measured { disk, ..measured })
}

/// Makes an ext4 on the device, mounts it, runs `command` and unmounts again: what was kept back for the disk then
/// counts as well.
fn on_file_system(place: &Place<'_>, command: &str) -> Result<(process::Output, Option<Layer>)> {
    let limit = Duration::from_secs(900);
    place.shell.run(&format!("set -e\n{}sync", mount(place.device)), limit)?;
    let before = statistics(place);
    place.mark.begin();
    let script =
        format!("set -e\nstatus=0\n{command} || status=$?\numount {PLACE}\nexit $status\n");
    let output = place.shell.run(&script, limit)?;
    Ok((output, passed(place, before)))
}

/// Shell lines that make an ext4 on a device and mount it at [`PLACE`].
pub fn mount(device: &str) -> String {
    format!(
        "mkfs.ext4 -q -F -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 {device}\n\
         mkdir -p {PLACE}\nmount -t ext4 {device} {PLACE}\nchmod 777 {PLACE}\n"
    )
}

/// On one file system, so that a run writes over what the one before has had copied.
fn bonnie_runs(settings: &Settings, place: &Place<'_>) -> Result<Measured> {
    let limit = Duration::from_secs(900);
    let shape = bonnie::shape(settings.size, bonnie::Mode::Direct);
    // The files of a run are gone before the next: it is given their blocks again.
    let command = format!("{}; sync", line("bonnie++", &bonnie::args(PLACE, shape)));
    place.shell.run(&format!("set -e\n{}sync", mount(place.device)), limit)?;
    let before = statistics(place);
    place.mark.begin();
    let measured = bonnie::runs::until_settled(|| Ok(place.shell.run(&command, limit)?.stdout));
    place.shell.run(&format!("umount {PLACE}"), limit)?;
    Ok(Measured { disk: passed(place, before), ..measured? })
}

fn archive_run(settings: &Settings, place: &Place<'_>) -> Result<Measured> {
    let limit = Duration::from_secs(900);
    let tree = archive::tree(settings.size);
    let dir = format!("{PLACE}/tree");
    // Unmounted and mounted again, so that nothing of it is in the guest's cache; then this machine's cache as well.
    let script = format!(
        "set -e\n{}{} >/dev/null\numount {PLACE}\nmount -t ext4 {} {PLACE}\nsync\necho 3 >/proc/sys/vm/drop_caches\n",
        mount(place.device),
        tool(place, &archive::tree_args(&dir, tree)),
        place.device
    );
    place.shell.run(&script, limit)?;
    settle(place.disk)?;
    let before = statistics(place);
    place.mark.begin();
    let result = place.shell.timed(&archive::command(&dir), limit);
    place.shell.run(&format!("umount {PLACE}"), limit)?;
    let (output, elapsed) = result?;
    let disk = passed(place, before);
    Ok(Measured { disk, ..archive::parse(&output.stderr, elapsed.as_secs_f64(), tree)? })
}

fn tool(place: &Place<'_>, words: &[String]) -> String {
    line(&format!("'{}'", place.tool.display()), words)
}

/// A command line for the guest's shell.
pub fn line(program: &str, words: &[String]) -> String {
    let quoted = words.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''")));
    std::iter::once(program.to_owned()).chain(quoted).collect::<Vec<_>>().join(" ")
}
