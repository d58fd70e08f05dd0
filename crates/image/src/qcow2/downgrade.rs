//! An image of version 3 made one of version 2, by one switch of its header.

use std::collections::HashMap;

use super::header::{COMPRESSED, COPIED, OFFSET_MASK, ZERO, compatible, incompatible};
use super::offline::Offline;
use super::rewrite::Rewrite;
use super::snapshot::replace_table;
use super::snapshot_table;
use super::tool::ToolError;
use super::{Compression, Crypt, extension};
use crate::bytes::table;

/// The only refcounts that version 2 has: 2^4 bits.
const REFCOUNT_ORDER: u32 = 4;

/// Make it one of version 2, in which no entry can say that a cluster is zeros: those are written, or left out
/// where nothing lies below.
pub(super) async fn downgrade(image: &mut Offline<'_>) -> Result<(), ToolError> {
    refuse(image).await?;
    let (mut snapshots, old_len) = snapshot_table::read(image).await?;
    let (l1_offset, l1_size) = (image.header.l1_offset, image.header.l1_size);
    let l1 = image.read_table(l1_offset, u64::from(l1_size)).await?;
    let mut rewrite = Rewrite::of(image).await?;
    let mut moved = HashMap::new();
    let mut active = without_zeros(&mut rewrite, &l1, &mut moved).await?;
    for snapshot in &mut snapshots {
        let (offset, size) = (snapshot.l1_offset, u64::from(snapshot.l1_size));
        let l1 = rewrite.image.read_table(offset, size).await?;
        let new = without_zeros(&mut rewrite, &l1, &mut moved).await?;
        if new != l1 {
            rewrite.add(offset, size * 8, -1).await?;
            snapshot.l1_offset = rewrite.put(table(&new)).await?;
        }
    }
    rewrite.set_flags(&mut active).await?;
    if active != l1 {
        rewrite.add(l1_offset, u64::from(l1_size) * 8, -1).await?;
        rewrite.image.header.l1_offset = rewrite.put(table(&active)).await?;
    }
    if !snapshots.is_empty() {
        replace_table(&mut rewrite, &snapshots, old_len).await?;
    }
    let header = &mut rewrite.image.header;
    header.version = 2;
    header.compatible &= !compatible::LAZY_REFCOUNTS;
    header.autoclear = 0;
    header.further.clear();
    header.set_extension(extension::FEATURE_NAMES, None);
    rewrite.commit().await
}

/// What version 2 cannot say, and is said by the image as a whole or by its snapshots.
pub(super) async fn refuse(image: &Offline<'_>) -> Result<(), ToolError> {
    let (snapshots, _) = snapshot_table::read(image).await?;
    let size = image.header.size;
    let other = snapshots.iter().find(|it| it.disk_size.is_some_and(|of_it| of_it != size));
    let header = &image.header;
    let why = match () {
        () if header.refcount_order != REFCOUNT_ORDER => "it has refcount_bits other than 16",
        () if header.extended_l2() => "it has subclusters (extended_l2)",
        () if header.has(incompatible::DATA_FILE) => "it has an external data file",
        () if header.compression != Compression::Deflate => "it is compressed with zstd",
        () if header.bitmaps().is_some() => "it has dirty bitmaps: remove them first",
        () if header.crypt != Crypt::None => "it is encrypted",
        () => "",
    };
    let refused =
        |why: String| Err(image.refused(format!("version 2 (compat=0.10) is not possible: {why}")));
    match (why, other) {
        ("", None) => Ok(()),
        ("", Some(snapshot)) => refused(format!(
            "the disk of its snapshot {:?} is of another size, which version 2 cannot say: delete it",
            snapshot.name
        )),
        (why, _) => refused(why.to_owned()),
    }
}

/// An L1 table all of whose L2 tables are without zero flags. `moved` says where those lie that were changed.
async fn without_zeros(
    rewrite: &mut Rewrite<'_, '_, '_>,
    l1: &[u64],
    moved: &mut HashMap<u64, u64>,
) -> Result<Vec<u64>, ToolError> {
    let mut new = l1.to_vec();
    for entry in &mut new {
        let offset = *entry & OFFSET_MASK;
        if offset == 0 {
            continue;
        }
        if !rewrite.image.is_cluster(offset) {
            return Err(rewrite.image.corrupt(format!("an L1 entry points to {offset:#x}")));
        }
        if let Some(place) = moved.get(&offset) {
            *entry = *entry & COPIED | place;
            continue;
        }
        let mut entries = rewrite.image.read_l2(offset).await?;
        if !entries.iter().any(|word| word & (ZERO | COMPRESSED) == ZERO) {
            continue;
        }
        // As often as this table is used, all that it points to is.
        let times = rewrite.get(rewrite.image.cluster_of(offset)).await?;
        for word in entries.iter_mut().filter(|word| **word & (ZERO | COMPRESSED) == ZERO) {
            *word = in_place_of_zero(rewrite, *word, times).await?;
        }
        let place = rewrite.put(table(&entries)).await?;
        rewrite.set(rewrite.image.cluster_of(place), times).await?;
        rewrite.set(rewrite.image.cluster_of(offset), 0).await?;
        moved.insert(offset, place);
        *entry = *entry & COPIED | place;
    }
    Ok(new)
}

/// What stands for a zero flag in a table that is used so many times.
async fn in_place_of_zero(
    rewrite: &mut Rewrite<'_, '_, '_>,
    word: u64,
    times: u64,
) -> Result<u64, ToolError> {
    let kept = word & OFFSET_MASK;
    if rewrite.image.is_cluster(kept) {
        rewrite.add(kept, 1, -(times as i64)).await?;
    } else if kept != 0 {
        let found = format!("an entry of zeros points to {kept:#x}, where no cluster can be");
        return Err(rewrite.image.corrupt(found));
    }
    if rewrite.image.header.backing_file.is_none() {
        return Ok(0);
    }
    let zeros = vec![0; rewrite.image.cluster() as usize];
    let place = rewrite.put(zeros).await?;
    rewrite.set(rewrite.image.cluster_of(place), times).await?;
    Ok(place | if times == 1 { COPIED } else { 0 })
}
