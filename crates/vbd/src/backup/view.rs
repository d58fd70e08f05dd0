//! A moment as it is read, while it is kept.

use std::sync::{Arc, Mutex, PoisonError};

use ringtap_image::{Error, Status};
use ringtap_io::{Io, Mem};

use super::aside::PIECE;
use super::kept::Kept;
use crate::mirror::error::MirrorError;
use crate::{Disk, Kind, Request, Vbd};

/// Views that nobody reads by at the moment.
pub(super) type Idle = Arc<Mutex<Vec<View>>>;

/// What makes views of a moment.
#[derive(Clone)]
pub(crate) struct Moments {
    pub(super) kept: Arc<Kept>,
    pub(super) from: Disk,
    pub(super) idle: Idle,
}

impl Moments {
    pub(crate) fn fork(&self) -> View {
        let (from, target) = (self.from.fork(), self.kept.target.disk.fork());
        View { kept: self.kept.clone(), from, target }
    }

    /// A view for as long as it is used.
    pub(crate) fn borrow(&self) -> Borrowed<'_> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Borrowed { of: self, view: Some(idle.unwrap_or_else(|| self.fork())) }
    }
}

/// A view that goes back to those that nobody reads by.
pub(crate) struct Borrowed<'a> {
    of: &'a Moments,
    pub(crate) view: Option<View>,
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        let idle = &self.of.idle;
        idle.lock().unwrap_or_else(PoisonError::into_inner).extend(self.view.take());
    }
}

/// A moment of a disk as one thread reads it.
pub struct View {
    kept: Arc<Kept>,
    from: Vbd,
    target: Vbd,
}

impl View {
    /// Bytes of the disk at that moment.
    pub fn size(&self) -> u64 {
        self.kept.size
    }

    /// Fill `mem` with what the disk held from an offset on.
    pub async fn read(&self, io: &Io, offset: u64, mem: Mem) -> Result<(), MirrorError> {
        let kept = &*self.kept;
        let end = offset.checked_add(mem.len() as u64).filter(|end| *end <= kept.size);
        let end = end.ok_or(failed(offset, mem, Error::Range))?;
        let mut at = offset;
        while at < end {
            let to = (at - at % kept.granularity).saturating_add(kept.granularity).min(end);
            let part = mem.window((at - offset) as usize, (to - at) as usize);
            let mut from_disk = false;
            if kept.is_left(&(at..to)).is_some() {
                let work = self.from.within(async |pass| {
                    let held = kept.target.ranges.ask(at..to);
                    let _may_have_failed = kept.target.alone(&held).await;
                    match kept.is_left(&(at..to)) {
                        Some(_) => kept.read_old(io, pass, at, part).await.map(|()| true),
                        None => Ok(false),
                    }
                });
                let read = self.from.health().contain_all(work).await;
                from_disk = read.map_err(|error| failed(at, part, error))?;
            }
            if !from_disk {
                let (kind, len) = (Kind::Read, part.len() as u64);
                let request = Request { kind, offset: at, len, mem: part, fua: false };
                let read = self.target.serve(io, request).await;
                read.map_err(|error| failed(at, part, error))?;
            }
            at = to;
        }
        if kept.target.has_failed() { Err(MirrorError::Lost) } else { Ok(()) }
    }
}

impl View {
    /// What the range from an offset on held, for block status.
    pub async fn status(&self, io: &Io, offset: u64, len: u64) -> Result<Status, MirrorError> {
        let kept = &*self.kept;
        let end = offset.checked_add(len).filter(|end| *end <= kept.size && len > 0);
        let end = end.ok_or(MirrorError::Status { offset, error: Error::Range })?;
        let to = (offset - offset % kept.granularity).saturating_add(PIECE).min(end);
        // As far as all of it is saved, or none.
        let to = match kept.is_left(&(offset..to)) {
            None => return Ok(Status::data(to - offset)),
            Some(left) if left.start > offset => return Ok(Status::data(left.start - offset)),
            Some(left) => left.end.min(to),
        };
        let work = self.from.within(async |pass| {
            let held = kept.target.ranges.ask(offset..to);
            let _may_have_failed = kept.target.alone(&held).await;
            match kept.is_left(&(offset..to)) {
                Some(left) if left.start == offset => {
                    match kept.first_aside(&(offset..left.end.min(to))) {
                        Some(there) if there.start == offset => {
                            Ok(Status::data(there.end - offset))
                        }
                        there => {
                            let end = there.map_or(left.end.min(to), |there| there.start);
                            pass.image.status(io, offset, end - offset).await
                        }
                    }
                }
                Some(left) => Ok(Status::data(left.start - offset)),
                None => Ok(Status::data(to - offset)),
            }
        });
        let status = self.from.health().contain_all(work).await;
        let mut status = status.map_err(|error| MirrorError::Status { offset, error })?;
        // Where it lies is not for long.
        status.at = None;
        if kept.target.has_failed() { Err(MirrorError::Lost) } else { Ok(status) }
    }
}

fn failed(offset: u64, mem: Mem, error: Error) -> MirrorError {
    MirrorError::Read { offset, len: mem.len() as u64, error }
}
