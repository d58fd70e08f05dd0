//! Rounds: every arm once per line and round, in an order that rotates.

use crate::arms::{Arm, Kind};
use crate::client::{Client, Measured, Run};
use crate::image::{settle, wait_unlocked};
use crate::lines::Line;
use crate::{cpu, interrupt, memory};
use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use ringtap_lab::process::launch::Process;
use serde::Serialize;
use std::path::Path;
use std::time::Duration;

/// The longest that making an image may take.
const PREPARATION: Duration = Duration::from_secs(120);

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// From 0.
    pub round: usize,
    /// Name of the workload.
    pub line: String,
    /// Name of the arm.
    pub arm: String,
    /// What the client saw.
    #[serde(flatten)]
    pub measured: Measured,
    /// CPU seconds of the server's processes per request; none without a server.
    pub server_cpu_per_request: Option<f64>,
    /// The most bytes of resident memory that the server has had; none without a server.
    pub server_memory: Option<u64>,
}

/// An arm that could not be measured on a line.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    /// Name of the workload.
    pub line: String,
    /// Name of the arm.
    pub arm: String,
    /// Why.
    pub reason: String,
}

/// Why something could not be measured, on the one line that it has in a table.
pub fn reason(error: &anyhow::Error) -> String {
    format!("{error:#}").replace('\n', " | ")
}

/// What all the rounds gave.
#[derive(Debug, Default)]
pub struct Results {
    /// In the order of measurement.
    pub samples: Vec<Sample>,
    /// At most one for each line and arm.
    pub failures: Vec<Failure>,
    /// True if the user stopped the run before its end.
    pub interrupted: bool,
}

/// What a server took.
#[derive(Clone, Copy, Debug)]
struct Used {
    cpu_per_request: f64,
    memory: u64,
}

/// What is measured, how often and how long.
pub struct Experiment<'a> {
    /// The ways of serving.
    pub arms: &'a [Arm],
    /// The workloads.
    pub lines: &'a [Line],
    /// Who puts the load on.
    pub client: &'a Client,
    /// Rounds.
    pub rounds: usize,
    /// Seconds per measurement.
    pub seconds: f64,
    /// Server on CPU 0, client on CPU 1.
    pub pin: bool,
    /// Folder for the logs.
    pub run: &'a Path,
}

impl Experiment<'_> {
    /// Measures everything. An arm that fails on a line is left out of that line from then on.
    ///
    /// When interrupted, returns what there is.
    pub fn run(&self) -> Results {
        let mut results = Results::default();
        for (arm, line) in self.arms.iter().flat_map(|a| self.lines.iter().map(move |l| (a, l))) {
            if let Some(reason) = &arm.missing {
                results.fail(arm, line, reason.clone());
            }
        }
        let present: Vec<&Arm> = self.arms.iter().filter(|arm| arm.missing.is_none()).collect();
        let bar = progress((self.rounds * self.lines.len() * present.len()) as u64);
        for round in 0..self.rounds {
            for line in self.lines {
                for arm in order(present.len(), round).map(|i| present[i]) {
                    bar.set_message(format!(
                        "round {} of {}, {}, {}",
                        round + 1,
                        self.rounds,
                        line.name,
                        arm.name
                    ));
                    if !results.failed(arm, line) {
                        match self.measure(arm, line) {
                            Ok((measured, used)) => results.samples.push(Sample {
                                round,
                                line: line.name.clone(),
                                arm: arm.name.clone(),
                                measured,
                                server_cpu_per_request: used.map(|used| used.cpu_per_request),
                                server_memory: used.map(|used| used.memory),
                            }),
                            Err(_) if interrupt::check().is_err() => {
                                bar.finish_and_clear();
                                results.interrupted = true;
                                return results;
                            }
                            Err(error) => {
                                bar.suspend(|| eprintln!("{}, {}: {error:#}", line.name, arm.name));
                                results.fail(arm, line, reason(&error));
                            }
                        }
                    }
                    bar.inc(1);
                }
            }
        }
        bar.finish_and_clear();
        results
    }

    /// Starts the arm's server, loads it, and stops it again.
    fn measure(&self, arm: &Arm, line: &Line) -> Result<(Measured, Option<Used>)> {
        interrupt::check()?;
        for step in &arm.prepare {
            step.output(PREPARATION, crate::interrupt::stop())?;
        }
        let log = self.run.join("server.log");
        let mut server = match &arm.launch {
            Some(launch) => {
                // A server that died left its socket behind.
                let _ = std::fs::remove_file(&arm.socket);
                let mut server = Process::start(&launch.on(self.pin.then_some(0)), &log)?;
                server.wait_listening(&arm.socket, crate::interrupt::stop())?;
                Some(server)
            }
            None => None,
        };
        let used = |server: &Option<Process>| -> Result<f64> {
            let time = server.as_ref().map(|server| cpu::of_tree(server.id())).transpose()?;
            Ok(time.unwrap_or_default().as_secs_f64())
        };
        let before = used(&server)?;
        let run = Run { seconds: self.seconds, cpu: self.pin.then_some(1) };
        let measured = self.client.measure(arm, line, run)?;
        let after = used(&server).context("the server is gone after the load")?;
        let requests = measured.requests.max(1) as f64;
        let used = match &server {
            Some(server) => Some(Used {
                cpu_per_request: (after - before) / requests,
                memory: memory::most_resident(server.id())?,
            }),
            None => None,
        };
        drop(server.take());
        if let Some(image) = &arm.image {
            wait_unlocked(image)?;
        }
        if let (true, Kind::PageCache | Kind::Ringtap, Some(image)) =
            (line.writes(), arm.kind, &arm.image)
        {
            settle(image)?;
        }
        Ok((measured, used))
    }
}

impl Results {
    fn fail(&mut self, arm: &Arm, line: &Line, reason: String) {
        let (line, arm) = (line.name.clone(), arm.name.clone());
        self.failures.push(Failure { line, arm, reason });
    }

    fn failed(&self, arm: &Arm, line: &Line) -> bool {
        self.failures.iter().any(|f| f.arm == arm.name && f.line == line.name)
    }
}

/// The order of `count` arms in a round: a row of a Williams square, mirrored in every other round,
/// so that over the rounds no arm always comes first, or after the same other one, whose appetite it
/// would feel where the host rations the disk.
pub fn order(count: usize, round: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |i| {
        let place = if round % 2 == 0 { i } else { count - 1 - i };
        let zigzag = if place % 2 == 0 { place / 2 } else { count - 1 - place / 2 };
        (zigzag + round / 2) % count
    })
}

/// A bar of so many steps.
pub fn progress(length: u64) -> ProgressBar {
    let bar = ProgressBar::new(length);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len}  {eta} left  {msg}") {
        bar.set_style(style);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringtap_lab::process::launch::Launch;
    use std::collections::HashMap;

    #[test]
    fn every_arm_runs_in_every_place_and_after_every_other() {
        for count in 2..9 {
            let orders: Vec<Vec<usize>> =
                (0..2 * count).map(|r| order(count, r).collect()).collect();
            let mut firsts = vec![0; count];
            let mut pairs = HashMap::new();
            for order in &orders {
                let mut sorted = order.clone();
                sorted.sort();
                assert_eq!(sorted, (0..count).collect::<Vec<_>>());
                firsts[order[0]] += 1;
                for pair in order.windows(2) {
                    *pairs.entry((pair[0], pair[1])).or_insert(0) += 1;
                }
            }
            assert_eq!(firsts, vec![2; count], "{orders:?}");
            assert_eq!(pairs.len(), count * (count - 1), "{orders:?}");
            assert!(pairs.values().all(|times| *times == 2), "{pairs:?}");
        }
    }

    #[test]
    fn an_arm_that_cannot_start_is_a_row_with_its_reason() {
        let run = tempfile::tempdir().unwrap();
        let socket = run.path().join("s");
        let launch = Launch::new("sh", ["-c", "echo disk on fire >&2; exit 1"]);
        let broken = Arm::server("broken", Kind::Qemu, "ringtap", &socket, launch);
        let absent = Launch::new("/nonexistent/server", [""; 0]);
        let absent = Arm::server("absent", Kind::Qemu, "ringtap", &socket, absent);
        let lines = crate::lines::usual();
        let experiment = Experiment {
            arms: &[broken, absent],
            lines: &lines[..1],
            client: &Client::Blkio,
            rounds: 2,
            seconds: 0.1,
            pin: false,
            run: run.path(),
        };
        let results = experiment.run();
        let reason = |arm: &str| -> Vec<String> {
            let of = results.failures.iter().filter(|f| f.arm == arm);
            of.map(|f| f.reason.clone()).collect()
        };
        assert!(results.samples.is_empty());
        assert!(reason("broken").len() == 1 && reason("broken")[0].contains("disk on fire"));
        assert!(reason("absent").len() == 1 && reason("absent")[0].contains("not installed"));
    }
}
