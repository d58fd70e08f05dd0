//! Finding which host clusters are free, and making the file longer.

use ringtap_io::sync::{MutexGuard, broken};
use ringtap_io::{Io, Listener};

use super::refcount::Refcounts;
use super::space::{Runs, Taken};
use super::{Shared, State};
use crate::Error;

/// The file is made longer by so many bytes at first, by more and more later.
const FIRST_STEP: u64 = 1 << 20;
const LARGEST_STEP: u64 = 64 << 20;
/// The same where that reserves no space.
const LARGEST_FREE_STEP: u64 = 1 << 30;
/// The most refcount blocks that are searched for free clusters, in bytes.
const SEARCH: u64 = 64 << 20;

/// What a task that wants more room does next.
enum Begin<'a> {
    Done,
    Now,
    /// Another task is at it.
    After(Listener<'a>),
}

impl Shared {
    /// Take 1 to `count` clusters one after the other, for the image's own structures or a guest's
    /// data.
    pub(super) async fn take_clusters(&self, io: &Io, count: u64) -> Result<Taken, Error> {
        loop {
            if let Some(taken) = self.state().space.take(count) {
                return Ok(taken);
            }
            match self.grow(io).await {
                Ok(()) => {}
                Err(Error::Full) => {
                    if let Some(taken) = self.state().space.take_any(count) {
                        return Ok(taken);
                    }
                    return Err(Error::Full);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Make room behind the last used cluster, or wait while another task does.
    pub(super) async fn grow(&self, io: &Io) -> Result<(), Error> {
        let begin = || {
            let mut state = self.state();
            let tail = state.space.tail();
            let has_room = state.space.known && tail.start < tail.end;
            self.begin_growing(&mut state, has_room)
        };
        match begin() {
            Begin::Done => return Ok(()),
            Begin::Now => {}
            Begin::After(grown) => {
                grown.await;
                return Ok(());
            }
        }
        let end = match self.find_free_once(io).await {
            Ok(()) => self.grow_alone(io).await,
            error => error,
        };
        self.end_growing();
        end
    }

    /// Whether to grow, which is this task's alone from now on then.
    fn begin_growing(&self, state: &mut State, done: bool) -> Begin<'_> {
        match done {
            true => Begin::Done,
            false if state.space.growing => Begin::After(self.events.grown.listen()),
            false => {
                state.space.growing = true;
                Begin::Now
            }
        }
    }

    fn end_growing(&self) {
        self.state().space.growing = false;
        if !broken("grown in silence") {
            self.events.grown.notify();
        }
    }

    /// See that it is known which clusters are free.
    pub(super) async fn know_space(&self, io: &Io) -> Result<(), Error> {
        loop {
            let begin = || {
                let mut state = self.state();
                let known = state.space.known;
                self.begin_growing(&mut state, known)
            };
            match begin() {
                Begin::Done => return Ok(()),
                Begin::Now => break,
                Begin::After(grown) => grown.await,
            }
        }
        let end = self.find_free_once(io).await;
        self.end_growing();
        end
    }

    async fn find_free_once(&self, io: &Io) -> Result<(), Error> {
        let known = self.state().space.known;
        if known { Ok(()) } else { self.find_free(io).await }
    }

    async fn grow_alone(&self, io: &Io) -> Result<(), Error> {
        let (start, last_step) = {
            let state = self.state();
            (state.space.tail().end, state.space.step)
        };
        let bits = self.header.cluster_bits;
        let step = if self.container.reserves() { LARGEST_STEP } else { LARGEST_FREE_STEP };
        let largest = step.min(self.tables.geometry.size / 4);
        let mut step = (2 * last_step).max(FIRST_STEP).min(largest).max(4 << bits);
        let end = loop {
            let mut end = start + (step >> bits);
            // Refcounts for what is new lie in what is new, and there must be some left.
            loop {
                let need = self.refcounts().need(&(start..end));
                if need < end - start {
                    break;
                }
                end += need;
            }
            match self.extend(io, start, end).await {
                Ok(end) => break end,
                Err(Error::Full) if step > 4 << bits => step = (step / 8).max(4 << bits),
                Err(error) => return Err(error),
            }
        };
        let mut state = self.state();
        let covered = self.refcounts().cover(&(start..end)).ok_or(Error::Full)?;
        for cluster in covered.taken {
            state.add_structure(cluster);
        }
        state.space.give_back(covered.unused, false);
        state.space.step = step;
        state.space.grown(covered.rest, end);
        self.dirty.store(true, std::sync::atomic::Ordering::SeqCst);
        Ok(())
    }

    /// Make the file reach to cluster `end` or, on a device, see how much of that there is.
    async fn extend(&self, io: &Io, start: u64, end: u64) -> Result<u64, Error> {
        let bits = self.header.cluster_bits;
        let container = &self.container;
        if !container.traits().regular {
            let end = end.min(container.len() >> bits);
            let need = if start < end { self.refcounts().need(&(start..end)) } else { 0 };
            if start + need >= end {
                return Err(Error::Full);
            }
            let align = u64::from(container.traits().logical_block_size)
                .max(container.traits().request_alignment);
            // Clusters may be smaller than a device's sectors.
            let emptied = match (start << bits | end << bits) % align {
                0 => container.punch(io, start << bits, (end - start) << bits).await,
                _ => Err(Error::Unsupported),
            };
            self.state().space.tail_is_fresh = match emptied {
                Ok(()) => true,
                Err(Error::Unsupported) => false,
                Err(error) => return Err(error),
            };
            return Ok(end);
        }
        // What lies there was never referred to; from now on it reads as zeros.
        if container.len() > start << bits {
            container.set_len(io, start << bits).await?;
        }
        match container.reserve(io, start << bits, (end - start) << bits).await {
            Ok(()) | Err(Error::Unsupported) => {}
            Err(error) => return Err(error),
        }
        container.set_len(io, end << bits).await?;
        self.state().space.tail_is_fresh = true;
        Ok(end)
    }

    /// Find where the last used cluster ends, and the gaps before it.
    async fn find_free(&self, io: &Io) -> Result<(), Error> {
        let (mut end, mut gaps) = (0, Runs::default());
        let blocks = self.refcounts().blocks();
        let mut left = SEARCH >> self.header.cluster_bits;
        for block in (0..blocks).rev() {
            if self.refcounts().offset_of(block).is_none() {
                continue;
            }
            if left == 0 && end > 0 {
                break;
            }
            left = left.saturating_sub(1);
            let mut refcounts = self.loaded_refcounts(io, block).await?;
            let clusters = refcounts.clusters_of_block(block);
            if end == 0 {
                let used = clusters.clone().rev().find(|cluster| refcounts.get(*cluster) > 0);
                end = used.map_or(0, |cluster| cluster + 1);
            }
            let mut gap = clusters.start;
            for cluster in clusters.start..clusters.end.min(end) {
                if refcounts.get(cluster) > 0 {
                    gaps.add(gap..cluster);
                    gap = cluster + 1;
                }
            }
            gaps.add(gap..clusters.end.min(end).max(gap));
            refcounts.shrink();
        }
        // A refcount of 0 for the header would be a contradiction that check mends.
        if end == 0 {
            return Err(self.mark_corrupt(io).await);
        }
        self.state().space.found(end, gaps);
        Ok(())
    }

    /// The refcounts with a block in memory: another thread may drop it before it was looked at.
    pub(super) async fn loaded_refcounts(
        &self,
        io: &Io,
        block: u64,
    ) -> Result<MutexGuard<'_, Refcounts>, Error> {
        loop {
            self.load_refcounts(io, block).await?;
            let refcounts = self.refcounts();
            if refcounts.is_loaded(block) || broken("refcounts dropped") {
                return Ok(refcounts);
            }
        }
    }

    /// Bring a refcount block to memory.
    pub(super) async fn load_refcounts(&self, io: &Io, block: u64) -> Result<(), Error> {
        let offset = {
            let refcounts = self.refcounts();
            if refcounts.is_loaded(block) {
                return Ok(());
            }
            refcounts.offset_of(block)
        };
        let cluster = self.header.cluster_size();
        let offset =
            offset.filter(|offset| offset % cluster == 0 && *offset < self.container.len());
        let Some(offset) = offset else { return Err(self.mark_corrupt(io).await) };
        let mut bytes = vec![0; cluster as usize];
        self.container.read(io, offset, &mut bytes).await?;
        self.refcounts().install(block, bytes);
        Ok(())
    }
}
