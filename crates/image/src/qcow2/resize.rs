//! Growing and shrinking the disk of an image at rest.
//!
//! Tables change all at once (see [`super::rewrite`]). What the disk gains reads as zeros, whatever a
//! backing file or an earlier life of the last cluster holds there.

use std::ops::Range;

use ringtap_io::Io;

use super::bitmap::resize_bitmaps;
use super::compressed;
use super::create::Preallocation;
use super::header::{
    COMPRESSED, COPIED, MAX_EXTERNAL, MAX_L1_BYTES, OFFSET_MASK, ZERO, autoclear, incompatible,
};
use super::offline::Offline;
use super::preallocate::{lengthen, preallocate};
use super::rewrite::{Rewrite, read_l2, release, replace_l2};
use super::tool::{ToolError, failed};
use super::{Crypt, snapshot_table};
use crate::Container;
use crate::bytes::table;

/// How to change the size of a disk.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResizeOptions {
    /// Bytes the guest is to see; rounded up to 512.
    pub size: u64,
    /// Allow what lies past the new end to be lost.
    pub shrink: bool,
    /// Bytes of the backing file's disk, where there is one.
    pub backing_size: Option<u64>,
    /// What exists of what is new. A raw external data file has all tables in any case.
    pub preallocation: Preallocation,
    /// Refuse where a raw external data file is longer than the disk: what it holds there would be the disk's.
    pub gains_zeros: bool,
}

/// Change the disk's size. `data` is the external data file, where the image has one.
pub async fn resize(
    io: &Io,
    container: &Container,
    data: Option<&Container>,
    options: &ResizeOptions,
) -> Result<(), ToolError> {
    let mut image = Offline::open_to_change(io, container).await?;
    let (old, new) = (image.header.size, options.size.min(1 << 63).next_multiple_of(512));
    if new < old && !options.shrink {
        return Err(image.refused(format!(
            "{new} bytes are less than the {old} it has, and what lies past them would be lost: \
             add --shrink if that is meant"
        )));
    }
    if image.header.l1_entries_for(new) * 8 > MAX_L1_BYTES || new > 1 << 62 {
        return Err(image.refused("clusters of its size are too small for so large a disk"));
    }
    if image.header.has(incompatible::DATA_FILE) != data.is_some() {
        return Err(image.refused("its external data file must be given"));
    }
    if data.is_some() && new > old.max(MAX_EXTERNAL) {
        return Err(image.refused("with an external data file a disk has 64 PiB at most"));
    }
    let (snapshots, _) = snapshot_table::read(&image).await?;
    if snapshots.iter().any(|snapshot| snapshot.disk_size.is_none()) {
        let why = "it has a snapshot that does not say how large the disk was: delete that first";
        return Err(image.refused(why));
    }
    let (l1_offset, l1_size) = (image.header.l1_offset, image.header.l1_size);
    let mut l1 = image.read_table(l1_offset, u64::from(l1_size)).await?;
    let before = l1.clone();
    let raw = image.header.autoclear & autoclear::DATA_FILE_RAW != 0;
    let data_file = data.filter(|data| data.traits().regular && new < old);
    if options.gains_zeros && raw && new > old && data.is_some_and(|data| data.len() > old) {
        return Err(image.refused(format!(
            "its raw data file is longer than its disk of {old} bytes, and what it holds there would show: shorten that \
             file, or resize the image first"
        )));
    }
    let mut rewrite = Rewrite::of(&mut image).await?;
    resize_bitmaps(&mut rewrite, new).await?;
    if new < old {
        let keep = rewrite.image.header.l1_entries_for(new) as usize;
        rewrite.add_trees(&[(l1.get(keep..).unwrap_or_default(), -1)]).await?;
    }
    let entries = rewrite.image.header.l1_entries_for(new).max(1) as usize;
    if new < old {
        l1.truncate(entries);
        if new == 0 {
            l1.fill(0);
        }
        let past = new.div_ceil(rewrite.image.cluster())..u64::MAX;
        release_clusters(&mut rewrite, &mut l1, past).await?;
    } else {
        l1.resize(entries.max(l1.len()), 0);
        // Where the disk grows, a machine's state may lie that a snapshot brought back.
        let cluster = rewrite.image.cluster();
        let gained = old.div_ceil(cluster)..new.div_ceil(cluster);
        release_clusters(&mut rewrite, &mut l1, gained).await?;
        let to = options.backing_size.unwrap_or(0).clamp(old, new);
        if new > old {
            clear_tail(&mut rewrite, &mut l1, old, to, data).await?;
        }
        clear_clusters(&mut rewrite, &mut l1, old, to).await?;
        let how = match options.preallocation {
            _ if new == old => Preallocation::Off,
            Preallocation::Off if raw => Preallocation::Metadata,
            how => how,
        };
        let first = first_to_place(&rewrite, &l1, old, options.backing_size.is_some()).await?;
        let clusters = first..new.div_ceil(rewrite.image.cluster());
        preallocate(&mut rewrite, &mut l1, clusters, how, data.is_some()).await?;
        if let Some(data) = data {
            // What the last cluster has its place in by now was nobody's before, and holds anything.
            let from = if raw { old } else { old.min(first << rewrite.image.header.cluster_bits) };
            lengthen(&rewrite, data, from..new, how, raw).await?;
        }
    }
    rewrite.set_flags(&mut l1).await?;
    if l1 != before {
        rewrite.add(l1_offset, u64::from(l1_size) * 8, -1).await?;
        rewrite.image.header.l1_offset = rewrite.put(table(&l1)).await?;
        rewrite.image.header.l1_size = l1.len() as u32;
    }
    rewrite.image.header.size = new;
    rewrite.commit().await?;
    if let Some(data) = data_file.filter(|data| data.len() > new) {
        data.set_len(io, new).await.map_err(failed(data, "shorten", new))?;
    }
    Ok(())
}

/// The first cluster that the disk gains, or its last one where that has nothing and shows nothing.
async fn first_to_place(
    rewrite: &Rewrite<'_, '_, '_>,
    l1: &[u64],
    old: u64,
    over: bool,
) -> Result<u64, ToolError> {
    let header = &rewrite.image.header;
    let (last, next) = (old / header.cluster_size(), old.div_ceil(header.cluster_size()));
    let words = (header.l2_entry_size() / 8) as usize;
    let (index, within) = (last / header.l2_entries(), last % header.l2_entries());
    let Some(entry) = l1.get(index as usize).filter(|_| last < next && !over) else {
        return Ok(next);
    };
    let table = read_l2(rewrite, *entry).await?;
    let mut words = table.iter().skip(within as usize * words).take(words);
    Ok(if words.all(|word| *word == 0) { last } else { next })
}

/// Let go of clusters that nothing shows, as far as there are tables for them.
async fn release_clusters(
    rewrite: &mut Rewrite<'_, '_, '_>,
    l1: &mut [u64],
    clusters: Range<u64>,
) -> Result<(), ToolError> {
    let header = &rewrite.image.header;
    let (entries, words) = (header.l2_entries(), (header.l2_entry_size() / 8) as usize);
    for (index, l1_entry) in (0..).zip(l1).skip((clusters.start / entries) as usize) {
        if index * entries >= clusters.end {
            break;
        }
        if *l1_entry & OFFSET_MASK == 0 {
            continue;
        }
        let mut table = read_l2(rewrite, *l1_entry).await?;
        let mut changed = false;
        for (number, entry) in (index * entries..).zip(table.chunks_exact_mut(words)) {
            if !clusters.contains(&number) || entry.iter().all(|word| *word == 0) {
                continue;
            }
            release(rewrite, entry.first().copied().unwrap_or(0)).await?;
            entry.fill(0);
            changed = true;
        }
        if changed {
            replace_l2(rewrite, l1_entry, &table).await?;
        }
    }
    Ok(())
}

/// Let the part of the last cluster that lies past the disk's old end read as zeros. A backing file's
/// disk ends at `shown` or before `old`.
async fn clear_tail(
    rewrite: &mut Rewrite<'_, '_, '_>,
    l1: &mut [u64],
    old: u64,
    shown: u64,
    data: Option<&Container>,
) -> Result<(), ToolError> {
    let header = &rewrite.image.header;
    let (cluster, words) = (header.cluster_size(), (header.l2_entry_size() / 8) as usize);
    let tail = old % cluster;
    if tail == 0 {
        return Ok(());
    }
    let number = old / cluster;
    let index = (number % header.l2_entries()) as usize * words;
    let Some(l1_entry) = l1.get_mut((number / header.l2_entries()) as usize) else { return Ok(()) };
    let mut l2 = read_l2(rewrite, *l1_entry).await?;
    let word = l2.get(index).copied().unwrap_or(0);
    let extended = rewrite.image.header.extended_l2();
    let bitmap = if extended { l2.get(index + 1).copied().unwrap_or(0) } else { 0 };
    // The subcluster (or cluster) in which the old end lies, and those after it.
    let size = rewrite.image.header.subcluster_size();
    let (first, within) = (tail / size, tail % size);
    let (there, zero) = match extended {
        true => (bitmap >> first & 1 == 1, bitmap >> (32 + first) & 1 == 1),
        false => (word & OFFSET_MASK != 0 && word & ZERO == 0, word & ZERO != 0),
    };
    let compressed = word & COMPRESSED != 0;
    let encrypted = rewrite.image.header.crypt != Crypt::None;
    // In an external data file a cluster may lie at byte 0.
    let placed = there || compressed || data.is_some() && !extended && !zero && word & COPIED != 0;
    if encrypted && within != 0 && (placed || !zero && shown > old) {
        return Err(rewrite.image.refused(format!(
            "it is encrypted, and the disk ends at {old}, inside a cluster, whose rest would show as noise or as \
             what lies below: create an image of the new size, and copy into that with convert -n"
        )));
    }
    if within != 0 && !compressed && !there && !zero && shown > old {
        return Err(rewrite.image.refused(format!(
            "the disk ends at {old}, inside a cluster that shows the backing file, which goes on: \
             write to the disk's last sector first"
        )));
    }
    let mut new = word;
    if encrypted {
        // Zeros in the file are none once they are decrypted.
    } else if compressed {
        let (offset, len) = rewrite.image.header.compressed_extent(word);
        let bytes = rewrite.image.read(offset, len).await?;
        let mut content = vec![0; cluster as usize];
        let decoded = compressed::decode(rewrite.image.header.compression, &bytes, &mut content);
        decoded.map_err(|_| rewrite.image.corrupt(format!("compressed data at {offset:#x}")))?;
        content.iter_mut().skip(tail as usize).for_each(|byte| *byte = 0);
        release(rewrite, word).await?;
        new = rewrite.put(content).await? | COPIED;
    } else if let Some(data) = data {
        let zeros = vec![0; (cluster - tail) as usize];
        if word & OFFSET_MASK != 0 || word & COPIED != 0 {
            let end = data.write(rewrite.image.io, old, &zeros).await;
            end.map_err(failed(data, "write to", old))?;
            data.sync(rewrite.image.io).await.map_err(failed(data, "sync", 0))?;
        }
    } else if word & OFFSET_MASK != 0 {
        let host = word & OFFSET_MASK;
        let zeros = vec![0; (cluster - tail) as usize];
        if rewrite.get(rewrite.image.cluster_of(host)).await? == 1 {
            // Past the disk's end nobody sees what is there, before or after a power cut.
            rewrite.image.write(host + tail, &zeros).await?;
        } else {
            let mut content = rewrite.image.read(host, cluster).await?;
            content.iter_mut().skip(tail as usize).for_each(|byte| *byte = 0);
            release(rewrite, word).await?;
            new = rewrite.put(content).await? | COPIED | (word & ZERO);
        }
    }
    let mut new_bitmap = if extended && compressed { 0xffff_ffff } else { bitmap };
    if extended && !compressed {
        for sub in first + u64::from(within != 0)..32 {
            let is_there = new_bitmap >> sub & 1 == 1;
            if is_there && encrypted {
                new_bitmap = new_bitmap & !(1 << sub) | 1 << (32 + sub);
            } else if !is_there && shown > old {
                new_bitmap |= 1 << (32 + sub);
            }
        }
    }
    if (new, new_bitmap) != (word, bitmap) {
        if let Some(place) = l2.get_mut(index) {
            *place = new;
        }
        if let Some(place) = l2.get_mut(index + 1).filter(|_| extended) {
            *place = new_bitmap;
        }
        replace_l2(rewrite, l1_entry, &l2).await?;
    }
    Ok(())
}

/// Let the clusters between two ends of the disk that a backing file would show read as zeros.
async fn clear_clusters(
    rewrite: &mut Rewrite<'_, '_, '_>,
    l1: &mut [u64],
    from: u64,
    to: u64,
) -> Result<(), ToolError> {
    let header = &rewrite.image.header;
    let (cluster, entries) = (header.cluster_size(), header.l2_entries());
    let words = (header.l2_entry_size() / 8) as usize;
    let (first, last) = (from.div_ceil(cluster), to.div_ceil(cluster));
    if first >= last {
        return Ok(());
    }
    if header.version < 3 {
        let why = "the backing file's disk is larger, and version 2 cannot hide that: convert it";
        return Err(rewrite.image.refused(why));
    }
    let extended = header.extended_l2();
    for index in first / entries..=(last - 1) / entries {
        let Some(entry) = l1.get_mut(index as usize) else { return Ok(()) };
        let mut table = read_l2(rewrite, *entry).await?;
        for (number, words) in (index * entries..).zip(table.chunks_exact_mut(words)) {
            if !(first..last).contains(&number) {
                continue;
            }
            let word = words.first().copied().unwrap_or(0);
            release(rewrite, word).await?;
            let zero = if extended { [0, 0xffff_ffff << 32] } else { [ZERO, 0] };
            words.iter_mut().zip(zero).for_each(|(to, from)| *to = from);
        }
        replace_l2(rewrite, entry, &table).await?;
    }
    Ok(())
}
