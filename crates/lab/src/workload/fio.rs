//! fio: how it is called, and how its JSON is read.

use std::sync::OnceLock;

use ringtap_guest::fio::{Latency, Report};

use super::job::{Job, Target};
use super::machine::Machine;
use super::{Client, Listed, Measured, Settings, Workload};
use crate::error::Result;
use crate::sample::{Metric, Metrics};
use crate::stats::steady::WINDOW;

/// fio's arguments. `--output-format=json` goes to stdout.
///
/// Blocks are drawn without fio's map of visited ones (which would cost the client CPU), from a seed that all arms of
/// a round share. Latency percentiles are of the whole latency, submission included.
pub fn args(job: Job, target: &Target, settings: &Settings) -> Vec<String> {
    let mut args = vec![
        "--name=lab".into(),
        "--thread".into(),
        "--time_based".into(),
        "--group_reporting".into(),
    ];
    args.extend(target.args("io_uring"));
    args.extend([
        format!("--rw={}", job.pattern()),
        format!("--bs={}", job.block),
        format!("--iodepth={}", job.depth),
        format!("--size={}", settings.size),
        format!("--runtime={}ms", settings.run.as_millis()),
        "--norandommap".into(),
        format!("--randseed={}", settings.seed),
        "--lat_percentiles=1".into(),
        "--percentile_list=50:90:99:99.9".into(),
        "--output-format=json".into(),
    ]);
    if job.synced {
        args.push("--fsync=1".into());
    }
    if !settings.ramp.is_zero() {
        args.push(format!("--ramp_time={}ms", settings.ramp.as_millis()));
    }
    args
}

/// The clock that fio would choose on a processor of this machine, where that is known: then it neither tries the clock nor
/// finds out its rate twice, which takes as long as a third of a short run.
pub fn clock() -> Option<String> {
    static STEADY: OnceLock<bool> = OnceLock::new();
    let read = || {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        has_steady_clock(&info)
    };
    STEADY.get_or_init(read).then(|| "--clocksource=cpu".into())
}

/// The clock that fio chooses on a translated processor, whose time stamp counter is none that it takes: named, it is not
/// tried first.
pub const TRANSLATED_CLOCK: &str = "--clocksource=clock_gettime";

/// What fio asks of the processor: a time stamp counter that neither changes its rate nor stops.
fn has_steady_clock(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    ["constant_tsc", "nonstop_tsc"].iter().all(|flag| flags.split_whitespace().any(|f| f == *flag))
}

/// Percentiles are printed only when at least this many I/Os lie beyond them.
pub const BEYOND: f64 = 100.0;

/// What is printed of a latency.
const QUANTILES: [(Metric, f64); 4] =
    [(Metric::P50, 0.5), (Metric::P90, 0.9), (Metric::P99, 0.99), (Metric::P999, 0.999)];

/// Puts the percentiles of fio's that `ios` I/Os can carry into `metrics`.
pub fn percentiles(metrics: &mut Metrics, ios: f64, latency: &Latency) {
    carried(metrics, ios, QUANTILES.map(|(_, quantile)| latency.percentile(100.0 * quantile)));
}

/// Puts those of p50, p90, p99 and p99.9 that `ios` I/Os can carry into `metrics`; nanoseconds.
pub fn carried(metrics: &mut Metrics, ios: f64, values: [Option<f64>; 4]) {
    for ((metric, quantile), value) in QUANTILES.into_iter().zip(values) {
        // 0 is what a tool prints when it has none.
        if let Some(value) = value.filter(|value| *value > 0.0) {
            if ios * (1.0 - quantile) >= BEYOND - 1e-6 {
                metrics.insert(metric, value.into());
            }
        }
    }
}

/// Reads fio's JSON.
pub fn parse(text: &str, job: Job, settings: &Settings) -> Result<Measured> {
    let report = Report::parse(text)?;
    let told = report.first()?;
    let side = told.done(job.write)?;
    let ios = side.total_ios;
    let mut metrics = Metrics::new();
    metrics.insert(Metric::Iops, side.rate()?.into());
    metrics.insert(Metric::Bandwidth, side.bandwidth()?.into());
    // fio's latency of a write is without that of its fsync.
    percentiles(&mut metrics, if job.synced { 0.0 } else { ios }, &side.lat_ns);
    metrics.insert(Metric::ClientCpu, (told.cpu_seconds() / ios * 1e6).into());
    // The server worked through the ramp as well; at the same rate, as far as can be known.
    let ramped = (side.runtime + settings.ramp.as_secs_f64() * 1e3) / side.runtime.max(1.0);
    Ok(Measured {
        metrics,
        ios: Some(ios * ramped),
        asked: Some(side.io_bytes * ramped),
        movement: side.movement(WINDOW),
        ..Measured::default()
    })
}

/// A workload of one job.
pub struct OneJob {
    listed: Listed,
    job: Job,
}

const fn random(
    name: &'static str,
    title: &'static str,
    write: bool,
    depth: u32,
    quick: bool,
) -> OneJob {
    let job = Job { random: true, write, block: 4096, depth, synced: false };
    OneJob { listed: Listed { name, title, group: GROUP, headline: IOPS, quick }, job }
}

const fn sequential(name: &'static str, title: &'static str, write: bool) -> OneJob {
    let headline = &[Metric::Bandwidth];
    let job = Job { random: false, write, block: 1 << 20, depth: 8, synced: false };
    OneJob { listed: Listed { name, title, group: GROUP, headline, quick: false }, job }
}

const GROUP: Option<&str> = Some("fio");
/// The headline of all loads of small blocks.
pub const IOPS: &[Metric] = &[Metric::Iops];

const SYNCED: OneJob = OneJob {
    listed: Listed {
        name: "write-4k-fsync",
        title: "random write, 4 KiB, each with an fsync",
        group: None,
        headline: IOPS,
        quick: false,
    },
    job: Job { random: true, write: true, block: 4096, depth: 1, synced: true },
};

/// fio's.
pub const WORKLOADS: &[&dyn Workload] = &[
    &random("randread-4k-qd1", "random read, 4 KiB, depth 1", false, 1, false),
    &random("randread-4k-qd32", "random read, 4 KiB, depth 32", false, 32, true),
    &random("randwrite-4k-qd1", "random write, 4 KiB, depth 1", true, 1, false),
    &random("randwrite-4k-qd32", "random write, 4 KiB, depth 32", true, 32, true),
    &SYNCED,
    &sequential("read-1m-qd8", "sequential read, 1 MiB, depth 8", false),
    &sequential("write-1m-qd8", "sequential write, 1 MiB, depth 8", true),
];

impl Workload for OneJob {
    fn listed(&self) -> &Listed {
        &self.listed
    }
    fn client(&self) -> Client {
        Client::Job
    }
    fn seconds(&self, settings: &Settings) -> f64 {
        settings.whole() + 0.3
    }
    fn run(&self, machine: &dyn Machine) -> Result<Measured> {
        machine.job(self.job)
    }
    fn writes(&self) -> bool {
        self.job.write
    }
    fn job(&self) -> Option<Job> {
        Some(self.job)
    }
    fn writes_steadily(&self) -> bool {
        self.job.write
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const READ: Job = Job { random: true, write: false, block: 4096, depth: 32, synced: false };

    fn settings(ramp: u64) -> Settings {
        Settings {
            size: 1 << 28,
            run: Duration::from_millis(500),
            ramp: Duration::from_millis(ramp),
            seed: 7,
            capacity: None,
        }
    }

    fn report(error: i64, ios: u64) -> String {
        format!(
            r#"fio: connected to NBD server
{{ "fio version": "fio-3.33", "jobs": [ {{ "error": {error}, "usr_cpu": 9.8, "sys_cpu": 32.6, "job_runtime": 500,
  "read": {{ "io_bytes": 1, "bw": 718051, "bw_bytes": 735284891, "iops": 179512.97, "runtime": 501, "total_ios": {ios},
    "lat_ns": {{ "min": 1, "percentile": {{ "50.000000": 189440, "90.000000": 211968, "99.000000": 234496, "99.900000": 428032 }} }} }},
  "write": {{ "iops": 0, "total_ios": 0, "bw_bytes": 0, "runtime": 0, "lat_ns": {{ "min": 0 }} }} }} ] }}
trailing words"#
        )
    }

    #[test]
    fn reads_past_what_the_engine_says() {
        let measured = parse(&report(0, 100_000), READ, &settings(0)).unwrap();
        let value = |m| measured.metrics[&m].value;
        assert_eq!(value(Metric::Iops), 179_512.97);
        assert_eq!(value(Metric::Bandwidth), 735_284_891.0, "bytes, not fio's bw in KiB");
        assert_eq!(
            [Metric::P50, Metric::P90, Metric::P99, Metric::P999].map(value),
            [189_440.0, 211_968.0, 234_496.0, 428_032.0]
        );
        // 42.4 % of 0.5 s for 0.1 million I/Os.
        assert!((value(Metric::ClientCpu) - 2.12).abs() < 1e-9);
        assert_eq!((measured.ios, measured.movement), (Some(100_000.0), None));
    }

    #[test]
    fn percentiles_need_a_hundred_beyond_them() {
        let measured = parse(&report(0, 99_000), READ, &settings(0)).unwrap();
        assert!(
            measured.metrics.contains_key(&Metric::P99)
                && !measured.metrics.contains_key(&Metric::P999)
        );
        let measured = parse(&report(0, 9_000), READ, &settings(0)).unwrap();
        assert!(
            measured.metrics.contains_key(&Metric::P50)
                && !measured.metrics.contains_key(&Metric::P99)
        );
    }

    #[test]
    fn a_clock_is_named_only_where_fio_would_choose_it() {
        let info =
            |flags: &str| format!("processor\t: 0\nflags\t\t: fpu {flags} avx2\nbugs\t\t:\n");
        assert!(has_steady_clock(&info("constant_tsc rep_good nonstop_tsc")));
        assert!(!has_steady_clock(&info("constant_tsc")) && !has_steady_clock(""));
    }

    #[test]
    fn the_ramp_counts_for_the_server() {
        let measured = parse(&report(0, 100_000), READ, &settings(501)).unwrap();
        assert!((measured.ios.unwrap() - 200_000.0).abs() < 1.0);
    }

    #[test]
    fn errors_and_emptiness_are_not_results() {
        let text = |r: Result<Measured>| r.unwrap_err().to_string();
        assert!(text(parse(&report(28, 5), READ, &settings(0))).contains("No space left"));
        assert!(text(parse(&report(0, 0), READ, &settings(0))).contains("not one I/O"));
        assert!(
            text(parse(&report(0, 5), Job { write: true, ..READ }, &settings(0)))
                .contains("not one I/O")
        );
        assert!(text(parse("fio: bad option", READ, &settings(0))).contains("no {"));
        assert!(text(parse("{\"jobs\": []}", READ, &settings(0))).contains("no jobs"));
        assert!(parse("{\"jobs\": [", READ, &settings(0)).is_err());
    }

    #[test]
    fn a_colon_in_a_path_is_not_a_list_of_files() {
        let args = args(READ, &Target::Path("/a:b/c".into()), &settings(250));
        assert!(args.contains(&"--filename=/a\\:b/c".into()));
        assert!(
            args.contains(&"--ramp_time=250ms".into()) && args.contains(&"--runtime=500ms".into())
        );
    }
}
