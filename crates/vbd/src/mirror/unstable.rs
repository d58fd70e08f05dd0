//! What was written to a target since it was made stable last: a flush that fails may have lost any of it, and one that succeeds
//! after that proves nothing.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::map::Map;

/// Regions of a target.
pub(crate) struct Unstable {
    granularity: u64,
    regions: Mutex<Map>,
}

/// What a flush is to make stable: unstable again, unless it has ended well.
pub(crate) struct Flushing<'a> {
    of: &'a Unstable,
    regions: Option<Map>,
}

impl Flushing<'_> {
    /// What is stable now.
    pub(crate) fn ended_well(mut self) -> Option<Map> {
        self.regions.take()
    }
}

impl Drop for Flushing<'_> {
    fn drop(&mut self) {
        if let Some(regions) = self.regions.take() {
            self.of.lock().merge(&regions, u64::MAX);
        }
    }
}

impl Unstable {
    pub(crate) fn new(granularity: u64) -> Unstable {
        Unstable { granularity, regions: Mutex::new(Map::new(granularity)) }
    }

    /// A write of that has ended: whether a flush that has begun already makes it stable is not known.
    pub(crate) fn written(&self, range: Range<u64>) {
        self.lock().mark(range);
    }

    /// A flush begins.
    pub(crate) fn flushing(&self) -> Flushing<'_> {
        Flushing { of: self, regions: Some(self.take()) }
    }

    /// What it is, which is somebody else's to deal with from now on.
    pub(crate) fn take(&self) -> Map {
        std::mem::replace(&mut *self.lock(), Map::new(self.granularity))
    }

    /// Bytes of it.
    pub(crate) fn marked(&self) -> u64 {
        self.lock().marked()
    }

    /// A mark is never half set.
    fn lock(&self) -> MutexGuard<'_, Map> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(map: &Map) -> Option<Range<u64>> {
        map.next(0, u64::MAX)
    }

    #[test]
    fn what_a_flush_did_not_make_stable_stays_unstable() {
        let unstable = Unstable::new(4096);
        unstable.written(0..1);
        let flushing = unstable.flushing();
        unstable.written(8192..8193);
        flushing.ended_well();
        assert_eq!(first(&unstable.take()), Some(8192..12288));
        unstable.written(0..1);
        let flushing = unstable.flushing();
        unstable.written(4096..4097);
        drop(flushing);
        assert_eq!(first(&unstable.take()), Some(0..8192));
        assert_eq!(first(&unstable.take()), None);
    }
}
