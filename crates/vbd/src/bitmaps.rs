//! The dirty bitmaps of a disk: which regions may have changed since each of them was made or cleared.
//!
//! A request marks its regions before it is carried out; so who clears a bitmap, or reads the disk by one, has it stand still
//! first. They belong to the disk, whichever image it is. Persistent ones outlive the server ([`BitmapStore`]): their bits are
//! in memory that a killed server leaves, and before the first request to a region that is clean it is stable that the region
//! may have changed.
//!
//! A change of bitmaps has three steps: it is staged; it takes place at a moment at which the disk stands still, in memory
//! only; it is committed while requests go on. Until then what is replaced goes on being marked, so that the change can be
//! taken back.

use std::ops::Range;
use std::sync::{Arc, PoisonError};

use ringtap_image::Error;
use ringtap_image::bitmap_store::{
    Binding, BitMemory, How, KeptBitmap, PAGE_WORDS, Restored, RestoredBits, ToKeep, new_number,
};
use ringtap_io::Io;
use ringtap_io::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use ringtap_io::sync::{Mutex, MutexGuard};

use crate::keep::Keep;
use crate::map::Map;
use crate::track::Tracker;

mod alone;
mod change;
mod left;
mod of_disk;
mod successor;
mod turns;

pub use alone::BitmapsAlone;
pub use change::{BitmapChange, MergedFrom, StagedBitmaps};
pub use successor::Successor;

/// Bytes of what is kept of a bitmap besides its bits, at most.
const DESCRIPTION: u64 = 16 << 10;

/// A bitmap.
#[derive(Clone)]
pub struct DirtyBitmap {
    /// Its name.
    pub name: String,
    /// Its marks. Those of a persistent bitmap may be replaced by others when it is changed.
    pub marks: Arc<Tracker>,
    /// Whether it outlives the server.
    pub persistent: bool,
    /// Whether requests are noted in it.
    pub recording: bool,
    /// Why its marks are lost, where they are: everything may have changed, and it is of no use but to be removed.
    pub lost: Option<String>,
}

/// The bitmaps of a disk.
#[derive(Default)]
pub(crate) struct Bitmaps {
    /// How many requests have to mark.
    count: AtomicUsize,
    marked: Mutex<Marked>,
    all: Mutex<Vec<DirtyBitmap>>,
    /// What a change makes of them that has taken place and is not committed.
    staged: Mutex<Vec<DirtyBitmap>>,
    turns: turns::Turns,
    /// Marks that are to take the place of a bitmap's.
    successors: Mutex<Vec<Arc<Map>>>,
    keep: Mutex<Option<Arc<Keep>>>,
    /// The image that the disk is about to go on in, where nothing is kept yet.
    next: Mutex<Option<Binding>>,
}

/// What requests look at.
#[derive(Default)]
struct Marked {
    maps: Vec<Arc<Map>>,
    /// The log, where a bitmap that outlives the server is among them.
    keep: Option<Arc<Keep>>,
    #[cfg(feature = "sabotage")]
    wrongs: BitmapWrongs,
}

/// For tests: what goes wrong.
#[cfg(feature = "sabotage")]
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BitmapWrongs {
    /// Requests do not wait for the log.
    pub unlogged: bool,
    /// One of so many regions is not marked.
    pub unmarked: u64,
    /// What is not marked any more is not made stable.
    pub unflushed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bitmaps {
    /// Mark what a request is about to change; what it has to wait for, where that is not logged yet.
    #[inline]
    pub(crate) fn note(&self, offset: u64, len: u64) -> Option<Arc<Keep>> {
        match self.count.load(SeqCst) {
            0 => None,
            _ => self.mark(offset..offset + len),
        }
    }

    #[cold]
    fn mark(&self, range: Range<u64>) -> Option<Arc<Keep>> {
        let marked = lock(&self.marked);
        #[cfg(feature = "sabotage")]
        if marked.wrongs.unmarked > 0 && (range.start >> 12) % marked.wrongs.unmarked == 0 {
            return None;
        }
        for map in &marked.maps {
            map.mark_lacking(range.clone());
            if map.has_become_short() {
                tracing::warn!(
                    "no memory that outlives the server is left for its bitmaps: after a kill they hold more than has changed"
                );
                marked.keep.iter().for_each(|keep| keep.store.memory_is_short());
            }
        }
        #[cfg(feature = "sabotage")]
        if marked.wrongs.unlogged {
            return None;
        }
        marked.keep.as_ref().filter(|keep| !keep.has(&range)).cloned()
    }

    /// Have requests mark these from now on.
    fn set_marked(&self, all: &[&DirtyBitmap]) {
        let recording = || all.iter().filter(|one| one.recording && one.lost.is_none());
        let mut marked = lock(&self.marked);
        marked.maps.clear();
        for one in recording() {
            let map = one.marks.map();
            if !marked.maps.iter().any(|other| Arc::ptr_eq(other, map)) {
                marked.maps.push(map.clone());
            }
        }
        marked.maps.extend(lock(&self.successors).iter().cloned());
        marked.keep = lock(&self.keep).clone().filter(|_| recording().any(|one| one.persistent));
        self.count.store(marked.maps.len(), SeqCst);
    }

    /// And this one, whatever the bitmaps are.
    fn also_mark(&self, map: &Arc<Map>) {
        lock(&self.successors).push(map.clone());
        self.mark_those_there_are();
    }

    fn mark_no_more(&self, map: &Arc<Map>) {
        lock(&self.successors).retain(|other| !Arc::ptr_eq(other, map));
        self.mark_those_there_are();
    }

    /// And what replaces them, until it does: a change that has taken place can be taken back.
    fn mark_those_there_are(&self) {
        let (all, staged) = (lock(&self.all), lock(&self.staged));
        self.set_marked(&all.iter().chain(&*staged).collect::<Vec<_>>());
    }

    /// Give back the memory of those that are not among the others.
    fn forget_memory(&self, of: &[DirtyBitmap], others: &[DirtyBitmap]) {
        let Some(keep) = self.keep() else { return };
        let needed = numbers(others);
        let gone = numbers(of).into_iter().filter(|number| !needed.contains(number));
        gone.for_each(|number| keep.store.memory().forget(number));
    }

    /// Whether what is not marked any more is to be made stable first.
    fn flushes(&self) -> bool {
        #[cfg(feature = "sabotage")]
        if lock(&self.marked).wrongs.unflushed {
            return false;
        }
        true
    }

    fn keep(&self) -> Option<Arc<Keep>> {
        lock(&self.keep).clone()
    }
}

fn restore(restored: Restored, memory: &Arc<dyn BitMemory>, size: u64) -> DirtyBitmap {
    let KeptBitmap { name, granularity, id, recording, .. } = restored.bitmap;
    let lost = match &restored.bits {
        RestoredBits::Lost(why) => Some(why.clone()),
        RestoredBits::Stored(pages, _)
            if pages.iter().any(|(page, _)| *page > last_page(size, granularity)) =>
        {
            Some("its sidecar has marks behind the disk's end".into())
        }
        _ => None,
    };
    let map = match &restored.bits {
        _ if lost.is_some() => Map::new(granularity),
        RestoredBits::Lost(_) => Map::new(granularity),
        RestoredBits::InMemory => Map::outliving(granularity, memory.clone(), id),
        RestoredBits::Stored(pages, ranges) => {
            let map = Map::outliving(granularity, memory.clone(), new_number());
            pages.iter().for_each(|page| map.add_page(page));
            for range in ranges {
                map.mark(range.start.min(size)..range.end.min(size));
            }
            map
        }
    };
    if let Some(why) = &lost {
        tracing::warn!("bitmap {name:?} is lost, and everything may have changed: {why}");
    }
    let marks = Arc::new(Tracker::of(Arc::new(map)));
    DirtyBitmap { name, marks, persistent: true, recording, lost }
}

/// Write all that are persistent as they are. Nobody else changes them.
async fn write(
    keep: &Arc<Keep>,
    io: &Io,
    size: u64,
    all: &[DirtyBitmap],
    how: How,
) -> Result<(), Error> {
    let staged = keep.stage(io, room_for(all, size), size).await?;
    keep.switch(&staged, || ()).await;
    keep.commit(io, staged, to_keep(all), how).await
}

/// The last page of marks of a disk of that size.
fn last_page(size: u64, granularity: u64) -> u64 {
    size.div_ceil(granularity.max(1)) / (64 * PAGE_WORDS as u64)
}

/// The numbers of their memory.
fn numbers(all: &[DirtyBitmap]) -> Vec<u64> {
    all.iter().filter_map(|one| one.marks.map().number()).collect()
}

/// The most bytes that they take.
fn room_for(all: &[DirtyBitmap], size: u64) -> u64 {
    let one = |one: &DirtyBitmap| {
        let bits = size.div_ceil(one.marks.granularity());
        let pages = bits.div_ceil(64 * PAGE_WORDS as u64) + 1;
        DESCRIPTION + pages * (8 + 8 * PAGE_WORDS as u64)
    };
    all.iter().filter(|one| one.persistent).map(one).sum::<u64>() + DESCRIPTION
}

fn to_keep(all: &[DirtyBitmap]) -> Vec<ToKeep> {
    let persistent = all.iter().filter(|one| one.persistent);
    let one = |one: &DirtyBitmap| {
        let map = one.marks.map();
        let bitmap = KeptBitmap {
            name: one.name.clone(),
            granularity: map.granularity(),
            id: map.number().unwrap_or_default(),
            recording: one.recording,
            lost: one.lost.is_some(),
        };
        let pages = if bitmap.lost { vec![] } else { map.set_pages() };
        ToKeep { bitmap, pages }
    };
    persistent.map(one).collect()
}
