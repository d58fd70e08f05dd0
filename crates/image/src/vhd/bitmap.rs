//! The sector bitmaps of blocks, in memory: which sectors of a block hold data. A bit is only ever set.

use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

/// Blocks whose bitmaps share a place that is made with the first of them.
const GROUP: usize = 64;

/// A block's bitmap. Sector 0 is the highest bit of the first word, as it is on the disk.
#[derive(Debug)]
pub(super) struct Bitmap {
    /// Every sector holds data, and there are no words.
    full: bool,
    /// Words there are once a bit is set: a file of holes may claim any number of blocks.
    len: usize,
    words: OnceLock<Box<[AtomicU64]>>,
    /// Whether it has bits that the disk lacks.
    dirty: AtomicBool,
}

impl Bitmap {
    /// Every sector holds data.
    pub(super) fn full() -> Bitmap {
        Bitmap { full: true, ..Bitmap::empty(0) }
    }

    /// No sector does.
    pub(super) fn empty(sectors: u64) -> Bitmap {
        let len = sectors.div_ceil(64) as usize;
        Bitmap { full: false, len, words: OnceLock::new(), dirty: AtomicBool::new(false) }
    }

    fn words(&self) -> &[AtomicU64] {
        self.words.get_or_init(|| (0..self.len).map(|_| AtomicU64::new(0)).collect())
    }

    fn word(&self, index: u64) -> u64 {
        let words = self.words.get().map_or(&[][..], |words| words);
        words.get(index as usize).map_or(0, |word| word.load(Acquire))
    }

    /// As it is on the disk.
    pub(super) fn parse(bytes: &[u8], sectors: u64) -> Bitmap {
        let bitmap = Bitmap::empty(sectors);
        if bytes.iter().all(|byte| *byte == 0) {
            return bitmap;
        }
        for (word, bytes) in bitmap.words().iter().zip(bytes.chunks(8)) {
            word.store(u64::from_be_bytes(crate::bytes::get(bytes, 0)), Relaxed);
        }
        if bitmap.run(0, sectors) == (true, sectors) { Bitmap::full() } else { bitmap }
    }

    /// As it is to be on the disk, in `len` bytes.
    pub(super) fn to_bytes(&self, len: usize) -> Vec<u8> {
        if self.is_full() {
            return vec![0xff; len];
        }
        let mut bytes: Vec<u8> =
            (0..self.len as u64).flat_map(|index| self.word(index).to_be_bytes()).collect();
        bytes.resize(len, 0);
        bytes
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.full
    }

    /// Whether the sector holds data, and how many from there on are like it, up to `end`.
    pub(super) fn run(&self, sector: u64, end: u64) -> (bool, u64) {
        if self.is_full() {
            return (true, end - sector);
        }
        let set = self.word(sector / 64) << (sector % 64) >> 63 == 1;
        let mut at = sector;
        while at < end {
            let word = self.word(at / 64);
            let bits = if set { !word } else { word };
            let same = u64::from((bits << (at % 64)).leading_zeros()).min(64 - at % 64);
            at += same;
            if at % 64 != 0 || same == 0 {
                break;
            }
        }
        (set, at.min(end) - sector)
    }

    /// These sectors hold data from now on. Gives whether one of them is new.
    pub(super) fn set(&self, first: u64, end: u64) -> bool {
        let mut new = false;
        let mut at = first;
        while at < end {
            let stop = (at - at % 64 + 64).min(end);
            let bits = (u64::MAX >> (at % 64)) & (u64::MAX << ((64 - stop % 64) % 64));
            if let Some(word) = self.words().get((at / 64) as usize) {
                new |= word.fetch_or(bits, Release) & bits != bits;
            }
            at = stop;
        }
        new
    }

    /// Note that the disk lacks bits; gives whether that was noted before.
    pub(super) fn mark(&self) -> bool {
        self.dirty.swap(true, Relaxed)
    }

    /// The disk is about to be given all bits.
    pub(super) fn unmark(&self) {
        self.dirty.store(false, Relaxed);
    }
}

type Group = Box<[OnceLock<Bitmap>]>;

/// The bitmaps of a disk, those that are known.
#[derive(Debug)]
pub(super) struct Bitmaps {
    groups: Box<[OnceLock<Group>]>,
}

impl Bitmaps {
    /// None is known yet.
    pub(super) fn new(blocks: usize) -> Bitmaps {
        Bitmaps { groups: (0..blocks.div_ceil(GROUP)).map(|_| OnceLock::new()).collect() }
    }

    /// The block's bitmap, if it is known.
    #[inline]
    pub(super) fn get(&self, block: u32) -> Option<&Bitmap> {
        let index = block as usize;
        self.groups.get(index / GROUP)?.get()?.get(index % GROUP)?.get()
    }

    /// The block's bitmap: `new`, unless it was known before.
    pub(super) fn put(&self, block: u32, new: Bitmap) {
        let index = block as usize;
        if let Some(group) = self.groups.get(index / GROUP) {
            let group = group.get_or_init(|| (0..GROUP).map(|_| OnceLock::new()).collect());
            if let Some(place) = group.get(index % GROUP) {
                place.get_or_init(|| new);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_those_of_the_bits() {
        let mut rng = fastrand::Rng::with_seed(1);
        for sectors in [1u64, 8, 63, 64, 65, 200, 4096] {
            let bitmap = Bitmap::empty(sectors);
            let mut model = vec![false; sectors as usize];
            for _ in 0..40 {
                let first = rng.u64(0..sectors);
                let end = (first + rng.u64(1..=100)).min(sectors);
                let new = model[first as usize..end as usize].iter().any(|bit| !bit);
                assert_eq!(bitmap.set(first, end), new);
                model[first as usize..end as usize].fill(true);
                let from = rng.u64(0..sectors);
                let to = rng.u64(from + 1..=sectors);
                let bit = model[from as usize];
                let like = model[from as usize..to as usize].iter().take_while(|b| **b == bit);
                assert_eq!(bitmap.run(from, to), (bit, like.count() as u64), "{from}..{to}");
            }
            let bytes = bitmap.to_bytes(sectors.div_ceil(8).next_multiple_of(512) as usize);
            for (sector, bit) in model.iter().enumerate() {
                assert_eq!(bytes[sector / 8] >> (7 - sector % 8) & 1 == 1, *bit);
            }
            let again = Bitmap::parse(&bytes, sectors);
            assert_eq!(again.is_full(), model.iter().all(|bit| *bit));
            assert_eq!(again.run(0, sectors), bitmap.run(0, sectors));
        }
    }
}
