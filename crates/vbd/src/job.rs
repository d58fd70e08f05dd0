//! A job that copies a disk while it is served, as others see it and steer it.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ringtap_io::{Event, Io, Time, probes};
use serde::Serialize;

use crate::Disk;
use crate::backup::moment::Moment;
use crate::phase::{Cancelled, PHASES, Phase};
use crate::shares::Tenant;
use crate::trouble::{Action, IoStatus, Trouble};
use crate::unfinished::Unfinished;

/// The most nanoseconds that a rate has a job sleep before it looks whether that has changed.
const NAP: Time = 100_000_000;
/// Nanoseconds that a rate is measured over.
const WINDOW: Time = 1_000_000_000;

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct JobProgress {
    /// What it is doing.
    pub phase: Phase,
    /// Bytes dealt with, of what there was and of what has changed meanwhile.
    pub offset: u64,
    /// Bytes to deal with, as far as is known: it grows as the disk is written to.
    pub total: u64,
    /// The most that it is to move in a second; 0 is no limit.
    pub limit: u64,
    /// Bytes that it moves in a second.
    pub rate: u64,
    /// Bytes that guests change in a second.
    pub guest_rate: u64,
    /// Whether it pauses.
    pub paused: bool,
    /// Why, where that was not asked for.
    pub io_status: IoStatus,
    /// For how long requests of guests waited for its end, in nanoseconds: once it has ended.
    pub stillness: Time,
}

#[derive(Default)]
struct Inner {
    phase: AtomicU8,
    offset: AtomicU64,
    total: AtomicU64,
    rate: AtomicU64,
    guest_rate: AtomicU64,
    stillness: AtomicU64,
    /// The most bytes in a second; 0 is no limit.
    limit: AtomicU64,
    paused: AtomicBool,
    /// How often it was resumed.
    resumed: AtomicU64,
    cancelled: AtomicBool,
    /// It is not to end before it is told to.
    held: AtomicBool,
    /// Its end is to wait for a word.
    pending: AtomicBool,
    /// The disk is to stay where it is.
    leaves: AtomicBool,
    /// It ends for another to go on with.
    for_next: AtomicBool,
    /// Where that begins, or this one does.
    unfinished: Mutex<Option<Unfinished>>,
    moment: Mutex<Option<Moment>>,
    /// What keeps it.
    io_status: Mutex<IoStatus>,
    /// Told of errors.
    hears_trouble: OnceLock<Box<dyn Fn(Trouble) + Send + Sync>>,
    /// Told when guests write more than the target takes.
    hears_behind: OnceLock<Box<dyn Fn(Behind) + Send + Sync>>,
    /// Told of each phase that begins.
    hears: OnceLock<Box<dyn Fn(Phase) + Send + Sync>>,
    told: Event,
}

/// Guests write more than the target takes, however much they are slowed: the job does not come to an end as long as they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Behind {
    /// Bytes that the target takes in a second.
    pub target_rate: u64,
    /// Bytes that guests change in a second.
    pub guest_rate: u64,
}

/// What a job has been told that a new one has not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// It pauses, and why.
    pub paused: Option<IoStatus>,
    /// It is to end as soon as the copy is as good as the disk.
    pub completes: bool,
    /// The disk is to stay where it is then.
    pub leaves: bool,
    /// Its end waits for no word.
    pub finalized: bool,
}

/// A job's handle: any thread may look at the job and steer it. Clones are the same job's.
#[derive(Clone, Default)]
pub struct Job(Arc<Inner>);

impl Job {
    /// The handle of a job that has yet to begin.
    pub fn new() -> Job {
        Job::default()
    }

    /// Move at most so many bytes in a second from now on.
    pub fn set_rate(&self, bytes: Option<u64>) {
        self.0.limit.store(bytes.map_or(0, |bytes| bytes.max(1)), Relaxed);
        self.0.told.notify();
    }

    /// Copy no more until [`Job::resume`]; what guests change meanwhile is kept track of.
    pub fn pause(&self) {
        self.0.paused.store(true, Relaxed);
        self.0.told.notify();
    }

    /// Go on after [`Job::pause`].
    pub fn resume(&self) {
        *self.io_status() = IoStatus::Ok;
        self.0.resumed.fetch_add(1, Relaxed);
        self.0.paused.store(false, Relaxed);
        self.0.told.notify();
    }

    /// End soon, without having done anything to the disk.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Relaxed);
        self.0.told.notify();
    }

    /// The same, for another job to go on where this one is left, as [`Job::take_unfinished`] says where there is more to know of that
    /// than what the job was to do.
    pub fn cancel_for_next(&self) {
        self.0.for_next.store(true, Relaxed);
        self.cancel();
    }

    /// Go on where another job was left that did the same.
    pub fn go_on_from(&self, left: Unfinished) {
        self.add(left.offset);
        self.leave_unfinished(left);
    }

    /// Of a job that others before it have left: they have dealt with so many bytes.
    pub fn has_dealt_with(&self, bytes: u64) {
        self.add(bytes);
    }

    /// Be as one in another process was when it ended.
    pub fn has_ended(&self, well: bool, (offset, total): (u64, u64), stillness: Time) {
        self.0.offset.store(offset, Relaxed);
        self.0.total.store(total, Relaxed);
        self.stood_still(stillness);
        self.set_phase(if well { Phase::Done } else { Phase::Failed });
    }

    /// What it is doing as soon as it begins, where another was left.
    pub fn begins_at(&self) -> Option<Phase> {
        self.unfinished().as_ref().map(Unfinished::phase)
    }

    /// What it has left, once.
    pub fn take_unfinished(&self) -> Option<Unfinished> {
        self.unfinished().take()
    }

    /// The moment that it has left for another to save, once.
    pub fn take_moment(&self) -> Option<Moment> {
        self.0.moment.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether it has left one that nobody has taken.
    pub fn has_left_a_moment(&self) -> bool {
        self.0.moment.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    pub(crate) fn leave_moment(&self, moment: Moment) {
        *self.0.moment.lock().unwrap_or_else(PoisonError::into_inner) = Some(moment);
    }

    fn unfinished(&self) -> MutexGuard<'_, Option<Unfinished>> {
        self.0.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn leave_unfinished(&self, left: Unfinished) {
        *self.unfinished() = Some(left);
    }

    pub(crate) fn is_for_next(&self) -> bool {
        self.0.for_next.load(Relaxed)
    }

    /// What it has been told; of one that was held, and waits to finalize where `pends`.
    pub fn wishes(&self, pends: bool) -> Wishes {
        let paused = self.0.paused.load(Relaxed).then(|| *self.io_status());
        let (completes, leaves) = (!self.is_held(), self.leaves());
        Wishes { paused, completes, leaves, finalized: pends && !self.waits_to_finalize() }
    }

    /// Have it be told that, before it begins.
    pub fn wish(&self, Wishes { paused, completes, leaves, finalized }: Wishes) {
        if let Some(status) = paused {
            *self.io_status() = status;
            self.pause();
        }
        if completes {
            self.complete();
        }
        if leaves {
            self.leave();
        }
        if finalized {
            self.finalize();
        }
    }

    /// Keep the copy as good as the disk, and do not end before [`Job::complete`].
    pub fn hold(&self) {
        self.0.held.store(true, Relaxed);
    }

    /// End as soon as the copy is as good as the disk.
    pub fn complete(&self) {
        self.0.held.store(false, Relaxed);
        self.0.told.notify();
    }

    /// Do not come to the end itself, which changes what is served, before [`Job::finalize`].
    pub fn wait_to_finalize(&self) {
        self.0.pending.store(true, Relaxed);
    }

    /// Come to the end, as soon as nothing else is left.
    pub fn finalize(&self) {
        self.0.pending.store(false, Relaxed);
        self.0.told.notify();
    }

    /// Nothing is left but the end: wait until it may come.
    pub async fn finalized(&self) -> Result<(), Cancelled> {
        loop {
            let told = self.0.told.listen();
            self.check()?;
            if !self.waits_to_finalize() {
                return Ok(());
            }
            self.set_phase(Phase::Pending);
            told.await;
        }
    }

    /// End as soon as the copy is as good as the disk, and leave the disk where it is.
    pub fn leave(&self) {
        self.0.leaves.store(true, Relaxed);
        self.complete();
    }

    /// Have somebody told of each phase that begins, by the thread that does the job. Only the first one is.
    pub fn hear(&self, hears: impl Fn(Phase) + Send + Sync + 'static) {
        let _ = self.0.hears.set(Box::new(hears));
    }

    /// Have somebody told of errors that do not end the job, or do, by the thread that does it. Only the first one is.
    pub fn hear_trouble(&self, hears: impl Fn(Trouble) + Send + Sync + 'static) {
        let _ = self.0.hears_trouble.set(Box::new(hears));
    }

    /// Have somebody told each time that the job begins to fall behind what guests write, by the thread that does it. Only the
    /// first one is.
    pub fn hear_behind(&self, hears: impl Fn(Behind) + Send + Sync + 'static) {
        let _ = self.0.hears_behind.set(Box::new(hears));
    }

    /// It falls behind: the target takes so many bytes in a second.
    pub(crate) fn falls_behind(&self, target_rate: u64) {
        if let Some(hears) = self.0.hears_behind.get() {
            hears(Behind { target_rate, guest_rate: self.0.guest_rate.load(Relaxed) });
        }
    }

    fn io_status(&self) -> MutexGuard<'_, IoStatus> {
        self.0.io_status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It has met an error.
    pub(crate) fn meets(&self, trouble: Trouble) {
        if trouble.action == Action::Stop {
            *self.io_status() = trouble.io_status();
            self.pause();
        }
        if let Some(hears) = self.0.hears_trouble.get() {
            hears(trouble);
        }
    }

    /// How often it was resumed: what fails that began before that is no reason to pause again.
    pub(crate) fn resumed(&self) -> u64 {
        self.0.resumed.load(Relaxed)
    }

    /// How far it is.
    pub fn progress(&self) -> JobProgress {
        let inner = &*self.0;
        JobProgress {
            phase: PHASES[usize::from(inner.phase.load(Relaxed)) % PHASES.len()],
            offset: inner.offset.load(Relaxed),
            total: inner.total.load(Relaxed),
            limit: inner.limit.load(Relaxed),
            rate: inner.rate.load(Relaxed),
            guest_rate: inner.guest_rate.load(Relaxed),
            paused: inner.paused.load(Relaxed),
            io_status: *self.io_status(),
            stillness: inner.stillness.load(Relaxed),
        }
    }

    /// Tell what it is doing, of a job that is not one of this crate.
    pub fn is_at(&self, phase: Phase) {
        self.set_phase(phase);
    }

    /// Guests' requests have waited for so long while the disk stood still for the end.
    pub(crate) fn stood_still(&self, time: Time) {
        self.0.stillness.store(time, Relaxed);
    }

    pub(crate) fn set_phase(&self, phase: Phase) {
        let before = self.0.phase.swap(phase as u8, Relaxed);
        if before != phase as u8 {
            let Inner { offset, total, .. } = &*self.0;
            let number = Arc::as_ptr(&self.0).addr();
            probes::job_state(number, phase as u8, offset.load(Relaxed), total.load(Relaxed));
        }
        if let Some(hears) = self.0.hears.get().filter(|_| before != phase as u8) {
            hears(phase);
        }
    }

    pub(crate) fn leaves(&self) -> bool {
        self.0.leaves.load(Relaxed)
    }

    pub(crate) fn is_held(&self) -> bool {
        self.0.held.load(Relaxed)
    }

    pub(crate) fn waits_to_finalize(&self) -> bool {
        self.0.pending.load(Relaxed)
    }

    /// So many bytes are still to be dealt with.
    pub(crate) fn set_left(&self, bytes: u64) {
        self.0.total.store(self.0.offset.load(Relaxed).saturating_add(bytes), Relaxed);
    }

    pub(crate) fn add(&self, bytes: u64) {
        let offset = self.0.offset.fetch_add(bytes, Relaxed).saturating_add(bytes);
        self.0.total.fetch_max(offset, Relaxed);
    }

    /// Whether it is to end.
    pub fn is_cancelled(&self) -> bool {
        self.check().is_err()
    }

    pub(crate) fn check(&self) -> Result<(), Cancelled> {
        if self.0.cancelled.load(Relaxed) { Err(Cancelled) } else { Ok(()) }
    }

    /// Wait until the job is cancelled.
    pub(crate) async fn cancelled(&self) {
        loop {
            let told = self.0.told.listen();
            if self.check().is_err() {
                return;
            }
            told.await;
        }
    }

    /// Wait until the job need not pause.
    pub(crate) async fn unpaused(&self) -> Result<(), Cancelled> {
        loop {
            let told = self.0.told.listen();
            self.check()?;
            if !self.0.paused.load(Relaxed) {
                return Ok(());
            }
            told.await;
        }
    }
}

/// How fast a job is to be, and is: of the thread that does it.
pub(crate) struct Pace {
    job: Job,
    /// Since when, in how many bytes, the present limit holds.
    limit: Cell<(u64, Time)>,
    moved: Cell<u64>,
    /// When the rates were measured last, and what had been moved and changed by then.
    measured: Cell<(Time, u64, u64)>,
    all: Cell<u64>,
    /// What it is on the device that its disk lies on.
    tenant: Option<Arc<Tenant>>,
}

impl Pace {
    /// Of a job on that disk.
    pub(crate) fn new(job: &Job, io: &Io, disk: &Disk) -> Pace {
        Pace {
            job: job.clone(),
            limit: Cell::default(),
            moved: Cell::default(),
            measured: Cell::new((io.now(), 0, 0)),
            all: Cell::default(),
            tenant: disk.shared.throttle.job(),
        }
    }

    /// Wait until so many bytes may be moved.
    pub(crate) async fn wait(&self, io: &Io, bytes: u64) -> Result<(), Cancelled> {
        loop {
            self.job.unpaused().await?;
            let limit = self.job.0.limit.load(Relaxed);
            if limit != self.limit.get().0 {
                self.limit.set((limit, io.now()));
                self.moved.set(0);
            }
            let due = self.limit.get().1.saturating_add(due(self.moved.get(), limit));
            let early = due.saturating_sub(io.now());
            if limit == 0 || early == 0 {
                self.moved.set(self.moved.get().saturating_add(bytes));
                self.all.set(self.all.get().saturating_add(bytes));
                break;
            }
            io.sleep(early.min(NAP)).await;
        }
        if let Some(tenant) = self.tenant.as_ref().filter(|tenant| bytes > 0 && tenant.is_active())
        {
            tenant.wait_to_move(io, bytes, || self.job.check().is_err()).await;
            self.job.check()?;
        }
        Ok(())
    }

    /// Wait a little before what could not be done is tried again.
    pub(crate) async fn nap(&self, io: &Io) -> Result<(), Cancelled> {
        self.job.check()?;
        io.sleep(NAP).await;
        self.job.unpaused().await
    }

    /// Measure, where the last time is long enough ago: how long that is. Guests have changed so many bytes by now.
    pub(crate) fn measure(&self, io: &Io, changed: u64) -> Option<Time> {
        let (then, moved, changed_then) = self.measured.get();
        let took = io.now().saturating_sub(then);
        if took < WINDOW {
            return None;
        }
        let rate = |now: u64, then: u64| {
            let bytes = u128::from(now.saturating_sub(then));
            (bytes * 1_000_000_000 / u128::from(took)).try_into().unwrap_or(u64::MAX)
        };
        self.job.0.rate.store(rate(self.all.get(), moved), Relaxed);
        self.job.0.guest_rate.store(rate(changed, changed_then), Relaxed);
        self.measured.set((io.now(), self.all.get(), changed));
        Some(took)
    }
}

/// How many nanoseconds it takes to move so many bytes.
fn due(moved: u64, rate: u64) -> Time {
    let nanos = u128::from(moved) * 1_000_000_000 / u128::from(rate.max(1));
    nanos.try_into().unwrap_or(Time::MAX)
}
