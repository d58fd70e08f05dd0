//! Persistent dirty bitmaps of an image at rest.

use std::sync::Arc;

use ringtap_io::Io;

use super::bitmap_directory::{
    self, BitmapEntry, GRANULARITY_BITS, MAX_BITMAPS, flag, read_table, to_bytes,
};
use super::bits::Bits;
use super::extension::{self, Bitmaps};
use super::header::{MAX_NAME, OFFSET_MASK, autoclear};
use super::offline::Offline;
use super::rewrite::Rewrite;
use super::tool::ToolError;
use crate::Container;

/// What to do with the bitmaps of an image, as `qemu-img bitmap` has it.
#[derive(Clone, Debug)]
pub enum BitmapChange {
    /// Add one, enabled, all clear.
    Add {
        /// Its name.
        name: String,
        /// Bytes of the disk for each bit, a power of two; the cluster size where not given, at
        /// least 4 KiB.
        granularity: Option<u64>,
    },
    /// Remove it.
    Remove(String),
    /// Clear its bits.
    Clear(String),
    /// Note every write in it from now on.
    Enable(String),
    /// Note no write in it from now on.
    Disable(String),
    /// Set in it what is set in another one, of this image or of another.
    Merge {
        /// Its name.
        into: String,
        /// The other one's bits.
        from: Arc<Bits>,
    },
}

impl BitmapChange {
    fn name(&self) -> &str {
        match self {
            BitmapChange::Add { name, .. }
            | BitmapChange::Remove(name)
            | BitmapChange::Clear(name)
            | BitmapChange::Enable(name)
            | BitmapChange::Disable(name)
            | BitmapChange::Merge { into: name, .. } => name,
        }
    }
}

/// The bitmaps of an image.
pub async fn list_bitmaps(io: &Io, container: &Container) -> Result<Vec<BitmapEntry>, ToolError> {
    bitmap_directory::read(&Offline::open(io, container).await?).await
}

/// The bits of a bitmap that was saved.
pub async fn load_bitmap(io: &Io, container: &Container, name: &str) -> Result<Bits, ToolError> {
    let image = Offline::open(io, container).await?;
    let entries = bitmap_directory::read(&image).await?;
    let index = find(&image, &entries, name)?;
    let Some(entry) = entries.get(index) else { return Err(image.refused("no bitmap")) };
    must_be_saved(&image, entry)?;
    load(&image, entry, image.header.size).await
}

/// What was not saved lacks writes: a copy of it would hide them.
fn must_be_saved(image: &Offline<'_>, entry: &BitmapEntry) -> Result<(), ToolError> {
    if entry.is_usable() {
        return Ok(());
    }
    Err(image.refused(format!(
        "bitmap {:?} was not saved when the image was last used, and can only be removed",
        entry.name
    )))
}

/// Change the bitmaps of an image at rest: all of it or, where it fails or the power is cut, nothing.
pub async fn change_bitmaps(
    io: &Io,
    container: &Container,
    changes: &[BitmapChange],
) -> Result<(), ToolError> {
    let mut image = Offline::open_to_change(io, container).await?;
    if image.header.version < 3 {
        return Err(image.refused("version 2 has no bitmaps: convert it to compat=1.1"));
    }
    let mut entries = bitmap_directory::read(&image).await?;
    let mut rewrite = Rewrite::of(&mut image).await?;
    for change in changes {
        carry_out(&mut rewrite, &mut entries, change).await?;
    }
    put_directory(&mut rewrite, &entries).await?;
    rewrite.commit().await
}

async fn carry_out(
    rewrite: &mut Rewrite<'_, '_, '_>,
    entries: &mut Vec<BitmapEntry>,
    change: &BitmapChange,
) -> Result<(), ToolError> {
    let name = change.name();
    if let BitmapChange::Add { granularity, .. } = change {
        if entries.iter().any(|entry| entry.name == name) {
            return Err(rewrite.image.refused(format!("it has a bitmap {name:?} already")));
        }
        if !(1..=MAX_NAME).contains(&name.len()) || entries.len() >= MAX_BITMAPS as usize {
            return Err(rewrite.image.refused("names of bitmaps have 1 to 1023 bytes"));
        }
        let granularity = granularity.unwrap_or(rewrite.image.cluster().max(4096));
        let bits = granularity.trailing_zeros() as u8;
        if !granularity.is_power_of_two() || !GRANULARITY_BITS.contains(&bits) {
            let why = "a bitmap's granularity is a power of two from 512 to 2G";
            return Err(rewrite.image.refused(why));
        }
        let clear = new_bits(rewrite.image, rewrite.image.header.size, bits)?;
        let mut entry = BitmapEntry {
            table_offset: 0,
            table_size: 0,
            flags: flag::AUTO,
            kind: 1,
            granularity_bits: bits,
            name: name.to_owned(),
            odd_name: None,
            extra: Vec::new(),
        };
        put_bits(rewrite, &mut entry, &clear).await?;
        entries.push(entry);
        return Ok(());
    }
    let index = find(rewrite.image, entries, name)?;
    if let BitmapChange::Remove(_) = change {
        let entry = entries.remove(index);
        return drop_bits(rewrite, &entry).await;
    }
    let Some(entry) = entries.get_mut(index) else { return Ok(()) };
    must_be_saved(rewrite.image, entry)?;
    let size = rewrite.image.header.size;
    match change {
        BitmapChange::Enable(_) => entry.flags |= flag::AUTO,
        BitmapChange::Disable(_) => entry.flags &= !flag::AUTO,
        BitmapChange::Clear(_) => {
            let clear = new_bits(rewrite.image, size, entry.granularity_bits)?;
            drop_bits(rewrite, entry).await?;
            put_bits(rewrite, entry, &clear).await?;
        }
        BitmapChange::Merge { from, .. } => {
            if from.size() != size {
                let theirs = from.size();
                return Err(rewrite.image.refused(format!(
                    "a bitmap of a disk of {theirs} bytes cannot be merged into one of {size}"
                )));
            }
            let bits = load(rewrite.image, entry, size).await?;
            bits.merge(from);
            drop_bits(rewrite, entry).await?;
            put_bits(rewrite, entry, &bits).await?;
        }
        BitmapChange::Add { .. } | BitmapChange::Remove(_) => {}
    }
    Ok(())
}

pub(super) fn find(
    image: &Offline<'_>,
    entries: &[BitmapEntry],
    name: &str,
) -> Result<usize, ToolError> {
    entries.iter().position(|entry| entry.name == name).ok_or_else(|| {
        let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
        let there = match names.is_empty() {
            true => "none; ringtap bitmap --add makes one".to_owned(),
            false => format!("{names:?}"),
        };
        image.refused(format!("it has no bitmap {name:?}; those it has: {there}"))
    })
}

pub(super) fn new_bits(
    image: &Offline<'_>,
    size: u64,
    granularity_bits: u8,
) -> Result<Bits, ToolError> {
    let bits = Bits::new(size, granularity_bits);
    bits.ok_or_else(|| image.refused("so large a disk needs a bitmap of a coarser granularity"))
}

pub(super) async fn load(
    image: &Offline<'_>,
    entry: &BitmapEntry,
    size: u64,
) -> Result<Bits, ToolError> {
    let bits = new_bits(image, size, entry.granularity_bits)?;
    load_into(image, entry, &bits).await?;
    Ok(bits)
}

/// Set the bits that are set in the image.
pub(super) async fn load_into(
    image: &Offline<'_>,
    entry: &BitmapEntry,
    bits: &Bits,
) -> Result<(), ToolError> {
    let per_cluster = image.cluster() * 8;
    if u64::from(entry.table_size) != bits.len().div_ceil(per_cluster) {
        return Err(image.corrupt(format!(
            "bitmap {:?} has {} clusters of bits, and the disk's size asks for {}",
            entry.name,
            entry.table_size,
            bits.len().div_ceil(per_cluster)
        )));
    }
    for (first, word) in (0..).step_by(per_cluster as usize).zip(read_table(image, entry).await?) {
        match word & OFFSET_MASK {
            0 if word == 0 => {}
            0 => {
                let granularity = entry.granularity_bits;
                bits.set(first << granularity, per_cluster << granularity);
            }
            offset => bits.add_bytes(first, &image.read(offset, image.cluster()).await?),
        }
    }
    Ok(())
}

/// Write bits to new clusters, and let the entry tell of them.
pub(super) async fn put_bits(
    rewrite: &mut Rewrite<'_, '_, '_>,
    entry: &mut BitmapEntry,
    bits: &Bits,
) -> Result<(), ToolError> {
    let cluster = rewrite.image.cluster();
    let mut table = Vec::new();
    let mut bytes = vec![0; cluster as usize];
    for number in 0..bits.len().div_ceil(cluster * 8) {
        bits.to_bytes(number * cluster * 8, &mut bytes);
        table.push(match bytes.first() {
            Some(0) if bytes.iter().all(|byte| *byte == 0) => 0,
            Some(0xff) if bytes.iter().all(|byte| *byte == 0xff) => 1,
            _ => rewrite.put(bytes.clone()).await?,
        });
    }
    entry.table_size = table.len() as u32;
    entry.table_offset = match table.is_empty() {
        true => 0,
        false => rewrite.put(crate::bytes::table(&table)).await?,
    };
    Ok(())
}

/// Give the clusters of a bitmap back.
pub(super) async fn drop_bits(
    rewrite: &mut Rewrite<'_, '_, '_>,
    entry: &BitmapEntry,
) -> Result<(), ToolError> {
    for word in read_table(rewrite.image, entry).await? {
        if word & OFFSET_MASK != 0 {
            rewrite.add(word & OFFSET_MASK, 1, -1).await?;
        }
    }
    if entry.table_size > 0 {
        rewrite.add(entry.table_offset, u64::from(entry.table_size) * 8, -1).await?;
    }
    Ok(())
}

/// Put a new directory in the place of the old one.
pub(super) async fn put_directory(
    rewrite: &mut Rewrite<'_, '_, '_>,
    entries: &[BitmapEntry],
) -> Result<(), ToolError> {
    if let Some(old) = rewrite.image.header.bitmaps() {
        rewrite.add(old.directory_offset, old.directory_size, -1).await?;
    }
    // First among the extensions, it lies in the header's first sector and changes with it.
    rewrite.image.header.set_extension(extension::BITMAPS, None);
    rewrite.image.header.autoclear &= !autoclear::BITMAPS;
    if !entries.is_empty() {
        let bytes = to_bytes(entries);
        if let Some(found) = bitmap_directory::too_much(entries, bytes.len() as u64) {
            return Err(rewrite.image.refused(format!("it would have {found}")));
        }
        let directory_size = bytes.len() as u64;
        let directory_offset = rewrite.put(bytes).await?;
        let count = entries.len() as u32;
        let new = Bitmaps { count, directory_size, directory_offset };
        rewrite.image.header.set_extension(extension::BITMAPS, Some(new.to_bytes()));
        rewrite.image.header.autoclear |= autoclear::BITMAPS;
        rewrite.image.header.make_room();
    }
    Ok(())
}

/// Let the bitmaps be those of a disk of `size` bytes, along with another change. What is new has changed.
pub(super) async fn resize_bitmaps(
    rewrite: &mut Rewrite<'_, '_, '_>,
    size: u64,
) -> Result<(), ToolError> {
    let mut entries = bitmap_directory::read(rewrite.image).await?;
    if entries.is_empty() {
        return Ok(());
    }
    for entry in &mut entries {
        if !entry.is_usable() {
            let name = &entry.name;
            return Err(rewrite.image.refused(format!(
                "bitmap {name:?} was not saved and cannot follow the size: remove it first"
            )));
        }
        let old = load(rewrite.image, entry, rewrite.image.header.size).await?;
        let new = new_bits(rewrite.image, size, entry.granularity_bits)?;
        old.runs().for_each(|(offset, len)| new.set(offset, len));
        if entry.is_enabled() && size > old.size() {
            new.set(old.size(), size - old.size());
        }
        drop_bits(rewrite, entry).await?;
        put_bits(rewrite, entry, &new).await?;
    }
    put_directory(rewrite, &entries).await
}
