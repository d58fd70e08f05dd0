//! Entries of the block allocation table ([MS-VHDX] 2.5.1).

/// Entries of the table that are read together.
pub(super) const PAGE: u64 = 512;
pub(super) const STATE: u64 = 7;
/// The bits of an entry that name a place, in whole MiB.
pub(super) const PLACE: u64 = !((1 << 20) - 1);
pub(super) const FULLY_PRESENT: u64 = 6;
