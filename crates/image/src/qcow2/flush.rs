//! Making all stable, in an order that a power cut may stop anywhere.
//!
//! What is pointed to is stable before what points to it: data, refcounts and new tables, then L2
//! tables, then L1. What is not pointed to any more is counted less only by a later flush than the one
//! that made the pointer's end stable.

use std::cell::Cell;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use ringtap_io::Io;
use ringtap_io::sync::{MutexGuard, broken};

use super::moment::Moment;
use super::refcount::{Contradiction, Refcounts, Writes};
use super::table::{L1_BLOCK, Slices};
use super::together::together;
use super::{Released, Sabotage, Shared, ToolError};
use crate::group_commit::Turn;
use crate::{Container, Error};

/// How often closing flushes before what is left is left.
const LAST_FLUSHES: usize = 4;

/// What one flush has taken on.
#[derive(Default)]
struct Work {
    slices: Vec<Slices>,
    l1: Vec<(usize, Vec<u64>)>,
    released: Vec<Released>,
    /// Not counted yet.
    referred: Vec<Range<u64>>,
    shared: Vec<Range<u64>>,
    /// Where what the tables were is to be kept.
    moment: Option<Arc<Moment>>,
}

impl Shared {
    /// Make every completed write stable.
    pub(super) async fn flush(&self, io: &Io) -> Result<(), Error> {
        let Some(mut turn) = self.flushes.turn().await? else { return Ok(()) };
        let end = self.flush_alone(io).await;
        turn.serves(end);
        end
    }

    /// As [`Shared::flush`], and no other begins before what this gives is dropped.
    pub(super) async fn flush_and_stay(&self, io: &Io) -> (Result<(), Error>, Turn<'_>) {
        let mut turn = self.flushes.own_turn().await;
        let end = self.flush_alone(io).await;
        turn.serves(end);
        (end, turn)
    }

    async fn flush_alone(&self, io: &Io) -> Result<(), Error> {
        let idle = !self.dirty.load(SeqCst) && self.state().retired.is_empty();
        if idle {
            return self.sync_data(io).await;
        }
        let mut work = Work::default();
        let end = self.flush_work(io, &mut work).await;
        let mut state = self.state();
        for slice in work.slices.iter().flat_map(Slices::range) {
            state.cache.unpin(&self.tables, slice);
            if end.is_err() {
                state.cache.make_dirty(&self.tables, slice);
            }
        }
        if end.is_err() {
            state.cache.dirty_l1.extend(work.l1.iter().map(|(block, _)| *block));
            state.released.append(&mut work.released);
            state.referred.append(&mut work.referred);
            state.shared.append(&mut work.shared);
        } else {
            state.retired.append(&mut work.released);
            if let Some(log) = self.restart.get() {
                if self.does(Sabotage::RestartLogDropped) {
                    log.start(0);
                }
                log.end_flush();
            }
        }
        // Looked at under the lock under which every change is made.
        let dirty = state.cache.is_dirty()
            || !state.released.is_empty()
            || !state.referred.is_empty()
            || !state.shared.is_empty()
            || self.refcounts().is_dirty();
        self.dirty.store(dirty && !broken("dirty forgotten"), SeqCst);
        end
    }

    async fn flush_work(&self, io: &Io, work: &mut Work) -> Result<(), Error> {
        {
            let mut state = self.state();
            if let Some(log) = self.restart.get() {
                log.begin_flush();
            }
            // Whose end the tables copied below show.
            work.released = std::mem::take(&mut state.released);
            if self.does(Sabotage::EarlyReuse) {
                let early = std::mem::take(&mut work.released);
                state.retired.extend(early);
            }
            work.slices = state.cache.take_dirty(&self.tables);
            let blocks = std::mem::take(&mut state.cache.dirty_l1);
            work.l1 =
                blocks.into_iter().map(|block| (block, self.tables.l1_block(block))).collect();
            work.moment = state.moment();
            // Whatever those tables refer to, and more.
            work.referred = std::mem::take(&mut state.referred);
            work.shared = std::mem::take(&mut state.shared);
        }
        let mut freed = self.count(io, work).await?;
        if self.does(Sabotage::EarlyReuse) {
            self.give_back(io, std::mem::take(&mut freed)).await;
        }
        let end = match self.refcount_writes(io).await {
            Ok(writes) => {
                let end = self.write_levels(io, work, &writes).await;
                if end.is_err() {
                    self.refcounts().put_back(&writes);
                }
                end
            }
            Err(error) => Err(error),
        };
        self.state().hold_tables(&mut freed, work.moment.as_ref());
        if self.read_beside.load(SeqCst) {
            // Who opens the image next finds that it is free.
            freed.clear();
        }
        self.give_back(io, freed).await;
        self.refcounts().shrink();
        end
    }

    /// Count what is referred to, and what has been unreferred long enough; gives the clusters that
    /// nobody refers to any more.
    async fn count(&self, io: &Io, work: &mut Work) -> Result<Vec<u64>, Error> {
        self.count_up(io, &mut work.referred, true).await?;
        self.count_up(io, &mut work.shared, false).await?;
        let retired = std::mem::take(&mut self.state().retired);
        if retired.is_empty() {
            return Ok(Vec::new());
        }
        let mut freed = Vec::new();
        let mut end = self.know_space(io).await;
        let mut resting = Vec::new();
        for released in retired {
            let hasty = self.does(Sabotage::NoGrace) || self.does(Sabotage::EarlyReuse);
            let rests = !hasty && !self.epochs.is_over(released.epoch);
            if end.is_err() || rests {
                resting.push(released);
                continue;
            }
            let block = self.refcounts().block_of(released.cluster);
            let counted = match self.loaded_refcounts(io, block).await {
                Ok(mut refcounts) => refcounts.change(released.cluster, -1),
                Err(error) => {
                    end = Err(error);
                    resting.push(released);
                    continue;
                }
            };
            match counted {
                Ok(0) => freed.push(released.cluster),
                Ok(_) => {}
                // It was counted too low: a leak is the worst that leaving it can be.
                Err(_) => {
                    self.mark_corrupt(io).await;
                }
            }
        }
        self.state().retired.append(&mut resting);
        if let Err(error) = end {
            {
                let mut state = self.state();
                let moment = state.moment();
                state.hold_tables(&mut freed, moment.as_ref());
            }
            self.give_back(io, freed).await;
            return Err(error);
        }
        Ok(freed)
    }

    /// Count clusters once more; what is counted leaves `runs`. `alone`: nobody referred to them before.
    async fn count_up(
        &self,
        io: &Io,
        runs: &mut Vec<Range<u64>>,
        alone: bool,
    ) -> Result<(), Error> {
        while let Some(run) = runs.last_mut() {
            let Some(last) = run.end.checked_sub(1).filter(|_| run.start < run.end) else {
                runs.pop();
                continue;
            };
            let block = self.refcounts().block_of(last);
            let refcounts = self.loaded_refcounts(io, block).await?;
            if count_block_up(refcounts, block, run, alone).is_err() {
                return Err(self.mark_corrupt(io).await);
            }
        }
        Ok(())
    }

    /// The refcounts to write, those of new blocks and of a new table among them.
    async fn refcount_writes(&self, io: &Io) -> Result<Writes, Error> {
        loop {
            let next = || {
                let mut refcounts = self.refcounts();
                let uncounted = refcounts.take_uncounted();
                if uncounted.is_empty() { Ok(refcounts.take_writes()) } else { Err(uncounted) }
            };
            let mut uncounted = match next() {
                Ok(writes) => return Ok(writes),
                Err(uncounted) => uncounted,
            };
            while let Some(cluster) = uncounted.last().copied() {
                let block = self.refcounts().block_of(cluster);
                let counted = match self.loaded_refcounts(io, block).await {
                    Ok(mut refcounts) => refcounts.change(cluster, 1),
                    Err(error) => {
                        self.refcounts().put_back_uncounted(uncounted);
                        return Err(error);
                    }
                };
                uncounted.pop();
                if counted != Ok(1) {
                    return Err(self.mark_corrupt(io).await);
                }
            }
        }
    }

    async fn write_levels(&self, io: &Io, work: &mut Work, writes: &Writes) -> Result<(), Error> {
        let container = &self.container;
        if let Some(moment) = work.moment.as_ref().filter(|_| !self.does(Sabotage::MomentNotKept)) {
            moment.keep(io, container, self.places(work, writes)).await;
        }
        if self.does(Sabotage::TablesFirst) || self.does(Sabotage::L1First) {
            if self.does(Sabotage::L1First) {
                self.write_l1(io, work).await?;
            }
            self.write_slices(io, &work.slices).await?;
        }
        let blocks = writes.blocks.iter().map(|(_, offset, bytes)| (*offset, bytes));
        let table = writes.moved.iter().map(|(place, bytes)| (place.offset, bytes));
        let level = blocks.chain(table);
        let level = level.map(|(offset, bytes)| container.write(io, offset, bytes));
        if self.does(Sabotage::RefcountsLate) {
            self.sync_data(io).await?;
            self.write_slices(io, &work.slices).await?;
            together(level).await?;
        } else {
            together(level).await?;
        }
        self.sync_data(io).await?;
        if let Some((place, _)) = writes.moved {
            let mut bytes = place.offset.to_be_bytes().to_vec();
            bytes.extend_from_slice(&(place.clusters as u32).to_be_bytes());
            self.patch_header(io, 48, &bytes).await?;
            let old = self.refcounts().moved(place);
            let first = old.offset >> self.header.cluster_bits;
            let epoch = self.epochs.epoch();
            let clusters = first..first + old.clusters;
            work.released.extend(clusters.map(|cluster| Released { cluster, epoch }));
        } else if !writes.parts.is_empty() {
            for (_, offset, bytes) in &writes.parts {
                container.write(io, *offset, bytes).await?;
            }
            container.sync(io).await?;
        }
        if !work.slices.is_empty() {
            self.write_slices(io, &work.slices).await?;
            if work.l1.is_empty() {
                self.advance_generation(io).await?;
            }
            container.sync(io).await?;
        }
        if !work.l1.is_empty() {
            self.write_l1(io, work).await?;
            self.advance_generation(io).await?;
            container.sync(io).await?;
        }
        Ok(())
    }

    /// What of the file a flush writes over.
    fn places(&self, work: &Work, writes: &Writes) -> Vec<Range<u64>> {
        let range = |at: u64, len: usize| at..at + len as u64;
        let blocks = writes.blocks.iter().map(|(_, at, bytes)| range(*at, bytes.len()));
        let parts = writes.parts.iter().map(|(_, at, bytes)| range(*at, bytes.len()));
        let slices = self.places_of(&work.slices).map(|(at, bytes)| range(at, bytes.len()));
        let l1 =
            work.l1.iter().map(|(block, entries)| range(self.l1_at(*block), entries.len() * 8));
        blocks.chain(parts).chain(slices).chain(l1).collect()
    }

    fn l1_at(&self, block: usize) -> u64 {
        self.header.l1_offset + (block * L1_BLOCK * 8) as u64
    }

    async fn write_l1(&self, io: &Io, work: &Work) -> Result<(), Error> {
        for (block, entries) in &work.l1 {
            self.container.write(io, self.l1_at(*block), &crate::bytes::table(entries)).await?;
        }
        Ok(())
    }

    pub(super) fn does(&self, sabotage: Sabotage) -> bool {
        self.broken.does(sabotage)
    }

    /// Write copies of slices to where their tables lie.
    async fn write_slices(&self, io: &Io, slices: &[Slices]) -> Result<(), Error> {
        let places = self.places_of(slices);
        together(places.map(|(at, bytes)| self.container.write(io, at, bytes))).await
    }

    fn places_of<'a>(&self, slices: &'a [Slices]) -> impl Iterator<Item = (u64, &'a Vec<u8>)> {
        let geometry = &self.tables.geometry;
        slices.iter().filter_map(move |slices| {
            let first = slices.range().start;
            let table = self.tables.table(geometry.table_of_slice(first))?;
            Some((table + geometry.offset_in_table(first), &slices.bytes))
        })
    }

    /// Guest data, and whatever else was written so far.
    async fn sync_data(&self, io: &Io) -> Result<(), Error> {
        if let Some(data) = &self.data {
            data.sync(io).await?;
        }
        self.container.sync(io).await
    }

    /// Clusters that nobody refers to, in memory and on stable storage: free their space, and let
    /// them be used again.
    async fn give_back(&self, io: &Io, mut clusters: Vec<u64>) {
        clusters.sort_unstable();
        clusters.dedup();
        let bits = self.header.cluster_bits;
        let same = |one: &u64, next: &u64| one + 1 == *next;
        let runs = clusters.chunk_by(same).filter_map(|run| {
            let first = *run.first()?;
            Some((first..first + run.len() as u64, Cell::new(false)))
        });
        let runs: Vec<(Range<u64>, Cell<bool>)> = runs.collect();
        let punches = runs.iter().map(|(run, emptied)| async move {
            let (offset, len) = (run.start << bits, (run.end - run.start) << bits);
            let stale = self.does(Sabotage::StaleIsFresh);
            emptied.set(stale || self.container.punch(io, offset, len).await.is_ok());
            Ok::<(), Infallible>(())
        });
        let Ok(()) = together(punches).await;
        let mut state = self.state();
        for (run, emptied) in runs {
            for cluster in run.clone() {
                state.structures.remove(&cluster);
            }
            state.space.give_back(run, emptied.get());
        }
    }

    /// Change some bytes of the header, within its first sector, and make that stable.
    pub(super) async fn patch_header(&self, io: &Io, at: u64, bytes: &[u8]) -> Result<(), Error> {
        self.write_header(io, at, bytes).await?;
        self.container.sync(io).await
    }

    /// The same without making it stable.
    pub(super) async fn write_header(&self, io: &Io, at: u64, bytes: &[u8]) -> Result<(), Error> {
        loop {
            let free = self.events.header.listen();
            if !self.header_busy.swap(true, SeqCst) {
                break;
            }
            free.await;
        }
        let end = self.container.write(io, at, bytes).await;
        self.header_busy.store(false, SeqCst);
        if !broken("header in silence") {
            self.events.header.notify();
        }
        end
    }

    /// Write what is in memory, give back what is free, and cut off what was never used.
    pub(super) async fn close(&self, io: &Io) -> Result<(), Error> {
        if let Some(moment) = self.state().moment() {
            moment.lose("it was closed meanwhile");
        }
        for _ in 0..LAST_FLUSHES {
            self.flush(io).await?;
            let state = self.state();
            if state.retired.is_empty() && !self.dirty.load(SeqCst) {
                break;
            }
        }
        let end = {
            let mut state = self.state();
            state.space.known.then(|| state.space.trim() << self.header.cluster_bits)
        };
        if let Some(end) = end.filter(|end| *end < self.container.len()) {
            if self.container.traits().regular {
                self.container.set_len(io, end).await?;
            }
        }
        self.store_bitmaps(io).await?;
        self.close_log(io).await
    }

    /// Where that fails, log and bits stay for the next server.
    async fn store_bitmaps(&self, io: &Io) -> Result<(), Error> {
        if self.is_corrupt() {
            return Ok(());
        }
        self.bitmaps.store(io, &self.container).await.map_err(|error| {
            tracing::error!("bitmaps were not saved: {error}");
            match error {
                ToolError::Io { source, .. } => source,
                ToolError::Refused { .. } => Error::Full,
                _ => Error::Corrupt,
            }
        })
    }
}

/// Change some bytes of a header and make that stable.
pub(super) async fn patch(
    io: &Io,
    container: &Container,
    at: u64,
    bytes: &[u8],
) -> Result<(), Error> {
    container.write(io, at, bytes).await?;
    container.sync(io).await
}

/// As [`Shared::count_up`], the end of a run, as far as that lies in a block that is in memory.
fn count_block_up(
    mut refcounts: MutexGuard<'_, Refcounts>,
    block: u64,
    run: &mut Range<u64>,
    alone: bool,
) -> Result<(), Contradiction> {
    let first = refcounts.clusters_of_block(block).start.max(run.start);
    for cluster in (first..run.end).rev() {
        run.end = cluster;
        let count = refcounts.change(cluster, 1)?;
        if alone && count != 1 {
            return Err(Contradiction);
        }
    }
    Ok(())
}
