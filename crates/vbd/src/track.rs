//! Which regions of a disk have changed, for jobs that copy it while it is served.
//!
//! A request sets the bits of its regions when it has been carried out, whether it failed or not, and before it
//! is answered; until then it holds a ticket of the image's epoch, so that on a disk that stands still every
//! change is marked. Who copies a region clears its bit first and reads second ([`Tracker::take`]). A write in
//! flight meanwhile then either set its bit before that was cleared, and what was read is what it wrote, or it
//! sets it later, and the region is copied once more. The other way about a write that ends between the read and
//! the clearing would be lost; so would one whose bit was set before its bytes were there.
//!
//! A request looks whether there are trackers at all when it has been carried out, too: who installs one and reads
//! then sees what those wrote that saw none.

use std::cell::Cell;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use ringtap_io::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use ringtap_io::sync::{Mutex, broken};

use crate::map::Map;

/// The trackers of a disk.
#[derive(Default)]
pub(crate) struct Trackers {
    count: AtomicUsize,
    all: Mutex<Vec<Arc<Map>>>,
}

impl Trackers {
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.count.load(SeqCst) > 0
    }

    pub(crate) fn add(&self, map: Arc<Map>) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(map);
        self.count.store(all.len(), SeqCst);
    }

    pub(crate) fn has(&self, map: &Arc<Map>) -> bool {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().any(|other| Arc::ptr_eq(other, map))
    }

    pub(crate) fn remove(&self, map: &Arc<Map>) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| !Arc::ptr_eq(other, map));
        self.count.store(all.len(), SeqCst);
    }

    #[cold]
    pub(crate) fn note(&self, range: Range<u64>) {
        self.note_but(None, range);
    }

    /// A request may have changed the range; in one map that is not marked, only counted.
    pub(crate) fn note_but(&self, but: Option<&Arc<Map>>, range: Range<u64>) {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        for map in &*all {
            match but.is_some_and(|but| Arc::ptr_eq(but, map)) {
                true => _ = map.changed.fetch_add(range.end - range.start, Relaxed),
                false => map.note(range.clone()),
            }
        }
    }
}

/// What a request that is being carried out may change: where it ends, however it does, that is marked.
pub(crate) struct Changing<'a> {
    trackers: &'a Trackers,
    offset: u64,
    len: u64,
    /// For models.
    seen: Option<bool>,
}

impl<'a> Changing<'a> {
    #[inline]
    pub(crate) fn new(trackers: &'a Trackers, offset: u64, len: u64) -> Changing<'a> {
        let early = broken("marked before it is written");
        let seen = (early || broken("tracker looked for first")).then(|| trackers.any());
        let changing = Changing { trackers, offset, len, seen };
        if early && seen == Some(true) {
            changing.note();
        }
        changing
    }

    #[cold]
    fn note(&self) {
        self.trackers.note(self.offset..self.offset + self.len);
    }
}

impl Drop for Changing<'_> {
    #[inline]
    fn drop(&mut self) {
        let any = self.seen.unwrap_or_else(|| self.trackers.any());
        if any && !broken("marked before it is written") {
            self.note();
        }
    }
}

/// Notes which regions of a disk change, from [`crate::Disk::track`] until it is dropped. It belongs to the disk, not to
/// the image that the disk is at present.
pub struct Tracker {
    /// Has the disk forget it; none where it is one of its bitmaps.
    remove: Option<Remove>,
    map: Arc<Map>,
}

/// What follows the end of a tracker.
type Remove = Box<dyn Fn(&Arc<Map>) + Send + Sync>;

impl Drop for Tracker {
    fn drop(&mut self) {
        self.remove.iter().for_each(|remove| remove(&self.map));
    }
}

impl Tracker {
    /// The usual region.
    pub const GRANULARITY: u64 = 64 << 10;

    pub(crate) fn of(map: Arc<Map>) -> Tracker {
        Tracker { remove: None, map }
    }

    /// One that a disk has, until it is dropped: then `remove` is called.
    pub(crate) fn installed(
        map: Arc<Map>,
        remove: impl Fn(&Arc<Map>) + Send + Sync + 'static,
    ) -> Tracker {
        Tracker { remove: Some(Box::new(remove)), map }
    }

    pub(crate) fn map(&self) -> &Arc<Map> {
        &self.map
    }

    /// Bytes of a region.
    pub fn granularity(&self) -> u64 {
        self.map.granularity()
    }

    /// Whether a region of the range is marked.
    pub fn is_marked(&self, range: Range<u64>) -> bool {
        let regions = self.map.regions(&range);
        self.map.find(regions.start, regions.end, true).is_some()
    }

    /// The first regions marked at or after an offset, side by side, of `most` bytes (but one at least); as a range
    /// of bytes that may reach past the disk's end. They stay marked.
    pub fn next(&self, from: u64, most: u64) -> Option<Range<u64>> {
        self.map.next(from, most)
    }

    /// As [`Tracker::next`], but they are not marked any more. Read them after that, not before: then what a
    /// request changes meanwhile is either read, or marked again.
    pub fn take(&self, from: u64, most: u64) -> Option<Range<u64>> {
        self.map.take(from, most)
    }

    /// Copy the regions that [`Tracker::take`] gives from a cursor on, which moves on beforehand; none where there
    /// are none.
    pub async fn copy_next<T>(
        &self,
        cursor: &Cell<u64>,
        most: u64,
        copy: impl AsyncFnOnce(Range<u64>) -> T,
    ) -> Option<T> {
        self.map.copy_next(cursor, most, copy).await
    }

    /// For tests: let it miss one of so many requests, about (0: none), and clear marks late.
    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    pub fn sabotage(&self, miss_one_of: u64, clears_late: bool) {
        self.map.misses.store(miss_one_of, Relaxed);
        self.map.clears_late.store(clears_late, Relaxed);
    }

    /// Mark regions, as if a request had changed them.
    pub fn mark(&self, range: Range<u64>) {
        self.map.mark(range);
    }

    /// Mark what is marked in another, of a disk of so many bytes.
    pub fn merge(&self, other: &Tracker, size: u64) {
        self.map.merge(&other.map, size);
    }

    /// Forget all marks. What is not to be lost has to stand still.
    pub fn clear(&self) {
        self.map.clear();
    }

    /// Bytes of all regions marked.
    pub fn marked(&self) -> u64 {
        self.map.marked()
    }

    /// Bytes that requests may have changed since it was installed, each time counted.
    pub fn changed(&self) -> u64 {
        self.map.changed.load(Relaxed)
    }
}
