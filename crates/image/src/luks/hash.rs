//! The hashes that LUKS headers name.

use sha1::Sha1;
use sha2::digest::{Digest, Output};
use sha2::{Sha224, Sha256, Sha384, Sha512};
use zeroize::Zeroize;

use super::Error;

/// A hash function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hash {
    /// SHA-1, 20 bytes.
    Sha1,
    /// SHA-224, 28 bytes.
    Sha224,
    /// SHA-256, 32 bytes.
    Sha256,
    /// SHA-384, 48 bytes.
    Sha384,
    /// SHA-512, 64 bytes.
    Sha512,
}

const ALL: [Hash; 5] = [Hash::Sha1, Hash::Sha224, Hash::Sha256, Hash::Sha384, Hash::Sha512];

impl Hash {
    /// By its name in a header, any case.
    pub fn parse(name: &str) -> Result<Hash, Error> {
        let known = ALL.into_iter().find(|hash| name.eq_ignore_ascii_case(hash.name()));
        known.ok_or_else(|| Error::Hash { found: super::shown(name) })
    }

    /// Its name in a header.
    pub fn name(self) -> &'static str {
        match self {
            Hash::Sha1 => "sha1",
            Hash::Sha224 => "sha224",
            Hash::Sha256 => "sha256",
            Hash::Sha384 => "sha384",
            Hash::Sha512 => "sha512",
        }
    }

    /// Bytes of a digest.
    pub fn digest_len(self) -> usize {
        match self {
            Hash::Sha1 => 20,
            Hash::Sha224 => 28,
            Hash::Sha256 => 32,
            Hash::Sha384 => 48,
            Hash::Sha512 => 64,
        }
    }

    /// The digest of `parts`, one after the other, into `out`: cut short where that is shorter.
    pub fn digest(self, parts: &[&[u8]], out: &mut [u8]) {
        match self {
            Hash::Sha1 => digest_with::<Sha1>(parts, out),
            Hash::Sha224 => digest_with::<Sha224>(parts, out),
            Hash::Sha256 => digest_with::<Sha256>(parts, out),
            Hash::Sha384 => digest_with::<Sha384>(parts, out),
            Hash::Sha512 => digest_with::<Sha512>(parts, out),
        }
    }

    /// PBKDF2 with HMAC of this hash (RFC 8018, 5.2).
    pub fn pbkdf2(self, secret: &[u8], salt: &[u8], iterations: u32, out: &mut [u8]) {
        match self {
            Hash::Sha1 => pbkdf2::pbkdf2_hmac::<Sha1>(secret, salt, iterations, out),
            Hash::Sha224 => pbkdf2::pbkdf2_hmac::<Sha224>(secret, salt, iterations, out),
            Hash::Sha256 => pbkdf2::pbkdf2_hmac::<Sha256>(secret, salt, iterations, out),
            Hash::Sha384 => pbkdf2::pbkdf2_hmac::<Sha384>(secret, salt, iterations, out),
            Hash::Sha512 => pbkdf2::pbkdf2_hmac::<Sha512>(secret, salt, iterations, out),
        }
    }
}

fn digest_with<D: Digest>(parts: &[&[u8]], out: &mut [u8]) {
    let mut hasher = D::new();
    for part in parts {
        hasher.update(part);
    }
    let mut digest: Output<D> = hasher.finalize();
    for (to, from) in out.iter_mut().zip(digest.iter()) {
        *to = *from;
    }
    digest.as_mut_slice().zeroize();
}
