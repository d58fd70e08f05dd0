//! The bits of a dirty bitmap in memory, set by several threads at once.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use crate::Words;

/// Bits of a chunk: 32 KiB of them take memory only once one is set.
const CHUNK: u64 = 1 << 18;
const CHUNK_WORDS: u64 = CHUNK / 64;
/// The most bits of a bitmap: 512 MiB of them.
pub const MAX_BITS: u64 = 1 << 32;

/// One bit for each granule of a disk, all clear at first.
pub struct Bits {
    size: u64,
    granularity_bits: u32,
    store: Store,
}

/// Where the bits are.
enum Store {
    /// Here, as far as any was set.
    Chunks(Vec<Chunk>),
    /// In somebody's words, from one of them on. Setting a bit allocates nothing.
    Words { words: Arc<Words>, first: usize },
}

#[derive(Debug, Default)]
struct Chunk {
    /// All bits are set, whatever the words say.
    full: AtomicBool,
    words: OnceLock<Box<[AtomicU64]>>,
}

impl Chunk {
    fn words(&self) -> &[AtomicU64] {
        self.words.get_or_init(|| (0..CHUNK_WORDS).map(|_| AtomicU64::new(0)).collect())
    }

    /// The 64 bits of a word.
    fn word(&self, index: u64) -> u64 {
        if self.full.load(Relaxed) {
            return u64::MAX;
        }
        let words = self.words.get().map_or(&[][..], |words| words);
        words.get(index as usize).map_or(0, |word| word.load(Relaxed))
    }
}

/// Bits for a disk of `size` bytes, each for 2^`granularity_bits` of them. None where that is more
/// than `MAX_BITS`.
fn count(size: u64, granularity_bits: u8) -> Option<u64> {
    let bits = size.div_ceil(1u64.checked_shl(u32::from(granularity_bits))?);
    (bits <= MAX_BITS).then_some(bits)
}

impl Bits {
    /// Clear bits for a disk of `size` bytes, each for 2^`granularity_bits` of them. None where that
    /// is more than `MAX_BITS`.
    pub fn new(size: u64, granularity_bits: u8) -> Option<Bits> {
        let chunks = count(size, granularity_bits)?.div_ceil(CHUNK);
        let store = Store::Chunks((0..chunks).map(|_| Chunk::default()).collect());
        Some(Bits { size, granularity_bits: granularity_bits.into(), store })
    }

    /// Words that such bits take.
    pub(super) fn words_for(size: u64, granularity_bits: u8) -> Option<usize> {
        usize::try_from(count(size, granularity_bits)?.div_ceil(64)).ok()
    }

    /// Such bits as they are in `words` from the `first` on. None where those are too few.
    pub(super) fn in_words(
        size: u64,
        granularity_bits: u8,
        words: Arc<Words>,
        first: usize,
    ) -> Option<Bits> {
        let end = first.checked_add(Bits::words_for(size, granularity_bits)?)?;
        let store = (end <= words.len()).then_some(Store::Words { words, first })?;
        Some(Bits { size, granularity_bits: granularity_bits.into(), store })
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// A bit stands for 2 to the power of this bytes of the disk.
    pub fn granularity_bits(&self) -> u8 {
        self.granularity_bits as u8
    }

    /// Bits.
    pub fn len(&self) -> u64 {
        self.size.div_ceil(1 << self.granularity_bits)
    }

    /// Whether there is no bit at all.
    pub fn is_empty(&self) -> bool {
        self.size == 0
    }

    /// Set the bits of a range of the disk; what lies past its end is left out. Any thread may.
    #[inline]
    pub fn set(&self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.size);
        if offset >= end {
            return;
        }
        let (first, last) = (offset >> self.granularity_bits, (end - 1) >> self.granularity_bits);
        let mut bit = first;
        while bit <= last {
            if bit % CHUNK == 0 && last - bit >= CHUNK - 1 && self.fill(bit / CHUNK) {
                bit += CHUNK;
                continue;
            }
            let from = bit % 64;
            let count = (last - bit + 1).min(64 - from);
            self.add(bit / 64, (u64::MAX >> (64 - count)) << from);
            bit += count;
        }
    }

    /// Set all bits of a chunk at a stroke, where there are chunks.
    fn fill(&self, chunk: u64) -> bool {
        let Store::Chunks(chunks) = &self.store else { return false };
        let chunk = chunks.get(chunk as usize);
        chunk.inspect(|chunk| chunk.full.store(true, Relaxed)).is_some()
    }

    /// Set bits of a word.
    #[inline]
    fn add(&self, index: u64, mask: u64) {
        let word = match &self.store {
            Store::Words { words, first } => words.get(first + index as usize),
            Store::Chunks(chunks) => {
                let chunk = chunks.get((index / CHUNK_WORDS) as usize);
                chunk.and_then(|chunk| chunk.words().get((index % CHUNK_WORDS) as usize))
            }
        };
        // Most writes find their bits set already: no need to own the cache line then.
        if let Some(word) = word.filter(|word| word.load(Relaxed) & mask != mask) {
            word.fetch_or(mask, Relaxed);
        }
    }

    /// The 64 bits of a word.
    fn word(&self, index: u64) -> u64 {
        match &self.store {
            Store::Words { words, first } => {
                words.get(first + index as usize).map_or(0, |word| word.load(Relaxed))
            }
            Store::Chunks(chunks) => {
                let chunk = chunks.get((index / CHUNK_WORDS) as usize);
                chunk.map_or(0, |chunk| chunk.word(index % CHUNK_WORDS))
            }
        }
    }

    /// Clear all bits. Nobody may set one meanwhile.
    pub fn clear(&self) {
        match &self.store {
            Store::Words { words, first } => {
                let ours = words.iter().skip(*first).take(self.len().div_ceil(64) as usize);
                ours.for_each(|word| word.store(0, Relaxed));
            }
            Store::Chunks(chunks) => {
                for chunk in chunks {
                    chunk.words.get().into_iter().flatten().for_each(|word| word.store(0, Relaxed));
                    chunk.full.store(false, Relaxed);
                }
            }
        }
    }

    /// What all bits of a chunk are known to be without looking at them.
    fn plain(&self, chunk: u64) -> Option<bool> {
        let Store::Chunks(chunks) = &self.store else { return None };
        let chunk = chunks.get(chunk as usize)?;
        match chunk.full.load(Relaxed) {
            true => Some(true),
            false => chunk.words.get().is_none().then_some(false),
        }
    }

    /// What the disk's bytes from `offset` on have in common: whether their bit is set, and how many
    /// bytes that holds for, `most` or less, at least 1 within the disk.
    pub fn run(&self, offset: u64, most: u64) -> (bool, u64) {
        let end = offset.saturating_add(most).min(self.size);
        let mut bit = offset >> self.granularity_bits;
        let is_set = self.word(bit / 64) >> (bit % 64) & 1 == 1;
        let skip = if is_set { u64::MAX } else { 0 };
        while bit << self.granularity_bits < end {
            if bit % CHUNK == 0 && self.plain(bit / CHUNK) == Some(is_set) {
                bit += CHUNK;
                continue;
            }
            let word = self.word(bit / 64) ^ skip;
            let ahead = u64::from((word >> (bit % 64)).trailing_zeros()).min(64 - bit % 64);
            bit += ahead;
            if ahead == 0 || bit % 64 != 0 {
                break;
            }
        }
        (is_set, (bit << self.granularity_bits).min(end).saturating_sub(offset))
    }

    /// Bytes of the disk whose bit is set.
    pub fn count(&self) -> u64 {
        self.runs().map(|(_, len)| len).sum()
    }

    /// The ranges of the disk whose bits are set: offset and length.
    pub fn runs(&self) -> impl Iterator<Item = (u64, u64)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < self.size {
                let (is_set, len) = self.run(at, u64::MAX);
                let from = at;
                at += len.max(1);
                if is_set {
                    return Some((from, len));
                }
            }
            None
        })
    }

    /// Set what is set in another bitmap, of a disk of the same size and of any granularity.
    pub fn merge(&self, other: &Bits) {
        other.runs().for_each(|(offset, len)| self.set(offset, len));
    }

    /// Let the bits be those of another bitmap, word by word: none is clear in between that is set before and afterwards. Nobody
    /// may set one meanwhile, in either.
    pub fn be_as(&self, other: &Bits) {
        let same = (self.size, self.granularity_bits) == (other.size, other.granularity_bits);
        let own = Bits::new(self.size, self.granularity_bits as u8).filter(|_| !same);
        if let Some(own) = &own {
            own.merge(other);
        }
        let from = own.as_ref().unwrap_or(other);
        let Store::Words { words, first } = &self.store else {
            self.clear();
            return self.merge(from);
        };
        for index in 0..self.len().div_ceil(64) {
            if let Some(word) = words.get(first + index as usize) {
                word.store(from.word(index), Relaxed);
            }
        }
    }

    /// The bits of a word that stand for bytes of the disk.
    fn valid(&self, index: u64) -> u64 {
        match self.len().saturating_sub(index * 64) {
            left @ 0..64 => (1 << left) - 1,
            _ => u64::MAX,
        }
    }

    /// The bits from `first` (a multiple of 64) on as they lie in a file; zeros past the last.
    pub fn to_bytes(&self, first: u64, bytes: &mut [u8]) {
        for (to, index) in bytes.chunks_mut(8).zip((first / 64)..) {
            let word = self.word(index) & self.valid(index);
            to.iter_mut().zip(word.to_le_bytes()).for_each(|(to, from)| *to = from);
        }
    }

    /// Set the bits from `first` (a multiple of 64) on that are set in a file's bytes.
    pub fn add_bytes(&self, first: u64, bytes: &[u8]) {
        for (from, index) in bytes.chunks(8).zip((first / 64)..) {
            let mut le = [0; 8];
            le.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            match u64::from_le_bytes(le) & self.valid(index) {
                0 => {}
                new => self.add(index, new),
            }
        }
    }
}

impl std::fmt::Debug for Bits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let granularity = 1u64 << self.granularity_bits;
        let Bits { size, .. } = self;
        f.debug_struct("Bits").field("size", size).field("granularity", &granularity).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bits among words of others, which stay as they are.
    fn in_words(size: u64, granularity: u8) -> Bits {
        let count = Bits::words_for(size, granularity).expect("few enough");
        let words: Arc<[AtomicU64]> = (0..count + 2).map(|_| AtomicU64::new(0)).collect();
        let words: Arc<Words> = Arc::new(Box::new(words));
        assert!(Bits::in_words(size, granularity, words.clone(), 3).is_none());
        Bits::in_words(size, granularity, words, 1).expect("room")
    }

    /// Random changes, beside one bool for each granule.
    #[test]
    fn bits_are_those_that_were_set() {
        for seed in 0..40 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let granularity = 9 + rng.u8(0..4);
            let granule = 1u64 << granularity;
            let size = rng.u64(1..3 * CHUNK) * granule - rng.u64(0..granule / 512) * 512;
            let bits = match seed % 2 {
                0 => Bits::new(size, granularity).expect("few enough"),
                _ => in_words(size, granularity),
            };
            let mut plain = vec![false; bits.len() as usize];
            for _ in 0..rng.usize(1..30) {
                let offset = rng.u64(0..size);
                let len = match rng.u8(0..3) {
                    0 => rng.u64(1..10_000),
                    1 => rng.u64(1..=size),
                    _ => granule * CHUNK + rng.u64(0..5000),
                };
                if rng.u8(0..12) == 0 {
                    bits.clear();
                    plain.fill(false);
                }
                bits.set(offset, len);
                let last = (offset + len).min(size).div_ceil(granule) as usize;
                plain[(offset / granule) as usize..last].fill(true);
            }
            let mut at = 0;
            let mut count = 0;
            while at < size {
                let (is_set, len) = bits.run(at, u64::MAX);
                let from = (at / granule) as usize;
                let to = (at + len).div_ceil(granule) as usize;
                assert!(len > 0 && plain[from..to].iter().all(|bit| *bit == is_set), "seed {seed}");
                assert!(plain.get(to).is_none_or(|bit| *bit != is_set), "seed {seed}: too short");
                count += if is_set { len } else { 0 };
                at += len;
            }
            assert_eq!(bits.count(), count);
            if let Store::Words { words, .. } = &bits.store {
                let beside = [words.first(), words.last()].map(|word| word.expect("a word"));
                assert!(beside.iter().all(|word| word.load(Relaxed) == 0), "seed {seed}");
            }
            let mut bytes = vec![0xee; plain.len().div_ceil(8)];
            bits.to_bytes(0, &mut bytes);
            for (index, bit) in plain.iter().enumerate() {
                assert_eq!(bytes[index / 8] >> (index % 8) & 1 == 1, *bit, "seed {seed}: {index}");
            }
            let back = Bits::new(size, granularity).expect("few enough");
            back.add_bytes(0, &bytes);
            assert!(back.runs().eq(bits.runs()), "seed {seed}");
            let coarse = Bits::new(size, 16).expect("few enough");
            coarse.merge(&bits);
            assert!(bits.runs().all(|(offset, len)| coarse.run(offset, len) == (true, len)));
            assert!(coarse.count() <= bits.count() + 2 * 65536 * bits.runs().count() as u64);
            for as_fine in [in_words(size, granularity), in_words(size, 16), back] {
                as_fine.set(0, size);
                as_fine.be_as(&bits);
                let same = if as_fine.granularity_bits() == 16 { &coarse } else { &bits };
                assert!(as_fine.runs().eq(same.runs()), "seed {seed}");
            }
        }
        assert!(Bits::new(u64::MAX, 9).is_none());
    }
}
