//! The bits of a dirty bitmap in memory, set by several threads at once.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Bits of a chunk: 32 KiB of them take memory only once one is set.
const CHUNK: u64 = 1 << 18;
/// The most bits of a bitmap: 512 MiB of them.
pub const MAX_BITS: u64 = 1 << 32;

/// One bit for each granule of a disk, all clear at first.
#[derive(Debug)]
pub struct Bits {
    size: u64,
    granularity_bits: u32,
    chunks: Vec<Chunk>,
}

#[derive(Debug, Default)]
struct Chunk {
    /// All bits are set, whatever the words say.
    full: AtomicBool,
    words: OnceLock<Box<[AtomicU64]>>,
}

impl Chunk {
    fn words(&self) -> &[AtomicU64] {
        self.words.get_or_init(|| (0..CHUNK / 64).map(|_| AtomicU64::new(0)).collect())
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

impl Bits {
    /// Clear bits for a disk of `size` bytes, each for 2^`granularity_bits` of them. None where that
    /// is more than `MAX_BITS`.
    pub fn new(size: u64, granularity_bits: u8) -> Option<Bits> {
        let granularity_bits = u32::from(granularity_bits);
        let granule = 1u64.checked_shl(granularity_bits)?;
        let bits = size.div_ceil(granule);
        let chunks = (0..bits.div_ceil(CHUNK)).map(|_| Chunk::default());
        (bits <= MAX_BITS).then(|| Bits { size, granularity_bits, chunks: chunks.collect() })
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size
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
    pub fn set(&self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.size);
        if offset >= end {
            return;
        }
        let (first, last) = (offset >> self.granularity_bits, (end - 1) >> self.granularity_bits);
        let mut bit = first;
        while bit <= last {
            let Some(chunk) = self.chunks.get((bit / CHUNK) as usize) else { return };
            let whole = bit % CHUNK == 0 && last - bit >= CHUNK - 1;
            if whole {
                chunk.full.store(true, Relaxed);
                bit += CHUNK;
                continue;
            }
            let from = bit % 64;
            let count = (last - bit + 1).min(64 - from);
            let mask = (u64::MAX >> (64 - count)) << from;
            if let Some(word) = chunk.words().get((bit % CHUNK / 64) as usize) {
                // Most writes find their bits set already: no need to own the cache line then.
                if word.load(Relaxed) & mask != mask {
                    word.fetch_or(mask, Relaxed);
                }
            }
            bit += count;
        }
    }

    /// Clear all bits. Nobody may set one meanwhile.
    pub fn clear(&self) {
        for chunk in &self.chunks {
            chunk.words.get().into_iter().flatten().for_each(|word| word.store(0, Relaxed));
            chunk.full.store(false, Relaxed);
        }
    }

    /// What the disk's bytes from `offset` on have in common: whether their bit is set, and how many
    /// bytes that holds for, `most` or less, at least 1 within the disk.
    pub fn run(&self, offset: u64, most: u64) -> (bool, u64) {
        let end = offset.saturating_add(most).min(self.size);
        let mut bit = offset >> self.granularity_bits;
        let is_set = self.bit(bit);
        let skip = if is_set { u64::MAX } else { 0 };
        while bit << self.granularity_bits < end {
            let Some(chunk) = self.chunks.get((bit / CHUNK) as usize) else { break };
            let plain = if is_set { chunk.full.load(Relaxed) } else { chunk.words.get().is_none() };
            if bit % CHUNK == 0 && plain && chunk.full.load(Relaxed) == is_set {
                bit += CHUNK;
                continue;
            }
            let word = chunk.word(bit % CHUNK / 64) ^ skip;
            let ahead = u64::from((word >> (bit % 64)).trailing_zeros()).min(64 - bit % 64);
            bit += ahead;
            if ahead == 0 || bit % 64 != 0 {
                break;
            }
        }
        (is_set, (bit << self.granularity_bits).min(end).saturating_sub(offset))
    }

    fn bit(&self, bit: u64) -> bool {
        let chunk = self.chunks.get((bit / CHUNK) as usize);
        chunk.is_some_and(|chunk| chunk.word(bit % CHUNK / 64) >> (bit % 64) & 1 == 1)
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

    /// The bits from `first` (a multiple of 64) on as they lie in a file; zeros past the last.
    pub fn to_bytes(&self, first: u64, bytes: &mut [u8]) {
        let words = (first / 64)..;
        for (to, word) in bytes.chunks_mut(8).zip(words) {
            let bit = word * 64;
            let chunk = self.chunks.get((bit / CHUNK) as usize);
            let mut word = chunk.map_or(0, |chunk| chunk.word(bit % CHUNK / 64));
            let valid = self.len().saturating_sub(bit);
            if valid < 64 {
                word &= (1 << valid) - 1;
            }
            to.iter_mut().zip(word.to_le_bytes()).for_each(|(to, from)| *to = from);
        }
    }

    /// Set the bits from `first` (a multiple of 64) on that are set in a file's bytes.
    pub fn add_bytes(&self, first: u64, bytes: &[u8]) {
        for (from, word) in bytes.chunks(8).zip((first / 64)..) {
            let bit = word * 64;
            let mut le = [0; 8];
            le.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            let valid = self.len().saturating_sub(bit);
            let mask = if valid < 64 { (1 << valid) - 1 } else { u64::MAX };
            let new = u64::from_le_bytes(le) & mask;
            let chunk = self.chunks.get((bit / CHUNK) as usize).filter(|_| new != 0);
            let word = chunk.and_then(|chunk| chunk.words().get((bit % CHUNK / 64) as usize));
            if let Some(word) = word {
                word.fetch_or(new, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random changes, beside one bool for each granule.
    #[test]
    fn bits_are_those_that_were_set() {
        for seed in 0..40 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let granularity = 9 + rng.u8(0..4);
            let granule = 1u64 << granularity;
            let size = rng.u64(1..3 * CHUNK) * granule - rng.u64(0..granule / 512) * 512;
            let bits = Bits::new(size, granularity).expect("few enough");
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
        }
        assert!(Bits::new(u64::MAX, 9).is_none());
    }
}
