//! CBC: each block is enciphered together with the one before it, the first with what the sector's number makes.

use aes::cipher::consts::U16;
use aes::cipher::generic_array::GenericArray;
use aes::cipher::{BlockDecrypt, BlockEncrypt, BlockSizeUser};
use aes::{Aes256Enc, Block};

use super::sectors::{BLOCK, Sectors};

/// The initial vectors of sectors.
fn vectors(sectors: &Sectors<'_>, enciphered: Option<&Aes256Enc>) -> Vec<Block> {
    let vector = |sector| {
        let mut vector = sectors.number(sector).into();
        if let Some(cipher) = enciphered {
            cipher.encrypt_block(&mut vector);
        }
        vector
    };
    (0..sectors.bytes.len() / sectors.size).map(vector).collect()
}

fn add(to: &mut [u8], from: &[u8]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to ^= from);
}

pub(super) fn encrypt<C: BlockEncrypt + BlockSizeUser<BlockSize = U16>>(
    cipher: &C,
    enciphered: Option<&Aes256Enc>,
    sectors: Sectors<'_>,
) {
    let vectors = vectors(&sectors, enciphered);
    for (sector, mut before) in sectors.bytes.chunks_exact_mut(sectors.size).zip(vectors) {
        for block in sector.chunks_exact_mut(BLOCK) {
            add(block, &before);
            cipher.encrypt_block(GenericArray::from_mut_slice(block));
            before.copy_from_slice(block);
        }
    }
}

pub(super) fn decrypt<C: BlockDecrypt + BlockSizeUser<BlockSize = U16>>(
    cipher: &C,
    enciphered: Option<&Aes256Enc>,
    sectors: Sectors<'_>,
) {
    let vectors = vectors(&sectors, enciphered);
    let mut blocks = vec![Block::default(); sectors.size / BLOCK];
    for (sector, mut before) in sectors.bytes.chunks_exact_mut(sectors.size).zip(vectors) {
        for (block, bytes) in blocks.iter_mut().zip(sector.chunks_exact(BLOCK)) {
            block.copy_from_slice(bytes);
        }
        cipher.decrypt_blocks(&mut blocks);
        for (clear, bytes) in blocks.iter().zip(sector.chunks_exact_mut(BLOCK)) {
            let enciphered = *GenericArray::from_slice(bytes);
            bytes.copy_from_slice(clear);
            add(bytes, &before);
            before = enciphered;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::SectorCipher;
    use crate::luks::Encryption;

    /// NIST SP 800-38A, F.2.1: CBC-AES128, with the vector of the example taken into the first block.
    #[test]
    fn vectors_of_the_standard() {
        let hex = |text: &str| -> Vec<u8> {
            let digits = text.as_bytes().chunks(2);
            digits
                .map(|pair| {
                    u8::from_str_radix(std::str::from_utf8(pair).expect("hex"), 16).expect("hex")
                })
                .collect()
        };
        let key = hex("2b7e151628aed2a6abf7158809cf4f3c");
        let mut clear = hex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51");
        (0..16).for_each(|at| clear[at] ^= at as u8);
        let cipher = Encryption::parse("aes-cbc-plain64", 16).expect("known");
        let cipher = cipher.with_key(&key, 32, 0).expect("a cipher");
        let mut bytes = clear.clone();
        cipher.encrypt(0, &mut bytes);
        assert_eq!(bytes, hex("7649abac8119b246cee98e9b12e9197d5086cb9b507219ee95db113a917678b2"));
        cipher.decrypt(0, &mut bytes);
        assert_eq!(bytes, clear);
    }
}
