//! From samples to medians, ratios and verdicts, as text or JSON.

use crate::arms::{Arm, Kind};
use crate::experiment::{Failure, Results, Sample};
use crate::goals::{Goal, Metric};
use crate::lines::Line;
use ringtap_lab::stats::medians::{LEAST_ROUNDS, Ratio, median};
use serde::Serialize;
use std::fmt;

/// Everything about one experiment.
#[derive(Debug, Serialize)]
pub struct Report {
    /// `vhost-user` or `NBD`, and on what.
    pub title: String,
    /// The conditions: client, machine, versions.
    pub conditions: Vec<String>,
    /// One section per workload.
    pub lines: Vec<Section>,
    /// Every measurement.
    pub samples: Vec<Sample>,
    /// What could not be measured.
    pub failures: Vec<Failure>,
}

/// One workload.
#[derive(Debug, Serialize)]
pub struct Section {
    /// The workload.
    pub line: Line,
    /// One row per arm.
    pub rows: Vec<Row>,
    /// What had to be reached.
    pub goals: Vec<Verdict>,
}

/// One arm on one workload: medians over the rounds.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Name of the arm.
    pub arm: String,
    /// What kind it is.
    pub kind: Kind,
    /// Why there are no numbers.
    pub missing: Option<String>,
    /// Rounds measured.
    pub rounds: usize,
    /// Requests per second.
    pub iops: f64,
    /// Median, 99 % and 99.9 % latency in nanoseconds; NaN (null) if the client tells none.
    pub lat_ns: [f64; 3],
    /// CPU seconds of the server per million requests; NaN (null) without a server.
    pub server_cpu: f64,
    /// CPU seconds of the client per million requests.
    pub client_cpu: f64,
    /// The Ringtap arm this one is compared with.
    pub rival: &'static str,
    /// Ringtap's rate / this one's.
    pub rate_ratio: Option<Ratio>,
    /// Ringtap's server CPU per request / this one's.
    pub cpu_ratio: Option<Ratio>,
}

/// A goal and how it went.
#[derive(Debug, Serialize)]
pub struct Verdict {
    /// The goal.
    #[serde(flatten)]
    pub goal: Goal,
    /// The best peer; none if there was no number to compare.
    pub peer: Option<String>,
    /// Ringtap / that peer.
    pub ratio: Option<Ratio>,
    /// Good enough; none if there was no number to compare.
    pub reached: Option<bool>,
}

impl Report {
    /// Works out medians, ratios and verdicts.
    pub fn new(
        title: String,
        conditions: Vec<String>,
        arms: &[Arm],
        lines: &[Line],
        results: Results,
        goals: impl Fn(&Line) -> Vec<Goal>,
    ) -> Report {
        let section = |line: &Line| {
            let rows: Vec<Row> =
                arms.iter().map(|arm| Row::new(arm, line, arms, &results)).collect();
            let goals = goals(line).into_iter().map(|goal| Verdict::of(goal, &rows)).collect();
            Section { line: line.clone(), rows, goals }
        };
        let lines = lines.iter().map(section).collect();
        Report { title, conditions, lines, samples: results.samples, failures: results.failures }
    }
}

fn rate(sample: &Sample) -> f64 {
    sample.measured.iops
}

fn server_cpu(sample: &Sample) -> f64 {
    sample.server_cpu_per_request.unwrap_or(f64::NAN) * 1e6
}

impl Row {
    fn new(arm: &Arm, line: &Line, arms: &[Arm], results: &Results) -> Row {
        let of = |name: &str| -> Vec<&Sample> {
            let samples = results.samples.iter();
            samples.filter(|s| s.arm == name && s.line == line.name).collect()
        };
        let own = of(&arm.name);
        let middle = |value: &dyn Fn(&Sample) -> f64| {
            median(&own.iter().map(|sample| value(sample)).collect::<Vec<_>>())
        };
        let latency = |pick: fn(&ringtap_load::Latency) -> u64| {
            middle(&|s: &Sample| {
                s.measured.lat_ns.as_ref().map_or(f64::NAN, |lat| pick(lat) as f64)
            })
        };
        let compared = arm.kind != Kind::Ringtap && arms.iter().any(|a| a.name == arm.rival);
        let rival = if compared { of(arm.rival) } else { Vec::new() };
        let failure = results.failures.iter().find(|f| f.arm == arm.name && f.line == line.name);
        Row {
            arm: arm.name.clone(),
            kind: arm.kind,
            missing: failure.map(|f| f.reason.clone()),
            rounds: own.len(),
            iops: middle(&rate),
            lat_ns: [latency(|l| l.p50), latency(|l| l.p99), latency(|l| l.p999)],
            server_cpu: middle(&server_cpu),
            client_cpu: middle(&|s: &Sample| s.measured.client_cpu_per_request * 1e6),
            rival: arm.rival,
            rate_ratio: paired(&rival, &own, rate),
            cpu_ratio: paired(&rival, &own, server_cpu),
        }
    }
}

/// The ratio over the rounds that both have.
fn paired(ours: &[&Sample], theirs: &[&Sample], value: fn(&Sample) -> f64) -> Option<Ratio> {
    let (ours, theirs): (Vec<f64>, Vec<f64>) = ours
        .iter()
        .filter_map(|a| {
            let b = theirs.iter().find(|b| b.round == a.round)?;
            Some((value(a), value(b)))
        })
        .unzip();
    Ratio::of_rounds(&ours, &theirs)
}

impl Verdict {
    /// Against the peer that does best at what the goal compares.
    fn of(goal: Goal, rows: &[Row]) -> Verdict {
        let value = |row: &Row| match goal.metric {
            Metric::Rate => (row.iops, row.rate_ratio),
            Metric::ServerCpu => (-row.server_cpu, row.cpu_ratio),
        };
        let best = rows
            .iter()
            .filter(|row| goal.against.contains(&row.kind) && value(row).1.is_some())
            .max_by(|a, b| value(a).0.total_cmp(&value(b).0));
        let ratio = best.and_then(|row| value(row).1);
        Verdict {
            peer: best.map(|row| row.arm.clone()),
            reached: ratio.map(|ratio| goal.reached(ratio.value)),
            ratio,
            goal,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "## {}", self.title)?;
        for condition in &self.conditions {
            writeln!(f, "{condition}")?;
        }
        for section in &self.lines {
            writeln!(f, "\n{section}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<24} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8}   {:<22} CPU ratio",
            self.line.name,
            "IOPS",
            "p50 µs",
            "p99",
            "p99.9",
            "srv s/M",
            "cli s/M",
            "Ringtap / this [95 %]"
        )?;
        for row in &self.rows {
            writeln!(f, "{row}")?;
        }
        for verdict in &self.goals {
            writeln!(f, "  {verdict}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  {:<22}", self.arm)?;
        if let Some(reason) = &self.missing {
            return write!(f, " not measured: {reason}");
        }
        write!(f, " {:>9.0}", self.iops)?;
        for ns in self.lat_ns {
            write!(f, " {:>8}", number(ns / 1e3))?;
        }
        write!(f, " {:>8} {:>8}", number(self.server_cpu), number(self.client_cpu))?;
        let ratio = |ratio: Option<Ratio>| ratio.map_or("-".to_string(), show);
        if self.kind != Kind::Ringtap {
            write!(f, "   {:<22} {}", ratio(self.rate_ratio), ratio(self.cpu_ratio))?;
        }
        if self.rounds < LEAST_ROUNDS {
            write!(f, "  ({} rounds)", self.rounds)?;
        }
        Ok(())
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, sign) = match self.goal.metric {
            Metric::Rate => ("rate", '≥'),
            Metric::ServerCpu => ("server CPU", '≤'),
        };
        let word = match (self.reached, self.goal.aim) {
            (None, _) => "OPEN",
            (Some(true), _) => "reached",
            (Some(false), true) => "short of the aim",
            (Some(false), false) => "NOT REACHED",
        };
        write!(f, "{word}: {what} {sign} {} × ", (self.goal.bound * 100.0).round() / 100.0)?;
        match (&self.peer, self.ratio) {
            (Some(peer), Some(ratio)) => write!(f, "{peer}: {}", show(ratio)),
            _ => write!(f, "the best of {:?}: nothing to compare", self.goal.against),
        }
    }
}

/// A ratio and its interval, where it has one.
pub fn show(ratio: Ratio) -> String {
    match ratio.interval {
        Some((low, high)) => format!("{:.2} [{low:.2}, {high:.2}]", ratio.value),
        None => format!("{:.2}", ratio.value),
    }
}

fn number(value: f64) -> String {
    match value {
        v if v.is_nan() => "-".into(),
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 1000.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// Machine and programs, for the head of the report.
pub fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let info = read("/proc/cpuinfo");
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    let kernel = read("/proc/sys/kernel/osrelease");
    let (model, kernel) = (model.unwrap_or("unknown"), kernel.trim());
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().unwrap_or_default();
    format!("Machine: {cpus} CPUs ({model}), Linux {kernel}, load average {load}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Measured;
    use crate::lines::usual;
    use ringtap_lab::process::launch::Launch;
    use std::path::Path;

    fn arm(name: &str, kind: Kind) -> Arm {
        let launch = Launch::new("sh", [""; 0]);
        Arm::server(name, kind, "ringtap", Path::new("s"), launch)
    }

    fn sample(round: usize, arm: &str, iops: f64, cpu: f64) -> Sample {
        Sample {
            round,
            line: usual()[0].name.clone(),
            arm: arm.into(),
            measured: Measured {
                iops,
                lat_ns: Some(ringtap_load::Latency { p50: 10_000, ..Default::default() }),
                requests: 1000,
                client_cpu_per_request: 1e-6,
            },
            server_cpu_per_request: Some(cpu),
            server_memory: None,
        }
    }

    fn report() -> Report {
        let arms = [
            arm("ringtap", Kind::Ringtap),
            arm("slow", Kind::Qemu),
            arm("fast", Kind::Qemu),
            arm("gone", Kind::Qemu),
        ];
        let mut results = Results::default();
        for round in 0..6 {
            let load = 1.0 + round as f64;
            results.samples.extend([
                sample(round, "ringtap", 300.0 * load, 1e-6),
                sample(round, "slow", 100.0 * load, 2e-6),
                sample(round, "fast", 200.0 * load, 4e-6),
            ]);
        }
        // A round that only one of them has must not shift the pairs.
        results.samples.remove(0);
        let line = usual()[0].name.clone();
        let reason = "no such program".to_string();
        results.failures.push(Failure { line, arm: "gone".into(), reason });
        let lines = [usual()[0].clone()];
        let goals = |_: &Line| {
            vec![
                Goal { against: vec![Kind::Qemu], metric: Metric::Rate, bound: 1.6, aim: false },
                Goal {
                    against: vec![Kind::Qemu],
                    metric: Metric::ServerCpu,
                    bound: 0.5,
                    aim: false,
                },
                Goal { against: vec![Kind::Native], metric: Metric::Rate, bound: 1.0, aim: false },
            ]
        };
        Report::new("test".into(), vec![], &arms, &lines, results, goals)
    }

    #[test]
    fn ratios_pair_rounds_and_goals_take_the_best_peer() {
        let report = report();
        let section = &report.lines[0];
        assert!((section.rows[2].rate_ratio.unwrap().value - 1.5).abs() < 1e-9);
        assert!((section.rows[1].rate_ratio.unwrap().value - 3.0).abs() < 1e-9);
        assert!(section.rows[0].rate_ratio.is_none());
        let verdict = |i: usize| (section.goals[i].peer.as_deref(), section.goals[i].reached);
        assert_eq!(verdict(0), (Some("fast"), Some(false)));
        assert_eq!(verdict(1), (Some("slow"), Some(true)));
        assert_eq!(verdict(2), (None, None));
    }

    #[test]
    fn text_and_json_tell_what_was_not_reached() {
        let report = report();
        let text = report.to_string();
        assert!(text.contains("NOT REACHED: rate ≥ 1.6 × fast"), "{text}");
        assert!(text.contains("reached: server CPU ≤ 0.5 × slow"), "{text}");
        assert!(text.contains("not measured: no such program"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["lines"][0]["goals"][0]["reached"], false);
        assert_eq!(json["samples"].as_array().unwrap().len(), 17);
    }
}
