//! The copies of a LUKS2 header.

/// Bytes of the binary part.
pub(crate) const BINARY_LEN: usize = 4096;
/// Where the second copy may lie, which is also the length of each.
pub(crate) const PLACES: [u64; 9] =
    [0x4000, 0x8000, 0x1_0000, 0x2_0000, 0x4_0000, 0x8_0000, 0x10_0000, 0x20_0000, 0x40_0000];
