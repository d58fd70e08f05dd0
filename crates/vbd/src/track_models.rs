//! A model of a tracker: who copies what has changed, over and over, ends with all of it.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use ringtap_io::sync::atomic::{AtomicU64, Ordering::SeqCst};
use ringtap_sim::Disk;
use ringtap_sim::threads::{alone, must_notice, spawn, try_orders};

use crate::map::Map;
use crate::track::{Changing, Trackers};

/// Bytes of a region, and how many there are.
const REGION: u64 = 512;
const REGIONS: usize = 2;

#[derive(Default)]
struct World {
    trackers: Trackers,
    /// What each region of the disk holds.
    disk: [AtomicU64; REGIONS],
    copy: [AtomicU64; REGIONS],
}

impl World {
    fn write(&self, region: usize, value: u64) {
        let _changing = Changing::new(&self.trackers, region as u64 * REGION, REGION);
        self.disk[region].store(value, SeqCst);
    }

    fn copy(&self, regions: Range<u64>) {
        for region in regions.start / REGION..regions.end / REGION {
            let value = self.disk[region as usize].load(SeqCst);
            self.copy[region as usize].store(value, SeqCst);
        }
    }

    /// One pass over what has changed.
    async fn pass(&self, map: &Map) {
        let cursor = Cell::new(0);
        while map.copy_next(&cursor, REGION, async |regions| self.copy(regions)).await.is_some() {}
    }
}

fn a_copy_ends_as_the_disk_does() {
    let world = Arc::new(World::default());
    let mut threads = Vec::new();
    for writer in 1..=2u64 {
        let world = world.clone();
        threads.push(spawn(move || {
            for round in 0..3 {
                // Guests order what they write over: one region each, but both share a word.
                world.write(writer as usize - 1, 10 * writer + round);
            }
        }));
    }
    let map = Arc::new(Map::new(REGION));
    world.trackers.add(map.clone());
    world.copy(0..REGION * REGIONS as u64);
    let passes = |count: usize| {
        let (world, map) = (world.clone(), map.clone());
        alone(&Disk::new(512), async move |_| {
            for _ in 0..count {
                world.pass(&map).await;
            }
        });
    };
    passes(3);
    // The disk stands still.
    for thread in threads {
        thread.join().expect("ended well");
    }
    passes(1);
    for region in 0..REGIONS {
        let values = [&world.disk, &world.copy].map(|cells| cells[region].load(SeqCst));
        assert_eq!(values[0], values[1], "region {region}");
    }
}

#[test]
fn nothing_that_changes_meanwhile_is_lost() {
    try_orders("changes tracked", 20_000, a_copy_ends_as_the_disk_does);
    must_notice("cleared after it is read", 3000, a_copy_ends_as_the_disk_does);
    must_notice("marked before it is written", 3000, a_copy_ends_as_the_disk_does);
    must_notice("tracker looked for first", 3000, a_copy_ends_as_the_disk_does);
}
