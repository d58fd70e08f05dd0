//! The ciphers of payloads and of key material, by the names that headers give them, and what numbers sectors.

use aes::cipher::consts::U16;
use aes::cipher::{BlockDecrypt, BlockEncrypt, BlockSizeUser, KeyInit};
use aes::{Aes128, Aes128Enc, Aes256, Aes256Enc};
use ringtap_io::Locked;
use serpent::Serpent;
use sha2::{Digest, Sha256};
use twofish::Twofish;
use zeroize::Zeroizing;

use super::sectors::{NUMBERED, Number, Sectors};
use super::{Error, cbc, xts};
use crate::SectorCipher;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Aes,
    Serpent,
    Twofish,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Two keys, of the data and of the tweak.
    Xts,
    Cbc,
}

#[derive(Debug, PartialEq, Eq)]
struct Known(&'static str, Kind, Mode, Number);

const KNOWN: &[Known] = &[
    Known("aes-xts-plain64", Kind::Aes, Mode::Xts, Number::Plain64),
    Known("aes-xts-plain", Kind::Aes, Mode::Xts, Number::Plain),
    Known("aes-cbc-essiv:sha256", Kind::Aes, Mode::Cbc, Number::Essiv),
    Known("aes-cbc-plain64", Kind::Aes, Mode::Cbc, Number::Plain64),
    Known("aes-cbc-plain", Kind::Aes, Mode::Cbc, Number::Plain),
    Known("serpent-xts-plain64", Kind::Serpent, Mode::Xts, Number::Plain64),
    Known("serpent-xts-plain", Kind::Serpent, Mode::Xts, Number::Plain),
    Known("serpent-cbc-plain64", Kind::Serpent, Mode::Cbc, Number::Plain64),
    Known("serpent-cbc-plain", Kind::Serpent, Mode::Cbc, Number::Plain),
    Known("twofish-xts-plain64", Kind::Twofish, Mode::Xts, Number::Plain64),
    Known("twofish-xts-plain", Kind::Twofish, Mode::Xts, Number::Plain),
    Known("twofish-cbc-plain64", Kind::Twofish, Mode::Cbc, Number::Plain64),
    Known("twofish-cbc-plain", Kind::Twofish, Mode::Cbc, Number::Plain),
];

/// An encryption by its name, such as `aes-xts-plain64`, with a key's length that it can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encryption {
    known: &'static Known,
    key_len: usize,
}

impl Encryption {
    /// `name` as headers have it; `key_len` in bytes: of XTS 32 and 64 are keys of 128 and 256 bits, of CBC 16 and 32.
    pub fn parse(name: &str, key_len: usize) -> Result<Encryption, Error> {
        let known = KNOWN.iter().find(|known| known.0 == name);
        let known = known.ok_or_else(|| Error::Cipher { found: super::shown(name) })?;
        let (possible, wanted) = match known.2 {
            Mode::Xts => ([32, 64], "32 or 64"),
            Mode::Cbc => ([16, 32], "16 or 32"),
        };
        match possible.contains(&key_len) {
            true => Ok(Encryption { known, key_len }),
            false => {
                let found = key_len as u64;
                Err(Error::Field { what: "key size in bytes", found, wanted })
            }
        }
    }

    /// Its name in a header.
    pub fn name(&self) -> &'static str {
        self.known.0
    }

    /// Bytes of a key.
    pub fn key_len(&self) -> usize {
        self.key_len
    }

    /// Bits of the key that enciphers data.
    pub fn bits(&self) -> usize {
        match self.known.2 {
            Mode::Xts => self.key_len * 4,
            Mode::Cbc => self.key_len * 8,
        }
    }

    /// The cipher with its key: `sector_size` in bytes, `first` the number of the sector at offset 0,
    /// counted in 512 bytes.
    pub fn with_key(&self, key: &[u8], sector_size: usize, first: u64) -> Result<Keyed, Error> {
        let wrong = || Error::Field {
            what: "key's length",
            found: key.len() as u64,
            wanted: "what the header says",
        };
        if key.len() != self.key_len {
            return Err(wrong());
        }
        let bits = self.bits();
        let keys = match (self.known.1, bits) {
            (Kind::Aes, 128) => self.keys::<Aes128, Aes128Enc>(key).map(Keys::Aes128),
            (Kind::Aes, _) => self.keys::<Aes256, Aes256Enc>(key).map(Keys::Aes256),
            (Kind::Serpent, _) => self.keys::<Serpent, Serpent>(key).map(Keys::Serpent),
            (Kind::Twofish, _) => self.keys::<Twofish, Twofish>(key).map(Keys::Twofish),
        };
        let keys = Locked::new(keys.ok_or_else(wrong)?).map_err(Error::Memory)?;
        Ok(Keyed { keys, number: self.known.3, sector_size, first })
    }

    fn keys<D: KeyInit, T: KeyInit>(&self, key: &[u8]) -> Option<Expanded<D, T>> {
        let (data, tweak) = match self.known.2 {
            Mode::Xts => key.split_at(key.len() / 2),
            Mode::Cbc => (key, &[][..]),
        };
        let second = match (self.known.2, self.known.3) {
            (Mode::Xts, _) => Second::Tweak(T::new_from_slice(tweak).ok()?),
            (Mode::Cbc, Number::Essiv) => {
                let mut hash = Zeroizing::new([0; 32]);
                hash.copy_from_slice(&Sha256::digest(key));
                Second::Vector(Some(Aes256Enc::new_from_slice(&*hash).ok()?))
            }
            (Mode::Cbc, _) => Second::Vector(None),
        };
        Some(Expanded { data: D::new_from_slice(data).ok()?, second })
    }
}

/// What stands beside the cipher of the data.
#[allow(clippy::large_enum_variant)] // it has its own page
enum Second<T> {
    /// XTS: the cipher of the tweak.
    Tweak(T),
    /// CBC: the cipher of initial vectors, where they are enciphered.
    Vector(Option<Aes256Enc>),
}

struct Expanded<D, T> {
    data: D,
    second: Second<T>,
}

/// The expanded keys.
#[allow(clippy::large_enum_variant)] // it has its own page
enum Keys {
    Aes128(Expanded<Aes128, Aes128Enc>),
    Aes256(Expanded<Aes256, Aes256Enc>),
    Serpent(Expanded<Serpent, Serpent>),
    Twofish(Expanded<Twofish, Twofish>),
}

/// A cipher with its key in locked memory.
pub struct Keyed {
    keys: Locked<Keys>,
    number: Number,
    sector_size: usize,
    first: u64,
}

impl<D, T> Expanded<D, T>
where
    D: BlockEncrypt + BlockDecrypt + BlockSizeUser<BlockSize = U16>,
    T: BlockEncrypt + BlockSizeUser<BlockSize = U16>,
{
    fn encrypt(&self, sectors: Sectors<'_>) {
        match &self.second {
            Second::Tweak(tweak) => {
                xts::each_run(tweak, sectors, |run| self.data.encrypt_with_backend(run));
            }
            Second::Vector(vector) => cbc::encrypt(&self.data, vector.as_ref(), sectors),
        }
    }

    fn decrypt(&self, sectors: Sectors<'_>) {
        match &self.second {
            Second::Tweak(tweak) => {
                xts::each_run(tweak, sectors, |run| self.data.decrypt_with_backend(run));
            }
            Second::Vector(vector) => cbc::decrypt(&self.data, vector.as_ref(), sectors),
        }
    }
}

impl Keyed {
    fn sectors<'a>(&self, offset: u64, bytes: &'a mut [u8]) -> Sectors<'a> {
        let first = self.first.wrapping_add(offset / NUMBERED);
        Sectors { bytes, size: self.sector_size, number: self.number, first }
    }
}

impl SectorCipher for Keyed {
    fn sector_size(&self) -> u64 {
        self.sector_size as u64
    }

    fn encrypt(&self, offset: u64, bytes: &mut [u8]) {
        let sectors = self.sectors(offset, bytes);
        match &*self.keys {
            Keys::Aes128(keys) => keys.encrypt(sectors),
            Keys::Aes256(keys) => keys.encrypt(sectors),
            Keys::Serpent(keys) => keys.encrypt(sectors),
            Keys::Twofish(keys) => keys.encrypt(sectors),
        }
    }

    fn decrypt(&self, offset: u64, bytes: &mut [u8]) {
        let sectors = self.sectors(offset, bytes);
        match &*self.keys {
            Keys::Aes128(keys) => keys.decrypt(sectors),
            Keys::Aes256(keys) => keys.decrypt(sectors),
            Keys::Serpent(keys) => keys.decrypt(sectors),
            Keys::Twofish(keys) => keys.decrypt(sectors),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_ciphers_are_refused_by_name() {
        for name in [
            "aes-xts-essiv:sha256",
            "serpent-cbc-essiv:sha256",
            "cast5-cbc-plain64",
            "cipher_null-ecb",
            "",
        ] {
            let error = Encryption::parse(name, 64).expect_err(name);
            assert!(error.to_string().contains(name), "{error}");
        }
        for (name, len) in
            [("aes-xts-plain64", 48), ("aes-cbc-plain64", 64), ("twofish-xts-plain64", 16)]
        {
            assert!(Encryption::parse(name, len).is_err(), "{name} {len}");
        }
    }

    /// What is enciphered comes back, at any place, and no two sectors are enciphered alike.
    #[test]
    fn every_cipher_turns_around() {
        for known in KNOWN {
            let lens = if known.2 == Mode::Xts { [32, 64] } else { [16, 32] };
            for len in lens {
                let key: Vec<u8> = (0..len as u8).map(|i| i.wrapping_mul(3) + 1).collect();
                let cipher = Encryption::parse(known.0, len).expect(known.0);
                let cipher = cipher.with_key(&key, 512, 3).expect(known.0);
                let mut bytes = vec![7; 4096];
                cipher.encrypt(1 << 20, &mut bytes);
                assert!(bytes[..512] != bytes[512..1024], "{}", known.0);
                let mut apart = bytes[1536..].to_vec();
                cipher.decrypt((1 << 20) + 1536, &mut apart);
                cipher.decrypt(1 << 20, &mut bytes);
                assert!(bytes == [7; 4096] && apart == [7; 2560], "{}", known.0);
            }
        }
    }
}
