//! Big-endian numbers at an offset, where they may be missing.

/// The `N` bytes at `at`.
pub fn take<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// The number at `at`.
pub fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    take(bytes, at).map(u16::from_be_bytes)
}

/// The number at `at`.
pub fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    take(bytes, at).map(u32::from_be_bytes)
}

/// The number at `at`.
pub fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    take(bytes, at).map(u64::from_be_bytes)
}

/// A table of 64-bit entries, in host order; bytes that make no whole entry are left out.
pub fn entries(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).filter_map(|entry| be64(entry, 0)).collect()
}

/// A table of 64-bit entries as it lies in a file.
pub fn table(entries: &[u64]) -> Vec<u8> {
    entries.iter().flat_map(|entry| entry.to_be_bytes()).collect()
}
