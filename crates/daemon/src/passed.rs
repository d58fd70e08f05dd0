//! What there is to know of a job that ends for another process to go on with.

use ringtap_vbd::{Job, Moment, Unfinished, Wishes};

use crate::ids::DiskId;

/// A job that has ended, or is about to.
pub(crate) struct Passing {
    /// The disk that it is at work on, and the one that it writes to.
    pub(crate) disks: Vec<DiskId>,
    pub(crate) wishes: Wishes,
    /// Whether its errors are met otherwise than by its end, as the ledger says.
    pub(crate) meets_errors: bool,
    pub(crate) has_checkpoint: bool,
    /// Bytes that it has dealt with, of what it has left.
    pub(crate) dealt_with: u64,
    /// Where it is to go on, if not at its beginning.
    pub(crate) left: Option<Left>,
}

/// Where a job is to go on.
pub(crate) enum Left {
    /// Of a mirror.
    Copy(Unfinished),
    /// Of a backup.
    Save(Moment),
}

impl Left {
    /// What a job has left.
    pub(crate) fn of(job: &Job) -> Option<Left> {
        let moment = || job.take_moment().map(Left::Save);
        job.take_unfinished().map(Left::Copy).or_else(moment)
    }
}
