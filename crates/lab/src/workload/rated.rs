//! A load that keeps to a schedule, as clients of a real server do: a request is due every so often whether or not the
//! last one is back. fio starts its clock when it sends a request, and sends late when it was held up; here latency is
//! counted from when the request was due.

use std::time::Duration;

use ringtap_guest::fio::Report;

use super::fio::{BEYOND, percentiles};
use super::job::{Job, Target};
use super::machine::Machine;
use super::{Client, Listed, Measured, Settings, Workload};
use crate::error::Result;
use crate::sample::Metric;
use crate::workload::two;

/// What is written, and how much of it may be in flight: random 4 KiB. The same measures what a backend carries.
pub const JOB: Job = Job { random: true, write: true, block: 4096, depth: 32, synced: false };
/// How long that is measured.
pub const CAPACITY_TIME: Duration = Duration::from_millis(500);
/// Where nothing is known of the backends' capacity.
const USUAL: f64 = 2000.0;
/// Fewer requests a second than this are no load.
const LEAST: f64 = 20.0;
/// Between two answers so much time is a stall.
pub const STALL: f64 = 100e6;

/// Requests a second that are due: a share of what the slowest backend of the stage carries, so that all get the same.
pub fn rate(percent: u32, settings: &Settings) -> f64 {
    let capacity = settings.capacity.unwrap_or(USUAL);
    (capacity * f64::from(percent) / 100.0).floor().max(LEAST)
}

/// The load that finds out what a backend carries.
pub fn capacity_settings(settings: &Settings) -> Settings {
    Settings { run: CAPACITY_TIME, ramp: Duration::from_millis(100), ..settings.clone() }
}

/// fio's arguments; its log of latencies goes to `log` (fio puts `_lat.1.log` behind it).
pub fn args(target: &Target, log: &str, percent: u32, settings: &Settings) -> Vec<String> {
    let rate = rate(percent, settings);
    let mut args = vec!["--name=rated".to_owned(), "--thread".into(), "--time_based".into()];
    args.extend(target.args("io_uring"));
    args.extend([
        "--rw=randwrite".into(),
        "--bs=4096".into(),
        "--iodepth=32".into(),
        format!("--rate_iops={rate}"),
        format!("--size={}", settings.size),
        format!("--runtime={}ms", settings.run.as_millis()),
        "--norandommap".into(),
        format!("--randseed={}", settings.seed),
        "--lat_percentiles=1".into(),
        "--percentile_list=50:90:99:99.9".into(),
        format!("--write_lat_log={log}"),
        // Times of this machine's or the guest's clock: what other layers did then can be found.
        "--log_unix_epoch=1".into(),
        "--output-format=json".into(),
    ]);
    args
}

/// The name of the log that fio writes.
pub fn log_file(log: &str) -> String {
    format!("{log}_lat.1.log")
}

/// fio's own percentiles from its JSON, and those against the schedule from its log (`ms, ns, …` a line, in the order of
/// completion). The clock of the log is `ahead_ms` ahead of this machine's.
pub fn parse(
    json: &str,
    log: &str,
    percent: u32,
    settings: &Settings,
    ahead_ms: f64,
) -> Result<Measured> {
    let rate = rate(percent, settings);
    let report = Report::parse(json)?;
    let job = report.first()?;
    let load = two::load(job, true)?;
    let log = two::log(log)?;
    let mut measured = Measured {
        ios: Some(job.write.total_ios),
        asked: Some(job.write.io_bytes),
        ..Measured::default()
    };
    measured.metrics.insert(Metric::Iops, load.iops.into());
    measured.metrics.insert(Metric::ClientCpu, (load.cpu / load.ios * 1e6).into());
    percentiles(&mut measured.metrics, log.len() as f64, &job.write.lat_ns);
    let mut back: Vec<f64> = log.iter().map(|(back_ms, _)| *back_ms).collect();
    back.sort_by(f64::total_cmp);
    measured.metrics.insert(Metric::LongestGap, longest_gap(&back).into());
    measured.gaps = gaps(&back).map(|(from, to)| (from - ahead_ms, to - ahead_ms)).collect();
    let mut late = from_schedule(&log, rate);
    late.sort_by(f64::total_cmp);
    for (metric, quantile) in [
        (Metric::ScheduleP50, 0.5),
        (Metric::ScheduleP90, 0.9),
        (Metric::ScheduleP99, 0.99),
        (Metric::ScheduleP999, 0.999),
    ] {
        let beyond = late.len() as f64 * (1.0 - quantile);
        if beyond >= BEYOND - 1e-6 || (quantile == 0.99 && beyond >= 10.0) {
            let at = ((late.len() as f64 * quantile) as usize).min(late.len().saturating_sub(1));
            if let Some(value) = late.get(at) {
                measured.metrics.insert(metric, (*value).into());
            }
        }
    }
    let of = settings.capacity.map_or_else(
        || "the slowest backend's capacity is not known".to_owned(),
        |capacity| format!("{percent} % of what the slowest backend carries ({capacity:.0})"),
    );
    measured.note = Some(format!(
        "{rate} writes a second were due: {of}; latency from the schedule has steps of 1 ms"
    ));
    Ok(measured)
}

/// The longest time without an answer, in nanoseconds.
fn longest_gap(back: &[f64]) -> f64 {
    back.windows(2).map(|pair| (pair[1] - pair[0]) * 1e6).fold(0.0, f64::max)
}

/// Times without an answer that count as stalls: from, to.
fn gaps(back: &[f64]) -> impl Iterator<Item = (f64, f64)> {
    let stalled = |pair: &&[f64]| (pair[1] - pair[0]) * 1e6 > STALL;
    back.windows(2).filter(stalled).map(|pair| (pair[0], pair[1]))
}

/// For each request the time from when it was due until it was back, in nanoseconds. The schedule begins with the
/// request that was sent most promptly: what all requests have in common is no delay.
fn from_schedule(log: &two::Log, rate: f64) -> Vec<f64> {
    // Sent = back less latency. fio's times are whole milliseconds.
    let mut requests: Vec<(f64, f64)> =
        log.iter().map(|(back_ms, latency_ns)| (back_ms * 1e6 - latency_ns, *latency_ns)).collect();
    requests.sort_by(|a, b| a.0.total_cmp(&b.0));
    let due = |at: usize| at as f64 * 1e9 / rate;
    let begin = requests
        .iter()
        .enumerate()
        .map(|(at, (sent, _))| sent - due(at))
        .fold(f64::INFINITY, f64::min);
    requests
        .iter()
        .enumerate()
        .map(|(at, (sent, latency))| (sent - begin - due(at)).max(0.0) + latency)
        .collect()
}

/// A workload by schedule, at that many percent of what the slowest backend carries.
pub struct Rated {
    listed: Listed,
    percent: u32,
}

const fn at(name: &'static str, title: &'static str, percent: u32) -> Rated {
    let (group, headline) = (Some("rated"), &[Metric::ScheduleP99]);
    Rated { listed: Listed { name, title, group, headline, quick: false }, percent }
}

/// Those by schedule.
pub const WORKLOADS: &[&dyn Workload] = &[
    &at("rated-50", "random write, 4 KiB, by schedule at 50 % of the slowest one's capacity", 50),
    &at("rated-80", "random write, 4 KiB, by schedule at 80 % of the slowest one's capacity", 80),
];

impl Workload for Rated {
    fn listed(&self) -> &Listed {
        &self.listed
    }
    fn client(&self) -> Client {
        Client::Fio
    }
    fn seconds(&self, settings: &Settings) -> f64 {
        settings.whole() + 0.3
    }
    fn run(&self, machine: &dyn Machine) -> Result<Measured> {
        let (target, settings) = (machine.target(), machine.settings());
        let said = machine.logged(&|log| args(&target, log, self.percent, settings))?;
        parse(&said.json, &said.log, self.percent, settings, said.ahead_ms)
    }
    fn is_rated(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: f64 = 2000.0;

    #[test]
    fn the_rate_is_a_share_of_the_slowest_ones_capacity() {
        let settings = |capacity| Settings {
            size: 1 << 30,
            run: Duration::from_secs(1),
            ramp: Duration::ZERO,
            seed: 1,
            capacity,
        };
        assert_eq!(rate(80, &settings(Some(1000.5))), 800.0);
        assert_eq!(rate(50, &settings(Some(3.0))), LEAST);
        let words = args(&Target::Path("/x".into()), "/log", 50, &settings(Some(5000.0)));
        assert!(words.contains(&"--rate_iops=2500".to_owned()), "{words:?}");
    }

    #[test]
    fn a_stall_is_the_longest_time_without_an_answer() {
        let back = [0.0, 1.0, 3.0, 103.0, 250.0];
        assert_eq!((longest_gap(&back), longest_gap(&[])), (147e6, 0.0));
        assert_eq!(gaps(&back).collect::<Vec<_>>(), [(103.0, 250.0)], "100 ms are none yet");
    }

    #[test]
    fn a_stall_is_seen_from_the_schedule_and_not_by_the_sender() {
        // A request every 0.5 ms, each takes 0.1 ms; at 1 s the sender stalls for 1 s and then sends the missed ones at
        // once, each of which takes 0.1 ms as well.
        let log: two::Log = (0..8000)
            .map(|i| {
                let due = f64::from(i) * 0.5;
                let sent = if (1000.0..2000.0).contains(&due) { 2000.0 } else { due };
                ((sent + 0.1).floor(), 0.1e6)
            })
            .collect();
        let mut late = from_schedule(&log, RATE);
        late.sort_by(f64::total_cmp);
        let p = |q: f64| late[(late.len() as f64 * q) as usize] / 1e6;
        assert!(p(0.5) < 2.0, "{}", p(0.5));
        assert!((p(0.99) - 960.0).abs() < 40.0, "{}", p(0.99));
    }

    #[test]
    fn a_prompt_sender_is_not_late() {
        let log: two::Log =
            (0..4000).map(|i| ((f64::from(i) * 0.5 + 0.2).floor(), 0.2e6)).collect();
        let late = from_schedule(&log, RATE);
        assert!(late.iter().all(|ns| *ns < 1.8e6), "within the log's millisecond");
    }
}
