//! A disk that stands still, and one whose image is replaced while it is served.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use ringtap_image::{Error, Image};
use ringtap_io::{Io, Time};

use crate::Vbd;
use crate::disk::{Current, lock};

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
        let grace = lock(&self.shared.current).grace.clone();
        door.drain(&grace).await;
        quiesced
    }
}

impl Quiesced<'_> {
    /// The image as it is, with nobody writing to it.
    pub fn image(&self) -> Result<Box<dyn Image>, Error> {
        self.vbd.health().contain(|| lock(&self.vbd.shared.current).image.fork())
    }

    /// Let another image be the disk from now on; gives the former one. Flush that before where the new one lies upon
    /// it: the disk's flushes reach the new one's files alone from now on. It must be as large, and be written to where the
    /// disk is. What the guest was told of the disk at first (block sizes, what can be discarded) stays.
    pub fn replace(&self, image: Box<dyn Image>) -> Result<Box<dyn Image>, Error> {
        let shared = &self.vbd.shared;
        // Nor does it grow now.
        let _alone = self.vbd.alone();
        if image.info().size != shared.size.load(Relaxed) {
            return Err(Error::Range);
        }
        if image.info().read_only && !shared.info.read_only {
            return Err(Error::ReadOnly);
        }
        let next = Current::new(image);
        let former = std::mem::replace(&mut *lock(&shared.current), next);
        shared.door.replaced();
        Ok(former.image)
    }
}
