//! The runner: rounds of blocks, one block for each arm, in balanced order.

pub mod folder;
pub mod order;
pub mod progress;
pub mod scratch;

use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::backend::{Context, Entry, Served};
use crate::cost;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::plan::Plan;
use crate::process::Server;
use crate::sample::{Metric, Sample, Stage, twin};
use crate::stage::{guest, host};
use crate::stop::Stop;
use crate::workload::{Kind, Measured, Workload};
use folder::{Arm, Folder, Record, Skip, State};
use progress::Progress;
use scratch::Scratch;

/// Below this the machine's clock of 10 ms is too coarse for a cost.
const SHORTEST_FOR_COST: f64 = 0.25;

/// An arm that runs: a backend under a name.
#[derive(Clone, Debug)]
pub struct Running {
    /// Its name in samples.
    pub name: String,
    /// The backend.
    pub entry: &'static Entry,
    /// The workloads that fit it.
    pub workloads: Vec<&'static Workload>,
}

/// A run while it goes on.
#[derive(Debug)]
pub struct Runner<'a> {
    /// What was asked.
    pub plan: &'a Plan,
    /// The machine.
    pub env: &'a Env,
    /// The wish to end.
    pub stop: &'a Stop,
    /// The run's folder.
    pub folder: Folder,
    /// The run's record.
    pub record: Record,
    /// Disks and sockets.
    pub scratch: Scratch,
    /// The bar.
    pub progress: Progress,
    /// The arms of each stage.
    pub arms: Vec<(Stage, Vec<Running>)>,
    /// Samples with numbers.
    pub samples: usize,
    /// Samples and servers that failed.
    pub failures: usize,
    /// Errors that were printed.
    said: Vec<String>,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// How far it came.
    pub state: State,
    /// Samples with numbers.
    pub samples: usize,
    /// Samples and servers that failed.
    pub failures: usize,
}

/// Runs `plan` and leaves its folder at `out`. Whatever happens, what was measured until then is in the folder, and
/// everything that was started or made is gone again.
pub fn run(plan: &Plan, env: &Env, out: &Path, stop: &Stop) -> Result<Ended> {
    let (arms, skipped) = matrix(plan, env);
    // First what may be refused: a folder made in vain would be taken for a run.
    let scratch = Scratch::create(&plan.dir, host::room(plan, &arms) + guest::room(plan, &arms))?;
    let folder = Folder::create(out)?;
    let record = Record {
        lab: env!("CARGO_PKG_VERSION").into(),
        began: jiff::Zoned::now().strftime("%Y-%m-%dT%H:%M:%S%:z").to_string(),
        ended: None,
        state: State::Running,
        troubles: Vec::new(),
        plan: plan.clone(),
        host: Host::gather(&plan.dir, &env.ringtap),
        guest: None,
        arms: arms
            .iter()
            .flat_map(|(stage, arms)| arms.iter().map(|arm| describe(*stage, arm)))
            .collect(),
        skipped,
    };
    folder.write_record(&record)?;
    let progress = Progress::new(expected(plan, &arms));
    let mut runner = Runner {
        plan,
        env,
        stop,
        folder,
        record,
        scratch,
        progress,
        arms,
        samples: 0,
        failures: 0,
        said: Vec::new(),
    };
    let result = runner.rounds();
    runner.record.ended = Some(jiff::Zoned::now().strftime("%Y-%m-%dT%H:%M:%S%:z").to_string());
    runner.record.state = match &result {
        Ok(()) => State::Complete,
        Err(Error::Interrupted) => State::Interrupted,
        Err(_) => State::Failed,
    };
    match &result {
        // The state says it.
        Ok(()) | Err(Error::Interrupted) => {}
        Err(error) => runner.record.troubles.push(error.to_string()),
    }
    runner.folder.write_record(&runner.record)?;
    Ok(Ended { state: runner.record.state, samples: runner.samples, failures: runner.failures })
}

/// Which arms run with which workloads, and what is left out with its reason.
pub fn matrix(plan: &Plan, env: &Env) -> (Vec<(Stage, Vec<Running>)>, Vec<Skip>) {
    let mut stages = Vec::new();
    let mut skipped = Vec::new();
    for &stage in &plan.stages {
        let mut arms: Vec<Running> = Vec::new();
        for entry in plan.entries(stage) {
            let skip = |workload: Option<&str>, missing| Skip {
                stage,
                backend: entry.name.into(),
                workload: workload.map(Into::into),
                missing,
            };
            let missing = entry.backend.missing(env).or_else(|| match stage {
                Stage::Host => None,
                Stage::Guest => guest::missing(env),
            });
            if let Some(missing) = missing {
                skipped.push(skip(None, missing));
                continue;
            }
            let mut workloads = Vec::new();
            for workload in plan.workloads() {
                let missing = match stage {
                    Stage::Host => host::missing(entry, workload, env),
                    Stage::Guest => guest::missing_workload(workload, env),
                };
                match missing {
                    Some(missing) => skipped.push(skip(Some(workload.name), missing)),
                    None => workloads.push(workload),
                }
            }
            if !workloads.is_empty() {
                arms.push(Running { name: entry.name.into(), entry, workloads });
            }
        }
        if let Some(reference) = arms.first() {
            let again = Running { name: twin(&reference.name), ..reference.clone() };
            arms.insert(1, again);
        }
        stages.push((stage, arms));
    }
    (stages, skipped)
}

fn describe(stage: Stage, arm: &Running) -> Arm {
    let again =
        if arm.name == arm.entry.name { "" } else { ", a second time under another name (A/A)" };
    Arm {
        stage,
        name: arm.name.clone(),
        backend: arm.entry.name.into(),
        title: format!("{}{again}", arm.entry.title),
        remark: arm.entry.backend.remark().map(Into::into),
        command: None,
    }
}

/// Seconds that a workload is expected to take.
pub fn expected_seconds(plan: &Plan, workload: &Workload) -> f64 {
    match workload.kind {
        Kind::Fio(_) => plan.seconds + plan.ramp + 0.3,
        Kind::DdThroughput => 0.1 + plan.size.min(1 << 30) as f64 / 1e9,
        Kind::DdLatency(crate::workload::dd::Flag::Direct) => 0.1,
        Kind::DdLatency(crate::workload::dd::Flag::Dsync) => 2.0,
        Kind::Bonnie { .. } => 8.0,
    }
}

fn expected(plan: &Plan, arms: &[(Stage, Vec<Running>)]) -> f64 {
    let work = |arm: &Running| arm.workloads.iter().map(|w| expected_seconds(plan, w)).sum::<f64>();
    let rounds = f64::from(plan.rounds);
    arms.iter().flat_map(|(_, arms)| arms).map(|arm| work(arm) * rounds).sum()
}

impl Runner<'_> {
    fn rounds(&mut self) -> Result<()> {
        let stages: Vec<(Stage, Vec<Running>)> = self.arms.clone();
        let rounds = self.plan.rounds as usize;
        let orders: Vec<Vec<Vec<usize>>> = stages
            .iter()
            .map(|(_, arms)| order::balanced(arms.len(), rounds, self.plan.seed))
            .collect();
        let mut host = None;
        let mut guest = None;
        for (stage, arms) in &stages {
            match stage {
                Stage::Host if !arms.is_empty() => host = Some(host::Host::prepare(self)?),
                Stage::Guest if !arms.is_empty() => {
                    guest = Some(guest::Guest::prepare(self, arms)?)
                }
                _ => {}
            }
        }
        for round in 0..self.plan.rounds {
            for ((stage, arms), orders) in stages.iter().zip(&orders) {
                let order: Vec<&Running> =
                    orders[round as usize].iter().map(|&at| &arms[at]).collect();
                match (stage, &host, &mut guest) {
                    (Stage::Host, Some(host), _) => host.round(self, round, &order)?,
                    (Stage::Guest, _, Some(guest)) => guest.round(self, round, &order)?,
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Takes one sample: runs `work`, adds what it cost, appends it. An error of the work is a sample without numbers;
    /// only the wish to end, or a folder that cannot be written, ends the run.
    pub fn sample(
        &mut self,
        place: Place<'_>,
        server: Option<&Server>,
        client: Option<u32>,
        work: impl FnOnce() -> Result<Measured>,
    ) -> Result<()> {
        self.stop.check()?;
        self.progress.say(&format!(
            "round {}/{}  {}  {}  {}",
            place.round + 1,
            self.plan.rounds,
            place.stage,
            place.arm.name,
            place.workload.title
        ));
        let began_ms =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        let before = Meter::read(server, client);
        let clock = Instant::now();
        let result = work();
        let seconds = clock.elapsed().as_secs_f64();
        let spent = Meter::read(server, client).since(&before);
        let mut sample = place.sample();
        sample.began_ms = u64::try_from(began_ms).unwrap_or(0);
        sample.seconds = seconds;
        match result {
            Ok(measured) => {
                spent.put(&mut sample, &measured, seconds);
                sample.metrics.extend(
                    measured.metrics.iter().map(|(metric, value)| (*metric, *value)).filter(
                        // The guest's whole CPU, seen from outside, is the client's: what the tool inside saw is a part.
                        |(metric, _)| client.is_none() || *metric != Metric::ClientCpu,
                    ),
                );
                sample.note = measured.note;
            }
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(error) => sample.error = Some(error.to_string()),
        }
        // A tool that was hit by the same Ctrl-C as the lab failed because of it.
        self.stop.check()?;
        self.keep(&sample, place.workload)
    }

    /// Records that an arm could not be measured in this round.
    pub fn fail(&mut self, place: Place<'_>, error: &Error) -> Result<()> {
        self.stop.check()?;
        let mut sample = place.sample();
        sample.error = Some(error.to_string());
        self.keep(&sample, place.workload)
    }

    fn keep(&mut self, sample: &Sample, workload: &Workload) -> Result<()> {
        match &sample.error {
            Some(error) => {
                self.failures += 1;
                // A server that is down fails every workload in every round: said once.
                let text = format!("{} {}: {error}", sample.stage, sample.arm);
                if !self.said.contains(&text) {
                    self.progress.note(&text);
                    self.said.push(text);
                }
            }
            None => self.samples += 1,
        }
        self.folder.append(sample)?;
        self.progress.advance(expected_seconds(self.plan, workload));
        Ok(())
    }

    /// Counts and prints trouble that spoiled no sample: a server that did not end as it should.
    pub fn trouble(&mut self, stage: Stage, arm: &str, error: &Error) {
        self.failures += 1;
        self.progress.note(&format!("{stage} {arm}: {error}"));
        let text = format!("{stage} {arm}: {error}");
        if !self.record.troubles.contains(&text) {
            self.record.troubles.push(text);
        }
    }

    /// Starts an arm's backend on `disk`, with a folder of its own for sockets.
    pub fn start(&self, stage: Stage, arm: &Running, disk: &Path) -> Result<Served> {
        let sockets = self.scratch.socket_folder(&format!("{stage}-{}", arm.name))?;
        scratch::wait_unlocked(disk)?;
        arm.entry.backend.start(&Context {
            env: self.env,
            disk,
            sockets: &sockets,
            log: self.folder.log(stage, &arm.name),
            stop: self.stop,
        })
    }

    /// Keeps an arm's server command line for the report, the first time it is seen.
    pub fn remember_command(&mut self, stage: Stage, arm: &str, command: &str) -> Result<()> {
        let known =
            self.record.arms.iter_mut().find(|known| known.stage == stage && known.name == arm);
        match known {
            Some(known) if known.command.is_none() => {
                known.command = Some(command.to_owned());
                self.folder.write_record(&self.record)
            }
            _ => Ok(()),
        }
    }

    /// Makes a disk file of the plan's size.
    pub fn disk(&self, name: &str) -> Result<PathBuf> {
        self.progress.say(&format!("writing {name}, {} MiB", self.plan.size >> 20));
        self.scratch.write_disk(name, self.plan.size, self.plan.seed, self.stop)
    }
}

/// Which sample is taken.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Where.
    pub stage: Stage,
    /// On which arm.
    pub arm: &'a Running,
    /// With which workload.
    pub workload: &'a Workload,
    /// In which round.
    pub round: u32,
    /// The arm's place in the round.
    pub position: u32,
}

impl Place<'_> {
    fn sample(&self) -> Sample {
        Sample {
            stage: self.stage,
            arm: self.arm.name.clone(),
            workload: self.workload.name.into(),
            round: self.round,
            position: self.position,
            began_ms: 0,
            seconds: 0.0,
            metrics: Default::default(),
            note: None,
            error: None,
        }
    }
}

/// CPU seconds so far.
#[derive(Clone, Copy, Debug)]
struct Meter {
    server: Option<f64>,
    client: Option<f64>,
    reaped: f64,
    machine: f64,
}

impl Meter {
    fn read(server: Option<&Server>, client: Option<u32>) -> Meter {
        Meter {
            server: server.map(Server::cpu_seconds),
            client: client.map(cost::tree_cpu_seconds),
            reaped: cost::reaped_seconds(),
            machine: cost::machine_cpu_seconds(),
        }
    }

    fn since(self, before: &Meter) -> Meter {
        let less = |now: Option<f64>, then: Option<f64>| {
            now.zip(then).map(|(now, then)| (now - then).max(0.0))
        };
        Meter {
            server: less(self.server, before.server),
            client: less(self.client, before.client),
            reaped: self.reaped - before.reaped,
            machine: self.machine - before.machine,
        }
    }

    /// Puts the costs into a sample: per million I/Os, or per GiB where the work is counted in bytes.
    fn put(&self, sample: &mut Sample, measured: &Measured, seconds: f64) {
        let mut put = |metric, cpu: Option<f64>, per: f64| {
            if let Some(cpu) = cpu {
                sample.metrics.insert(metric, (cpu / per).into());
            }
        };
        let machine = (seconds >= SHORTEST_FOR_COST).then_some(self.machine);
        if let Some(ios) = measured.ios.filter(|ios| *ios > 0.0) {
            put(Metric::ServerCpu, self.server, ios / 1e6);
            put(Metric::ClientCpu, self.client, ios / 1e6);
            put(Metric::MachineCpu, machine, ios / 1e6);
        }
        if let Some(bytes) = measured.bytes.filter(|bytes| *bytes > 0.0) {
            let gib = bytes / (1u64 << 30) as f64;
            put(Metric::ServerCpuGib, self.server, gib);
            // dd does not say what it used; the lab waits for nothing else meanwhile.
            put(
                Metric::ClientCpuGib,
                self.client.or((seconds >= SHORTEST_FOR_COST).then_some(self.reaped)),
                gib,
            );
            put(Metric::MachineCpuGib, machine, gib);
        }
    }
}
