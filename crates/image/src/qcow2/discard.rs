//! Discard and write-zeroes, by whole units: entries change in memory, space is freed once that is
//! stable.

use ringtap_io::{Io, Listener};

use super::entry::{Entry, Kind, bits};
use super::header::{OFFSET_MASK, ZERO};
use super::{Shared, State};
use crate::{Container, Discard, Error};

/// What became of one cluster.
enum Step<'a> {
    Done,
    /// A write to it is in flight that has its place yet to get.
    Wait(Listener<'a>),
    /// Its table has to be had first.
    NeedsTable,
    /// There is no room to note it.
    NeedsFlush,
    Fails(Error),
}

impl Shared {
    pub(super) async fn discard(
        &self,
        io: &Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Result<(), Error> {
        if self.info.read_only {
            return Err(Error::ReadOnly);
        }
        if self.is_corrupt() {
            return Err(Error::Corrupt);
        }
        if let Some(data) = self.data.as_ref().filter(|_| self.data_is_raw) {
            return discard_raw(io, data, offset, len, mode).await;
        }
        if !self.tables.geometry.zero_flag {
            match mode {
                Discard::Free if self.base.is_there() => return Ok(()),
                Discard::Zero { unmap: true } if !self.base.is_there() => {}
                Discard::Zero { .. } => return Err(Error::Unsupported),
                Discard::Free => {}
            }
        }
        if let Some(data) = self.data.as_ref().filter(|_| mode != Discard::Zero { unmap: false }) {
            // Before the entries change: who writes there afterwards has it to stay.
            match data.punch(io, offset, len).await {
                Ok(()) | Err(Error::Unsupported) => {}
                Err(error) => return Err(error),
            }
        }
        let bits = self.tables.geometry.cluster_bits;
        let (mut cluster, end) = (offset >> bits, (offset + len).div_ceil(1 << bits));
        while cluster < end {
            let start = offset.max(cluster << bits) - (cluster << bits);
            let to = (offset + len).min((cluster + 1) << bits) - (cluster << bits);
            cluster += self.discard_in(io, cluster, end, start..to, mode, false).await?;
        }
        Ok(())
    }

    /// Make a part of one unit zeros by making all of it so, where the rest of it reads as zeros already: nobody has
    /// written there, and below there is nothing else. False where that is not so.
    pub(super) async fn zero_part(
        &self,
        io: &Io,
        offset: u64,
        len: u64,
        unmap: bool,
    ) -> Result<bool, Error> {
        let geometry = &self.tables.geometry;
        let refused = self.info.read_only || self.is_corrupt();
        if refused || !geometry.zero_flag || self.data_is_raw {
            return Ok(false);
        }
        let start = offset >> geometry.unit_bits << geometry.unit_bits;
        let end = (start + (1 << geometry.unit_bits)).min(geometry.size);
        let (cluster, mode) = (offset >> geometry.cluster_bits, Discard::Zero { unmap });
        let first = cluster << geometry.cluster_bits;
        // What the image itself says goes before what lies below, which may be far away.
        let own = match self.tables.l1(geometry.table_of(cluster)) {
            0 => None,
            _ => self.load_entry(io, cluster).await?,
        };
        let own = own.map(|entry| entry.kind(geometry, (start - first) >> geometry.unit_bits));
        match own {
            None | Some(Kind::Unallocated) => {
                for rest in [start..offset, offset + len..end] {
                    if !self.zero_below(io, rest).await {
                        return Ok(false);
                    }
                }
            }
            Some(Kind::Zero { .. }) => {}
            Some(_) => return Ok(false),
        }
        let unit = start - first..end - first;
        loop {
            match self.discard_in(io, cluster, cluster + 1, unit.clone(), mode, true).await {
                Ok(0) => {}
                Ok(_) => return Ok(true),
                Err(Error::Unsupported) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether what lies below is known to read as zeros.
    async fn zero_below(&self, io: &Io, range: std::ops::Range<u64>) -> bool {
        let Some(base) = self.base.image() else { return true };
        let (mut at, end) = (range.start, range.end.min(base.info().size));
        while at < end {
            match base.status(io, at, end - at).await {
                Ok(status) if status.zero => at += status.len.max(1),
                // The write itself will tell what fails.
                _ => return false,
            }
        }
        true
    }

    /// Discard a range of one cluster, and go on with whole ones as far as they have no table or are
    /// in the same slice. Gives how many clusters are done; none where it has to be looked at again. `only_empty`: where
    /// there is data, that is left alone, and this is [`Error::Unsupported`].
    async fn discard_in(
        &self,
        io: &Io,
        cluster: u64,
        end: u64,
        range: std::ops::Range<u64>,
        mode: Discard,
        only_empty: bool,
    ) -> Result<u64, Error> {
        let geometry = &self.tables.geometry;
        let table = geometry.table_of(cluster);
        if self.tables.l1(table) == 0 && (mode == Discard::Free || !self.notes_zeros(mode)) {
            let last = geometry.clusters_of_table(table).end.min(end);
            return Ok(last - cluster);
        }
        if self.load_entry(io, cluster).await?.is_none() {
            self.pinned(io, cluster).await?;
        }
        match self.discard_one(cluster, range.clone(), mode, only_empty) {
            Step::Done => Ok(1),
            Step::Wait(settled) => {
                settled.await;
                Ok(0)
            }
            Step::NeedsFlush => {
                self.flush(io).await?;
                Ok(0)
            }
            Step::Fails(Error::Corrupt) => Err(self.mark_corrupt(io).await),
            Step::Fails(error) => Err(error),
            Step::NeedsTable => {
                self.pinned(io, cluster).await?;
                Ok(0)
            }
        }
    }

    /// See that a cluster's table is the image's own.
    async fn pinned(&self, io: &Io, cluster: u64) -> Result<(), Error> {
        self.own_table(io, cluster).await?;
        let slice = self.tables.geometry.slice_of(cluster);
        self.state().cache.unpin(&self.tables, slice);
        Ok(())
    }

    fn discard_one(
        &self,
        cluster: u64,
        range: std::ops::Range<u64>,
        mode: Discard,
        only_empty: bool,
    ) -> Step<'_> {
        let geometry = &self.tables.geometry;
        let mut state = self.state();
        if state.allocations.is_pending(cluster) {
            return Step::Wait(self.events.settled.listen());
        }
        if self.log_is_crowded(&state, 1) {
            return Step::NeedsFlush;
        }
        let super::table::Lookup::Entry(old) = self.tables.entry(cluster) else {
            return Step::NeedsTable;
        };
        let units = geometry.covered(cluster, &range);
        if units == 0 || old.kind(geometry, 0) == Kind::Bad {
            return if units == 0 { Step::Done } else { Step::Fails(Error::Corrupt) };
        }
        let unit = range.start >> geometry.unit_bits;
        let empty = |kind| matches!(kind, Kind::Unallocated | Kind::Zero { .. });
        if only_empty && !empty(old.kind(geometry, unit)) {
            return Step::Fails(Error::Unsupported);
        }
        let new = match geometry.extended() {
            true => self.without_units(old, units, mode),
            false => Ok(self.without(old, mode)),
        };
        let new = match new {
            Ok(new) => new,
            Err(error) => return Step::Fails(error),
        };
        if new == old {
            return Step::Done;
        }
        let l1 = self.tables.l1(geometry.table_of(cluster));
        let has_frame = state.cache.has_frame(&self.tables, geometry.slice_of(cluster));
        if l1 & super::header::COPIED == 0 || !has_frame {
            return Step::NeedsTable;
        }
        self.replace(&mut state, cluster, old, new);
        Step::Done
    }

    /// Whether entries say that they are zeros: where something lies below, or may do so one day.
    fn notes_zeros(&self, mode: Discard) -> bool {
        self.base.is_there() || mode == Discard::Zero { unmap: false }
    }

    fn replace(&self, state: &mut State, cluster: u64, old: Entry, new: Entry) {
        self.set_entry(state, cluster, new);
        let keeps = new.word & OFFSET_MASK != 0 && !old.is_compressed();
        if !keeps {
            self.release_entry(state, old);
        }
    }

    /// A standard entry after its cluster has been discarded.
    fn without(&self, old: Entry, mode: Discard) -> Entry {
        let geometry = &self.tables.geometry;
        let kind = old.kind(geometry, 0);
        let plain = match (geometry.zero_flag && self.notes_zeros(mode), kind) {
            (true, _) => Entry { word: ZERO, bitmap: 0 },
            (false, _) => Entry::default(),
        };
        match (mode, kind) {
            // What lies below was there all the time.
            (Discard::Free, Kind::Unallocated) => old,
            (Discard::Zero { unmap: false }, Kind::Data { own: true, .. } | Kind::Zero { .. })
                if geometry.zero_flag =>
            {
                Entry { word: old.word | ZERO, bitmap: 0 }
            }
            // Without a flag it is nothing, and nothing lies below.
            (_, Kind::Unallocated) if !self.notes_zeros(mode) => old,
            _ => plain,
        }
    }

    /// An extended entry after some of its units have been discarded.
    fn without_units(&self, old: Entry, units: u32, mode: Discard) -> Result<Entry, Error> {
        let all = units == bits(0..32);
        if old.is_compressed() && !all {
            return if mode == Discard::Free { Ok(old) } else { Err(Error::Unsupported) };
        }
        let (allocated, zeros) = match old.is_compressed() {
            true => (units, 0),
            false => (old.allocated(), old.zeros()),
        };
        let gone = match mode {
            Discard::Free => units & allocated,
            Discard::Zero { .. } => units,
        };
        let allocated = allocated & !gone;
        let zeros = if self.notes_zeros(mode) { zeros | gone } else { zeros & !gone };
        let keeps = !old.is_compressed()
            && old.is_own()
            && (allocated != 0 || mode == Discard::Zero { unmap: false });
        let shared_with_data = !old.is_compressed() && !old.is_own() && allocated != 0;
        let word = if keeps || shared_with_data { old.word } else { 0 };
        Ok(Entry { word, bitmap: u64::from(zeros) << 32 | u64::from(allocated) })
    }
}

/// An external data file that is a raw image by itself has to hold the zeros, too.
async fn discard_raw(
    io: &Io,
    data: &Container,
    offset: u64,
    len: u64,
    mode: Discard,
) -> Result<(), Error> {
    // Where blocks are read and written back for a part of them, zeros could be undone.
    let whole = data.traits().request_alignment == 1;
    let end = match mode {
        Discard::Zero { .. } if !whole => return Err(Error::Unsupported),
        Discard::Zero { unmap: false } => data.zero_range(io, offset, len).await,
        _ => data.punch(io, offset, len).await,
    };
    match (end, mode) {
        (Err(Error::Unsupported), Discard::Free) => Ok(()),
        (end, _) => end,
    }
}
