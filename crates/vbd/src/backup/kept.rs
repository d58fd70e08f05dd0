//! What the filter of a moment and all who look at the moment share.

use std::ops::Range;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use ringtap_image::Error;
use ringtap_io::{Io, Time};

use super::aside::Aside;
use super::stability::Stability;
use crate::map::Map;
use crate::mirror::error::MirrorError;
use crate::mirror::target::Target;
use crate::trouble::{OnError, OnErrors};

/// What breaks where old content cannot be saved, or not in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Breaks {
    /// The moment is lost, and the guest goes on.
    #[default]
    Moment,
    /// The guest's request fails and changes nothing, and the moment is kept.
    Request,
}

/// What the filter and all who look at the moment share.
pub(crate) struct Kept {
    pub(super) target: Arc<Target>,
    /// What has yet to be saved.
    pub(super) left: Map,
    /// What requests have changed since: the disk does not hold it any more.
    pub(super) changed: Map,
    pub(super) stable: Stability,
    pub(super) granularity: u64,
    pub(super) size: u64,
    pub(super) zeroed: bool,
    /// The target was a copy before.
    pub(super) some: bool,
    pub(super) limit: Option<Time>,
    pub(super) breaks: Breaks,
    /// Whether it has been said that requests fail.
    pub(super) told: AtomicBool,
    /// Bytes that may yet be saved before requests.
    pub(super) room: AtomicU64,
    /// Where what requests change goes first, where there is such a place.
    pub(super) aside: OnceLock<Aside>,
    #[cfg(feature = "sabotage")]
    pub(super) wrongs: crate::Wrongs,
}

impl Kept {
    /// The regions of a range, as far as the disk reached.
    pub(super) fn regions(&self, range: Range<u64>) -> Range<u64> {
        let up = range.end.checked_next_multiple_of(self.granularity).unwrap_or(u64::MAX);
        range.start - range.start % self.granularity..up.min(self.size)
    }

    /// Where the job goes on though its target could not be made stable, what requests change stays in scratch until it is.
    pub(super) fn keeps_until_stable(&self, on_errors: OnErrors) {
        self.stable.until.store(on_errors.target != OnError::Report, SeqCst);
    }

    /// Lose a moment that may be lost, where the target is silent.
    pub(super) async fn watch_for_silence(&self, io: &Io) {
        if let (Some(limit), Breaks::Moment) = (self.limit, self.breaks) {
            self.target.watch_for_silence(io, limit).await;
        }
    }

    pub(super) fn is_left(&self, range: &Range<u64>) -> Option<Range<u64>> {
        self.left.first_in(range)
    }

    /// What a request is about to change could not be saved: whether it changes it all the same.
    pub(super) fn unsaved(&self, why: MirrorError) -> Result<(), Error> {
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

    pub(super) fn take_room(&self, bytes: u64) -> Result<Taken<'_>, MirrorError> {
        let left = |room: u64| if room == u64::MAX { Some(room) } else { room.checked_sub(bytes) };
        match self.room.fetch_update(SeqCst, SeqCst, left) {
            Ok(u64::MAX) => Ok(Taken { room: &self.room, bytes: 0 }),
            Ok(_) => Ok(Taken { room: &self.room, bytes }),
            Err(left) => Err(MirrorError::Room { left, bytes }),
        }
    }
}

/// Room for a region, given back where that is not saved: it is tried again.
pub(super) struct Taken<'a> {
    pub(super) room: &'a AtomicU64,
    pub(super) bytes: u64,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.room.fetch_add(self.bytes, SeqCst);
    }
}
