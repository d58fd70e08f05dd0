//! AES-XTS: the cipher of sectors (IEEE 1619), its tweak the sector's number as dm-crypt counts.

use std::ops::Range;

use aes::cipher::consts::U16;
use aes::cipher::generic_array::GenericArray;
use aes::cipher::generic_array::typenum::Unsigned;
use aes::cipher::{
    BlockBackend, BlockClosure, BlockDecrypt, BlockEncrypt, BlockSizeUser, KeyInit, ParBlocks,
};
use aes::{Aes128, Aes128Enc, Aes256, Aes256Enc, Block};
use ringtap_io::Locked;

use super::Error;
use crate::SectorCipher;

/// The unit that dm-crypt numbers sectors in, whatever their size.
const NUMBERED: u64 = 512;
const BLOCK: usize = 16;
/// Sectors whose tweaks are made at once.
const TOGETHER: usize = 32;

/// How a sector's number becomes its tweak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tweak {
    /// The number, 64 bits.
    Plain64,
    /// The number's low 32 bits.
    Plain,
}

/// An encryption by its name, such as `aes-xts-plain64`, with a key's length that it can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encryption {
    tweak: Tweak,
    key_len: usize,
}

impl Encryption {
    /// `name` as headers have it; `key_len` in bytes: 32 is AES-128, 64 is AES-256.
    pub fn parse(name: &str, key_len: usize) -> Result<Encryption, Error> {
        let tweak = match name {
            "aes-xts-plain64" => Tweak::Plain64,
            "aes-xts-plain" => Tweak::Plain,
            _ => return Err(Error::Cipher { found: super::shown(name) }),
        };
        if key_len != 32 && key_len != 64 {
            return Err(Error::Field {
                what: "key size in bytes",
                found: key_len as u64,
                wanted: "32 or 64",
            });
        }
        Ok(Encryption { tweak, key_len })
    }

    /// Its name in a header.
    pub fn name(&self) -> &'static str {
        match self.tweak {
            Tweak::Plain64 => "aes-xts-plain64",
            Tweak::Plain => "aes-xts-plain",
        }
    }

    /// Bytes of a key.
    pub fn key_len(&self) -> usize {
        self.key_len
    }

    /// The cipher with its key: `sector_size` in bytes, `first` the number of the sector at offset 0,
    /// counted in 512 bytes.
    pub fn with_key(&self, key: &[u8], sector_size: usize, first: u64) -> Result<Xts, Error> {
        let wrong =
            Error::Field { what: "key's length", found: key.len() as u64, wanted: "32 or 64" };
        let (data, tweak) = key.split_at(key.len() / 2);
        let keys = match key.len() {
            32 => Keys::Aes128(
                Aes128::new_from_slice(data).map_err(|_| wrong)?,
                Aes128Enc::new(GenericArray::from_slice(tweak)),
            ),
            64 => Keys::Aes256(
                Aes256::new_from_slice(data).map_err(|_| wrong)?,
                Aes256Enc::new(GenericArray::from_slice(tweak)),
            ),
            _ => return Err(wrong),
        };
        let keys = Locked::new(keys).map_err(Error::Memory)?;
        Ok(Xts { keys, tweak: self.tweak, sector_size, first })
    }
}

/// The expanded keys, of the data and of the tweak.
#[allow(clippy::large_enum_variant)] // it has its own page
enum Keys {
    Aes128(Aes128, Aes128Enc),
    Aes256(Aes256, Aes256Enc),
}

/// AES-XTS with its key in locked memory.
pub struct Xts {
    keys: Locked<Keys>,
    tweak: Tweak,
    sector_size: usize,
    first: u64,
}

impl Xts {
    fn tweaks(&self, sectors: Range<usize>, offset: u64, tweaks: &mut [Block; TOGETHER]) -> usize {
        let count = sectors.len().min(TOGETHER);
        for (tweak, sector) in tweaks.iter_mut().zip(sectors) {
            let at = offset + (sector * self.sector_size) as u64;
            let number = match (self.tweak, self.first.wrapping_add(at / NUMBERED)) {
                (Tweak::Plain64, number) => number,
                (Tweak::Plain, number) => number & u64::from(u32::MAX),
            };
            *tweak = u128::from(number).to_le_bytes().into();
        }
        count
    }

    fn each_run<C: BlockEncrypt + BlockSizeUser<BlockSize = U16>>(
        &self,
        tweak_key: &C,
        offset: u64,
        bytes: &mut [u8],
        run: impl Fn(Sectors<'_>),
    ) {
        let mut tweaks = [Block::default(); TOGETHER];
        let all = bytes.len() / self.sector_size;
        let mut first = 0;
        for part in bytes.chunks_mut(self.sector_size * TOGETHER) {
            let count = self.tweaks(first..all, offset, &mut tweaks);
            let tweaks = &mut tweaks[..count];
            tweak_key.encrypt_blocks(tweaks);
            run(Sectors { tweaks, size: self.sector_size, bytes: part });
            first += count;
        }
    }
}

impl SectorCipher for Xts {
    fn sector_size(&self) -> u64 {
        self.sector_size as u64
    }

    fn encrypt(&self, offset: u64, bytes: &mut [u8]) {
        match &*self.keys {
            Keys::Aes128(data, tweak) => {
                self.each_run(tweak, offset, bytes, |run| data.encrypt_with_backend(run));
            }
            Keys::Aes256(data, tweak) => {
                self.each_run(tweak, offset, bytes, |run| data.encrypt_with_backend(run));
            }
        }
    }

    fn decrypt(&self, offset: u64, bytes: &mut [u8]) {
        match &*self.keys {
            Keys::Aes128(data, tweak) => {
                self.each_run(tweak, offset, bytes, |run| data.decrypt_with_backend(run));
            }
            Keys::Aes256(data, tweak) => {
                self.each_run(tweak, offset, bytes, |run| data.decrypt_with_backend(run));
            }
        }
    }
}

/// A run of sectors, each with its enciphered tweak, for the AES of this processor.
struct Sectors<'a> {
    tweaks: &'a [Block],
    size: usize,
    bytes: &'a mut [u8],
}

impl BlockSizeUser for Sectors<'_> {
    type BlockSize = U16;
}

impl BlockClosure for Sectors<'_> {
    /// As many blocks at once as the backend takes: AES-NI is a pipeline, and one block after the
    /// other would leave most of it empty.
    #[inline(always)]
    fn call<B: BlockBackend<BlockSize = U16>>(self, backend: &mut B) {
        let together = BLOCK * B::ParBlocksSize::USIZE;
        let mut masks = ParBlocks::<B>::default();
        let mut blocks = ParBlocks::<B>::default();
        for (sector, tweak) in self.bytes.chunks_exact_mut(self.size).zip(self.tweaks) {
            let mut mask = u128::from_le_bytes((*tweak).into());
            let mut groups = sector.chunks_exact_mut(together);
            for group in &mut groups {
                for ((block, kept), bytes) in
                    blocks.iter_mut().zip(&mut masks).zip(group.chunks_exact(BLOCK))
                {
                    *kept = mask.to_le_bytes().into();
                    *block = (load(bytes) ^ mask).to_le_bytes().into();
                    mask = double(mask);
                }
                backend.proc_par_blocks((&mut blocks).into());
                for ((block, kept), bytes) in
                    blocks.iter().zip(&masks).zip(group.chunks_exact_mut(BLOCK))
                {
                    let clear = load(block) ^ load(kept);
                    bytes.copy_from_slice(&clear.to_le_bytes());
                }
            }
            for bytes in groups.into_remainder().chunks_exact_mut(BLOCK) {
                let mut block: Block = (load(bytes) ^ mask).to_le_bytes().into();
                backend.proc_block((&mut block).into());
                bytes.copy_from_slice(&(load(&block) ^ mask).to_le_bytes());
                mask = double(mask);
            }
        }
    }
}

#[inline(always)]
fn load(bytes: &[u8]) -> u128 {
    let mut block = [0; BLOCK];
    block.copy_from_slice(bytes);
    u128::from_le_bytes(block)
}

/// The tweak of the next block: times x in GF(2^128), modulo x^128 + x^7 + x^2 + x + 1.
#[inline(always)]
fn double(mask: u128) -> u128 {
    let carry = (mask >> 127).wrapping_neg() & 0x87;
    (mask << 1) ^ carry
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digit = |c: u8| (c as char).to_digit(16).expect("hex") as u8;
        text.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
    }

    fn xts(key: &[u8], sector_size: usize, first: u64) -> Xts {
        let encryption = Encryption::parse("aes-xts-plain64", key.len()).expect("known");
        encryption.with_key(key, sector_size, first).expect("a cipher")
    }

    /// IEEE 1619-2007, annex B, vectors 1 and 2 (data units of 32 bytes).
    #[test]
    fn vectors_of_the_standard() {
        let mut bytes = vec![0; 32];
        xts(&[0; 32], 32, 0).encrypt(0, &mut bytes);
        assert_eq!(bytes, hex("917cf69ebd68b2ec9b9fe9a3eadda692cd43d2f59598ed858c02c2652fbf922e"));
        let key = [[0x11; 16], [0x22; 16]].concat();
        let mut bytes = vec![0x44; 32];
        let cipher = xts(&key, 32, 0x33_3333_3333);
        cipher.encrypt(0, &mut bytes);
        assert_eq!(bytes, hex("c454185e6a16936e39334038acef838bfb186fff7480adc4289382ecd6d394f0"));
        cipher.decrypt(0, &mut bytes);
        assert_eq!(bytes, [0x44; 32]);
    }

    /// As [`Xts`], block after block, in no hurry.
    fn plainly(key: &[u8], number: u64, sector: &mut [u8]) {
        let (data, tweak) = key.split_at(key.len() / 2);
        let mut mask: Block = u128::from(number).to_le_bytes().into();
        let aes = |key: &[u8], block: &mut Block| match key.len() {
            16 => Aes128::new_from_slice(key).expect("a key").encrypt_block(block),
            _ => Aes256::new_from_slice(key).expect("a key").encrypt_block(block),
        };
        aes(tweak, &mut mask);
        for bytes in sector.chunks_exact_mut(BLOCK) {
            let mut block: Block = (load(bytes) ^ load(&mask)).to_le_bytes().into();
            aes(data, &mut block);
            bytes.copy_from_slice(&(load(&block) ^ load(&mask)).to_le_bytes());
            let carry = mask[15] >> 7;
            for i in (1..BLOCK).rev() {
                mask[i] = mask[i] << 1 | mask[i - 1] >> 7;
            }
            mask[0] = mask[0] << 1 ^ carry * 0x87;
        }
    }

    #[test]
    fn every_sector_size_counts_in_512() {
        for key_len in [32, 64] {
            let key: Vec<u8> = (0..key_len).map(|i: u8| i.wrapping_mul(7) + 1).collect();
            for size in [512, 1024, 2048, 4096] {
                let clear: Vec<u8> = (0..size * 70).map(|i| (i * i >> 5) as u8).collect();
                let cipher = xts(&key, size, 5);
                let offset = 3 * size as u64;
                let mut bytes = clear.clone();
                cipher.encrypt(offset, &mut bytes);
                let mut expected = clear.clone();
                for (i, sector) in (3..).zip(expected.chunks_exact_mut(size)) {
                    plainly(&key, 5 + i * size as u64 / 512, sector);
                }
                assert!(bytes == expected, "key of {key_len}, sectors of {size}");
                cipher.decrypt(offset, &mut bytes);
                assert!(bytes == clear, "key of {key_len}, sectors of {size}");
            }
        }
    }

    #[test]
    fn other_ciphers_are_refused_by_name() {
        for name in ["aes-cbc-essiv:sha256", "serpent-xts-plain64", "cipher_null-ecb", ""] {
            let error = Encryption::parse(name, 64).expect_err(name);
            assert!(error.to_string().contains(name), "{error}");
        }
        assert!(Encryption::parse("aes-xts-plain64", 48).is_err());
    }
}
