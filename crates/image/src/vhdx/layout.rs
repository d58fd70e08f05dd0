//! Headers, region table and metadata of a VHDX ([MS-VHDX] 2.2, 2.6).

use ringtap_io::Io;

use super::header::Header;
use super::log::{Changes, replay};
use super::{bad, os};
use crate::bytes::{get, put};
use crate::{Container, OpenError};

const HEADERS: [u64; 2] = [64 << 10, 128 << 10];
const REGIONS: [u64; 2] = [192 << 10, 256 << 10];
const TABLE: usize = 64 << 10;
/// The largest disk: 64 TiB.
const MOST: u64 = 64 << 40;
const DAMAGED: &str = "the image is damaged, or no VHDX";
const NEWER: &str = "it needs a newer reader";

const BAT: u128 = 0x2DC2_7766_F623_4200_9D64_115E_9BFD_4A08;
const METADATA: u128 = 0x8B7C_A206_4790_4B9A_B8FE_575F_050F_886E;
const FILE_PARAMETERS: u128 = 0xCAA1_6737_FA36_4D43_B3B6_33F0_AA44_E76B;
const DISK_SIZE: u128 = 0x2FA5_4224_CD1B_4876_B211_5DBE_D83B_F4B8;
const LOGICAL_SECTOR: u128 = 0x8141_BF1D_A96F_4709_BA47_F233_A8FA_AB5F;
const PHYSICAL_SECTOR: u128 = 0xCDA3_48C7_445D_4471_9CC9_E988_5251_C556;
const PAGE_83: u128 = 0xBECA_12AB_B2E6_4523_93EF_C309_E000_C746;
const PARENT_LOCATOR: u128 = 0xA8D3_5F2D_B30B_454D_ABF7_D3D8_4834_AB0C;

/// What is known of an image.
pub(super) struct Layout {
    pub(super) changes: Changes,
    /// Bytes of the disk.
    pub(super) size: u64,
    pub(super) block_size: u64,
    pub(super) logical_sector: u32,
    pub(super) physical_sector: u32,
    /// Where the block allocation table lies.
    pub(super) table_at: u64,
    /// Payload blocks between two entries of sector bitmaps.
    pub(super) chunk_ratio: u64,
    pub(super) blocks: u64,
}

/// A GUID as the specification writes it: its first three parts are little-endian.
fn guid(bytes: &[u8], at: usize) -> u128 {
    let [a, b, c, d, e, f, g, h, rest @ ..] = get::<16>(bytes, at);
    let mut whole = [d, c, b, a, f, e, h, g, 0, 0, 0, 0, 0, 0, 0, 0];
    put(&mut whole, 8, &rest);
    u128::from_be_bytes(whole)
}

/// Whether the structure begins with its name and its checksum is right.
fn is_whole(bytes: &mut [u8], name: &[u8; 4]) -> bool {
    let sum = u32::from_le_bytes(get(bytes, 4));
    put(bytes, 4, &[0; 4]);
    get::<4>(bytes, 0) == *name && crc32c::crc32c(bytes) == sum
}

async fn read_header(io: &Io, container: &Container) -> Result<Header, OpenError> {
    let mut best: Option<Header> = None;
    for at in HEADERS {
        let mut bytes = vec![0; 4096];
        let failed = |error| os(container, "read a header of", error);
        container.read(io, at, &mut bytes).await.map_err(failed)?;
        if !is_whole(&mut bytes, b"head") {
            continue;
        }
        let (log_version, version) =
            (u16::from_le_bytes(get(&bytes, 64)), u16::from_le_bytes(get(&bytes, 66)));
        if version != 1 || log_version != 0 {
            let found = format!("version {version} with log version {log_version}");
            return Err(bad(container, at + 64, found, NEWER));
        }
        let header = Header {
            sequence: u64::from_le_bytes(get(&bytes, 8)),
            log_id: get(&bytes, 48),
            log_len: u32::from_le_bytes(get(&bytes, 68)),
            log_at: u64::from_le_bytes(get(&bytes, 72)),
        };
        if best.as_ref().is_none_or(|best| header.sequence > best.sequence) {
            best = Some(header);
        }
    }
    best.ok_or_else(|| bad(container, 64 << 10, "no header with a right checksum", DAMAGED))
}

/// Where the allocation table and the metadata lie, and how long they are.
async fn read_regions(
    io: &Io,
    container: &Container,
    changes: &Changes,
) -> Result<[(u64, u64); 2], OpenError> {
    for at in REGIONS {
        let mut bytes = vec![0; TABLE];
        let failed = |error| os(container, "read the region table of", error);
        changes.read(io, container, at, &mut bytes).await.map_err(failed)?;
        if !is_whole(&mut bytes, b"regi") {
            continue;
        }
        let count = u32::from_le_bytes(get(&bytes, 8));
        if count > 2047 {
            return Err(bad(container, at + 8, format!("a table of {count} regions"), DAMAGED));
        }
        let (mut table, mut metadata) = (None, None);
        for index in 0..count as usize {
            let from = 16 + 32 * index;
            let place = u64::from_le_bytes(get(&bytes, from + 16));
            let len = u64::from(u32::from_le_bytes(get(&bytes, from + 24)));
            let fits = place.checked_add(len).is_some_and(|end| end <= container.len());
            if !fits || place < 1 << 20 || place % (1 << 20) != 0 {
                let found = format!("a region of {len} bytes at {place}");
                return Err(bad(container, at + from as u64, found, DAMAGED));
            }
            match guid(&bytes, from) {
                BAT => table = Some((place, len)),
                METADATA => metadata = Some((place, len)),
                _ if get::<4>(&bytes, from + 28)[0] & 1 == 0 => {}
                other => {
                    let found = format!("region {other:032x}, which a reader must know");
                    return Err(bad(container, at + from as u64, found, NEWER));
                }
            }
        }
        return match (table, metadata) {
            (Some(table), Some(metadata)) => Ok([table, metadata]),
            _ => Err(bad(container, at, "no allocation table or no metadata", DAMAGED)),
        };
    }
    Err(bad(container, 192 << 10, "no region table with a right checksum", DAMAGED))
}

impl Layout {
    pub(super) async fn read(io: &Io, container: &Container) -> Result<Layout, OpenError> {
        let mut name = [0; 8];
        let failed = |error| os(container, "read", error);
        container.read(io, 0, &mut name).await.map_err(failed)?;
        if &name != b"vhdxfile" || container.len() < 1 << 20 {
            return Err(bad(container, 0, "no VHDX file identifier", "is it a VHDX?"));
        }
        let header = read_header(io, container).await?;
        let changes = replay(io, container, &header).await?;
        let [(table_at, table_len), metadata] = read_regions(io, container, &changes).await?;
        let mut layout = read_metadata(io, container, changes, metadata).await?;
        layout.table_at = table_at;
        let entries = layout.blocks + layout.blocks.saturating_sub(1) / layout.chunk_ratio;
        if entries * 8 > table_len {
            let found = format!("a table of {table_len} bytes for {} blocks", layout.blocks);
            return Err(bad(container, table_at, found, DAMAGED));
        }
        Ok(layout)
    }
}

async fn read_metadata(
    io: &Io,
    container: &Container,
    changes: Changes,
    (at, len): (u64, u64),
) -> Result<Layout, OpenError> {
    let wrong =
        |offset: u64, found: String, advice| Err(bad(container, at + offset, found, advice));
    let failed = |error| os(container, "read the metadata of", error);
    if len < TABLE as u64 {
        return wrong(0, format!("metadata of {len} bytes"), DAMAGED);
    }
    let mut bytes = vec![0; TABLE];
    changes.read(io, container, at, &mut bytes).await.map_err(failed)?;
    let count = u16::from_le_bytes(get(&bytes, 10));
    if get::<8>(&bytes, 0) != *b"metadata" || count > 1023 {
        return wrong(0, format!("no metadata table, or one of {count} entries"), DAMAGED);
    }
    let (mut parameters, mut size, mut logical, mut physical) = (None, None, None, None);
    for index in 0..usize::from(count) {
        let from = 32 + 32 * index;
        let word = |at| u32::from_le_bytes(get(&bytes, at));
        let (offset, item_len, flags) = (word(from + 16), word(from + 20), word(from + 24));
        let mut item = [0; 8];
        if u64::from(offset) + 8 <= len {
            let place = at + u64::from(offset);
            changes.read(io, container, place, &mut item).await.map_err(failed)?;
        } else if item_len > 0 {
            return wrong(from as u64, format!("an item at {offset}, outside the region"), DAMAGED);
        }
        let first = u32::from_le_bytes(get(&item, 0));
        match guid(&bytes, from) {
            FILE_PARAMETERS => parameters = Some((first, u32::from_le_bytes(get(&item, 4)))),
            DISK_SIZE => size = Some(u64::from_le_bytes(item)),
            LOGICAL_SECTOR => logical = Some(first),
            PHYSICAL_SECTOR => physical = Some(first),
            PAGE_83 | PARENT_LOCATOR => {}
            _ if flags & 4 == 0 => {}
            other => {
                return wrong(
                    from as u64,
                    format!("item {other:032x}, which a reader must know"),
                    NEWER,
                );
            }
        }
    }
    let (Some((block_size, flags)), Some(size), Some(logical)) = (parameters, size, logical) else {
        return wrong(0, "no file parameters, disk size or sector size".to_owned(), DAMAGED);
    };
    if flags & 2 != 0 {
        let advice = "differencing VHDX is not read here: merge it with its parent first";
        return wrong(0, "it has a parent".to_owned(), advice);
    }
    let sane = block_size.is_power_of_two() && (1 << 20..=256 << 20).contains(&block_size);
    if !sane || ![512, 4096].contains(&logical) {
        return wrong(0, format!("blocks of {block_size} bytes, sectors of {logical}"), DAMAGED);
    }
    if size == 0 || size > MOST || size % u64::from(logical) != 0 {
        return wrong(0, format!("a disk of {size} bytes"), "a VHDX's disk has up to 64 TiB");
    }
    let block_size = u64::from(block_size);
    Ok(Layout {
        changes,
        size,
        block_size,
        logical_sector: logical,
        physical_sector: physical
            .filter(|size| [512, 4096].contains(size))
            .unwrap_or(4096)
            .max(logical),
        table_at: 0,
        chunk_ratio: (u64::from(logical) << 23) / block_size,
        blocks: size.div_ceil(block_size),
    })
}
