//! Another backing file for an image at rest, and an image made empty over the one it has.

use ringtap_io::Io;

use super::extension::BACKING_FORMAT;
use super::header::{MAX_NAME, autoclear, incompatible};
use super::offline::Offline;
use super::rewrite::Rewrite;
use super::tool::ToolError;
use crate::Container;
use crate::bytes::table;

/// Let the image name another backing file, with the name of its format, or none. Nothing else changes: that what it
/// reads as stays the same is up to the caller.
pub async fn set_backing(
    io: &Io,
    container: &Container,
    backing: Option<(&str, &str)>,
) -> Result<(), ToolError> {
    let mut image = Offline::open_to_change(io, container).await?;
    name_backing(&mut image, backing)?;
    image.write_header().await
}

/// The same in memory.
pub(super) fn name_backing(
    image: &mut Offline<'_>,
    backing: Option<(&str, &str)>,
) -> Result<(), ToolError> {
    if let Some((name, _)) = backing {
        if image.header.autoclear & autoclear::DATA_FILE_RAW != 0 {
            let why = "its external data file is a raw image by itself, which has no backing file";
            return Err(image.refused(why));
        }
        if !(1..=MAX_NAME).contains(&name.len()) {
            return Err(image.refused("a backing file's name has 1 to 1023 bytes"));
        }
    }
    image.header.backing_file = backing.map(|(name, _)| name.as_bytes().to_vec());
    let format = backing.map(|(_, format)| format.as_bytes().to_vec());
    image.header.set_extension(BACKING_FORMAT, format);
    image.header.make_room();
    Ok(())
}

/// Let the image hold nothing of the disk any more, so that all is read from its backing file. What
/// snapshots hold stays.
pub async fn make_empty(io: &Io, container: &Container) -> Result<(), ToolError> {
    let mut image = Offline::open_to_change(io, container).await?;
    if image.header.has(incompatible::DATA_FILE) {
        return Err(image.refused("an image with an external data file cannot be emptied"));
    }
    let (offset, size) = (image.header.l1_offset, image.header.l1_size);
    let old = image.read_table(offset, u64::from(size)).await?;

    let mut rewrite = Rewrite::of(&mut image).await?;
    rewrite.add_trees(&[(&old, -1)]).await?;
    rewrite.add(offset, u64::from(size) * 8, -1).await?;
    let empty = rewrite.put(table(&vec![0; size as usize])).await?;
    rewrite.image.header.l1_offset = empty;
    rewrite.commit().await
}
