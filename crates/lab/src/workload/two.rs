//! Two loads at once: what each gets of the device, and what it does to the other's latency.

use std::time::Duration;

use ringtap_guest::fio::Job;

use super::{Client, Listed, Measured, Settings, Workload};
use crate::env::{Env, Missing};
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

/// Bytes of one I/O.
pub const BLOCK: f64 = 4096.0;
/// Requests that a loud load keeps in flight.
pub const LOUD: u32 = 32;

impl Shape {
    /// Depth of the first and of the second.
    pub fn depths(self) -> (u32, u32) {
        (if self.quiet { 1 } else { LOUD }, LOUD)
    }
}

/// One load's result.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// I/Os a second.
    pub iops: f64,
    /// I/Os in all.
    pub ios: f64,
    /// 99th percentile of latency, in nanoseconds, where there are I/Os enough.
    pub p99: Option<f64>,
    /// How long it was measured, in seconds.
    pub seconds: f64,
    /// CPU seconds of the tool meanwhile, by its own account.
    pub cpu: f64,
}

/// I/Os that a 99th percentile needs.
const FEWEST: f64 = super::fio::BEYOND / 0.01;
/// A load that is too slow for one within this time has none.
const LONGEST: Duration = Duration::from_secs(6);

/// Reads one job of fio's JSON.
pub fn load(job: &Job, write: bool) -> Result<Load> {
    let side = job.done(write)?;
    // 99.9 % of a starved load's I/Os may be a handful: no percentile then.
    let p99 = side.lat_ns.percentile(99.0).filter(|_| side.total_ios >= FEWEST);
    let (ios, seconds, cpu) = (side.total_ios, side.runtime / 1e3, job.cpu_seconds());
    Ok(Load { iops: side.rate()?, ios, p99, seconds, cpu })
}

/// fio's arguments that all jobs share.
pub fn common_args(shape: Shape, settings: &Settings, ramp: f64) -> Vec<String> {
    let pattern = if shape.write { "randwrite" } else { "randread" };
    vec![
        "--thread".into(),
        "--time_based".into(),
        "--direct=1".into(),
        format!("--bs={BLOCK}"),
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

/// What each of two loads gives alone, and what both give at once. Whoever comes first finds caches cold and the disk
/// fresh, so the order is the other way round in every other round.
pub fn in_turn<T>(
    round: u32,
    mut measure: impl FnMut(&[usize]) -> Result<T>,
) -> Result<([T; 2], T)> {
    if round % 2 == 0 {
        let alone = [measure(&[0])?, measure(&[1])?];
        return Ok((alone, measure(&[0, 1])?));
    }
    let both = measure(&[0, 1])?;
    let second = measure(&[1])?;
    Ok(([measure(&[0])?, second], both))
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

/// Counts the I/Os of loads at once that began `ramp` seconds before they were measured, and the CPU of their tools, for
/// the cost.
pub fn count(measured: &mut Measured, loads: &[Load], ramp: f64) {
    let (mut ios, mut cpu) = (0.0, 0.0);
    for load in loads.iter().filter(|load| load.seconds > 0.0) {
        let ramped = (load.seconds + ramp) / load.seconds;
        ios += load.ios * ramped;
        cpu += load.cpu * ramped;
    }
    if ios > 0.0 {
        measured.ios = Some(ios);
        measured.asked = Some(ios * BLOCK);
        measured.metrics.insert(Metric::ClientCpu, (cpu / ios * 1e6).into());
    }
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

/// What two logs have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Common {
    /// Mean rate of each.
    pub rates: (f64, f64),
    /// From when to when, in milliseconds.
    pub span: (f64, f64),
    /// That time as a share of the shorter log.
    pub share: f64,
}

/// The time that two logs both cover.
pub fn overlap(one: &Log, two: &Log) -> Option<Common> {
    let span = |log: &Log| Some((log.first()?.0 - STEP, log.last()?.0));
    let ((a0, a1), (b0, b1)) = (span(one)?, span(two)?);
    let (from, to) = (a0.max(b0), a1.min(b1));
    let shorter = (a1 - a0).min(b1 - b0);
    if to <= from || shorter <= 0.0 {
        return None;
    }
    let rates = (mean(one, from, to)?, mean(two, from, to)?);
    Some(Common { rates, span: (from, to), share: (to - from) / shorter })
}

/// A log's mean rate within a time. A step counts with the part of it that lies in that time.
pub fn mean(log: &Log, from: f64, to: f64) -> Option<f64> {
    let (mut sum, mut weight) = (0.0, 0.0);
    for (end, value) in log {
        let part = (end.min(to) - (end - STEP).max(from)).max(0.0);
        sum += value * part;
        weight += part;
    }
    (weight > 0.0).then(|| sum / weight)
}

/// A workload of two loads.
pub struct Two {
    listed: Listed,
    shape: Shape,
}

const fn both(name: &'static str, title: &'static str, write: bool, quiet: bool) -> Two {
    let (group, headline): (_, &[Metric]) = match quiet {
        false => (Some("contention"), &[Metric::SumIops, Metric::Jain]),
        true => (Some("contention"), &[Metric::Keeps, Metric::P99Factor]),
    };
    let listed = Listed { name, title, group, headline, quick: true };
    Two { listed, shape: Shape { write, quiet } }
}

/// Two loads at once.
pub const WORKLOADS: &[&dyn Workload] = &[
    &both("two-read", "two loads, random read, 4 KiB, depth 32 each", false, false),
    &both("two-write", "two loads, random write, 4 KiB, depth 32 each", true, false),
    &both("quiet-read", "random read, 4 KiB, depth 1 beside depth 32", false, true),
    &both("quiet-write", "random write, 4 KiB, depth 1 beside depth 32", true, true),
];

impl Workload for Two {
    fn listed(&self) -> &Listed {
        &self.listed
    }
    fn client(&self) -> Client {
        Client::Two
    }
    /// Each alone and both, longer where a percentile needs it.
    fn seconds(&self, settings: &Settings) -> f64 {
        3.0 * settings.whole() + if self.shape.quiet { 3.0 } else { 1.0 }
    }
    fn missing(&self, env: &Env) -> Option<Missing> {
        env.program("fio", "fio")
    }
    fn writes(&self) -> bool {
        self.shape.write
    }
    fn shape(&self) -> Option<Shape> {
        Some(self.shape)
    }
    fn writes_steadily(&self) -> bool {
        self.shape.write
    }
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
        let load = |iops, p99| Load { iops, ios: iops, p99: Some(p99), ..Load::default() };
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
    fn each_comes_first_in_one_round_of_two() {
        for (round, order) in [(0, [&[0][..], &[1], &[0, 1]]), (3, [&[0, 1], &[1], &[0]])] {
            let mut seen = Vec::new();
            let ran = in_turn(round, |which| {
                seen.push(which.to_vec());
                Ok(which.to_vec())
            });
            assert_eq!(ran.unwrap(), ([vec![0], vec![1]], vec![0, 1]));
            assert_eq!(seen, order);
        }
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
                let ios = |iops| iops * settings.run.as_secs_f64();
                let load = |iops| Load { iops, ios: ios(iops), ..Load::default() };
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
        let common = overlap(&one, &two).unwrap();
        let Common { rates, span, share } = common;
        assert_eq!((rates, span, share), ((100.0, 300.0), (500.0, 1000.0), 0.5));
        assert_eq!(mean(&one, 450.0, 550.0), Some(500.0), "half of a step counts half");
        assert_eq!(overlap(&one, &vec![(9000.0, 1.0)]), None);
        assert_eq!(overlap(&Log::new(), &two), None);
    }

    #[test]
    fn both_loads_cpu_is_by_the_ios_of_both() {
        let load = |ios: f64, cpu| Load { iops: ios, ios, seconds: 1.0, cpu, ..Load::default() };
        let mut measured = Measured::default();
        // A ramp of half a second before the second that was measured: both worked through it.
        count(&mut measured, &[load(900.0, 0.5), load(100.0, 0.1)], 0.5);
        assert_eq!((measured.ios, measured.asked), (Some(1500.0), Some(1500.0 * 4096.0)));
        let cpu = measured.metrics[&Metric::ClientCpu].value;
        assert!((cpu - 0.6 / 1000.0 * 1e6).abs() < 1e-6, "{cpu}");
    }

    #[test]
    fn a_real_log_of_fio() {
        // fio 3.33, --write_iops_log --log_avg_msec=100 --log_unix_epoch=1
        let text = "1795305600123, 41210, 0, 4096, 0\n1795305600223, 40010, 0, 4096, 0\n";
        assert_eq!(log(text).unwrap(), [(1795305600123.0, 41210.0), (1795305600223.0, 40010.0)]);
        assert!(log("fio: error\n").is_err());
    }
}
