//! What is marked in a bitmap, told and taken: for bitmaps that go with a disk to another server.

use ringtap_vbd::DirtyBitmap;

use super::bitmaps::{Known, usable};
use super::command::Command;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, answer, arguments};
use crate::ids::DiskId;
use crate::running::Running;

/// The most that is told at once: a message that says as many is not too long for the other server.
const MOST: usize = 10_000;

arguments! {
    /// `__ringtap_bitmap-regions`
    struct BitmapRegions {
        "node" node: String,
        "name" name: String,
        /// From where on; from the beginning where it is not said.
        "offset" offset: Option<u64>,
    }
}

answer! {
    /// Bytes side by side that may have changed.
    struct MarkedRegion { "offset" offset: u64, "length" length: u64 }
}

answer! {
    /// What is marked in a bitmap.
    struct MarkedRegions {
        "granularity" granularity: u64,
        "regions" regions: Vec<MarkedRegion>,
        /// Where the next are told from; not there where these are the last.
        "next" next: Option<u64>,
    }
}

arguments! {
    /// The same, of a client.
    struct RegionToMark { "offset" offset: u64, "length" length: u64 }
}

arguments! {
    /// `__ringtap_bitmap-mark`
    struct MarkBitmap {
        "node" node: String,
        /// One that does not record, and is not persistent: others are merged from it.
        "name" name: String,
        "regions" regions: Vec<RegionToMark>,
    }
}

/// The bitmaps of a disk, and its size.
fn known(running: &Running, id: DiskId) -> Result<(Vec<DirtyBitmap>, u64), Refusal> {
    let served = running.disks.get(&id).ok_or_else(|| Refusal::new("the disk is gone"))?;
    Ok((served.vbd.dirty_bitmaps(), served.vbd.size()))
}

impl Command for BitmapRegions {
    const NAME: &'static str = "__ringtap_bitmap-regions";
    type Answer = MarkedRegions;

    fn run(self, running: &mut Running, reply: Reply<MarkedRegions>) {
        reply.give(self.find(running));
    }
}

impl BitmapRegions {
    fn find(&self, running: &Running) -> Result<MarkedRegions, Refusal> {
        let id = running.named_node(&self.node)?;
        let (all, size) = known(running, id)?;
        let all: Vec<Known> = all.into_iter().map(Known::from).collect();
        let found = usable(running, id, &all, &self.name)?;
        let marks = found.marks.as_ref().ok_or_else(|| Refusal::new("it is not there yet"))?;
        let (mut regions, mut at) = (vec![], self.offset.unwrap_or(0));
        let mut next = None;
        while let Some(range) = marks.next(at, u64::MAX).filter(|range| range.start < size) {
            if regions.len() == MOST {
                next = Some(range.start);
                break;
            }
            at = range.end;
            let length = range.end.min(size) - range.start;
            regions.push(MarkedRegion { offset: range.start, length });
        }
        Ok(MarkedRegions { granularity: marks.granularity(), regions, next })
    }
}

impl Command for MarkBitmap {
    const NAME: &'static str = "__ringtap_bitmap-mark";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        reply.give(self.mark(running));
    }
}

impl MarkBitmap {
    fn mark(&self, running: &Running) -> Result<Done, Refusal> {
        let (name, id) = (&self.name, running.named_node(&self.node)?);
        let (all, size) = known(running, id)?;
        let persistent = all.iter().any(|one| one.name == *name && one.persistent);
        let all: Vec<Known> = all.into_iter().map(Known::from).collect();
        let found = usable(running, id, &all, name)?;
        if found.recording || persistent {
            return Err(Refusal::new(format!(
                "Bitmap '{name}' records, or is persistent: mark one that is neither, and merge it"
            )));
        }
        let marks = found.marks.as_ref().ok_or_else(|| Refusal::new("it is not there yet"))?;
        let range = |one: &RegionToMark| {
            let end = one.offset.checked_add(one.length).filter(|end| *end <= size);
            end.map(|end| one.offset..end).ok_or_else(|| {
                Refusal::new(format!(
                    "{} bytes at {} reach past the disk's end, which is at {size}",
                    one.length, one.offset
                ))
            })
        };
        let ranges = self.regions.iter().map(range).collect::<Result<Vec<_>, _>>()?;
        ranges.into_iter().filter(|range| !range.is_empty()).for_each(|range| marks.mark(range));
        Ok(Done {})
    }
}
