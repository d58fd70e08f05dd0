//! A job that there is, as it is told of.

use std::sync::{Arc, Mutex, PoisonError};

use ringtap_vbd::{Job, Phase};

use crate::control::{JobStatus, JobType};
use crate::ids::DiskId;
use crate::ledger::Entered;

/// A job that there is.
pub(crate) struct Entry {
    pub(crate) kind: JobType,
    pub(crate) job: Job,
    /// Bytes a second; 0 is no limit.
    pub(crate) speed: u64,
    /// Whether it stays to be looked at when it has ended.
    pub(crate) stays: bool,
    /// Whether its end waits for `job-finalize`.
    pub(crate) pends: bool,
    /// Whether it waits to be completed once all is copied.
    pub(crate) waits: bool,
    /// Whether its work is a copy, and the disk stays where it is.
    pub(crate) copies: bool,
    /// Whether it was told to end without its work.
    pub(crate) cancelled: bool,
    /// What is written down of it.
    pub(crate) entered: Entered,
    /// The disks that it has to do with.
    pub(crate) disks: Vec<DiskId>,
    pub(crate) state: State,
}

/// What is known of it beyond its phase. Shared with its thread, which tells of changes.
#[derive(Clone, Default)]
pub(crate) struct State(Arc<Mutex<Known>>);

#[derive(Default)]
pub(crate) struct Known {
    pub(crate) told: Option<JobStatus>,
    pub(crate) concluded: bool,
    pub(crate) error: Option<String>,
}

impl State {
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Known) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// As [`State::becomes`], of one on the way to the end that it may be past.
    pub(crate) fn passes(&self, status: JobStatus) -> bool {
        let is_past = self
            .with(|known| status == JobStatus::Waiting && known.told == Some(JobStatus::Pending));
        !is_past && self.becomes(status)
    }

    /// Note a status; whether it is another than before.
    pub(crate) fn becomes(&self, status: JobStatus) -> bool {
        self.with(|known| known.told.replace(status) != Some(status))
    }
}

impl Entry {
    pub(crate) fn status(&self) -> JobStatus {
        let progress = self.job.progress();
        match (self.state.with(|known| known.concluded), progress.phase) {
            (true, _) => JobStatus::Concluded,
            (_, Phase::Pending) => JobStatus::Pending,
            (_, Phase::Ending) if !progress.paused => JobStatus::Waiting,
            (_, Phase::Ready) if progress.paused => JobStatus::Standby,
            _ if progress.paused => JobStatus::Paused,
            (_, Phase::Waiting) => JobStatus::Created,
            (_, Phase::Ready) => JobStatus::Ready,
            (_, Phase::Failed) => JobStatus::Aborting,
            _ => JobStatus::Running,
        }
    }

    /// Whether it is over, and is there for somebody to look at.
    pub(crate) fn has_ended(&self) -> bool {
        self.status() == JobStatus::Concluded
    }

    /// Have it end without its work.
    pub(crate) fn cancel(&mut self) {
        self.entered.pass_on(false);
        self.cancelled = true;
        self.job.cancel();
    }

    /// The same, for the next server to go on with; not where it was to end anyway.
    pub(crate) fn end_for_next(&mut self) {
        self.entered.pass_on(!self.cancelled);
        self.job.cancel_for_next();
    }

    pub(crate) fn error(&self) -> Option<String> {
        self.state.with(|known| known.error.clone())
    }
}
