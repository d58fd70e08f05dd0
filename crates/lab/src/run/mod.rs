//! The runner: rounds of blocks, one block for each arm, in balanced order.

mod expect;
pub mod folder;
mod mark;
pub mod meter;
pub mod order;
pub mod progress;
pub mod rest;
pub mod scratch;
pub mod slices;
pub mod track;
pub mod watch;
mod within;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::backend::{Context, Entry, Served};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::host::Host;
use crate::plan::Plan;
use crate::process::Server;
use crate::sample::{Metric, Sample, Stage, twin};
use crate::stage::{self, durable};
use crate::stop::Stop;
use crate::workload::{self, Measured, Settings, Workload};
use expect::seconds;
pub use expect::{expected, in_words};
use folder::{Arm, Folder, Record, Skip, State, Written};
pub use mark::Mark;
use meter::Who;
use progress::Progress;
use scratch::Scratch;
use slices::Slices;
use watch::Watch;

/// A file system with less room than this is full, where something failed on it.
const FULL: u64 = 1 << 20;

/// An arm that runs: a backend under a name.
#[derive(Clone, Debug)]
pub struct Running {
    /// Its name in samples.
    pub name: String,
    /// The backend.
    pub entry: &'static Entry,
    /// The workloads that fit it.
    pub workloads: Vec<&'static dyn Workload>,
}

impl Running {
    /// The workloads of each round; the durability check is made once, before.
    pub fn rounds(&self) -> impl Iterator<Item = &'static dyn Workload> + '_ {
        self.workloads.iter().copied().filter(|workload| !workload.is_check())
    }

    /// Whether it gets a rated load, whose rate depends on what all carry.
    pub fn is_rated(&self) -> bool {
        self.workloads.iter().any(|workload| workload.is_rated())
    }
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
    /// Statistics of the device that holds the disks.
    pub device: Option<PathBuf>,
    /// What was written to the disks.
    written: Cell<Written>,
    /// Bytes that each of them had allocated then.
    allocated: RefCell<HashMap<PathBuf, u64>>,
    /// Random writes a second that the slowest backend of a stage carries.
    capacity: Vec<(Stage, f64)>,
    /// How long each load is measured.
    pub slices: Slices,
    /// Errors that were printed.
    said: Vec<String>,
    /// The boot of a guest in which samples are taken now.
    boot: Option<u32>,
    /// Boots so far.
    boots: u32,
    /// Stages whose guest has booted, or why it did not in the first round: then it is not tried again.
    guests: Vec<(Stage, Result<(), String>)>,
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
    let (mut arms, mut skipped) = matrix(plan, env);
    rest::narrow(plan, &mut arms);
    let all = arms.clone();
    let left_out = within::fit(plan, &mut arms);
    skipped.extend(within::skips(&all, &left_out, plan.within.unwrap_or_default()));
    // First what may be refused: a folder made in vain would be taken for a run.
    let disks: u64 = arms.iter().map(|(stage, arms)| stage::room(*stage, plan, arms)).sum();
    let checks = arms.iter().map(|(stage, arms)| stage::room_of_check(*stage, arms));
    let room = checks.max().unwrap_or(0).max(disks);
    let scratch = Scratch::create(&plan.dir, room)?;
    let folder = Folder::create(out)?;
    let record = Record {
        schema: folder::SCHEMA,
        lab: env!("CARGO_PKG_VERSION").into(),
        began: jiff::Zoned::now().strftime("%Y-%m-%dT%H:%M:%S%:z").to_string(),
        ended: None,
        state: State::Running,
        troubles: Vec::new(),
        plan: plan.clone(),
        host: Host::gather(&plan.dir, &env.ringtap),
        guest: None,
        stages: Vec::new(),
        written: None,
        arms: arms
            .iter()
            .flat_map(|(stage, arms)| arms.iter().map(|arm| describe(*stage, arm)))
            .collect(),
        skipped,
    };
    folder.write_record(&record)?;
    let seconds = expected(plan, &arms);
    let progress = Progress::new(seconds, expect::samples(plan, &arms));
    progress.note(&in_words(plan, &arms, seconds));
    if !left_out.is_empty() {
        progress.note(&within::in_words(&left_out));
    }
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
        device: meter::device_below(&plan.dir),
        written: Cell::default(),
        allocated: RefCell::default(),
        capacity: Vec::new(),
        slices: Slices::default(),
        said: Vec::new(),
        boot: None,
        boots: 0,
        guests: Vec::new(),
    };
    let result = runner.rounds().map_err(|error| runner.full(&error).unwrap_or(error));
    // The disks go first: the rest may need their room.
    let Runner { mut record, folder, scratch, mut progress, samples, failures, written, .. } =
        runner;
    drop(scratch);
    record.written = Some(written.get());
    record.ended = Some(jiff::Zoned::now().strftime("%Y-%m-%dT%H:%M:%S%:z").to_string());
    record.state = match &result {
        Ok(()) => State::Complete,
        Err(Error::Interrupted) => State::Interrupted,
        Err(_) => State::Failed,
    };
    match &result {
        Ok(()) => progress.finish(),
        // The state says it.
        Err(Error::Interrupted) => {}
        Err(error) => {
            progress.note(&error.to_string());
            record.troubles.push(error.to_string());
        }
    }
    folder.write_record(&record)?;
    Ok(Ended { state: record.state, samples, failures })
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
            let missing = entry.backend.missing(env).or_else(|| stage::missing(stage, entry, env));
            if let Some(missing) = missing {
                skipped.push(skip(None, missing));
                continue;
            }
            let mut workloads = Vec::new();
            for workload in plan.workloads() {
                if !workload.runs_on(stage) {
                    continue;
                }
                if !plan.runs(stage, workload.name(), entry.name) {
                    let some = plan.only.get(workload.name()).map(|some| some.join(", "));
                    let reason = format!("the plan runs it on {} only", some.unwrap_or_default());
                    let remedy =
                        format!("--workloads {}, or a plan without `only`", workload.name());
                    skipped.push(skip(Some(workload.name()), Missing::new(reason, remedy)));
                    continue;
                }
                let refused = entry.backend.refuses(workload);
                match refused.or_else(|| stage::missing_workload(stage, entry, workload, env)) {
                    Some(missing) => skipped.push(skip(Some(workload.name()), missing)),
                    None => workloads.push(workload),
                }
            }
            if !workloads.is_empty() {
                arms.push(Running { name: entry.name.into(), entry, workloads });
            }
        }
        // Where the plan has loads on some arms only, the first may lack most of them.
        if !plan.only.is_empty() {
            order::first_of_most(&mut arms);
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
        cached: arm.entry.backend.cached(),
        remark: arm.entry.backend.remark().map(Into::into),
        command: None,
    }
}

impl Runner<'_> {
    fn rounds(&mut self) -> Result<()> {
        let stages: Vec<(Stage, Vec<Running>)> = self.arms.clone();
        let rounds = self.plan.rounds as usize;
        let orders: Vec<Vec<Vec<usize>>> = stages
            .iter()
            .map(|(_, arms)| order::balanced(arms.len(), rounds, self.plan.seed))
            .collect();
        for (stage, arms) in &stages {
            durable::pass(self, *stage, arms)?;
        }
        let mut running = Vec::new();
        for (stage, arms) in &stages {
            let counts =
                |arm: &Running| stage::of(*stage).counts_in_rounds() && !arm.workloads.is_empty();
            if !arms.iter().any(|arm| arm.rounds().next().is_some() || counts(arm)) {
                running.push(None);
                continue;
            }
            running.push(Some(stage::of(*stage).prepare(self, arms)?));
        }
        for round in 0..self.plan.rounds {
            for (((stage, arms), orders), prepared) in stages.iter().zip(&orders).zip(&mut running)
            {
                if stage.boots_each_round() {
                    self.boot = Some(self.boots);
                    self.boots += 1;
                }
                let order: Vec<&Running> =
                    orders[round as usize].iter().map(|&at| &arms[at]).collect();
                if let Some(prepared) = prepared {
                    prepared.round(self, round, &order)?;
                }
                self.boot = None;
            }
        }
        Ok(())
    }

    /// What the workloads of one round share.
    pub fn settings(&self, stage: Stage, round: u32) -> Settings {
        let capacity = self.capacity.iter().find(|(of, _)| *of == stage).map(|(_, rate)| *rate);
        Settings { capacity, ..self.plan.settings(round) }
    }

    /// Takes what a backend carries into account: the slowest one counts.
    pub fn remember_capacity(&mut self, stage: Stage, measured: &Measured) {
        let Some(rate) = measured.metrics.get(&Metric::Iops).map(|iops| iops.value) else { return };
        match self.capacity.iter_mut().find(|(of, _)| *of == stage) {
            Some((_, slowest)) => *slowest = slowest.min(rate),
            None => self.capacity.push((stage, rate)),
        }
    }

    /// Takes one sample: runs `work`, adds what it cost, appends it. An error of the work is a sample without numbers;
    /// only the wish to end, or a folder that cannot be written, ends the run.
    pub fn sample(
        &mut self,
        place: Place<'_>,
        server: Option<&Server>,
        client: Option<u32>,
        work: impl FnOnce(&Mark<'_>) -> Result<Measured>,
    ) -> Result<()> {
        self.stop.check()?;
        self.progress.say(&format!(
            "round {}/{}  {}  {}  {}",
            place.round + 1,
            self.plan.rounds,
            place.stage,
            place.arm.name,
            place.workload.title()
        ));
        let began_ms =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        let who = Who {
            servers: server.map(Server::pid).into_iter().collect(),
            clients: client.into_iter().collect(),
        };
        let watch = place
            .workload
            .is_rated()
            .then(|| Watch::start(server.map(Server::pid), client, self.device.as_deref()));
        let mark = Mark::new(&who, self.device.as_deref());
        let clock = Instant::now();
        let result = work(&mark);
        let seconds = clock.elapsed().as_secs_f64();
        let gaps = result.as_ref().map_or(&[][..], |measured| &measured.gaps);
        let stalls = watch.map(|watch| watch.explain(gaps)).unwrap_or_default();
        let spent = mark.end();
        let mut full = None;
        let mut sample = place.sample(self.boot);
        sample.began_ms = u64::try_from(began_ms).unwrap_or(0);
        sample.seconds = seconds;
        match result {
            Ok(measured) => {
                spent.put(&mut sample, &measured);
                sample.metrics.extend(
                    measured.metrics.iter().map(|(metric, value)| (*metric, *value)).filter(
                        // The guest's whole CPU, seen from outside, is the client's: what the tool inside saw is a part.
                        |(metric, _)| client.is_none() || *metric != Metric::ClientCpu,
                    ),
                );
                sample.note = measured.note;
                sample.movement = measured.movement;
                sample.curve = measured.curve;
                sample.stalls = stalls;
            }
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(error) => {
                sample.error = Some(error.to_string());
                full = self.full(&error);
            }
        }
        // A tool that was hit by the same Ctrl-C as the lab failed because of it.
        self.stop.check()?;
        self.keep(&sample, place.workload)?;
        full.map_or(Ok(()), Err)
    }

    /// The error of a full file system, where that is what is behind another: all that follows would fail of it, too.
    fn full(&self, error: &Error) -> Option<Error> {
        if matches!(error, Error::Interrupted | Error::Full { .. }) {
            return None;
        }
        let free = |path: &Path| {
            let room = rustix::fs::statvfs(path).ok()?;
            Some((path.to_owned(), room.f_bavail * room.f_frsize))
        };
        let (path, free) = [self.plan.dir.as_path(), self.folder.path()]
            .into_iter()
            .filter_map(free)
            .find(|(_, free)| *free < FULL)?;
        Some(Error::Full { path, free, found: error.to_string() })
    }

    /// Records that an arm could not be measured in this round.
    pub fn fail(&mut self, place: Place<'_>, error: &Error) -> Result<()> {
        self.stop.check()?;
        let mut sample = place.sample(self.boot);
        sample.error = Some(error.to_string());
        self.keep(&sample, place.workload)?;
        self.full(error).map_or(Ok(()), Err)
    }

    fn keep(&mut self, sample: &Sample, workload: &dyn Workload) -> Result<()> {
        let rate = workload.headline().first().and_then(|metric| sample.metrics.get(metric));
        if let (Some(rate), Some(known)) = (rate, workload::find(workload.name())) {
            self.slices.note(known.name(), &sample.arm, sample.round, rate.value);
        }
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
        self.progress.advance(seconds(self.plan, sample.stage, workload));
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

    /// Remembers whether a stage's guest came up; the first time decides.
    pub fn remember_boot(&mut self, stage: Stage, booted: Result<(), String>) {
        if !self.guests.iter().any(|(of, _)| *of == stage) {
            self.guests.push((stage, booted));
        }
    }

    /// Why a stage's guest has never come up.
    pub fn unbootable(&self, stage: Stage) -> Option<Error> {
        let known = self.guests.iter().find(|(of, _)| *of == stage)?;
        known.1.as_ref().err().map(|why| Error::Guest(why.clone()))
    }

    /// Starts an arm's backend on `disk`, with a folder of its own for sockets.
    pub fn start(&self, stage: Stage, arm: &Running, disk: &Path) -> Result<Served> {
        self.start_nth(stage, arm, disk, 1)
    }

    /// The same, where an arm is started several times at once.
    pub fn start_nth(&self, stage: Stage, arm: &Running, disk: &Path, nth: u32) -> Result<Served> {
        let sockets = self.socket_folder(stage, arm, nth)?;
        scratch::wait_unlocked(disk)?;
        arm.entry.backend.start(&Context {
            env: self.env,
            disk,
            sockets: &sockets,
            log: self.folder.log(stage, &arm.name),
            stop: self.stop,
        })
    }

    /// An empty folder for the sockets of an arm's nth server.
    pub fn socket_folder(&self, stage: Stage, arm: &Running, nth: u32) -> Result<PathBuf> {
        self.scratch.socket_folder(&format!("{stage}-{}-{nth}", arm.name))
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
        self.disk_of(name, self.plan.size)
    }

    /// Makes a disk file of `bytes`.
    pub fn disk_of(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        self.progress.say(&format!("writing {name}, {} MiB", bytes >> 20));
        let path = self.scratch.write_disk(name, bytes, self.plan.seed, self.stop)?;
        let (allocated, mut written) = (scratch::allocated(&path)?, self.written.get());
        written.bytes += bytes;
        written.allocated += allocated.min(bytes);
        self.written.set(written);
        self.allocated.borrow_mut().insert(path.clone(), allocated.min(bytes));
        Ok(path)
    }

    /// Writes a raw disk again of which something has been discarded since it was written, as a job of the user's may do:
    /// the next writes would have to find room first.
    pub fn keep_written(&self, disk: &Path) -> Result<()> {
        let then = self.allocated.borrow().get(disk).copied();
        let Some(then) = then else { return Ok(()) };
        // A file system may pack what was written since a little better.
        if scratch::allocated(disk)? as f64 >= 0.99 * then as f64 {
            return Ok(());
        }
        let bytes = std::fs::metadata(disk).map_err(Error::file("look at", disk))?.len();
        self.progress.say(&format!("writing {} again: some of it was discarded", disk.display()));
        let name = disk.strip_prefix(self.scratch.disks()).unwrap_or(disk).to_string_lossy();
        self.scratch.write_disk(&name, bytes, self.plan.seed, self.stop)?;
        let written = self.written.get();
        self.written.set(Written { again: written.again + 1, ..written });
        Ok(())
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
    pub workload: &'a dyn Workload,
    /// In which round.
    pub round: u32,
    /// The arm's place in the round.
    pub position: u32,
}

impl Place<'_> {
    fn sample(&self, boot: Option<u32>) -> Sample {
        Sample {
            stage: self.stage,
            arm: self.arm.name.clone(),
            workload: self.workload.name().into(),
            round: self.round,
            position: self.position,
            boot,
            began_ms: 0,
            seconds: 0.0,
            metrics: Default::default(),
            ledger: None,
            curve: Vec::new(),
            stalls: Vec::new(),
            movement: None,
            note: None,
            error: None,
        }
    }
}
