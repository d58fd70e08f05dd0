//! A sidecar as bytes: little-endian; pure functions.
//!
//! At 0 and at 4096 a header: [`MAGIC`], a sequence number, then where the log of regions and the body lie (start and end
//! of each), the body's SHA-256, and the SHA-256 of all that. The body: the length of its description, the description
//! (JSON), and for each bitmap the count of its pages and each page's number and words.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::record::Part;

/// A page of bits: its number, and its words.
pub type BitPage = (u64, Vec<u64>);

const MAGIC: [u8; 8] = *b"RTAPBITS";
/// Where the headers are.
pub(super) const HEADERS: [u64; 2] = [0, 4096];
/// Where the rest begins.
pub(super) const FIRST: u64 = 8192;
/// What lies there begins at multiples of this.
pub(super) const ALIGN: u64 = 4096;
/// Bytes of a header.
pub(super) const HEADER: usize = 8 * 6 + 64;
/// Words of a page of bits.
pub const PAGE_WORDS: usize = 512;
/// The longest body that is read.
const LONGEST: u64 = 4 << 30;

/// What is known of a bitmap that is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptBitmap {
    /// Its name.
    pub name: String,
    /// Bytes of the disk for each bit.
    pub granularity: u64,
    /// The number of its memory; no other bitmap ever has it.
    pub id: u64,
    /// Whether writes are noted in it.
    pub recording: bool,
    /// Whether its bits are lost, so that it is of no use but to be removed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
}

/// What was known of an image's file at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Known {
    /// When it was last written to.
    pub(super) modified: Option<u64>,
    /// Bytes that had been written to the device that it is.
    pub(super) written: Option<u64>,
}

/// The external data file of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DataFile {
    pub(super) identity: String,
    pub(super) known: Known,
}

/// An image that a disk is about to go on in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Next {
    pub(super) identity: String,
    /// The number of the memory that says how its file stands.
    pub(super) session: u64,
    pub(super) known: Known,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) data: Option<DataFile>,
}

/// The description.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Meta {
    /// Of the image.
    pub(super) identity: String,
    /// Of the machine, in hexadecimal digits.
    pub(super) boot: String,
    /// The number of the memory that says how the image's file stands.
    pub(super) session: u64,
    /// Bytes of a region of the log.
    pub(super) region: u64,
    /// The image when this was written.
    pub(super) known: Known,
    /// Its external data file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) data: Option<DataFile>,
    /// Whether nobody has written to it since.
    pub(super) closed: bool,
    /// The image that the disk is about to go on in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) next: Option<Next>,
    /// It holds once all parts of the transaction are written; until then the whole before it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) part: Option<Part>,
    pub(super) bitmaps: Vec<KeptBitmap>,
}

/// All that is written at once.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) meta: Meta,
    /// Of each bitmap, in the order of the description.
    pub(super) pages: Vec<Vec<BitPage>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) sequence: u64,
    pub(super) log: Range<u64>,
    pub(super) body: Range<u64>,
    hash: [u8; 32],
}

impl Header {
    pub(super) fn new(sequence: u64, log: &Range<u64>, place: &Range<u64>, body: &[u8]) -> Header {
        let hash = Sha256::digest(body).into();
        Header { sequence, log: log.clone(), body: place.clone(), hash }
    }

    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let words = [
            u64::from_le_bytes(MAGIC),
            self.sequence,
            self.log.start,
            self.log.end,
            self.body.start,
            self.body.end,
        ];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes[48..80].copy_from_slice(&self.hash);
        let own: [u8; 32] = Sha256::digest(&bytes[..80]).into();
        bytes[80..].copy_from_slice(&own);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER]) -> Option<Header> {
        let (told, own) = bytes.split_at(80);
        let is_whole = told.starts_with(&MAGIC) && *own == *Sha256::digest(told);
        let mut words = told.chunks_exact(8).map(word).skip(1);
        let mut next = || words.next().unwrap_or_default();
        let (sequence, log, body) = (next(), next()..next(), next()..next());
        let mut hash = [0; 32];
        hash.copy_from_slice(&told[48..]);
        let fits = |range: &Range<u64>| {
            range.start >= FIRST
                && range.end.checked_sub(range.start).is_some_and(|len| len <= LONGEST)
        };
        (is_whole && fits(&log) && fits(&body)).then_some(Header { sequence, log, body, hash })
    }

    /// Whether these bytes are its body.
    pub(super) fn is_of(&self, body: &[u8]) -> bool {
        *Sha256::digest(body) == self.hash
    }
}

fn word(bytes: &[u8]) -> u64 {
    let mut le = [0; 8];
    le.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    u64::from_le_bytes(le)
}

impl Whole {
    pub(super) fn encode(&self) -> Vec<u8> {
        let text = serde_json::to_vec(&self.meta).unwrap_or_default();
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text);
        for pages in &self.pages {
            bytes.extend((pages.len() as u64).to_le_bytes());
            for (number, words) in pages {
                bytes.extend(number.to_le_bytes());
                let words = words.iter().copied().chain(std::iter::repeat(0)).take(PAGE_WORDS);
                words.for_each(|word| bytes.extend(word.to_le_bytes()));
            }
        }
        bytes
    }

    pub(super) fn decode(mut bytes: &[u8]) -> Option<Whole> {
        let mut take = |len: u64| {
            let (taken, rest) = bytes.split_at_checked(usize::try_from(len).ok()?)?;
            bytes = rest;
            Some(taken)
        };
        let len = word(take(8)?);
        let meta: Meta = serde_json::from_slice(take(len)?).ok()?;
        let mut all = vec![];
        for _ in &meta.bitmaps {
            let mut pages = vec![];
            for _ in 0..word(take(8)?) {
                let number = word(take(8)?);
                let words = take(8 * PAGE_WORDS as u64)?.chunks_exact(8).map(word).collect();
                pages.push((number, words));
            }
            all.push(pages);
        }
        Some(Whole { meta, pages: all })
    }
}
