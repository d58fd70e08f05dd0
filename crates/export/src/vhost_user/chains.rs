//! Descriptor chains as a driver writes them, for tests.

use super::testing::{GUEST, REGION};

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;

/// Behind a table of at most 512 entries, in the first region; data and status are in the second.
pub(super) const HEADER: u64 = GUEST + 0x2000;
pub(super) const DATA: u64 = GUEST + REGION;
pub(super) const STATUS: u64 = DATA + 0x7000;

/// Address, length, flags, next.
#[derive(Clone, Debug)]
pub(super) struct Entry(pub(super) u64, pub(super) u32, pub(super) u16, pub(super) u16);

pub(super) fn table(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for Entry(address, len, flags, next) in entries {
        bytes.extend(address.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
    }
    bytes
}

pub(super) fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(sector.to_le_bytes());
    bytes
}

/// The table, and a request header (type, sector 3) at [`HEADER`].
pub(super) fn with_header(entries: &[Entry], kind: u32) -> Vec<u8> {
    let mut bytes = table(entries);
    bytes.resize((HEADER - GUEST) as usize, 0);
    bytes.extend(header(kind, 3));
    bytes
}
