//! What a disk held at one moment, while it goes on.
//!
//! From that moment on the old content of a region is written to the target before a request changes the region for the
//! first time. What the target does not have yet, the disk still holds. Who reads a region of the disk for the moment, or
//! copies it to the target, has the range for itself: no request that waits for its old content to be saved
//! goes on meanwhile. What a region held is read after it is known not to be saved, and whether the target has failed
//! after that: once it has, requests no longer wait.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

use ringtap_image::Error;
use ringtap_io::{Io, Time};

use crate::filter::{BeforeWrite, Filtered};
use crate::job::{Job, Phase};
use crate::level::Pass;
use crate::map::Map;
use crate::mirror::MirrorError;
use crate::mirror::again::DealsWithNoRoom;
use crate::mirror::content::give;
use crate::mirror::target::Target;
use crate::mirror::together::{beside, within};
use crate::track::Tracker;
use crate::trouble::OnErrors;
use crate::{Busy, DirtyBitmap, Disk, Quiesced, Successor, Vbd};

mod aside;
mod left;
mod saving;
mod stable;
mod view;

use aside::Aside;
pub use aside::Scratch;
use stable::Stability;

/// The most bytes copied at once.
const PIECE: u64 = 1 << 20;

/// What breaks where old content cannot be saved, or not in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Breaks {
    /// The moment is lost, and the guest goes on.
    #[default]
    Moment,
    /// The guest's request fails and changes nothing, and the moment is kept.
    Request,
}

/// What is to be kept as it is at one moment, and how.
pub struct Backup {
    /// The disk.
    pub from: Disk,
    /// Where its old content goes, at its own place: nobody else writes to it. It is at least as large.
    pub to: Disk,
    /// The target holds what the disk did when this tracker was cleared: only what it has marked since is to be saved.
    /// Its marks are cleared at the moment, and set again where the backup does not end well.
    pub changed: Option<Arc<Tracker>>,
    /// Its marks stay: what is changed by them is somebody else's to decide.
    pub keeps_marks: bool,
    /// The most bytes that are saved before requests change them, where the rest is not saved at all; more cannot be.
    pub room: Option<u64>,
    /// The target reads as zeros at first, so that zeros need not be made.
    pub zeroed: bool,
    /// Bytes of the regions that are saved as a whole.
    pub granularity: u64,
    /// How many regions are in flight at once when all of it is saved.
    pub requests: usize,
    /// The longest that a guest's write may wait for old content to be saved, in nanoseconds; no limit where there is none.
    /// A target that ends no write for so long is silent: it loses a moment that may be lost, though no guest waits.
    pub limit: Option<Time>,
    /// What breaks then, or where saving it fails.
    pub breaks: Breaks,
    /// What becomes of the job that saves the rest where it meets an error.
    pub on_errors: OnErrors,
    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    pub wrongs: crate::Wrongs,
}

/// What the filter and all who look at the moment share.
pub(crate) struct Kept {
    target: Arc<Target>,
    /// What has yet to be saved.
    left: Map,
    /// What requests have changed since: the disk does not hold it any more.
    changed: Map,
    stable: Stability,
    granularity: u64,
    size: u64,
    zeroed: bool,
    /// The target was a copy before.
    some: bool,
    limit: Option<Time>,
    breaks: Breaks,
    /// Whether it has been said that requests fail.
    told: AtomicBool,
    /// Bytes that may yet be saved before requests.
    room: AtomicU64,
    /// Where what requests change goes first, where there is such a place.
    aside: OnceLock<Aside>,
    #[cfg(feature = "sabotage")]
    wrongs: crate::Wrongs,
}

/// A moment of a disk, as long as it is kept.
pub struct Moment {
    from: Disk,
    kept: Arc<Kept>,
    filter: Arc<dyn BeforeWrite>,
    requests: usize,
    on_errors: OnErrors,
    deals_with_no_room: Option<DealsWithNoRoom>,
    /// Marks to be set again.
    taken: Option<(Arc<Tracker>, Map)>,
    successor: Option<Successor>,
    saved: AtomicBool,
}

/// What makes views of a moment.
#[derive(Clone)]
pub(crate) struct Moments {
    kept: Arc<Kept>,
    from: Disk,
}

impl Moments {
    pub(crate) fn fork(&self) -> View {
        let (from, target) = (self.from.fork(), self.kept.target.disk.fork());
        View { kept: self.kept.clone(), from, target }
    }
}

/// A moment of a disk as one thread reads it.
pub struct View {
    kept: Arc<Kept>,
    from: Vbd,
    target: Vbd,
}

impl Backup {
    /// Keep all that a disk holds.
    pub fn new(from: impl Into<Disk>, to: impl Into<Disk>) -> Backup {
        Backup {
            from: from.into(),
            to: to.into(),
            changed: None,
            keeps_marks: false,
            room: None,
            zeroed: false,
            granularity: Tracker::GRANULARITY,
            requests: 8,
            limit: Some(5_000_000_000),
            breaks: Breaks::default(),
            on_errors: OnErrors::default(),
            #[cfg(feature = "sabotage")]
            wrongs: crate::Wrongs::default(),
        }
    }

    /// Have the disk stand still, wait at most so many nanoseconds for that, and keep what it holds then. `still` is called while
    /// it stands still: another disk's moment may be the same. It may be
    /// tried again where it fails.
    pub async fn begin<E>(
        &self,
        io: &Io,
        wait: Time,
        still: impl AsyncFnOnce() -> Result<(), E>,
    ) -> Result<Moment, MirrorError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let from = self.from.fork();
        let quiesced = from.quiesce(io, wait).await.map_err(|busy| match busy {
            Busy::Late => MirrorError::Busy,
            Busy::Stopped => MirrorError::Stopped,
        })?;
        self.check()?;
        still().await.map_err(|why| MirrorError::Hook(why.into()))?;
        let moment = self.begin_still(&quiesced)?;
        drop(quiesced);
        Ok(moment)
    }

    /// Keep what the disk holds, which stands still.
    ///
    /// # Errors
    /// Where the target cannot hold it.
    pub fn begin_still(&self, _: &Quiesced<'_>) -> Result<Moment, MirrorError> {
        self.check()?;
        Ok(self.keep(self.from.size()))
    }

    fn check(&self) -> Result<(), MirrorError> {
        self.check_for(self.from.size())
    }

    fn check_for(&self, disk: u64) -> Result<(), MirrorError> {
        let target = self.to.size();
        if target < disk {
            return Err(MirrorError::Size { target, disk, wanted: "as large" });
        }
        if self.to.info().read_only { Err(MirrorError::ReadOnly) } else { Ok(()) }
    }

    fn keep(&self, size: u64) -> Moment {
        let left = Map::new(self.granularity);
        if let Some(tracker) = self.changed.as_ref().filter(|_| self.keeps_marks) {
            left.merge(tracker.map(), size);
        }
        let taken = self.changed.clone().filter(|_| !self.keeps_marks).map(|tracker| {
            let (taken, mut at) = (Map::new(tracker.granularity()), 0);
            while let Some(range) = tracker.next(at, u64::MAX) {
                at = range.end;
                taken.mark(range.clone());
                left.mark(range.start..range.end.min(size));
            }
            tracker.clear();
            (tracker, taken)
        });
        if self.changed.is_none() {
            left.mark(0..size);
        }
        self.keep_left(left, size, self.changed.is_some(), taken)
    }

    fn keep_left(
        &self,
        left: Map,
        size: u64,
        some: bool,
        taken: Option<(Arc<Tracker>, Map)>,
    ) -> Moment {
        // What holds only what has changed is put upon an earlier copy, or was one.
        let granularity = left.granularity();
        let target = Target::new(self.to.clone()).with_zeros_said(some).with_unstable(granularity);
        #[cfg(feature = "sabotage")]
        let target = target.with_ranges_unlocked(self.wrongs.unlocked);
        let kept = Arc::new(Kept {
            target: Arc::new(target),
            granularity,
            left,
            changed: Map::new(granularity),
            stable: Stability::default(),
            size,
            zeroed: self.zeroed && !some,
            some,
            limit: self.limit,
            breaks: self.breaks,
            told: AtomicBool::new(false),
            room: AtomicU64::new(self.room.unwrap_or(u64::MAX)),
            aside: OnceLock::new(),
            #[cfg(feature = "sabotage")]
            wrongs: self.wrongs,
        });
        let (filter, shared): (Arc<dyn BeforeWrite>, _) = (kept.clone(), &self.from.shared);
        shared.filters.install_before(&shared.door, filter.clone());
        let (from, saved) = (self.from.clone(), AtomicBool::new(false));
        let (requests, on_errors) = (self.requests, OnErrors::default());
        let (deals_with_no_room, successor) = (None, None);
        let moment = Moment {
            from,
            kept,
            filter,
            requests,
            on_errors,
            deals_with_no_room,
            taken,
            successor,
            saved,
        };
        moment.with_errors(self.on_errors)
    }
}

impl Drop for Moment {
    fn drop(&mut self) {
        self.forget();
        // Whoever has a view of it sees that it is gone.
        if !self.saved.load(SeqCst) {
            self.kept.target.fail(MirrorError::Cancelled);
            if let Some((tracker, taken)) = &self.taken {
                let mut at = 0;
                while let Some(range) = taken.next(at, u64::MAX) {
                    at = range.end;
                    tracker.mark(range);
                }
            }
        }
    }
}

impl Moment {
    fn forget(&self) {
        let shared = &self.from.shared;
        shared.filters.remove_before(&shared.door, &self.filter);
    }

    /// Bytes of the disk at that moment.
    pub fn size(&self) -> u64 {
        self.kept.size
    }

    /// Whether it can still be read: the target has taken all that it was to take.
    pub fn is_whole(&self) -> bool {
        !self.kept.target.has_failed()
    }

    /// What reads it, for a thread.
    pub fn fork(&self) -> View {
        self.moments().fork()
    }

    pub(crate) fn moments(&self) -> Moments {
        Moments { kept: self.kept.clone(), from: self.from.clone() }
    }

    /// The disk that it is of.
    pub fn disk(&self) -> &Disk {
        &self.from
    }

    /// Have what is marked from now on, which the disk stands still at, take a bitmap's place in the end.
    pub fn succeed_bitmap(&mut self, of: &DirtyBitmap, still: &Quiesced<'_>) {
        self.successor = Some(self.from.succeed_bitmap(of, still));
    }

    /// What is to take a bitmap's place in the end.
    pub fn successor(&self) -> Option<&Successor> {
        self.successor.as_ref()
    }

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

    /// Keep it until the job is cancelled, and save only what requests change. Where this fails the moment is lost; the disk
    /// goes on as before.
    pub async fn hold(&self, io: &Io, job: &Job) -> Result<(), MirrorError> {
        job.set_phase(Phase::Copying);
        let target = &self.kept.target;
        let cancelled = async {
            job.cancelled().await;
            target.fail(MirrorError::Cancelled);
        };
        beside(beside(target.broken(), cancelled), self.kept.watch_for_silence(io)).await;
        let why = target.failed_by(MirrorError::Cancelled);
        target.left_alone_for(io, self.kept.limit).await;
        self.forget();
        job.set_phase(Phase::Failed);
        Err(why)
    }
}

/// Room for a region, given back where that is not saved: it is tried again.
struct Taken<'a> {
    room: &'a AtomicU64,
    bytes: u64,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.room.fetch_add(self.bytes, SeqCst);
    }
}

impl BeforeWrite for Kept {
    fn before_write<'a>(
        &'a self,
        io: &'a Io,
        pass: Pass<'a>,
        range: Range<u64>,
    ) -> Filtered<'a, Result<(), Error>> {
        Box::pin(async move {
            #[cfg(feature = "sabotage")]
            if self.wrongs.misses > 0 && (range.start / 512) % self.wrongs.misses == 0 {
                return Ok(());
            }
            let lacks = Cell::new(None);
            let save = self.before_change(io, pass, range, &lacks);
            let end = match self.limit {
                Some(limit) => {
                    let late = || lacks.take().unwrap_or(MirrorError::Late { limit });
                    within(save, io.sleep(limit)).await.unwrap_or_else(|| Err(late()))
                }
                None => save.await,
            };
            end.or_else(|why| self.unsaved(why))
        })
    }
}

impl Kept {
    /// The regions of a range, as far as the disk reached.
    fn regions(&self, range: Range<u64>) -> Range<u64> {
        let up = range.end.checked_next_multiple_of(self.granularity).unwrap_or(u64::MAX);
        range.start - range.start % self.granularity..up.min(self.size)
    }

    /// Lose a moment that may be lost, where the target is silent.
    async fn watch_for_silence(&self, io: &Io) {
        if let (Some(limit), Breaks::Moment) = (self.limit, self.breaks) {
            self.target.watch_for_silence(io, limit).await;
        }
    }

    fn is_left(&self, range: &Range<u64>) -> Option<Range<u64>> {
        self.left.first_in(range)
    }

    /// What a request is about to change could not be saved: whether it changes it all the same.
    fn unsaved(&self, why: MirrorError) -> Result<(), Error> {
        if self.breaks == Breaks::Moment {
            self.target.fail(why);
            return Ok(());
        }
        if self.target.has_failed() {
            return Ok(());
        }
        if !self.told.swap(true, SeqCst) {
            tracing::warn!("requests fail, for what they would overwrite cannot be saved: {why}");
        }
        // Not that there is no space: the disk's own image has some, and nobody is to wait for that.
        Err(Error::Os(libc::EIO))
    }

    fn take_room(&self, bytes: u64) -> Result<Taken<'_>, MirrorError> {
        let left = |room: u64| if room == u64::MAX { Some(room) } else { room.checked_sub(bytes) };
        match self.room.fetch_update(SeqCst, SeqCst, left) {
            Ok(u64::MAX) => Ok(Taken { room: &self.room, bytes: 0 }),
            Ok(_) => Ok(Taken { room: &self.room, bytes }),
            Err(left) => Err(MirrorError::Room { left, bytes }),
        }
    }

    /// Have the target hold what the regions of a range held, where it does not yet.
    async fn save(&self, io: &Io, pass: Pass<'_>, range: Range<u64>) -> Result<(), MirrorError> {
        let range = self.regions(range);
        if self.target.has_failed() || self.is_left(&range).is_none() {
            return Ok(());
        }
        let held = Rc::new(self.target.ranges.ask(range.clone()));
        if !self.target.alone(&held).await {
            return Err(MirrorError::Cancelled);
        }
        let mut rest = range;
        while let Some(part) = self.is_left(&rest) {
            let mut at = part.start;
            let mut taken = self.take_room(part.end - part.start)?;
            while at < part.end {
                let (len, content) = self.old(io, pass, at..part.end).await?;
                give(io, &self.target, at, len, content, self.zeroed, &held).await?;
                at += len;
            }
            taken.bytes = 0;
            self.has_saved(io, part.clone()).await;
            rest.start = part.end;
        }
        Ok(())
    }
}
