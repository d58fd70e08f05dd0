//! Jobs on disks that are served: each a thread, and what clients of the control socket see of it.

use std::collections::HashSet;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use ringtap_vbd::{Action, IoStatus, Job, Phase};

use crate::Error;
use crate::control::{
    Events, JobStatus, JobType, tell_of_behind, tell_of_end, tell_of_pending, tell_of_phase,
    tell_of_ready, tell_of_trouble,
};
use crate::entry::{Entry, State};
use crate::ids::DiskId;
use crate::ledger::{Entered, Line};
use crate::passed::{Left, Passing};
use crate::running::{EndingJobs, JobsEnded, Running, Then};
use crate::threads::contained;

/// The error of a job that was ended before its work was done.
const CANCELLED: &str = "Operation canceled";

/// A job to be begun.
pub(crate) struct New {
    pub(crate) id: String,
    pub(crate) kind: JobType,
    /// The disk that it is at work on; a job may have none.
    pub(crate) disk: Option<DiskId>,
    /// Another disk that it has to do with.
    pub(crate) other: Option<DiskId>,
    /// The disks that it was opened upon, some of whose images change.
    pub(crate) upon: Vec<DiskId>,
    pub(crate) speed: u64,
    pub(crate) stays: bool,
    /// Whether its end waits for `job-finalize`.
    pub(crate) pends: bool,
    /// Whether it waits to be completed once all is copied.
    pub(crate) waits: bool,
    /// Whether its work is a copy, and the disk stays where it is.
    pub(crate) copies: bool,
    /// What is written down of it.
    pub(crate) line: Option<Line>,
}

impl New {
    /// The disk that it is at work on, and those that it was opened upon.
    pub(crate) fn with_upon(&self) -> Vec<DiskId> {
        self.disk.into_iter().chain(self.upon.iter().copied()).collect()
    }
}

impl Running {
    /// Begin a job: `work` does it, on a thread of its own, and gives what is to be done here then.
    pub(crate) fn begin_job(
        &mut self,
        new: New,
        work: impl FnOnce(&Job) -> Result<Then, Error> + Send + 'static,
    ) -> Result<(), Error> {
        if self.ending_jobs.is_some() {
            return Err(Error::Job("another process is about to take over: try again".into()));
        }
        let New { id, kind, disk, other, upon, speed, stays, pends, waits, copies, line } = new;
        let disks: Vec<DiskId> = disk.into_iter().chain(other).chain(upon).collect();
        let (job, state) = (Job::new(), State::default());
        if waits {
            job.hold();
        }
        if pends {
            job.wait_to_finalize();
        }
        job.set_rate(Some(speed).filter(|speed| *speed > 0));
        let paused = self.begins_where_left(&id, &job);
        let is_paused = paused.is_some();
        let why = match paused {
            None | Some(IoStatus::Ok) => None,
            Some(IoStatus::Failed) => Some("reading or writing has failed"),
            Some(IoStatus::NoSpace) => Some("there was no space left"),
        };
        if let Some(why) = why {
            tracing::warn!("the job {id} pauses until it is resumed, as it did: {why}");
        }
        let (own, known, entered) = (job.clone(), state.clone(), Entered::new(line));
        let entry = Entry {
            kind,
            job: own,
            speed,
            stays,
            pends,
            waits,
            copies,
            cancelled: false,
            entered: entered.clone(),
            disks: disks.clone(),
            state: known,
        };
        self.jobs.insert(id.clone(), entry);
        self.pending.changing.extend(&disks);
        self.pending.targets.extend(other);
        let hears = Hears {
            id: id.clone(),
            kind,
            told: self.told.clone(),
            job: job.clone(),
            state,
            entered: entered.clone(),
        };
        hears.is(JobStatus::Created);
        let (own, told) = (id.clone(), self.told.clone());
        job.hear_trouble(move |trouble| {
            tell_of_trouble(&told, &own, &trouble);
            if trouble.action == Action::Stop {
                tracing::warn!(
                    "the job {own} pauses until it is resumed: {}",
                    if trouble.write { "writing failed" } else { "reading failed" }
                );
                tell_of_phase(&told, &own, JobStatus::Paused);
            }
        });
        let (own, told) = (id.clone(), self.told.clone());
        job.hear_behind(move |behind| {
            tracing::warn!(
                "the job {own} does not come to an end as long as guests write {} MiB/s and its target takes {} MiB/s: let them be \
                 slowed more, or wait",
                behind.guest_rate >> 20,
                behind.target_rate >> 20
            );
            tell_of_behind(&told, &own, behind);
        });
        job.hear(move |phase| hears.phase(phase));
        // What was ready is so before its thread has begun.
        let begins = job.begins_at().or(is_paused.then_some(Phase::Copying));
        begins.inspect(|phase| job.is_at(*phase));
        if is_paused {
            let is_ready = begins == Some(Phase::Ready);
            let status = if is_ready { JobStatus::Standby } else { JobStatus::Paused };
            tell_of_phase(&self.told, &id, status);
        }
        let (own, of) = (id.clone(), disks.clone());
        let begun = self.in_time("job", move || -> Then {
            let panicked = || {
                Err(Error::Job("a panic has ended it, which is an error of Ringtap itself".into()))
            };
            if let Err(error) = entered.begin() {
                tracing::warn!("a server after this one will not know of the job {own}: {error}");
            }
            let end = contained(|| work(&job)).unwrap_or_else(panicked);
            let left = if kind.leaves_some() { Left::of(&job) } else { None };
            if kind.leaves_some() && left.is_none() {
                // Nobody can go on with it.
                entered.pass_on(false);
            }
            entered.end(end.is_ok());
            Box::new(move |running| running.job_ended(&own, &of, end, left))
        });
        if begun.is_err() {
            self.jobs.remove(&id);
            self.let_go_of(&disks);
        }
        begun
    }

    /// No job is at work on these disks any more.
    pub(crate) fn let_go_of(&mut self, disks: &[DiskId]) {
        for disk in disks {
            self.pending.changing.remove(disk);
            self.pending.targets.remove(disk);
        }
    }

    fn job_ended(
        &mut self,
        id: &str,
        disks: &[DiskId],
        end: Result<Then, Error>,
        left: Option<Left>,
    ) {
        let is_passed_on =
            self.jobs.get(id).is_some_and(|entry| end.is_err() && entry.entered.is_passed_on());
        if is_passed_on {
            tracing::info!("the job {id} has ended here, for another process to go on with");
            // One that is gone on with, here or elsewhere, has its id again: clients hear nothing of this.
            self.pending.passing.entry(id.to_owned()).and_modify(|passing| passing.left = left);
            return self.job_let_go(id, Some(disks));
        }
        self.pending.passing.remove(id);
        self.let_go_of(disks);
        let error = match end {
            Ok(then) => {
                then(self);
                None
            }
            Err(error) => Some(error.to_string()),
        };
        let told = self.told.clone();
        let Some(entry) = self.jobs.get_mut(id) else { return };
        match &error {
            None => tracing::info!("the job {id} has ended"),
            Some(_) if entry.cancelled => tracing::info!("the job {id} was cancelled"),
            Some(error) => tracing::error!("the job {id} has failed: {error}"),
        }
        let cancelled = entry.cancelled && error.is_some();
        let path: &[JobStatus] = match &error {
            None => &[JobStatus::Waiting, JobStatus::Pending],
            Some(_) => &[JobStatus::Aborting],
        };
        for status in path.iter().filter(|status| entry.state.passes(**status)) {
            tell_of_phase(&told, id, *status);
        }
        entry.state.with(|known| {
            known.concluded = true;
            // As QEMU has it.
            known.error = error.map(|error| if cancelled { CANCELLED.into() } else { error });
        });
        tell_of_end(&told, id, entry, cancelled);
        if !entry.stays {
            self.dismiss(id);
        }
        self.job_let_go(id, None);
    }

    /// Whether the next server could go on with each job that is at work: with which it could not, and why.
    pub(crate) fn may_pass_jobs_on(&self) -> Result<(), String> {
        let is_shown = |id: &DiskId| self.disks.get(id).is_some_and(|one| one.moment.is_some());
        let is_device =
            |id: &&DiskId| is_shown(id) && self.device_of(**id).is_some_and(|one| one.is_there());
        for (id, entry) in self.at_work() {
            // It is taken over before the moment is there.
            if entry.disks.iter().any(|disk| is_device(&disk)) {
                return Err(format!(
                    "the job {id} is at work, and its moment is shown as a block device, which would show something else in the next process: take that export away first"
                ));
            }
            if self.config.control.is_empty() || !entry.entered.can_be_passed_on() {
                return Err(format!("the job {id} is at work: wait for it, or cancel it"));
            }
        }
        Ok(())
    }

    pub(crate) fn at_work(&self) -> impl Iterator<Item = (&String, &Entry)> {
        self.jobs.iter().filter(|(_, entry)| !entry.has_ended())
    }

    /// Have all jobs end that are at work, for the next server to go on with; `then` follows, at the latest when that has
    /// taken so long. Those that are cancelled already are waited for.
    pub(crate) fn end_jobs_for_next(&mut self, patience: Duration, then: JobsEnded) {
        let (held, ended) = mpsc::channel::<()>();
        let jobs: HashSet<String> = self.at_work().map(|(id, _)| id.clone()).collect();
        tracing::info!("{} job(s) end here, for the next process to go on with", jobs.len());
        for (id, entry) in self.jobs.iter_mut().filter(|(id, _)| jobs.contains(*id)) {
            self.pending.passing.insert(id.clone(), Passing::of(entry));
            entry.end_for_next();
        }
        self.ending_jobs = Some(EndingJobs { jobs, ended: vec![], then, _held: held });
        let begun = self.in_time("patience", move || -> Then {
            let late = ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout);
            Box::new(move |running| {
                if late {
                    running.jobs_stay(&format!("jobs did not end within {patience:?}"));
                }
            })
        });
        if let Err(error) = begun {
            self.jobs_stay(&error.to_string());
        }
    }

    /// No other process goes on with the jobs: this one does.
    fn jobs_stay(&mut self, why: &str) {
        if let Some(ending) = self.ending_jobs.take() {
            self.pending.resumes_jobs = true;
            self.are_passed_on(ending.ended);
            (ending.then)(self, Err(why.to_owned()));
        }
    }

    /// A job has ended: what waited for the last of some goes on. Until then nobody has the name and the disks of those that are
    /// passed on.
    fn job_let_go(&mut self, id: &str, passed_on: Option<&[DiskId]>) {
        let passed_on = passed_on.map(|disks| (id.to_owned(), disks.to_vec()));
        let Some(ending) = &mut self.ending_jobs else {
            self.pending.resumes_jobs |= passed_on.is_some();
            return self.are_passed_on(passed_on);
        };
        ending.jobs.remove(id);
        ending.ended.extend(passed_on);
        if ending.jobs.is_empty() {
            if let Some(ending) = self.ending_jobs.take() {
                self.are_passed_on(ending.ended);
                (ending.then)(self, Ok(()));
            }
        }
    }

    fn are_passed_on(&mut self, jobs: impl IntoIterator<Item = (String, Vec<DiskId>)>) {
        for (id, disks) in jobs {
            self.jobs.remove(&id);
            self.let_go_of(&disks);
        }
    }

    /// Forget a job that has ended.
    pub(crate) fn dismiss(&mut self, id: &str) {
        if self.jobs.remove(id).is_some() {
            tell_of_phase(&self.told, id, JobStatus::Null);
        }
    }

    /// Have all jobs end, for the process does.
    pub(crate) fn cancel_jobs(&mut self) {
        // Nobody takes over any more.
        self.ending_jobs = None;
        self.jobs.values_mut().for_each(Entry::cancel);
    }
}

/// Tells clients what a job's thread says of it.
struct Hears {
    id: String,
    kind: JobType,
    told: Events,
    job: Job,
    state: State,
    entered: Entered,
}

impl Hears {
    fn is(&self, status: JobStatus) {
        if self.state.becomes(status) {
            tell_of_phase(&self.told, &self.id, status);
        }
    }

    fn phase(&self, phase: Phase) {
        match phase {
            Phase::Waiting | Phase::Done => {}
            Phase::Copying | Phase::Following | Phase::Both => self.is(JobStatus::Running),
            Phase::Ready => {
                if self.state.becomes(JobStatus::Ready) {
                    tell_of_phase(&self.told, &self.id, JobStatus::Ready);
                    tell_of_ready(&self.told, &self.id, self.kind, &self.job);
                }
            }
            Phase::Pending => {
                self.is(JobStatus::Waiting);
                if self.state.becomes(JobStatus::Pending) {
                    tell_of_phase(&self.told, &self.id, JobStatus::Pending);
                    tell_of_pending(&self.told, &self.id, self.kind);
                }
            }
            // It was pending before, perhaps.
            Phase::Ending => {
                if self.state.passes(JobStatus::Waiting) {
                    tell_of_phase(&self.told, &self.id, JobStatus::Waiting);
                }
            }
            // Another goes on with it, perhaps: then this is not its end.
            Phase::Failed if self.entered.is_passed_on() => {}
            Phase::Failed => self.is(JobStatus::Aborting),
        }
    }
}
