//! Making a VHD larger; a fixed one smaller, too.
//!
//! Whenever the power is cut, one of the footers counts, and it tells the old size or the new one. The
//! only footer of a fixed disk is at the file's end: there it is up to the file system that a file is
//! never longer than what was written to it, as with ext4, XFS and btrfs; elsewhere the disk's bytes
//! are left without a footer, and the image is refused.

use ringtap_io::Io;

use super::footer::{Footer, Kind, MOST, SECTOR};
use super::header::LEN;
use super::layout::Layout;
use super::sabotage::{Sabotage, asked};
use super::{BLOCK_ALIGN, bad, end_with_footer, os};
use crate::{Container, Error, OpenError};

/// Let the disk have `size` bytes, a multiple of 512. The image is at rest and has no restart log. `parent` is how many
/// bytes its parent's disk has, where there is one.
pub async fn resize(
    io: &Io,
    container: &Container,
    size: u64,
    parent: Option<u64>,
) -> Result<(), OpenError> {
    let layout = Layout::read(io, container).await?;
    let refused = |found: String, advice| Err(bad(container, 48, found, advice));
    if size == 0 || size > MOST {
        let found = format!("a disk of {size} bytes is asked for");
        return refused(found, "a VHD's disk has up to 2040 GiB; qcow2 goes further");
    }
    if !container.traits().regular {
        let found = "it lies on a block device, at whose end its footer is".to_owned();
        return refused(found, "convert it into an image of the new size");
    }
    if let Some(parent) = parent.filter(|parent| size > layout.size && *parent > layout.size) {
        let found = format!(
            "its disk has {} bytes, its parent's {parent}, which a larger disk would show",
            layout.size
        );
        return refused(found, "convert it into an image of its own, and resize that");
    }
    let footer = layout.footer.resized(size);
    let failed = |error| os(container, "change the size of", error);
    match layout.sparse {
        None => fixed(io, container, layout.size, &footer).await.map_err(failed),
        Some(_) if size < layout.size => {
            let found = "a dynamic VHD keeps what lies past a smaller end".to_owned();
            refused(found, "convert it into an image of the new size")
        }
        Some(sparse) => {
            let mut header = sparse.header;
            let needed = size.div_ceil(u64::from(header.block_size));
            let mut data_end = sparse.data_end;
            if needed > u64::from(header.entries) {
                let mut table = sparse.table;
                header.entries = u32::try_from(needed).unwrap_or(u32::MAX);
                header.table_at = data_end.next_multiple_of(BLOCK_ALIGN);
                if let Err(error) = header.blocks(size) {
                    return refused(error.to_string(), "convert it into an image of larger blocks");
                }
                let words = (header.table_size() / 4) as usize;
                table.resize(words, super::header::UNUSED);
                let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
                // The footer that this covers has its copy at byte 0.
                head(io, container, &layout.footer).await.map_err(failed)?;
                let whole: [u8; LEN] = header.to_bytes();
                // All that changes lies in one sector.
                let changed = whole.get(..SECTOR as usize).unwrap_or(&whole);
                if asked(Sabotage::TableLate) {
                    container.write(io, footer.header_at, changed).await.map_err(failed)?;
                }
                container.write(io, header.table_at, &bytes).await.map_err(failed)?;
                // A map of full blocks must not be taken for one.
                data_end = header.table_at + header.table_size();
                end_with_footer(io, container, &layout.footer, data_end).await.map_err(failed)?;
                container.write(io, footer.header_at, changed).await.map_err(failed)?;
                container.sync(io).await.map_err(failed)?;
            }
            head(io, container, &footer).await.map_err(failed)?;
            end_with_footer(io, container, &footer, data_end).await.map_err(failed)
        }
    }
}

/// Write the footer's copy at the beginning, and see that it is stable.
async fn head(io: &Io, container: &Container, footer: &Footer) -> Result<(), Error> {
    debug_assert!(footer.kind != Kind::Fixed, "a fixed disk begins with its guest's bytes");
    container.write(io, 0, footer.bytes()).await?;
    container.sync(io).await
}

async fn fixed(io: &Io, container: &Container, old: u64, footer: &Footer) -> Result<(), Error> {
    let size = footer.current_size;
    // What lies there is lost, or is nothing yet.
    container.write(io, size, footer.bytes()).await?;
    container.sync(io).await?;
    if size > old {
        // The old footer, as far as it is not the new one.
        let len = (size - old).min(SECTOR) as usize;
        container.write(io, old, &vec![0; len]).await?;
    }
    // Whole blocks may have made it longer.
    container.set_len(io, size + SECTOR).await?;
    container.sync(io).await
}
