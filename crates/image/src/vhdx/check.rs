//! Whether the allocation table of a VHDX leads to where its blocks can be.

use ringtap_io::Io;

use super::entry::{FULLY_PRESENT, PAGE, PLACE, STATE};
use super::layout::Layout;
use super::os;
use crate::bytes::get;
use crate::qcow2::{Report, ToolError};
use crate::{Boxed, Container, OnlineCheck, OpenError};

/// The most that is told, a sentence each.
const TOLD: usize = 200;

/// What a look at a VHDX finds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Entries that lead nowhere.
    pub corruptions: u64,
    /// What they are, the first of them.
    pub messages: Vec<String>,
    /// Blocks of the disk, and those that are in the file.
    pub blocks: u64,
    /// Those that are in the file.
    pub present: u64,
}

impl Findings {
    /// The same as checks of all formats tell it.
    pub fn into_report(self, image_end: u64) -> Report {
        Report {
            corruptions: self.corruptions,
            messages: self.messages,
            image_end,
            total_clusters: self.blocks,
            allocated_clusters: self.present,
            ..Report::default()
        }
    }
}

/// Of one that is served, which nobody writes to.
pub(super) struct Served(pub(super) Container);

impl OnlineCheck for Served {
    fn run<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<Report, ToolError>> {
        Box::pin(async { Ok(check(io, &self.0).await?.into_report(self.0.len())) })
    }
}

/// Look at every entry. The log, where it was not carried out, counts.
pub async fn check(io: &Io, container: &Container) -> Result<Findings, OpenError> {
    let layout = Layout::read(io, container).await?;
    let mut found = Findings { blocks: layout.blocks, ..Findings::default() };
    let chunk = layout.chunk_ratio + 1;
    let entries = layout.blocks + layout.blocks.saturating_sub(1) / layout.chunk_ratio;
    for first in (0..entries).step_by(PAGE as usize) {
        let mut bytes = vec![0; (PAGE.min(entries - first) * 8) as usize];
        let place = layout.table_at + first * 8;
        let read = layout.changes.read(io, container, place, &mut bytes).await;
        read.map_err(|error| os(container, "read the allocation table of", error))?;
        for (index, entry) in (first..).zip(bytes.chunks_exact(8)) {
            let entry = u64::from_le_bytes(get(entry, 0));
            // Between them lie entries of sector bitmaps, which only a disk with a parent has.
            if index % chunk == layout.chunk_ratio {
                continue;
            }
            let block = index - index / chunk;
            found.present += u64::from(entry & STATE == FULLY_PRESENT);
            if let Some(fault) = fault(&layout, container.len(), block, entry) {
                found.corruptions += 1;
                if found.messages.len() < TOLD {
                    found.messages.push(format!("block {block}: its entry is {entry:#x}: {fault}"));
                }
            }
        }
    }
    Ok(found)
}

fn fault(layout: &Layout, file: u64, block: u64, entry: u64) -> Option<&'static str> {
    let place = entry & PLACE;
    // The last one may end with the disk.
    let len = layout.block_size.min(layout.size.saturating_sub(block * layout.block_size));
    match entry & STATE {
        0..=3 => None,
        FULLY_PRESENT if place < 1 << 20 => Some("there the file has its headers"),
        FULLY_PRESENT if place >= file => Some("the file ends before that"),
        FULLY_PRESENT if place.checked_add(len).is_none_or(|end| end > file) => {
            Some("the file ends within it")
        }
        FULLY_PRESENT => None,
        _ => Some("no block without a parent has that state"),
    }
}
