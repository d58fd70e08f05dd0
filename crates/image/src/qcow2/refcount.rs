//! Refcounts: the table, the blocks in memory, and what of them has to be written (docs/interop/qcow2
//! of QEMU: "Host cluster management"). Memory only, but for loading a block.
//!
//! A refcount changes here when a flush is about to write it, never before.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use super::header::{Header, MAX_REFCOUNT_TABLE_BYTES, REFCOUNT_OFFSET_MASK};

/// Blocks that need not be written are kept in memory up to so many bytes.
const KEEP: usize = if cfg!(feature = "shuttle") { 0 } else { 16 << 20 };
/// Table entries that are written together.
pub(super) const TABLE_BLOCK: usize = 64;

struct Block {
    bytes: Vec<u8>,
    dirty: bool,
}

/// Where a refcount table lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) offset: u64,
    pub(super) clusters: u64,
}

/// The refcounts of an image.
pub(super) struct Refcounts {
    cluster_bits: u32,
    order: u32,
    /// Entries as they will be after the next flush.
    table: Vec<u64>,
    /// Where the table lies that the header names.
    place: Place,
    /// Where the next flush moves it.
    next_place: Option<Place>,
    /// Whether the clusters of that place have been counted: a flush is about to write it, or tried.
    next_counted: bool,
    /// Blocks of table entries that have to be written.
    dirty_table: BTreeSet<usize>,
    blocks: HashMap<u64, Block>,
    /// Clusters of new blocks, not counted yet. They must be before the table names the blocks.
    uncounted: Vec<u64>,
}

/// What a flush writes of refcounts.
#[derive(Default)]
pub(super) struct Writes {
    /// Blocks: number, offset, bytes.
    pub(super) blocks: Vec<(u64, u64, Vec<u8>)>,
    /// Parts of the table: number of the part, offset, bytes. To be written once the blocks are stable.
    pub(super) parts: Vec<(usize, u64, Vec<u8>)>,
    /// The whole table at its new place, to be written with the blocks.
    pub(super) moved: Option<(Place, Vec<u8>)>,
}

/// A refcount that cannot be: the image contradicts itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Contradiction;

impl Refcounts {
    pub(super) fn new(header: &Header, table: Vec<u64>) -> Refcounts {
        let place = Place {
            offset: header.refcount_table_offset,
            clusters: u64::from(header.refcount_table_clusters),
        };
        Refcounts {
            cluster_bits: header.cluster_bits,
            order: header.refcount_order,
            table,
            place,
            next_place: None,
            next_counted: false,
            dirty_table: BTreeSet::new(),
            blocks: HashMap::new(),
            uncounted: Vec::new(),
        }
    }

    /// Clusters that a block counts for: 2 to the power of this.
    fn block_bits(&self) -> u32 {
        self.cluster_bits + 3 - self.order
    }

    pub(super) fn block_of(&self, cluster: u64) -> u64 {
        cluster >> self.block_bits()
    }

    pub(super) fn clusters_of_block(&self, block: u64) -> Range<u64> {
        block << self.block_bits()..(block + 1) << self.block_bits()
    }

    /// Blocks that the table has entries for.
    pub(super) fn blocks(&self) -> u64 {
        self.table.len() as u64
    }

    /// Where a block lies, if there is one.
    pub(super) fn offset_of(&self, block: u64) -> Option<u64> {
        let entry = self.table.get(usize::try_from(block).ok()?)? & REFCOUNT_OFFSET_MASK;
        Some(entry).filter(|offset| *offset != 0)
    }

    /// Where all blocks lie.
    pub(super) fn offsets(&self) -> impl Iterator<Item = u64> {
        self.table.iter().map(|entry| entry & REFCOUNT_OFFSET_MASK).filter(|offset| *offset != 0)
    }

    pub(super) fn is_loaded(&self, block: u64) -> bool {
        self.blocks.contains_key(&block)
    }

    pub(super) fn is_dirty(&self) -> bool {
        self.next_place.is_some()
            || !self.dirty_table.is_empty()
            || self.blocks.values().any(|block| block.dirty)
    }

    /// Take a block into memory that was read from the image.
    pub(super) fn install(&mut self, block: u64, bytes: Vec<u8>) {
        self.blocks.entry(block).or_insert(Block { bytes, dirty: false });
    }

    /// Forget blocks that need not be written, where there are many.
    pub(super) fn shrink(&mut self) {
        let mut left = KEEP >> self.cluster_bits;
        self.blocks.retain(|_, block| {
            left = left.saturating_sub(usize::from(!block.dirty));
            block.dirty || left > 0
        });
    }

    /// The refcount of a cluster whose block is in memory, or 0.
    pub(super) fn get(&self, cluster: u64) -> u64 {
        let block = self.blocks.get(&self.block_of(cluster));
        let index = cluster - self.clusters_of_block(self.block_of(cluster)).start;
        block.map_or(0, |block| read(&block.bytes, index, self.order))
    }

    /// Add to the refcount of a cluster whose block is in memory; gives the new one.
    pub(super) fn change(&mut self, cluster: u64, by: i64) -> Result<u64, Contradiction> {
        let (number, order) = (self.block_of(cluster), self.order);
        let index = cluster - self.clusters_of_block(number).start;
        let block = self.blocks.get_mut(&number).ok_or(Contradiction)?;
        let most = u64::MAX >> (64 - (1u32 << order));
        let old = read(&block.bytes, index, order);
        let new = old.checked_add_signed(by).filter(|new| *new <= most).ok_or(Contradiction)?;
        write(&mut block.bytes, index, order, new);
        block.dirty = true;
        Ok(new)
    }

    /// Clusters that blocks and table will need so that each of the clusters up to `end` has its
    /// refcount, where those lie in the range too.
    pub(super) fn need(&self, range: &Range<u64>) -> u64 {
        let first = self.block_of(range.start);
        let end = self.block_of(range.end.saturating_sub(1)) + 1;
        let table = self.table_clusters_for(end).unwrap_or(0);
        // Behind the table's end, which may be far away, all are missing.
        let known = end.min(self.blocks());
        let missing = (first..known).filter(|block| self.offset_of(*block).is_none()).count();
        let behind = end.saturating_sub(known.max(first));
        missing as u64 + behind + table
    }

    fn missing(&self, range: &Range<u64>) -> impl Iterator<Item = u64> {
        let blocks = self.block_of(range.start)..=self.block_of(range.end.saturating_sub(1));
        blocks.filter(|block| self.offset_of(*block).is_none())
    }

    /// How large a table must become to have so many entries; nothing where it has.
    fn table_clusters_for(&self, blocks: u64) -> Option<u64> {
        if blocks <= self.blocks() {
            return None;
        }
        let now = self.next_place.unwrap_or(self.place).clusters;
        let needed = (blocks * 8).div_ceil(1 << self.cluster_bits);
        let most = MAX_REFCOUNT_TABLE_BYTES >> self.cluster_bits;
        Some(needed.max((2 * now).min(most)))
    }

    /// Make blocks, and a larger table, so that all clusters of the range have a refcount: in the
    /// range's own first clusters. Gives where the rest begins, the clusters that the blocks took,
    /// and those of a table that was never written. `None` where the table would become too large.
    pub(super) fn cover(&mut self, range: &Range<u64>) -> Option<Covered> {
        self.cover_from(range, range.start)
    }

    /// As [`Refcounts::cover`], in the clusters from `first` on, which the range reaches past.
    pub(super) fn cover_from(&mut self, range: &Range<u64>, first: u64) -> Option<Covered> {
        let mut covered = Covered { rest: first, taken: Vec::new(), unused: 0..0 };
        let last = self.block_of(range.end.saturating_sub(1));
        if let Some(clusters) = self.table_clusters_for(last + 1) {
            if clusters << self.cluster_bits > MAX_REFCOUNT_TABLE_BYTES {
                return None;
            }
            if let Some(unused) = self.next_place.take().filter(|_| !self.next_counted) {
                let first = unused.offset >> self.cluster_bits;
                covered.unused = first..first + unused.clusters;
            }
            let place = Place { offset: covered.rest << self.cluster_bits, clusters };
            (self.next_place, self.next_counted) = (Some(place), false);
            self.table.resize((clusters << self.cluster_bits) as usize / 8, 0);
            covered.rest += clusters;
        }
        let missing: Vec<u64> = self.missing(range).collect();
        for block in missing {
            let place = self.table.get_mut(block as usize)?;
            *place = covered.rest << self.cluster_bits;
            self.dirty_table.insert(block as usize / TABLE_BLOCK);
            let bytes = vec![0; 1 << self.cluster_bits];
            self.blocks.insert(block, Block { bytes, dirty: true });
            self.uncounted.push(covered.rest);
            covered.taken.push(covered.rest);
            covered.rest += 1;
        }
        Some(covered)
    }

    /// Clusters that blocks and a next table took and that have no refcount yet: to be counted now,
    /// or put back.
    pub(super) fn take_uncounted(&mut self) -> Vec<u64> {
        let mut clusters = std::mem::take(&mut self.uncounted);
        if let Some(place) = self.next_place.filter(|_| !self.next_counted) {
            self.next_counted = true;
            let first = place.offset >> self.cluster_bits;
            clusters.extend(first..first + place.clusters);
        }
        clusters
    }

    pub(super) fn put_back_uncounted(&mut self, clusters: Vec<u64>) {
        self.uncounted.extend(clusters);
    }

    /// What has to be written; it counts as written from now on. [`Refcounts::take_uncounted`] gave
    /// nothing just before.
    pub(super) fn take_writes(&mut self) -> Writes {
        let mut writes = Writes::default();
        for (number, block) in &mut self.blocks {
            let entry = self.table.get(*number as usize).copied().unwrap_or(0);
            if std::mem::replace(&mut block.dirty, false) {
                let offset = entry & REFCOUNT_OFFSET_MASK;
                writes.blocks.push((*number, offset, block.bytes.clone()));
            }
        }
        writes.blocks.sort_unstable_by_key(|(_, offset, _)| *offset);
        if let Some(place) = self.next_place {
            writes.moved = Some((place, crate::bytes::table(&self.table)));
            self.dirty_table.clear();
            return writes;
        }
        for part in std::mem::take(&mut self.dirty_table) {
            let entries = self.table.iter().skip(part * TABLE_BLOCK).take(TABLE_BLOCK);
            let bytes = entries.flat_map(|entry| entry.to_be_bytes()).collect();
            let offset = self.place.offset + (part * TABLE_BLOCK * 8) as u64;
            writes.parts.push((part, offset, bytes));
        }
        writes
    }

    /// Writing failed: all of it has to be written once more.
    pub(super) fn put_back(&mut self, writes: &Writes) {
        for (number, ..) in &writes.blocks {
            if let Some(block) = self.blocks.get_mut(number) {
                block.dirty = true;
            }
        }
        self.dirty_table.extend(writes.parts.iter().map(|(part, ..)| *part));
    }

    /// The header names the new place now. Gives the old one, and what of the table has changed since.
    pub(super) fn moved(&mut self, to: Place) -> Place {
        if self.next_place == Some(to) {
            self.next_place = None;
        }
        std::mem::replace(&mut self.place, to)
    }
}

/// What [`Refcounts::cover`] has done.
pub(super) struct Covered {
    /// The first cluster that is still to be had.
    pub(super) rest: u64,
    /// Clusters that hold blocks now.
    pub(super) taken: Vec<u64>,
    /// Clusters that are free again.
    pub(super) unused: Range<u64>,
}

/// A refcount of 2^order bits.
fn read(bytes: &[u8], index: u64, order: u32) -> u64 {
    let index = index as usize;
    if order < 3 {
        let per = 8 >> order;
        let shift = (index % per) << order;
        let mask = (1u16 << (1 << order)) - 1;
        return bytes.get(index / per).map_or(0, |byte| (u16::from(*byte) >> shift & mask).into());
    }
    let width = 1usize << (order - 3);
    let entry = bytes.get(index * width..(index + 1) * width).unwrap_or_default();
    entry.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

fn write(bytes: &mut [u8], index: u64, order: u32, value: u64) {
    let index = index as usize;
    if order < 3 {
        let per = 8 >> order;
        let shift = (index % per) << order;
        let mask = ((1u16 << (1 << order)) - 1) as u8;
        if let Some(byte) = bytes.get_mut(index / per) {
            *byte = *byte & !(mask << shift) | (value as u8 & mask) << shift;
        }
        return;
    }
    let width = 1usize << (order - 3);
    let value = value.to_be_bytes();
    if let (Some(entry), Some(value)) =
        (bytes.get_mut(index * width..(index + 1) * width), value.get(8 - width..))
    {
        entry.copy_from_slice(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_of_every_width() {
        for order in 0..=6 {
            let mut bytes = vec![0; 512];
            let most = u64::MAX >> (64 - (1u32 << order));
            let entries = 512 * 8 >> order;
            for index in 0..entries {
                write(&mut bytes, index, order, most.wrapping_sub(index) & most);
            }
            for index in 0..entries {
                assert_eq!(read(&bytes, index, order), most.wrapping_sub(index) & most, "{order}");
            }
        }
        let mut bytes = vec![0; 8];
        write(&mut bytes, 1, 0, 1);
        write(&mut bytes, 9, 1, 3);
        write(&mut bytes, 3, 4, 0x1234);
        assert_eq!(bytes, [2, 0, 12, 0, 0, 0, 0x12, 0x34]);
    }
}
