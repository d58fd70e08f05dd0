//! The disk as requests find it on their way to the image: how large it is, when they are stable, who notes what they change.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};

use ringtap_image::{CacheMode, Info};

use crate::bitmaps::Bitmaps;
use crate::gate::Gate;
use crate::track::Trackers;

pub(crate) struct Medium {
    pub(crate) info: Info,
    /// Whether the image is open for reading alone, now: the disk may be opened otherwise than it was at first.
    read_only: AtomicBool,
    /// Which of [`MODES`].
    cache: AtomicU8,
    pub(crate) size: AtomicU64,
    /// Those who want writes to be stable when they are answered: the operator, and each [`crate::WriteThrough`].
    pub(crate) writethrough: AtomicUsize,
    pub(crate) gate: Arc<Gate>,
    pub(crate) trackers: Trackers,
    pub(crate) bitmaps: Bitmaps,
    /// Discards free nothing, and neither do zeros.
    pub(crate) keeps_space: AtomicBool,
}

const MODES: [CacheMode; 5] = [
    CacheMode::None,
    CacheMode::Writeback,
    CacheMode::Writethrough,
    CacheMode::DirectSync,
    CacheMode::Unsafe,
];

fn number(cache: CacheMode) -> u8 {
    MODES.iter().position(|mode| *mode == cache).unwrap_or(0) as u8
}

impl Medium {
    pub(crate) fn new(info: Info, cache: CacheMode, gate: Arc<Gate>) -> Medium {
        Medium {
            size: AtomicU64::new(info.size),
            read_only: AtomicBool::new(info.read_only),
            info,
            writethrough: AtomicUsize::new(cache.writethrough().into()),
            cache: AtomicU8::new(number(cache)),
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

    #[inline]
    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only.load(Relaxed)
    }

    #[inline]
    pub(crate) fn cache(&self) -> CacheMode {
        MODES[usize::from(self.cache.load(Relaxed)) % MODES.len()]
    }

    /// It is opened so from now on. Nothing is in flight.
    pub(crate) fn is_opened(&self, read_only: bool, cache: CacheMode) {
        self.read_only.store(read_only, Relaxed);
        let before = MODES[usize::from(self.cache.swap(number(cache), Relaxed)) % MODES.len()];
        match (before.writethrough(), cache.writethrough()) {
            (false, true) => _ = self.writethrough.fetch_add(1, Relaxed),
            (true, false) => _ = self.writethrough.fetch_sub(1, Relaxed),
            _ => {}
        }
    }

    pub(crate) fn write_cache(&self) -> bool {
        self.writethrough.load(Relaxed) == 0
    }
}
