//! The end of a mirror: the disk stands still, the rest is copied, the target is stable.

use std::cell::Cell;
use std::rc::Rc;

use ringtap_image::Image;
use ringtap_io::{Event, Io, Time};

use super::content::{give, look};
use super::error::MirrorError;
use super::terms::{Ending, Scope};
use super::together::within;
use super::work::Work;
use crate::change::is_of_size;
use crate::{Busy, Disk, Quiesced};

/// The disk stands still, and the target is as it is and stable.
pub(super) struct Ready<'a> {
    quiesced: Quiesced<'a>,
    _pinned: Pinned<'a>,
    /// When requests began to wait.
    since: Time,
}

/// A disk whose size stays as it is.
struct Pinned<'a>(&'a Disk);

impl<'a> Pinned<'a> {
    fn new(disk: &'a Disk) -> Pinned<'a> {
        disk.pin_size(true);
        Pinned(disk)
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.0.pin_size(false);
    }
}

/// The copying of the rest, in a task of its own: it cannot be given up where it is, but nobody need wait for it.
#[derive(Default)]
struct Rest {
    /// Whether all is copied.
    end: Cell<Option<Result<bool, MirrorError>>>,
    /// The disk goes on: no more of it.
    over: Cell<bool>,
    told: Event,
}

impl Rest {
    async fn ended(&self) -> Result<bool, MirrorError> {
        loop {
            let told = self.told.listen();
            if let Some(end) = self.end.take() {
                return end;
            }
            told.await;
        }
    }
}

impl Work {
    /// Make what was copied stable: then little is left to be done for that while the disk stands still. Whether it is; else some
    /// is to be copied again.
    pub(super) async fn make_stable(&self, io: &Io) -> Result<bool, MirrorError> {
        if self.above().is_some() {
            // What is below was not stable when the topmost image was put upon it, perhaps.
            let flushed = self.from.flush(io).await;
            flushed.map_err(|error| MirrorError::FlushDisk { error })?;
        }
        let attempt = self.attempt();
        match self.flush(io).await {
            Ok(()) => Ok(true),
            Err(why) => {
                Box::pin(attempt.failed(io, &self.pace, why)).await?;
                Ok(false)
            }
        }
    }

    /// Where it fails, what was written since the last time is copied again: any of it may be lost.
    async fn flush(&self, io: &Io) -> Result<(), MirrorError> {
        #[cfg(feature = "sabotage")]
        if self.mirror.wrongs.unflushed {
            return Ok(());
        }
        let end = self.target.flush(io, self.mirror.limit).await;
        let end = end.map_err(|why| self.target.known(why));
        if let Err(why) = &end {
            self.write_again();
            if self.mirror.on_errors.try_again(why) {
                self.target.is_written_anew();
            }
        }
        end
    }

    /// Mark what may have been lost of the target.
    pub(super) fn write_again(&self) {
        let lost = self.target.take_unstable();
        #[cfg(feature = "sabotage")]
        let lost = lost.filter(|_| !self.mirror.wrongs.trusts);
        lost.inspect(|lost| self.tracker.map().merge(lost, self.size.get()));
    }

    /// Have the disk stand still, and the target be as it is; none where that takes too long.
    pub(super) async fn stand_still<'a>(
        self: &'a Rc<Work>,
        io: &Io,
        ending: Ending,
    ) -> Result<Option<Ready<'a>>, MirrorError> {
        let (limit, since) = (self.mirror.still_for, io.now());
        // Who is held up is in flight.
        self.target.hurry(true);
        let quiesced = self.from.quiesce(io, limit).await;
        self.target.hurry(false);
        let quiesced = match quiesced {
            Ok(quiesced) => quiesced,
            Err(Busy::Late) => return Ok(None),
            Err(Busy::Stopped) => return Err(MirrorError::Stopped),
        };
        let ready = Ready { quiesced, _pinned: Pinned::new(&self.mirror.from), since };
        self.check(ending)?;
        let rest = Rc::new(Rest::default());
        let (work, own, at) = (self.clone(), rest.clone(), io.clone());
        io.spawn(async move {
            own.end.set(Some(work.rest(&at, &own).await));
            own.told.notify();
        });
        if let Some(end) = within(rest.ended(), io.sleep(limit)).await {
            return end.map(|is_all| is_all.then_some(ready));
        }
        rest.over.set(true);
        drop(ready);
        rest.ended().await.map(|_| None)
    }

    /// Copy what is marked while the disk stands still; whether that is all. What fails, and is to be tried again, is marked:
    /// guests do not wait for that.
    async fn rest(&self, io: &Io, rest: &Rest) -> Result<bool, MirrorError> {
        // What guests wrote before that is still on its way must not come after what is copied here, nor after the flush.
        #[cfg(feature = "sabotage")]
        let hasty = self.mirror.wrongs.hasty;
        #[cfg(not(feature = "sabotage"))]
        let hasty = false;
        if !hasty {
            let left = within(self.target.left_alone(), self.target.broken()).await;
            // The reason is the target's own.
            left.ok_or(MirrorError::Cancelled)?;
        }
        let cursor = Cell::new(0);
        let piece = self.mirror.piece;
        let copy = async |range: std::ops::Range<u64>| {
            let owed = self.owes(&range);
            let (mut at, end) = (range.start, range.end.min(self.size.get()));
            while at < end {
                let work = self
                    .from
                    .within_still(async |pass| Ok(look(io, pass, at..end, piece, None).await));
                let found = self.from.health().contain_all(work).await;
                let (len, content) = found.unwrap_or(Err(MirrorError::Stopped))?;
                give(io, &self.target, at, len, content, false, &()).await?;
                self.job.add(len);
                at += len;
            }
            owed.paid();
            Ok::<_, MirrorError>(())
        };
        while !rest.over.get() {
            match self.tracker.copy_next(&cursor, piece, &copy).await {
                Some(Ok(())) => {}
                Some(Err(why)) if self.mirror.on_errors.try_again(&why) => {
                    self.was_refused.set(true);
                    return Ok(false);
                }
                Some(Err(why)) => return Err(why),
                None => {
                    let attempt = self.attempt();
                    let Err(why) = self.flush(io).await else { return Ok(true) };
                    attempt.meets(why)?;
                    self.was_refused.set(true);
                    return Ok(false);
                }
            }
        }
        Ok(false)
    }

    /// The end itself; gives the former image where the target has taken its place.
    pub(super) async fn end<E>(
        &self,
        io: &Io,
        ready: Ready<'_>,
        ending: Ending,
        still: impl AsyncFnOnce() -> Result<(), E>,
    ) -> Result<Option<Box<dyn Image>>, MirrorError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let stays = self.job.leaves();
        let image = match ending {
            _ if stays => None,
            Ending::Copy => None,
            Ending::Pivot => Some(self.target.disk.image().map_err(|_| MirrorError::Stopped)?),
        };
        let (target, disk) = (self.target.disk.size(), self.mirror.from.size());
        if image.as_ref().is_some_and(|image| !is_of_size(&**image, disk)) {
            return Err(MirrorError::Size { target, disk, wanted: "just as large" });
        }
        self.job.check()?;
        if !stays {
            still().await.map_err(|why| MirrorError::Hook(why.into()))?;
        }
        if let Scope::Changed(tracker) = &self.mirror.scope {
            tracker.clear();
        }
        self.pass_by();
        let former = match image {
            None => None,
            // It was just as large, neither can have grown since, and it can be written to.
            Some(image) => Some(ready.quiesced.replace(image).map_err(|_| MirrorError::Stopped)?),
        };
        self.job.stood_still(io.now().saturating_sub(ready.since));
        Ok(former)
    }
}
