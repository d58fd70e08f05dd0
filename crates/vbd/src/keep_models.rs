//! A model of the log of a disk's bitmaps: a region is in it, stable, before anything is written there, whoever logs, and
//! while a new whole takes the place of the one before.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use ringtap_image::bitmap_store::{
    Binding, BitMemory, BitmapStore, How, KeptBitmap, KeptIn, Restored, RestoredBits, ToKeep,
};
use ringtap_image::{Container, Epochs, Traits};
use ringtap_io::{File, Io, Words};
use ringtap_sim::Disk;
use ringtap_sim::threads::{alone, choose, must_notice, spawn, try_orders};

use crate::door::Door;
use crate::keep::Keep;

/// Bytes of a region, and of the disk.
const REGION: u64 = 512;
const SIZE: u64 = 3 * REGION;
/// Room for a whole.
const BYTES: u64 = 4096;

/// Memory that ends with the machine.
#[derive(Default)]
struct Memory(Mutex<HashMap<u64, Arc<[AtomicU64]>>>);

impl BitMemory for Memory {
    fn words(&self, number: u64, count: Option<usize>) -> io::Result<Words> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(words) = all.get(&number) {
            return Ok(Arc::new(words.clone()));
        }
        let count = count.ok_or(io::ErrorKind::NotFound)?;
        let words: Arc<[AtomicU64]> = (0..count).map(|_| AtomicU64::new(0)).collect();
        all.insert(number, words.clone());
        Ok(Arc::new(words))
    }

    fn forget(&self, _: u64) {}

    fn forget_but(&self, _: &[u64]) {}
}

/// The image and its sidecar.
type Files = [File; 2];

async fn open(
    io: &Io,
    disk: &Disk,
    [image, sidecar]: Files,
    boot: u128,
) -> (BitmapStore, Vec<Restored>) {
    let time = disk.clone();
    let container = Container::simulated(image, disk.size(image), Traits::FILE);
    let container = container.with_time(move || time.modified(image));
    let booted = disk.modified(image) + 1;
    let binding = Binding::simulated(&container, "the image".into(), boot, booted);
    let sidecar = Container::simulated(sidecar, disk.size(sidecar), Traits::FILE);
    let kept = KeptIn { sidecar, memory: Arc::new(Memory::default()), binding, region: REGION };
    BitmapStore::open(io, kept).await.expect("a sidecar")
}

/// A bitmap in which nothing is marked.
fn nothing() -> Vec<ToKeep> {
    let (name, granularity, id) = ("b".into(), REGION, 1);
    let bitmap = KeptBitmap { name, granularity, id, recording: true, lost: false };
    vec![ToKeep { bitmap, pages: vec![] }]
}

/// What somebody would find if the power went now, and what has to be in the log.
struct Cut {
    disk: Disk,
    written: Range<u64>,
}

struct World {
    disk: Disk,
    files: Files,
    keep: Arc<Keep>,
    door: Door,
    requests: Arc<Epochs>,
    cuts: Mutex<Vec<Cut>>,
}

impl World {
    fn new() -> World {
        let disk = Disk::new(512);
        let files = [disk.add_file(SIZE, 1), disk.add_file(0, 1)];
        let made = disk.clone();
        let keep = alone(&disk, async move |io| {
            let (store, _) = open(&io, &made, files, 1).await;
            let keep = Arc::new(Keep::new(store));
            let staged = keep.stage(&io, BYTES, SIZE).await.expect("staged");
            keep.switch(&staged, || ()).await;
            keep.commit(&io, staged, nothing(), How::Open).await.expect("stable");
            keep
        });
        let (door, requests, cuts) = Default::default();
        World { disk, files, keep, door, requests, cuts }
    }

    /// A request that writes to a region.
    async fn write(&self, io: &Io, region: u64) {
        let range = region * REGION..(region + 1) * REGION;
        let thread = self.requests.add_thread();
        let ticket = loop {
            let ticket = thread.enter();
            if self.door.lets_in(self.door.image()) {
                break ticket;
            }
            drop(ticket);
            self.door.open().await;
        };
        if !self.keep.has(&range) {
            self.keep.clone().log(io, range.clone()).await;
        }
        let cut = Cut { disk: self.disk.after_power_cut(choose()), written: range };
        self.cuts.lock().unwrap_or_else(PoisonError::into_inner).push(cut);
        drop(ticket);
    }

    /// A new whole takes the place of the one before.
    async fn next_whole(&self, io: &Io) {
        let staged = self.keep.stage(io, BYTES, SIZE).await.expect("staged");
        self.door.shut().await;
        self.door.drain(&self.requests).await;
        self.keep.switch(&staged, || ()).await;
        self.door.unlock();
        self.keep.commit(io, staged, nothing(), How::Open).await.expect("stable");
    }

    /// Look at all that would have been found.
    fn look(&self) {
        for Cut { disk, written } in std::mem::take(&mut *self.cuts.lock().expect("no panic")) {
            let (cut, files) = (disk.clone(), self.files);
            let found = alone(&disk, async move |io| open(&io, &cut, files, 2).await.1);
            let [Restored { bits: RestoredBits::Stored(_, logged), .. }] = found.as_slice() else {
                panic!("{found:?} is left")
            };
            let has = |range: &Range<u64>| range.start <= written.start && written.end <= range.end;
            assert!(logged.iter().any(has), "{written:?} is not logged: {logged:?}");
        }
    }
}

fn what_is_written_to_is_logged() {
    let world = Arc::new(World::new());
    let mut threads = Vec::new();
    for writer in 0..2 {
        let world = world.clone();
        threads.push(spawn(move || {
            let disk = world.disk.clone();
            alone(&disk, async move |io| {
                // One region that both write to, twice; then one of their own.
                for region in [0, 0, 1 + writer] {
                    world.write(&io, region).await;
                }
            });
        }));
    }
    let operator = world.clone();
    threads.push(spawn(move || {
        let disk = operator.disk.clone();
        alone(&disk, async move |io| operator.next_whole(&io).await);
    }));
    for thread in threads {
        thread.join().expect("ended well");
    }
    world.look();
}

#[test]
fn a_region_is_logged_before_it_is_written_to() {
    try_orders("log of bitmaps", 2000, what_is_written_to_is_logged);
    must_notice("logged before it is stable", 2000, what_is_written_to_is_logged);
    must_notice("log left in silence", 1000, what_is_written_to_is_logged);
    must_notice("regions kept for the next whole", 4000, what_is_written_to_is_logged);
    must_notice("next whole without a log", 4000, what_is_written_to_is_logged);
    must_notice("listened late", 4000, what_is_written_to_is_logged);
}
