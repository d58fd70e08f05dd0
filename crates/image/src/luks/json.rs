//! The JSON metadata of LUKS2. Source: LUKS2 On-Disk Format Specification 1.1.1, section 3.

use std::collections::BTreeMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use super::kdf::Argon2Kind;
use super::{Encryption, Error, Hash, Header, Kdf, KeyDigest, Keyslot, copies};

/// As many keyslots, segments and digests as cryptsetup knows, of each.
const MOST: usize = 32;
/// Bytes of a salt or digest.
const BINARY: usize = 1024;
const SLOT_PREFERRED: u8 = 2;
const SLOT_IGNORED: u8 = 0;

/// Objects by their numbers, each looked at only once it is known to matter: what is not understood
/// need not be.
type Objects<'a> = BTreeMap<&'a str, &'a RawValue>;

#[derive(Deserialize)]
struct Metadata<'a> {
    #[serde(borrow)]
    keyslots: Objects<'a>,
    #[serde(borrow)]
    segments: Objects<'a>,
    #[serde(borrow)]
    digests: Objects<'a>,
    #[serde(borrow)]
    config: Config<'a>,
}

#[derive(Deserialize)]
struct Config<'a> {
    #[serde(default)]
    flags: Vec<String>,
    #[serde(borrow)]
    requirements: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Requirements {
    #[serde(default)]
    mandatory: Vec<String>,
}

#[derive(Deserialize)]
struct Kind {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    flags: Vec<String>,
}

#[derive(Deserialize, Serialize)]
struct Segment {
    #[serde(rename = "type")]
    kind: String,
    offset: Decimal,
    /// A number of bytes, or "dynamic".
    size: String,
    iv_tweak: Decimal,
    encryption: String,
    sector_size: u32,
    #[serde(skip_serializing)]
    integrity: Option<serde_json::Value>,
}

#[derive(Deserialize, Serialize)]
struct Slot {
    #[serde(rename = "type")]
    kind: String,
    key_size: usize,
    area: Area,
    kdf: SlotKdf,
    af: Splitter,
    #[serde(skip_serializing)]
    priority: Option<u8>,
}

#[derive(Deserialize, Serialize)]
struct Area {
    #[serde(rename = "type")]
    kind: String,
    offset: Decimal,
    size: Decimal,
    encryption: String,
    key_size: usize,
}

#[derive(Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum SlotKdf {
    Pbkdf2 { hash: String, iterations: u32, salt: Binary },
    Argon2i { time: u32, memory: u32, cpus: u32, salt: Binary },
    Argon2id { time: u32, memory: u32, cpus: u32, salt: Binary },
}

#[derive(Deserialize, Serialize)]
struct Splitter {
    #[serde(rename = "type")]
    kind: String,
    stripes: usize,
    hash: String,
}

#[derive(Deserialize, Serialize)]
struct Digest {
    #[serde(rename = "type")]
    kind: String,
    keyslots: Vec<String>,
    segments: Vec<String>,
    hash: String,
    iterations: u32,
    salt: Binary,
    digest: Binary,
}

/// A number written as text, for JSON readers that only have floating point.
#[derive(Clone, Copy)]
struct Decimal(u64);

impl<'de> Deserialize<'de> for Decimal {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Decimal, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map(Decimal).map_err(serde::de::Error::custom)
    }
}

impl Serialize for Decimal {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&self.0)
    }
}

/// Bytes in base64.
struct Binary(Vec<u8>);

impl<'de> Deserialize<'de> for Binary {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Binary, D::Error> {
        let text = String::deserialize(from)?;
        if text.len() > BINARY * 4 / 3 + 4 {
            return Err(serde::de::Error::custom("a salt or digest of more than 1 KiB"));
        }
        BASE64_STANDARD.decode(text).map(Binary).map_err(serde::de::Error::custom)
    }
}

impl Serialize for Binary {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&BASE64_STANDARD.encode(&self.0))
    }
}

fn read<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, Error> {
    serde_json::from_slice(text).map_err(|error| Error::Json(error.to_string()))
}

fn kind_of(object: &RawValue) -> Result<Kind, Error> {
    read(object.get().as_bytes())
}

fn number_of(key: &str) -> Result<u32, Error> {
    key.parse().map_err(|_| Error::Json(format!("{} is not an object's number", super::shown(key))))
}

/// Parse the metadata of a header whose copies are `copy_len` bytes each.
pub(crate) fn parse(text: &[u8], copy_len: u64) -> Result<Header, Error> {
    let all: Metadata<'_> = read(text)?;
    for objects in [&all.keyslots, &all.segments, &all.digests] {
        if objects.len() > MOST {
            return Err(Error::Json(format!(
                "{} objects of a kind, at most {MOST}",
                objects.len()
            )));
        }
    }
    if let Some(requirements) = all.config.requirements {
        let needs: Requirements = read(requirements.get().as_bytes())?;
        if !needs.mandatory.is_empty() {
            return Err(Error::Unknown {
                what: "what the header requires of its reader,",
                found: super::shown(&needs.mandatory.join(", ")),
                hint: " (a reencryption under way? finish it with cryptsetup reencrypt)",
            });
        }
    }
    let (number, segment) = the_segment(&all.segments)?;
    let (payload_offset, payload_len) = place_of(&segment, copy_len)?;
    let mut found = vec![];
    let mut key_len = None;
    for (key, object) in &all.keyslots {
        if kind_of(object)?.kind != "luks2" {
            continue;
        }
        let slot: Slot = read(object.get().as_bytes())?;
        // A slot that no digest binds to the segment holds another key.
        let Some(digest) = digest_for(&all.digests, key, number)? else { continue };
        let priority = slot.priority.unwrap_or(1);
        if priority == SLOT_IGNORED {
            continue;
        }
        let keyslot = keyslot(number_of(key)?, slot, digest, copy_len)?;
        key_len = key_len.or(Some(keyslot.key_len));
        if key_len != Some(keyslot.key_len) {
            return Err(Error::Json("keyslots of one segment with keys of different sizes".into()));
        }
        found.push((priority != SLOT_PREFERRED, keyslot));
    }
    found.sort_by_key(|(later, keyslot)| (*later, keyslot.index));
    // Without a slot the key's size is not told; then nothing can be opened anyway.
    let encryption = Encryption::parse(&segment.encryption, key_len.unwrap_or(64))?;
    Ok(Header {
        version: 2,
        uuid: String::new(),
        label: String::new(),
        payload_offset,
        payload_len,
        encryption,
        sector_size: segment.sector_size as usize,
        first_sector: segment.iv_tweak.0,
        keyslots: found.into_iter().map(|(_, keyslot)| keyslot).collect(),
        unused: vec![],
        allow_discards: all.config.flags.iter().any(|flag| flag == "allow-discards"),
    })
}

/// The one segment of the payload, apart from those that a reencryption keeps.
fn the_segment<'a>(segments: &Objects<'a>) -> Result<(&'a str, Segment), Error> {
    let mut found = None;
    for (number, object) in segments {
        let Kind { kind, flags } = kind_of(object)?;
        if flags.iter().any(|flag| flag.starts_with("backup-")) {
            continue;
        }
        if kind != "crypt" {
            let found = super::shown(&kind);
            return Err(Error::Unknown { what: "a LUKS2 segment of type", found, hint: "" });
        }
        let segment: Segment = read(object.get().as_bytes())?;
        if segment.integrity.is_some() {
            return Err(Error::Unknown {
                what: "a LUKS2 segment with",
                found: "integrity".into(),
                hint: ": it needs dm-integrity in the kernel",
            });
        }
        if found.replace((*number, segment)).is_some() {
            let found = "more than one".into();
            return Err(Error::Unknown { what: "a LUKS2 payload of", found, hint: " segment" });
        }
    }
    found.ok_or_else(|| Error::Json("there is no segment".into()))
}

/// Offset and length of the payload.
fn place_of(segment: &Segment, copy_len: u64) -> Result<(u64, Option<u64>), Error> {
    let Segment { offset: Decimal(offset), sector_size, .. } = *segment;
    if ![512, 1024, 2048, 4096].contains(&sector_size) {
        let found = sector_size.into();
        let wanted = "512, 1024, 2048 or 4096";
        return Err(Error::Field { what: "sector size", found, wanted });
    }
    let sector = u64::from(sector_size);
    if offset < 2 * copy_len || offset % sector != 0 || offset > i64::MAX as u64 / 2 {
        return Err(Error::Field {
            what: "payload offset",
            found: offset,
            wanted: "a multiple of the sector size behind both headers (detached headers are not \
                     supported)",
        });
    }
    let len = match segment.size.as_str() {
        "dynamic" => None,
        text => Some(text.parse::<u64>().map_err(|error| {
            Error::Json(format!("the segment's size {}: {error}", super::shown(text)))
        })?),
    };
    match len {
        Some(len) if len == 0 || len % sector != 0 || len > i64::MAX as u64 / 2 => {
            let wanted = "a multiple of the sector size, and not 0";
            Err(Error::Field { what: "payload size", found: len, wanted })
        }
        len => Ok((offset, len)),
    }
}

/// The digest that binds the slot to the segment.
fn digest_for(
    digests: &Objects<'_>,
    slot: &str,
    segment: &str,
) -> Result<Option<KeyDigest>, Error> {
    for object in digests.values() {
        if kind_of(object)?.kind != "pbkdf2" {
            continue;
        }
        let digest: Digest = read(object.get().as_bytes())?;
        let has = |list: &[String], number: &str| list.iter().any(|it| it == number);
        if !has(&digest.keyslots, slot) || !has(&digest.segments, segment) {
            continue;
        }
        // A digest that says nothing would fit every key.
        if !(16..=BINARY).contains(&digest.digest.0.len()) {
            let found = digest.digest.0.len() as u64;
            let wanted = "16 to 1024 bytes";
            return Err(Error::Field { what: "digest's length", found, wanted });
        }
        return Ok(Some(KeyDigest {
            hash: Hash::parse(&digest.hash)?,
            iterations: digest.iterations,
            salt: digest.salt.0,
            digest: digest.digest.0,
        }));
    }
    Ok(None)
}

fn keyslot(index: u32, slot: Slot, digest: KeyDigest, copy_len: u64) -> Result<Keyslot, Error> {
    let unknown =
        |what, found: &str| Err(Error::Unknown { what, found: super::shown(found), hint: "" });
    if slot.area.kind != "raw" {
        return unknown("a keyslot area of type", &slot.area.kind);
    }
    if slot.af.kind != "luks1" {
        return unknown("an anti-forensic splitter of type", &slot.af.kind);
    }
    let kdf = match slot.kdf {
        SlotKdf::Pbkdf2 { hash, iterations, salt } => {
            Kdf::Pbkdf2 { hash: Hash::parse(&hash)?, iterations, salt: salt.0 }
        }
        SlotKdf::Argon2i { time, memory, cpus, salt } => {
            Kdf::Argon2 { kind: Argon2Kind::I, time, memory, cpus, salt: salt.0 }
        }
        SlotKdf::Argon2id { time, memory, cpus, salt } => {
            Kdf::Argon2 { kind: Argon2Kind::Id, time, memory, cpus, salt: salt.0 }
        }
    };
    let keyslot = Keyslot {
        index,
        kdf,
        encryption: Encryption::parse(&slot.area.encryption, slot.area.key_size)?,
        offset: slot.area.offset.0,
        stripes: slot.af.stripes,
        hash: Hash::parse(&slot.af.hash)?,
        key_len: slot.key_size,
        digest,
    };
    let needed = keyslot.area_len()? as u64;
    let offset = keyslot.offset;
    if offset < 2 * copy_len || offset > i64::MAX as u64 / 2 || slot.area.size.0 < needed {
        return Err(Error::Field {
            what: "key material's offset",
            found: offset,
            wanted: "behind both headers, with room for all stripes",
        });
    }
    Ok(keyslot)
}

/// The metadata of a new header with one keyslot.
pub(crate) fn to_text(header: &Header, keyslot: &Keyslot) -> Result<String, Error> {
    #[derive(Serialize)]
    struct Tables {
        keyslots: BTreeMap<u32, Slot>,
        tokens: BTreeMap<u32, ()>,
        segments: BTreeMap<u32, Segment>,
        digests: BTreeMap<u32, Digest>,
        config: Sizes,
    }
    #[derive(Serialize)]
    struct Sizes {
        json_size: Decimal,
        keyslots_size: Decimal,
    }
    let binary = |bytes: &[u8]| Binary(bytes.to_vec());
    let kdf = match &keyslot.kdf {
        Kdf::Pbkdf2 { hash, iterations, salt } => SlotKdf::Pbkdf2 {
            hash: hash.name().into(),
            iterations: *iterations,
            salt: binary(salt),
        },
        Kdf::Argon2 { kind, time, memory, cpus, salt } => {
            let (time, memory, cpus, salt) = (*time, *memory, *cpus, binary(salt));
            match kind {
                Argon2Kind::I => SlotKdf::Argon2i { time, memory, cpus, salt },
                Argon2Kind::Id => SlotKdf::Argon2id { time, memory, cpus, salt },
            }
        }
    };
    let slot = Slot {
        kind: "luks2".into(),
        key_size: keyslot.key_len,
        area: Area {
            kind: "raw".into(),
            offset: Decimal(keyslot.offset),
            size: Decimal((keyslot.area_len()? as u64).next_multiple_of(4096)),
            encryption: keyslot.encryption.name().into(),
            key_size: keyslot.encryption.key_len(),
        },
        kdf,
        af: Splitter {
            kind: "luks1".into(),
            stripes: keyslot.stripes,
            hash: keyslot.hash.name().into(),
        },
        priority: None,
    };
    let segment = Segment {
        kind: "crypt".into(),
        offset: Decimal(header.payload_offset),
        size: header.payload_len.map_or("dynamic".into(), |len| len.to_string()),
        iv_tweak: Decimal(header.first_sector),
        encryption: header.encryption.name().into(),
        sector_size: header.sector_size as u32,
        integrity: None,
    };
    let digest = Digest {
        kind: "pbkdf2".into(),
        keyslots: vec![keyslot.index.to_string()],
        segments: vec!["0".into()],
        hash: keyslot.digest.hash.name().into(),
        iterations: keyslot.digest.iterations,
        salt: binary(&keyslot.digest.salt),
        digest: binary(&keyslot.digest.digest),
    };
    let copy = copies::PLACES[0];
    let tables = Tables {
        keyslots: [(keyslot.index, slot)].into(),
        tokens: BTreeMap::new(),
        segments: [(0, segment)].into(),
        digests: [(0, digest)].into(),
        config: Sizes {
            json_size: Decimal(copy - copies::BINARY_LEN as u64),
            keyslots_size: Decimal(header.payload_offset - 2 * copy),
        },
    };
    serde_json::to_string(&tables).map_err(|error| Error::Json(error.to_string()))
}
