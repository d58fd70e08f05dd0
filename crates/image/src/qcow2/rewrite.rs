//! Changing an image's tables all at once.
//!
//! Whatever changes is written to clusters that are free, refcount blocks and refcount table too;
//! then the header's first sector switches to all of it. So a power cut leaves the image as it was
//! or as it is to be, and nothing that is in use is ever overwritten.

// Clippy of Rust 1.85, which is Debian 13's: no entry can be held while its block is read.
#![allow(clippy::map_entry)]

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::counts::{Counts, refcount, set_refcount};
use super::header::{
    COMPRESSED, COPIED, MAX_REFCOUNT_TABLE_BYTES, OFFSET_MASK, REFCOUNT_OFFSET_MASK, incompatible,
};
use super::offline::Offline;
use super::together::together;
use super::tool::ToolError;
use super::walk::count_tree;
use crate::bytes::table;

/// Bytes of memory for counting references.
const COUNTS: usize = 32 << 20;

/// Where new clusters may be.
pub(super) enum Free<'c> {
    /// Where refcounts say so.
    Refcounts,
    /// Where nothing refers to, whatever refcounts say. Where there are pointers that lead nowhere (to these clusters), only
    /// behind the file, and not there: anything else may be what they led to.
    Unreferenced(&'c Counts, &'c BTreeSet<u64>),
}

/// A change of an image, under construction.
pub(super) struct Rewrite<'i, 'a, 'c> {
    pub(super) image: &'i mut Offline<'a>,
    free: Free<'c>,
    /// The refcount table as it is.
    table: Vec<u64>,
    /// Refcount blocks with changes, by their number.
    blocks: BTreeMap<u64, Vec<u8>>,
    /// A few unchanged ones.
    unchanged: HashMap<u64, Vec<u8>>,
    /// Clusters handed out; they are used even if they were given back.
    taken: BTreeSet<u64>,
    /// No cluster before this is free.
    cursor: u64,
    /// The clusters that the file had before.
    end: u64,
}

impl<'i, 'a, 'c> Rewrite<'i, 'a, 'c> {
    /// A change of `image` with its refcount table (entries that lead nowhere left out).
    pub(super) fn new(
        image: &'i mut Offline<'a>,
        table: Vec<u64>,
        free: Free<'c>,
    ) -> Rewrite<'i, 'a, 'c> {
        let (blocks, unchanged) = Default::default();
        let end = image.container.len().div_ceil(image.cluster());
        Rewrite { image, free, table, blocks, unchanged, taken: BTreeSet::new(), cursor: 1, end }
    }

    /// A change of an image whose refcounts are right.
    pub(super) async fn of(image: &'i mut Offline<'a>) -> Result<Rewrite<'i, 'a, 'c>, ToolError> {
        let header = &image.header;
        let count = u64::from(header.refcount_table_clusters) * header.cluster_size() / 8;
        let table = image.read_table(header.refcount_table_offset, count).await?;
        for (index, entry) in table.iter().enumerate() {
            let offset = entry & REFCOUNT_OFFSET_MASK;
            if *entry != 0 && (offset != *entry || !image.is_cluster(offset)) {
                return Err(image.corrupt(format!("refcount table entry {index} is {entry:#x}")));
            }
        }
        Ok(Rewrite::new(image, table, Free::Refcounts))
    }

    fn place(&self, cluster: u64) -> (u64, u64) {
        let entries = self.image.header.refcount_block_entries();
        (cluster / entries, cluster % entries)
    }

    async fn read_block(&self, number: u64) -> Result<Vec<u8>, ToolError> {
        match self.table.get(number as usize) {
            Some(entry) if *entry != 0 => {
                self.image.read(entry & REFCOUNT_OFFSET_MASK, self.image.cluster()).await
            }
            _ => Ok(vec![0; self.image.cluster() as usize]),
        }
    }

    /// The refcount that a cluster will have.
    pub(super) async fn get(&mut self, cluster: u64) -> Result<u64, ToolError> {
        let (number, index) = self.place(cluster);
        let order = self.image.header.refcount_order;
        if let Some(block) = self.blocks.get(&number).or_else(|| self.unchanged.get(&number)) {
            return Ok(refcount(block, index, order));
        }
        let block = self.read_block(number).await?;
        let count = refcount(&block, index, order);
        if self.unchanged.len() as u64 * self.image.cluster() > 8 << 20 {
            self.unchanged.clear();
        }
        self.unchanged.insert(number, block);
        Ok(count)
    }

    /// Set the refcount that a cluster will have.
    pub(super) async fn set(&mut self, cluster: u64, count: u64) -> Result<(), ToolError> {
        if self.get(cluster).await? == count {
            return Ok(());
        }
        let header = &self.image.header;
        if count > header.max_refcount() {
            let bits = header.refcount_bits();
            return Err(self.image.refused(format!(
                "a cluster would be used {count} times, more than refcounts of {bits} bits can \
                 tell: convert the image to one with larger refcount_bits"
            )));
        }
        let (number, index) = self.place(cluster);
        let order = header.refcount_order;
        if !self.blocks.contains_key(&number) {
            let block = match self.unchanged.remove(&number) {
                Some(block) => block,
                None => self.read_block(number).await?,
            };
            self.blocks.insert(number, block);
        }
        if let Some(block) = self.blocks.get_mut(&number) {
            set_refcount(block, index, order, count);
        }
        Ok(())
    }

    /// Let a refcount block move to a new cluster, though nothing in it changes.
    pub(super) async fn touch(&mut self, number: u64) -> Result<(), ToolError> {
        if !self.blocks.contains_key(&number) {
            let block = self.read_block(number).await?;
            self.blocks.insert(number, block);
        }
        Ok(())
    }

    /// Add to the refcount of the clusters that `len` bytes from a host offset touch.
    pub(super) async fn add(&mut self, offset: u64, len: u64, more: i64) -> Result<(), ToolError> {
        let last = self.image.cluster_of(offset + len.max(1) - 1);
        for cluster in self.image.cluster_of(offset)..=last {
            self.add_to(cluster, more).await?;
        }
        Ok(())
    }

    async fn add_to(&mut self, cluster: u64, more: i64) -> Result<(), ToolError> {
        let count = self.get(cluster).await?;
        let Some(count) = count.checked_add_signed(more) else {
            let offset = cluster << self.image.header.cluster_bits;
            let found = format!("the cluster at {offset:#x} is used more often than counted");
            return Err(self.image.corrupt(found));
        };
        self.set(cluster, count).await
    }

    /// Count the references of these L1 tables to L2 tables and data, those of each so many times more,
    /// in as many rounds as a bounded memory asks for.
    pub(super) async fn add_trees(&mut self, trees: &[(&[u64], i64)]) -> Result<(), ToolError> {
        let mut start = 0;
        while start < u64::MAX {
            let mut counts = Counts::new(start, COUNTS);
            for (l1, times) in trees {
                count_tree(self.image, l1, *times, &mut counts).await?;
            }
            for (cluster, more) in counts.iter() {
                self.add_to(cluster, more).await?;
            }
            start = counts.range().end;
        }
        Ok(())
    }

    async fn is_free(&mut self, cluster: u64) -> Result<bool, ToolError> {
        if self.taken.contains(&cluster) {
            return Ok(false);
        }
        match self.free {
            Free::Unreferenced(counts, dangling) => {
                let behind = cluster >= self.end && !dangling.contains(&cluster);
                Ok(counts.is_unreferenced(cluster) && (behind || dangling.is_empty()))
            }
            // What is being freed by this very change is in use until the header is switched.
            Free::Refcounts => Ok(self.was_free(cluster).await? && self.get(cluster).await? == 0),
        }
    }

    /// Whether a cluster's refcount is 0 before this change.
    async fn was_free(&mut self, cluster: u64) -> Result<bool, ToolError> {
        let (number, index) = self.place(cluster);
        if !self.blocks.contains_key(&number) {
            return Ok(self.get(cluster).await? == 0);
        }
        if !self.unchanged.contains_key(&number) {
            let block = self.read_block(number).await?;
            self.unchanged.insert(number, block);
        }
        let block = self.unchanged.get(&number).map_or(&[][..], |block| block);
        Ok(refcount(block, index, self.image.header.refcount_order) == 0)
    }

    /// Take `clusters` > 0 free ones in a row; gives their host offset. Their refcount becomes 1, and
    /// they may be written to at once.
    pub(super) async fn take(&mut self, clusters: u64) -> Result<u64, ToolError> {
        let bits = self.image.header.cluster_bits;
        let (mut first, mut found) = (self.cursor, 0);
        while found < clusters {
            let at = first + found;
            let beyond = (at + 1) << bits > self.image.container.len();
            if beyond && !self.image.container.traits().regular {
                let why = match self.free {
                    Free::Unreferenced(_, dangling) if !dangling.is_empty() => {
                        "new tables have no place: any cluster of the device may be what a pointer led to that \
                         leads nowhere now; convert it to a new image"
                    }
                    _ => "no room is left on the device for the new tables",
                };
                return Err(self.image.refused(why));
            }
            if let Free::Unreferenced(_, dangling) = self.free {
                // The file would grow over what a pointer leads to, which would read as zeros then, as if nothing were wrong.
                if at >= self.end && dangling.range(self.end..=at).next().is_some() {
                    return Err(self.image.refused(
                        "new tables would lie behind clusters past the file's end that pointers lead to, which would read as \
                         zeros then: if the file was cut off, bring the rest back; else convert it to a new image",
                    ));
                }
            }
            // Past the file's end hardly a cluster can be used already.
            let past_end = at.saturating_sub(self.image.container.len() >> bits);
            if past_end > clusters + self.taken.len() as u64 + 65536 || at >= (1 << 55) >> bits {
                return Err(self.image.refused("the image has no room for new tables"));
            }
            if self.is_free(at).await? {
                found += 1;
            } else {
                (first, found) = (at + 1, 0);
            }
        }
        if clusters == 1 {
            self.cursor = first + 1;
        }
        for cluster in first..first + clusters {
            self.taken.insert(cluster);
            self.set(cluster, 1).await?;
        }
        Ok(first << bits)
    }

    /// Take `clusters` > 0 free ones in a row behind the file, which hold nothing yet, or on a device wherever they are.
    /// They are not given back. Gives their host offset; their refcount becomes 1.
    pub(super) async fn take_behind(&mut self, clusters: u64) -> Result<u64, ToolError> {
        if !self.image.container.traits().regular {
            return self.take(clusters).await;
        }
        let bits = self.image.header.cluster_bits;
        let mut first = self.image.container.len().div_ceil(1 << bits);
        let mut at = first;
        while at < first + clusters {
            at += 1;
            if first + clusters >= (1 << 55) >> bits {
                return Err(self.image.refused("the image has no room for so much"));
            }
            if !self.is_free(at - 1).await? {
                first = at;
            }
        }
        for cluster in first..first + clusters {
            self.set(cluster, 1).await?;
        }
        Ok(first << bits)
    }

    /// Write bytes to new clusters; gives their host offset.
    pub(super) async fn put(&mut self, bytes: Vec<u8>) -> Result<u64, ToolError> {
        let clusters = (bytes.len() as u64).div_ceil(self.image.cluster()).max(1);
        let offset = self.take(clusters).await?;
        let mut bytes = bytes;
        bytes.resize((clusters << self.image.header.cluster_bits) as usize, 0);
        self.image.write_clusters(offset, bytes).await?;
        Ok(offset)
    }

    /// Let the COPIED flags of an L1 table and all tables it points to be right, as they must be in
    /// the active one. Tables whose flags change are copied, and the L1 table points to the copies.
    pub(super) async fn set_flags(&mut self, l1: &mut [u64]) -> Result<(), ToolError> {
        for entry in l1 {
            let offset = *entry & OFFSET_MASK;
            if !self.image.is_cluster(offset) {
                continue;
            }
            let mut table = self.image.read_l2(offset).await?;
            if self.set_l2_flags(&mut table).await? {
                self.add(offset, 1, -1).await?;
                *entry = self.put(crate::bytes::table(&table)).await? | COPIED;
            } else {
                let once = self.get(self.image.cluster_of(offset)).await? == 1;
                *entry = offset | if once { COPIED } else { 0 };
            }
        }
        Ok(())
    }

    /// Whether any flag had to change.
    async fn set_l2_flags(&mut self, table: &mut [u64]) -> Result<bool, ToolError> {
        let words = (self.image.header.l2_entry_size() / 8) as usize;
        let external = self.image.header.has(incompatible::DATA_FILE);
        let mut changed = false;
        for entry in table.iter_mut().step_by(words) {
            let offset = *entry & OFFSET_MASK;
            let copied = if *entry & COMPRESSED != 0 {
                false
            } else if external {
                continue;
            } else if self.image.is_cluster(offset) {
                self.get(self.image.cluster_of(offset)).await? == 1
            } else {
                continue;
            };
            if copied != (*entry & COPIED != 0) {
                *entry ^= COPIED;
                changed = true;
            }
        }
        Ok(changed)
    }

    /// Write what is left, and switch to it. The image's header may have been changed before.
    pub(super) async fn commit(mut self) -> Result<(), ToolError> {
        let mut homes: BTreeMap<u64, u64> = BTreeMap::new();
        let mut new_table: Option<(u64, u64)> = None;
        let bits = self.image.header.cluster_bits;
        let old = self.table.clone();
        let old_table = self.image.header.refcount_table_offset;
        let old_clusters = u64::from(self.image.header.refcount_table_clusters);
        loop {
            let homeless = self.blocks.keys().find(|number| !homes.contains_key(number)).copied();
            if let Some(number) = homeless {
                if let Some(old) = self.table.get(number as usize).filter(|old| **old != 0) {
                    self.add_or_leave(*old >> bits).await?;
                }
                let home = self.take(1).await?;
                homes.insert(number, home);
                continue;
            }
            let Some(last) = self.blocks.keys().next_back() else { break };
            let entries = (last + 1).max(self.table.len() as u64);
            let clusters = (entries * 8).div_ceil(1 << bits).max(1);
            if clusters << bits > MAX_REFCOUNT_TABLE_BYTES {
                return Err(self.image.refused("its refcount table would be larger than 8 MiB"));
            }
            match new_table {
                None => {
                    for cluster in 0..old_clusters {
                        self.add_or_leave((old_table >> bits) + cluster).await?;
                    }
                    new_table = Some((self.take(clusters).await?, clusters));
                }
                Some((offset, have)) if have < clusters => {
                    self.add(offset, have << bits, -1).await?;
                    new_table = Some((self.take(clusters).await?, clusters));
                }
                Some(_) => break,
            }
        }
        for (number, home) in &homes {
            let number = *number as usize;
            if self.table.len() <= number {
                self.table.resize(number + 1, 0);
            }
            if let Some(entry) = self.table.get_mut(number) {
                *entry = *home;
            }
        }
        for (number, block) in &self.blocks {
            if let Some(home) = homes.get(number) {
                self.image.write(*home, block).await?;
            }
        }
        if let Some((offset, clusters)) = new_table {
            self.table.resize(((clusters << bits) / 8) as usize, 0);
            self.image.write_table(offset, &self.table).await?;
            self.image.header.refcount_table_offset = offset;
            self.image.header.refcount_table_clusters = clusters as u32;
        }
        self.image.write_header().await?;
        match self.free {
            Free::Refcounts => self.give_back(&old).await,
            // Of an image that contradicted itself it is not known whose they were.
            Free::Unreferenced(..) => Ok(()),
        }
    }

    /// Give the file system back what is free now and was not before.
    async fn give_back(&mut self, old: &[u64]) -> Result<(), ToolError> {
        let header = &self.image.header;
        let (entries, order) = (header.refcount_block_entries(), header.refcount_order);
        let mut runs: Vec<std::ops::Range<u64>> = Vec::new();
        for (number, block) in std::mem::take(&mut self.blocks) {
            let Some(entry) = old.get(number as usize).filter(|entry| **entry != 0) else {
                continue;
            };
            let before =
                self.image.read(entry & REFCOUNT_OFFSET_MASK, self.image.cluster()).await?;
            let freed = (0..entries).filter(|index| {
                refcount(&before, *index, order) != 0 && refcount(&block, *index, order) == 0
            });
            for cluster in freed.map(|index| number * entries + index) {
                match runs.last_mut() {
                    Some(run) if run.end == cluster => run.end += 1,
                    _ => runs.push(cluster..cluster + 1),
                }
            }
        }
        together(runs.into_iter().map(|run| self.image.punch(run))).await
    }

    /// One reference less to a cluster that is to be free, which may not have been counted.
    pub(super) async fn add_or_leave(&mut self, cluster: u64) -> Result<(), ToolError> {
        match self.get(cluster).await? {
            0 => Ok(()),
            count => self.set(cluster, count - 1).await,
        }
    }
}

/// The L2 table of an L1 entry, or zeros.
pub(super) async fn read_l2(
    rewrite: &Rewrite<'_, '_, '_>,
    entry: u64,
) -> Result<Vec<u64>, ToolError> {
    let image = &rewrite.image;
    match entry & OFFSET_MASK {
        0 => Ok(vec![0; (image.cluster() / 8) as usize]),
        offset if image.is_cluster(offset) => image.read_l2(offset).await,
        offset => Err(image.corrupt(format!("an L1 entry points to {offset:#x}"))),
    }
}

/// Put a changed L2 table in the place of the one that an L1 entry points to.
pub(super) async fn replace_l2(
    rewrite: &mut Rewrite<'_, '_, '_>,
    entry: &mut u64,
    new: &[u64],
) -> Result<(), ToolError> {
    if *entry & OFFSET_MASK != 0 {
        rewrite.add(*entry & OFFSET_MASK, 1, -1).await?;
    }
    *entry = rewrite.put(table(new)).await? | COPIED;
    Ok(())
}

/// One reference less to what an L2 entry points to.
pub(super) async fn release(rewrite: &mut Rewrite<'_, '_, '_>, word: u64) -> Result<(), ToolError> {
    if rewrite.image.header.has(incompatible::DATA_FILE) {
        return Ok(());
    }
    if word & COMPRESSED != 0 {
        let (offset, len) = rewrite.image.header.compressed_extent(word);
        return rewrite.add(offset, len, -1).await;
    }
    match word & OFFSET_MASK {
        0 => Ok(()),
        offset => rewrite.add(offset, 1, -1).await,
    }
}
