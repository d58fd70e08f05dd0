//! Requests that change the disk and the target both, so that what is left to copy only becomes less.
//!
//! One range of both is written by one request, or copied by the job, at a time: else they could come to hold what
//! two of them wrote in another order. A write is carried out from a copy of the guest's bytes, which the guest
//! may change in flight. What fails on the disk, and what a request did that began before this was there, is marked
//! and copied later; what fails on the target ends the job, or is marked where that is to be tried again, and the guest does not see it.
//!
//! With a brake a guest's write is answered when the disk has it, and goes on to the target while nobody waits. Where too much is
//! on its way, or somebody else has the range, guests wait as long as the brake lets them; after that a write is
//! marked, and left for the job.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ringtap_image::Error;
use ringtap_io::{Io, Time};

use super::brake::Brake;
use super::content::{give, look};
use super::error::MirrorError;
use super::target::{Bytes, Target};
use super::together::within;
use crate::filter::{AlsoWrite, Filtered};
use crate::level::Pass;
use crate::map::Map;
use crate::ranges::Held;
use crate::track::Trackers;
use crate::trouble::OnErrors;
use crate::{Kind, Request};

/// What is discarded or zeroed in larger ranges is marked, and copied later.
const LARGEST: u64 = 64 << 20;

/// The filter.
pub(crate) struct Both {
    pub(crate) target: Arc<Target>,
    /// The job's own marks.
    pub(crate) marks: Arc<Map>,
    /// Bytes copied at once.
    pub(crate) piece: u64,
    /// By how much guests may be slowed; none: they wait for the target.
    pub(crate) brake: Option<Brake>,
    /// What becomes of the job where something cannot be copied.
    pub(crate) on_errors: OnErrors,
    /// Bytes of writes that were left for the job, for the target is too slow.
    pub(crate) passed: AtomicU64,
}

/// What a request may have changed, marked where this is dropped.
struct Changed<'a> {
    trackers: &'a Trackers,
    range: Range<u64>,
    /// Marks that it does not concern: the target has it, too.
    but: Option<&'a Arc<Map>>,
}

impl Drop for Changed<'_> {
    fn drop(&mut self) {
        self.trackers.note_but(self.but, self.range.clone());
    }
}

impl AlsoWrite for Both {
    fn also_write<'a>(
        &'a self,
        io: &'a Io,
        pass: Pass<'a>,
        request: &'a Request,
    ) -> Filtered<'a, Result<(), Error>> {
        Box::pin(self.carry_out(io, pass, request))
    }
}

impl Both {
    async fn carry_out(&self, io: &Io, pass: Pass<'_>, request: &Request) -> Result<(), Error> {
        if request.kind == Kind::Write && request.mem.is_kernels() {
            // Who brought it brings memory that can be looked at.
            return Err(Error::Unsupported);
        }
        let range = request.offset..request.offset + request.len;
        if let Some(brake) = &self.brake {
            return self.write_behind(io, pass, request, range, brake).await;
        }
        let held = Rc::new(self.target.ranges.ask(range.clone()));
        let waiting = self.target.wait();
        let ours = self.target.alone(&held).await;
        drop(waiting);
        let mut changed = Changed { trackers: &pass.medium.trackers, range, but: None };
        let copy = match ours && request.kind == Kind::Write {
            true => io.buffer(request.mem.len()).ok(),
            false => None,
        };
        let Some(copy) = copy else {
            pass.change(io, request).await?;
            let end = changed.range.end;
            let few = request.len <= LARGEST && request.kind != Kind::Write;
            if ours && few && end <= self.target.disk.size() {
                let copied = self.copy(io, pass, changed.range.clone(), &held).await;
                changed.but = self.is_there(copied);
            }
            return Ok(());
        };
        request.mem.copy_into(&copy.mem());
        pass.change(io, &Request { mem: copy.mem(), ..*request }).await?;
        if changed.range.end <= self.target.disk.size() {
            let (offset, len) = (request.offset, copy.bytes().len());
            let _waiting = self.target.wait();
            let bytes = Bytes::There(Rc::new(copy), 0, len);
            let written = self.target.write(io, offset, bytes, held).await;
            changed.but = self.is_there(written);
        }
        Ok(())
    }

    /// Carry it out, and have the target follow.
    async fn write_behind(
        &self,
        io: &Io,
        pass: Pass<'_>,
        request: &Request,
        range: Range<u64>,
        brake: &Brake,
    ) -> Result<(), Error> {
        let mut changed =
            Changed { trackers: &pass.medium.trackers, range: range.clone(), but: None };
        let held = match request.kind {
            Kind::Write => self.goes_on(io, range.clone(), brake).await,
            _ => None,
        };
        let copied = held.and_then(|held| Some((held, io.buffer(request.mem.len()).ok()?)));
        let Some((held, copy)) = copied else { return pass.change(io, request).await };
        request.mem.copy_into(&copy.mem());
        pass.change(io, &Request { mem: copy.mem(), ..*request }).await?;
        changed.but = Some(&self.marks);
        self.target.write_behind(io, &self.marks, range, Rc::new(copy), held);
        Ok(())
    }

    /// Whether the write of a range may go on to the target: then nobody else writes there.
    async fn goes_on(&self, io: &Io, range: Range<u64>, brake: &Brake) -> Option<Rc<Held>> {
        let (target, len) = (&self.target, range.end - range.start);
        if range.end > target.disk.size() || target.has_failed() {
            return None;
        }
        let held = Rc::new(target.ranges.ask(range));
        let began = io.now();
        let patience = brake.patience(began, len);
        let ours = in_time(io, patience, target.alone(&held)).await == Some(true);
        let left = patience.saturating_sub(io.now().saturating_sub(began));
        if ours {
            in_time(io, left, target.keeps_up()).await;
        }
        let goes_on = ours && target.has_room(len);
        if !goes_on {
            self.passed.fetch_add(len, Relaxed);
        }
        goes_on.then_some(held)
    }

    /// The marks that need not be set.
    fn is_there(&self, end: Result<(), MirrorError>) -> Option<&Arc<Map>> {
        match end {
            Ok(()) => Some(&self.marks),
            // It is marked, and the job meets the error itself.
            Err(why) if self.on_errors.try_again(&why) && !self.target.has_failed() => None,
            Err(why) => {
                self.target.fail(why);
                None
            }
        }
    }

    /// Have the target hold what the disk does, for the job.
    pub(crate) async fn copy_alone(
        &self,
        io: &Io,
        pass: Pass<'_>,
        range: Range<u64>,
    ) -> Result<(), MirrorError> {
        let held = Rc::new(self.target.ranges.ask(range.clone()));
        match self.target.alone(&held).await {
            true => self.copy(io, pass, range, &held).await,
            false => Err(MirrorError::Cancelled),
        }
    }

    /// The same of a range that nobody else writes to.
    async fn copy(
        &self,
        io: &Io,
        pass: Pass<'_>,
        range: Range<u64>,
        held: &Rc<Held>,
    ) -> Result<(), MirrorError> {
        let mut at = range.start;
        while at < range.end {
            let (len, content) = look(io, pass, at..range.end, self.piece, None).await?;
            let _waiting = self.target.wait();
            give(io, &self.target, at, len, content, false, held).await?;
            at += len;
        }
        Ok(())
    }
}

/// What `main` gives in that time; where there is none, at once.
async fn in_time<T>(io: &Io, limit: Time, main: impl Future<Output = T>) -> Option<T> {
    match limit {
        0 => within(main, std::future::ready(())).await,
        limit => within(main, io.sleep(limit)).await,
    }
}
