//! The index of an image, `IMAGE.rtidx`: what each chunk of it holds.
//!
//! A head of 24 bytes (`RTIDX`, 0, 0, the version 1; the size; the size of a chunk), numbers little-endian, then SHA-256 of
//! each chunk in order, the last of which may be short. Whoever names the SHA-256 of all that names the image.

use sha2::{Digest, Sha256};

/// Bytes of a chunk.
pub const CHUNK: u64 = 256 << 10;
/// How an index's name ends, behind its image's.
pub const ENDING: &str = ".rtidx";
/// The most bytes of an image that has one.
pub const MOST_IMAGE: u64 = 1 << 40;
/// The most bytes of one.
pub const MOST: usize = HEAD + (MOST_IMAGE / CHUNK) as usize * DIGEST;

const MAGIC: &[u8; 8] = b"RTIDX\0\0\x01";
const HEAD: usize = 24;
pub(crate) const DIGEST: usize = 32;

/// What each chunk of an image holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    size: u64,
    digests: Vec<[u8; DIGEST]>,
    /// That of a whole chunk of zeros, and of the last, which may be short.
    zeros: [[u8; DIGEST]; 2],
}

impl Index {
    /// Read one, of the pinned digest where there is one; else what is wrong with it.
    pub fn parse(bytes: &[u8], pinned: Option<[u8; DIGEST]>) -> Result<Index, String> {
        if let Some(pinned) = pinned.filter(|pinned| *pinned != digest(bytes)) {
            let found = hex::encode(digest(bytes));
            return Err(format!(
                "is not the one that digest=sha256:{} names: it is sha256:{found}",
                hex::encode(pinned)
            ));
        }
        let (Some(head), Some(rest)) = (bytes.get(..HEAD), bytes.get(HEAD..)) else {
            return Err("is too short to be one".into());
        };
        if !head.starts_with(MAGIC) {
            return Err("is none that is known: it does not begin with RTIDX and version 1".into());
        }
        let number = |at: usize| {
            let bytes = head.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map(u64::from_le_bytes).unwrap_or_default()
        };
        let (size, chunk) = (number(8), number(16));
        if chunk != CHUNK {
            return Err(format!("has chunks of {chunk} bytes, not of {CHUNK}"));
        }
        let count = size.div_ceil(CHUNK);
        if rest.len() % DIGEST != 0 || count != (rest.len() / DIGEST) as u64 || count == 0 {
            return Err(format!("has {} bytes of digests for an image of {size}", rest.len()));
        }
        let digests = rest.chunks_exact(DIGEST).filter_map(|digest| digest.try_into().ok());
        Ok(Index::of(size, digests.collect()))
    }

    /// That of an image of `size` bytes with chunks of these digests.
    pub fn of(size: u64, digests: Vec<[u8; DIGEST]>) -> Index {
        let last = size - size.saturating_sub(1) / CHUNK * CHUNK;
        let zeros = [CHUNK, last].map(|len| digest(&vec![0; len as usize]));
        Index { size, digests, zeros }
    }

    /// As it is written.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.size.to_le_bytes());
        bytes.extend(CHUNK.to_le_bytes());
        self.digests.iter().for_each(|digest| bytes.extend(digest));
        bytes
    }

    /// Bytes of the image.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether a chunk holds these bytes.
    pub fn matches(&self, number: u32, bytes: &[u8]) -> bool {
        self.digests.get(number as usize) == Some(&digest(bytes))
    }

    /// Whether a chunk holds zeros.
    pub fn is_zero(&self, number: u32) -> bool {
        let number = number as usize;
        let zeros = &self.zeros[usize::from(number + 1 == self.digests.len())];
        self.digests.get(number) == Some(zeros)
    }
}

/// SHA-256.
pub fn digest(bytes: &[u8]) -> [u8; DIGEST] {
    Sha256::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_says_what_it_was_made_of_and_nothing_else() {
        let chunks = [vec![1; CHUNK as usize], vec![0; CHUNK as usize], vec![0; 100]];
        let digests = chunks.iter().map(|chunk| digest(chunk)).collect();
        let index = Index::of(2 * CHUNK + 100, digests);
        let bytes = index.to_bytes();
        assert_eq!(Index::parse(&bytes, None), Ok(index.clone()));
        assert_eq!(Index::parse(&bytes, Some(digest(&bytes))), Ok(index.clone()));
        assert!(index.matches(0, &chunks[0]) && !index.matches(0, &chunks[1]));
        assert!(index.matches(2, &chunks[2]) && !index.matches(3, &chunks[2]));
        assert_eq!([0, 1, 2, 3].map(|number| index.is_zero(number)), [false, true, true, false]);
        let mut other = bytes.clone();
        other[100] ^= 1;
        let wrong = Index::parse(&other, Some(digest(&bytes))).expect_err("another");
        assert!(wrong.contains("digest=sha256:"), "{wrong}");
        for (wrong, why) in [
            (&bytes[..20], "too short"),
            (&bytes[..bytes.len() - 32], "digests for an image"),
            (&bytes[..bytes.len() - 1], "digests for an image"),
            (&[&b"X"[..], &bytes[1..]].concat(), "begin with"),
            (&[&bytes[..16], &[0; 8], &bytes[24..]].concat(), "chunks of 0"),
            (&[&bytes[..8], &[0xff; 8], &bytes[16..]].concat(), "digests for an image"),
            (&[&bytes[..8], &[0; 8], &bytes[16..24]].concat(), "digests for an image"),
        ] {
            let said = Index::parse(wrong, None).expect_err(why);
            assert!(said.contains(why), "{why}: {said}");
        }
    }
}
