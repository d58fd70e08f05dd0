//! Bits of bitmaps in memory that a killed server leaves to the next.
//!
//! Layout, in 64-bit words of the host's order: [`MAGIC`], whose it is (boot, device, inode), the count
//! of bitmaps; for each its granularity's bits, the disk's size, its name's bytes and its name, padded;
//! then the bits of each. The bitmaps themselves tell in the image whether they are to be believed:
//! those marked as in use are here, the others there.

use std::sync::atomic::Ordering::SeqCst;

use super::bits::Bits;
use super::header::MAX_NAME;
use crate::{RestartLog, Words};

const MAGIC: u64 = 0x5254_4150_4249_5401;
/// Words before the description: the magic number, and whose it is.
const HEAD: usize = 6;

/// How bitmaps lie in memory.
pub(super) struct Layout {
    /// What the memory says of it, after [`HEAD`].
    description: Vec<u64>,
    /// The first word of each bitmap's bits.
    places: Vec<usize>,
    words: usize,
}

impl Layout {
    /// That of bitmaps, by name and granularity, of a disk. None where they are absurdly large.
    pub(super) fn of<'a>(
        bitmaps: impl Iterator<Item = (&'a str, u8)> + Clone,
        size: u64,
    ) -> Option<Layout> {
        let mut description = vec![bitmaps.clone().count() as u64];
        for (name, granularity_bits) in bitmaps.clone() {
            description.extend([u64::from(granularity_bits), size, name.len() as u64]);
            description.extend(name.as_bytes().chunks(8).map(word_of));
        }
        let mut words = HEAD + description.len();
        let mut places = Vec::new();
        for (_, granularity_bits) in bitmaps {
            places.push(words);
            words = words.checked_add(Bits::words_for(size, granularity_bits)?)?;
        }
        Some(Layout { description, places, words })
    }

    /// Words of memory that it takes.
    pub(super) fn words(&self) -> usize {
        self.words
    }

    /// Bytes of memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.words.saturating_mul(8)
    }

    /// Where the bits of each begin.
    pub(super) fn places(&self) -> impl Iterator<Item = usize> {
        self.places.iter().copied()
    }

    /// What is in the memory means nothing from now on.
    pub(super) fn forget(&self, words: &Words) {
        set(words, 0, 0);
    }

    /// Say that the memory holds the bits of these bitmaps. They do.
    pub(super) fn describe(&self, words: &Words, log: &RestartLog) {
        let [_, whose @ ..] = log.identity_words();
        let all = whose.iter().copied().chain([0]).chain(self.description.iter().copied());
        for (at, word) in (1..).zip(all) {
            set(words, at, word);
        }
        set(words, 0, MAGIC);
    }
}

/// What a killed server left.
pub(super) struct Kept {
    description: Vec<u64>,
}

impl Kept {
    /// What is beside this log, if a server of this boot and this image left it.
    pub(super) fn left(log: &RestartLog) -> Option<Kept> {
        let words = log.memory(None).ok()?;
        let word = |at: usize| words.get(at).map(|word| word.load(SeqCst));
        let [_, whose @ ..] = log.identity_words();
        let expected = [MAGIC].into_iter().chain(whose);
        if (0..).zip(expected).any(|(at, expected)| word(at) != Some(expected)) {
            return None;
        }
        let mut description = vec![word(HEAD)?];
        for _ in 0..*description.first()? {
            let at = HEAD + description.len();
            let (granularity_bits, size, name_len) = (word(at)?, word(at + 1)?, word(at + 2)?);
            let name_len = usize::try_from(name_len).ok().filter(|len| *len <= MAX_NAME)?;
            description.extend([granularity_bits, size, name_len as u64]);
            for next in 0..name_len.div_ceil(8) {
                description.push(word(at + 3 + next)?);
            }
        }
        Some(Kept { description })
    }

    /// Whether it has the bits of such a bitmap.
    pub(super) fn has(&self, name: &str, size: u64, granularity_bits: u8) -> bool {
        let one = Layout::of([(name, granularity_bits)].into_iter(), size);
        let one = one.as_ref().and_then(|layout| layout.description.get(1..));
        let mut rest = self.description.get(1..).unwrap_or_default();
        while let Some(len) = rest.get(2) {
            let words = 3 + (*len as usize).div_ceil(8);
            if rest.get(..words) == one {
                return true;
            }
            rest = rest.get(words..).unwrap_or_default();
        }
        false
    }

    /// Whether its bits are where this layout has them.
    pub(super) fn is_laid_out_as(&self, layout: &Layout) -> bool {
        self.description == layout.description
    }
}

fn word_of(bytes: &[u8]) -> u64 {
    let mut le = [0; 8];
    le.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    u64::from_le_bytes(le)
}

fn set(words: &Words, at: usize, value: u64) {
    if let Some(word) = words.get(at) {
        word.store(value, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Identity;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    fn log(words: &Arc<[AtomicU64]>, boot: u128) -> RestartLog {
        let own: Box<[AtomicU64]> = (0..100).map(|_| AtomicU64::new(0)).collect();
        let identity = Identity { boot, file: (2, 3) };
        RestartLog::with(Arc::new(own), identity, 1).with_memory(words.clone())
    }

    #[test]
    fn what_was_described_is_found() {
        let words: Arc<[AtomicU64]> = (0..4096).map(|_| AtomicU64::new(7)).collect();
        let bitmaps = [("one", 9), ("a name that is longer than a word", 16), ("", 12)];
        let layout = Layout::of(bitmaps.into_iter(), 1 << 20).expect("a layout");
        assert!(Kept::left(&log(&words, 1)).is_none());
        let memory = log(&words, 1).memory(Some(layout.words())).expect("room");
        layout.describe(&memory, &log(&words, 1));
        let kept = Kept::left(&log(&words, 1)).expect("a server's");
        assert!(kept.is_laid_out_as(&layout));
        assert!(bitmaps.iter().all(|(name, bits)| kept.has(name, 1 << 20, *bits)));
        for (name, size, bits) in [("one", 1 << 20, 10), ("one", 1 << 21, 9), ("on", 1 << 20, 9)] {
            assert!(!kept.has(name, size, bits), "{name} {size} {bits}");
        }
        assert!(Kept::left(&log(&words, 2)).is_none(), "another boot");
        let fewer = Layout::of(bitmaps.into_iter().take(2), 1 << 20).expect("a layout");
        assert!(!kept.is_laid_out_as(&fewer));
        layout.forget(&memory);
        assert!(Kept::left(&log(&words, 1)).is_none());
        assert!(log(&words, 1).memory(Some(5000)).is_err());
    }

    #[test]
    fn nonsense_is_nothing() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..200 {
            let words: Arc<[AtomicU64]> = (0..64).map(|_| AtomicU64::new(0)).collect();
            let layout = Layout::of([("x", 9)].into_iter(), 4096).expect("a layout");
            let memory = log(&words, 1).memory(None).expect("memory");
            layout.describe(&memory, &log(&words, 1));
            let at = rng.usize(HEAD..12);
            words[at].store(if rng.bool() { rng.u64(..) } else { rng.u64(..70) }, SeqCst);
            if let Some(kept) = Kept::left(&log(&words, 1)) {
                assert!(kept.description.len() < 64);
                kept.has("x", 4096, 9);
            }
        }
    }
}
