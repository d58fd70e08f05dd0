//! What is copied while it is served, and how.

use std::sync::Arc;

use ringtap_io::Time;

use super::target::BEHIND;
use crate::Disk;
use crate::track::Tracker;
use crate::trouble::OnErrors;

/// What of a disk is copied.
#[derive(Clone)]
pub enum Scope {
    /// All of it.
    All,
    /// What so many images hold, the topmost and those next below; the target shows the same below those.
    Above(u32),
    /// What has changed since the target was a copy of it. The tracker's marks are cleared at the moment of the new copy.
    Changed(Arc<Tracker>),
}

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The target is left as the disk was at one moment.
    Copy,
    /// The target takes the disk's place.
    Pivot,
}

/// For tests: what it does wrong.
#[cfg(feature = "sabotage")]
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Wrongs {
    /// The tracker misses one of so many requests.
    pub misses: u64,
    /// Marks are cleared after their region was read.
    pub clears_late: bool,
    /// The target is not flushed.
    pub unflushed: bool,
    /// Ranges are written to by several at once.
    pub unlocked: bool,
    /// What guests have written, and is on its way to the target, is not waited for at the end.
    pub hasty: bool,
    /// What was being copied when the job was cancelled for another is not copied again.
    pub forgets: bool,
    /// What a flush that failed may have lost is not written again.
    pub trusts: bool,
    /// What is to be saved is read from the disk, though it lies in scratch.
    pub ignores_scratch: bool,
}

/// What is copied while it is served, and how.
pub struct Mirror {
    /// The disk.
    pub from: Disk,
    /// What it is copied to: nobody else uses it. It is at least as large; to take the disk's place just as large.
    pub to: Disk,
    /// What of the disk.
    pub scope: Scope,
    /// The target reads as zeros at first, so that zeros need not be made.
    pub zeroed: bool,
    /// Bytes of the regions whose changes are noted.
    pub granularity: u64,
    /// Bytes read and written at once.
    pub piece: u64,
    /// How many pieces are in flight at once.
    pub requests: usize,
    /// The most bytes that are left to copy when the disk is to stand still.
    pub still_bytes: u64,
    /// The longest that the disk stands still for copying and for making the target stable, in nanoseconds; where that
    /// does not do, it goes on, and stands still again later.
    pub still_for: Time,
    /// The longest that a guest's write may wait for the target, in nanoseconds (it may wait twice for that); then the
    /// job fails. No limit where there is none.
    pub limit: Option<Time>,
    /// After so many passes, one after the other, that leave nearly as much as the one before, requests change the disk
    /// and the target both; with 0 from when all has been copied once. Never where there is none.
    pub patience: Option<u32>,
    /// From then on guests are slowed by so many percent at most for the target's sake, and what it cannot take as fast is left for
    /// the job, which may never come to an end then (see [`crate::Job::hear_behind`]). Where there is none guests wait for the target.
    pub max_slowdown: Option<u32>,
    /// What becomes of the job where it meets an error.
    pub on_errors: OnErrors,
    /// For tests: how many bytes of guests' writes may be on their way to the target, before guests wait and before they are
    /// left for the job.
    #[doc(hidden)]
    pub behind: [u64; 2],
    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    pub wrongs: Wrongs,
}

impl Mirror {
    /// Copy all of a disk.
    pub fn new(from: impl Into<Disk>, to: impl Into<Disk>) -> Mirror {
        Mirror {
            from: from.into(),
            to: to.into(),
            scope: Scope::All,
            zeroed: false,
            granularity: Tracker::GRANULARITY,
            piece: 1 << 20,
            requests: 8,
            still_bytes: 4 << 20,
            still_for: 100_000_000,
            limit: Some(5_000_000_000),
            patience: Some(2),
            max_slowdown: None,
            on_errors: OnErrors::default(),
            behind: BEHIND,
            #[cfg(feature = "sabotage")]
            wrongs: Wrongs::default(),
        }
    }
}
