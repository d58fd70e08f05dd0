//! The disk as requests find it on their way to the image: how large it is, when they are stable, who notes what they change.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use ringtap_image::{CacheMode, Info};

use crate::bitmaps::Bitmaps;
use crate::gate::Gate;
use crate::track::Trackers;

pub(crate) struct Medium {
    pub(crate) info: Info,
    pub(crate) cache: CacheMode,
    pub(crate) size: AtomicU64,
    /// Those who want writes to be stable when they are answered: the operator, and each [`crate::WriteThrough`].
    pub(crate) writethrough: AtomicUsize,
    pub(crate) gate: Arc<Gate>,
    pub(crate) trackers: Trackers,
    pub(crate) bitmaps: Bitmaps,
    /// Discards free nothing, and neither do zeros.
    pub(crate) keeps_space: AtomicBool,
}

impl Medium {
    pub(crate) fn new(info: Info, cache: CacheMode, gate: Arc<Gate>) -> Medium {
        Medium {
            size: AtomicU64::new(info.size),
            info,
            writethrough: AtomicUsize::new(cache.writethrough().into()),
            cache,
            gate,
            trackers: Trackers::default(),
            bitmaps: Bitmaps::default(),
            keeps_space: AtomicBool::new(false),
        }
    }

    #[inline]
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Relaxed)
    }

    pub(crate) fn write_cache(&self) -> bool {
        self.writethrough.load(Relaxed) == 0
    }
}
