//! LUKS headers of arbitrary bytes: each gives a header within its bounds or an error.

use ringtap_image::luks::{Header, parse};
use sha2::{Digest, Sha256};

/// What a header that was taken promises those that open it.
fn check(header: &Header) {
    assert!([512, 1024, 2048, 4096].contains(&header.sector_size));
    assert!(header.payload_offset >= 592 && header.payload_offset < 1 << 62);
    assert_eq!(header.payload_offset % 512, 0);
    assert!(header.payload_len.is_none_or(|len| len > 0 && len < 1 << 62));
    assert!(header.keyslots.len() <= 32);
    for keyslot in &header.keyslots {
        assert!(keyslot.offset < 1 << 62);
        assert!(keyslot.key_len == 32 || keyslot.key_len == 64);
        assert!(keyslot.material_len().is_ok_and(|len| len <= 1 << 20));
    }
    for text in [&header.uuid, &header.label] {
        assert!(text.chars().all(|c| !c.is_control()));
    }
}

#[test]
fn luks1_header() {
    bolero::check!().for_each(|input: &[u8]| {
        // The parts that must be right before anything else is looked at; the input changes the rest.
        let mut bytes = vec![0; 592];
        for (to, from) in bytes.iter_mut().zip(input) {
            *to = *from;
        }
        bytes[..8].copy_from_slice(b"LUKS\xba\xbe\0\x01");
        if input.len() % 4 > 0 {
            bytes[8..40].copy_from_slice(&padded(b"aes"));
            bytes[40..72].copy_from_slice(&padded(b"xts-plain64"));
        }
        if input.len() % 4 > 1 {
            bytes[72..104].copy_from_slice(&padded(b"sha256"));
            bytes[108..112].copy_from_slice(&64u32.to_be_bytes());
        }
        if let Ok(header) = parse(&bytes) {
            check(&header);
        }
    });
}

fn padded(text: &[u8]) -> [u8; 32] {
    let mut field = [0; 32];
    field[..text.len()].copy_from_slice(text);
    field
}

/// The input is the JSON, in a binary header whose checksum is right.
#[test]
fn luks2_metadata() {
    bolero::check!().for_each(|input: &[u8]| {
        let mut bytes = vec![0; 0x4000];
        bytes[..8].copy_from_slice(b"LUKS\xba\xbe\0\x02");
        bytes[8..16].copy_from_slice(&0x4000u64.to_be_bytes());
        bytes[72..78].copy_from_slice(b"sha256");
        for (to, from) in bytes[4096..].iter_mut().zip(input) {
            *to = *from;
        }
        let digest = Sha256::digest(&bytes);
        bytes[448..480].copy_from_slice(&digest);
        if let Ok(header) = parse(&bytes) {
            check(&header);
        }
    });
}

/// The input is the binary header, with the checksum that fits or without.
#[test]
fn luks2_binary() {
    bolero::check!().for_each(|input: &[u8]| {
        let mut bytes = vec![0; 0x8000];
        for (to, from) in bytes.iter_mut().zip(input) {
            *to = *from;
        }
        bytes[..6].copy_from_slice(b"LUKS\xba\xbe");
        bytes[448..512].fill(0);
        let digest = Sha256::digest(&bytes[..0x4000]);
        bytes[448..480].copy_from_slice(&digest);
        if let Ok(header) = parse(&bytes) {
            check(&header);
        }
    });
}
