//! Every reference from an image's tables to its clusters, counted.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::bitmap_directory;
use super::counts::Counts;
use super::header::{
    COMPRESSED, COPIED, L1_RESERVED, OFFSET_MASK, REFCOUNT_OFFSET_MASK, ZERO, incompatible,
};
use super::offline::Offline;
use super::snapshot_scan::Scan;
use super::tool::ToolError;

/// The most entries of an L1 table that may point where another one does, for a repair to set in.
const MOST_TWICE: usize = 1024;
/// The most L2 tables of which a file has nothing but a hole, for an image to be believed: those of 128 TiB
/// in clusters of 64 KiB.
const MOST_EMPTY: usize = 1 << 18;
/// Of the bitmap of an extended L2 entry: the subclusters that have data.
const ALLOCATED: u64 = 0xffff_ffff;
/// The most pointers that lead nowhere that are remembered.
const MOST_DANGLING: usize = 1 << 16;

/// What is wrong with an image's tables.
#[derive(Default)]
pub(super) struct Problems {
    /// Things found wrong.
    pub(super) count: u64,
    /// What they are, the first of them.
    pub(super) messages: Vec<String>,
    /// Clusters past the file's end that something points to.
    pub(super) dangling: BTreeSet<u64>,
    /// Some tables could not be read, so what they refer to is not known.
    pub(super) blind: bool,
    /// Some entries can be made right where they are: see [`mended`].
    pub(super) mendable: bool,
    /// The tables claim to be so much more than the file holds that nobody should follow them.
    pub(super) absurd: bool,
}

impl Problems {
    /// The most messages kept.
    const MOST: usize = 200;

    pub(super) fn add(&mut self, message: impl FnOnce() -> String) {
        self.count += 1;
        self.note(message);
    }

    pub(super) fn note(&mut self, message: impl FnOnce() -> String) {
        if self.messages.len() < Problems::MOST {
            self.messages.push(message());
        }
    }
}

/// The upper tables of an image.
pub(super) struct Tables {
    /// The active L1 table.
    pub(super) l1: Vec<u64>,
    /// What the table of snapshots says, and what is wrong with it.
    pub(super) snapshots: Scan,
    /// The refcount table; entries that cannot be are 0.
    pub(super) refcount_table: Vec<u64>,
    /// Some entries of it could not be.
    pub(super) refcount_table_is_wrong: bool,
    /// L2 tables by host offset, and how many L1 entries point to each.
    pub(super) l2: BTreeMap<u64, i64>,
    /// How many of them are holes.
    empty: usize,
    /// Metadata by host offset and length in bytes, and how often it is pointed to.
    extents: BTreeMap<(u64, u64), i64>,
}

impl Tables {
    /// Read them all, as far as they make sense.
    pub(super) async fn read(
        image: &Offline<'_>,
        problems: &mut Problems,
    ) -> Result<Tables, ToolError> {
        let header = &image.header;
        let mut tables = Tables {
            l1: image.read_table(header.l1_offset, u64::from(header.l1_size)).await?,
            snapshots: Scan::default(),
            refcount_table: Vec::new(),
            refcount_table_is_wrong: false,
            l2: BTreeMap::new(),
            empty: 0,
            extents: BTreeMap::from([((0, image.cluster()), 1)]),
        };
        tables.add_extent(image, (header.l1_offset, u64::from(header.l1_size) * 8), problems);
        if let Some(encryption) = header.encryption() {
            tables.add_extent(image, (encryption.offset, encryption.len), problems);
        }
        let place = (header.l1_offset, header.l1_size);
        tables.add_l1(image, place, 1, "the active L1 table", problems).await?;
        match Scan::of(image).await {
            Ok(snapshots) => {
                problems.count += snapshots.faults();
                snapshots.messages.iter().for_each(|said| problems.note(|| said.clone()));
                for clusters in &snapshots.clusters {
                    let len = (clusters.end - clusters.start) << header.cluster_bits;
                    tables.refer(clusters.start << header.cluster_bits, len);
                }
                tables.add_snapshots(image, &snapshots.l1_tables, problems).await?;
                tables.snapshots = snapshots;
            }
            Err(ToolError::Corrupt { found, .. }) => {
                problems.add(|| found);
                problems.blind = true;
            }
            Err(other) => return Err(other),
        }
        match tables.add_bitmaps(image, problems).await {
            Err(ToolError::Corrupt { found, .. }) => {
                problems.add(|| found);
                problems.blind = true;
            }
            end => end?,
        }
        tables.add_refcounts(image, problems).await?;
        Ok(tables)
    }

    fn add_extent(
        &mut self,
        image: &Offline<'_>,
        (offset, len): (u64, u64),
        problems: &mut Problems,
    ) {
        if len > 0 && image.is_in_file(offset, len) {
            self.refer(offset, len);
        } else if len > 0 {
            problems
                .add(|| format!("{len} bytes of tables at {offset:#x} lie past the file's end"));
            dangles(image, offset, problems);
        }
    }

    fn refer(&mut self, offset: u64, len: u64) {
        *self.extents.entry((offset, len)).or_default() += 1;
    }

    /// The L1 tables of snapshots. One that several have is looked at once.
    async fn add_snapshots(
        &mut self,
        image: &Offline<'_>,
        l1_tables: &[(u64, u32, u32)],
        problems: &mut Problems,
    ) -> Result<(), ToolError> {
        let mut places: BTreeMap<(u64, u32), (i64, u32)> = BTreeMap::new();
        for (offset, size, number) in l1_tables.iter().copied() {
            self.add_extent(image, (offset, u64::from(size) * 8), problems);
            places.entry((offset, size)).or_insert((0, number)).0 += 1;
        }
        let mut end = 0;
        for ((offset, size), (times, number)) in places {
            let what = format!("the L1 table of snapshot {number}");
            if problems.absurd {
                break;
            }
            if offset < end {
                problems.add(|| format!("{what} at {offset:#x} lies in another one's"));
                problems.blind = true;
                continue;
            }
            end = offset + u64::from(size) * 8;
            self.add_l1(image, (offset, size), times, &what, problems).await?;
        }
        Ok(())
    }

    /// Remember what an L1 table at `offset` of `size` entries points to, `times` over.
    async fn add_l1(
        &mut self,
        image: &Offline<'_>,
        (offset, size): (u64, u32),
        times: i64,
        what: &str,
        problems: &mut Problems,
    ) -> Result<(), ToolError> {
        let mut seen = HashSet::new();
        let mut twice = 0;
        let mut from = 0;
        while let Some((first, entries)) = image.used_entries(offset, size.into(), from).await? {
            from = first + entries.len() as u64;
            for (index, entry) in (first..).zip(entries).filter(|(_, entry)| *entry != 0) {
                if problems.absurd {
                    return Ok(());
                }
                let offset = entry & OFFSET_MASK;
                if entry & L1_RESERVED != 0 {
                    problems
                        .add(|| format!("{what}: entry {index} is {entry:#x}, with reserved bits"));
                }
                if image.is_cluster(offset) {
                    twice += usize::from(!seen.insert(offset));
                    problems.blind |= twice > MOST_TWICE;
                    self.add_l2(image, offset, times, problems);
                } else if offset != 0 {
                    problems.add(|| {
                        format!(
                            "{what}: entry {index} points to {offset:#x}, where no table can be"
                        )
                    });
                    dangles(image, offset, problems);
                }
            }
        }
        Ok(())
    }

    fn add_l2(&mut self, image: &Offline<'_>, offset: u64, times: i64, problems: &mut Problems) {
        match self.l2.entry(offset) {
            Entry::Occupied(mut there) => *there.get_mut() += times,
            Entry::Vacant(place) => {
                place.insert(times);
                self.empty += usize::from(image.container.is_hole(offset, image.cluster()));
                if self.empty > MOST_EMPTY {
                    problems.add(|| {
                        format!(
                            "more than {MOST_EMPTY} L2 tables lie in holes of the file, which no \
                             image has: the rest was not looked at"
                        )
                    });
                    (problems.blind, problems.absurd) = (true, true);
                }
            }
        }
    }

    async fn add_bitmaps(
        &mut self,
        image: &Offline<'_>,
        problems: &mut Problems,
    ) -> Result<(), ToolError> {
        let Some(extension) = image.header.bitmaps() else { return Ok(()) };
        let entries = bitmap_directory::read(image).await?;
        let directory = (extension.directory_offset, extension.directory_size);
        self.add_extent(image, directory, problems);
        for entry in &entries {
            let table = bitmap_directory::read_table(image, entry).await?;
            self.add_extent(image, (entry.table_offset, table.len() as u64 * 8), problems);
            let data = table.iter().map(|word| word & OFFSET_MASK).filter(|offset| *offset != 0);
            data.for_each(|offset| self.refer(offset, image.cluster()));
        }
        Ok(())
    }

    async fn add_refcounts(
        &mut self,
        image: &Offline<'_>,
        problems: &mut Problems,
    ) -> Result<(), ToolError> {
        let header = &image.header;
        let len = u64::from(header.refcount_table_clusters) * image.cluster();
        if len == 0 {
            return Ok(());
        }
        self.add_extent(image, (header.refcount_table_offset, len), problems);
        let mut table = image.read_table(header.refcount_table_offset, len / 8).await?;
        let mut seen = HashSet::new();
        for (index, entry) in table.iter_mut().enumerate().filter(|(_, entry)| **entry != 0) {
            let offset = *entry & REFCOUNT_OFFSET_MASK;
            if offset == *entry && image.is_cluster(offset) && seen.insert(offset) {
                self.refer(offset, image.cluster());
                continue;
            }
            problems.add(|| {
                format!(
                    "refcount table entry {index} is {entry:#x}, where no block of its own can be"
                )
            });
            *entry = 0;
            self.refcount_table_is_wrong = true;
        }
        self.refcount_table = table;
        Ok(())
    }

    /// Count every reference. Problems with L2 tables are told where they are asked for.
    pub(super) async fn count(
        &self,
        image: &Offline<'_>,
        counts: &mut Counts,
        mut problems: Option<&mut Problems>,
    ) -> Result<(), ToolError> {
        for ((offset, len), times) in &self.extents {
            add_range(image, counts, *offset, *len, *times);
        }
        for (offset, times) in &self.l2 {
            add_range(image, counts, *offset, image.cluster(), *times);
            count_l2(image, *offset, *times, counts, problems.as_deref_mut()).await?;
        }
        Ok(())
    }
}

/// Count the references of an L1 table to L2 tables and data, each so many times.
pub(super) async fn count_tree(
    image: &Offline<'_>,
    l1: &[u64],
    times: i64,
    counts: &mut Counts,
) -> Result<(), ToolError> {
    let mut seen = HashSet::new();
    for (index, entry) in l1.iter().enumerate() {
        let offset = entry & OFFSET_MASK;
        if offset == 0 {
            continue;
        }
        if !image.is_cluster(offset) || !seen.insert(offset) {
            return Err(image.corrupt(format!("L1 entry {index} points to {offset:#x}")));
        }
        add_range(image, counts, offset, image.cluster(), times);
        let mut problems = Problems::default();
        count_l2(image, offset, times, counts, Some(&mut problems)).await?;
        if let Some(found) = problems.messages.into_iter().next() {
            return Err(image.corrupt(found));
        }
    }
    Ok(())
}

fn add_range(image: &Offline<'_>, counts: &mut Counts, offset: u64, len: u64, times: i64) {
    let first = image.cluster_of(offset);
    let last = image.cluster_of(offset + len.max(1) - 1);
    counts.add(first, last - first + 1, times);
}

fn dangles(image: &Offline<'_>, offset: u64, problems: &mut Problems) {
    problems.dangling.insert(image.cluster_of(offset));
    // An unaligned pointer touches the next one too.
    problems.dangling.insert(image.cluster_of(offset) + 1);
    problems.blind |= problems.dangling.len() > MOST_DANGLING;
    problems.dangling.split_off(&(1 << 55));
    while problems.dangling.len() > MOST_DANGLING {
        problems.dangling.pop_last();
    }
}

async fn count_l2(
    image: &Offline<'_>,
    at: u64,
    times: i64,
    counts: &mut Counts,
    mut problems: Option<&mut Problems>,
) -> Result<(), ToolError> {
    let table = image.read_used_l2(at).await?;
    let header = &image.header;
    let words = (header.l2_entry_size() / 8) as usize;
    let external = header.has(incompatible::DATA_FILE);
    for (index, entry) in table.chunks_exact(words).enumerate() {
        let [word, ..] = *entry else { continue };
        let bitmap = entry.get(1).copied().unwrap_or(0);
        if word == 0 && bitmap == 0 {
            continue;
        }
        let reference = Reference::of(image, word);
        match reference {
            Reference::Compressed(offset, len) => add_range(image, counts, offset, len, times),
            Reference::Cluster(offset) if !external => {
                add_range(image, counts, offset, image.cluster(), times);
            }
            _ => {}
        }
        if let Some(problems) = problems.as_deref_mut() {
            if let Some(fault) = fault(image, word, bitmap, reference) {
                problems.add(|| {
                    format!("L2 table at {at:#x}: entry {index} is {word:#x}, {bitmap:#x}: {fault}")
                });
                let mendable = mended(image, word, bitmap).is_some();
                problems.mendable |= mendable;
                if !external && !mendable {
                    let offset = match word & COMPRESSED {
                        0 => word & OFFSET_MASK,
                        _ => image.header.compressed_extent(word).0,
                    };
                    dangles(image, offset, problems);
                }
            }
        }
    }
    Ok(())
}

/// What an L2 entry points to.
#[derive(Clone, Copy)]
enum Reference {
    Nothing,
    /// A standard cluster at a host offset.
    Cluster(u64),
    /// Compressed data: host offset and length.
    Compressed(u64, u64),
    /// Something that cannot be.
    Nowhere,
}

impl Reference {
    fn of(image: &Offline<'_>, word: u64) -> Reference {
        let external = image.header.has(incompatible::DATA_FILE);
        let offset = word & OFFSET_MASK;
        if word & COMPRESSED != 0 {
            let (offset, len) = image.header.compressed_extent(word);
            match image.is_in_file(offset, len) && !external {
                true => Reference::Compressed(offset, len),
                false => Reference::Nowhere,
            }
        } else if offset == 0 && !(external && word & COPIED != 0) {
            Reference::Nothing
        } else if offset % image.cluster() == 0 && (external || image.is_cluster(offset)) {
            Reference::Cluster(offset)
        } else {
            Reference::Nowhere
        }
    }
}

/// What an entry that contradicts itself is to be, where that leaves every byte of the disk that it tells of: one that says
/// zeros, wherever it points to, and subclusters that are said to be both data and zeros, or data without a place.
pub(super) fn mended(image: &Offline<'_>, word: u64, bitmap: u64) -> Option<(u64, u64)> {
    let header = &image.header;
    if word & COMPRESSED != 0 || header.has(incompatible::DATA_FILE) {
        return None;
    }
    let (allocated, zero) = (bitmap & ALLOCATED, bitmap >> 32);
    match (Reference::of(image, word), header.extended_l2()) {
        (Reference::Nowhere, false) if word & ZERO != 0 && header.version > 2 => Some((ZERO, 0)),
        (Reference::Nowhere, true) if allocated == 0 => Some((0, bitmap)),
        // QEMU, too, has such subclusters be zeros.
        (Reference::Nothing, true) if allocated != 0 => Some((0, (zero | allocated) << 32)),
        (Reference::Cluster(_), true) if allocated & zero != 0 => Some((word, bitmap & !zero)),
        _ => None,
    }
}

fn fault(
    image: &Offline<'_>,
    word: u64,
    bitmap: u64,
    reference: Reference,
) -> Option<&'static str> {
    let header = &image.header;
    let allocated = bitmap & ALLOCATED;
    match reference {
        Reference::Nowhere if word & COMPRESSED != 0 => {
            return Some("compressed data where none can be");
        }
        Reference::Nowhere => return Some("no cluster can be there"),
        // The flag of a compressed cluster is put right with the others.
        Reference::Compressed(..) => return None,
        Reference::Nothing if header.extended_l2() && allocated != 0 => {
            return Some("subclusters without a cluster");
        }
        Reference::Nothing | Reference::Cluster(_) => {}
    }
    if allocated & bitmap >> 32 != 0 {
        return Some("subclusters both allocated and zero");
    }
    let zero_allowed = header.version > 2 && !header.extended_l2();
    let known = OFFSET_MASK | COPIED | if zero_allowed { ZERO } else { 0 };
    (word & !known != 0).then_some("reserved bits are set")
}
