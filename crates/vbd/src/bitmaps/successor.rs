//! Marks that are to take a bitmap's place: those since the moment of a backup, once that has ended well.

use std::sync::Arc;

use super::{DirtyBitmap, lock};
use crate::track::Tracker;
use crate::unfinished::LeftMarks;
use crate::{Disk, Quiesced};

/// What is marked beside a bitmap. It is marked no more once this drops; where it has become the bitmap's by then
/// ([`crate::BitmapChange::Replace`]) that goes on.
pub struct Successor {
    disk: Disk,
    name: String,
    marks: Arc<Tracker>,
    /// Whether requests are noted in it.
    recording: bool,
}

impl Disk {
    /// Marks for a bitmap that is to be as if it had been cleared at this moment, once what was marked is no longer needed:
    /// requests are noted in both from now on. The disk stands still.
    pub fn succeed_bitmap(&self, of: &DirtyBitmap, _: &Quiesced<'_>) -> Successor {
        let marks = self.new_marks(of.marks.granularity(), of.persistent);
        Successor::new(self.clone(), of.name.clone(), marks, of.recording)
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        let bitmaps = &self.disk.shared.medium.bitmaps;
        bitmaps.mark_no_more(self.marks.map());
        let is_used = lock(&bitmaps.all).iter().any(|one| Arc::ptr_eq(&one.marks, &self.marks));
        if let (Some(keep), Some(number)) = (bitmaps.keep(), self.marks.map().number()) {
            if !is_used {
                keep.store.memory().forget(number);
            }
        }
    }
}

impl Successor {
    fn new(disk: Disk, name: String, marks: Arc<Tracker>, recording: bool) -> Successor {
        if recording {
            disk.shared.medium.bitmaps.also_mark(marks.map());
        }
        Successor { disk, name, marks, recording }
    }

    /// The bitmap's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The marks.
    pub fn marks(&self) -> &Arc<Tracker> {
        &self.marks
    }

    /// The same, kept as the bitmap's are or only in this process. Requests go on meanwhile.
    fn copied(&self, persistent: bool) -> Successor {
        let marks = self.disk.new_marks(self.marks.granularity(), persistent);
        let copy = Successor::new(self.disk.clone(), self.name.clone(), marks, self.recording);
        copy.marks.map().merge(self.marks.map(), u64::MAX);
        copy
    }

    /// Where bitmaps are kept is about to be closed.
    #[must_use]
    pub fn leave(self) -> Successor {
        self.copied(false)
    }

    /// Where bitmaps are kept is open again, here or in another process; none where that has not brought the bitmap.
    #[must_use]
    pub fn take_up(self) -> Option<Successor> {
        let fits = |one: &DirtyBitmap| {
            one.name == self.name
                && one.lost.is_none()
                && one.marks.granularity() == self.marks.granularity()
        };
        let of = self.disk.dirty_bitmaps().into_iter().find(fits);
        if of.is_none() {
            tracing::warn!("the bitmap {} is lost: the next backup is a full one", self.name);
        }
        of.map(|of| self.copied(of.persistent))
    }

    pub(crate) fn left(&self) -> LeftMarks {
        LeftMarks {
            bitmap: self.name.clone(),
            granularity: self.marks.granularity(),
            recording: self.recording,
            marks: self.marks.map().set_pages(),
        }
    }

    /// What another process has left, of a disk that nobody has changed since.
    pub(crate) fn of(disk: &Disk, left: &LeftMarks) -> Successor {
        let LeftMarks { bitmap, granularity, recording, marks } = left;
        let new = disk.new_marks(*granularity, false);
        new.map().add_pages(marks, disk.size());
        Successor::new(disk.clone(), bitmap.clone(), new, *recording)
    }
}
