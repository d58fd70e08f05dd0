//! What lies below a disk's topmost image, brought into that image while the disk is served.
//!
//! What a guest sees does not change, so that the job may end anywhere: what has been brought up is read above from then on,
//! the rest below as before. One range is written to by one request, or brought up by the job, at a time: else the job
//! could write what it read before a request changed it.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use ringtap_image::{Error, Status};
use ringtap_io::{Io, Mem};

use crate::bytes::{is_zero, runs};
use crate::disk::lock;
use crate::filter::{AlsoWrite, Filtered};
use crate::job::{Job, Pace};
use crate::level::Pass;
use crate::mirror::together::{together, within};
use crate::phase::{Cancelled, Phase};
use crate::ranges::Ranges;
use crate::trouble::{Action, OnError, Trouble};
use crate::walk::Walk;
use crate::{Disk, Request, Vbd};

/// The most of what need not be brought up that is passed at once.
const PASSED: u64 = 256 << 20;
/// The least zeros that are looked for in what is brought up.
const SPARSE: u64 = 4096;
/// How often a piece that finds no room is tried again, once what was freed may be used.
const TRIES: u32 = 3;

/// For tests: what it does wrong.
#[cfg(feature = "sabotage")]
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamWrongs {
    /// Requests write to ranges that are being brought up.
    pub unlocked: bool,
    /// What is brought up is not made stable.
    pub unflushed: bool,
    /// Requests that began before are not waited for.
    pub impatient: bool,
}

/// What is brought into the topmost image of a disk, and how.
pub struct Stream {
    /// The disk.
    pub disk: Disk,
    /// How many images there are above the one that stays below; none stays where there is no number.
    pub above: Option<u32>,
    /// Bytes read and written at once.
    pub piece: u64,
    /// How many pieces are in flight at once.
    pub requests: usize,
    /// What becomes of the job where it meets an error.
    pub on_error: OnError,
    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    pub wrongs: StreamWrongs,
}

/// Why a stream ended early. The disk is as good as before.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// Where the disk has data could not be found.
    #[error("finding out what the disk holds at {offset} failed: {error}")]
    Status {
        /// Where.
        offset: u64,
        /// Why.
        error: Error,
    },
    /// What lies below could not be read.
    #[error("reading {len} bytes at {offset} failed: {error}")]
    Read {
        /// Where.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// Why.
        error: Error,
    },
    /// The topmost image could not be written to.
    #[error("writing {len} bytes at {offset} of the topmost image failed: {error}")]
    Write {
        /// Where.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// Why.
        error: Error,
    },
    /// The topmost image could not be made stable.
    #[error("making the disk stable failed: {error}")]
    Flush {
        /// Why.
        error: Error,
    },
    /// Another job has the disk's writes pass it.
    #[error("another job is at work on the disk")]
    InUse,
    /// A panic has stopped the disk.
    #[error("the disk is stopped")]
    Stopped,
    /// [`Job::cancel`] was called.
    #[error("cancelled")]
    Cancelled,
}

impl From<Cancelled> for StreamError {
    fn from(_: Cancelled) -> StreamError {
        StreamError::Cancelled
    }
}

/// Has requests wait for what is being brought up of their range.
struct Alone {
    ranges: Arc<Ranges>,
}

impl AlsoWrite for Alone {
    fn also_write<'a>(
        &'a self,
        io: &'a Io,
        pass: Pass<'a>,
        request: &'a Request,
    ) -> Filtered<'a, Result<(), Error>> {
        Box::pin(async move {
            let held = self.ranges.ask(request.offset..request.offset + request.len);
            held.ours(|| false).await;
            pass.carry_out(io, request).await
        })
    }
}

/// Requests pass the filter as long as this is there.
struct Filtering<'a>(&'a Disk);

impl Drop for Filtering<'_> {
    fn drop(&mut self) {
        let shared = &self.0.shared;
        shared.filters.remove_also(&shared.door);
    }
}

/// What its workers share.
struct Work<'a> {
    stream: &'a Stream,
    vbd: Vbd,
    walk: Walk<Fate>,
    ranges: Arc<Ranges>,
    pace: Pace,
    job: &'a Job,
    failure: RefCell<Option<StreamError>>,
    /// The first error after which it has gone on.
    ignored: RefCell<Option<StreamError>>,
}

/// What becomes of a part of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It reads the same without those that go.
    Stays,
    /// Zeros that those that go have, or hide.
    Zeros,
    /// Data that those that go have.
    Data,
}

impl Stream {
    /// Bring up what lies below the topmost image; all of it, or down to the one with so many above it.
    pub fn new(disk: impl Into<Disk>, above: Option<u32>) -> Stream {
        Stream {
            disk: disk.into(),
            above,
            piece: 1 << 20,
            requests: 8,
            on_error: OnError::default(),
            #[cfg(feature = "sabotage")]
            wrongs: StreamWrongs::default(),
        }
    }

    /// Do it, until the topmost image has it all and is stable: then those that go can go. Nothing else may replace the
    /// disk's image meanwhile.
    pub async fn run(&self, io: &Io, job: &Job) -> Result<(), StreamError> {
        job.set_phase(Phase::Copying);
        let end = self.bring_all(io, job).await;
        if end.is_err() {
            job.set_phase(Phase::Failed);
        }
        end
    }

    async fn bring_all(&self, io: &Io, job: &Job) -> Result<(), StreamError> {
        let (shared, ranges) = (&self.disk.shared, Arc::<Ranges>::default());
        let filter = Arc::new(Alone { ranges: self.locked(&ranges) });
        if !shared.filters.install_also(&shared.door, filter) {
            return Err(StreamError::InUse);
        }
        let filtering = Filtering(&self.disk);
        self.wait_for_earlier(job).await?;
        let size = self.disk.size();
        job.set_left(size);
        let work = Work {
            stream: self,
            vbd: self.disk.fork(),
            walk: Walk::new(0, size),
            ranges,
            pace: Pace::new(job, io, &self.disk),
            job,
            failure: RefCell::default(),
            ignored: RefCell::default(),
        };
        together((0..self.requests.max(1)).map(|_| work.take_part(io))).await;
        drop(filtering);
        if let Some(why) = work.failure.take().or_else(|| work.ignored.take()) {
            return Err(why);
        }
        #[cfg(feature = "sabotage")]
        if self.wrongs.unflushed {
            return Ok(());
        }
        work.vbd.flush(io).await.map_err(|error| StreamError::Flush { error })
    }

    fn locked(&self, ranges: &Arc<Ranges>) -> Arc<Ranges> {
        #[cfg(feature = "sabotage")]
        if self.wrongs.unlocked {
            return Arc::default();
        }
        ranges.clone()
    }

    /// Wait for requests that began before the filter was there.
    async fn wait_for_earlier(&self, job: &Job) -> Result<(), StreamError> {
        #[cfg(feature = "sabotage")]
        if self.wrongs.impatient {
            return Ok(());
        }
        let epochs = lock(&self.disk.shared.current).epochs.clone();
        let over = within(epochs.over(epochs.epoch()), job.cancelled()).await;
        over.ok_or(StreamError::Cancelled)
    }

    async fn bring_alone(
        &self,
        io: &Io,
        pass: Pass<'_>,
        range: Range<u64>,
    ) -> Result<(), StreamError> {
        let mut at = range.start;
        while at < range.end {
            let (fate, len) = self.look(io, pass, at..range.end).await?;
            match fate {
                Fate::Stays => {}
                Fate::Zeros => Box::pin(self.zeros(io, pass, at, len)).await?,
                // Threads that do jobs have small stacks.
                Fate::Data => Box::pin(self.data(io, pass, at, len)).await?,
            }
            at += len;
        }
        Ok(())
    }

    /// What becomes of the next part of a range, and how long that is: as far as it is the same for all.
    async fn look(
        &self,
        io: &Io,
        pass: Pass<'_>,
        range: Range<u64>,
    ) -> Result<(Fate, u64), StreamError> {
        let (mut at, mut found) = (range.start, None);
        while at < range.end {
            let status = pass.image.status(io, at, range.end - at).await;
            let status = status.map_err(|error| StreamError::Status { offset: at, error })?;
            let fate = self.fate(&status);
            if *found.get_or_insert(fate) != fate {
                break;
            }
            at += status.len;
        }
        Ok((found.unwrap_or(Fate::Stays), at - range.start))
    }

    fn fate(&self, status: &Status) -> Fate {
        let above = self.above.unwrap_or(u32::MAX);
        match status.depth {
            // Behind the end of one that goes: what is to be next below may be longer.
            depth if !status.present && status.zero && depth.saturating_add(1) < above => {
                if self.above.is_none() { Fate::Stays } else { Fate::Zeros }
            }
            0 => Fate::Stays,
            depth if depth >= above => Fate::Stays,
            // With nothing below, what nobody has reads as zeros.
            _ if status.zero && self.above.is_none() => Fate::Stays,
            _ if status.zero => Fate::Zeros,
            _ => Fate::Data,
        }
    }

    async fn zeros(
        &self,
        io: &Io,
        pass: Pass<'_>,
        offset: u64,
        len: u64,
    ) -> Result<(), StreamError> {
        if self.above.is_none() {
            return Ok(());
        }
        let end = pass.write_zeroes(io, offset, len, true, false, false).await;
        end.map_err(|error| StreamError::Write { offset, len, error })
    }

    async fn data(
        &self,
        io: &Io,
        pass: Pass<'_>,
        offset: u64,
        len: u64,
    ) -> Result<(), StreamError> {
        let failed = |error| StreamError::Read { offset, len, error };
        let buffer = io.buffer(len as usize).map_err(|error| failed(Error::Os(error)))?;
        pass.read(io, offset, buffer.mem()).await.map_err(failed)?;
        // A part of what has to be allocated as a whole is written with the rest of it.
        let grain = pass.image.info().discard_alignment.max(SPARSE);
        let head = (offset.next_multiple_of(grain) - offset).min(len) as usize;
        let (first, rest) = buffer.bytes().split_at(head);
        if !first.is_empty() {
            self.write(io, pass, offset, buffer.mem().window(0, head)).await?;
        }
        for run in runs(rest.len(), grain as usize, |range| is_zero(&rest[range])) {
            let (from, len) = (head + run.from, run.to - run.from);
            let at = offset + from as u64;
            match run.chosen {
                true => self.zeros(io, pass, at, len as u64).await?,
                false => self.write(io, pass, at, buffer.mem().window(from, len)).await?,
            }
        }
        Ok(())
    }

    /// As a guest does, but that nothing changes for it: no bitmap and no tracker is told.
    async fn write(
        &self,
        io: &Io,
        pass: Pass<'_>,
        offset: u64,
        mem: Mem,
    ) -> Result<(), StreamError> {
        let len = mem.len() as u64;
        let end = pass.write(io, offset, mem, false).await;
        end.map_err(|error| StreamError::Write { offset, len, error })
    }
}

impl Work<'_> {
    async fn take_part(&self, io: &Io) {
        if let Err(why) = self.bring(io).await {
            self.failure.borrow_mut().get_or_insert(why);
        }
    }

    async fn bring(&self, io: &Io) -> Result<(), StreamError> {
        let most = |fate: &Fate| if *fate == Fate::Data { self.stream.piece } else { PASSED };
        let look = async |offset, len| {
            let status = self.vbd.status(io, offset, len).await;
            let status = status.map_err(|error| StreamError::Status { offset, error })?;
            Ok::<_, StreamError>((self.stream.fate(&status), status.len))
        };
        while let Some(piece) = self.walk.next(most, look).await? {
            let range = piece.offset..piece.offset + piece.len;
            if self.failure.borrow().is_some() {
                return Ok(());
            }
            let moved = if piece.what == Fate::Data { piece.len } else { 0 };
            self.pace.wait(io, moved).await?;
            self.pace.measure(io, 0);
            if piece.what != Fate::Stays {
                while let Err(why) = Box::pin(self.bring_piece(io, range.clone())).await {
                    match self.meets(why)? {
                        Action::Stop => self.pace.wait(io, 0).await?,
                        Action::Report | Action::Ignore => break,
                    }
                }
            }
            self.job.add(piece.len);
        }
        Ok(())
    }

    /// An error has been met: what is done about it, where that is not the end.
    fn meets(&self, why: StreamError) -> Result<Action, StreamError> {
        let (write, error) = match why {
            StreamError::Status { error, .. } | StreamError::Read { error, .. } => (false, error),
            StreamError::Write { error, .. } => (true, error),
            _ => return Err(why),
        };
        let action = self.stream.on_error.action(error);
        // One that stops the job tells of it for all that meet the same.
        if action != Action::Stop || !self.job.progress().paused {
            self.job.meets(Trouble { write, error, action });
        }
        match action {
            Action::Report => Err(why),
            Action::Stop => Ok(action),
            Action::Ignore => {
                self.ignored.borrow_mut().get_or_insert(why);
                Ok(action)
            }
        }
    }

    /// Bring up a range; a request that wrote there since it was looked at has made it the topmost image's own.
    async fn bring_piece(&self, io: &Io, range: Range<u64>) -> Result<(), StreamError> {
        let Range { start, end } = range;
        let mut tries = 0;
        loop {
            let work = self.vbd.within(async |pass| {
                let held = self.ranges.ask(start..end);
                held.ours(|| false).await;
                Ok(Box::pin(self.stream.bring_alone(io, pass, start..end)).await)
            });
            let brought = self.vbd.health().contain_all(work).await;
            match brought.unwrap_or(Err(StreamError::Stopped)) {
                // What was freed cannot be used before this request, too, is out of the way.
                Err(StreamError::Write { error: Error::Full, .. }) if tries < TRIES => {
                    tries += 1;
                    let (offset, len) = (start, end - start);
                    let rested = self.vbd.rest(io).await;
                    rested.map_err(|error| StreamError::Write { offset, len, error })?;
                }
                brought => return brought,
            }
        }
    }
}
