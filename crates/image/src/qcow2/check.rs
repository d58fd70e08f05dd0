//! Looking for what is wrong with an image, and repairing what can be.
//!
//! References from all tables are counted and compared with the refcounts, in as many rounds as a
//! bounded memory asks for. A repair writes new refcount blocks, a new refcount table and, where
//! flags change, new L1 and L2 tables to clusters that nothing refers to, then switches the header
//! (see [`super::rewrite`]); so does a table of snapshots that has too much, or too little. Pointers that lead nowhere
//! are left, unless they are said to lead to no data: what they led to is not known, and looks like leaks. So where there
//! is such a pointer nothing is freed, and new tables lie behind the file.

use std::collections::{BTreeSet, HashMap, HashSet};

use ringtap_io::Io;

use super::counts::{self, Counts, refcount};
use super::header::{
    COMPRESSED, COPIED, MAX_SNAPSHOTS, OFFSET_MASK, REFCOUNT_OFFSET_MASK, ZERO, autoclear,
    incompatible,
};
use super::moment::Moment;
use super::offline::Offline;
use super::report::{Repair, Report};
use super::rewrite::{Free, Rewrite};
use super::snapshot_mend;
use super::tool::ToolError;
use super::walk::{Problems, Tables, mended};
use super::{Header, HeaderError, extension};
use crate::{Container, OpenError};

/// Bytes of memory for counting references and for the L1 table: what a hostile image can make it take.
const MEMORY: usize = 48 << 20;
/// For counting references, at least.
const LEAST_MEMORY: usize = 8 << 20;

/// What is said where a pointer leads nowhere.
const KEPT: &str = "no cluster is freed: what looks like a leak may be what a pointer led to that leads nowhere now";

/// Look at every table of the image, and repair as asked. Nobody else may use the image.
pub async fn check(io: &Io, container: &Container, repair: Repair) -> Result<Report, ToolError> {
    check_within(io, container, repair, MEMORY).await
}

/// As [`check`], of all that there is to repair, where nobody asked for it: nothing is where a pointer leads nowhere.
pub(super) async fn repair_unasked(io: &Io, container: &Container) -> Result<Report, ToolError> {
    check_as(io, container, (Repair::All, Asked::No), MEMORY).await
}

/// As [`check`], counting in so many bytes of memory.
pub(super) async fn check_within(
    io: &Io,
    container: &Container,
    repair: Repair,
    memory: usize,
) -> Result<Report, ToolError> {
    check_as(io, container, (repair, Asked::Yes), memory).await
}

/// Look at the tables as they were at a moment, of an image that is served. Nothing is repaired.
pub(super) async fn check_at(
    io: &Io,
    container: &Container,
    moment: &Moment,
) -> Result<Report, ToolError> {
    let header = believed(container, moment.header.clone(), moment.len)?;
    let mut image = Offline { io, container, header, moment: Some(moment) };
    let memory = memory_beside(&image, MEMORY);
    let Looked { report, too_much, .. } = look(&mut image, Repair::Nothing, memory).await?;
    match moment.lost().or(too_much) {
        None => Ok(report),
        Some(why) => Err(image.refused(why)),
    }
}

/// Of so many bytes, what is left beside the L1 table.
fn memory_beside(image: &Offline<'_>, memory: usize) -> usize {
    let l1 = image.header.l1_size as usize * 8;
    memory.saturating_sub(l1).max(LEAST_MEMORY.min(memory))
}

/// Whether an operator asked for a repair.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    Yes,
    No,
}

async fn check_as(
    io: &Io,
    container: &Container,
    (repair, asked): (Repair, Asked),
    memory: usize,
) -> Result<Report, ToolError> {
    let mut image = open(io, container).await?;
    let memory = memory_beside(&image, memory);
    let Looked { report: mut before, dangles, too_much, beyond_repair } =
        look(&mut image, Repair::Nothing, memory).await?;
    if let Some(found) = too_much.filter(|_| repair != Repair::All) {
        return Err(image.refused(format!(
            "it cannot be used: {found}; check --repair all takes away what is too much"
        )));
    }
    let flagged = image.header.has(incompatible::DIRTY | incompatible::CORRUPT);
    let wanted = match repair {
        Repair::Nothing => false,
        Repair::Leaks => before.leaks > 0,
        Repair::All => !before.is_clean() || flagged,
    };
    if !wanted {
        return Ok(before);
    }
    if let Some(why) = beyond_repair {
        before.messages.insert(0, format!("nothing is repaired, since {why}"));
        return Ok(before);
    }
    if dangles && (repair == Repair::Leaks || asked == Asked::No) {
        before.messages.insert(0, KEPT.into());
        return Ok(before);
    }
    if container.traits().read_only {
        return Err(image.refused("it is open read-only and cannot be repaired"));
    }
    let mut after = before.clone();
    // A table that moves away from what it overlapped changes what the flags there must be. With
    // pointers that lead nowhere it is looked at once: what they lead to is not known.
    for _ in 0..if dangles { 1 } else { 4 } {
        look(&mut image, repair, memory).await?;
        image = open(io, container).await?;
        let found = look(&mut image, Repair::Nothing, memory).await?.report;
        // As many may be others: what a table overlapped has another refcount now.
        let stays = found == after;
        after = found;
        if after.is_clean() || repair == Repair::Leaks || stays {
            break;
        }
    }
    if dangles {
        after.messages.insert(0, KEPT.into());
    }
    after.corruptions_fixed = before.corruptions.saturating_sub(after.corruptions);
    after.leaks_fixed = before.leaks.saturating_sub(after.leaks);
    if repair == Repair::All && flagged && after.corruptions == 0 {
        image.header.incompatible &= !(incompatible::DIRTY | incompatible::CORRUPT);
        image.write_header().await?;
    }
    Ok(after)
}

/// The image, though its refcount table may be anywhere, and it may claim to have too many snapshots.
async fn open<'a>(io: &'a Io, container: &'a Container) -> Result<Offline<'a>, ToolError> {
    let header = Header::read(io, container).await?;
    let header = believed(container, header, container.len())?;
    Ok(Offline { io, container, header, moment: None })
}

/// What a header of a file of `end` bytes says, but for a refcount table that cannot be where it says.
fn believed(container: &Container, mut header: Header, end: u64) -> Result<Header, ToolError> {
    let few = Header { snapshots: header.snapshots.min(MAX_SNAPSHOTS), ..header.clone() };
    let found = match few.check_tables(end) {
        Err(HeaderError::Field { at: 48 | 56, .. }) => {
            header.refcount_table_clusters = 0;
            let sane = Header {
                refcount_table_clusters: 1,
                refcount_table_offset: header.l1_offset.max(header.cluster_size()),
                ..few
            };
            sane.check_tables(end.max(sane.refcount_table_offset + 1))
        }
        other => other,
    };
    let path = || container.path().to_owned();
    found.map_err(|source| OpenError::Qcow2 { path: path(), source })?;
    Ok(header)
}

/// What there is.
struct Looked {
    report: Report,
    /// Whether something points past the file's end.
    dangles: bool,
    /// What is more than there may be, so that nobody opens the image until it is gone.
    too_much: Option<String>,
    /// Why nothing can be repaired, where nothing can.
    beyond_repair: Option<String>,
}

async fn look(image: &mut Offline<'_>, repair: Repair, memory: usize) -> Result<Looked, ToolError> {
    let mut report =
        Report { total_clusters: image.header.size.div_ceil(image.cluster()), ..Report::default() };
    let mut start = 0;
    let (mut dangles, mut too_much, mut beyond_repair) = (false, None, None);
    loop {
        let mut problems = Problems::default();
        let mut tables = Tables::read(image, &mut problems).await?;
        let mut counts = Counts::new(start, memory);
        if problems.absurd {
            report.corruptions += problems.count;
            report.messages = problems.messages;
            let why = "its tables claim what no file of its size can hold";
            return match repair {
                Repair::Nothing => {
                    Ok(Looked { report, dangles, too_much, beyond_repair: Some(why.to_owned()) })
                }
                _ => Err(image.corrupt(why)),
            };
        }
        tables.count(image, &mut counts, Some(&mut problems)).await?;
        for cluster in image.moment.iter().flat_map(|moment| &moment.retired) {
            counts.add(*cluster, 1, 1);
        }
        if start == 0 {
            if image.header.refcount_table_clusters == 0 {
                problems.add(|| "there is no refcount table where the header says".to_owned());
            }
            let no_refcounts =
                tables.refcount_table_is_wrong || image.header.refcount_table_clusters == 0;
            if problems.blind {
                beyond_repair = Some("some tables cannot be read".to_owned());
            } else if no_refcounts && !problems.dangling.is_empty() {
                let why = "some refcounts cannot be read, and a pointer leads nowhere: what that led to would look \
                           free. Convert it to a new image";
                beyond_repair = Some(why.to_owned());
            }
            if let Some(why) = beyond_repair.as_ref().filter(|_| repair != Repair::Nothing) {
                return Err(image.corrupt(format!("it cannot be repaired, since {why}")));
            }
            look_at_data(image, &tables, &mut report).await?;
            too_much = tables.snapshots.loses().then(|| tables.snapshots.messages.join("; "));
        }
        let dangling = std::mem::take(&mut problems.dangling);
        dangles |= !dangling.is_empty();
        let mendable = problems.mendable;
        let mut round =
            Round { image, tables: &mut tables, counts: &counts, leaks: 0, pieces: HashMap::new() };
        let mut found = if start == 0 { problems } else { Problems::default() };
        round.compare(&mut report, &mut found).await?;
        report.leaks += round.leaks;
        report.corruptions += found.count;
        let room = 200usize.saturating_sub(report.messages.len());
        report.messages.extend(found.messages.into_iter().take(room));
        if repair == Repair::All && mendable {
            round.mend_entries().await?;
        }
        if repair != Repair::Nothing {
            round.repair(repair, &dangling).await?;
        }
        start = counts.range().end;
        if start == u64::MAX {
            return Ok(Looked { report, dangles, too_much, beyond_repair });
        }
    }
}

/// The clusters counted in one round.
struct Round<'r, 'a> {
    image: &'r mut Offline<'a>,
    tables: &'r mut Tables,
    counts: &'r Counts,
    leaks: u64,
    /// Some pieces of refcount blocks by host offset, empty where the file has a hole.
    pieces: HashMap<u64, Vec<u8>>,
}

/// The most bytes of a piece of a refcount block, and the most pieces remembered.
const PIECE: u64 = 4096;
const MOST_PIECES: usize = 4096;

impl Round<'_, '_> {
    /// The numbers of the refcount blocks that have a cluster of this round with a refcount or a
    /// reference.
    fn block_numbers(&self) -> BTreeSet<u64> {
        let entries = self.image.header.refcount_block_entries();
        let range = self.counts.range();
        // A hole tells of no cluster.
        let says = |entry: u64| {
            let cluster = self.image.cluster();
            entry != 0 && !self.image.container.is_hole(entry & REFCOUNT_OFFSET_MASK, cluster)
        };
        let there = (0..).zip(&self.tables.refcount_table).filter(|(_, entry)| says(**entry));
        let numbers = there.map(|(number, _)| number).filter(|number| {
            let first = number * entries;
            first < range.end && first + entries > range.start
        });
        let mut numbers: BTreeSet<u64> = numbers.collect();
        let mut last = None;
        for (cluster, _) in self.counts.iter() {
            let number = cluster / entries;
            if last.replace(number) != Some(number) {
                numbers.insert(number);
            }
        }
        numbers
    }

    async fn block(&self, number: u64) -> Result<Option<Vec<u8>>, ToolError> {
        match self.tables.refcount_table.get(number as usize) {
            Some(entry) if *entry != 0 => {
                let offset = entry & REFCOUNT_OFFSET_MASK;
                self.image.read(offset, self.image.cluster()).await.map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Each cluster whose refcount is not the number of references: cluster, refcount, references.
    fn differences(&self, number: u64, block: Option<&[u8]>) -> Vec<(u64, u64, u64)> {
        let header = &self.image.header;
        let entries = header.refcount_block_entries();
        let range = self.counts.range();
        let first = number * entries;
        let mine = first.max(range.start)..(first + entries).min(range.end);
        // Where both the block and the counts have nothing but zeros there is nothing to compare.
        let mut pages: BTreeSet<u64> = self.counts.pages(mine.clone()).collect();
        let bytes_of_page = (counts::PAGE as usize) << header.refcount_order >> 3;
        let of_block = block.unwrap_or_default().chunks(bytes_of_page);
        let used = (first / counts::PAGE..).zip(of_block).filter(|(_, bytes)| is_used(bytes));
        pages.extend(used.map(|(page, _)| page));
        let clusters = pages.into_iter().flat_map(|page| {
            let page = page * counts::PAGE;
            page.max(mine.start)..(page + counts::PAGE).min(mine.end)
        });
        let all = clusters.filter_map(|cluster| {
            let there =
                block.map_or(0, |block| refcount(block, cluster % entries, header.refcount_order));
            let counted = self.counts.get(cluster).max(0) as u64;
            (there != counted).then_some((cluster, there, counted))
        });
        all.collect()
    }

    async fn compare(
        &mut self,
        report: &mut Report,
        problems: &mut Problems,
    ) -> Result<(), ToolError> {
        let bits = self.image.header.cluster_bits;
        let order = self.image.header.refcount_order;
        let entries = self.image.header.refcount_block_entries();
        for number in self.block_numbers() {
            let block = self.block(number).await?;
            for (cluster, there, counted) in self.differences(number, block.as_deref()) {
                let tell = || {
                    let offset = cluster << bits;
                    format!("cluster at {offset:#x}: refcount {there}, references {counted}")
                };
                if there > counted {
                    self.leaks += 1;
                    problems.note(|| format!("leak: {}", tell()));
                } else {
                    problems.add(tell);
                }
            }
            if let Some(block) = block {
                let used = |index: &u64| refcount(&block, *index, order) != 0;
                let end =
                    block.iter().rposition(|byte| *byte != 0).map_or(0, |last| last as u64 + 1);
                let past = (end * 8).div_ceil(1 << order).min(entries);
                if let Some(index) = (0..past).rev().find(used) {
                    let end = (number * entries + index + 1).saturating_mul(1 << bits);
                    report.image_end = report.image_end.max(end);
                }
            }
        }
        for (number, entry) in self.tables.refcount_table.iter().enumerate() {
            let cluster = self.image.cluster_of(entry & REFCOUNT_OFFSET_MASK);
            let counted = self.counts.range().contains(&cluster);
            if *entry != 0 && counted && self.counts.get(cluster) > 1 {
                problems.add(|| format!("refcount block {number} lies where something else does"));
            }
        }
        self.compare_flags(problems).await
    }

    /// Where a flag does not say what the refcount does.
    async fn compare_flags(&mut self, problems: &mut Problems) -> Result<(), ToolError> {
        let words = (self.image.header.l2_entry_size() / 8) as usize;
        let external = self.image.header.has(incompatible::DATA_FILE);
        let mut seen = HashSet::new();
        for index in 0..self.tables.l1.len() {
            let entry = self.tables.l1.get(index).copied().unwrap_or(0);
            let offset = entry & OFFSET_MASK;
            if !self.image.is_cluster(offset) {
                continue;
            }
            if self.flag_is_wrong(entry).await? {
                problems
                    .add(|| format!("L1 entry {index} is {entry:#x}: its COPIED flag is wrong"));
            }
            if !seen.insert(offset) {
                continue;
            }
            let table = self.image.read_used_l2(offset).await?;
            for (index, word) in table.iter().step_by(words).enumerate() {
                let wrong = if word & COMPRESSED != 0 {
                    word & COPIED != 0
                } else {
                    !external
                        && self.image.is_cluster(word & OFFSET_MASK)
                        && self.flag_is_wrong(*word).await?
                };
                if wrong {
                    problems.add(|| {
                        format!(
                            "L2 table at {offset:#x}: entry {index} is {word:#x}: \
                             its COPIED flag is wrong"
                        )
                    });
                }
            }
        }
        Ok(())
    }

    /// Whether the flag of an entry says something else than the refcount.
    async fn flag_is_wrong(&mut self, entry: u64) -> Result<bool, ToolError> {
        let cluster = self.image.cluster_of(entry & OFFSET_MASK);
        if !self.counts.range().contains(&cluster) {
            return Ok(false);
        }
        Ok((entry & COPIED != 0) != (self.refcount(cluster).await? == 1))
    }

    /// The refcount of a cluster, as the image has it.
    async fn refcount(&mut self, cluster: u64) -> Result<u64, ToolError> {
        let order = self.image.header.refcount_order;
        let entries = self.image.header.refcount_block_entries();
        let block = self.tables.refcount_table.get((cluster / entries) as usize);
        let block = block.map_or(0, |entry| entry & REFCOUNT_OFFSET_MASK);
        if block == 0 {
            return Ok(0);
        }
        let len = PIECE.min(self.image.cluster());
        let of_piece = (len * 8) >> order;
        let index = cluster % entries;
        let at = block + index / of_piece * len;
        if !self.pieces.contains_key(&at) {
            if self.pieces.len() >= MOST_PIECES {
                self.pieces.clear();
            }
            let piece = match self.image.container.is_hole(at, len) {
                true => Vec::new(),
                false => self.image.read(at, len).await?,
            };
            self.pieces.insert(at, piece);
        }
        let piece = self.pieces.get(&at).map_or(&[][..], |piece| piece);
        Ok(refcount(piece, index % of_piece, order))
    }

    /// Put right where they are the entries whose content is known. An entry lies within a sector, which a power cut leaves as
    /// it was or as it is to be.
    async fn mend_entries(&mut self) -> Result<(), ToolError> {
        let words = (self.image.header.l2_entry_size() / 8) as usize;
        for (offset, times) in &self.tables.l2 {
            let cluster = self.image.cluster_of(*offset);
            // What is something else, too, is not written to.
            let own = self.counts.range().contains(&cluster) && self.counts.get(cluster) == *times;
            if !own {
                continue;
            }
            let table = self.image.read_used_l2(*offset).await?;
            for (place, entry) in (*offset..).step_by(words * 8).zip(table.chunks_exact(words)) {
                let (word, bitmap) = (entry.first().copied(), entry.get(1).copied());
                let now = mended(self.image, word.unwrap_or(0), bitmap.unwrap_or(0));
                let Some((word, bitmap)) = now else { continue };
                let entry = [word, bitmap];
                let bytes = crate::bytes::table(entry.get(..words).unwrap_or(&entry));
                self.image.write(place, &bytes).await?;
            }
        }
        self.image.sync().await
    }

    async fn repair(&mut self, repair: Repair, dangling: &BTreeSet<u64>) -> Result<(), ToolError> {
        let mut changes = Vec::new();
        for number in self.block_numbers() {
            let block = self.block(number).await?;
            let differences = self.differences(number, block.as_deref());
            let wanted =
                differences.into_iter().filter(|(_, there, counted)| match there > counted {
                    true => dangling.is_empty(),
                    false => repair == Repair::All,
                });
            changes.extend(wanted.map(|(cluster, _, counted)| (cluster, counted)));
        }
        // Blocks that share their cluster with something else must not stay where they are; and a
        // block that moves takes the table along.
        let mut table = self.tables.refcount_table.clone();
        let bits = self.image.header.cluster_bits;
        let first = self.tables.refcount_table_is_wrong.then_some(0);
        let shared: Vec<u64> = (0..)
            .zip(&table)
            .filter(|(_, entry)| **entry != 0 && self.counts.get(**entry >> bits) > 1)
            .map(|(number, _)| number)
            .chain(first)
            .collect();
        let l1_len = self.image.header.l1_size;
        let l1_offset = self.image.header.l1_offset;
        let mut l1 = self.tables.l1.clone();
        let l1_clusters = (u64::from(l1_len) * 8).div_ceil(self.image.cluster());
        let l1_shared = repair == Repair::All
            && (0..l1_clusters).any(|at| self.counts.get((l1_offset >> bits) + at) > 1);
        if self.image.header.refcount_table_clusters == 0 {
            table.clear();
        }
        let free = Free::Unreferenced(self.counts, dangling);
        let mut rewrite = Rewrite::new(self.image, table, free);
        for (cluster, count) in changes {
            let most = rewrite.image.header.max_refcount();
            rewrite.set(cluster, count.min(most)).await?;
        }
        if repair == Repair::All {
            for number in shared {
                rewrite.touch(number).await?;
            }
            if self.tables.snapshots.faults() > 0 && self.counts.range().start == 0 {
                snapshot_mend::mend(&mut rewrite, &self.tables.snapshots).await?;
            }
        }
        rewrite.set_flags(&mut l1).await?;
        if l1 != self.tables.l1 || l1_shared {
            rewrite.add(l1_offset, u64::from(l1_len) * 8, -1).await?;
            let at = rewrite.put(crate::bytes::table(&l1)).await?;
            rewrite.image.header.l1_offset = at;
        }
        // What is written to must not be said to be what others keep up to date.
        let header = &mut rewrite.image.header;
        header.autoclear &= autoclear::KNOWN;
        if header.bitmaps().is_none() {
            header.autoclear &= !autoclear::BITMAPS;
            header.set_extension(extension::BITMAPS, None);
        }
        rewrite.commit().await?;
        self.tables.l1 = l1;
        Ok(())
    }
}

fn is_used(bytes: &[u8]) -> bool {
    bytes.iter().any(|byte| *byte != 0)
}

/// Count what is in the image, in the order of the disk.
async fn look_at_data(
    image: &Offline<'_>,
    tables: &Tables,
    report: &mut Report,
) -> Result<(), ToolError> {
    let words = (image.header.l2_entry_size() / 8) as usize;
    let external = image.header.has(incompatible::DATA_FILE);
    let mut seen = HashSet::new();
    for entry in &tables.l1 {
        let offset = entry & OFFSET_MASK;
        if !image.is_cluster(offset) || !seen.insert(offset) {
            continue;
        }
        // QEMU counts each table by itself.
        let mut next = 0;
        for word in image.read_used_l2(offset).await?.iter().step_by(words) {
            let host = word & OFFSET_MASK;
            if word & COMPRESSED != 0 {
                report.allocated_clusters += 1;
                report.compressed_clusters += 1;
                report.fragmented_clusters += 1;
            } else if host != 0 || (external && word & COPIED != 0 && word & ZERO == 0) {
                report.allocated_clusters += 1;
                report.fragmented_clusters += u64::from(next != 0 && host != next);
                next = host + image.cluster();
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
