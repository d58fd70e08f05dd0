//! qcow2 images (source: docs/interop/qcow2 of QEMU).
//!
//! Cut by question. What does an entry say: `entry`. What is in memory of the tables: `table`, brought
//! there by `load`. Where does a write go that has no room yet: `allocate`; which clusters are free:
//! `space`, made more by `grow`. How does it all become stable: `flush`, with `refcount`.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, OnceLock, Weak};

use ringtap_io::sync::atomic::AtomicBool;
use ringtap_io::sync::{Mutex, MutexGuard, broken};
use ringtap_io::{File, Io, Mem};

use crate::group_commit::GroupCommit;
use crate::lower::Lower;
use crate::whole::whole;
use crate::{
    Allocation, Boxed, Cipher, Container, Discard, Epochs, Error, Extent, Image, Info, LayerState,
    OnlineCheck, Place, RestartLog, SectorCipher, Status,
};

mod allocate;
mod amend;
mod at_snapshot;
mod below;
mod bitmap;
pub mod bitmap_directory;
mod bitmap_set;
mod bits;
mod carry;
mod chain;
mod check;
mod compress;
pub mod compressed;
mod counts;
mod create;
mod data_file;
mod decoder;
mod discard;
mod downgrade;
mod entry;
mod events;
pub mod extension;
mod flush;
mod grow;
pub mod header;
pub mod header_error;
mod kept_bits;
mod load;
mod moment;
mod name;
mod offline;
mod online;
mod open;
mod open_to_change;
#[cfg(test)]
mod panic_tests;
mod pattern;
mod preallocate;
mod rebase;
mod recent;
mod refcount;
mod report;
mod resize;
mod restart;
mod rewrite;
mod sabotage;
mod shown;
mod snapshot;
mod snapshot_mend;
mod snapshot_name;
mod snapshot_scan;
pub mod snapshot_table;
mod space;
mod status;
mod table;
#[cfg(all(test, feature = "shuttle"))]
mod table_models;
mod together;
mod tool;
mod walk;

pub use amend::{Amendment, amend, may_amend, plan_keyslots};
pub use bitmap::{BitmapChange, change_bitmaps, list_bitmaps, load_bitmap};
pub use bitmap_directory::BitmapEntry;
pub use bitmap_set::BitmapSet;
pub use bits::Bits;
pub use carry::{Carried, There, carry_bitmaps};
pub use check::check;
pub use create::{CreateOptions, Preallocation, create};
pub use data_file::{left, open_to_resize};
pub use decoder::Decoder;
pub use header::{Compression, Crypt, Header};
pub use header_error::HeaderError;
pub use open::{DEFAULT_TABLE_MEMORY, Parts};
pub use rebase::{make_empty, set_backing};
pub use report::{Repair, Report};
pub use resize::{ResizeOptions, resize};
#[cfg(feature = "sabotage")]
pub use sabotage::Sabotage;
pub use snapshot::{apply_snapshot, create_snapshot, delete_snapshot, list_snapshots};
pub use snapshot_name::SnapshotName;
pub use snapshot_table::Snapshot;
pub use tool::ToolError;
pub(crate) use tool::failed;

pub(crate) use chain::open_chain;
pub use chain::open_upon;

use allocate::Allocations;
use compress::Packing;
use entry::Kind;
use events::Events;
use moment::Moment;
use refcount::Refcounts;
use sabotage::Broken;
#[cfg(not(feature = "sabotage"))]
use sabotage::Sabotage;
use space::Space;
use table::{Cache, Tables};

/// A qcow2 image.
#[derive(Clone)]
pub struct Qcow2 {
    shared: Arc<Shared>,
}

/// What all queue threads share.
struct Shared {
    info: Info,
    header: Header,
    container: Container,
    /// The external data file.
    data: Option<Container>,
    data_is_raw: bool,
    /// The file that guest clusters lie in.
    guest_file: File,
    base: Lower,
    key: Option<Arc<dyn SectorCipher>>,
    tables: Tables,
    state: Mutex<State>,
    /// Taken after `state` where both are.
    refcounts: Mutex<Refcounts>,
    /// Whether anything in memory has to be written.
    dirty: AtomicBool,
    /// The image contradicts itself: it takes no more writes.
    corrupt: AtomicBool,
    /// Whether room that is freed stays as it is, for another handle reads it.
    read_beside: AtomicBool,
    /// Whether a task writes to the header.
    header_busy: AtomicBool,
    /// Where changes of entries are kept over a killed server.
    restart: OnceLock<RestartLog>,
    bitmaps: Arc<BitmapSet>,
    decoder: Decoder,
    broken: Broken,
    epochs: Arc<Epochs>,
    flushes: GroupCommit,
    events: Events,
}

/// What changes, under one lock that is never held while anything is waited for.
struct State {
    cache: Cache,
    allocations: Allocations,
    space: Space,
    /// Clusters that are referred to since the last flush, each to be counted once.
    referred: Vec<Range<u64>>,
    /// As `referred`, where others refer to the clusters too.
    shared: Vec<Range<u64>>,
    /// Where compressed clusters go.
    packing: Packing,
    /// Clusters that one reference less points to, in memory.
    released: Vec<Released>,
    /// As `released`, on stable storage too.
    retired: Vec<Released>,
    /// Host clusters of the image's own structures that nothing else may lie in.
    structures: HashSet<u64>,
    /// What a check of the tables looks at, as long as there is one.
    moment: Weak<Moment>,
    /// Clusters that are free and must stay as they are until then.
    held: Vec<u64>,
}

/// A cluster that one reference less points to.
#[derive(Clone, Copy, Debug)]
struct Released {
    cluster: u64,
    /// When that was: older requests may still use it.
    epoch: u64,
}

impl State {
    /// Clusters are referred to from now on.
    fn refer(&mut self, clusters: Range<u64>) {
        match self.referred.last_mut() {
            Some(last) if last.end == clusters.start => last.end = clusters.end,
            _ => self.referred.push(clusters),
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        whole(&self.state)
    }

    fn refcounts(&self) -> MutexGuard<'_, Refcounts> {
        whole(&self.refcounts)
    }

    fn is_corrupt(&self) -> bool {
        self.corrupt.load(Relaxed)
    }

    /// Note that a cluster has one reference less.
    fn release(&self, state: &mut State, cluster: u64) {
        state.packing.leave(cluster, self.header.cluster_bits);
        state.released.push(Released { cluster, epoch: self.epochs.epoch() });
        self.dirty.store(true, SeqCst);
    }

    /// What an entry referred to has one reference less.
    pub(super) fn release_entry(&self, state: &mut State, old: entry::Entry) {
        let bits = self.tables.geometry.cluster_bits;
        if self.tables.geometry.data_file {
            return;
        }
        if old.is_compressed() {
            let (offset, len) = self.header.compressed_extent(old.word);
            for cluster in offset >> bits..=(offset + len - 1) >> bits {
                self.release(state, cluster);
            }
        } else if old.word & header::OFFSET_MASK != 0 {
            self.release(state, (old.word & header::OFFSET_MASK) >> bits);
        }
    }

    /// Change a cluster's L2 entry, whose slice has a frame. Every change that only a flush makes
    /// stable, guest data's place and zeros alike, passes here before it is acknowledged.
    fn set_entry(&self, state: &mut State, cluster: u64, entry: entry::Entry) {
        self.note(cluster, entry);
        // First: who finds the entry without the lock, and writes by it durably, must know that it is not
        // stable yet.
        if !broken("dirty late") {
            self.dirty.store(true, SeqCst);
        }
        state.cache.set(&self.tables, cluster, entry);
        if broken("dirty late") {
            self.dirty.store(true, SeqCst);
        }
    }

    fn cipher(&self, offset: u64) -> Option<Cipher<'_>> {
        self.key.as_deref().map(|key| Cipher { key, offset })
    }
}

impl Image for Qcow2 {
    fn info(&self) -> &Info {
        &self.shared.info
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(self.clone())
    }

    #[inline]
    fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        let shared = &*self.shared;
        let Some(run) = shared.tables.run(offset, len) else { return Extent::NotLoaded };
        match run.kind {
            Kind::Data { host, own } => Extent::Data {
                file: shared.guest_file,
                offset: host,
                len: run.len,
                writable: own && !shared.is_corrupt(),
                cipher: shared.cipher(host),
            },
            Kind::Zero { .. } => Extent::Zero { len: run.len, writable: false },
            Kind::Unallocated => shared.base.map(offset, run.len),
            Kind::Compressed => Extent::Compressed { len: run.len },
            Kind::Bad => Extent::NotLoaded,
        }
    }

    fn load<'a>(&'a self, io: &'a Io, offset: u64) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.shared.load(io, offset))
    }

    fn decompress<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        mem: Mem,
    ) -> Boxed<'a, Result<usize, Error>> {
        Box::pin(self.shared.decompress(io, offset, mem))
    }

    fn compress<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        bytes: &'a [u8],
    ) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.shared.compress(io, offset, bytes))
    }

    fn allocate<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
    ) -> Boxed<'a, Result<Option<Allocation<'a>>, Error>> {
        Box::pin(self.shared.allocate(io, offset, len))
    }

    fn allocate_at_once(&self, offset: u64, len: u64) -> Option<Allocation<'_>> {
        self.shared.allocate_at_once(offset, len)
    }

    fn commit(&self, room: Allocation<'_>, written: bool) {
        self.shared.commit(room.token, written);
    }

    fn is_dirty(&self) -> bool {
        self.shared.dirty.load(SeqCst)
    }

    fn epochs(&self) -> Option<&Arc<Epochs>> {
        Some(&self.shared.epochs)
    }

    fn flush<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.shared.flush(io))
    }

    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.shared.discard(io, offset, len, mode))
    }

    fn zero_part<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        unmap: bool,
    ) -> Boxed<'a, Result<bool, Error>> {
        Box::pin(self.shared.zero_part(io, offset, len, unmap))
    }

    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        Box::pin(self.shared.status(io, offset, len))
    }

    fn bitmaps(&self) -> Option<&Arc<BitmapSet>> {
        Some(&self.shared.bitmaps)
    }

    fn online_check<'a>(
        &'a self,
        io: &'a Io,
    ) -> Boxed<'a, Result<Option<Box<dyn OnlineCheck>>, ToolError>> {
        Box::pin(async { self.shared.online_check(io).await.map(Some) })
    }

    fn current_size(&self) -> Result<u64, Error> {
        Ok(self.shared.info.size)
    }

    fn state(&self) -> LayerState {
        self.shared.layer_state()
    }

    fn ends_with_process(&self) -> bool {
        !self.shared.info.read_only && self.shared.restart.get().is_none()
    }

    fn abandon(&self) {
        self.shared.abandon();
    }

    fn below(&self) -> Option<&dyn Image> {
        self.shared.base.image()
    }

    fn container(&self) -> Option<&Container> {
        Some(&self.shared.container)
    }

    fn data_file(&self) -> Option<&Container> {
        self.shared.data.as_ref()
    }

    fn takes_durable_writes(&self) -> bool {
        let shared = &*self.shared;
        shared.data.as_ref().unwrap_or(&shared.container).takes_durable_writes()
    }

    fn place(&self) -> Option<Place> {
        Some(self.shared.container.place())
    }

    fn let_write(&self, may: bool) {
        self.shared.container.let_write(may);
        self.shared.data.iter().for_each(|data| data.let_write(may));
    }

    fn read_beside(&self, beside: bool) {
        self.shared.read_beside.store(beside, SeqCst);
    }

    fn stop_writing(&self) {
        self.shared.container.stop_writing();
        self.shared.data.iter().for_each(Container::stop_writing);
    }

    fn opens_again(&self) {
        self.shared.restart.get().into_iter().for_each(RestartLog::stays_whole);
    }

    fn close<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.shared.close(io))
    }
}
