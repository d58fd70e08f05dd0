//! Fixed-size fields in byte arrays; what would lie outside reads as zeros and is not written.

/// The `N` bytes at `at`.
pub(crate) fn get<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    if let Some(from) = at.checked_add(N).and_then(|end| bytes.get(at..end)) {
        field.copy_from_slice(from);
    }
    field
}

/// Put `field` at `at`.
pub(crate) fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    if let Some(to) = at.checked_add(field.len()).and_then(|end| bytes.get_mut(at..end)) {
        to.copy_from_slice(field);
    }
}
