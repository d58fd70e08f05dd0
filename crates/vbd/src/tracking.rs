//! A disk whose changes are noted.

use std::sync::Arc;

use crate::Disk;
use crate::map::Map;
use crate::track::Tracker;

impl Disk {
    /// Note from now on which regions of so many bytes may have been changed by requests that end later; a power of
    /// two, 512 at least ([`Tracker::GRANULARITY`] where in doubt). What those changed that have ended before is
    /// there for who reads the disk from now on.
    pub fn track(&self, granularity: u64) -> Tracker {
        let map = Arc::new(Map::new(granularity));
        self.shared.medium.trackers.add(map.clone());
        let disk = self.clone();
        Tracker::installed(map, move |map| disk.shared.medium.trackers.remove(map))
    }

    /// Whether the tracker notes what changes of this disk.
    pub(crate) fn is_noted_in(&self, tracker: &Tracker) -> bool {
        self.shared.medium.trackers.has(tracker.map())
    }
}
