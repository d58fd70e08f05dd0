//! A bit for each region of a disk that may grow: in memory of its own, or in such that outlives the process.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

use ringtap_image::bitmap_store::{BitMemory, BitPage};
use ringtap_io::Words;
use ringtap_io::sync::{OnceLock, broken, step};

/// Bits of a page.
const PAGE: u64 = 1 << 15;
const WORDS: usize = PAGE as usize / 64;
/// The spine's segments hold 1, 2, 4 ... pages, so that it reaches as far as any disk does.
const SEGMENTS: usize = 49;
/// The smallest region: a sector.
const SMALLEST: u64 = 512;

/// Bits for regions, one page after the other made when the first of its bits is set. The disk may grow.
pub(crate) struct Map {
    shift: u32,
    spine: Box<[OnceLock<Segment>]>,
    /// Where its bits are, if not here, and by which number.
    outlives: Option<(Arc<dyn BitMemory>, u64)>,
    /// Not all bits are there.
    short: AtomicBool,
    /// Bytes that requests may have changed.
    pub(crate) changed: AtomicU64,
    #[cfg(feature = "sabotage")]
    pub(crate) misses: AtomicU64,
    #[cfg(feature = "sabotage")]
    pub(crate) clears_late: std::sync::atomic::AtomicBool,
}

type Page = OnceLock<Box<[AtomicU64]>>;

/// Pages of the spine.
enum Segment {
    /// Here, each as soon as a bit of it is set.
    Here(Box<[Page]>),
    /// In memory that outlives the process, from its beginning on.
    Outlives(Words),
}

/// The segment and the place in it of a page.
fn place(page: u64) -> (usize, usize) {
    let segment = (page + 1).ilog2();
    (segment as usize, (page + 1 - (1 << segment)) as usize)
}

impl Map {
    pub(crate) fn new(granularity: u64) -> Map {
        let granularity = granularity.max(SMALLEST).checked_next_power_of_two();
        Map {
            shift: granularity.map_or(63, u64::trailing_zeros),
            spine: (0..SEGMENTS).map(|_| OnceLock::new()).collect(),
            outlives: None,
            short: AtomicBool::new(false),
            changed: AtomicU64::new(0),
            #[cfg(feature = "sabotage")]
            misses: AtomicU64::new(0),
            #[cfg(feature = "sabotage")]
            clears_late: false.into(),
        }
    }

    /// One whose bits outlive the process in the memory of a number; those that are there are its own.
    pub(crate) fn outliving(granularity: u64, memory: Arc<dyn BitMemory>, number: u64) -> Map {
        let mut map = Map::new(granularity);
        let there = memory.words(number, None).ok();
        map.outlives = Some((memory, number));
        let Some(there) = there else {
            // The next server finds that there is one.
            map.make_page(0);
            return map;
        };
        for (segment, slot) in map.spine.iter().enumerate() {
            if end_of(segment) > there.len() {
                break;
            }
            slot.get_or_init(|| Segment::Outlives(there.clone()));
        }
        map
    }

    /// The number of the memory that its bits are in.
    pub(crate) fn number(&self) -> Option<u64> {
        self.outlives.as_ref().map(|(_, number)| *number)
    }

    /// Whether bits have been set that do not outlive the process: once.
    pub(crate) fn has_become_short(&self) -> bool {
        self.short.load(Relaxed) && self.short.swap(false, SeqCst)
    }

    #[inline]
    fn page(&self, number: u64) -> Option<&[AtomicU64]> {
        let (segment, at) = place(number);
        self.spine.get(segment)?.get()?.page(number, at)
    }

    fn make_page(&self, number: u64) -> Option<&[AtomicU64]> {
        let (segment, at) = place(number);
        let slot = self.spine.get(segment)?;
        match slot.get_or_init(|| self.segment(segment)) {
            Segment::Here(pages) => {
                let new = || (0..WORDS).map(|_| AtomicU64::new(0)).collect();
                Some(pages.get(at)?.get_or_init(new))
            }
            outlives => outlives.page(number, at),
        }
    }

    fn segment(&self, segment: usize) -> Segment {
        let found = |(memory, number): &(Arc<dyn BitMemory>, u64)| {
            memory.words(*number, Some(end_of(segment)))
        };
        match self.outlives.as_ref().map(found) {
            Some(Ok(words)) => return Segment::Outlives(words),
            Some(Err(_)) => self.short.store(true, SeqCst),
            None => {}
        }
        Segment::Here((0..1u64 << segment).map(|_| OnceLock::new()).collect())
    }

    /// The pages in which a bit is set.
    pub(crate) fn set_pages(&self) -> Vec<BitPage> {
        let (mut found, mut at) = (vec![], 0);
        while let Some(region) = self.find(at, self.last(), true) {
            let number = region / PAGE;
            let words = self.page(number).into_iter().flatten();
            found.push((number, words.map(|word| word.load(SeqCst)).collect()));
            at = (number + 1) * PAGE;
        }
        found
    }

    /// Set the bits of a page.
    pub(crate) fn add_page(&self, (number, words): &BitPage) {
        if let Some(page) = self.make_page(*number) {
            page.iter().zip(words).for_each(|(to, bits)| _ = to.fetch_or(*bits, SeqCst));
        }
    }

    /// Set the bits of pages, of a disk of so many bytes: behind those there is nothing.
    pub(crate) fn add_pages(&self, pages: &[BitPage], size: u64) {
        let end = self.regions(&(0..size)).end;
        let last = end / PAGE;
        pages.iter().filter(|(number, _)| *number <= last).for_each(|page| self.add_page(page));
        self.unmark(end..(last + 1) * PAGE);
    }

    /// Set what is set in another of any granularity, of a disk of so many bytes.
    pub(crate) fn merge(&self, other: &Map, size: u64) {
        let mut at = 0;
        while let Some(range) = other.next(at, u64::MAX) {
            at = range.end;
            self.mark(range.start..range.end.min(size).max(range.start));
        }
    }

    /// Whether all regions of a range are marked.
    pub(crate) fn has_all(&self, range: &Range<u64>) -> bool {
        let regions = self.regions(range);
        match regions.end - regions.start {
            1 => self.has(regions.start),
            _ => self.find(regions.start, regions.end, false).is_none(),
        }
    }

    #[inline]
    fn has(&self, region: u64) -> bool {
        step();
        let word =
            self.page(region / PAGE).and_then(|page| page.get((region / 64) as usize % WORDS));
        word.is_some_and(|word| word.load(SeqCst) >> (region % 64) & 1 == 1)
    }

    /// The regions that a range touches and that are not marked.
    pub(crate) fn lacking(&self, range: &Range<u64>) -> Vec<u64> {
        let regions = self.regions(range);
        let (mut found, mut at) = (vec![], regions.start);
        while let Some(region) = self.find(at, regions.end, false) {
            found.push(region);
            at = region + 1;
        }
        found
    }

    /// Mark those that are not: where all are, nothing is written.
    pub(crate) fn mark_lacking(&self, range: Range<u64>) {
        if !self.has_all(&range) {
            self.mark(range);
        }
    }

    /// The regions that a range of bytes touches.
    pub(crate) fn regions(&self, range: &Range<u64>) -> Range<u64> {
        match range.is_empty() {
            true => 0..0,
            false => range.start >> self.shift..((range.end - 1) >> self.shift) + 1,
        }
    }

    /// Call `each` with each word's number and the bits of it that are regions of the range.
    fn words(regions: Range<u64>, mut each: impl FnMut(u64, u64)) {
        let mut at = regions.start;
        while at < regions.end {
            let next = (at - at % 64 + 64).min(regions.end);
            let count = next - at;
            each(at / 64, (u64::MAX >> (64 - count)) << (at % 64));
            at = next;
        }
    }

    pub(crate) fn mark(&self, range: Range<u64>) {
        Map::words(self.regions(&range), |word, bits| {
            if let Some(page) = self.make_page(word / WORDS as u64) {
                step();
                page[word as usize % WORDS].fetch_or(bits, SeqCst);
            }
        });
    }

    /// A request may have changed the range.
    pub(crate) fn note(&self, range: Range<u64>) {
        self.changed.fetch_add(range.end - range.start, Relaxed);
        #[cfg(feature = "sabotage")]
        if self.is_missed() {
            return;
        }
        self.mark(range);
    }

    #[cfg(feature = "sabotage")]
    fn is_missed(&self) -> bool {
        let count = self.misses.load(Relaxed);
        count > 0 && self.changed.load(Relaxed) / SMALLEST % count == 0
    }

    fn unmark(&self, regions: Range<u64>) {
        Map::words(regions, |word, bits| {
            if let Some(page) = self.page(word / WORDS as u64) {
                step();
                page[word as usize % WORDS].fetch_and(!bits, SeqCst);
            }
        });
    }

    /// The first region from `from` on, before `end`, whose bit is `set`.
    pub(crate) fn find(&self, from: u64, end: u64, set: bool) -> Option<u64> {
        let mut at = from;
        while at < end {
            let Some(page) = self.page(at / PAGE) else {
                if !set {
                    return Some(at);
                }
                // Nothing in a segment that is not there either.
                let (segment, _) = place(at / PAGE);
                let whole = self.spine.get(segment).is_none_or(|segment| segment.get().is_none());
                let next = if whole { (1u64 << (segment + 1)) - 1 } else { at / PAGE + 1 };
                at = next.checked_mul(PAGE)?;
                continue;
            };
            step();
            let word = page[(at / 64) as usize % WORDS].load(SeqCst);
            let word = (if set { word } else { !word }) >> (at % 64);
            if word != 0 {
                return Some(at + u64::from(word.trailing_zeros())).filter(|found| *found < end);
            }
            at = at - at % 64 + 64;
        }
        None
    }

    /// The regions marked from `from` on, at most `most` of them, before `end`.
    fn run(&self, from: u64, most: u64, end: u64) -> Option<Range<u64>> {
        let first = self.find(from, end, true)?;
        let until = first.saturating_add(most.max(1)).min(end);
        Some(first..self.find(first, until, false).unwrap_or(until))
    }

    fn bytes(&self, regions: Range<u64>) -> Range<u64> {
        let byte = |region: u64| region.saturating_mul(1 << self.shift);
        byte(regions.start)..byte(regions.end)
    }

    fn last(&self) -> u64 {
        u64::MAX >> self.shift
    }

    pub(crate) fn next(&self, from: u64, most: u64) -> Option<Range<u64>> {
        let regions = self.run(from >> self.shift, most >> self.shift, self.last())?;
        Some(self.bytes(regions))
    }

    pub(crate) fn take(&self, from: u64, most: u64) -> Option<Range<u64>> {
        let regions = self.run(from >> self.shift, most >> self.shift, self.last())?;
        self.unmark(regions.clone());
        Some(self.bytes(regions))
    }

    /// Copy the next regions marked at or after the cursor, `most` bytes or one region; none at the end.
    pub(crate) async fn copy_next<T>(
        &self,
        cursor: &Cell<u64>,
        most: u64,
        copy: impl AsyncFnOnce(Range<u64>) -> T,
    ) -> Option<T> {
        let late = broken("cleared after it is read") || self.clears_late();
        let found =
            if late { self.next(cursor.get(), most) } else { self.take(cursor.get(), most) };
        let bytes = found?;
        cursor.set(bytes.end);
        let copied = copy(bytes.clone()).await;
        if late {
            self.unmark(self.regions(&bytes));
        }
        Some(copied)
    }

    fn clears_late(&self) -> bool {
        #[cfg(feature = "sabotage")]
        return self.clears_late.load(Relaxed);
        #[cfg(not(feature = "sabotage"))]
        false
    }

    pub(crate) fn clear(&self) {
        self.pages(|page| page.iter().for_each(|word| word.store(0, SeqCst)));
    }

    /// The first regions of a range that are marked, side by side.
    pub(crate) fn first_in(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let regions = self.regions(range);
        let found = self.bytes(self.run(regions.start, u64::MAX, regions.end)?);
        Some(found.start.max(range.start)..found.end.min(range.end))
    }

    /// Take the marks from the regions of a range.
    pub(crate) fn forget(&self, range: Range<u64>) {
        self.unmark(self.regions(&range));
    }

    pub(crate) fn granularity(&self) -> u64 {
        1 << self.shift
    }

    pub(crate) fn marked(&self) -> u64 {
        self.count().saturating_mul(self.granularity())
    }

    fn count(&self) -> u64 {
        let mut count = 0;
        self.pages(|page| {
            let ones = |word: &AtomicU64| u64::from(word.load(SeqCst).count_ones());
            count += page.iter().map(ones).sum::<u64>();
        });
        count
    }

    fn pages(&self, mut each: impl FnMut(&[AtomicU64])) {
        for (number, slot) in self.spine.iter().enumerate() {
            match slot.get() {
                Some(Segment::Here(pages)) => {
                    pages.iter().filter_map(OnceLock::get).for_each(|page| each(page));
                }
                Some(Segment::Outlives(words)) => {
                    let start = end_of(number) - (WORDS << number);
                    words.get(start..end_of(number)).into_iter().for_each(&mut each);
                }
                None => {}
            }
        }
    }
}

impl Segment {
    fn page(&self, number: u64, at: usize) -> Option<&[AtomicU64]> {
        match self {
            Segment::Here(pages) => pages.get(at)?.get().map(|page| &**page),
            Segment::Outlives(words) => {
                let start = number as usize * WORDS;
                words.get(start..start + WORDS)
            }
        }
    }
}

/// Words of all pages up to the end of a segment.
fn end_of(segment: usize) -> usize {
    ((1 << (segment + 1)) - 1) * WORDS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tracker;

    #[test]
    fn pages_of_another_set_nothing_behind_the_end() {
        let (map, size) = (Map::new(512), 512 * 100 + 1);
        map.add_pages(&[(0, vec![u64::MAX; WORDS]), (7, vec![1]), (u64::MAX, vec![1])], size);
        assert_eq!((map.count(), map.next(0, u64::MAX)), (101, Some(0..101 * 512)));
        let other = Map::new(512);
        other.add_pages(&map.set_pages(), size);
        assert_eq!(other.set_pages(), map.set_pages());
    }

    #[test]
    fn regions_are_found_where_they_were_marked_and_nowhere_else() {
        let mut rng = fastrand::Rng::with_seed(3);
        for _ in 0..200 {
            let map = Map::new(512);
            let count = 3 * PAGE;
            let mut model = vec![false; count as usize];
            for _ in 0..rng.u32(0..20) {
                let start = rng.u64(0..count);
                let end = (start + rng.u64(1..200)).min(count);
                if rng.u8(0..4) > 0 {
                    map.mark(512 * start + 511..512 * end);
                    model[start as usize..end as usize].fill(true);
                } else {
                    map.unmark(start..end);
                    model[start as usize..end as usize].fill(false);
                }
            }
            assert_eq!(map.count(), model.iter().filter(|set| **set).count() as u64);
            let (mut at, most) = (0, 1 + rng.u64(0..100));
            while let Some(found) = map.next(at * 512, most * 512) {
                assert_eq!(map.take(at * 512, most * 512), Some(found.clone()));
                let regions = found.start / 512..found.end / 512;
                assert!(regions.end - regions.start <= most);
                assert!(model[at as usize..regions.start as usize].iter().all(|set| !set));
                assert!(model[regions.start as usize..regions.end as usize].iter().all(|set| *set));
                at = regions.end;
            }
            assert!(model[at as usize..].iter().all(|set| !set));
            assert_eq!(map.count(), 0);
        }
    }

    #[test]
    fn a_disk_of_any_size_has_its_places() {
        let map = Map::new(Tracker::GRANULARITY);
        let far = 1u64 << 50;
        for offset in [0, 5 << 30, far] {
            map.mark(offset + 1..offset + 2);
        }
        let region = |offset: u64| offset..offset + Tracker::GRANULARITY;
        assert_eq!(map.take(1 << 20, u64::MAX), Some(region(5 << 30)));
        assert_eq!(map.take(1 << 20, u64::MAX), Some(region(far)));
        assert_eq!(map.take(1 << 20, u64::MAX), None);
        assert_eq!((map.count(), map.next(0, 1)), (1, Some(region(0))));
        map.clear();
        assert_eq!(map.count(), 0);
        assert_eq!(place(0), (0, 0));
        assert_eq!(place(1), (1, 0));
        assert_eq!(place(6), (2, 3));
    }
}
