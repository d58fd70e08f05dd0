//! Scratch of a moment: what requests change is set aside there first, and comes to the target from there. So no guest waits
//! for a target, whatever that does, as long as there is room.
//!
//! A region goes there once at most. Who looks whether it lies there, puts it there or frees it has its range for itself.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};

use ringtap_image::Error;
use ringtap_io::{Event, Io, Mem};

use crate::map::Map;
use crate::mirror::target::Target;
use crate::mirror::unstable::{Flushing, Unstable};
use crate::{Disk, Kind, Request};

/// The most bytes copied at once.
pub(super) const PIECE: u64 = 1 << 20;

/// Where what requests change lies until the target has it.
pub struct Scratch {
    /// It reads as zeros, is at least as large as the disk was at the moment, and nobody else has it.
    pub disk: Disk,
    /// The most bytes that lie there at once.
    pub room: u64,
}

pub(super) struct Aside {
    pub(super) scratch: Arc<Target>,
    /// The regions that are there.
    pub(super) holds: Map,
    /// Those of them, and of those spent, that take room: they are not all zeros.
    pub(super) takes: Map,
    /// Those that the target has, though perhaps not for good.
    pub(super) spent: Unstable,
    /// Who waits for room.
    pub(super) lacking: AtomicUsize,
    pub(super) room: u64,
    pub(super) used: AtomicU64,
    /// Whether more may come, and how many requests are about to bring some.
    pub(super) open: AtomicBool,
    pub(super) coming: AtomicUsize,
    pub(super) told: Event,
}

/// Somebody who is about to set something aside.
pub(super) struct Coming<'a>(&'a Aside);

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        self.0.coming.fetch_sub(1, SeqCst);
        self.0.told.notify();
    }
}

impl Aside {
    pub(super) fn new(scratch: Scratch, granularity: u64) -> Aside {
        Aside {
            scratch: Arc::new(Target::new(scratch.disk)),
            holds: Map::new(granularity),
            takes: Map::new(granularity),
            spent: Unstable::new(granularity),
            lacking: AtomicUsize::new(0),
            room: scratch.room,
            used: AtomicU64::new(0),
            open: AtomicBool::new(true),
            coming: AtomicUsize::new(0),
            told: Event::default(),
        }
    }

    /// None where nothing more is to come.
    pub(super) fn enter(&self) -> Option<Coming<'_>> {
        self.coming.fetch_add(1, SeqCst);
        let coming = Coming(self);
        self.open.load(SeqCst).then_some(coming)
    }

    pub(super) fn set_open(&self, open: bool) {
        self.open.store(open, SeqCst);
        self.told.notify();
    }

    /// Nothing more comes, once this has ended.
    pub(super) async fn shut(&self) {
        self.set_open(false);
        loop {
            let told = self.told.listen();
            if self.coming.load(SeqCst) == 0 {
                return;
            }
            told.await;
        }
    }

    /// Take room for the regions of a range that have none: how much is lacking where there is not enough.
    pub(super) fn take(&self, range: &Range<u64>, size: u64) -> Result<(), u64> {
        let bytes = self.bytes(self.takes.lacking(range).into_iter(), size);
        let more = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.room);
        match self.used.fetch_update(SeqCst, SeqCst, more) {
            Ok(_) => {
                self.takes.mark(range.clone());
                Ok(())
            }
            Err(_) => Err(bytes),
        }
    }

    /// Bytes of so many regions of the disk, the last of which may be short.
    pub(super) fn bytes(&self, regions: impl Iterator<Item = u64>, size: u64) -> u64 {
        let each = self.holds.granularity();
        regions.map(|region| size.saturating_sub(region * each).min(each)).sum()
    }

    /// Wait until so many bytes are free, or nothing more may come.
    pub(super) async fn has_room(&self, bytes: u64) {
        loop {
            let told = self.told.listen();
            let used = self.used.load(SeqCst);
            if used.saturating_add(bytes) <= self.room || !self.open.load(SeqCst) {
                return;
            }
            told.await;
        }
    }

    /// The target has the regions of a range, though perhaps not for good.
    pub(super) fn spend(&self, range: Range<u64>) {
        let mut at = range.start;
        while let Some(part) = self.holds.first_in(&(at..range.end)) {
            at = part.end;
            self.spent.written(part);
        }
        self.holds.forget(range);
        self.told.notify();
    }

    /// Whether nothing but a stable target makes room that is lacking, or about to be.
    pub(super) fn is_spent(&self) -> bool {
        let spent = self.spent.marked();
        spent > 0 && (spent >= self.room / 2 || self.lacking.load(SeqCst) > 0)
    }

    /// What the target has is about to be stable there.
    pub(super) fn flushing(&self) -> Flushing<'_> {
        self.spent.flushing()
    }

    /// It is.
    pub(super) async fn free_all(&self, io: &Io, stable: &Map, size: u64) {
        let mut at = 0;
        while let Some(range) = stable.next(at, PIECE) {
            at = range.end;
            self.free(io, range, size).await;
        }
    }

    /// The target may have lost it.
    pub(super) fn take_back(&self, size: u64) {
        self.holds.merge(&self.spent.take(), size);
        self.told.notify();
    }

    pub(super) fn has(&self, range: &Range<u64>) -> bool {
        self.holds.has_all(range)
    }

    pub(super) async fn serve(&self, io: &Io, request: Request) -> Result<(), Error> {
        let own = self.scratch.take();
        let end = own.serve(io, request).await;
        self.scratch.give_back(own);
        end
    }

    /// The target has the regions of a range.
    pub(super) async fn free(&self, io: &Io, range: Range<u64>, size: u64) {
        self.holds.forget(range.clone());
        let mut at = range.start;
        while let Some(part) = self.takes.first_in(&(at..range.end)) {
            at = part.end;
            self.takes.forget(part.clone());
            let (kind, mem) = (Kind::WriteZeroes { unmap: true, fast: true }, Mem::EMPTY);
            let len = part.end - part.start;
            let request = Request { kind, offset: part.start, len, mem, fua: false };
            // A file system without holes keeps the bytes: the file grows, though no more than so many are in use.
            let _ = self.serve(io, request).await;
            let regions = self.takes.regions(&part);
            self.used.fetch_sub(self.bytes(regions, size), SeqCst);
        }
        self.told.notify();
    }
}
