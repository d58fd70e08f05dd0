//! Clusters that have their place before anything is written to them, in a disk that becomes larger.

use std::ops::Range;

use super::Crypt;
use super::create::{Preallocation, fill};
use super::header::{COPIED, ZERO};
use super::rewrite::{Rewrite, read_l2, release, replace_l2};
use super::tool::{ToolError, failed};
use crate::Container;

/// The most clusters at once: refcounts of so many are kept in memory.
const MOST: u64 = 1 << 27;

/// Give guest clusters their place, behind the file or in the external data file, where they read as zeros. What they had goes.
pub(super) async fn preallocate(
    rewrite: &mut Rewrite<'_, '_, '_>,
    l1: &mut [u64],
    clusters: Range<u64>,
    how: Preallocation,
    external: bool,
) -> Result<(), ToolError> {
    if how == Preallocation::Off || clusters.is_empty() {
        return Ok(());
    }
    let header = &rewrite.image.header;
    let (bits, entries) = (header.cluster_bits, header.l2_entries());
    let (extended, encrypted) = (header.extended_l2(), header.crypt != Crypt::None);
    if encrypted && header.version < 3 {
        let why = "an encrypted image of version 2 cannot say that clusters are zeros: write them, with full";
        return Err(rewrite.image.refused(why));
    }
    let count = clusters.end - clusters.start;
    if count > MOST && !external {
        let most = MOST << bits >> 30;
        let why = format!("at most {most} GiB are preallocated at once: go there in steps");
        return Err(rewrite.image.refused(why));
    }
    let first = match external {
        true => clusters.start << bits,
        false => rewrite.take_behind(count).await?,
    };
    let words = if extended { 2 } else { 1 };
    for index in clusters.start / entries..=(clusters.end - 1) / entries {
        let Some(l1_entry) = l1.get_mut(index as usize) else { return Ok(()) };
        let mut table = read_l2(rewrite, *l1_entry).await?;
        for (number, entry) in (index * entries..).zip(table.chunks_exact_mut(words)) {
            if !clusters.contains(&number) {
                continue;
            }
            release(rewrite, entry.first().copied().unwrap_or(0)).await?;
            let host = first + ((number - clusters.start) << bits);
            // What is there is no zeros once it is decrypted.
            let now = match (extended, encrypted) {
                (true, true) => [host | COPIED, 0xffff_ffff << 32],
                (true, false) => [host | COPIED, 0xffff_ffff],
                (false, true) => [host | COPIED | ZERO, 0],
                (false, false) => [host | COPIED, 0],
            };
            entry.iter_mut().zip(now).for_each(|(to, from)| *to = from);
        }
        replace_l2(rewrite, l1_entry, &table).await?;
    }
    if !external {
        make_room(rewrite, (first, count << bits), how).await?;
    }
    Ok(())
}

/// Have the file be so long, with space for what is to have it.
async fn make_room(
    rewrite: &Rewrite<'_, '_, '_>,
    extent: (u64, u64),
    how: Preallocation,
) -> Result<(), ToolError> {
    let (io, container) = (rewrite.image.io, rewrite.image.container);
    let end = extent.0 + extent.1;
    if container.traits().regular && container.len() < end {
        container.set_len(io, end).await.map_err(failed(container, "extend", end))?;
    }
    fill(io, container, extent, how, false).await
}

/// Have an external data file hold what a disk gains. A raw one keeps what it holds there already.
pub(super) async fn lengthen(
    rewrite: &Rewrite<'_, '_, '_>,
    data: &Container,
    part: Range<u64>,
    how: Preallocation,
    raw: bool,
) -> Result<(), ToolError> {
    let io = rewrite.image.io;
    if how == Preallocation::Off {
        return Ok(());
    }
    if data.traits().regular {
        if data.len() > part.start && !raw {
            let cut = data.set_len(io, part.start).await;
            cut.map_err(failed(data, "shorten", part.start))?;
        }
        if data.len() < part.end {
            data.set_len(io, part.end).await.map_err(failed(data, "extend", part.end))?;
        }
    }
    fill(io, data, (part.start, part.end - part.start), how, raw).await?;
    data.sync(io).await.map_err(failed(data, "sync", 0))
}
