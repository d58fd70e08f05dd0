//! Storing clusters compressed, as `convert -c` asks.
//!
//! Compressed clusters lie one behind the other, whatever host clusters they meet: each adds a reference
//! to those. The references are counted by the next flush even where writing fails meanwhile, so that no
//! host cluster is freed that another piece is on its way to. What does not get smaller is stored as it is.
//!
//! The restart log is not told: what a flush has not made stable is lost with the process.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry::{Occupied, Vacant};
use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;

use ringtap_io::{Io, Listener};

use super::compressed::Encoder;
use super::entry::Entry;
use super::header::COPIED;
use super::space::Taken;
use super::table::Lookup;
use super::{Compression, Sabotage, Shared, State};
use crate::Error;

thread_local! {
    static ENCODERS: RefCell<HashMap<Compression, Encoder>> = RefCell::new(HashMap::new());
}

/// Where the next compressed cluster goes: behind the last.
#[derive(Default)]
pub(super) struct Packing {
    at: u64,
    /// Where the host clusters end that were taken.
    end: u64,
    /// References to the host cluster that `at` lies within, none where that is only its beginning.
    references: u64,
}

impl Packing {
    /// A host cluster has one reference less: it may become free, and nothing is added to it.
    pub(super) fn leave(&mut self, cluster: u64, cluster_bits: u32) {
        if self.at >> cluster_bits == cluster {
            *self = Packing::default();
        }
    }
}

/// The clusters of one call, encoded.
#[derive(Default)]
struct Batch {
    /// All compressed bytes, one cluster's behind the other's.
    bytes: Vec<u8>,
    /// Guest clusters, and where in `bytes` theirs lie.
    packed: Vec<(u64, Range<usize>)>,
    /// Guest clusters that are better stored as they are.
    plain: Vec<u64>,
}

/// Where a compressed cluster goes.
struct Place {
    cluster: u64,
    from: Range<usize>,
    host: u64,
}

impl Place {
    fn end(&self) -> u64 {
        self.host + self.from.len() as u64
    }
}

impl Shared {
    /// Store clusters compressed, as [`crate::Image::compress`] says.
    pub(super) async fn compress(&self, io: &Io, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let geometry = &self.tables.geometry;
        if self.info.read_only {
            return Err(Error::ReadOnly);
        }
        let whole = offset % geometry.cluster() == 0
            && (bytes.len() as u64 % geometry.cluster() == 0
                || offset + bytes.len() as u64 == geometry.size);
        if !whole {
            return Err(Error::Range);
        }
        let sector = self.container.traits().request_alignment;
        if self.key.is_some() || self.data.is_some() || sector > geometry.cluster() {
            return Err(Error::Unsupported);
        }
        let crowded = self.state().cache.is_crowded(&self.tables);
        if crowded {
            self.flush(io).await?;
        }
        let batch = self.encode(offset >> geometry.cluster_bits, bytes)?;
        self.store_packed(io, &batch).await?;
        let mut rest = &batch.plain[..];
        while let Some(first) = rest.first().copied() {
            let count = rest.iter().zip(first..).take_while(|(one, other)| **one == *other).count();
            rest = rest.get(count..).unwrap_or_default();
            let from = ((first << geometry.cluster_bits) - offset) as usize;
            let to = (from + (count << geometry.cluster_bits)).min(bytes.len());
            let part = bytes.get(from..to).ok_or(Error::Range)?;
            self.store_plain(io, first, part).await?;
        }
        Ok(())
    }

    fn encode(&self, first: u64, bytes: &[u8]) -> Result<Batch, Error> {
        let size = self.tables.geometry.cluster() as usize;
        let kind = self.header.compression;
        ENCODERS.with_borrow_mut(|encoders| {
            let encoder = match encoders.entry(kind) {
                Occupied(entry) => entry.into_mut(),
                Vacant(entry) => entry.insert(Encoder::new(kind)?),
            };
            let mut batch = Batch::default();
            let mut last = Vec::new();
            for (number, cluster) in (first..).zip(bytes.chunks(size)) {
                let cluster = match cluster.len() == size {
                    true => cluster,
                    // The disk ends within it.
                    false => {
                        last.extend_from_slice(cluster);
                        last.resize(size, 0);
                        &last
                    }
                };
                let from = batch.bytes.len();
                batch.bytes.resize(from + size, 0);
                let used = encoder.encode(cluster, batch.bytes.get_mut(from..).unwrap_or_default());
                batch.bytes.truncate(from + used.unwrap_or(0));
                match used {
                    Some(used) => batch.packed.push((number, from..from + used)),
                    None => batch.plain.push(number),
                }
            }
            Ok(batch)
        })
    }

    async fn store_packed(&self, io: &Io, batch: &Batch) -> Result<(), Error> {
        let mut places = Vec::with_capacity(batch.packed.len());
        let mut pointed = 0;
        let end = async {
            self.place_all(io, &batch.packed, &mut places).await?;
            let late = self.does(Sabotage::PackedLate);
            if !late {
                self.write_packed(io, &batch.bytes, &places).await?;
            }
            // What was decoded of a host cluster's former content is past.
            self.decoder.forget();
            for place in &places {
                let word = self.header.compressed_entry(place.host, place.from.len() as u64);
                let word = word.ok_or(Error::Full)?;
                self.point(io, place.cluster, Entry { word, bitmap: 0 }).await?;
                pointed += 1;
            }
            if late { self.write_packed(io, &batch.bytes, &places).await } else { Ok(()) }
        };
        let end = end.await;
        if end.is_err() {
            let bits = self.header.cluster_bits;
            let mut state = self.state();
            for place in places.iter().skip(pointed) {
                for cluster in place.host >> bits..=(place.end() - 1) >> bits {
                    self.release(&mut state, cluster);
                }
            }
        }
        end
    }

    /// Find room for all pieces; `places` has what was found, where it fails too.
    async fn place_all(
        &self,
        io: &Io,
        pieces: &[(u64, Range<usize>)],
        places: &mut Vec<Place>,
    ) -> Result<(), Error> {
        let mut full = false;
        while !self.place_some(pieces, places, full) {
            match self.grow(io).await {
                Err(Error::Full) if !full => full = true,
                Err(Error::Full) => self.reclaim(io).await?,
                end => end?,
            }
        }
        Ok(())
    }

    /// Find room for pieces that have none, until there is no free cluster; whether all have it.
    fn place_some(
        &self,
        pieces: &[(u64, Range<usize>)],
        places: &mut Vec<Place>,
        full: bool,
    ) -> bool {
        let mut state = self.state();
        let all: usize = pieces.last().map_or(0, |(_, from)| from.end);
        for (cluster, from) in pieces.iter().skip(places.len()) {
            let (len, rest) = (from.len() as u64, (all - from.start) as u64);
            let Some(host) = self.place_one(&mut state, len, rest, full) else { break };
            places.push(Place { cluster: *cluster, from: from.clone(), host });
        }
        // The next piece may be written at the same time: it shares no sector with these.
        let packing = &mut state.packing;
        packing.at = packing.at.next_multiple_of(self.sector());
        if packing.at % self.header.cluster_size() == 0 {
            packing.references = 0;
        }
        places.len() == pieces.len()
    }

    /// Where there is no room: let flushes bring back what was released lately, or say that it is full.
    async fn reclaim(&self, io: &Io) -> Result<(), Error> {
        // The first makes it stable that nothing refers to it, the second counts that.
        for _ in 0..2 {
            self.flush(io).await?;
            if !self.plan_is_hopeless() {
                return Ok(());
            }
        }
        Err(Error::Full)
    }

    fn sector(&self) -> u64 {
        self.container.traits().request_alignment.max(512)
    }

    /// Room for `len` bytes, of `rest` that are wanted one behind the other.
    fn place_one(&self, state: &mut State, len: u64, rest: u64, full: bool) -> Option<u64> {
        let (bits, most) = (self.header.cluster_bits, self.header.max_refcount());
        let packing = &mut state.packing;
        if packing.references >= most {
            packing.at = packing.at.next_multiple_of(1 << bits);
            packing.references = 0;
        }
        if packing.at + len > packing.end {
            let count = (rest - (packing.end - packing.at)).div_ceil(1 << bits);
            let space = &mut state.space;
            let taken = if full { space.take_any(count) } else { space.take(count) };
            let Taken { clusters, .. } = taken?;
            if clusters.start << bits != packing.end {
                // Whole clusters of the last run are free again.
                let unused = packing.at.div_ceil(1 << bits)..packing.end >> bits;
                space.give_back(unused, false);
                *packing = Packing { at: clusters.start << bits, end: 0, references: 0 };
            }
            packing.end = clusters.end << bits;
        }
        let host = packing.at;
        let (first, last) = (host >> bits, (host + len - 1) >> bits);
        packing.at += len;
        let shared = packing.references;
        packing.references = match (packing.at % (1 << bits), first == last) {
            (0, _) => 0,
            (_, true) => shared + 1,
            (_, false) => 1,
        };
        for cluster in first..=last {
            if cluster == first && shared > 0 {
                if !self.does(Sabotage::SharedUncounted) {
                    state.shared.push(cluster..cluster + 1);
                }
            } else {
                state.refer(cluster..cluster + 1);
            }
        }
        self.dirty.store(true, SeqCst);
        Some(host)
    }

    /// Write all pieces, those that lie one behind the other together.
    async fn write_packed(&self, io: &Io, bytes: &[u8], places: &[Place]) -> Result<(), Error> {
        let mut rest = places;
        while let Some(first) = rest.first() {
            let next = rest.iter().zip(rest.iter().skip(1));
            let count = 1 + next.take_while(|(one, next)| one.end() == next.host).count();
            let (run, after) = rest.split_at(count);
            rest = after;
            let to = run.last().map_or(first.from.end, |last| last.from.end);
            let run = bytes.get(first.from.start..to).ok_or(Error::Range)?;
            let mut whole = run.to_vec();
            whole.resize(run.len().next_multiple_of(self.sector() as usize), 0);
            self.container.write(io, first.host, &whole).await?;
        }
        Ok(())
    }

    /// Store clusters as they are, from `cluster` on.
    async fn store_plain(&self, io: &Io, mut cluster: u64, bytes: &[u8]) -> Result<(), Error> {
        let bits = self.header.cluster_bits;
        let bitmap = if self.tables.geometry.extended() { u64::from(u32::MAX) } else { 0 };
        let mut rest = bytes;
        while !rest.is_empty() {
            let count = rest.len().div_ceil(1 << bits) as u64;
            let taken = match self.take_clusters(io, count).await {
                Err(Error::Full) => {
                    self.reclaim(io).await?;
                    continue;
                }
                taken => taken?.clusters,
            };
            let len = (((taken.end - taken.start) << bits) as usize).min(rest.len());
            let (part, after) = rest.split_at(len);
            rest = after;
            let mut tail = Vec::new();
            let part = match len % (1 << bits) {
                0 => part,
                // What lies past the disk's end would be seen once the disk has grown.
                _ => {
                    tail.extend_from_slice(part);
                    tail.resize(len.next_multiple_of(1 << bits), 0);
                    &tail
                }
            };
            let written = self.container.write(io, taken.start << bits, part).await;
            self.take_in(taken.clone(), written)?;
            for host in taken {
                let entry = Entry { word: host << bits | COPIED, bitmap };
                self.point(io, cluster, entry).await?;
                cluster += 1;
            }
        }
        Ok(())
    }

    /// Count clusters that were written; where an entry then cannot be set, that is a leak. Those that
    /// could not be written are free again.
    fn take_in(&self, clusters: Range<u64>, written: Result<(), Error>) -> Result<(), Error> {
        let mut state = self.state();
        match written {
            Ok(()) => state.refer(clusters),
            Err(_) => state.space.give_back(clusters, false),
        }
        self.dirty.store(true, SeqCst);
        written
    }

    /// Set a cluster's entry, once no write to the cluster is in flight.
    async fn point(&self, io: &Io, cluster: u64, entry: Entry) -> Result<(), Error> {
        loop {
            self.own_table(io, cluster).await?;
            match self.point_now(cluster, entry) {
                Some(settled) => settled.await,
                None => return Ok(()),
            }
        }
    }

    /// The same of a cluster whose table is pinned, which it is not afterwards; or what to wait for.
    fn point_now(&self, cluster: u64, entry: Entry) -> Option<Listener<'_>> {
        let mut state = self.state();
        let settled = state.allocations.is_pending(cluster).then(|| self.events.settled.listen());
        if let (None, Lookup::Entry(old)) = (&settled, self.tables.entry(cluster)) {
            self.dirty.store(true, SeqCst);
            state.cache.set(&self.tables, cluster, entry);
            self.release_entry(&mut state, old);
        }
        state.cache.unpin(&self.tables, self.tables.geometry.slice_of(cluster));
        settled
    }
}
