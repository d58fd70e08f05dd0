//! Entries looked up lately whose slices have no frame.
//!
//! Where tables are larger than the memory for them and requests meet them at random, a slice brought
//! to memory is gone before anybody asks for another of its entries. So the first of them is read
//! alone, and kept here; the slice follows when it is asked for once more while that is remembered.

use ringtap_io::sync::atomic::{
    AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, fence,
};
use ringtap_io::sync::broken;

use super::entry::{Entry, Geometry};

const NONE: u64 = u64::MAX;

/// One entry for each of the slices that share a place.
pub(super) struct Recent {
    places: Box<[Place]>,
}

struct Place {
    /// Odd while the rest is being changed.
    changes: AtomicU64,
    cluster: AtomicU64,
    word: AtomicU64,
    bitmap: AtomicU64,
}

impl Recent {
    /// Room for about so many entries, or for none.
    pub(super) fn new(count: u64) -> Recent {
        let place = |_| Place {
            changes: AtomicU64::new(0),
            cluster: AtomicU64::new(NONE),
            word: AtomicU64::new(0),
            bitmap: AtomicU64::new(0),
        };
        Recent { places: (0..count).map(place).collect() }
    }

    fn place(&self, slice: u64) -> Option<&Place> {
        let index = slice.checked_rem(self.places.len() as u64)?;
        self.places.get(index as usize)
    }

    /// The entry of a cluster. Locks nothing.
    pub(super) fn entry(&self, geometry: &Geometry, cluster: u64) -> Option<Entry> {
        let place = self.place(geometry.slice_of(cluster))?;
        let before = place.changes.load(Acquire);
        let same = place.cluster.load(Relaxed) == cluster;
        let entry = Entry { word: place.word.load(Relaxed), bitmap: place.bitmap.load(Relaxed) };
        fence(Acquire);
        let whole = before & 1 == 0 && place.changes.load(Relaxed) == before;
        (same && (whole || broken("recent entry torn"))).then_some(entry)
    }

    /// Whether an entry of the slice is here. Under the lock under which entries change, as are those
    /// below.
    pub(super) fn has(&self, geometry: &Geometry, slice: u64) -> bool {
        self.place(slice).is_some_and(|place| {
            let cluster = place.cluster.load(Relaxed);
            cluster != NONE && geometry.slice_of(cluster) == slice
        })
    }

    /// Keep an entry; its slice is not in memory.
    pub(super) fn keep(&self, geometry: &Geometry, cluster: u64, entry: Entry) {
        if let Some(place) = self.place(geometry.slice_of(cluster)) {
            place.set(cluster, entry);
        }
    }

    /// The slice comes to memory, where its entries may change.
    pub(super) fn forget(&self, geometry: &Geometry, slice: u64) {
        let stays = broken("recent entry kept") || !self.has(geometry, slice);
        if let Some(place) = self.place(slice).filter(|_| !stays) {
            place.set(NONE, Entry::default());
        }
    }
}

impl Place {
    fn set(&self, cluster: u64, entry: Entry) {
        let before = self.changes.load(Relaxed);
        self.changes.store(before.wrapping_add(1), Relaxed);
        fence(Release);
        self.cluster.store(cluster, Relaxed);
        self.word.store(entry.word, Relaxed);
        self.bitmap.store(entry.bitmap, Relaxed);
        self.changes.store(before.wrapping_add(2), Release);
    }
}
