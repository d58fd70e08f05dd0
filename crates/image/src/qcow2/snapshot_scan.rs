//! A table of internal snapshots read entry by entry: it may be long, or broken, and not much of it is kept.

use std::ops::Range;

use super::header::{Header, MAX_L1_BYTES, MAX_SNAPSHOTS};
use super::offline::Offline;
use super::snapshot_table::{FIXED, MAX_EXTRA, NO_ICOUNT, Snapshot};
use super::tool::ToolError;
use crate::bytes::{be16, be32};

/// The most bytes of a table that QEMU reads: 1024 for each of as many snapshots as there may be.
const MAX_TABLE: u64 = 64 << 20;
/// Bytes read and written at once.
pub(super) const PIECE: u64 = 16 << 10;
/// The most bytes of a name, and of an ID, that are shown.
const SHOWN_NAME: usize = 255;
const SHOWN_ID: usize = 127;

/// An entry as it lies in the table.
pub(super) struct Entry {
    /// Where it begins, in the table.
    at: u64,
    fixed: Vec<u8>,
    /// Of its extra data what may be kept.
    extra: Vec<u8>,
    /// The bytes of extra data that it says to have.
    extra_len: u64,
    /// ID and name.
    text: Vec<u8>,
}

impl Entry {
    /// Where the ID begins, in the table.
    fn text_at(&self) -> u64 {
        self.at + FIXED as u64 + self.extra_len
    }

    /// Where the entry ends, in the table.
    fn end(&self) -> u64 {
        (self.text_at() + self.text.len() as u64).next_multiple_of(8)
    }

    fn is_incomplete(&self, header: &Header) -> bool {
        header.version > 2 && self.extra_len < 16
    }

    fn id_and_name(&self) -> (&[u8], &[u8]) {
        let id_len = be16(&self.fixed, 12).map_or(0, usize::from);
        self.text.split_at(id_len.min(self.text.len()))
    }

    /// As it is shown: up to a byte 0, as programs in C read it, and not longer than they show it.
    fn shown(&self) -> Option<Snapshot> {
        let (id, name) = self.id_and_name();
        Snapshot::of_parts(&self.fixed, &self.extra, (shown(id, SHOWN_ID), shown(name, SHOWN_NAME)))
    }

    /// Its bytes as they are to be. Version 3 wants it to say how large the disk was, which then was as it is now.
    pub(super) fn mended(&self, header: &Header) -> Vec<u8> {
        let mut extra = self.extra.clone();
        if self.is_incomplete(header) {
            if extra.len() < 8 {
                let short = be32(&self.fixed, 32).unwrap_or(0);
                extra = u64::from(short).to_be_bytes().to_vec();
            }
            extra.truncate(8);
            extra.extend(header.size.to_be_bytes());
            extra.extend(NO_ICOUNT);
        }
        let mut bytes = self.fixed.clone();
        bytes.truncate(36);
        bytes.extend((extra.len() as u32).to_be_bytes());
        bytes.extend(extra);
        bytes.extend(&self.text);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }
}

fn shown(text: &[u8], most: usize) -> &[u8] {
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    text.get(..end.min(most)).unwrap_or(text)
}

/// Reads one entry after the other.
pub(super) struct Entries<'r, 'a> {
    image: &'r Offline<'a>,
    /// Where the next one begins, in the table.
    at: u64,
    /// Bytes that were read, and where in the table.
    piece: (u64, Vec<u8>),
}

impl<'r, 'a> Entries<'r, 'a> {
    pub(super) fn of(image: &'r Offline<'a>) -> Entries<'r, 'a> {
        Entries { image, at: 0, piece: (0, Vec::new()) }
    }

    async fn bytes(&mut self, at: u64, len: usize) -> Result<Vec<u8>, ToolError> {
        let of_piece = |piece: &(u64, Vec<u8>)| {
            let from = usize::try_from(at.checked_sub(piece.0)?).ok()?;
            piece.1.get(from..from.checked_add(len)?).map(<[u8]>::to_vec)
        };
        if let Some(found) = of_piece(&self.piece) {
            return Ok(found);
        }
        let offset = self.image.header.snapshots_offset + at;
        self.piece = (at, self.image.read(offset, PIECE.max(len as u64)).await?);
        Ok(of_piece(&self.piece).unwrap_or_default())
    }

    /// The next entry. What it says to have behind the file's end is zeros.
    pub(super) async fn next(&mut self) -> Result<Entry, ToolError> {
        let at = self.at;
        let there = self.image.len().saturating_sub(self.image.header.snapshots_offset);
        if at + FIXED as u64 > there {
            return Err(past_the_end(self.image));
        }
        let fixed = self.bytes(at, FIXED).await?;
        let field = |place| be16(&fixed, place).map_or(0, usize::from);
        let text_len = field(12) + field(14);
        let extra_len = u64::from(be32(&fixed, 36).unwrap_or(0));
        let kept = extra_len.min(MAX_EXTRA as u64) as usize;
        let extra = self.bytes(at + FIXED as u64, kept).await?;
        let text = self.bytes(at + FIXED as u64 + extra_len, text_len).await?;
        let entry = Entry { at, fixed, extra, extra_len, text };
        self.at = entry.end();
        Ok(entry)
    }
}

fn wrong(image: &Offline<'_>, what: &str) -> ToolError {
    let offset = image.header.snapshots_offset;
    image.corrupt(format!("the snapshot table at {offset:#x} cannot be read: {what}"))
}

fn past_the_end(image: &Offline<'_>) -> ToolError {
    wrong(image, &format!("it goes on past the file's {} bytes", image.len()))
}

/// What a snapshot table says, and what is wrong with it.
#[derive(Default)]
pub(super) struct Scan {
    /// L1 tables: offset and entries, and the snapshot's number.
    pub(super) l1_tables: Vec<(u64, u32, u32)>,
    /// The clusters that its entries lie in, but for those that are too much.
    pub(super) clusters: Vec<Range<u64>>,
    /// Snapshots that do not say how large the disk was, as version 3 wants it.
    pub(super) incomplete: u64,
    /// Snapshots with more extra data than there may be.
    pub(super) too_long: u64,
    /// Snapshots behind those that there may be.
    pub(super) too_many: u64,
    /// 1 where there are none, and their table begins where no cluster does: QEMU does not open such an image.
    pub(super) astray: u64,
    /// What is wrong, a sentence each, the first of it.
    pub(super) messages: Vec<String>,
    /// How many stay, and the bytes that they take.
    pub(super) kept: u32,
    pub(super) len: u64,
}

impl Scan {
    /// Look at all entries. An error is what cannot be put right: what the snapshots hold is not known then.
    pub(super) async fn of(image: &Offline<'_>) -> Result<Scan, ToolError> {
        let mut scan = Scan::default();
        let mut entries = Entries::of(image);
        let mut all = 0u64;
        let count = image.header.snapshots;
        let offset = image.header.snapshots_offset;
        if count == 0 && offset % image.cluster() != 0 {
            scan.astray = 1;
            scan.note(|| {
                format!("the table of no snapshots is at {offset:#x}, where no cluster begins")
            });
        }
        for number in 0..count {
            if number == MAX_SNAPSHOTS {
                scan.cut(count - number, "at most 65536 are possible");
                break;
            }
            let entry = entries.next().await?;
            let len = entry.mended(&image.header).len() as u64;
            if scan.len + len > MAX_TABLE {
                scan.cut(count - number, "a table has at most 64 MiB");
                break;
            }
            scan.len += len;
            scan.kept += 1;
            if entry.is_incomplete(&image.header) {
                scan.incomplete += 1;
                scan.note(|| format!("snapshot {number} does not say how large the disk was"));
            }
            if entry.extra_len > MAX_EXTRA as u64 {
                scan.too_long += 1;
                let len = entry.extra_len;
                scan.note(|| {
                    format!(
                        "snapshot {number} has {len} bytes of extra data, at most 1024 are possible"
                    )
                });
            }
            let place = image.header.snapshots_offset + entry.at;
            if entry.extra_len <= MAX_EXTRA as u64
                && !image.is_in_file(place, entry.end() - entry.at)
            {
                return Err(past_the_end(image));
            }
            scan.keep(image, &entry);
            let Some(snapshot) = entry.shown() else { continue };
            let (offset, bytes) = (snapshot.l1_offset, u64::from(snapshot.l1_size) * 8);
            all += bytes;
            if all > image.len().next_multiple_of(image.cluster()) {
                let what = format!("its L1 tables have {all} bytes, more than the file");
                return Err(wrong(image, &what));
            }
            let there = image.is_cluster(offset) && image.is_in_file(offset, bytes.max(1));
            if bytes > MAX_L1_BYTES || (bytes > 0 && !there) {
                let name = &snapshot.name;
                let what =
                    format!("snapshot {name:?} has an L1 table of {bytes} bytes at {offset:#x}");
                return Err(wrong(image, &what));
            }
            if bytes > 0 {
                scan.l1_tables.push((offset, snapshot.l1_size, number));
            }
        }
        Ok(scan)
    }

    fn note(&mut self, message: impl FnOnce() -> String) {
        if self.messages.len() < 100 {
            self.messages.push(message());
        }
    }

    fn cut(&mut self, count: u32, why: &str) {
        self.too_many = count.into();
        self.note(|| format!("{count} snapshots are too many: {why}"));
    }

    /// Note the clusters of an entry, without those of extra data that is too much.
    fn keep(&mut self, image: &Offline<'_>, entry: &Entry) {
        let table = image.header.snapshots_offset;
        let front = (entry.at, entry.at + (FIXED + entry.extra.len()) as u64);
        let parts = [front, (entry.text_at(), entry.end())];
        // Without ID and name the second has no byte, and may begin where no cluster is the table's.
        for (from, to) in parts.into_iter().filter(|(from, to)| from < to) {
            let first = image.cluster_of(table + from);
            let past = image.cluster_of(table + to - 1) + 1;
            match self.clusters.last_mut() {
                Some(last) if first <= last.end => last.end = last.end.max(past),
                _ => self.clusters.push(first..past),
            }
        }
    }

    /// How many things are wrong that a repair puts right.
    pub(super) fn faults(&self) -> u64 {
        self.incomplete + self.too_long + self.too_many + self.astray
    }

    /// Whether a repair takes something away: until then nobody opens the image.
    pub(super) fn loses(&self) -> bool {
        self.too_long + self.too_many > 0
    }
}

/// The snapshots, with their names as they are shown.
pub(super) async fn list(image: &Offline<'_>) -> Result<Vec<Snapshot>, ToolError> {
    let scan = Scan::of(image).await?;
    if scan.loses() {
        let what =
            format!("{}: check --repair all takes away what is too much", scan.messages.join("; "));
        return Err(wrong(image, &what));
    }
    let kept = scan.kept as usize;
    drop(scan);
    let mut entries = Entries::of(image);
    let mut found = Vec::with_capacity(kept);
    for _ in 0..kept {
        found.extend(entries.next().await?.shown());
    }
    Ok(found)
}
