//! Requests that change the disk and the target both, so that what is left to copy only becomes less.
//!
//! One range of both is written by one request, or copied by the job, at a time: else they could come to hold what
//! two of them wrote in another order. A write is carried out from a copy of the guest's bytes, which the guest
//! may change in flight. What fails on the disk, and what a request did that began before this was there, is marked
//! and copied later; what fails on the target ends the job, and the guest does not see it.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ringtap_image::Error;
use ringtap_io::Io;

use super::content::{give, look};
use super::error::MirrorError;
use super::target::{Bytes, Target};
use crate::filter::{AlsoWrite, Filtered};
use crate::level::Pass;
use crate::map::Map;
use crate::ranges::Held;
use crate::track::Trackers;
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
        let held = Rc::new(self.target.ranges.ask(range.clone()));
        let waiting = self.target.wait();
        let ours = self.target.alone(&held).await;
        drop(waiting);
        let mut changed = Changed { trackers: &pass.shared.trackers, range, but: None };
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

    /// The marks that need not be set.
    fn is_there(&self, end: Result<(), MirrorError>) -> Option<&Arc<Map>> {
        match end {
            Ok(()) => Some(&self.marks),
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
