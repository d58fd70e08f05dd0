//! Fixed-size fields in byte arrays, which may end before them.

/// The `N` bytes at `at`, if they are there.
pub(crate) fn take<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// The `N` bytes at `at`; zeros where they are not all there.
pub(crate) fn get<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    take(bytes, at).unwrap_or([0; N])
}

/// Put `field` at `at`, if it fits there.
pub(crate) fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    if let Some(to) = at.checked_add(field.len()).and_then(|end| bytes.get_mut(at..end)) {
        to.copy_from_slice(field);
    }
}

/// The big-endian number at `at`.
pub(crate) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    take(bytes, at).map(u16::from_be_bytes)
}

/// The big-endian number at `at`.
pub(crate) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    take(bytes, at).map(u32::from_be_bytes)
}

/// The big-endian number at `at`.
pub(crate) fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    take(bytes, at).map(u64::from_be_bytes)
}

/// A table of big-endian 64-bit entries; bytes that make no whole entry are left out.
pub(crate) fn entries(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|entry| u64::from_be_bytes(get(entry, 0))).collect()
}

/// A table of 64-bit entries as it lies in a file.
pub(crate) fn table(entries: &[u64]) -> Vec<u8> {
    entries.iter().flat_map(|entry| entry.to_be_bytes()).collect()
}
