//! The job that brings all of a moment to its target: from the disk, and from scratch where requests have changed it since.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::Ordering::SeqCst;

use ringtap_io::Io;

use super::aside::PIECE;
use super::kept::Kept;
use super::moment::Moment;
use crate::Vbd;
use crate::job::{Job, Pace};
use crate::level::Pass;
use crate::mirror::again::Attempt;
use crate::mirror::content::{Content, give};
use crate::mirror::error::MirrorError;
use crate::mirror::together::{beside, together, within};
use crate::phase::{Cancelled, Phase};

/// How many regions are on their way from scratch at once.
const FROM_SCRATCH: usize = 4;

/// What those who save have among themselves.
pub(super) struct Saving<'a> {
    pub(super) moment: &'a Moment,
    pub(super) job: &'a Job,
    from: Vbd,
    pub(super) pace: Pace,
    cursor: Cell<u64>,
    /// How many go from one end of the disk to the other, and have not come to it.
    walking: Cell<usize>,
    /// What is on its way from scratch.
    on_its_way: RefCell<Vec<Range<u64>>>,
}

impl Moment {
    /// Save all of it: then the target, which is made stable, is what the disk was, and requests wait for nothing more.
    /// Where this fails the moment is lost, unless that was for another job ([`Moment::leave`]); the disk goes on as before.
    pub async fn save(&self, io: &Io, job: &Job) -> Result<(), MirrorError> {
        job.set_phase(Phase::Copying);
        let target = &self.kept.target;
        let cancelled = async {
            job.cancelled().await;
            if !job.is_for_next() {
                target.fail(MirrorError::Cancelled);
            }
        };
        let saved = async {
            // Whoever waits for the job's rate, or its pause, need not go on for a target that has failed.
            let end = within(self.save_all(io, job), target.broken()).await;
            end.unwrap_or(Err(MirrorError::Lost))?;
            Ok(job.finalized().await?)
        };
        let saved = async {
            let end = beside(saved, cancelled).await;
            if end.is_err() && self.is_left(job) {
                within(self.empty_scratch(io), target.broken()).await;
            }
            end
        };
        let end = match beside(saved, self.kept.watch_for_silence(io)).await {
            Ok(()) => {
                self.saved.store(true, SeqCst);
                Ok(())
            }
            Err(why) if self.is_left(job) => {
                job.set_phase(Phase::Failed);
                return Err(why);
            }
            Err(why) => {
                let why = target.failed_by(why);
                target.left_alone_for(io, self.kept.limit).await;
                Err(why)
            }
        };
        self.forget();
        job.set_phase(if end.is_ok() { Phase::Done } else { Phase::Failed });
        end
    }

    /// Keep it until the job is cancelled, and save only what requests change. Where this fails the moment is lost, unless that was
    /// for another job ([`Moment::leave`]); the disk goes on as before.
    pub async fn hold(&self, io: &Io, job: &Job) -> Result<(), MirrorError> {
        job.set_phase(Phase::Copying);
        let target = &self.kept.target;
        let cancelled = async {
            job.cancelled().await;
            if !job.is_for_next() {
                target.fail(MirrorError::Cancelled);
            }
        };
        let held = async { _ = within(target.broken(), cancelled).await };
        beside(held, self.kept.watch_for_silence(io)).await;
        if self.is_left(job) {
            job.set_phase(Phase::Failed);
            return Err(MirrorError::Cancelled);
        }
        let why = target.failed_by(MirrorError::Cancelled);
        target.left_alone_for(io, self.kept.limit).await;
        self.forget();
        job.set_phase(Phase::Failed);
        Err(why)
    }

    async fn save_all(&self, io: &Io, job: &Job) -> Result<(), MirrorError> {
        let kept = &*self.kept;
        let saving = Saving {
            moment: self,
            job,
            from: self.from.fork(),
            pace: Pace::new(job, io, &self.from),
            cursor: Cell::new(0),
            walking: Cell::new(self.requests.max(1)),
            on_its_way: RefCell::default(),
        };
        let saving = &saving;
        loop {
            saving.cursor.set(0);
            saving.walking.set(self.requests.max(1));
            saving.save_once(io).await?;
            #[cfg(feature = "sabotage")]
            if kept.wrongs.unflushed {
                return Ok(());
            }
            if saving.make_stable(io).await? && kept.left.next(0, PIECE).is_none() {
                return Ok(());
            }
        }
    }
}

impl Saving<'_> {
    /// All that is left, from one end to the other.
    async fn save_once(&self, io: &Io) -> Result<(), MirrorError> {
        let Saving { moment, job, .. } = self;
        let (saving, kept) = (self, &*moment.kept);
        job.set_left(kept.left.marked().min(kept.size));
        let worker = async |walks: bool| {
            let end = if walks { saving.walk(io).await } else { saving.empty(io).await };
            if walks {
                saving.walking.set(saving.walking.get() - 1);
                kept.tell_of_scratch();
            }
            match end {
                // Another job goes on with it.
                Err(MirrorError::Cancelled) if job.is_for_next() => {}
                end => end.unwrap_or_else(|why| kept.target.fail(why)),
            }
        };
        let empties = if kept.aside.get().is_some() { FROM_SCRATCH } else { 0 };
        let kinds = (0..moment.requests.max(1)).map(|_| true).chain((0..empties).map(|_| false));
        together(kinds.map(worker)).await;
        if let Some(why) = kept.target.failure() {
            return Err(why);
        }
        Ok(job.check()?)
    }

    /// Save all, at the job's rate.
    async fn walk(&self, io: &Io) -> Result<(), MirrorError> {
        let kept = &*self.moment.kept;
        while let Some(range) = kept.left.next(self.cursor.get(), PIECE) {
            self.cursor.set(range.end);
            let range = range.start..range.end.min(kept.size);
            let bytes = range.end - range.start;
            self.bring(io, range, async || self.pace.wait(io, bytes).await).await?;
        }
        Ok(())
    }

    /// Save what comes into scratch, as fast as the target takes it: guests may wait for room.
    async fn empty(&self, io: &Io) -> Result<(), MirrorError> {
        let kept = &*self.moment.kept;
        loop {
            let is_over = || self.walking.get() == 0;
            let is_spent = || kept.is_scratch_spent();
            kept.wait_for_scratch(|| is_over() || is_spent() || self.next_aside().is_some()).await;
            if is_spent() {
                self.make_stable(io).await?;
                continue;
            }
            let Some(range) = self.next_aside() else { return Ok(()) };
            self.on_its_way.borrow_mut().push(range.clone());
            let own = range.start..range.end.min(kept.size);
            let end = self.bring(io, own, async || self.job.unpaused().await).await;
            self.on_its_way.borrow_mut().retain(|other| *other != range);
            end?;
        }
    }

    /// What lies in scratch and is not on its way yet.
    fn next_aside(&self) -> Option<Range<u64>> {
        let mut at = 0;
        while let Some(range) = self.moment.kept.next_aside(at) {
            let own = self.on_its_way.borrow();
            if !own.iter().any(|other| other.start < range.end && range.start < other.end) {
                return Some(range);
            }
            at = range.end;
        }
        None
    }

    /// Have the target hold what a range held, whatever it takes, each time when it may.
    async fn bring(
        &self,
        io: &Io,
        range: Range<u64>,
        may: impl AsyncFn() -> Result<(), Cancelled>,
    ) -> Result<(), MirrorError> {
        let Saving { moment, job, from, pace, .. } = self;
        loop {
            may().await?;
            let attempt = Attempt::begin(job, &moment.kept.target, moment.on_errors);
            pace.measure(io, 0);
            match moment.kept.bring(io, from, range.clone()).await {
                Ok(bytes) => {
                    job.add(bytes);
                    return Ok(());
                }
                Err(why) => Box::pin(attempt.failed(io, pace, why)).await?,
            }
        }
    }
}

impl Kept {
    /// Have the target hold what a range held, which gives how many bytes of it it did not hold before. Where there is scratch,
    /// whoever changes the range waits no longer than it takes to read it.
    pub(super) async fn bring(
        &self,
        io: &Io,
        from: &Vbd,
        range: Range<u64>,
    ) -> Result<u64, MirrorError> {
        let (health, stopped) = (from.health(), |_| Err(MirrorError::Stopped));
        if self.aside.get().is_none() {
            let bytes = range.end - range.start;
            let work = from.within(async |pass| Ok(self.save(io, pass, range).await));
            let end = health.contain_all(work).await.unwrap_or_else(stopped);
            return end.map(|()| bytes);
        }
        let range = self.regions(range);
        let (mut parts, lost) = (vec![], self.stable.times_lost());
        let work = from.within(async |pass| Ok(self.collect(io, pass, &range, &mut parts).await));
        health.contain_all(work).await.unwrap_or_else(stopped)?;
        let mut saved = vec![];
        for (at, len, content) in parts {
            give(io, &self.target, at, len, content, self.zeroed, &()).await?;
            saved.push(at..at + len);
        }
        let held = Rc::new(self.target.ranges.ask(range.clone()));
        if !self.target.alone(&held).await {
            return Err(MirrorError::Cancelled);
        }
        // It may be lost since: all that is left then is saved once more.
        if self.stable.times_lost() != lost {
            return Ok(0);
        }
        let mut bytes = 0;
        for part in saved {
            let mut at = part.start;
            while let Some(left) = self.is_left(&(at..part.end)) {
                bytes += left.end - left.start;
                at = left.end;
            }
        }
        // All of it that was left.
        self.has_saved(io, range).await;
        Ok(bytes)
    }

    /// Look at all of a range that is not saved.
    async fn collect(
        &self,
        io: &Io,
        pass: Pass<'_>,
        range: &Range<u64>,
        parts: &mut Vec<(u64, u64, Content)>,
    ) -> Result<(), MirrorError> {
        let held = Rc::new(self.target.ranges.ask(range.clone()));
        if !self.target.alone(&held).await {
            return Err(MirrorError::Cancelled);
        }
        let mut rest = range.clone();
        while let Some(part) = self.is_left(&rest) {
            let mut at = part.start;
            while at < part.end {
                let (len, content) = self.old(io, pass, at..part.end).await?;
                parts.push((at, len, content));
                at += len;
            }
            rest.start = part.end;
        }
        Ok(())
    }
}
