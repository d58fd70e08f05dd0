//! Making new containers, as `cryptsetup luksFormat` does.

use std::sync::Arc;

use ringtap_io::{Io, LockedBytes};
use uuid::{Builder, Uuid};

use super::kdf::Effort;
use super::{Encryption, Error, Hash, Header, KeyDigest, Keyslot, copies, json, v1, v2};
use crate::{Container, Error as IoError, Secret, SectorCipher};

/// What anti-forensic splitting makes of a key, in cryptsetup and by both specifications.
const STRIPES: usize = 4000;
const SALT: usize = 32;
/// Where a LUKS2 payload begins, as cryptsetup lays it out: 16 MiB.
const PAYLOAD2: u64 = 16 << 20;
const ZEROS: usize = 1 << 20;
/// The least that any disk writes whole.
const FIRST: usize = 512;
/// What the digest of the key costs, of the keyslot's effort: it guards a random key, not a secret.
const DIGEST_ITERATIONS: u32 = 1000;

/// The version of the format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// LUKS1, which QEMU reads, too.
    Luks1,
    /// LUKS2.
    #[default]
    Luks2,
}

/// How the keyslot's key comes from the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Derivation {
    /// PBKDF2 with the hash of the options. LUKS1 has nothing else.
    Pbkdf2,
    /// Argon2id.
    Argon2id,
}

/// What a new container is to be like.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// The version of the format.
    pub version: Version,
    /// Bits of the key: 512 is AES-256 in XTS mode, 256 is AES-128.
    pub key_bits: u32,
    /// Bytes of an enciphered sector, LUKS2 only. A guest sees sectors no smaller.
    pub sector_size: u32,
    /// The hash of PBKDF2, of the digest and of the splitter.
    pub hash: Hash,
    /// From the secret to the keyslot's key; by default Argon2id in LUKS2.
    pub derivation: Option<Derivation>,
    /// How much work that is to be.
    pub effort: Effort,
    /// LUKS2 only; at most 47 bytes.
    pub label: String,
}

impl Default for CreateOptions {
    fn default() -> CreateOptions {
        CreateOptions {
            version: Version::default(),
            key_bits: 512,
            sector_size: 512,
            hash: Hash::Sha256,
            derivation: None,
            effort: Effort::default(),
            label: String::new(),
        }
    }
}

/// A header ready to be written.
struct New {
    header: Header,
    keyslot: Keyslot,
    volume_key: LockedBytes,
    material: LockedBytes,
}

/// Make a container with a payload of `size` bytes, a multiple of the sector size. What the container
/// holds from its beginning is overwritten; a regular file gets the length it needs. The payload itself
/// is not written: it reads as noise, as after `cryptsetup luksFormat`.
///
/// Gives the payload's offset.
pub async fn create(
    io: &Io,
    container: &Container,
    size: u64,
    options: &CreateOptions,
    secret: &Secret,
) -> Result<u64, Error> {
    let new = New::make(options, secret)?;
    let sector = u64::from(options.sector_size);
    if size == 0 || size % sector != 0 || size > i64::MAX as u64 / 2 {
        return Err(Error::Field {
            what: "payload size",
            found: size,
            wanted: "a multiple of the sector size, and not 0",
        });
    }
    let payload = new.header.payload_offset;
    let failed = |what| move |source: IoError| Error::Io { what, source };
    if container.traits().regular {
        let grow = failed("set the file's length");
        container.set_len(io, payload + size).await.map_err(grow)?;
    } else if container.len() < payload + size {
        let (need, have) = (payload + size, container.len());
        return Err(Error::Short { what: "the payload", need, have });
    }
    // Nothing of what was there may pass for a part of this header: neither a second copy nor old
    // key material. It is gone for good before the new one is there.
    let zeros = vec![0; ZEROS];
    let wipe = failed("wipe the place of the header");
    let mut at = 0;
    while at < payload {
        let part = (payload - at).min(ZEROS as u64) as usize;
        container.write(io, at, &zeros[..part]).await.map_err(wipe)?;
        at += part as u64;
    }
    let write = failed("write the header");
    container.sync(io).await.map_err(write)?;
    container.write(io, new.keyslot.offset, &new.material).await.map_err(write)?;
    container.sync(io).await.map_err(write)?;
    // The first sector makes it a container: it comes last, whole or not at all.
    let header = new.header_bytes()?;
    let (first, rest) = header.split_at(FIRST);
    container.write(io, FIRST as u64, rest).await.map_err(write)?;
    container.sync(io).await.map_err(write)?;
    container.write(io, 0, first).await.map_err(write)?;
    container.sync(io).await.map_err(write)?;
    Ok(payload)
}

/// Bytes of a container in front of its payload.
pub fn front_len(options: &CreateOptions) -> u64 {
    let key_len = u64::from(options.key_bits.div_ceil(8));
    match options.version {
        Version::Luks1 => {
            v1::layout((STRIPES as u64 * key_len).next_multiple_of(FIRST as u64), 0).1
        }
        Version::Luks2 => PAYLOAD2,
    }
}

/// Make a header to lie elsewhere than in front of its payload, as inside qcow2: its bytes with key
/// material and all, and the cipher, which counts sectors from the file's own beginning. QEMU reads
/// LUKS1 there.
pub fn create_header(
    options: &CreateOptions,
    secret: &Secret,
) -> Result<(Vec<u8>, Arc<dyn SectorCipher>), Error> {
    let new = New::make(options, secret)?;
    let mut bytes = vec![0; new.header.payload_offset as usize];
    let header = new.header_bytes()?;
    bytes[..header.len()].copy_from_slice(&header);
    bytes[new.keyslot.offset as usize..][..new.material.len()].copy_from_slice(&new.material);
    Ok((bytes, Arc::new(new.header.cipher(&new.volume_key)?)))
}

impl New {
    fn make(options: &CreateOptions, secret: &Secret) -> Result<New, Error> {
        let CreateOptions { version, sector_size, hash, effort, .. } = *options;
        let sizes: &[u32] =
            if version == Version::Luks1 { &[512] } else { &[512, 1024, 2048, 4096] };
        if !sizes.contains(&sector_size) {
            return Err(Error::Field {
                what: "sector size",
                found: sector_size.into(),
                wanted: "512, 1024, 2048 or 4096 in LUKS2, 512 in LUKS1",
            });
        }
        let encryption =
            Encryption::parse("aes-xts-plain64", options.key_bits.div_ceil(8) as usize)?;
        let key_len = encryption.key_len();
        let derivation = options.derivation.unwrap_or(match version {
            Version::Luks1 => Derivation::Pbkdf2,
            Version::Luks2 => Derivation::Argon2id,
        });
        let kdf = match derivation {
            Derivation::Pbkdf2 => effort.pbkdf2(hash, random(SALT)?, key_len),
            Derivation::Argon2id => effort.argon2id(random(SALT)?)?,
        };
        let mut volume_key = LockedBytes::zeroed(key_len).map_err(Error::Memory)?;
        getrandom::fill(&mut volume_key).map_err(Error::Random)?;
        let digest = digest_of(&volume_key, version, hash)?;
        let mut keyslot = Keyslot {
            index: 0,
            kdf,
            encryption,
            offset: 0,
            stripes: STRIPES,
            hash,
            key_len,
            digest,
        };
        let payload_offset = match version {
            Version::Luks1 => {
                let (offset, payload) = v1::layout(keyslot.area_len()? as u64, 0);
                keyslot.offset = offset;
                payload
            }
            Version::Luks2 => {
                keyslot.offset = 2 * copies::PLACES[0];
                PAYLOAD2
            }
        };
        let header = Header {
            version: if version == Version::Luks1 { 1 } else { 2 },
            uuid: new_uuid()?.to_string(),
            label: options.label.clone(),
            payload_offset,
            payload_len: None,
            encryption,
            sector_size: sector_size as usize,
            first_sector: 0,
            keyslots: vec![keyslot.clone()],
            unused: vec![],
            allow_discards: false,
        };
        let material = keyslot.fill(secret, &volume_key)?;
        Ok(New { header, keyslot, volume_key, material })
    }

    fn header_bytes(&self) -> Result<Vec<u8>, Error> {
        if self.header.version == 1 {
            return Ok(v1::to_bytes(&self.header, &self.keyslot)?.to_vec());
        }
        v2::to_bytes(&self.header, &json::to_text(&self.header, &self.keyslot)?)
    }
}

fn new_uuid() -> Result<Uuid, Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(Error::Random)?;
    Ok(Builder::from_random_bytes(bytes).into_uuid())
}

fn random(len: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; len];
    getrandom::fill(&mut bytes).map_err(Error::Random)?;
    Ok(bytes)
}

fn digest_of(volume_key: &[u8], version: Version, hash: Hash) -> Result<KeyDigest, Error> {
    let (iterations, salt) = (DIGEST_ITERATIONS, random(SALT)?);
    let len = if version == Version::Luks1 { 20 } else { hash.digest_len() };
    let mut digest = vec![0; len];
    hash.pbkdf2(volume_key, &salt, iterations, &mut digest);
    Ok(KeyDigest { hash, iterations, salt, digest })
}
