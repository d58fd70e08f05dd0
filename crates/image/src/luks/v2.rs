//! The header of LUKS2: a binary part and JSON, twice. Source: LUKS2 On-Disk Format Specification
//! 1.1.1, sections 2 and 3.

use super::copies::{BINARY_LEN, PLACES};
use super::json;
use super::{Error, Hash, Header, MAGIC, shown};

const SECOND_MAGIC: &[u8; 6] = b"SKUL\xba\xbe";
const LABEL_AT: usize = 24;
const LABEL_LEN: usize = 48;
const CHECKSUM_HASH_AT: usize = 72;
const SALT_AT: usize = 104;
const UUID_AT: usize = 168;
const UUID_LEN: usize = 40;
const OFFSET_AT: usize = 256;
const CHECKSUM_AT: usize = 448;
const CHECKSUM_LEN: usize = 64;

/// Which of the two copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copy {
    First,
    Second,
}

/// A copy whose checksum is right.
#[derive(Debug)]
pub(crate) struct Whole {
    /// The one with the larger number counts.
    pub(crate) seqid: u64,
    pub(crate) header: Result<Header, Error>,
}

/// The length of a copy, which begins with `binary`; it is found at `offset`.
pub(crate) fn copy_len(binary: &[u8], copy: Copy, offset: u64) -> Result<u64, Error> {
    let have = binary.len() as u64;
    if binary.len() < BINARY_LEN {
        return Err(Error::Short { what: "the LUKS2 header", need: BINARY_LEN as u64, have });
    }
    let magic = if copy == Copy::First { MAGIC } else { SECOND_MAGIC };
    if !binary.starts_with(magic) {
        return Err(Error::Magic { found: super::first_bytes(binary) });
    }
    let version = u16::from_be_bytes([binary[6], binary[7]]);
    if version != 2 {
        return Err(Error::Version { found: version });
    }
    let len = number(binary, 8);
    if !PLACES.contains(&len) {
        return Err(Error::Field {
            what: "length",
            found: len,
            wanted: "a power of two from 16 KiB to 4 MiB",
        });
    }
    let said = number(binary, OFFSET_AT);
    if said != offset || copy == Copy::Second && offset != len {
        return Err(Error::Field { what: "offset", found: said, wanted: "that at which it lies" });
    }
    Ok(len)
}

/// Parse a copy, `bytes` all of it. An error where it is not whole.
pub(crate) fn parse_copy(bytes: &[u8], copy: Copy, offset: u64) -> Result<Whole, Error> {
    let len = copy_len(bytes, copy, offset)?;
    let have = bytes.len() as u64;
    let bytes = bytes.get(..len as usize).ok_or(Error::Short {
        what: "the LUKS2 header",
        need: len,
        have,
    })?;
    let hash = Hash::parse(&text(&bytes[CHECKSUM_HASH_AT..SALT_AT]))?;
    let mut digest = [0; CHECKSUM_LEN];
    checksum(bytes, hash, &mut digest);
    if digest[..hash.digest_len()] != bytes[CHECKSUM_AT..][..hash.digest_len()] {
        return Err(Error::Json("its checksum is wrong".into()));
    }
    let area = &bytes[BINARY_LEN..];
    let end = area.iter().position(|byte| *byte == 0).unwrap_or(area.len());
    let header = json::parse(&area[..end], len).map(|header| Header {
        uuid: text(&bytes[UUID_AT..UUID_AT + UUID_LEN]),
        label: text(&bytes[LABEL_AT..LABEL_AT + LABEL_LEN]),
        ..header
    });
    Ok(Whole { seqid: number(bytes, 16), header })
}

/// The one that counts.
pub(crate) fn choose(
    first: Result<Whole, Error>,
    second: Result<Whole, Error>,
) -> Result<Header, Error> {
    match (first, second) {
        (Ok(first), Ok(second)) if second.seqid > first.seqid => second.header,
        (Ok(first), _) => first.header,
        (Err(_), Ok(second)) => second.header,
        (Err(first), Err(second)) => {
            Err(Error::Copies { first: first.to_string(), second: second.to_string() })
        }
    }
}

/// The digest of a copy whose own checksum counts as zeros.
fn checksum(bytes: &[u8], hash: Hash, digest: &mut [u8]) {
    let (before, rest) = bytes.split_at(CHECKSUM_AT);
    let after = &rest[CHECKSUM_LEN..];
    hash.digest(&[before, &[0; CHECKSUM_LEN], after], digest);
}

fn number(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at..).and_then(|rest| rest.first_chunk());
    word.map_or(0, |word| u64::from_be_bytes(*word))
}

fn text(field: &[u8]) -> String {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    shown(&String::from_utf8_lossy(&field[..end]))
}

/// Both copies, each of the smallest length, one behind the other.
pub(crate) fn to_bytes(header: &Header, json: &str) -> Result<Vec<u8>, Error> {
    let len = PLACES[0] as usize;
    if json.len() >= len - BINARY_LEN || header.label.len() >= LABEL_LEN {
        return Err(Error::Field {
            what: "label's length",
            found: header.label.len() as u64,
            wanted: "less than 48 bytes",
        });
    }
    let mut both = vec![0; 2 * len];
    for (copy, bytes) in both.chunks_exact_mut(len).enumerate() {
        let magic = if copy == 0 { MAGIC } else { SECOND_MAGIC };
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        let mut salt = [0; UUID_AT - SALT_AT];
        getrandom::fill(&mut salt).map_err(Error::Random)?;
        put(0, magic);
        put(6, &2u16.to_be_bytes());
        put(8, &(len as u64).to_be_bytes());
        put(16, &1u64.to_be_bytes());
        put(LABEL_AT, header.label.as_bytes());
        put(CHECKSUM_HASH_AT, Hash::Sha256.name().as_bytes());
        put(SALT_AT, &salt);
        put(UUID_AT, header.uuid.as_bytes());
        put(OFFSET_AT, &((copy * len) as u64).to_be_bytes());
        put(BINARY_LEN, json.as_bytes());
        let mut digest = [0; 32];
        checksum(bytes, Hash::Sha256, &mut digest);
        bytes[CHECKSUM_AT..][..digest.len()].copy_from_slice(&digest);
    }
    Ok(both)
}
