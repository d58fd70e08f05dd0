//! Reading headers, and opening them with a secret.

use std::sync::Arc;

use ringtap_io::{Io, LockedBytes};

use super::kdf::Spent;
use super::v2::{Copy, Whole};
use super::{Error, Header, Keyslot, MAGIC, copies, first_bytes, v1, v2};
use crate::{Container, Error as IoError, Secret, SectorCipher};

/// The longest header with its key material, as cryptsetup makes them.
const LONGEST: u64 = 16 << 20;

/// Parse the header that `bytes` begin with, of either version; its key material is not looked at.
pub fn parse(bytes: &[u8]) -> Result<Header, Error> {
    match version(bytes) {
        Ok(1) => v1::parse(bytes),
        Ok(2) | Err(Error::Magic { .. }) => {
            let first = v2::parse_copy(bytes, Copy::First, 0);
            let second = second_places(first.as_ref().ok().and(bytes.get(..copies::BINARY_LEN)))
                .into_iter()
                .map(|place| {
                    let rest = usize::try_from(place).ok().and_then(|place| bytes.get(place..));
                    v2::parse_copy(rest.unwrap_or_default(), Copy::Second, place)
                });
            chosen(bytes, first, best(second))
        }
        Ok(found) => Err(Error::Version { found }),
        Err(error) => Err(error),
    }
}

/// Read the header at the beginning of a file or block device. Where one copy of a LUKS2 header is
/// damaged, the other counts; neither is written to.
pub async fn read_header(io: &Io, container: &Container) -> Result<Header, Error> {
    let start = read(io, container, 0, copies::BINARY_LEN).await?;
    match version(&start) {
        Ok(1) => return v1::parse(&start),
        Ok(2) | Err(Error::Magic { .. }) => {}
        Ok(found) => return Err(Error::Version { found }),
        Err(error) => return Err(error),
    }
    let first = match v2::copy_len(&start, Copy::First, 0) {
        Ok(len) => v2::parse_copy(&read(io, container, 0, len as usize).await?, Copy::First, 0),
        Err(error) => Err(error),
    };
    let mut second = vec![];
    for place in second_places(first.as_ref().ok().map(|_| start.as_slice())) {
        let binary = read(io, container, place, copies::BINARY_LEN).await?;
        second.push(match v2::copy_len(&binary, Copy::Second, place) {
            Ok(len) => {
                let bytes = read(io, container, place, len as usize).await?;
                v2::parse_copy(&bytes, Copy::Second, place)
            }
            Err(error) => Err(error),
        });
    }
    chosen(&start, first, best(second))
}

pub(super) fn version(start: &[u8]) -> Result<u16, Error> {
    match start.strip_prefix(MAGIC) {
        Some([high, low, ..]) => Ok(u16::from_be_bytes([*high, *low])),
        _ => Err(Error::Magic { found: first_bytes(start) }),
    }
}

/// Where to look for the second copy: where the first says, or anywhere it may be.
fn second_places(first: Option<&[u8]>) -> Vec<u64> {
    match first.map(|first| v2::copy_len(first, Copy::First, 0)) {
        Some(Ok(len)) => vec![len],
        _ => copies::PLACES.to_vec(),
    }
}

/// The whole one with the largest number, else the first error that is more than "nothing here".
fn best(copies: impl IntoIterator<Item = Result<Whole, Error>>) -> Result<Whole, Error> {
    let better = |one: Result<Whole, Error>, other: Result<Whole, Error>| match (&one, &other) {
        (Ok(a), Ok(b)) if b.seqid > a.seqid => other,
        (Ok(_), _) => one,
        (Err(_), Ok(_)) | (Err(Error::Magic { .. } | Error::Short { .. }), Err(_)) => other,
        (Err(_), Err(_)) => one,
    };
    let nothing = Err(Error::Magic { found: "nothing".into() });
    copies.into_iter().reduce(better).unwrap_or(nothing)
}

/// Where neither bears a mark, it is no LUKS at all.
fn chosen(
    start: &[u8],
    first: Result<Whole, Error>,
    second: Result<Whole, Error>,
) -> Result<Header, Error> {
    match (&first, &second) {
        (Err(Error::Magic { .. }), Err(Error::Magic { .. } | Error::Short { .. })) => {
            Err(Error::Magic { found: first_bytes(start) })
        }
        _ => v2::choose(first, second),
    }
}

pub(super) async fn read(
    io: &Io,
    container: &Container,
    offset: u64,
    len: usize,
) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; len];
    let failed = |source: IoError| Error::Io { what: "read the LUKS header", source };
    container.read(io, offset, &mut bytes).await.map_err(failed)?;
    Ok(bytes)
}

/// Find the volume's key, keyslot by keyslot.
pub(crate) async fn volume_key(
    io: &Io,
    container: &Container,
    header: &Header,
    secret: &Secret,
) -> Result<LockedBytes, Error> {
    volume_key_at(io, container, 0, header, secret).await
}

/// The same of a header that begins at `start`.
pub(super) async fn volume_key_at(
    io: &Io,
    container: &Container,
    start: u64,
    header: &Header,
    secret: &Secret,
) -> Result<LockedBytes, Error> {
    let mut spent = spent_of_none(secret);
    for keyslot in &header.keyslots {
        let len = keyslot.area_len()?;
        let at = start.saturating_add(keyslot.offset);
        let need = at.saturating_add(len as u64);
        if need > container.len() {
            let have = container.len();
            return Err(Error::Short { what: "the key material of a keyslot", need, have });
        }
        let material = read(io, container, at, len).await?;
        if let Some(key) = open(keyslot, &mut spent, secret, &material)? {
            return Ok(key);
        }
    }
    Err(header.refused(secret))
}

/// What has been spent on each secret: nothing yet.
fn spent_of_none(secret: &Secret) -> Vec<Spent> {
    secret.each().map(|_| Spent::default()).collect()
}

/// The volume's key, where a secret or one that may take its place opens the keyslot.
fn open(
    keyslot: &Keyslot,
    spent: &mut [Spent],
    secret: &Secret,
    material: &[u8],
) -> Result<Option<LockedBytes>, Error> {
    for (secret, spent) in secret.each().zip(spent) {
        if let Some(key) = keyslot.open(spent, secret, &mut material.to_vec())? {
            return Ok(Some(key));
        }
    }
    Ok(None)
}

/// Read a header that lies elsewhere, with its key material, for [`unlock_header`].
pub async fn read_header_at(
    io: &Io,
    container: &Container,
    offset: u64,
    len: u64,
) -> Result<Vec<u8>, Error> {
    let end = offset.checked_add(len).filter(|_| len <= LONGEST).ok_or(Error::Field {
        what: "length with its key material",
        found: len,
        wanted: "at most 16 MiB",
    })?;
    let have = container.len();
    if end > have {
        return Err(Error::Short { what: "the LUKS header", need: end, have });
    }
    read(io, container, offset, len as usize).await
}

/// Open a header that is not at the beginning of its payload's file, as inside qcow2: `bytes` is all
/// of it with its key material. The cipher counts sectors from the file's own beginning.
///
/// Source: QEMU's docs/interop/qcow2, "Full disk encryption header pointer".
pub fn unlock_header(bytes: &[u8], secret: &Secret) -> Result<Arc<dyn SectorCipher>, Error> {
    let header = parse(bytes)?;
    let mut spent = spent_of_none(secret);
    for keyslot in &header.keyslots {
        let len = keyslot.area_len()?;
        let need = keyslot.offset.saturating_add(len as u64);
        let area = usize::try_from(keyslot.offset).ok().zip(usize::try_from(need).ok());
        let material = area.and_then(|(from, to)| bytes.get(from..to));
        let material = material.ok_or(Error::Short {
            what: "the key material of a keyslot",
            need,
            have: bytes.len() as u64,
        })?;
        if let Some(key) = open(keyslot, &mut spent, secret, material)? {
            return Ok(Arc::new(header.cipher(&key)?));
        }
    }
    Err(header.refused(secret))
}
