//! What a range holds, of a list of where something is.

use std::ops::Range;
use std::time::{Duration, Instant};

use ringtap_io::Holds;

use crate::ffi::Extent;

/// For how long a list is believed where others may write.
const FRESH: Duration = Duration::from_secs(1);
/// What is asked for at once, at least and at most.
pub(crate) const LEAST: u64 = 64 << 20;
pub(crate) const MOST: u64 = 4 << 30;

/// Where something is in a part of an image.
pub(crate) struct List {
    range: Range<u64>,
    /// Whole steps, in order, with holes between them.
    data: Vec<Range<u64>>,
    /// Changes that had begun before it was asked for.
    changes: u64,
    at: Instant,
}

impl List {
    /// Of extents in order.
    pub(crate) fn new(range: Range<u64>, extents: &[Extent], changes: u64) -> List {
        let mut data: Vec<Range<u64>> = vec![];
        // Of images in stripes Ceph 15 tells them by their objects.
        let mut there: Vec<&Extent> = extents.iter().filter(|extent| extent.exists).collect();
        there.sort_unstable_by_key(|extent| extent.offset);
        for Extent { offset, len, .. } in there {
            let from = offset / Holds::STEP * Holds::STEP;
            let to = (offset + len).next_multiple_of(Holds::STEP);
            match data.last_mut().filter(|last| last.end >= from) {
                Some(last) => last.end = last.end.max(to),
                None => data.push(from..to),
            }
        }
        List { range, data, changes, at: Instant::now() }
    }

    /// Whether it still tells of what is there at `offset`.
    pub(crate) fn is_of(&self, offset: u64, changes: u64) -> bool {
        self.range.contains(&offset) && self.changes == changes && self.at.elapsed() < FRESH
    }

    /// What is there from `offset`, which lies in its range.
    pub(crate) fn holds(&self, offset: u64, len: u64) -> Holds {
        let end = self.range.end.min(offset.saturating_add(len));
        let place = self.data.partition_point(|data| data.end <= offset);
        let (to, hole) = match self.data.get(place) {
            Some(data) if data.start <= offset => (data.end, false),
            Some(data) => (data.start, true),
            None => (end, true),
        };
        let len = to.min(end).saturating_sub(offset);
        match hole {
            // No further than that, be it in the middle of a step.
            true if len >= Holds::STEP => {
                Holds { len: len / Holds::STEP * Holds::STEP, hole: true, zero: true }
            }
            _ => Holds { len: len.next_multiple_of(Holds::STEP), hole: false, zero: false },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_become_ranges_of_whole_steps() {
        let of = |offset, len, exists| Extent { offset, len, exists };
        let there = [of(100, 10, true), of(512, 1, true), of(2048, 512, false)];
        let more = [of(4096, 512, true), of(5000, 200, true)];
        let list = List::new(0..10_000, &[&there[..], &more].concat(), 7);
        let at = |offset, len| {
            let Holds { len, hole, zero } = list.holds(offset, len);
            assert_eq!(hole, zero);
            (len, hole)
        };
        assert_eq!(at(0, 10_000), (1024, false));
        assert_eq!(at(512, 10_000), (512, false));
        assert_eq!(at(1024, 10_000), (3072, true));
        assert_eq!(at(1024, 512), (512, true));
        assert_eq!(at(4096, 10_000), (1536, false));
        assert_eq!(at(5632, 1 << 20), (4096, true));
        assert_eq!(at(9728, 1 << 20), (512, false), "less than a step is data");
        // From the middle of a step on it is a hole only as far as it is one.
        assert_eq!((at(1100, 10_000), at(3700, 10_000)), ((2560, true), (512, false)));
        let shuffled = [of(4096, 512, true), of(0, 512, true)];
        let list = List::new(0..10_000, &shuffled, 7);
        assert!(!list.holds(0, 512).hole && !list.holds(4096, 512).hole);
        assert!(list.is_of(9_999, 7) && !list.is_of(10_000, 7) && !list.is_of(0, 8));
    }
}
