//! A run while it goes on: what stages take samples by, start servers with and write disks by.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::folder::{Folder, Record, Written};
use super::mark::Mark;
use super::meter::Who;
use super::progress::Progress;
use super::running::Running;
use super::scratch::{self, Scratch};
use super::slices::Slices;
use super::watch::Watch;
use crate::backend::{Context, Served};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::process::Server;
use crate::sample::{Metric, Sample, Stage};
use crate::stop::Stop;
use crate::workload::{self, Measured, Settings, Workload};

/// A file system with less room than this is full, where something failed on it.
const FULL: u64 = 1 << 20;

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
    /// Seconds that a workload is expected to take on a stage.
    pub(super) seconds: fn(&Plan, Stage, &dyn Workload) -> f64,
    /// What was written to the disks.
    pub(super) written: Cell<Written>,
    /// Bytes that each of them had allocated then.
    pub(super) allocated: RefCell<HashMap<PathBuf, u64>>,
    /// Random writes a second that the slowest backend of a stage carries.
    pub(super) capacity: Vec<(Stage, f64)>,
    /// How long each load is measured.
    pub slices: Slices,
    /// Errors that were printed.
    pub(super) said: Vec<String>,
    /// The boot of a guest in which samples are taken now.
    pub boot: Option<u32>,
    /// Boots so far.
    pub(super) boots: u32,
    /// Stages whose guest has booted, or why it did not in the first round: then it is not tried again.
    pub(super) guests: Vec<(Stage, Result<(), String>)>,
}

impl Runner<'_> {
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
    pub(super) fn full(&self, error: &Error) -> Option<Error> {
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
        self.progress.advance((self.seconds)(self.plan, sample.stage, workload));
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

    /// The number of a boot that begins.
    pub fn next_boot(&mut self) -> u32 {
        self.boots += 1;
        self.boots - 1
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
