//! XTS: the mode of sectors (IEEE 1619), its tweak the sector's number as dm-crypt counts.

use aes::Block;
use aes::cipher::consts::U16;
use aes::cipher::generic_array::typenum::Unsigned;
use aes::cipher::{BlockBackend, BlockClosure, BlockEncrypt, BlockSizeUser, ParBlocks};

use super::sectors::{BLOCK, Sectors};

/// Sectors whose tweaks are made at once.
const TOGETHER: usize = 32;

/// Hand sectors to the cipher of the data, each with its enciphered tweak.
#[inline]
pub(super) fn each_run<C: BlockEncrypt + BlockSizeUser<BlockSize = U16>>(
    tweak_key: &C,
    sectors: Sectors<'_>,
    run: impl Fn(Run<'_>),
) {
    let mut tweaks = [Block::default(); TOGETHER];
    let (size, all) = (sectors.size, sectors.bytes.len() / sectors.size);
    for first in (0..all).step_by(TOGETHER) {
        let count = (all - first).min(TOGETHER);
        let tweaks = &mut tweaks[..count];
        for (tweak, sector) in tweaks.iter_mut().zip(first..) {
            *tweak = sectors.number(sector).into();
        }
        tweak_key.encrypt_blocks(tweaks);
        let bytes = &mut sectors.bytes[first * size..(first + count) * size];
        run(Run { tweaks, size, bytes });
    }
}

/// A run of sectors, each with its enciphered tweak, for the cipher of this processor.
pub(super) struct Run<'a> {
    tweaks: &'a [Block],
    size: usize,
    bytes: &'a mut [u8],
}

impl BlockSizeUser for Run<'_> {
    type BlockSize = U16;
}

impl BlockClosure for Run<'_> {
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
    use aes::cipher::KeyInit;
    use aes::{Aes128, Aes256};

    use super::*;
    use crate::SectorCipher;
    use crate::luks::{Encryption, Keyed};

    fn hex(text: &str) -> Vec<u8> {
        hex::decode(text).expect("digits")
    }

    fn xts(key: &[u8], sector_size: usize, first: u64) -> Keyed {
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

    /// As [`Run`], block after block, in no hurry.
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
}
