//! What is to be kept as it is at one moment, and its beginning.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};

use ringtap_io::{Io, Time};

use super::kept::{Breaks, Kept};
use super::moment::Moment;
use super::stability::Stability;
use super::view::Idle;
use crate::filter::BeforeWrite;
use crate::map::Map;
use crate::mirror::error::MirrorError;
use crate::mirror::target::Target;
use crate::track::Tracker;
use crate::trouble::OnErrors;
use crate::{Busy, Disk, Quiesced};

/// What is to be kept as it is at one moment, and how.
pub struct Backup {
    /// The disk.
    pub from: Disk,
    /// Where its old content goes, at its own place: nobody else writes to it. It is at least as large.
    pub to: Disk,
    /// The target holds what the disk did when this tracker was cleared: only what it has marked since is to be saved.
    /// Its marks are cleared at the moment, and set again where the backup does not end well.
    pub changed: Option<Arc<Tracker>>,
    /// Its marks stay: what is changed by them is somebody else's to decide.
    pub keeps_marks: bool,
    /// The most bytes that are saved before requests change them, where the rest is not saved at all; more cannot be.
    pub room: Option<u64>,
    /// The target reads as zeros at first, so that zeros need not be made.
    pub zeroed: bool,
    /// Bytes of the regions that are saved as a whole.
    pub granularity: u64,
    /// How many regions are in flight at once when all of it is saved.
    pub requests: usize,
    /// The longest that a guest's write may wait for old content to be saved, in nanoseconds; no limit where there is none.
    /// A target that ends no write for so long is silent: it loses a moment that may be lost, though no guest waits.
    pub limit: Option<Time>,
    /// What breaks then, or where saving it fails.
    pub breaks: Breaks,
    /// What becomes of the job that saves the rest where it meets an error.
    pub on_errors: OnErrors,
    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    pub wrongs: crate::Wrongs,
}

impl Backup {
    /// Keep all that a disk holds.
    pub fn new(from: impl Into<Disk>, to: impl Into<Disk>) -> Backup {
        Backup {
            from: from.into(),
            to: to.into(),
            changed: None,
            keeps_marks: false,
            room: None,
            zeroed: false,
            granularity: Tracker::GRANULARITY,
            requests: 8,
            limit: Some(5_000_000_000),
            breaks: Breaks::default(),
            on_errors: OnErrors::default(),
            #[cfg(feature = "sabotage")]
            wrongs: crate::Wrongs::default(),
        }
    }

    /// Have the disk stand still, wait at most so many nanoseconds for that, and keep what it holds then. `still` is called while
    /// it stands still: another disk's moment may be the same. It may be
    /// tried again where it fails.
    pub async fn begin<E>(
        &self,
        io: &Io,
        wait: Time,
        still: impl AsyncFnOnce() -> Result<(), E>,
    ) -> Result<Moment, MirrorError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let from = self.from.fork();
        let quiesced = from.quiesce(io, wait).await.map_err(|busy| match busy {
            Busy::Late => MirrorError::Busy,
            Busy::Stopped => MirrorError::Stopped,
        })?;
        self.check()?;
        still().await.map_err(|why| MirrorError::Hook(why.into()))?;
        let moment = self.begin_still(&quiesced)?;
        drop(quiesced);
        Ok(moment)
    }

    /// Keep what the disk holds, which stands still.
    ///
    /// # Errors
    /// Where the target cannot hold it.
    pub fn begin_still(&self, _: &Quiesced<'_>) -> Result<Moment, MirrorError> {
        self.check()?;
        Ok(self.keep(self.from.size()))
    }

    fn check(&self) -> Result<(), MirrorError> {
        self.check_for(self.from.size())
    }

    pub(super) fn check_for(&self, disk: u64) -> Result<(), MirrorError> {
        let target = self.to.size();
        if target < disk {
            return Err(MirrorError::Size { target, disk, wanted: "as large" });
        }
        if self.to.is_read_only() { Err(MirrorError::ReadOnly) } else { Ok(()) }
    }

    fn keep(&self, size: u64) -> Moment {
        let left = Map::new(self.granularity);
        if let Some(tracker) = self.changed.as_ref().filter(|_| self.keeps_marks) {
            left.merge(tracker.map(), size);
        }
        let taken = self.changed.clone().filter(|_| !self.keeps_marks).map(|tracker| {
            let (taken, mut at) = (Map::new(tracker.granularity()), 0);
            while let Some(range) = tracker.next(at, u64::MAX) {
                at = range.end;
                taken.mark(range.clone());
                left.mark(range.start..range.end.min(size));
            }
            tracker.clear();
            (tracker, taken)
        });
        if self.changed.is_none() {
            left.mark(0..size);
        }
        self.keep_left(left, size, self.changed.is_some(), taken)
    }

    pub(super) fn keep_left(
        &self,
        left: Map,
        size: u64,
        some: bool,
        taken: Option<(Arc<Tracker>, Map)>,
    ) -> Moment {
        // What holds only what has changed is put upon an earlier copy, or was one.
        let granularity = left.granularity();
        let target = Target::new(self.to.clone()).with_zeros_said(some).with_unstable(granularity);
        #[cfg(feature = "sabotage")]
        let target = target.with_ranges_unlocked(self.wrongs.unlocked);
        let kept = Arc::new(Kept {
            target: Arc::new(target),
            granularity,
            left,
            changed: Map::new(granularity),
            stable: Stability::default(),
            size,
            zeroed: self.zeroed && !some,
            some,
            limit: self.limit,
            breaks: self.breaks,
            told: AtomicBool::new(false),
            room: AtomicU64::new(self.room.unwrap_or(u64::MAX)),
            aside: OnceLock::new(),
            #[cfg(feature = "sabotage")]
            wrongs: self.wrongs,
        });
        let (filter, shared): (Arc<dyn BeforeWrite>, _) = (kept.clone(), &self.from.shared);
        shared.filters.install_before(&shared.door, filter.clone());
        let (from, saved) = (self.from.clone(), AtomicBool::new(false));
        let (requests, on_errors) = (self.requests, OnErrors::default());
        let (deals_with_no_room, successor, idle) = (None, None, Idle::default());
        let moment = Moment {
            from,
            kept,
            filter,
            requests,
            on_errors,
            deals_with_no_room,
            taken,
            successor,
            saved,
            offset: 0,
            idle,
        };
        moment.with_errors(self.on_errors)
    }
}
