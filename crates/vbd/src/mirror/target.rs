//! What a mirror writes to: by the job, and by guests' requests, none of which waits for it for longer than is allowed.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringtap_image::Error;
use ringtap_io::{Buffer, Event, Io, Mem, Time};

use super::error::MirrorError;
use super::together::within;
use crate::ranges::{Held, Ranges};
use crate::{Disk, Kind, Request, Vbd};

/// How often it is looked, in the time that a guest may wait, whether it has been that long.
const LOOKS: u32 = 4;

/// The disk that is written to.
pub(crate) struct Target {
    pub(crate) disk: Disk,
    /// What is written by guests' requests, and by the job meanwhile.
    pub(crate) ranges: Arc<Ranges>,
    /// Handles that nobody uses at the moment: the threads of guests take turns.
    idle: Mutex<Vec<Vbd>>,
    state: Mutex<State>,
    told: Event,
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
    /// Of those the writes, and how many writes have ended.
    writes: usize,
    written: u64,
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
        state.written += self.writes as u64;
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
            #[cfg(feature = "sabotage")]
            unlocked: false,
        }
    }

    #[cfg(feature = "sabotage")]
    pub(crate) fn with_ranges_unlocked(self, unlocked: bool) -> Target {
        Target { unlocked, ..self }
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

    fn take(&self) -> Vbd {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        idle.unwrap_or_else(|| self.disk.fork())
    }

    fn give_back(&self, vbd: Vbd) {
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

    /// Give the target up when a guest has waited for so long. It never ends.
    pub(crate) async fn watch(&self, io: &Io, limit: Time) {
        // Clocks of threads differ: a guest has waited for as long as it is seen here.
        let mut seen = [u64::MAX; LOOKS as usize];
        loop {
            io.sleep(limit / Time::from(LOOKS)).await;
            let (oldest, next) = {
                let state = self.lock();
                (state.waiting.first().copied(), state.next)
            };
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
            let (mut written, mut looks) = (self.lock().written, 0);
            while looks < LOOKS {
                io.sleep(limit / Time::from(LOOKS)).await;
                let state = self.lock();
                if state.failed || state.writes == 0 {
                    break;
                }
                looks = if state.written == written { looks + 1 } else { 0 };
                written = state.written;
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
        let len = bytes.len();
        let given = async move |io: &Io, vbd: &Vbd| {
            let (kind, mem) = match &bytes {
                Bytes::Zeros(_) => (Kind::WriteZeroes { unmap: true, fast: false }, Mem::EMPTY),
                Bytes::There(buffer, at, len) => (Kind::Write, buffer.mem().window(*at, *len)),
            };
            vbd.serve(io, Request { kind, offset, len, mem, fua: false }).await
        };
        let end = self.aside(io, What::Write, given, keep).await;
        end.unwrap_or(Err(Error::Stopped)).map_err(|error| MirrorError::Write {
            offset,
            len,
            error,
        })
    }

    /// Make what was written stable.
    pub(crate) async fn flush(self: &Arc<Target>, io: &Io) -> Result<(), MirrorError> {
        let flush = async |io: &Io, vbd: &Vbd| vbd.flush(io).await;
        let end = self.aside(io, What::Flush, flush, ()).await;
        end.unwrap_or(Err(Error::Stopped)).map_err(|error| MirrorError::Flush { error })
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

    async fn left_alone(&self) {
        loop {
            let told = self.told.listen();
            if self.lock().in_flight == 0 {
                return;
            }
            told.await;
        }
    }
}
