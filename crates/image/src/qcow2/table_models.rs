//! Models of the tables in memory: whoever looks an entry up without a lock finds the entry of that
//! cluster, whole, and none that was replaced before he began.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use ringtap_io::sync::{Mutex, step};
use ringtap_sim::threads::{choose, must_notice, spawn, try_orders};

use super::entry::{Entry, Geometry};
use super::header::{COPIED, Compression, Crypt, Header, incompatible};
use super::table::{Cache, Lookup, Tables};

const SLICES: u64 = 4;
/// So small that a slice comes to memory in few steps.
const CLUSTER_BITS: u32 = 6;

struct World {
    geometry: Geometry,
    tables: Tables,
    cache: Mutex<Cache>,
    flushing: Mutex<()>,
    /// What is stable, by clusters. Plain memory: looking is no step.
    file: Vec<AtomicU64>,
    /// The version of each entry that somebody may have begun to set, and the one that surely is set.
    begun: Vec<AtomicU64>,
    set: Vec<AtomicU64>,
}

fn header(extended: bool, tables: u64) -> Header {
    let entries = (1 << CLUSTER_BITS) / if extended { 16 } else { 8 };
    Header {
        version: 3,
        cluster_bits: CLUSTER_BITS,
        size: (tables * entries) << CLUSTER_BITS,
        crypt: Crypt::None,
        l1_size: tables as u32,
        l1_offset: 512,
        refcount_table_offset: 0,
        refcount_table_clusters: 1,
        snapshots: 0,
        snapshots_offset: 0,
        incompatible: if extended { incompatible::EXTENDED_L2 } else { 0 },
        compatible: 0,
        autoclear: 0,
        refcount_order: 4,
        compression: Compression::Deflate,
        further: Vec::new(),
        extensions: Vec::new(),
        backing_file: None,
    }
}

impl World {
    fn new(extended: bool) -> World {
        let geometry = Geometry::new(&header(extended, SLICES), true);
        assert_eq!(geometry.slices(), SLICES);
        let counts = || (0..geometry.clusters()).map(|_| AtomicU64::new(0)).collect();
        World {
            tables: Tables::new(geometry.clone(), vec![512; SLICES as usize], 0),
            cache: Mutex::new(Cache::default()),
            flushing: Mutex::new(()),
            file: counts(),
            begun: counts(),
            set: counts(),
            geometry,
        }
    }

    /// The entry of a version. Slices of one version have a pattern.
    fn entry(&self, cluster: u64, version: u64) -> Entry {
        let slice = self.geometry.slice_of(cluster);
        let step = self.geometry.index_of(cluster) << CLUSTER_BITS;
        let bitmap = if version % 2 == 1 { u64::from(u32::MAX) } else { 0 };
        Entry {
            word: ((version * SLICES + slice + 1) << 20) + step | COPIED,
            bitmap: if self.geometry.extended() { bitmap } else { 0 },
        }
    }

    fn word(&self, slice: u64, at: usize) -> u64 {
        let width = if self.geometry.extended() { 2 } else { 1 };
        let cluster = self.geometry.clusters_of_slice(slice).start + (at / width) as u64;
        let entry = self.entry(cluster, self.file[cluster as usize].load(SeqCst));
        if at % width == 0 { entry.word } else { entry.bitmap }
    }

    /// Look a cluster up as a request does. False where it is not in memory.
    fn look(&self, cluster: u64) -> bool {
        let least = self.set[cluster as usize].load(SeqCst);
        let found = self.tables.entry(cluster);
        let most = self.begun[cluster as usize].load(SeqCst);
        let Lookup::Entry(found) = found else { return false };
        let fits = |version| found == self.entry(cluster, version);
        assert!((least..=most).any(fits), "{found:x?} for {cluster} of {least}..={most}");
        true
    }

    /// As `Shared::bring`.
    fn bring(&self, cluster: u64, whole: bool) {
        let slice = self.geometry.slice_of(cluster);
        let whole = {
            let mut cache = self.cache.lock().expect("no panic");
            if self.tables.is_loaded(slice) || !cache.loading.insert(slice) {
                return;
            }
            whole || cache.wants(&self.tables, slice, true)
        };
        step();
        let words = self.geometry.words_of_slice();
        let read: Vec<u64> = (0..words).map(|at| self.word(slice, at)).collect();
        let entry = self.entry(cluster, self.file[cluster as usize].load(SeqCst));
        step();
        let installed = {
            let mut cache = self.cache.lock().expect("no panic");
            cache.loading.remove(&slice);
            if whole {
                let installed = cache.install(&self.tables, slice, |at| read[at]);
                cache.is_first(slice);
                installed
            } else {
                cache.keep_entry(&self.tables, cluster, entry);
                true
            }
        };
        if !installed {
            self.flush();
        }
    }

    /// As a commit; false where the slice has no frame yet.
    fn change(&self, cluster: u64) -> bool {
        let slice = self.geometry.slice_of(cluster);
        let mut cache = self.cache.lock().expect("no panic");
        if !cache.pin_frame(&self.tables, slice) {
            return false;
        }
        let version = self.begun[cluster as usize].fetch_add(1, SeqCst) + 1;
        cache.set(&self.tables, cluster, self.entry(cluster, version));
        self.set[cluster as usize].store(version, SeqCst);
        cache.unpin(&self.tables, slice);
        true
    }

    /// Write what is dirty.
    fn flush(&self) {
        let _one_by_one = self.flushing.lock().expect("no panic");
        let taken = self.cache.lock().expect("no panic").take_dirty(&self.tables);
        step();
        let width = if self.geometry.extended() { 2 } else { 1 };
        for slices in &taken {
            let first = self.geometry.clusters_of_slice(slices.range().start).start;
            for (cluster, bytes) in (first..).zip(slices.bytes.chunks(8 * width)) {
                let number = (crate::bytes::be64(bytes, 0).expect("an entry") & !COPIED) >> 20;
                let version = (number - 1 - self.geometry.slice_of(cluster)) / SLICES;
                self.file[cluster as usize].store(version, SeqCst);
            }
        }
        let mut cache = self.cache.lock().expect("no panic");
        for slice in taken.iter().flat_map(|slices| slices.range()) {
            cache.unpin(&self.tables, slice);
        }
    }
}

/// More slices than frames; each thread looks entries up, changes some and writes them, at random.
fn look_up_beside_changes(extended: bool) {
    let world = Arc::new(World::new(extended));
    let clusters = world.geometry.clusters();
    let mut threads = Vec::new();
    for _ in 0..3 {
        let world = world.clone();
        threads.push(spawn(move || {
            for _ in 0..10 {
                // One of each slice, mostly.
                let slice = world.geometry.clusters_of_slice(choose() % SLICES).start;
                let cluster = slice + u64::from(choose() % 4 == 0);
                match choose() % 4 {
                    0 => world.flush(),
                    1 => {
                        if !world.change(cluster) {
                            world.bring(cluster, true);
                            world.change(cluster);
                        }
                    }
                    _ => {
                        if !world.look(cluster) {
                            world.bring(cluster, false);
                            world.look(cluster);
                        }
                    }
                }
            }
        }));
    }
    for thread in threads {
        thread.join().expect("ended well");
    }
    world.flush();
    for cluster in 0..clusters {
        if !world.look(cluster) {
            world.bring(cluster, true);
            assert!(world.look(cluster));
        }
    }
}

fn plain() {
    look_up_beside_changes(false);
}

fn extended() {
    look_up_beside_changes(true);
}

#[test]
fn entries_are_found_without_a_lock() {
    try_orders("tables", 16_000, plain);
    must_notice("slot kept", 4000, plain);
    must_notice("slot not seen again", 40_000, plain);
    must_notice("recent entry kept", 40_000, plain);
    must_notice("recent entry torn", 100_000, plain);
}

#[test]
fn entries_of_two_words_are_found_whole() {
    try_orders("tables with subclusters", 16_000, extended);
    must_notice("entry torn", 40_000, extended);
    must_notice("slot not seen again", 40_000, extended);
}
