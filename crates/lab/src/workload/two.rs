//! Two loads at once: what each gets of the device, and what it does to the other's latency.

use std::time::Duration;

use super::{Measured, Settings};
use crate::error::{Error, Result};
use crate::sample::Metric;

/// What the two do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Writes, or reads.
    pub write: bool,
    /// The first keeps one request in flight, or as many as the second.
    pub quiet: bool,
}

/// Requests that a loud load keeps in flight.
pub const LOUD: u32 = 32;

impl Shape {
    /// Depth of the first and of the second.
    pub fn depths(self) -> (u32, u32) {
        (if self.quiet { 1 } else { LOUD }, LOUD)
    }
}

/// One load's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// I/Os a second.
    pub iops: f64,
    /// I/Os in all.
    pub ios: f64,
    /// 99th percentile of latency, in nanoseconds, where there are I/Os enough.
    pub p99: Option<f64>,
}

/// I/Os that a 99th percentile needs.
const FEWEST: f64 = super::fio::BEYOND / 0.01;
/// A load that is too slow for one within this time has none.
const LONGEST: Duration = Duration::from_secs(6);

/// Reads one job of fio's JSON.
pub fn load(job: &serde_json::Value, write: bool) -> Result<Load> {
    let wrong = |found: String| Error::Output { what: "fio's JSON", found };
    if job["error"].as_i64() != Some(0) {
        return Err(wrong(format!("error {} of job {}", job["error"], job["jobname"])));
    }
    let side = &job[if write { "write" } else { "read" }];
    let ios = side["total_ios"].as_f64().unwrap_or(0.0);
    let iops = side["iops"].as_f64().filter(|iops| *iops > 0.0 && ios > 0.0);
    let iops = iops.ok_or_else(|| wrong(format!("job {} did nothing", job["jobname"])))?;
    // 99.9 % of a starved load's I/Os may be a handful: no percentile then.
    let p99 = side["lat_ns"]["percentile"]["99.000000"]
        .as_f64()
        .filter(|p99| *p99 > 0.0 && ios >= FEWEST);
    Ok(Load { iops, ios, p99 })
}

/// All jobs of fio's JSON, by name.
pub fn jobs(text: &str) -> Result<Vec<serde_json::Value>> {
    let wrong = |found: &str| Error::Output { what: "fio's JSON", found: found.into() };
    let start = text.find('{').ok_or_else(|| wrong("no { in its output"))?;
    let json: serde_json::Value = serde_json::Deserializer::from_str(&text[start..])
        .into_iter()
        .next()
        .and_then(|json| json.ok())
        .ok_or_else(|| wrong("no JSON"))?;
    json["jobs"].as_array().cloned().ok_or_else(|| wrong("no jobs"))
}

/// fio's arguments that all jobs share.
pub fn common_args(shape: Shape, settings: &Settings, ramp: f64) -> Vec<String> {
    let pattern = if shape.write { "randwrite" } else { "randread" };
    vec![
        "--thread".into(),
        "--time_based".into(),
        "--direct=1".into(),
        "--bs=4096".into(),
        format!("--rw={pattern}"),
        format!("--size={}", settings.size),
        format!("--runtime={}ms", settings.run.as_millis()),
        format!("--ramp_time={}ms", (ramp * 1e3) as u64),
        "--norandommap".into(),
        format!("--randseed={}", settings.seed),
        "--lat_percentiles=1".into(),
        "--percentile_list=99".into(),
        "--output-format=json".into(),
    ]
}

/// Runs loads as long as the plan says, and if some then had too few I/Os for a 99th percentile, again for as long as it
/// needs, where that is not too long.
pub fn long_enough(
    settings: &Settings,
    mut run: impl FnMut(&Settings) -> Result<Vec<Load>>,
) -> Result<Vec<Load>> {
    let loads = run(settings)?;
    let least = loads.iter().map(|load| load.ios).fold(f64::INFINITY, f64::min);
    let longer = settings.run.mul_f64((1.2 * FEWEST / least.max(1.0)).max(1.0));
    if least >= FEWEST || longer > LONGEST {
        return Ok(loads);
    }
    run(&Settings { run: longer, ..settings.clone() })
}

/// Puts together what each of the two got alone, and what both got beside each other.
pub fn measured(alone: [Load; 2], beside: [Load; 2], shape: Shape) -> Measured {
    let ([alone, second_alone], [first, second]) = (alone, beside);
    let mut measured = Measured::default();
    let mut put = |metric: Metric, value: f64| {
        measured.metrics.insert(metric, value.into());
    };
    let sum = first.iops + second.iops;
    put(Metric::SumIops, sum);
    put(Metric::AloneIops, alone.iops);
    put(Metric::FirstShare, first.iops / sum);
    put(Metric::Keeps, first.iops / alone.iops);
    // Jain's index says how even two equal loads are; a quiet one does not ask for half.
    if !shape.quiet {
        put(Metric::Jain, jain(&[first.iops, second.iops]));
    }
    if let (Some(beside), Some(alone)) = (first.p99, alone.p99) {
        put(Metric::P99, beside);
        put(Metric::P99Factor, beside / alone);
    }
    put(Metric::SecondKeeps, second.iops / second_alone.iops);
    if let (Some(beside), Some(alone)) = (second.p99, second_alone.p99) {
        put(Metric::SecondP99, beside);
        put(Metric::SecondP99Factor, beside / alone);
    }
    measured
}

/// Jain's index: the square of the sum by n times the sum of squares.
pub fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    if squares == 0.0 { 1.0 } else { sum * sum / (shares.len() as f64 * squares) }
}

/// A log of I/Os by time: (milliseconds since 1970, I/Os a second in the step that ended then).
pub type Log = Vec<(f64, f64)>;
/// Steps of the logs, in milliseconds.
pub const STEP: f64 = 100.0;
/// Less common time than this share of the shorter log is no measurement of two at once.
pub const LEAST_OVERLAP: f64 = 0.6;

/// Reads fio's I/O log (`time, value, direction, size, offset`, a line each).
pub fn log(text: &str) -> Result<Log> {
    text.lines()
        .filter(|line| !line.trim().is_empty())
        .map(|line| {
            let mut fields = line.split(',').map(|field| field.trim().parse::<f64>());
            match (fields.next(), fields.next()) {
                (Some(Ok(time)), Some(Ok(value))) => Ok((time, value)),
                _ => Err(Error::Output { what: "fio's log", found: format!("{line:?}") }),
            }
        })
        .collect()
}

/// Mean rates of two logs over the time that both cover, and that time as a share of the shorter log.
pub fn overlap(one: &Log, two: &Log) -> Option<(f64, f64, f64)> {
    let span = |log: &Log| Some((log.first()?.0 - STEP, log.last()?.0));
    let ((a0, a1), (b0, b1)) = (span(one)?, span(two)?);
    let (from, to) = (a0.max(b0), a1.min(b1));
    let shorter = (a1 - a0).min(b1 - b0);
    if to <= from || shorter <= 0.0 {
        return None;
    }
    let mean = |log: &Log| {
        // A step counts with the part of it that lies in the common time.
        let (mut sum, mut weight) = (0.0, 0.0);
        for (end, value) in log {
            let part = (end.min(to) - (end - STEP).max(from)).max(0.0);
            sum += value * part;
            weight += part;
        }
        (weight > 0.0).then(|| sum / weight)
    };
    Some((mean(one)?, mean(two)?, (to - from) / shorter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jain_of_even_and_of_one_sided() {
        assert_eq!(jain(&[5.0, 5.0]), 1.0);
        assert_eq!(jain(&[5.0, 0.0]), 0.5);
        assert_eq!(jain(&[0.0, 0.0]), 1.0);
    }

    #[test]
    fn shares_and_what_the_quiet_one_keeps() {
        let load = |iops, p99| Load { iops, ios: iops, p99: Some(p99) };
        let shape = Shape { write: false, quiet: true };
        let alone = [load(30_000.0, 50e3), load(80_000.0, 0.5e6)];
        let measured = measured(alone, [load(3000.0, 500e3), load(60_000.0, 1e6)], shape);
        let value = |metric| measured.metrics[&metric].value;
        assert!((value(Metric::Keeps) - 0.1).abs() < 1e-9);
        assert!((value(Metric::P99Factor) - 10.0).abs() < 1e-9);
        assert_eq!(value(Metric::SumIops), 63_000.0);
        assert_eq!((value(Metric::SecondKeeps), value(Metric::SecondP99Factor)), (0.75, 2.0));
        assert_eq!(value(Metric::SecondP99), 1e6);
        assert!(!measured.metrics.contains_key(&Metric::Jain));
    }

    #[test]
    fn a_load_goes_on_until_it_has_a_percentile_but_not_for_ever() {
        let settings = Settings {
            size: 1 << 20,
            run: Duration::from_millis(400),
            ramp: Duration::ZERO,
            seed: 1,
            capacity: None,
        };
        let times = |iops: f64| {
            let mut times = Vec::new();
            let run = |settings: &Settings| {
                times.push(settings.run);
                let load = |iops| Load { iops, ios: iops * settings.run.as_secs_f64(), p99: None };
                Ok(vec![load(100_000.0), load(iops)])
            };
            long_enough(&settings, run).unwrap();
            times
        };
        assert_eq!(times(50_000.0), [settings.run]);
        assert_eq!(times(3000.0), [settings.run, Duration::from_secs(4)]);
        assert_eq!(times(1000.0), [settings.run], "it would take 12 seconds");
    }

    #[test]
    fn only_common_time_counts() {
        // One runs from 0 to 1000, alone and fast until 500; the other from 500 to 1500.
        let one: Log =
            (1..=10).map(|i| (f64::from(i) * 100.0, if i <= 5 { 900.0 } else { 100.0 })).collect();
        let two: Log =
            (6..=15).map(|i| (f64::from(i) * 100.0, if i <= 10 { 300.0 } else { 900.0 })).collect();
        let (a, b, share) = overlap(&one, &two).unwrap();
        assert_eq!((a, b, share), (100.0, 300.0, 0.5));
        assert_eq!(overlap(&one, &vec![(9000.0, 1.0)]), None);
        assert_eq!(overlap(&Log::new(), &two), None);
    }

    #[test]
    fn a_real_log_of_fio() {
        // fio 3.33, --write_iops_log --log_avg_msec=100 --log_unix_epoch=1
        let text = "1795305600123, 41210, 0, 4096, 0\n1795305600223, 40010, 0, 4096, 0\n";
        assert_eq!(log(text).unwrap(), [(1795305600123.0, 41210.0), (1795305600223.0, 40010.0)]);
        assert!(log("fio: error\n").is_err());
    }
}
