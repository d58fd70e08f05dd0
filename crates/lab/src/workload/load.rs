//! `ringtap-lab load`: fio's job over vhost-user, from the host, without a guest. Debian's fio has no vhost-user engine.

use std::path::Path;

use ringtap_load::{Latency, Outcome};

use super::fio::{BEYOND, carried};
use super::job::Job;
use super::two::Load;
use super::{Measured, Settings};
use crate::error::{Error, Result};
use crate::sample::{Metric, Metrics};

/// Less common time than this share is no measurement of loads at once by `ringtap-lab load`: it counts all of its time.
const COMMON: f64 = 0.85;

/// The arguments behind `ringtap`.
pub fn args(job: Job, socket: &Path, settings: &Settings) -> Vec<String> {
    with(["--socket".into(), socket.display().to_string()], job, settings)
}

/// The same for a file, without a server.
pub fn native_args(job: Job, file: &Path, settings: &Settings) -> Vec<String> {
    with(["--native".into(), file.display().to_string()], job, settings)
}

fn with(on: [String; 2], job: Job, settings: &Settings) -> Vec<String> {
    let mut args: Vec<String> = vec!["load".into()];
    args.extend(on);
    args.extend(["--rw".into(), job.pattern().into()]);
    args.extend(["--bs".into(), job.block.to_string()]);
    args.extend(["--depth".into(), job.depth.to_string()]);
    args.extend(["--seconds".into(), settings.run.as_secs_f64().to_string()]);
    args.extend(["--ramp".into(), settings.ramp.as_secs_f64().to_string()]);
    args.extend(["--size".into(), settings.size.to_string()]);
    if job.synced {
        args.extend(["--fsync-every".into(), "1".into()]);
    }
    args.extend(["--output".into(), "json".into()]);
    args
}

/// A load and its measured time, in milliseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timed {
    /// What it got.
    pub load: Load,
    /// Its first and its last moment.
    pub span: (f64, f64),
}

/// Reads its JSON for one of two loads at once.
pub fn timed(text: &str) -> Result<Timed> {
    let outcome = outcome(text)?;
    let Outcome { ended_ms: ended, seconds, iops, .. } = outcome;
    if ended == 0.0 {
        return Err(wrong("it does not say when it ended".into()));
    }
    let (ios, p99) = (outcome.ios as f64, outcome.lat_ns.p99 as f64);
    let p99 = Some(p99).filter(|p99| *p99 > 0.0 && ios * 0.01 >= BEYOND);
    Ok(Timed {
        load: Load { iops, ios, p99, seconds, cpu: outcome.cpu_seconds },
        span: (ended - 1e3 * seconds, ended),
    })
}

/// An error unless nearly all of each load's measured time is that of all the others, too.
pub fn check_common(loads: &[Timed]) -> Result<()> {
    let from = loads.iter().map(|one| one.span.0).fold(f64::NEG_INFINITY, f64::max);
    let to = loads.iter().map(|one| one.span.1).fold(f64::INFINITY, f64::min);
    let longest = loads.iter().map(|one| one.span.1 - one.span.0).fold(0.0, f64::max);
    if to - from >= COMMON * longest {
        return Ok(());
    }
    Err(wrong(format!(
        "the loads had only {:.0} % of their time in common: longer --seconds help",
        100.0 * ((to - from) / longest).max(0.0)
    )))
}

fn wrong(found: String) -> Error {
    Error::Output { what: "the JSON of ringtap-lab load", found }
}

fn outcome(text: &str) -> Result<Outcome> {
    let start = text.find('{').ok_or_else(|| wrong("no { in its output".into()))?;
    let outcome: Outcome =
        serde_json::from_str(text[start..].trim()).map_err(|e| wrong(e.to_string()))?;
    if outcome.errors > 0 {
        let first = outcome.first_error.unwrap_or_else(|| "not said which".into());
        return Err(wrong(format!("{} requests failed, the first: {first}", outcome.errors)));
    }
    if outcome.ios == 0 {
        return Err(wrong("not one I/O was done in the time measured".into()));
    }
    Ok(outcome)
}

/// Reads its JSON.
pub fn parse(text: &str) -> Result<Measured> {
    let outcome = outcome(text)?;
    let (mut metrics, ios) = (Metrics::new(), outcome.ios as f64);
    metrics.insert(Metric::Iops, outcome.iops.into());
    metrics.insert(Metric::Bandwidth, outcome.bw_bytes.into());
    metrics.insert(Metric::ClientCpu, (outcome.cpu_seconds / ios * 1e6).into());
    let Latency { p50, p90, p99, p999, .. } = outcome.lat_ns;
    carried(&mut metrics, ios, [p50, p90, p99, p999].map(|percentile| Some(percentile as f64)));
    let all = outcome.total_ios as f64;
    Ok(Measured {
        metrics,
        ios: Some(all),
        // In the ramp as well.
        asked: Some(outcome.bytes as f64 / ios * all),
        ..Measured::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(ios: u64, errors: u64) -> String {
        let latency =
            r#"{"p50": 100, "p90": 150, "p99": 200, "p999": 300, "max": 400, "mean": 110.0}"#;
        format!(
            r#"{{"driver": "virtio", "target": "a", "rw": "randread", "bs": 4096, "depth": 1, "queues": 1,
            "seconds": 0.5, "ended_ms": 1000500.0, "bytes": {}, "ios": {ios}, "iops": 90000.5, "bw_bytes": 368642048.0,
            "cpu_seconds": 0.25, "errors": {errors}, "lat_ns": {latency}, "flushes": 0, "flush_lat_ns": {latency},
            "total_ios": 60000, "total_writes": 0}}"#,
            ios * 4096
        )
    }

    #[test]
    fn reads_numbers_and_counts_the_ramp_for_the_server() {
        let measured = parse(&text(50_000, 0)).unwrap();
        assert_eq!(measured.metrics[&Metric::Iops].value, 90_000.5);
        assert_eq!(measured.metrics[&Metric::ClientCpu].value, 5.0);
        assert_eq!(measured.metrics[&Metric::P90].value, 150.0);
        assert_eq!(measured.metrics[&Metric::P99].value, 200.0);
        assert!(!measured.metrics.contains_key(&Metric::P999), "50 I/Os beyond it are too few");
        assert_eq!(measured.ios, Some(60_000.0));
        assert_eq!(measured.asked, Some(60_000.0 * 4096.0), "for the ledger");
    }

    #[test]
    fn loads_at_once_have_their_time_in_common() {
        let one = timed(&text(50_000, 0)).unwrap();
        assert_eq!((one.span, one.load.ios), ((1_000_000.0, 1_000_500.0), 50_000.0));
        assert_eq!(one.load.p99, Some(200.0));
        assert_eq!(timed(&text(9_999, 0)).unwrap().load.p99, None);
        let later = |ms: f64| Timed { span: (one.span.0 + ms, one.span.1 + ms), ..one };
        assert!(check_common(&[one]).is_ok() && check_common(&[one, later(40.0)]).is_ok());
        let error = check_common(&[one, later(250.0)]).unwrap_err().to_string();
        assert!(error.contains("only 50 %"), "{error}");
        assert!(check_common(&[one, later(-9000.0)]).is_err());
    }

    #[test]
    fn failed_requests_are_no_result() {
        assert!(parse(&text(50_000, 3)).unwrap_err().to_string().contains("3 requests failed"));
        assert!(parse(&text(0, 0)).is_err() && parse("connection refused").is_err());
    }
}
