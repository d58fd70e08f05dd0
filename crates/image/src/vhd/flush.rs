//! Making stable what was written: in an order that leaves a whole image whenever the power goes.

use std::collections::{BTreeMap, HashSet};
use std::future::poll_fn;
use std::sync::atomic::Ordering::{Acquire, SeqCst};
use std::task::Poll;

use ringtap_io::Io;
use ringtap_io::sync::broken;

use super::BLOCK_ALIGN;
use super::footer::SECTOR;
use super::sabotage::Sabotage;
use super::shared::Shared;
use crate::{Boxed, Container, Error};

/// Bitmaps that are written side by side.
const BESIDE: usize = 32;

/// What a flush has to write, as it was when it began.
#[derive(Default)]
struct Batch {
    new: Vec<u32>,
    doubtful: Vec<u32>,
    changed: Vec<u32>,
    /// By their places in the file.
    new_bitmaps: Vec<(u64, Vec<u8>)>,
    changed_bitmaps: Vec<(u64, Vec<u8>)>,
    /// Sectors of the table.
    table: BTreeMap<u64, Vec<u8>>,
    /// The count of writes it covers.
    commits: u64,
}

/// How far a batch was written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing points to it yet.
    Begun,
    /// Entries may have been written.
    Pointing,
    /// All is stable.
    Stable,
}

impl Shared {
    pub(super) async fn flush(&self, io: &Io) -> Result<(), Error> {
        let Some(mut turn) = self.flushes.turn().await? else { return Ok(()) };
        let batch = self.take_batch();
        let mut stage = Stage::Begun;
        let end = self.write_batch(io, &batch, &mut stage).await;
        self.end_batch(batch, stage);
        if end.is_ok() {
            turn.serves(end);
        }
        end
    }

    /// Every bit and entry in the batch is of a write that has completed, and no later one is.
    fn take_batch(&self) -> Batch {
        let mut room = self.room();
        if let Some(log) = self.restart.get() {
            log.begin_flush();
        }
        let mut batch = Batch {
            new: std::mem::take(&mut room.new),
            doubtful: std::mem::take(&mut room.doubtful),
            changed: std::mem::take(&mut room.changed),
            commits: room.commits,
            ..Batch::default()
        };
        for block in &batch.changed {
            if let Some(bitmap) = self.bitmaps.get(*block) {
                bitmap.unmark();
            }
        }
        batch.new_bitmaps =
            batch.new.iter().filter_map(|block| self.bitmap_bytes(*block)).collect();
        let new: HashSet<u32> = batch.new.iter().copied().collect();
        let mut older: Vec<u32> = batch.changed.iter().chain(&batch.doubtful).copied().collect();
        older.retain(|block| !new.contains(block));
        older.sort_unstable();
        older.dedup();
        batch.changed_bitmaps =
            older.iter().filter_map(|block| self.bitmap_bytes(*block)).collect();
        for block in batch.new.iter().chain(&batch.doubtful) {
            let per_sector = (SECTOR / 4) as u32;
            let first = block - block % per_sector;
            let at = self.header.table_at + u64::from(first) * 4;
            batch.table.entry(at).or_insert_with(|| {
                let entries = self.table.iter().skip(first as usize).take(per_sector as usize);
                entries.flat_map(|entry| entry.load(Acquire).to_be_bytes()).collect()
            });
        }
        batch
    }

    fn bitmap_bytes(&self, block: u32) -> Option<(u64, Vec<u8>)> {
        let len = self.header.bitmap_size() as usize;
        Some((self.place_of(block)?, self.bitmaps.get(block)?.to_bytes(len)))
    }

    async fn write_batch(&self, io: &Io, batch: &Batch, stage: &mut Stage) -> Result<(), Error> {
        let container = &self.container;
        write_beside(io, container, &batch.new_bitmaps, true).await?;
        let pointing = !batch.changed_bitmaps.is_empty() || !batch.table.is_empty();
        if self.sabotaged(Sabotage::BitsFirst) {
            write_beside(io, container, &batch.changed_bitmaps, false).await?;
        }
        if !(pointing && self.sabotaged(Sabotage::NoBarrier)) {
            container.sync(io).await?;
        }
        *stage = Stage::Pointing;
        write_beside(io, container, &batch.changed_bitmaps, false).await?;
        for (at, bytes) in joined(&batch.table) {
            container.write(io, at, &bytes).await?;
        }
        if pointing {
            container.sync(io).await?;
        }
        *stage = Stage::Stable;
        Ok(())
    }

    fn end_batch(&self, batch: Batch, stage: Stage) {
        let mut room = self.room();
        if stage != Stage::Stable {
            for block in &batch.changed {
                if let Some(bitmap) = self.bitmaps.get(*block) {
                    if !bitmap.mark() {
                        room.changed.push(*block);
                    }
                }
            }
            // A bitmap that the table may point to is written only after what its bits tell of.
            let again = if stage == Stage::Begun { &mut room.new } else { &mut room.doubtful };
            again.extend(batch.new);
            room.doubtful.extend(batch.doubtful);
            return;
        }
        if let Some(log) = self.restart.get() {
            log.end_flush();
        }
        if room.commits == batch.commits || broken("dirty forgotten") {
            self.dirty.store(false, SeqCst);
        }
    }
}

/// Sectors that follow one another as one write: two writes to one page must not be in flight at once.
fn joined(sectors: &BTreeMap<u64, Vec<u8>>) -> Vec<(u64, Vec<u8>)> {
    let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
    for (at, bytes) in sectors {
        match runs.last_mut() {
            Some((start, run)) if *start + run.len() as u64 == *at => run.extend_from_slice(bytes),
            _ => runs.push((*at, bytes.clone())),
        }
    }
    runs
}

/// Write bitmaps, several at a time: no two are in one page. With `whole_pages`, each from the
/// beginning of its page on, where nothing is before a new block's bitmap: so it need not be read.
async fn write_beside(
    io: &Io,
    container: &Container,
    bitmaps: &[(u64, Vec<u8>)],
    whole_pages: bool,
) -> Result<(), Error> {
    for some in bitmaps.chunks(BESIDE) {
        let mut writes: Vec<Option<Boxed<'_, Result<(), Error>>>> = Vec::new();
        for (place, bytes) in some {
            let gap = if whole_pages { place % BLOCK_ALIGN } else { 0 };
            writes.push(Some(Box::pin(async move {
                let mut page = vec![0; gap as usize];
                page.extend_from_slice(bytes);
                container.write(io, place - gap, &page).await
            })));
        }
        // All must come to their end, whatever becomes of one.
        let mut end = Ok(());
        poll_fn(|context| {
            let mut pending = false;
            for write in &mut writes {
                let Some(running) = write else { continue };
                match running.as_mut().poll(context) {
                    Poll::Pending => pending = true,
                    Poll::Ready(result) => {
                        *write = None;
                        end = end.and(result);
                    }
                }
            }
            if pending { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        end?;
    }
    Ok(())
}
