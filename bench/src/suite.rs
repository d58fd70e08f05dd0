//! One program's whole run: every place under the servers, one report each.

use crate::arms::Arm;
use crate::client::Client;
use crate::experiment::Experiment;
use crate::goals::Goal;
use crate::image::{Fs, Images};
use crate::interrupt;
use crate::lines::Line;
use crate::options::{Options, Output};
use crate::report::{Report, machine};
use anyhow::{Context, Result, bail};
use ringtap_lab::process::launch::Launch;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// What distinguishes one program of this crate from another.
pub struct Suite<'a> {
    /// The protocol, for the titles.
    pub wire: &'static str,
    /// The command line.
    pub options: &'a Options,
    /// Who puts the load on.
    pub client: &'a Client,
    /// The workloads before `--only`.
    pub lines: Vec<Line>,
    /// Whether there are arms on the page cache.
    pub with_cached: bool,
}

impl Suite<'_> {
    /// Measures and prints. The exit code is 0 also where goals were not reached: the report says
    /// so, and a slow machine is not a failure of the program.
    pub fn run(
        &self,
        arms: impl Fn(Fs, &Images, &Path) -> Result<Vec<Arm>>,
        goals: impl Fn(Fs, &Line) -> Vec<Goal>,
    ) -> Result<ExitCode> {
        let options = self.options;
        let wanted = |line: &Line| Options::wanted(&options.only, &line.name);
        let lines: Vec<Line> = self.lines.iter().filter(|line| wanted(line)).cloned().collect();
        if lines.is_empty() || options.rounds == 0 {
            let names: Vec<&str> = self.lines.iter().map(|line| line.name.as_str()).collect();
            bail!("nothing to measure: --rounds at least 1, --only of {}", names.join(", "));
        }
        let mut reports = Vec::new();
        let mut interrupted = false;
        for &fs in &options.fs {
            interrupt::check()?;
            let run = tempfile::Builder::new()
                .prefix("ringtap-bench-")
                .tempdir()
                .context("cannot make a folder for sockets and logs")?;
            let images = Images::write(fs, &options.disk(), options.size, self.with_cached)?;
            let mut arms = arms(fs, &images, run.path())?;
            arms.retain(|arm| Options::wanted(&options.servers, &arm.name));
            let experiment = Experiment {
                arms: &arms,
                lines: &lines,
                client: self.client,
                rounds: options.rounds,
                seconds: options.seconds,
                pin: options.pin,
                run: run.path(),
            };
            // Before the run: its own load is not the machine's.
            let mut conditions = self.conditions(images.place(), &arms);
            let results = experiment.run();
            interrupted = results.interrupted;
            if interrupted {
                conditions.push("INTERRUPTED: only what was measured until then".into());
            }
            let title = format!("{} on {}", self.wire, fs.name());
            let goals = |line: &Line| goals(fs, line);
            let report = Report::new(title, conditions, &arms, &lines, results, goals);
            if options.output == Output::Table {
                println!("{report}");
            }
            reports.push(report);
            if interrupted {
                break;
            }
        }
        if options.output == Output::Json {
            println!("{}", serde_json::to_string(&reports)?);
        }
        Ok(if interrupted { ExitCode::from(130) } else { ExitCode::SUCCESS })
    }

    fn conditions(&self, place: &str, arms: &[Arm]) -> Vec<String> {
        let options = self.options;
        let pinned = if options.pin { "server on CPU 0, client on CPU 1" } else { "not pinned" };
        let mut conditions = vec![
            machine(),
            format!("Image: {place}"),
            format!("Client: {}", self.client.name()),
            format!(
                "{} rounds of {} s, interleaved, {pinned}; medians; ratios with a bootstrap interval over rounds",
                options.rounds, options.seconds
            ),
            "srv s/M: CPU seconds of the server's processes and threads per million requests"
                .into(),
        ];
        conditions.extend(versions(arms));
        conditions
    }
}

/// What each server calls itself.
fn versions(arms: &[Arm]) -> BTreeSet<String> {
    let first_line = |launch: &Launch| -> Result<String> {
        let text = launch.version().output(Duration::from_secs(10), crate::interrupt::stop())?;
        Ok(text.lines().next().unwrap_or_default().to_string())
    };
    arms.iter()
        .filter(|arm| arm.missing.is_none())
        .filter_map(|arm| arm.launch.as_ref())
        .filter_map(|launch| first_line(launch).ok())
        .filter(|line| !line.is_empty())
        .map(|line| format!("Server: {line}"))
        .collect()
}
