//! The anti-forensic splitter: a key spread over many stripes, of which one lost byte is enough to
//! lose it all. Source: LUKS1 On-Disk Format Specification 1.2.3, section 2.4.

use super::Hash;

/// The key from its stripes: `key.len()` bytes each, as many as `material` holds.
pub(crate) fn merge(material: &[u8], hash: Hash, key: &mut [u8]) {
    key.fill(0);
    let mut stripes = material.chunks_exact(key.len()).peekable();
    while let Some(stripe) = stripes.next() {
        xor(key, stripe);
        if stripes.peek().is_some() {
            diffuse(hash, key);
        }
    }
}

/// Stripes of the key. `material` is random, a whole number of stripes; its last one is replaced.
pub(crate) fn split(key: &[u8], hash: Hash, material: &mut [u8]) {
    let Some(last) = material.len().checked_sub(key.len()) else { return };
    let (random, last) = material.split_at_mut(last);
    last.fill(0);
    for stripe in random.chunks_exact(key.len()) {
        xor(last, stripe);
        diffuse(hash, last);
    }
    xor(last, key);
}

fn xor(to: &mut [u8], with: &[u8]) {
    for (to, with) in to.iter_mut().zip(with) {
        *to ^= with;
    }
}

/// Replace each block of a digest's length by the digest of its number and itself; the last may be
/// shorter.
fn diffuse(hash: Hash, bytes: &mut [u8]) {
    let mut digest = [0; 64];
    for (number, block) in (0u32..).zip(bytes.chunks_mut(hash.digest_len())) {
        hash.digest(&[&number.to_be_bytes(), block], &mut digest);
        block.copy_from_slice(&digest[..block.len()]);
    }
    zeroize::Zeroize::zeroize(&mut digest);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_split_merges_again_and_not_without_each_byte() {
        for hash in [Hash::Sha1, Hash::Sha256, Hash::Sha512] {
            for len in [16, 32, 64] {
                let key: Vec<u8> = (0..len).collect();
                let mut material = vec![0; usize::from(len) * 50];
                getrandom::fill(&mut material).expect("random bytes");
                split(&key, hash, &mut material);
                let mut merged = vec![0; key.len()];
                merge(&material, hash, &mut merged);
                assert_eq!(merged, key);
                let somewhere = material.len() / 3;
                material[somewhere] ^= 1;
                merge(&material, hash, &mut merged);
                assert_ne!(merged, key);
            }
        }
    }
}
