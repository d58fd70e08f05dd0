//! The log of a VHDX: changes of metadata that may not have reached their places ([MS-VHDX] 2.3).

use std::collections::BTreeMap;
use std::sync::Arc;

use ringtap_io::Io;

use super::header::Header;
use super::{bad, os};
use crate::bytes::{get, put};
use crate::{Container, Error, OpenError};

const SECTOR: usize = 4096;
/// The largest log that is read; Hyper-V and QEMU make it 1 MiB. Its entries and their changes take as much
/// again, each.
const MOST: u32 = 16 << 20;
/// The most changes that are kept: each is looked at for every piece of metadata that is read.
const MOST_CHANGES: usize = 1 << 14;
const DAMAGED: &str = "let the program that wrote it open it once";

/// Changes that belong over what the file holds, in their order.
#[derive(Clone, Debug, Default)]
pub(super) struct Changes {
    list: Arc<Vec<Change>>,
}

#[derive(Debug)]
enum Change {
    Data { at: u64, bytes: Box<[u8]> },
    Zero { at: u64, len: u64 },
}

impl Change {
    fn range(&self) -> (u64, u64) {
        let (at, len) = match self {
            Change::Data { at, bytes } => (*at, bytes.len() as u64),
            Change::Zero { at, len } => (*at, *len),
        };
        (at, at.saturating_add(len))
    }
}

impl Changes {
    /// Read metadata as it is to be.
    pub(super) async fn read(
        &self,
        io: &Io,
        container: &Container,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), Error> {
        container.read(io, offset, bytes).await?;
        let end = offset.saturating_add(bytes.len() as u64);
        for change in self.list.iter() {
            let (from, to) = change.range();
            let (from, to) = (from.max(offset), to.min(end));
            if from >= to {
                continue;
            }
            let Some(part) = bytes.get_mut((from - offset) as usize..(to - offset) as usize) else {
                continue;
            };
            match change {
                Change::Zero { .. } => part.fill(0),
                Change::Data { at, bytes } => {
                    let skip = (from - at) as usize;
                    part.copy_from_slice(bytes.get(skip..skip + part.len()).unwrap_or_default());
                }
            }
        }
        Ok(())
    }

    /// Whether one of them lies in this range.
    pub(super) fn touch(&self, from: u64, to: u64) -> bool {
        self.list.iter().any(|change| {
            let (at, end) = change.range();
            at < to && from < end
        })
    }
}

struct Entry {
    len: u32,
    tail: u32,
    flushed: u64,
    /// The entry, rolled out where the log's end cut it.
    bytes: Vec<u8>,
    descriptors: u32,
}

/// Read the log that the header names, if it names one.
pub(super) async fn replay(
    io: &Io,
    container: &Container,
    header: &Header,
) -> Result<Changes, OpenError> {
    if header.log_id == [0; 16] {
        return Ok(Changes::default());
    }
    let at = header.log_at;
    let fits = at.checked_add(u64::from(header.log_len)).is_some_and(|end| end <= container.len());
    if header.log_len == 0
        || header.log_len > MOST
        || header.log_len as usize % SECTOR != 0
        || !fits
    {
        let found = format!("a log of {} bytes at {at}", header.log_len);
        return Err(bad(container, 72, found, DAMAGED));
    }
    let mut log = vec![0; header.log_len as usize];
    let failed = |error| os(container, "read the log of", error);
    container.read(io, at, &mut log).await.map_err(failed)?;
    let entries = find_entries(&log, &header.log_id)
        .ok_or_else(|| bad(container, at, "entries that lie over one another", DAMAGED))?;
    // The newest sequence without a gap is the one that counts.
    let mut heads: Vec<(u64, u32)> =
        entries.iter().map(|(place, entry)| (entry.0, *place)).collect();
    heads.sort_unstable();
    for (_, head) in heads.into_iter().rev() {
        if let Some(sequence) = sequence_to(&entries, head, header.log_len) {
            let mut changes = Vec::new();
            for (number, entry) in sequence {
                if entry.flushed > container.len() {
                    let found = format!(
                        "the log was written when the file had {} bytes, and it has {}",
                        entry.flushed,
                        container.len()
                    );
                    return Err(bad(container, at, found, "the file was cut short"));
                }
                let read = read_entry(number, entry, &mut changes);
                read.ok_or_else(|| {
                    bad(container, at, "an entry that contradicts itself", DAMAGED)
                })?;
            }
            return Ok(Changes { list: Arc::new(changes) });
        }
    }
    Err(bad(container, at, "a log is announced and no sequence of entries is whole", DAMAGED))
}

type Entries = BTreeMap<u32, (u64, Entry)>;

/// Every entry of this log, by its place, with its number. None where those that are whole take more
/// room than the log has, or all that begin somewhere far more.
fn find_entries(log: &[u8], id: &[u8; 16]) -> Option<Entries> {
    let mut entries = BTreeMap::new();
    let (mut budget, mut room) = (4 * log.len(), log.len());
    for place in (0..log.len()).step_by(SECTOR) {
        let Some(head) = log.get(place..place + 64) else { break };
        if head.get(..4) != Some(b"loge".as_slice()) || get::<16>(head, 32) != *id {
            continue;
        }
        let word = |at| u32::from_le_bytes(get(head, at));
        let (len, tail, descriptors) = (word(8), word(12), word(24));
        let size = len as usize;
        if size == 0 || size % SECTOR != 0 || size > log.len() || tail as usize >= log.len() {
            continue;
        }
        budget = budget.checked_sub(size)?;
        let mut bytes = Vec::with_capacity(size);
        let first = size.min(log.len() - place);
        bytes.extend_from_slice(log.get(place..place + first)?);
        bytes.extend_from_slice(log.get(..size - first)?);
        put(&mut bytes, 4, &[0; 4]);
        if crc32c::crc32c(&bytes) != word(4) {
            continue;
        }
        room = room.checked_sub(size)?;
        let number = u64::from_le_bytes(get(head, 16));
        let flushed = u64::from_le_bytes(get(head, 48));
        entries.insert(place as u32, (number, Entry { len, tail, flushed, bytes, descriptors }));
    }
    Some(entries)
}

/// The entries from the tail that the head names up to the head, if there is no gap.
fn sequence_to(entries: &Entries, head: u32, log_len: u32) -> Option<Vec<(u64, &Entry)>> {
    let (_, last) = entries.get(&head)?;
    let mut place = last.tail;
    let mut sequence: Vec<(u64, &Entry)> = Vec::new();
    loop {
        let (number, entry) = entries.get(&place)?;
        if let Some((before, _)) = sequence.last() {
            if before.checked_add(1) != Some(*number) {
                return None;
            }
        }
        sequence.push((*number, entry));
        if place == head {
            return Some(sequence);
        }
        if sequence.len() > entries.len() {
            return None;
        }
        place = ((u64::from(place) + u64::from(entry.len)) % u64::from(log_len)) as u32;
    }
}

/// Append the entry's changes. None where it is not as it should be.
fn read_entry(number: u64, entry: &Entry, changes: &mut Vec<Change>) -> Option<()> {
    let count = entry.descriptors as usize;
    let list_end = count.checked_mul(32)?.checked_add(64)?;
    let mut data = list_end.next_multiple_of(SECTOR);
    for index in 0..count {
        let from = 64 + 32 * index;
        let descriptor: [u8; 32] = get(entry.bytes.get(..list_end)?, from);
        let at = u64::from_le_bytes(get(&descriptor, 16));
        if u64::from_le_bytes(get(&descriptor, 24)) != number || at % SECTOR as u64 != 0 {
            return None;
        }
        if changes.len() >= MOST_CHANGES {
            return None;
        }
        match &get::<4>(&descriptor, 0) {
            b"zero" => {
                let len = u64::from_le_bytes(get(&descriptor, 8));
                changes.push(Change::Zero { at, len });
            }
            b"desc" => {
                let sector = entry.bytes.get(data..data + SECTOR)?;
                let (high, low) = (get::<4>(sector, 4), get::<4>(sector, SECTOR - 4));
                let told =
                    u64::from(u32::from_le_bytes(high)) << 32 | u64::from(u32::from_le_bytes(low));
                if sector.get(..4)? != b"data" || told != number {
                    return None;
                }
                let mut bytes = sector.to_vec();
                put(&mut bytes, 0, &get::<8>(&descriptor, 8));
                put(&mut bytes, SECTOR - 4, &get::<4>(&descriptor, 4));
                changes.push(Change::Data { at, bytes: bytes.into() });
                data += SECTOR;
            }
            _ => return None,
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry that zeroes so many ranges.
    fn zeroes(count: usize) -> Entry {
        let mut bytes = vec![0; (64 + 32 * count).next_multiple_of(SECTOR)];
        for index in 0..count {
            put(&mut bytes, 64 + 32 * index, b"zero");
            put(&mut bytes, 64 + 32 * index + 24, &7u64.to_le_bytes());
        }
        let (len, descriptors) = (bytes.len() as u32, count as u32);
        Entry { len, tail: 0, flushed: 0, bytes, descriptors }
    }

    #[test]
    fn no_log_makes_every_read_look_at_a_million_changes() {
        let mut changes = Vec::new();
        assert!(read_entry(7, &zeroes(1000), &mut changes).is_some());
        assert_eq!(changes.len(), 1000);
        assert!(read_entry(7, &zeroes(1 << 20), &mut changes).is_none());
    }

    #[test]
    fn entries_that_share_their_bytes_are_refused() {
        // Each is whole: the later ones lie in what the first says are its own.
        let mut log = vec![0; 8 * SECTOR];
        for place in (0..4).rev() {
            let at = place * SECTOR;
            let size = 4 * SECTOR;
            put(&mut log, at, b"loge");
            put(&mut log, at + 8, &(size as u32).to_le_bytes());
            put(&mut log, at + 32, &[1; 16]);
            let mut whole = log[at..at + size].to_vec();
            put(&mut whole, 4, &[0; 4]);
            put(&mut log, at + 4, &crc32c::crc32c(&whole).to_le_bytes());
        }
        assert!(find_entries(&log, &[1; 16]).is_none());
        log[..2 * SECTOR].fill(0);
        assert_eq!(find_entries(&log, &[1; 16]).expect("two").len(), 2);
    }
}
