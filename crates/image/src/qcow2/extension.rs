//! Header extensions (docs/interop/qcow2 of QEMU: "Header extensions").

use super::header_error::HeaderError;
use crate::bytes::{be32, be64};

/// The backing file's format, a string.
pub const BACKING_FORMAT: u32 = 0xe279_2aca;
/// Names of features, for the messages of those who do not know them.
pub const FEATURE_NAMES: u32 = 0x6803_f857;
/// Where the bitmap directory lies.
pub const BITMAPS: u32 = 0x2385_2875;
/// Where the encryption's own header lies.
pub const ENCRYPTION: u32 = 0x0537_be77;
/// The external data file's name, a string.
pub const DATA_FILE: u32 = 0x4441_5441;

/// One header extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension {
    /// What it is.
    pub kind: u32,
    /// Its data, without padding.
    pub data: Vec<u8>,
}

/// The bitmaps extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bitmaps {
    /// Number of bitmaps, at least 1.
    pub count: u32,
    /// Bytes of the bitmap directory.
    pub directory_size: u64,
    /// Where the bitmap directory lies.
    pub directory_offset: u64,
}

impl Bitmaps {
    /// From the extension's data.
    pub fn parse(data: &[u8]) -> Option<Bitmaps> {
        Some(Bitmaps {
            count: be32(data, 0)?,
            directory_size: be64(data, 8)?,
            directory_offset: be64(data, 16)?,
        })
    }

    /// The extension's data.
    pub fn to_bytes(self) -> Vec<u8> {
        let mut bytes = u64::from(self.count).rotate_left(32).to_be_bytes().to_vec();
        bytes.extend_from_slice(&self.directory_size.to_be_bytes());
        bytes.extend_from_slice(&self.directory_offset.to_be_bytes());
        bytes
    }
}

/// The full disk encryption header pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encryption {
    /// Where the LUKS header lies, a multiple of the cluster size.
    pub offset: u64,
    /// Its bytes, with the key material.
    pub len: u64,
}

impl Encryption {
    /// From the extension's data.
    pub fn parse(data: &[u8]) -> Option<Encryption> {
        Some(Encryption { offset: be64(data, 0)?, len: be64(data, 8)? })
    }

    /// The extension's data.
    pub fn to_bytes(self) -> Vec<u8> {
        [self.offset.to_be_bytes(), self.len.to_be_bytes()].concat()
    }
}

/// The extensions between `at` and the backing file's name, or the end of `bytes`.
pub(super) fn parse(
    bytes: &[u8],
    mut at: usize,
    name_at: u64,
) -> Result<Vec<Extension>, HeaderError> {
    let end = match name_at {
        0 => bytes.len(),
        offset => usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len()),
    };
    let area = bytes.get(..end).unwrap_or(bytes);
    let mut extensions = Vec::new();
    while let (Some(kind), Some(len)) = (be32(area, at), be32(area, at + 4)) {
        if kind == 0 {
            break;
        }
        let from = at + 8;
        let (len, room) = (len as usize, area.len() - from);
        let Some(data) = area.get(from..from.saturating_add(len)) else {
            let (len, room) = (len as u64, room as u64);
            return Err(HeaderError::Extension { kind, at, len, room });
        };
        let content = |what| Err(HeaderError::Content { kind, what });
        if let Some(at) = extensions.iter().position(|earlier: &Extension| earlier.kind == kind) {
            if kind != BACKING_FORMAT {
                return content("it is there twice");
            }
            // Of this one QEMU's programs take the last.
            extensions.remove(at);
        }
        match kind {
            BITMAPS if len != 24 => return content("it must have 24 bytes"),
            ENCRYPTION if len != 16 => return content("it must have 16 bytes"),
            BACKING_FORMAT if len > 15 => return content("a format's name has at most 15 bytes"),
            _ => extensions.push(Extension { kind, data: data.to_vec() }),
        }
        at = from + len.next_multiple_of(8);
    }
    Ok(extensions)
}

/// Append the extensions and the end marker.
pub(super) fn write(extensions: &[Extension], bytes: &mut Vec<u8>) {
    for extension in extensions {
        bytes.extend_from_slice(&extension.kind.to_be_bytes());
        bytes.extend_from_slice(&(extension.data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&extension.data);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
    bytes.extend_from_slice(&[0; 8]);
}

/// The feature name table that images made here carry.
pub fn our_feature_names() -> Extension {
    const NAMES: [(u8, u8, &str); 8] = [
        (0, 0, "dirty bit"),
        (0, 1, "corrupt bit"),
        (0, 2, "external data file"),
        (0, 3, "compression type"),
        (0, 4, "extended L2 entries"),
        (1, 0, "lazy refcounts"),
        (2, 0, "bitmaps"),
        (2, 1, "raw external data"),
    ];
    let mut data = Vec::new();
    for (set, bit, name) in NAMES {
        data.extend_from_slice(&[set, bit]);
        data.extend_from_slice(name.as_bytes());
        data.resize(data.len().next_multiple_of(48), 0);
    }
    Extension { kind: FEATURE_NAMES, data }
}

/// The names that an image's own table gives to these bits of a feature set.
pub(super) fn feature_names(extensions: &[Extension], set: u8, bits: u64) -> String {
    let table = extensions.iter().find(|extension| extension.kind == FEATURE_NAMES);
    let table = table.map_or(&[][..], |extension| &extension.data);
    let name_of = |bit: u8| {
        let entry = table.chunks_exact(48).find(|entry| entry.starts_with(&[set, bit]))?;
        let name = entry.get(2..)?.split(|byte| *byte == 0).next()?;
        Some(String::from_utf8_lossy(name).escape_debug().to_string())
    };
    let names = (0..64u8).filter(|bit| bits >> bit & 1 == 1).map(|bit| match name_of(bit) {
        Some(name) => format!("{name:?} (bit {bit})"),
        None => format!("bit {bit}"),
    });
    names.collect::<Vec<_>>().join(", ")
}
