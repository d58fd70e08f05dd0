//! A moment that one job leaves and another goes on with, here or in another process.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;

use super::begin::Backup;
use super::kept::Kept;
use super::moment::Moment;
use crate::Successor;
use crate::job::Job;
use crate::map::Map;
use crate::mirror::error::MirrorError;
use crate::unfinished::LeftToSave;

impl Backup {
    /// Keep a moment of which another process has left so much to save: nothing has changed the disk since, and nobody does before this
    /// has ended.
    ///
    /// # Errors
    /// Where the target cannot hold it.
    pub fn go_on(self, left: &LeftToSave) -> Result<Moment, MirrorError> {
        // The disk may have grown since.
        self.check_for(left.size)?;
        let regions = Map::new(left.granularity);
        regions.add_pages(&left.marks, left.size);
        let LeftToSave { zeroed, some, limit, room, size, .. } = *left;
        let backup = Backup { zeroed, limit, room, ..self };
        let mut moment = backup.keep_left(regions, size, some, None);
        moment.offset = left.offset;
        moment.successor = left.successor.as_ref().map(|left| Successor::of(&moment.from, left));
        Ok(moment)
    }
}

impl Moment {
    /// What of it is still to be saved.
    pub fn left(&self) -> LeftToSave {
        let Kept { left, granularity, size, zeroed, some, limit, .. } = &*self.kept;
        let (granularity, size, zeroed, some) = (*granularity, *size, *zeroed, *some);
        let successor = self.successor.as_ref().map(Successor::left);
        let room = Some(self.kept.room.load(SeqCst)).filter(|room| *room < u64::MAX);
        let (limit, marks, offset) = (*limit, left.set_pages(), self.offset);
        LeftToSave { granularity, size, zeroed, some, limit, room, offset, marks, successor }
    }

    /// Nobody reads it now, nor does anybody before it is taken up: it keeps nothing of its disk and its target open.
    pub fn rest(&self) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Whether another job is to go on with it, for which this one was cancelled.
    pub fn is_left(&self, job: &Job) -> bool {
        job.is_for_next() && self.is_whole()
    }

    /// Leave it to another job, where that goes on with it: requests go on waiting until what they change is saved.
    pub fn leave(mut self, job: &Job) {
        if self.is_left(job) {
            self.successor = self.successor.take().map(Successor::leave);
            self.offset = job.progress().offset;
            job.leave_moment(self);
        }
    }

    /// Go on with it after [`Moment::leave`], here or in another process. The disk is open, and so is what its bitmaps are kept in.
    #[must_use]
    pub fn take_up(mut self) -> Moment {
        self.reopen_scratch();
        self.successor = self.successor.take().and_then(Successor::take_up);
        self
    }
}
