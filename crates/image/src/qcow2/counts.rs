//! Numbers per cluster: refcounts as they lie in a block, and references counted in memory.

use std::collections::BTreeMap;

/// Clusters of a page of [`Counts`]: few, for references may lie far apart.
pub(super) const PAGE: u64 = 64;
/// Bytes that a page takes, with its place in the map.
const PAGE_BYTES: usize = PAGE as usize * size_of::<Count>() + 56;

/// The refcount at `index` of a refcount block; 0 past its end.
pub(super) fn refcount(block: &[u8], index: u64, order: u32) -> u64 {
    let bit = index << order;
    let Some(rest) = block.get((bit / 8) as usize..) else { return 0 };
    let byte = u64::from(rest.first().copied().unwrap_or(0));
    match order {
        0..3 => byte >> (bit % 8) & ((1 << (1 << order)) - 1),
        _ => rest.iter().take(1 << (order - 3)).fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
    }
}

/// Set the refcount at `index` of a refcount block.
pub(super) fn set_refcount(block: &mut [u8], index: u64, order: u32, value: u64) {
    let bit = index << order;
    let Some(rest) = block.get_mut((bit / 8) as usize..) else { return };
    if order < 3 {
        if let Some(byte) = rest.first_mut() {
            let mask = ((1u16 << (1 << order)) - 1) as u8;
            *byte = *byte & !(mask << (bit % 8)) | (value as u8 & mask) << (bit % 8);
        }
        return;
    }
    let width = 1 << (order - 3);
    let bytes = value.to_be_bytes();
    for (to, from) in rest.iter_mut().take(width).zip(bytes.iter().skip(8 - width)) {
        *to = *from;
    }
}

/// More references than this to one cluster are not told apart.
type Count = i32;

/// How often each cluster is referred to, from `start` up to where memory ends.
pub(super) struct Counts {
    start: u64,
    /// The first cluster not counted any more.
    end: u64,
    most_pages: usize,
    /// The clusters past every one that was asked to be counted, in the range or not.
    past: u64,
    pages: BTreeMap<u64, Box<[Count]>>,
}

impl Counts {
    /// Nothing counted yet, from cluster `start` (a multiple of 64) on, in so many bytes at most.
    pub(super) fn new(start: u64, memory: usize) -> Counts {
        let most_pages = (memory / PAGE_BYTES).max(1);
        Counts { start, end: u64::MAX, most_pages, past: 0, pages: BTreeMap::new() }
    }

    /// The clusters that were counted. Further ones take another round from its end on.
    pub(super) fn range(&self) -> std::ops::Range<u64> {
        self.start..self.end
    }

    /// Count `clusters` from `first` on `times` more (or less).
    pub(super) fn add(&mut self, first: u64, clusters: u64, times: i64) {
        let times = times.clamp(Count::MIN.into(), Count::MAX.into()) as Count;
        self.past = self.past.max(first.saturating_add(clusters));
        let from = first.max(self.start);
        let to = first.saturating_add(clusters).min(self.end);
        let mut at = from;
        while at < to {
            let number = at / PAGE;
            let page_end = (number + 1) * PAGE;
            let page = self
                .pages
                .entry(number)
                .or_insert_with(|| vec![0; PAGE as usize].into_boxed_slice());
            let within = (at % PAGE) as usize;
            let len = (to.min(page_end) - at) as usize;
            for count in page.iter_mut().skip(within).take(len) {
                *count = count.saturating_add(times);
            }
            at = page_end;
            if self.pages.len() > self.most_pages {
                if let Some((last, _)) = self.pages.pop_last() {
                    self.end = last * PAGE;
                    if at >= self.end {
                        return;
                    }
                }
            }
        }
    }

    /// Whether nothing refers to a cluster; false where that is not known.
    pub(super) fn is_unreferenced(&self, cluster: u64) -> bool {
        cluster >= self.past || (self.range().contains(&cluster) && self.get(cluster) == 0)
    }

    /// The numbers of the pages with a cluster of these that something refers to: 64 clusters each.
    pub(super) fn pages(&self, clusters: std::ops::Range<u64>) -> impl Iterator<Item = u64> {
        let pages = clusters.start / PAGE..clusters.end.div_ceil(PAGE);
        self.pages.range(pages).map(|(number, _)| *number)
    }

    /// How often a cluster within the range was counted.
    pub(super) fn get(&self, cluster: u64) -> i64 {
        let page = self.pages.get(&(cluster / PAGE));
        page.and_then(|page| page.get((cluster % PAGE) as usize)).map_or(0, |count| (*count).into())
    }

    /// Every cluster whose count is not 0, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, i64)> {
        self.pages.iter().flat_map(|(number, page)| {
            let clusters = (number * PAGE..).zip(page.iter().copied());
            clusters
                .filter(|(_, count)| *count != 0)
                .map(|(cluster, count)| (cluster, count.into()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_of_every_width_stay_apart() {
        for order in 0..=6 {
            let mut block = vec![0; 512];
            let most = u64::MAX >> (64 - (1u32 << order));
            let entries = 512 * 8 >> order;
            for index in 0..entries {
                set_refcount(&mut block, index, order, index.wrapping_mul(0x9e37_79b9) & most);
            }
            for index in 0..entries {
                let want = index.wrapping_mul(0x9e37_79b9) & most;
                assert_eq!(refcount(&block, index, order), want, "{order} {index}");
            }
            assert_eq!(refcount(&block, entries, order), 0);
        }
        // The order of bits and bytes is the specification's.
        assert_eq!(refcount(&[0b10], 1, 0), 1);
        assert_eq!(refcount(&[0x21], 1, 2), 2);
        assert_eq!(refcount(&[1, 2], 0, 4), 0x102);
    }

    #[test]
    fn counting_goes_as_far_as_memory_does() {
        let mut counts = Counts::new(0, 2 * PAGE_BYTES);
        counts.add(5 * PAGE, 1, 1);
        counts.add(PAGE - 1, 2, 2);
        assert_eq!(counts.range(), 0..5 * PAGE);
        assert_eq!((counts.get(PAGE - 1), counts.get(PAGE)), (2, 2));
        assert_eq!(counts.iter().collect::<Vec<_>>(), [(PAGE - 1, 2), (PAGE, 2)]);
        let mut rest = Counts::new(counts.range().end, 2 * PAGE_BYTES);
        rest.add(5 * PAGE, 1, 1);
        rest.add(PAGE - 1, 2, 2);
        assert_eq!(rest.iter().collect::<Vec<_>>(), [(5 * PAGE, 1)]);
        assert_eq!(rest.range().end, u64::MAX);
    }
}
