//! A disk that stands still, and one whose image is replaced while it is served.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use ringtap_image::{CacheMode, Error, Image};
use ringtap_io::{Io, Time};

use crate::Vbd;
use crate::disk::{Current, lock};
use crate::former::Former;

/// Why a disk does not stand still.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Busy {
    /// A request in flight, or another change of the disk, has taken longer than the caller wanted to wait.
    #[error("requests in flight, or another change of the disk, did not end in time")]
    Late,
    /// A panic has stopped the disk.
    #[error("the disk is stopped")]
    Stopped,
}

/// A disk that stands still: requests wait until this is dropped.
#[must_use = "requests go on once it is dropped"]
pub struct Quiesced<'a> {
    vbd: &'a Vbd,
}

impl Drop for Quiesced<'_> {
    fn drop(&mut self) {
        self.vbd.shared.door.unlock();
    }
}

impl Vbd {
    /// Have all requests wait before they begin, and wait until those have ended that are in flight, at most for
    /// so many nanoseconds; where they have not, all go on as before.
    pub async fn quiesce(&self, io: &Io, limit: Time) -> Result<Quiesced<'_>, Busy> {
        let mut sleep = pin!(io.sleep(limit));
        let mut still = pin!(self.stand_still());
        std::future::poll_fn(|context| {
            if self.health().failure().is_some() {
                return Poll::Ready(Err(Busy::Stopped));
            }
            match still.as_mut().poll(context) {
                Poll::Ready(quiesced) => Poll::Ready(Ok(quiesced)),
                Poll::Pending => sleep.as_mut().poll(context).map(|()| Err(Busy::Late)),
            }
        })
        .await
    }

    async fn stand_still(&self) -> Quiesced<'_> {
        let door = &self.shared.door;
        door.shut().await;
        // From here on it opens again where the caller does not wait for the end.
        let quiesced = Quiesced { vbd: self };
        let epochs = lock(&self.shared.current).epochs.clone();
        door.drain(&epochs).await;
        quiesced
    }
}

impl Quiesced<'_> {
    /// The image as it is, with nobody writing to it.
    pub fn image(&self) -> Result<Box<dyn Image>, Error> {
        self.vbd.disk().image()
    }

    /// Let another image be the disk from now on; gives the former one, which must have been flushed where the new one
    /// lies upon it: the disk's flushes reach the new one's files alone from now on (see [`Quiesced::overlay`]). It must be
    /// as large, and be written to where the disk is. What the guest was told of the disk at first (block sizes, what can
    /// be discarded) stays.
    pub fn replace(&self, image: Box<dyn Image>) -> Result<Box<dyn Image>, Error> {
        self.put(image, Size::Same, |_| vec![])
    }

    /// As [`Quiesced::replace`], by the disk's own image, which others had meanwhile: its size is the disk's from now on,
    /// whatever that was.
    pub fn come_back(&self, image: Box<dyn Image>) -> Result<Box<dyn Image>, Error> {
        self.put(image, Size::Any, |_| vec![])
    }

    /// As [`Quiesced::replace`], by the disk's own image, which was closed, made larger and opened anew upon the same images.
    /// Others learn of the size when they look.
    pub fn larger(&self, image: Box<dyn Image>) -> Result<Box<dyn Image>, Error> {
        self.put(image, Size::NotSmaller, Current::unsettled)
    }

    /// As [`Quiesced::replace`], by an image that is opened otherwise than the disk's was: for reading alone, or by the page
    /// cache. Nobody who may write has the disk where the new one is only read.
    pub fn opened_otherwise(
        &self,
        image: Box<dyn Image>,
        cache: CacheMode,
    ) -> Result<Box<dyn Image>, Error> {
        let medium = &self.vbd.shared.medium;
        let (was, before) = (medium.is_read_only(), medium.cache());
        medium.is_opened(image.info().read_only, cache);
        let end = self.put(image, Size::Same, Current::unsettled);
        if end.is_err() {
            medium.is_opened(was, before);
        }
        end
    }

    /// Let an overlay on the disk's image take its place, without waiting for the image to be stable: the disk's
    /// flushes do that first, until [`Former::settle`] has.
    pub fn overlay(&self, image: Box<dyn Image>) -> Result<Former, Error> {
        let mut former = None;
        self.put(image, Size::Same, |current| {
            let own = Former::new(current.image.fork());
            former = Some(own.clone());
            let mut formers = current.unsettled();
            formers.push(own);
            formers
        })?;
        former.ok_or(Error::Stopped)
    }

    /// Put the image back that an overlay has taken the place of, before anybody wrote to that: what is below it and not
    /// stable yet stays with the disk's flushes.
    pub fn put_back(&self, former: &Former) -> Result<(), Error> {
        let below = |current: &Current| {
            let mut formers = current.unsettled();
            formers.retain(|one| !one.is(former));
            formers
        };
        self.put(former.image().fork(), Size::Same, below).map(drop)
    }

    fn put(
        &self,
        image: Box<dyn Image>,
        sized: Size,
        formers: impl FnOnce(&Current) -> Vec<Former>,
    ) -> Result<Box<dyn Image>, Error> {
        let shared = &self.vbd.shared;
        // Nor does it grow now.
        let _alone = self.vbd.alone();
        let (size, new) = (shared.medium.size.load(Relaxed), image.info().size);
        let fits = match sized {
            Size::Same => is_of_size(&*image, size),
            Size::NotSmaller => is_of_size(&*image, size) || new >= size,
            Size::Any => true,
        };
        if !fits {
            return Err(Error::Range);
        }
        if image.info().read_only && !shared.medium.is_read_only() {
            return Err(Error::ReadOnly);
        }
        let mut next = Current::new(image);
        let former = shared.health.contain(|| {
            let mut current = lock(&shared.current);
            next.formers = formers(&current);
            std::mem::replace(&mut *current, next)
        })?;
        if sized != Size::Same {
            shared.medium.size.store(new, Relaxed);
        }
        shared.door.replaced();
        self.vbd.has_moved();
        // There may be room where it goes on.
        let waiting = shared.full.waiting();
        if waiting > 0 {
            self.vbd.span().in_scope(|| {
                tracing::info!(
                    "{waiting} request(s) that found no room are tried again where it goes on"
                );
            });
        }
        shared.full.try_again();
        Ok(former.image)
    }
}

/// What size an image may have that takes the disk's place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Size {
    Same,
    NotSmaller,
    Any,
}

/// Whether an image has a size, be it that it has grown since it was opened.
pub(crate) fn is_of_size(image: &dyn Image, size: u64) -> bool {
    image.info().size == size || image.current_size() == Ok(size)
}
