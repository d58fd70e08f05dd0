//! The header of LUKS1. Source: LUKS1 On-Disk Format Specification 1.2.3, section 3.

use super::{Encryption, Error, Hash, Header, Kdf, KeyDigest, Keyslot, MAGIC, shown};
use crate::bytes::put;

/// Bytes of the header proper.
pub(crate) const LEN: usize = 592;
const SLOTS: usize = 8;
const SLOTS_AT: usize = 208;
const SLOT_LEN: usize = 48;
const ENABLED: u32 = 0x00AC_71F3;
pub(crate) const DISABLED: u32 = 0x0000_DEAD;
const SECTOR: u64 = 512;
/// Key material begins on a multiple of this, the payload on one of [`PAYLOAD_ALIGN`].
const MATERIAL_ALIGN: u64 = 4096;
const PAYLOAD_ALIGN: u64 = 1 << 20;
const DIGEST_LEN: usize = 20;
const SALT_LEN: usize = 32;

/// Parse the header; `bytes` begin with the file.
pub(crate) fn parse(bytes: &[u8]) -> Result<Header, Error> {
    let have = bytes.len() as u64;
    let bytes: &[u8; LEN] = bytes.first_chunk().ok_or(Error::Short {
        what: "the LUKS1 header",
        need: LEN as u64,
        have,
    })?;
    let key_len = number(bytes, 108) as usize;
    let cipher = format!("{}-{}", text(bytes, 8), text(bytes, 40));
    let encryption = Encryption::parse(&cipher, key_len)?;
    let hash = Hash::parse(&text(bytes, 72))?;
    let payload_offset = u64::from(number(bytes, 104)) * SECTOR;
    if payload_offset < LEN as u64 {
        return Err(Error::Field {
            what: "payload offset",
            found: payload_offset,
            wanted: "behind the header (detached headers are not supported)",
        });
    }
    let digest = KeyDigest {
        hash,
        iterations: number(bytes, 164),
        salt: bytes[132..132 + SALT_LEN].to_vec(),
        digest: bytes[112..112 + DIGEST_LEN].to_vec(),
    };
    let (mut keyslots, mut unused) = (vec![], vec![]);
    for (index, slot) in (0..).zip(bytes[SLOTS_AT..].chunks_exact(SLOT_LEN)) {
        match number(slot, 0) {
            ENABLED => {}
            DISABLED => {
                unused.push((index, u64::from(number(slot, 40)) * SECTOR));
                continue;
            }
            other => {
                return Err(Error::Field {
                    what: "mark of a keyslot",
                    found: other.into(),
                    wanted: "0x00AC71F3 or 0x0000DEAD",
                });
            }
        }
        let keyslot = Keyslot {
            index,
            kdf: Kdf::Pbkdf2 {
                hash,
                iterations: number(slot, 4),
                salt: slot[8..8 + SALT_LEN].to_vec(),
            },
            encryption,
            offset: u64::from(number(slot, 40)) * SECTOR,
            stripes: number(slot, 44) as usize,
            hash,
            key_len,
            digest: digest.clone(),
        };
        keyslot.material_len()?;
        keyslots.push(keyslot);
    }
    Ok(Header {
        version: 1,
        uuid: text(&bytes[..SLOTS_AT], 168),
        label: String::new(),
        payload_offset,
        payload_len: None,
        encryption,
        sector_size: SECTOR as usize,
        first_sector: 0,
        keyslots,
        unused,
        allow_discards: false,
    })
}

fn number(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(|rest| rest.first_chunk());
    word.map_or(0, |word| u32::from_be_bytes(*word))
}

/// The text of a 32-byte field (40 bytes where it is the last).
fn text(bytes: &[u8], at: usize) -> String {
    let field = bytes.get(at..).unwrap_or_default();
    let field = if at == 168 { field } else { &field[..field.len().min(32)] };
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    shown(&String::from_utf8_lossy(&field[..end]))
}

/// Where things lie in a new container: `(slot's key material, payload)`, in bytes.
pub(crate) fn layout(area_len: u64, slot: u64) -> (u64, u64) {
    let each = area_len.next_multiple_of(MATERIAL_ALIGN);
    let first = MATERIAL_ALIGN;
    (first + slot * each, (first + SLOTS as u64 * each).next_multiple_of(PAYLOAD_ALIGN))
}

/// The bytes of a header with one keyslot in use.
pub(crate) fn to_bytes(header: &Header, keyslot: &Keyslot) -> Result<[u8; LEN], Error> {
    let Kdf::Pbkdf2 { hash, .. } = &keyslot.kdf else { return Err(only_pbkdf2()) };
    let mut bytes = [0; LEN];
    let mut put = |at: usize, part: &[u8]| put(&mut bytes, at, part);
    let (cipher, mode) = header.encryption.name().split_once('-').unwrap_or_default();
    put(0, MAGIC);
    put(6, &1u16.to_be_bytes());
    put(8, cipher.as_bytes());
    put(40, mode.as_bytes());
    put(72, hash.name().as_bytes());
    put(104, &sectors(header.payload_offset)?.to_be_bytes());
    put(108, &(keyslot.key_len as u32).to_be_bytes());
    put(112, &keyslot.digest.digest);
    put(132, &keyslot.digest.salt);
    put(164, &keyslot.digest.iterations.to_be_bytes());
    put(168, header.uuid.as_bytes());
    for slot in 0..SLOTS {
        let at = SLOTS_AT + slot * SLOT_LEN;
        let (offset, _) = layout(keyslot.area_len()? as u64, slot as u64);
        if slot as u32 == keyslot.index {
            put(at, &slot_bytes(&Keyslot { offset, ..keyslot.clone() })?);
            continue;
        }
        put(at, &DISABLED.to_be_bytes());
        put(at + 40, &sectors(offset)?.to_be_bytes());
        put(at + 44, &(keyslot.stripes as u32).to_be_bytes());
    }
    Ok(bytes)
}

/// Where a keyslot has room for key material, used or not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotPlace {
    /// In bytes from the header's beginning.
    pub(crate) offset: u64,
    pub(crate) stripes: usize,
}

/// The places of all keyslots.
pub(crate) fn slots(bytes: &[u8]) -> Vec<SlotPlace> {
    let slots = bytes.get(SLOTS_AT..).unwrap_or_default().chunks_exact(SLOT_LEN).take(SLOTS);
    let place = |slot: &[u8]| SlotPlace {
        offset: u64::from(number(slot, 40)) * SECTOR,
        stripes: number(slot, 44) as usize,
    };
    slots.map(place).collect()
}

/// Where a keyslot's entry lies in the header.
pub(crate) fn slot_at(index: u32) -> u64 {
    SLOTS_AT as u64 + u64::from(index) * SLOT_LEN as u64
}

/// The entry of a keyslot in use.
pub(crate) fn slot_bytes(keyslot: &Keyslot) -> Result<[u8; SLOT_LEN], Error> {
    let Kdf::Pbkdf2 { iterations, salt, .. } = &keyslot.kdf else { return Err(only_pbkdf2()) };
    let mut entry = [0; SLOT_LEN];
    put(&mut entry, 0, &ENABLED.to_be_bytes());
    put(&mut entry, 4, &iterations.to_be_bytes());
    put(&mut entry, 8, salt.get(..SALT_LEN).unwrap_or(salt));
    put(&mut entry, 40, &sectors(keyslot.offset)?.to_be_bytes());
    put(&mut entry, 44, &(keyslot.stripes as u32).to_be_bytes());
    Ok(entry)
}

fn only_pbkdf2() -> Error {
    Error::Unknown {
        what: "in LUKS1, a key derivation other than",
        found: "pbkdf2".into(),
        hint: ": make it LUKS2",
    }
}

fn sectors(offset: u64) -> Result<u32, Error> {
    u32::try_from(offset / SECTOR).map_err(|_| Error::Field {
        what: "offset",
        found: offset,
        wanted: "less than 2 TiB in LUKS1",
    })
}
