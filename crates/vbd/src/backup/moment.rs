//! A moment of a disk, as long as it is kept.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use super::kept::{Breaks, Kept};
use super::view::{Idle, Moments, View};
use crate::filter::BeforeWrite;
use crate::map::Map;
use crate::mirror::error::MirrorError;
use crate::mirror::no_room::DealsWithNoRoom;
use crate::track::Tracker;
use crate::trouble::OnErrors;
use crate::{DirtyBitmap, Disk, Quiesced, Successor};

/// A moment of a disk, as long as it is kept.
pub struct Moment {
    pub(super) from: Disk,
    pub(super) kept: Arc<Kept>,
    pub(super) filter: Arc<dyn BeforeWrite>,
    pub(super) requests: usize,
    pub(super) on_errors: OnErrors,
    pub(super) deals_with_no_room: Option<DealsWithNoRoom>,
    /// Marks to be set again.
    pub(super) taken: Option<(Arc<Tracker>, Map)>,
    pub(super) successor: Option<Successor>,
    pub(super) saved: AtomicBool,
    /// Bytes that the jobs before the one that saves it have dealt with.
    pub(super) offset: u64,
    pub(super) idle: Idle,
}

impl Drop for Moment {
    fn drop(&mut self) {
        self.forget();
        // Whoever has a view of it sees that it is gone.
        if !self.saved.load(SeqCst) {
            self.kept.target.fail(MirrorError::Cancelled);
            if let Some((tracker, taken)) = &self.taken {
                let mut at = 0;
                while let Some(range) = taken.next(at, u64::MAX) {
                    at = range.end;
                    tracker.mark(range);
                }
            }
        }
    }
}

impl Moment {
    pub(super) fn forget(&self) {
        let shared = &self.from.shared;
        shared.filters.remove_before(&shared.door, &self.filter);
    }

    /// The same, where the job that saves it does that about errors.
    pub fn with_errors(mut self, on_errors: OnErrors) -> Moment {
        // A node that keeps a moment for which requests fail has no job, and they may wait.
        let has_job = self.kept.breaks == Breaks::Moment;
        let target = &self.kept.target.disk;
        self.deals_with_no_room = has_job.then(|| OnErrors::deals_with_no_room(target));
        self.on_errors = on_errors;
        self.kept.keeps_until_stable(on_errors);
        self
    }

    /// Bytes that the jobs have dealt with which have left it.
    pub fn dealt_with(&self) -> u64 {
        self.offset
    }

    /// Bytes of the disk at that moment.
    pub fn size(&self) -> u64 {
        self.kept.size
    }

    /// Whether it can still be read: the target has taken all that it was to take.
    pub fn is_whole(&self) -> bool {
        !self.kept.target.has_failed()
    }

    /// What reads it, for a thread.
    pub fn fork(&self) -> View {
        self.moments().fork()
    }

    pub(crate) fn moments(&self) -> Moments {
        Moments { kept: self.kept.clone(), from: self.from.clone(), idle: self.idle.clone() }
    }

    /// The disk that it is of.
    pub fn disk(&self) -> &Disk {
        &self.from
    }

    /// Have what is marked from now on, which the disk stands still at, take a bitmap's place in the end.
    pub fn succeed_bitmap(&mut self, of: &DirtyBitmap, still: &Quiesced<'_>) {
        self.successor = Some(self.from.succeed_bitmap(of, still));
    }

    /// Have what takes the bitmap's place mark what is not saved, too: the next backup has it then.
    pub fn mark_unsaved(&self, successor: &Successor) {
        let mut at = 0;
        while let Some(range) = self.kept.left.next(at, u64::MAX) {
            at = range.end;
            successor.marks().mark(range.start..range.end.min(self.kept.size));
        }
    }

    /// What is to take a bitmap's place in the end.
    pub fn successor(&self) -> Option<&Successor> {
        self.successor.as_ref()
    }
}
