//! Slices whose entries all follow from the first. They are kept in their slot and need no frame:
//! what was written in sequence, preallocated or never written has hardly any others, and the tables
//! of a large image then take a hundredth of their size at most.

use super::entry::{Entry, Geometry};
use super::header::{COPIED, OFFSET_MASK, ZERO};

/// Marks a slot that holds a pattern.
const PATTERN: u64 = 1 << 63;
/// In a slot: each entry lies one cluster after the one before.
const STEPS: u64 = 1 << 62;
/// In a slot: the entries' own flag, which has the place of [`PATTERN`] in an entry.
const OWN: u64 = 1 << 61;
/// In a slot: every subcluster is allocated; otherwise none says anything.
const ALLOCATED: u64 = 1 << 60;

/// All subclusters allocated, none of zeros.
const ALL: u64 = u32::MAX as u64;

/// A slice in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pattern(u64);

impl Pattern {
    /// The pattern of a slice, given word by word, if it has one.
    pub(super) fn of(geometry: &Geometry, word: impl Fn(usize) -> u64) -> Option<Pattern> {
        let width = if geometry.extended() { 2 } else { 1 };
        let entry = |index: usize| Entry {
            word: word(index * width),
            bitmap: if width == 2 { word(index * width + 1) } else { 0 },
        };
        let count = geometry.words_of_slice() / width;
        let first = entry(0);
        if first.word & !(OFFSET_MASK | COPIED | ZERO) != 0 || !matches!(first.bitmap, 0 | ALL) {
            return None;
        }
        let mut packed = PATTERN | first.word & (OFFSET_MASK | ZERO);
        packed |= if first.word & COPIED != 0 { OWN } else { 0 };
        packed |= if first.bitmap == ALL { ALLOCATED } else { 0 };
        packed |= if count > 1 && entry(1).word != first.word { STEPS } else { 0 };
        let pattern = Pattern(packed);
        let all = (1..count).all(|index| entry(index) == pattern.entry(geometry, index as u64));
        all.then_some(pattern)
    }

    /// The pattern that a slot holds, if it holds one.
    #[inline]
    pub(super) fn in_slot(slot: u64) -> Option<Pattern> {
        (slot & PATTERN != 0).then_some(Pattern(slot))
    }

    /// What to put into the slot.
    pub(super) fn slot(self) -> u64 {
        self.0
    }

    /// The entry with this index in the slice.
    #[inline]
    pub(super) fn entry(self, geometry: &Geometry, index: u64) -> Entry {
        let Pattern(packed) = self;
        let step = if packed & STEPS != 0 { index << geometry.cluster_bits } else { 0 };
        let own = if packed & OWN != 0 { COPIED } else { 0 };
        Entry {
            word: (packed & (OFFSET_MASK | ZERO)).wrapping_add(step) | own,
            bitmap: if packed & ALLOCATED != 0 { ALL } else { 0 },
        }
    }

    /// A word of the slice.
    pub(super) fn word(self, geometry: &Geometry, at: usize) -> u64 {
        match geometry.extended() {
            false => self.entry(geometry, at as u64).word,
            true if at % 2 == 0 => self.entry(geometry, at as u64 / 2).word,
            true => self.entry(geometry, 0).bitmap,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::header::{COMPRESSED, Compression, Crypt, Header, incompatible};

    fn geometry(extended: bool) -> Geometry {
        let header = Header {
            version: 3,
            cluster_bits: 16,
            size: 1 << 30,
            crypt: Crypt::None,
            l1_size: 2,
            l1_offset: 3 << 16,
            refcount_table_offset: 1 << 16,
            refcount_table_clusters: 1,
            snapshots: 0,
            snapshots_offset: 0,
            incompatible: if extended { incompatible::EXTENDED_L2 } else { 0 },
            compatible: 0,
            autoclear: 0,
            refcount_order: 4,
            compression: Compression::Deflate,
            further: Vec::new(),
            extensions: Vec::new(),
            backing_file: None,
        };
        Geometry::new(&header, false)
    }

    fn words(geometry: &Geometry, first: Entry, step: u64) -> Vec<u64> {
        let entry = |index: u64| [first.word.wrapping_add(index * step), first.bitmap];
        let width = if geometry.extended() { 2 } else { 1 };
        let count = (geometry.words_of_slice() / width) as u64;
        (0..count).flat_map(|index| entry(index).into_iter().take(width)).collect()
    }

    fn found(geometry: &Geometry, words: &[u64]) -> Option<Pattern> {
        Pattern::of(geometry, |at| words[at])
    }

    #[test]
    fn a_slice_comes_back_as_it_was_or_has_no_pattern() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut patterns = 0;
        for _ in 0..20_000 {
            let geometry = geometry(random.bool());
            let host = if random.bool() { 0 } else { random.u64(..OFFSET_MASK) & OFFSET_MASK };
            let flags = [0, COPIED, ZERO, COPIED | ZERO, COMPRESSED, 2][random.usize(..6)];
            let bitmap = [0, ALL, random.u64(..)][random.usize(..3)];
            let bitmap = if geometry.extended() { bitmap } else { 0 };
            let step = [0, 1 << 16, 1 << 17][random.usize(..3)];
            let mut words = words(&geometry, Entry { word: host | flags, bitmap }, step);
            let odd = random.u32(..4) == 0;
            if odd {
                let at = random.usize(..words.len());
                words[at] ^= 1 << random.u32(..64);
            }
            let pattern = found(&geometry, &words);
            if let Some(pattern) = pattern {
                patterns += 1;
                assert_eq!(Pattern::in_slot(pattern.slot()), Some(pattern));
                let back: Vec<u64> =
                    (0..words.len()).map(|at| pattern.word(&geometry, at)).collect();
                assert_eq!(back, words);
            }
            let plain = flags & !(COPIED | ZERO) == 0 && matches!(bitmap, 0 | ALL);
            let fits = host <= OFFSET_MASK - (1 << 32);
            assert!(pattern.is_some() || odd || !plain || !fits || step == 1 << 17, "{words:x?}");
        }
        assert!(patterns > 2000, "{patterns}");
    }

    #[test]
    fn one_entry_out_of_line_leaves_no_pattern() {
        for extended in [false, true] {
            let geometry = geometry(extended);
            let first = Entry { word: 5 << 16 | COPIED, bitmap: if extended { ALL } else { 0 } };
            let whole = words(&geometry, first, 1 << 16);
            assert!(found(&geometry, &whole).is_some());
            for at in 0..whole.len() {
                let mut broken = whole.clone();
                broken[at] ^= 1 << 20;
                assert_eq!(found(&geometry, &broken), None, "word {at}");
            }
        }
    }
}
