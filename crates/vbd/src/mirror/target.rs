//! What a mirror writes to: by the job, and by guests' requests, none of which waits for it for longer than is allowed.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringtap_image::Error;
use ringtap_io::{Buffer, Event, Io, Mem, Time};

use super::error::MirrorError;
use super::over::{Ends, Over};
use super::together::within;
use super::unstable::{Flushing, Unstable};
use crate::map::Map;
use crate::ranges::{Held, Ranges};
use crate::{Disk, Kind, Request, Vbd};

/// Of guests' writes that are on their way to the target while nobody waits for them: beyond so many bytes guests wait, as long as
/// they may, and beyond the second number their writes are left for the job.
pub(crate) const BEHIND: [u64; 2] = [1 << 20, 32 << 20];
/// So many times as much as what has guests wait has the job wait.
const JOB_WAITS: u64 = 4;

/// How often it is looked, in the time that a guest may wait, whether it has been that long.
const LOOKS: u32 = 4;

/// So long, or so many times as long as a guest's write, may a target take to answer whoever makes it stable: all that was copied
/// hangs on that, and no guest does.
const FLUSH: (Time, Time) = (30_000_000_000, 6);
/// The part of that after which it is asked for more.
const ASKS: Time = 6;
/// Bytes that are read to see whether it answers.
const LOOKED_AT: u64 = 4096;

/// The disk that is written to.
pub(crate) struct Target {
    pub(crate) disk: Disk,
    /// What is written by guests' requests, and by the job meanwhile.
    pub(crate) ranges: Arc<Ranges>,
    /// Handles that nobody uses at the moment: the threads of guests take turns.
    idle: Mutex<Vec<Vbd>>,
    state: Mutex<State>,
    told: Event,
    /// Bytes written to it.
    written: AtomicU64,
    /// Where bytes were written last that are not known to be zeros.
    last: AtomicU64,
    /// [`BEHIND`].
    behind: [u64; 2],
    /// What a flush that fails may have lost, where somebody writes that again.
    unstable: Option<Unstable>,
    /// Whether its image is to say of zeros that it has them, for it may lie upon another one day.
    says_zeros: bool,
    /// For tests: nobody waits for ranges.
    #[cfg(feature = "sabotage")]
    unlocked: bool,
}

#[derive(Default)]
struct State {
    failure: Option<MirrorError>,
    failed: bool,
    /// Numbers of those that wait.
    next: u64,
    waiting: BTreeSet<u64>,
    /// Writes and flushes that have not ended.
    in_flight: usize,
    /// Of those the writes, and how many of them have ended.
    writes: usize,
    writes_ended: u64,
    /// Bytes of those for which nobody waits, and how many of these have ended.
    behind: u64,
    behind_ended: u64,
    /// The disk is about to stand still: guests are not held up.
    hurries: bool,
}

/// A write or flush that is counted until it has ended, or has gone with its thread.
struct InFlight {
    target: Arc<Target>,
    writes: usize,
}

impl InFlight {
    fn new(target: &Arc<Target>, what: What) -> InFlight {
        let writes = usize::from(what == What::Write);
        let mut state = target.lock();
        state.in_flight += 1;
        state.writes += writes;
        let first = writes == 1 && state.writes == 1;
        drop(state);
        if first {
            target.told.notify();
        }
        InFlight { target: target.clone(), writes }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut state = self.target.lock();
        state.in_flight -= 1;
        state.writes -= self.writes;
        state.writes_ended += self.writes as u64;
        drop(state);
        self.target.told.notify();
    }
}

/// What the target is asked for. A flush may take long of a target that is well.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Write,
    Flush,
}

/// Bytes on their way for which nobody waits. Where they do not come to the target the range is marked.
struct WriteBehind {
    target: Arc<Target>,
    marks: Arc<Map>,
    range: Range<u64>,
    written: bool,
}

impl Drop for WriteBehind {
    fn drop(&mut self) {
        if !self.written {
            self.marks.mark(self.range.clone());
        }
        let mut state = self.target.lock();
        state.behind -= self.range.end - self.range.start;
        state.behind_ended += 1;
        drop(state);
        self.target.told.notify();
    }
}

/// All that a write holds for which nobody waits. Its range is marked, if it is to be, before others may have it, and before
/// nothing is in flight.
struct OnItsWay {
    behind: WriteBehind,
    _held: Rc<Held>,
    in_flight: InFlight,
}

/// Something for which a guest waits.
pub(crate) struct Waiting<'a> {
    target: &'a Target,
    number: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.target.lock().waiting.remove(&self.number);
    }
}

/// Bytes for the target, or none: zeros.
#[derive(Clone)]
pub(crate) enum Bytes {
    Zeros(u64),
    /// A window of a buffer.
    There(Rc<Buffer>, usize, usize),
}

impl Bytes {
    fn len(&self) -> u64 {
        match self {
            Bytes::Zeros(len) => *len,
            Bytes::There(_, _, len) => *len as u64,
        }
    }
}

impl Target {
    pub(crate) fn new(disk: Disk) -> Target {
        let (ranges, idle, state, told) = Default::default();
        Target {
            disk,
            ranges,
            idle,
            state,
            told,
            written: AtomicU64::new(0),
            last: AtomicU64::new(0),
            behind: BEHIND,
            unstable: None,
            says_zeros: false,
            #[cfg(feature = "sabotage")]
            unlocked: false,
        }
    }

    #[cfg(feature = "sabotage")]
    pub(crate) fn with_ranges_unlocked(self, unlocked: bool) -> Target {
        Target { unlocked, ..self }
    }

    /// The same with other bounds than [`BEHIND`].
    pub(crate) fn with_behind(self, behind: [u64; 2]) -> Target {
        Target { behind, ..self }
    }

    /// The same that knows what it may have lost by a flush that fails, in regions of so many bytes.
    pub(crate) fn with_unstable(self, granularity: u64) -> Target {
        Target { unstable: Some(Unstable::new(granularity)), ..self }
    }

    /// The same whose image says of zeros that it has them.
    pub(crate) fn with_zeros_said(self, says_zeros: bool) -> Target {
        Target { says_zeros, ..self }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Give it up: nobody writes to it any more. The first reason is kept.
    pub(crate) fn fail(&self, why: MirrorError) {
        let mut state = self.lock();
        if !std::mem::replace(&mut state.failed, true) {
            state.failure = Some(why);
        }
        drop(state);
        self.told.notify();
        self.ranges.look_again();
    }

    /// The same for the last time; gives the first reason, unless that has been told.
    pub(crate) fn failed_by(&self, why: MirrorError) -> MirrorError {
        let first = self.lock().failure.take();
        self.fail(MirrorError::Cancelled);
        first.unwrap_or(why)
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.lock().failed
    }

    /// Wait until it has failed.
    pub(crate) async fn broken(&self) {
        loop {
            let told = self.told.listen();
            if self.has_failed() {
                return;
            }
            told.await;
        }
    }

    /// Why, told once.
    pub(crate) fn failure(&self) -> Option<MirrorError> {
        let mut state = self.lock();
        state.failed.then(|| state.failure.take().unwrap_or(MirrorError::Cancelled))
    }

    /// Wait until nobody else writes to a range; false where the target has failed before.
    pub(crate) async fn alone(&self, held: &Held) -> bool {
        #[cfg(feature = "sabotage")]
        if self.unlocked {
            return true;
        }
        held.ours(|| self.has_failed()).await
    }

    pub(crate) fn take(&self) -> Vbd {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        idle.unwrap_or_else(|| self.disk.fork())
    }

    pub(crate) fn give_back(&self, vbd: Vbd) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(vbd);
    }

    /// A guest waits from now on.
    pub(crate) fn wait(&self) -> Waiting<'_> {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.waiting.insert(number);
        Waiting { target: self, number }
    }

    /// Give the target up when a guest has waited for so long, or when of what guests have written nothing has come to it for as
    /// long. It never ends.
    pub(crate) async fn watch(&self, io: &Io, limit: Time) {
        // Clocks of threads differ: a guest has waited for as long as it is seen here.
        let mut seen = [u64::MAX; LOOKS as usize];
        let (mut ended, mut silent) = (None, 0);
        loop {
            io.sleep(limit / Time::from(LOOKS)).await;
            let (oldest, next, behind) = {
                let state = self.lock();
                let behind = (state.behind > 0).then_some(state.behind_ended);
                (state.waiting.first().copied(), state.next, behind)
            };
            silent = if behind.is_some() && behind == ended { silent + 1 } else { 0 };
            ended = behind;
            if silent > LOOKS {
                self.fail(MirrorError::Late { limit });
            }
            if oldest.is_some_and(|oldest| seen[0] != u64::MAX && oldest < seen[0]) {
                self.fail(MirrorError::Late { limit });
            }
            seen.rotate_left(1);
            seen[seen.len() - 1] = next;
        }
    }

    /// Give the target up when it has had writes for so long and has ended none of them, whether a guest waits for that or
    /// only the job does. It ends with the target alone.
    pub(crate) async fn watch_for_silence(&self, io: &Io, limit: Time) {
        loop {
            self.written_to().await;
            let (mut written, mut looks) = (self.lock().writes_ended, 0);
            while looks < LOOKS {
                io.sleep(limit / Time::from(LOOKS)).await;
                let state = self.lock();
                if state.failed || state.writes == 0 {
                    break;
                }
                looks = if state.writes_ended == written { looks + 1 } else { 0 };
                written = state.writes_ended;
            }
            if looks == LOOKS {
                self.fail(MirrorError::Late { limit });
            }
            if self.has_failed() {
                return;
            }
        }
    }

    fn is_written_to(&self) -> bool {
        self.lock().writes > 0
    }

    /// Wait until it is being written to, or has failed.
    async fn written_to(&self) {
        loop {
            let told = self.told.listen();
            if self.is_written_to() || self.has_failed() {
                return;
            }
            told.await;
        }
    }

    /// Write, in a task of its own: who waits for that waits no longer than until the target has failed, and what
    /// `keep` holds is held until the write has ended. One that is in flight when its thread ends is cancelled: by then
    /// nobody waits for it.
    pub(crate) async fn write<K: 'static>(
        self: &Arc<Target>,
        io: &Io,
        offset: u64,
        bytes: Bytes,
        keep: K,
    ) -> Result<(), MirrorError> {
        let (len, zeros) = (bytes.len(), matches!(bytes, Bytes::Zeros(_)));
        let (says_zeros, own) = (self.says_zeros, self.clone());
        let given = async move |io: &Io, vbd: &Vbd| {
            let (kind, mem) = match &bytes {
                Bytes::Zeros(_) => (Kind::WriteZeroes { unmap: true, fast: false }, Mem::EMPTY),
                Bytes::There(buffer, at, len) => (Kind::Write, buffer.mem().window(*at, *len)),
            };
            let end = vbd.serve(io, Request { kind, offset, len, mem, fua: false }).await;
            own.has_written(offset..offset + len);
            end?;
            match &bytes {
                Bytes::Zeros(_) if says_zeros => say_zeros(io, vbd, offset, len).await,
                _ => Ok(()),
            }
        };
        let end = self.aside(io, What::Write, given, keep).await;
        if end == Some(Ok(())) {
            self.written.fetch_add(len, Relaxed);
            if !zeros {
                self.last.store(offset, Relaxed);
            }
        }
        end.unwrap_or(Err(Error::Stopped)).map_err(|error| MirrorError::Write {
            offset,
            len,
            error,
        })
    }

    /// Write what guests have written to the disk, and have nobody wait for that; `held` is the range, which nobody else writes to
    /// meanwhile. Where it fails the range is marked: the job meets the error itself then.
    pub(crate) fn write_behind(
        self: &Arc<Target>,
        io: &Io,
        marks: &Arc<Map>,
        range: Range<u64>,
        bytes: Rc<Buffer>,
        held: Rc<Held>,
    ) {
        let (offset, len) = (range.start, range.end - range.start);
        self.lock().behind += len;
        let behind =
            WriteBehind { target: self.clone(), marks: marks.clone(), range, written: false };
        let way = OnItsWay { behind, _held: held, in_flight: InFlight::new(self, What::Write) };
        let (own, over) = (io.clone(), Rc::new(Over::default()));
        let (ended, given_up) = (over.clone(), self.clone());
        // A write that is cancelled may come to its target all the same, after what others write there since: it keeps its
        // thread until it has ended, or the target has failed.
        io.spawn(async move { within(ended.wait(), given_up.broken()).await.unwrap_or(()) });
        io.spawn_expendable(async move {
            // All of it, not only what is named below.
            let (mut way, _over) = (way, Ends(over));
            let target = &way.in_flight.target;
            let (vbd, mem) = (target.take(), bytes.mem().window(0, len as usize));
            let request = Request { kind: Kind::Write, offset, len, mem, fua: false };
            let end = vbd.serve(&own, request).await;
            target.give_back(vbd);
            target.has_written(offset..offset + len);
            if end.is_ok() {
                target.written.fetch_add(len, Relaxed);
            }
            way.behind.written = end.is_ok();
        });
    }

    /// Whether so many bytes more may be on their way.
    pub(crate) fn has_room(&self, len: u64) -> bool {
        self.lock().behind.saturating_add(len) <= self.behind[1]
    }

    /// Wait until few bytes are on their way, or it has failed: so do guests.
    pub(crate) async fn keeps_up(&self) {
        self.has_no_more_than(self.behind[0]).await;
    }

    /// The same of the job, which would never have its turn if guests waited for no less than it does.
    pub(crate) async fn can_take_more(&self) {
        self.has_no_more_than(self.behind[0].saturating_mul(JOB_WAITS)).await;
    }

    async fn has_no_more_than(&self, bytes: u64) {
        loop {
            let told = self.told.listen();
            {
                let state = self.lock();
                if state.behind <= bytes || state.failed || state.hurries {
                    return;
                }
            }
            told.await;
        }
    }

    /// Have nobody held up who waits for it to keep up, or have them wait again.
    pub(crate) fn hurry(&self, hurries: bool) {
        self.lock().hurries = hurries;
        self.told.notify();
    }

    /// Bytes that have been written to it.
    pub(crate) fn written(&self) -> u64 {
        self.written.load(Relaxed)
    }

    fn has_written(&self, range: Range<u64>) {
        self.unstable.as_ref().inspect(|unstable| unstable.written(range));
    }

    /// What was written since it was stable last, in marks that whoever asks has to deal with.
    pub(crate) fn take_unstable(&self) -> Option<Map> {
        self.unstable.as_ref().map(Unstable::take)
    }

    /// Make what was written stable, which may take long of a target that is well. One that does not even answer a read
    /// meanwhile, for as long as [`FLUSH`] says, is silent.
    pub(crate) async fn flush(
        self: &Arc<Target>,
        io: &Io,
        limit: Option<Time>,
    ) -> Result<(), MirrorError> {
        let flushing = self.unstable.as_ref().map(Unstable::flushing);
        let flush = async |io: &Io, vbd: &Vbd| vbd.flush(io).await;
        // On the heap: the stack of a job's thread is small.
        let flushed = Box::pin(self.aside(io, What::Flush, flush, ()));
        let end = match limit.map(|limit| limit.saturating_mul(FLUSH.1).max(FLUSH.0)) {
            Some(limit) => {
                let end = within(flushed, Box::pin(self.answers_no_read(io, limit))).await;
                end.ok_or(MirrorError::Silent { limit })?
            }
            None => flushed.await,
        };
        let end = end.unwrap_or(Err(Error::Stopped));
        end.map_err(|error| MirrorError::Flush { error })?;
        flushing.map(Flushing::ended_well);
        Ok(())
    }

    /// Wait until it has not answered a read for so long, though it is not paused. Of what was written: an image may know by
    /// itself what else there is.
    async fn answers_no_read(self: &Arc<Target>, io: &Io, limit: Time) {
        let at = self.last.load(Relaxed);
        let len = self.disk.size().saturating_sub(at).min(LOOKED_AT);
        let look = async || {
            let read = async move |io: &Io, vbd: &Vbd| {
                let buffer = io.buffer(len as usize).map_err(|_| Error::Os(libc::ENOMEM))?;
                let (kind, mem) = (Kind::Read, buffer.mem());
                vbd.serve(io, Request { kind, offset: at, len, mem, fua: false }).await
            };
            // An error is an answer.
            let _ = self.aside(io, What::Flush, read, ()).await;
        };
        loop {
            io.sleep(limit / ASKS).await;
            if self.disk.is_paused() {
                continue;
            }
            let answered = within(look(), io.sleep(limit - limit / ASKS)).await.is_some();
            if !answered && !self.disk.is_paused() {
                return;
            }
        }
    }

    /// None where the target has failed before.
    async fn aside<K: 'static>(
        self: &Arc<Target>,
        io: &Io,
        what: What,
        work: impl AsyncFnOnce(&Io, &Vbd) -> Result<(), Error> + 'static,
        keep: K,
    ) -> Option<Result<(), Error>> {
        if self.has_failed() {
            return None;
        }
        let end = Rc::new(Cell::new(None));
        let (in_flight, told, own) = (InFlight::new(self, what), end.clone(), io.clone());
        // A target that answers nothing must not keep a guest's thread, which is joined when its front-end leaves.
        io.spawn_expendable(async move {
            let target = &in_flight.target;
            let vbd = target.take();
            told.set(Some(work(&own, &vbd).await));
            target.give_back(vbd);
            drop(keep);
            drop(in_flight);
        });
        loop {
            let told = self.told.listen();
            if let Some(end) = end.get() {
                return Some(end);
            }
            if self.has_failed() {
                return None;
            }
            told.await;
        }
    }

    /// It has failed: wait until nothing is being written to it any more, but no longer than a guest might have.
    pub(crate) async fn left_alone_for(&self, io: &Io, limit: Option<Time>) {
        match limit {
            Some(limit) => _ = within(self.left_alone(), io.sleep(limit)).await,
            None => self.left_alone().await,
        }
    }

    /// Wait until no write or flush of it is in flight.
    pub(crate) async fn left_alone(&self) {
        loop {
            let told = self.told.listen();
            if self.lock().in_flight == 0 {
                return;
            }
            told.await;
        }
    }
}

/// Have an image say that it has zeros where it says nothing: where it lies upon another, that would be seen there.
async fn say_zeros(io: &Io, vbd: &Vbd, offset: u64, len: u64) -> Result<(), Error> {
    let (mut at, end) = (offset, offset + len);
    while at < end {
        let status = vbd.status(io, at, end - at).await?;
        if !status.present {
            let (kind, mem) = (Kind::WriteZeroes { unmap: false, fast: false }, Mem::EMPTY);
            let request = Request { kind, offset: at, len: status.len, mem, fua: false };
            vbd.serve(io, request).await?;
        }
        at += status.len.max(1);
    }
    Ok(())
}
