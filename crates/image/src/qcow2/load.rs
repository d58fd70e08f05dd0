//! Bringing L2 tables into memory, making them where there are none, copying them where a snapshot
//! has them too.

use std::sync::Arc;

use ringtap_io::sync::broken;
use ringtap_io::{Io, Listener, Mem};

use super::entry::{Entry, Kind};
use super::header::{COPIED, L1_RESERVED, incompatible};
use super::table::Lookup;
use super::{Shared, State};
use crate::bytes::be64;
use crate::container::Piece;
use crate::{Error, Extent};

/// The most that is remembered of where the image's own structures lie: the tables of 128 TiB with
/// clusters of 64 KiB.
const MOST_STRUCTURES: usize = 1 << 18;

impl State {
    /// Nothing else may lie in this host cluster.
    pub(super) fn add_structure(&mut self, cluster: u64) {
        if self.structures.len() < MOST_STRUCTURES {
            self.structures.insert(cluster);
        }
    }

    /// Whether one of the image's own structures lies in it, or may, for not all are remembered.
    pub(super) fn may_be_structure(&self, cluster: u64) -> bool {
        self.structures.len() >= MOST_STRUCTURES || self.structures.contains(&cluster)
    }
}

impl Shared {
    /// Bring to memory what `map` lacks at `offset`.
    pub(super) async fn load(&self, io: &Io, offset: u64) -> Result<(), Error> {
        let cluster = offset >> self.tables.geometry.cluster_bits;
        self.load_entry(io, cluster).await?;
        match self.tables.run(offset, 1).map(|run| run.kind) {
            Some(Kind::Bad) => Err(self.mark_corrupt(io).await),
            Some(Kind::Unallocated) => match (self.base.image(), self.base.map(offset, 1)) {
                (Some(base), Extent::NotLoaded) => base.load(io, offset).await,
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Fill `mem` from the compressed cluster at `offset`, here or below.
    pub(super) async fn decompress(&self, io: &Io, offset: u64, mem: Mem) -> Result<usize, Error> {
        let geometry = &self.tables.geometry;
        let within = offset & (geometry.cluster() - 1);
        let kind = match self.tables.entry(offset >> geometry.cluster_bits) {
            Lookup::Entry(entry) if entry.is_compressed() && !geometry.data_file => {
                let cluster = self.decoded(io, entry.word).await?;
                return Ok(mem.copy_from(cluster.get(within as usize..).unwrap_or_default()));
            }
            Lookup::Entry(entry) => entry.kind(geometry, within >> geometry.unit_bits),
            Lookup::NoTable => Kind::Unallocated,
            Lookup::NotLoaded => return Ok(0),
        };
        match (self.base.image(), self.base.map(offset, 1)) {
            // What has been written here since the map was looked at hides what lies below.
            (Some(base), Extent::Compressed { .. }) if kind == Kind::Unallocated => {
                base.decompress(io, offset, mem).await
            }
            _ => Ok(0),
        }
    }

    /// The bytes of a compressed cluster.
    async fn decoded(&self, io: &Io, entry: u64) -> Result<Arc<[u8]>, Error> {
        if let Some(cluster) = self.decoder.cached(entry) {
            return Ok(cluster);
        }
        let (offset, len) = self.header.compressed_extent(entry);
        let mut data = vec![0; len as usize];
        self.container.read(io, offset, &mut data).await?;
        self.decoder.decode(io, entry, data).await
    }

    /// Bring a cluster's entry to memory; gives it, or nothing where the cluster has no L2 table.
    pub(super) async fn load_entry(&self, io: &Io, cluster: u64) -> Result<Option<Entry>, Error> {
        self.bring(io, cluster, false).await
    }

    /// Bring the whole slice of a cluster's entry to memory; the cluster has an L2 table.
    pub(super) async fn bring_slice(&self, io: &Io, cluster: u64) -> Result<(), Error> {
        self.bring(io, cluster, true).await.map(|_| ())
    }

    /// As [`Shared::load_entry`]; with `whole` all of its slice.
    async fn bring(&self, io: &Io, cluster: u64, whole: bool) -> Result<Option<Entry>, Error> {
        let slice = self.tables.geometry.slice_of(cluster);
        loop {
            match self.tables.entry(cluster) {
                Lookup::Entry(entry) if !whole || self.tables.is_loaded(slice) => {
                    return Ok(Some(entry));
                }
                Lookup::NoTable => return Ok(None),
                Lookup::Entry(_) | Lookup::NotLoaded => {}
            }
            let at = match self.begin_loading(slice, whole) {
                Ok(at) => at,
                Err(loaded) => {
                    loaded.await;
                    continue;
                }
            };
            let later = match at {
                Where::Nowhere => continue,
                Where::Blank => self.end_loading(slice, Ok(None))?,
                Where::At(l1) => {
                    let read = self.read_slice(io, slice, l1).await;
                    self.end_loading(slice, read.map(Some))?
                }
                Where::EntryAt(l1) => {
                    let read = self.read_entry(io, cluster, l1).await;
                    self.end_reading(slice, |state| {
                        state.cache.keep_entry(&self.tables, cluster, read?);
                        Ok(Later::No)
                    })?
                }
            };
            self.wait_for_frame(io, later).await?;
        }
    }

    /// Where to read a slice; what to wait for where another task does.
    fn begin_loading(&self, slice: u64, whole: bool) -> Result<Where, Listener<'_>> {
        let table = self.tables.geometry.table_of_slice(slice);
        let mut state = self.state();
        let (cache, l1) = (&mut state.cache, self.tables.l1(table));
        if self.tables.is_loaded(slice) || l1 == 0 {
            return Ok(Where::Nowhere);
        }
        if !cache.loading.insert(slice) {
            return Err(self.events.loaded.listen());
        }
        if cache.is_blank(&self.tables, slice) {
            return Ok(Where::Blank);
        }
        let whole = whole || cache.wants(&self.tables, slice, !self.info.read_only);
        Ok(if whole { Where::At(l1) } else { Where::EntryAt(l1) })
    }

    async fn read_slice(&self, io: &Io, slice: u64, l1: u64) -> Result<Piece, Error> {
        let geometry = &self.tables.geometry;
        let at = self.table_offset(io, l1).await? + geometry.offset_in_table(slice);
        self.container.read_piece(io, at, geometry.bytes_of_slice() as usize).await
    }

    async fn read_entry(&self, io: &Io, cluster: u64, l1: u64) -> Result<Entry, Error> {
        let geometry = &self.tables.geometry;
        let slice =
            self.table_offset(io, l1).await? + geometry.offset_in_table(geometry.slice_of(cluster));
        let at = slice + 8 * geometry.word_of(cluster) as u64;
        let bytes = self.container.read_piece(io, at, if geometry.extended() { 16 } else { 8 });
        let bytes = bytes.await?;
        Ok(Entry { word: be64(&bytes, 0).unwrap_or(0), bitmap: be64(&bytes, 8).unwrap_or(0) })
    }

    /// Where an L1 entry says the table lies, if it may lie there.
    async fn table_offset(&self, io: &Io, l1: u64) -> Result<u64, Error> {
        let offset = l1 & super::header::OFFSET_MASK;
        let aligned = offset % self.tables.geometry.cluster() == 0;
        if l1 & L1_RESERVED != 0 || !aligned || offset >= self.container.len() {
            return Err(self.mark_corrupt(io).await);
        }
        Ok(offset)
    }

    /// What was read, if it was, goes into memory, where there is room; a slice that was not read is zeros.
    fn end_loading(
        &self,
        slice: u64,
        read: Result<Option<Piece>, Error>,
    ) -> Result<Later<'_>, Error> {
        self.end_reading(slice, |state| {
            let installed = match read? {
                None => state.cache.install(&self.tables, slice, |_| 0),
                Some(bytes) => {
                    let word = |at: usize| be64(&bytes, at * 8).unwrap_or(0);
                    state.cache.install(&self.tables, slice, word)
                }
            };
            if installed && !self.info.read_only && state.cache.is_first(slice) {
                self.look_for_overlaps(state, slice);
            }
            Ok(if installed { Later::No } else { self.later(state) })
        })
    }

    /// A slice is not being read any more; `then` has what was.
    fn end_reading<T>(&self, slice: u64, then: impl FnOnce(&mut State) -> T) -> T {
        let end = {
            let mut state = self.state();
            state.cache.loading.remove(&slice);
            then(&mut state)
        };
        if !broken("loaded in silence") {
            self.events.loaded.notify();
        }
        end
    }

    /// No frame was to be had.
    fn later(&self, state: &State) -> Later<'_> {
        state.cache.frame_later(&self.tables).map_or(Later::Flushed, Later::Freed)
    }

    /// See that there may be a frame now, where none was.
    async fn wait_for_frame(&self, io: &Io, later: Later<'_>) -> Result<(), Error> {
        match later {
            Later::No => Ok(()),
            Later::Flushed => self.flush(io).await,
            Later::Freed(freed) => {
                self.flush(io).await?;
                freed.await;
                Ok(())
            }
        }
    }

    /// An entry that points into the image's own structures would let the guest write over them: the
    /// image takes no more writes then.
    fn look_for_overlaps(&self, state: &State, slice: u64) {
        let geometry = &self.tables.geometry;
        if geometry.data_file {
            return;
        }
        let clusters = geometry.clusters_of_slice(slice);
        let overlaps = clusters.filter_map(|cluster| match self.tables.entry(cluster) {
            Lookup::Entry(entry) => entry.host(geometry),
            _ => None,
        });
        let mut overlaps = overlaps.map(|host| host >> geometry.cluster_bits);
        if overlaps.any(|cluster| state.structures.contains(&cluster)) {
            self.corrupt.store(true, std::sync::atomic::Ordering::SeqCst);
        }
    }

    /// Whether there is a table that nobody else refers to.
    pub(super) fn owns_table(&self, table: u64) -> bool {
        let l1 = self.tables.l1(table);
        l1 & COPIED != 0 && l1 & super::header::OFFSET_MASK != 0
    }

    /// See that a cluster has an L2 table that nobody else refers to, and its slice in a frame; it is
    /// pinned then. The image may be written to.
    pub(super) async fn own_table(&self, io: &Io, cluster: u64) -> Result<(), Error> {
        let geometry = &self.tables.geometry;
        let (table, slice) = (geometry.table_of(cluster), geometry.slice_of(cluster));
        loop {
            if self.is_corrupt() {
                return Err(self.mark_corrupt(io).await);
            }
            if !self.owns_table(table) {
                if let Some(made) = self.begin_making(table) {
                    made.await;
                    continue;
                }
                let made = self.make_table(io, table).await;
                self.state().cache.making.remove(&table);
                if !broken("made in silence") {
                    self.events.made.notify();
                }
                made?;
                continue;
            }
            self.bring(io, cluster, true).await?;
            let later = {
                let mut state = self.state();
                if state.cache.pin_frame(&self.tables, slice) {
                    return Ok(());
                }
                if self.tables.is_loaded(slice) { self.later(&state) } else { Later::No }
            };
            self.wait_for_frame(io, later).await?;
        }
    }

    /// What to wait for where another task makes this table; else it is this one's to make.
    fn begin_making(&self, table: u64) -> Option<Listener<'_>> {
        let mut state = self.state();
        (!state.cache.making.insert(table)).then(|| self.events.made.listen())
    }

    /// Give an L1 entry a table of its own.
    async fn make_table(&self, io: &Io, table: u64) -> Result<(), Error> {
        let geometry = &self.tables.geometry;
        if self.owns_table(table) {
            return Ok(());
        }
        // What says that nobody else refers to a table that there is not says nothing.
        let old = self.tables.l1(table) & !COPIED;
        let taken = self.take_clusters(io, 1).await?;
        let (new, cluster) = (taken.clusters.start, geometry.cluster());
        let copied = async {
            let mut bytes = vec![0; cluster as usize];
            if old != 0 {
                let from = self.table_offset(io, old).await?;
                self.container.read(io, from, &mut bytes).await?;
            } else if taken.fresh {
                return Ok(());
            }
            self.container.write(io, new << geometry.cluster_bits, &bytes).await
        };
        let copied = copied.await;
        let mut state = self.state();
        if let Err(error) = copied {
            state.space.give_back(new..new + 1, false);
            return Err(error);
        }
        if old == 0 {
            state.cache.add_blank(&self.tables, table);
        } else {
            let old = (old & super::header::OFFSET_MASK) >> geometry.cluster_bits;
            self.release(&mut state, old);
        }
        state.refer(new..new + 1);
        state.add_structure(new);
        state.cache.set_l1(&self.tables, table, new << geometry.cluster_bits | COPIED);
        self.dirty.store(true, std::sync::atomic::Ordering::SeqCst);
        Ok(())
    }

    /// The image contradicts itself: say so in its header, and take no more writes.
    pub(super) async fn mark_corrupt(&self, io: &Io) -> Error {
        self.corrupt.store(true, std::sync::atomic::Ordering::SeqCst);
        if !self.info.read_only && self.header.version > 2 {
            let bits = self.header.incompatible | incompatible::CORRUPT;
            // The request fails in any case.
            let _told = self.patch_header(io, 72, &bits.to_be_bytes()).await;
        }
        Error::Corrupt
    }
}

/// When there may be a frame for a slice.
enum Later<'a> {
    /// It has one, or needs none.
    No,
    /// After a flush.
    Flushed,
    /// After a flush, and when one of those that are pinned is not any more.
    Freed(Listener<'a>),
}

/// Where a slice's bytes are.
enum Where {
    /// It is in memory already, or there is no table.
    Nowhere,
    /// It is all zeros.
    Blank,
    /// In the table that this L1 entry names.
    At(u64),
    /// There, and only the one entry is to be read.
    EntryAt(u64),
}
