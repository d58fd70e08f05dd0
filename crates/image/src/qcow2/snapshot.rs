//! Internal snapshots of an image at rest: list, create, apply, delete.
//!
//! Each is one change of all tables at once (see [`super::rewrite`]).

use ringtap_io::Io;

use super::header::{MAX_L1_BYTES, MAX_SNAPSHOTS, incompatible};
use super::offline::Offline;
use super::rewrite::Rewrite;
use super::snapshot_scan;
use super::snapshot_table::{self, Snapshot};
use super::tool::ToolError;
use super::{bitmap_directory, bitmap_directory::flag};
use crate::Container;
use crate::bytes::table;

/// The image's snapshots, oldest first, with names and IDs as they are shown: up to 255 and 127 bytes.
pub async fn list_snapshots(io: &Io, container: &Container) -> Result<Vec<Snapshot>, ToolError> {
    let image = Offline::open(io, container).await?;
    snapshot_scan::list(&image).await
}

/// Take a snapshot called `name`; `taken` is the present time, in seconds since 1970 and nanoseconds.
pub async fn create_snapshot(
    io: &Io,
    container: &Container,
    name: &str,
    taken: (u32, u32),
) -> Result<Snapshot, ToolError> {
    let mut image = open(io, container).await?;
    let (mut snapshots, old_len) = snapshot_table::read(&image).await?;
    if name.is_empty() || name.len() > 255 {
        return Err(image.refused("a snapshot's name has 1 to 255 bytes"));
    }
    if snapshots.iter().any(|snapshot| snapshot.name == name || snapshot.id == name) {
        let why = format!("it has a snapshot {name:?}: delete it first, or take another name");
        return Err(image.refused(why));
    }
    if image.header.snapshots >= MAX_SNAPSHOTS {
        return Err(image.refused("it has 65536 snapshots, and there can be no more"));
    }
    let ids = snapshots.iter().filter_map(|snapshot| snapshot.id.parse::<u64>().ok());
    let snapshot = Snapshot {
        l1_offset: image.header.l1_offset,
        l1_size: image.header.l1_size,
        id: ids.max().unwrap_or(0).saturating_add(1).to_string(),
        name: name.to_owned(),
        odd_id: None,
        odd_name: None,
        taken,
        guest_clock: 0,
        vm_state_size: 0,
        disk_size: Some(image.header.size),
        // As qemu-img has it: no instructions counted.
        extra: vec![0; 8],
    };
    let mut l1 = read_l1(&image, snapshot.l1_offset, snapshot.l1_size).await?;
    snapshots.push(snapshot.clone());

    let mut rewrite = Rewrite::of(&mut image).await?;
    rewrite.add_trees(&[(&l1, 1)]).await?;
    rewrite.set_flags(&mut l1).await?;
    // The table that was active is the snapshot's from now on.
    rewrite.image.header.l1_offset = rewrite.put(table(&l1)).await?;
    replace_table(&mut rewrite, &snapshots, old_len).await?;
    rewrite.commit().await?;
    Ok(snapshot)
}

/// Let the disk be as it was when the snapshot of this name or ID was taken, its size too. What the
/// disk holds now is lost, but for what is in snapshots.
pub async fn apply_snapshot(io: &Io, container: &Container, name: &str) -> Result<(), ToolError> {
    let mut image = open(io, container).await?;
    let (snapshots, _) = snapshot_table::read(&image).await?;
    let snapshot = find(&image, &snapshots, name)?.clone();
    let bitmaps = bitmap_directory::read(&image).await?;
    if let Some(bitmap) = bitmaps.iter().find(|bitmap| bitmap.flags & flag::AUTO != 0) {
        let bitmap = &bitmap.name;
        return Err(image.refused(format!(
            "bitmap {bitmap:?} is enabled, and would miss what changes: disable or remove it first"
        )));
    }
    let size = snapshot.disk_size.unwrap_or(image.header.size);
    if size != image.header.size && !bitmaps.is_empty() {
        let why = "the snapshot's disk has another size than the bitmaps: remove them first";
        return Err(image.refused(why));
    }
    let (l1_offset, l1_size) = (image.header.l1_offset, image.header.l1_size);
    let old = read_l1(&image, l1_offset, l1_size).await?;
    let mut l1 = read_l1(&image, snapshot.l1_offset, snapshot.l1_size).await?;
    if image.header.l1_entries_for(size) * 8 > MAX_L1_BYTES || size > 1 << 62 {
        return Err(image.corrupt(format!("snapshot {name:?} is said to be of {size} bytes")));
    }
    let entries = image.header.l1_entries_for(size).max(1) as usize;
    l1.resize(entries.max(l1.len()), 0);

    let mut rewrite = Rewrite::of(&mut image).await?;
    rewrite.add_trees(&[(&old, -1), (&l1, 1)]).await?;
    rewrite.add(l1_offset, u64::from(l1_size) * 8, -1).await?;
    rewrite.set_flags(&mut l1).await?;
    let header = rewrite.put(table(&l1)).await?;
    rewrite.image.header.l1_offset = header;
    rewrite.image.header.l1_size = l1.len() as u32;
    rewrite.image.header.size = size;
    rewrite.commit().await
}

/// Delete the snapshot of this name or ID.
pub async fn delete_snapshot(io: &Io, container: &Container, name: &str) -> Result<(), ToolError> {
    let mut image = open(io, container).await?;
    let (mut snapshots, old_len) = snapshot_table::read(&image).await?;
    let snapshot = find(&image, &snapshots, name)?.clone();
    snapshots.retain(|other| other.l1_offset != snapshot.l1_offset || other.id != snapshot.id);
    let (l1_offset, l1_size) = (image.header.l1_offset, image.header.l1_size);
    let active = read_l1(&image, l1_offset, l1_size).await?;
    let theirs = read_l1(&image, snapshot.l1_offset, snapshot.l1_size).await?;

    let mut rewrite = Rewrite::of(&mut image).await?;
    rewrite.add_trees(&[(&theirs, -1)]).await?;
    rewrite.add(snapshot.l1_offset, u64::from(snapshot.l1_size) * 8, -1).await?;
    let mut l1 = active.clone();
    rewrite.set_flags(&mut l1).await?;
    if l1 != active {
        rewrite.add(l1_offset, u64::from(l1_size) * 8, -1).await?;
        rewrite.image.header.l1_offset = rewrite.put(table(&l1)).await?;
    }
    replace_table(&mut rewrite, &snapshots, old_len).await?;
    rewrite.commit().await
}

async fn open<'a>(io: &'a Io, container: &'a Container) -> Result<Offline<'a>, ToolError> {
    let image = Offline::open_to_change(io, container).await?;
    if image.header.has(incompatible::DATA_FILE) {
        return Err(image.refused("an image with an external data file has no internal snapshots"));
    }
    Ok(image)
}

async fn read_l1(image: &Offline<'_>, offset: u64, size: u32) -> Result<Vec<u64>, ToolError> {
    image.read_table(offset, u64::from(size)).await
}

fn find<'s>(
    image: &Offline<'_>,
    snapshots: &'s [Snapshot],
    name: &str,
) -> Result<&'s Snapshot, ToolError> {
    let by_name = snapshots.iter().find(|snapshot| snapshot.name == name);
    let found = by_name.or_else(|| snapshots.iter().find(|snapshot| snapshot.id == name));
    found.ok_or_else(|| {
        let names: Vec<&str> = snapshots.iter().map(|snapshot| snapshot.name.as_str()).collect();
        image.refused(format!("it has no snapshot {name:?}; those it has: {names:?}"))
    })
}

/// Put a new snapshot table in the place of the one of `old_len` bytes.
pub(super) async fn replace_table(
    rewrite: &mut Rewrite<'_, '_, '_>,
    snapshots: &[Snapshot],
    old_len: u64,
) -> Result<(), ToolError> {
    if old_len > 0 {
        rewrite.add(rewrite.image.header.snapshots_offset, old_len, -1).await?;
    }
    let bytes = snapshot_table::to_bytes(snapshots);
    if bytes.len() as u64 > snapshot_table::MAX_TABLE {
        return Err(rewrite.image.refused("its snapshot table would be larger than 16 MiB"));
    }
    let offset = if bytes.is_empty() { 0 } else { rewrite.put(bytes).await? };
    rewrite.image.header.snapshots = snapshots.len() as u32;
    rewrite.image.header.snapshots_offset = offset;
    Ok(())
}
