//! A mirror at work: what there is is copied, then what has changed meanwhile, until little is left.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ringtap_image::{Image, Status};
use ringtap_io::{Io, Time};

use super::again::Attempt;
use super::both::Both;
use super::brake::Brake;
use super::content::{Content, give, look};
use super::error::MirrorError;
use super::first::First;
use super::no_room::DealsWithNoRoom;
use super::target::Target;
use super::terms::{Ending, Mirror, Scope};
use super::together::{beside, together, within};
use crate::Vbd;
use crate::job::{Job, Pace};
use crate::phase::Phase;
use crate::track::Tracker;
use crate::trouble::OnErrors;
use crate::unfinished::Unfinished;
use crate::walk::Walk;

/// How often the job looks while guests go first.
const LOOK: Time = 100_000_000;
/// After so many seconds in which guests' writes were left for the job, one after the other, somebody is told.
const LATE: u32 = 3;
/// The most zeros made at once.
const ZEROS: u64 = 256 << 20;

impl Mirror {
    /// Copy, until the target is as the disk is. At that moment `still` is called, while the disk stands still and the
    /// target is stable: for [`Ending::Pivot`] it makes it durable that the target is the disk from now on (where it
    /// fails, the former image stays; [`Job::leave`] has it stay, too, and `still` not called). It must come to an end by itself. Gives the former image where the target has taken
    /// its place: to be closed.
    ///
    /// Where this fails the disk is as good as before, and the target is of no use. Nobody writes to the target any more
    /// when it ends, unless that has failed to take a write within the limit.
    ///
    /// One that ends by [`Job::cancel_for_next`] leaves what is still to be copied ([`Job::take_unfinished`]), and goes on noting what
    /// changes as long as that is there; another with the same scope goes on there ([`Job::go_on_from`]).
    pub async fn run<E>(
        self,
        io: &Io,
        job: &Job,
        ending: Ending,
        still: impl AsyncFnOnce() -> Result<(), E>,
    ) -> Result<Option<Box<dyn Image>>, MirrorError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let work = Rc::new(Work::new(self, io, job));
        let watched = async {
            match work.mirror.limit {
                Some(limit) => work.target.watch(io, limit).await,
                None => std::future::pending().await,
            }
        };
        let cancelled = async {
            job.cancelled().await;
            work.target.fail(MirrorError::Cancelled);
        };
        let end = beside(beside(work.work(io, ending, still), watched), cancelled).await;
        work.pass_by();
        let end = match end {
            Ok(former) => Ok(former),
            Err(why) => {
                let (why, phase) = (work.target.failed_by(why), job.progress().phase);
                work.target.left_alone_for(io, work.mirror.limit).await;
                if job.is_for_next() && matches!(why, MirrorError::Cancelled) {
                    work.leave(io, phase).await;
                }
                Err(why)
            }
        };
        job.set_phase(if end.is_ok() { Phase::Done } else { Phase::Failed });
        end
    }
}

/// A mirror at work.
pub(super) struct Work {
    pub(super) mirror: Mirror,
    pub(super) from: Vbd,
    pub(super) tracker: Arc<Tracker>,
    pub(super) first: First,
    pub(super) target: Arc<Target>,
    pub(super) both: RefCell<Option<Arc<Both>>>,
    pub(super) job: Job,
    pub(super) pace: Pace,
    /// Which of the disk's images it began with.
    pub(super) image: u64,
    /// The disk's size when it was looked at last.
    pub(super) size: Cell<u64>,
    /// It has been ready: however much guests write, it stays so until the end.
    pub(super) was_ready: Cell<bool>,
    /// In how many windows of measuring, one after the other, writes of guests were left for the job; and when the last one ended, how
    /// many bytes had been written to the target, and been left.
    pub(super) late: Cell<(u32, u64, u64)>,
    /// Something could not be copied while the disk stood still: it is tried again while it goes on.
    pub(super) was_refused: Cell<bool>,
    pub(super) _deals_with_no_room: DealsWithNoRoom,
    /// What it begins with, where it goes on with another's work.
    pub(super) begins: Phase,
}

impl Drop for Work {
    fn drop(&mut self) {
        self.pass_by();
        // Of a job that panicked nobody else says that its target is given up, and guests' threads would wait for that.
        self.target.fail(MirrorError::Cancelled);
    }
}

impl Work {
    fn new(mirror: Mirror, io: &Io, job: &Job) -> Work {
        let left = job.take_unfinished().filter(|left| left.is_of(&mirror.from));
        let fresh = || Arc::new(mirror.from.track(mirror.granularity));
        let tracker = left.as_ref().map_or_else(fresh, |left| left.tracker.clone());
        #[cfg(feature = "sabotage")]
        tracker.sabotage(mirror.wrongs.misses, mirror.wrongs.clears_late);
        let target = Target::new(mirror.to.clone()).with_behind(mirror.behind);
        let target = target.with_unstable(tracker.granularity());
        #[cfg(feature = "sabotage")]
        let target = target.with_ranges_unlocked(mirror.wrongs.unlocked);
        let size = left.as_ref().map_or(mirror.from.size(), |left| left.size);
        let was_ready = left.as_ref().is_some_and(|left| left.was_ready);
        let begins = left.as_ref().map_or(Phase::Copying, Unfinished::phase);
        Work {
            from: mirror.from.fork(),
            tracker,
            first: First::from(left.map_or(0, |left| left.from)),
            target: Arc::new(target),
            both: RefCell::default(),
            job: job.clone(),
            pace: Pace::new(job, io, &mirror.from),
            image: mirror.from.shared.door.image(),
            size: Cell::new(size),
            was_ready: Cell::new(was_ready),
            late: Cell::default(),
            was_refused: Cell::default(),
            _deals_with_no_room: OnErrors::deals_with_no_room(&mirror.to),
            begins,
            mirror,
        }
    }

    async fn work<E>(
        self: &Rc<Work>,
        io: &Io,
        ending: Ending,
        still: impl AsyncFnOnce() -> Result<(), E>,
    ) -> Result<Option<Box<dyn Image>>, MirrorError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        // Where it goes on the disk may have grown meanwhile, and then the target does, too.
        if self.size.get() != self.mirror.from.size() {
            self.check(ending)?;
        }
        self.check_target(ending)?;
        self.job.set_phase(self.begins);
        let from = self.first.dealt_with();
        match &self.mirror.scope {
            Scope::Changed(tracker) => {
                self.job.set_left(if from == 0 {
                    tracker.marked().min(self.size.get())
                } else {
                    0
                });
                let cursor = Cell::new(from);
                self.crowd(async || self.first_changed(io, tracker, &cursor).await).await?;
            }
            Scope::All | Scope::Above(_) => {
                self.job.set_left(self.size.get().saturating_sub(from));
                let walk = Walk::new(from, self.size.get());
                self.crowd(async || self.first(io, &walk).await).await?;
            }
        }
        self.first.is_over();
        loop {
            self.follow(io, ending).await?;
            self.job.set_phase(Phase::Ending);
            if self.make_stable(io).await?
                && let Some(ready) = self.stand_still(io, ending).await?
            {
                return self.end(io, ready, ending, still).await;
            }
            // Guests have most of the time.
            self.pace.nap(io).await?;
        }
    }

    pub(super) fn check_target(&self, ending: Ending) -> Result<(), MirrorError> {
        let (target, disk) = (self.mirror.to.size(), self.mirror.from.size());
        let wrong = |wanted| Err(MirrorError::Size { target, disk, wanted });
        if target < disk {
            return wrong("as large");
        }
        if ending == Ending::Pivot && target != disk {
            return wrong("just as large");
        }
        if self.mirror.to.is_read_only() { Err(MirrorError::ReadOnly) } else { Ok(()) }
    }

    /// Whether all is still as it was when the job began; the target grows as the disk does.
    pub(super) fn check(&self, ending: Ending) -> Result<(), MirrorError> {
        self.job.check()?;
        if self.from.health().failure().is_some() || self.target.disk.health().failure().is_some() {
            return Err(MirrorError::Stopped);
        }
        let depends = ending == Ending::Pivot || matches!(self.mirror.scope, Scope::Above(_));
        if depends && self.mirror.from.shared.door.image() != self.image {
            return Err(MirrorError::Replaced);
        }
        let (size, before) = (self.mirror.from.size(), self.size.get());
        if size > self.target.disk.size() {
            self.target.disk.grow(size).map_err(|error| MirrorError::Grow { size, error })?;
        }
        if size > before {
            self.tracker.mark(before..size);
        }
        self.size.set(size);
        if ending == Ending::Pivot { self.check_target(ending) } else { Ok(()) }
    }

    /// So many workers at once, until all have ended. What fails first fails the target: that ends the others.
    pub(super) async fn crowd(
        &self,
        work: impl AsyncFn() -> Result<(), MirrorError>,
    ) -> Result<(), MirrorError> {
        let worker = async || {
            if let Err(why) = work().await {
                self.target.fail(why);
            }
        };
        together((0..self.mirror.requests.max(1)).map(|_| worker())).await;
        self.target.failure().map_or(Ok(()), Err)
    }

    /// What there was in the beginning.
    async fn first(&self, io: &Io, walk: &Walk<Status>) -> Result<(), MirrorError> {
        let above = self.above();
        let other = |status: &Status| above.is_some_and(|above| status.depth >= above);
        let most = |status: &Status| match status.zero || other(status) {
            true => ZEROS,
            false => self.mirror.piece,
        };
        let look = async |offset, len| {
            let status = self.from.status(io, offset, len).await;
            let status = status.map_err(|error| MirrorError::Status { offset, error })?;
            Ok::<_, MirrorError>((status, status.len))
        };
        loop {
            let attempt = self.attempt();
            let piece = match walk.next(most, look).await {
                Ok(Some(piece)) => piece,
                Ok(None) => return Ok(()),
                Err(why) => {
                    Box::pin(attempt.failed(io, &self.pace, why)).await?;
                    continue;
                }
            };
            let range = piece.offset..piece.offset + piece.len;
            self.first.begins(&range);
            let content = match piece.what {
                status if other(&status) => Some(Content::Other),
                status if status.zero => Some(Content::Zeros),
                _ => None,
            };
            match content {
                None => self.copy(io, range.clone(), true).await?,
                Some(content) => {
                    self.pace.wait(io, 0).await?;
                    let attempt = self.attempt();
                    let zeroed = self.mirror.zeroed;
                    let given =
                        give(io, &self.target, piece.offset, piece.len, content, zeroed, &());
                    match given.await {
                        Ok(()) => self.job.add(piece.len),
                        Err(why) => {
                            Box::pin(attempt.failed(io, &self.pace, why)).await?;
                            self.copy(io, range.clone(), true).await?;
                        }
                    }
                }
            }
            self.first.has_ended(&range);
        }
    }

    pub(super) fn attempt(&self) -> Attempt<'_> {
        Attempt::begin(&self.job, &self.target, self.mirror.on_errors)
    }

    async fn first_changed(
        &self,
        io: &Io,
        tracker: &Tracker,
        cursor: &Cell<u64>,
    ) -> Result<(), MirrorError> {
        while let Some(range) = tracker.next(cursor.get(), self.mirror.piece) {
            cursor.set(range.end);
            self.first.begins(&range);
            self.copy(io, range.clone(), false).await?;
            self.first.has_ended(&range);
        }
        Ok(())
    }

    /// Of how many images, from the topmost on, what they hold is copied; none where it is all.
    pub(super) fn above(&self) -> Option<u32> {
        match self.mirror.scope {
            Scope::Above(images) => Some(images),
            _ => None,
        }
    }

    /// Copy what has changed until little is left.
    async fn follow(&self, io: &Io, ending: Ending) -> Result<(), MirrorError> {
        let (mut before, mut slow) = (u64::MAX, 0);
        if self.mirror.patience == Some(0) {
            self.change_both();
        }
        loop {
            self.check(ending)?;
            self.measure(io);
            let left = self.tracker.marked();
            self.job.set_left(left);
            let (few, held) = (left <= self.mirror.still_bytes, self.job.is_held());
            let waits = self.job.waits_to_finalize();
            let was_refused = self.was_refused.take();
            if few && !held && !waits && !was_refused {
                return Ok(());
            }
            if few && !held && !waits {
                self.pace.nap(io).await?;
            } else if few {
                self.was_ready.set(held || self.was_ready.get());
                self.job.set_phase(if held { Phase::Ready } else { Phase::Pending });
                self.pace.nap(io).await?;
            }
            slow = if left > before - before / 4 { slow + 1 } else { 0 };
            before = left;
            if self.mirror.patience.is_some_and(|patience| slow >= patience) {
                self.change_both();
            }
            // What is ready or pending stays so, though guests write.
            if !few && !self.was_ready.get() && (held || !waits) {
                let both = self.both.borrow().is_some();
                self.job.set_phase(if both { Phase::Both } else { Phase::Following });
            }
            let cursor = Cell::new(0);
            self.crowd(async || self.changed(io, &cursor).await).await?;
        }
    }

    /// One pass over what has changed.
    pub(super) async fn changed(&self, io: &Io, cursor: &Cell<u64>) -> Result<(), MirrorError> {
        let copy = async |range: Range<u64>| {
            let owed = self.owes(&range);
            self.copy(io, range, false).await?;
            owed.paid();
            Ok::<_, MirrorError>(())
        };
        while let Some(copied) = self.tracker.copy_next(cursor, self.mirror.piece, &copy).await {
            copied?;
        }
        Ok(())
    }

    /// Copy a range, as far as the disk was known to reach: what it has grown by is marked when that is seen.
    pub(super) async fn copy(
        &self,
        io: &Io,
        range: Range<u64>,
        first: bool,
    ) -> Result<(), MirrorError> {
        let (mut at, end) = (range.start, range.end.min(self.size.get()));
        while at < end {
            let most = self.mirror.piece;
            self.pace.wait(io, (end - at).min(most)).await?;
            let attempt = self.attempt();
            self.measure(io);
            let both = self.both.borrow().clone();
            if both.as_ref().is_some_and(|both| both.brake.is_some()) {
                self.lets_guests_go_first(io).await?;
            }
            let range = at..end.min(at + most - at % most);
            let work = self.from.within(async |pass| {
                Ok(match &both {
                    Some(both) => both.copy_alone(io, pass, range.clone()).await.map(|()| None),
                    None => {
                        let above = self.above().filter(|_| first);
                        look(io, pass, range.clone(), most, above).await.map(Some)
                    }
                })
            });
            let found = self.from.health().contain_all(work).await;
            // Whoever changes it meanwhile marks it after that.
            let copied = match found.unwrap_or(Err(MirrorError::Stopped)) {
                Ok(Some((len, content))) => {
                    let zeroed = first && self.mirror.zeroed;
                    let given = give(io, &self.target, at, len, content, zeroed, &()).await;
                    given.map(|()| len)
                }
                Ok(None) => Ok(range.end - range.start),
                Err(why) => Err(why),
            };
            match copied {
                Ok(len) => {
                    self.job.add(len);
                    at += len;
                }
                Err(why) => Box::pin(attempt.failed(io, &self.pace, why)).await?,
            }
        }
        Ok(())
    }

    /// What guests write goes to the target before what the job copies, or more would be marked than is copied: guests are held
    /// up, as far as they may be, before the job is.
    async fn lets_guests_go_first(&self, io: &Io) -> Result<(), MirrorError> {
        while within(self.target.can_take_more(), io.sleep(LOOK)).await.is_none() {
            self.measure(io);
        }
        if self.target.has_failed() { Err(MirrorError::Cancelled) } else { Ok(()) }
    }

    pub(super) fn measure(&self, io: &Io) {
        let Some(took) = self.pace.measure(io, self.tracker.changed()) else { return };
        let both = self.both.borrow();
        let passed = both.as_ref().map_or(0, |both| both.passed.load(Relaxed));
        let (written, (late, written_then, passed_then)) = (self.target.written(), self.late.get());
        let bytes = u128::from(written - written_then) * 1_000_000_000;
        let rate = (bytes / u128::from(took.max(1))).try_into().unwrap_or(u64::MAX);
        // Who writes the same place over and over leaves some for the job though the target is fast.
        let behind = passed > passed_then && rate < self.job.progress().guest_rate;
        let late = if behind { late + 1 } else { 0 };
        self.late.set((late, written, passed));
        if late == LATE {
            self.job.falls_behind(rate);
        }
    }

    /// Have requests change the target, too; not where another job has them do so.
    fn change_both(&self) {
        let mut both = self.both.borrow_mut();
        if both.is_some() {
            return;
        }
        let filter = Arc::new(Both {
            target: self.target.clone(),
            marks: self.tracker.map().clone(),
            piece: self.mirror.piece,
            brake: self.mirror.max_slowdown.map(Brake::new),
            on_errors: self.mirror.on_errors,
            passed: AtomicU64::new(0),
        });
        let shared = &self.mirror.from.shared;
        if shared.filters.install_also(&shared.door, filter.clone()) {
            *both = Some(filter);
        }
    }

    /// Have them do so no more.
    pub(super) fn pass_by(&self) {
        if self.both.take().is_some() {
            let shared = &self.mirror.from.shared;
            shared.filters.remove_also(&shared.door);
        }
    }
}
