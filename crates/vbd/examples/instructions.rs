//! Walks of 4 KiB through the engine and nothing else, for tools that count what they cost:
//!
//!     target/release/examples/instructions WALK COUNT [FOLDER]
//!
//! Without FOLDER every operation completes at once, in memory, so that what is counted is this program's own;
//! with it the images are files there and the reactor is the ring. It says how many allocations and operations
//! for the reactor the walks took. What one takes is the difference of two counts, by the difference of their
//! walks: `scripts/guard-a.sh`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use ringtap_image::bitmap_store::{Binding, BitMemory, KeptIn, LOGGED};
use ringtap_image::qcow2::{CreateOptions, Parts, Qcow2, create};
use ringtap_image::{
    CacheMode, Container, Identity, Image, Null, OpenOptions, Raw, RestartLog, Traits,
};
use ringtap_io::{File, Io, Key, Op, Reactor, Ring, Tasks, Time, Words};
use ringtap_vbd::{BitmapChange, Kind, Request, Vbd};

const LEN: u64 = 4096;
const CLUSTER: u64 = 65536;
/// Of disks that are read and written over.
const SIZE: u64 = 64 << 20;
/// Of disks each of whose clusters is written once.
const LARGE: u64 = 8 << 30;
/// Of a file in memory.
const FILE: usize = 1 << 30;

/// Whether bytes that are transferred are copied: those of a guest that nobody looks at need not be.
static COPIES: AtomicBool = AtomicBool::new(true);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static OPERATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: it only counts what it passes on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller's promise is the one asked here.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, base: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(base, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Files in memory, on which nothing takes time.
struct Memory(Vec<Vec<u8>>);

impl Memory {
    fn carry_out(&mut self, op: &Op) -> i32 {
        let at = |file: File, offset: u64| (file.slot() as usize, offset as usize % FILE);
        match *op {
            Op::Read { mem, .. } | Op::Write { mem, .. } if !COPIES.load(Relaxed) => {
                mem.len() as i32
            }
            Op::Read { file, offset, mem } => {
                let (file, at) = at(file, offset);
                mem.copy_from(&self.0[file][at..at + mem.len()]) as i32
            }
            Op::Write { file, offset, mem, .. } => {
                let (file, at) = at(file, offset);
                mem.copy_to(&mut self.0[file][at..at + mem.len()]) as i32
            }
            _ => 0,
        }
    }
}

impl Reactor for Memory {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        _: bool,
    ) -> io::Result<()> {
        OPERATIONS.fetch_add(submit.len() as u64, Relaxed);
        done.extend(submit.drain(..).map(|(key, op)| (key, self.carry_out(&op))));
        Ok(())
    }

    fn now(&self) -> Time {
        0
    }
}

/// The ring, and how many operations it is handed.
struct Counted(Ring);

impl Reactor for Counted {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        wait: bool,
    ) -> io::Result<()> {
        OPERATIONS.fetch_add(submit.len() as u64, Relaxed);
        self.0.turn(submit, done, wait)
    }

    fn cancel(&mut self, key: Key, done: &mut Vec<(Key, i32)>) -> io::Result<()> {
        self.0.cancel(key, done)
    }

    fn now(&self) -> Time {
        self.0.now()
    }
}

/// Where images are made.
#[derive(Clone)]
struct Place(Option<PathBuf>);

impl Place {
    fn reactor(&self) -> Box<dyn Reactor> {
        match &self.0 {
            Some(_) => Box::new(Counted(Ring::new().expect("io_uring"))),
            None => Box::new(Memory(vec![vec![0; FILE], vec![0; FILE]])),
        }
    }

    fn container(&self, slot: u32, len: u64) -> Container {
        let Some(folder) = &self.0 else {
            return Container::simulated(File::from_parts(slot, 0), len, Traits::FILE);
        };
        let path = folder.join(slot.to_string());
        std::fs::File::create(&path).and_then(|file| file.set_len(len)).expect("a file");
        let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
        Container::open(Path::new(&path), &options).expect("opened")
    }

    fn raw(&self, len: u64) -> Raw {
        Raw::new(self.container(0, len))
    }

    async fn qcow2(&self, io: &Io, size: u64, base: Option<Box<dyn Image>>) -> Qcow2 {
        let container = self.container(1, 0);
        let backing_file = base.is_some().then(|| "0".to_owned());
        let options =
            CreateOptions { size, backing_file, extended_l2: base.is_some(), ..Default::default() };
        let header = create(io, &container, None, &options).await.expect("made");
        // Valgrind knows nothing of the clock that the ring reads for a log.
        let logged = self.0.is_none();
        let words = |count| -> Arc<[AtomicU64]> { (0..count).map(|_| AtomicU64::new(0)).collect() };
        let log = Arc::new(words(RestartLog::words_for(4000)));
        let log = RestartLog::with(log, Identity { boot: 1, file: (2, 3) }, u64::MAX);
        let restart = logged.then(|| log.with_memory(words(1000)).of(&container));
        let parts = Parts { base, restart, ..Parts::default() };
        Qcow2::open(io, container, header, parts).await.expect("opened")
    }
}

/// Memory of bitmaps, for as long as this runs.
#[derive(Default)]
struct Bits(Mutex<HashMap<u64, Arc<[AtomicU64]>>>);

impl BitMemory for Bits {
    fn words(&self, number: u64, count: Option<usize>) -> io::Result<Words> {
        let mut all = self.0.lock().expect("no panic before");
        let count = count.ok_or(io::ErrorKind::NotFound)?;
        let new = || (0..count).map(|_| AtomicU64::new(0)).collect();
        Ok(Arc::new(all.entry(number).or_insert_with(new).clone()))
    }

    fn forget(&self, _: u64) {}

    fn forget_but(&self, _: &[u64]) {}
}

/// Have the disk keep a bitmap.
async fn checkpoint(io: &Io, vbd: &Vbd, container: &Container, place: &Place) {
    let binding = Binding::simulated(container, "the image".into(), 1, 0);
    let (sidecar, memory) = (place.container(1, 0), Arc::new(Bits::default()));
    let kept = KeptIn { sidecar, memory, binding, region: LOGGED };
    vbd.keep_bitmaps(io, kept).await.expect("kept");
    let (persistent, recording) = (true, true);
    let add = BitmapChange::Add { name: "b".into(), granularity: CLUSTER, persistent, recording };
    let staged = vbd.stage_bitmaps(io, vec![add]).await.expect("staged");
    let still = vbd.quiesce(io, 1).await.expect("nothing is in flight");
    staged.switch(&still).await;
    drop(still);
    staged.commit(io).await.expect("stable");
}

/// What is asked for, of which disk, and by which step through it.
async fn disk(io: &Io, walk: &str, place: &Place) -> (Vbd, Kind, u64) {
    let kind = if walk.ends_with("-read") { Kind::Read } else { Kind::Write };
    // All over the disk, aligned; or a cluster after the other.
    let (step, image): (u64, Box<dyn Image>) = match walk {
        "null-write" => (37 * LEN, Box::new(Null::new(SIZE, false))),
        "raw-read" | "raw-write" | "bitmap-write" => (37 * LEN, Box::new(place.raw(SIZE))),
        "qcow2-read" | "qcow2-write" => (37 * LEN, Box::new(place.qcow2(io, SIZE, None).await)),
        "qcow2-allocate" => (CLUSTER, Box::new(place.qcow2(io, LARGE, None).await)),
        "overlay-first" | "qcow2-flush" => {
            let base = Box::new(place.raw(LARGE));
            (CLUSTER, Box::new(place.qcow2(io, LARGE, Some(base)).await))
        }
        other => panic!(
            "{other} is none of null-write, raw-read, raw-write, bitmap-write, qcow2-read, qcow2-write, \
             qcow2-allocate, overlay-first, qcow2-flush"
        ),
    };
    let container = image.container().cloned();
    let vbd = Vbd::new(image, CacheMode::Writeback);
    if let Some(container) = container.filter(|_| walk == "bitmap-write") {
        checkpoint(io, &vbd, &container, place).await;
    }
    if step != CLUSTER {
        let buffer = io.buffer(1 << 20).expect("memory");
        for offset in (0..SIZE).step_by(1 << 20) {
            let (len, mem) = (1 << 20, buffer.mem());
            let request = Request { kind: Kind::Write, offset, len, mem, fua: false };
            vbd.serve(io, request).await.expect("written");
        }
        vbd.flush(io).await.expect("flushed");
    }
    (vbd, kind, step)
}

fn main() {
    let mut args = std::env::args().skip(1);
    let (walk, count) = (args.next().expect("a walk"), args.next().expect("how many"));
    let count: u64 = count.parse().expect("a number");
    let place = Place(args.next().map(PathBuf::from));
    let mut tasks = Tasks::new(place.reactor());
    let io = tasks.io().clone();
    let kept = Rc::new(RefCell::new(None));
    let keep = kept.clone();
    let served = tasks.block_on(async move {
        let (vbd, kind, step) = disk(&io, &walk, &place).await;
        let size = vbd.size();
        let buffer = io.buffer(LEN as usize).expect("memory");
        COPIES.store(step == CLUSTER, Relaxed);
        let before = [&ALLOCATIONS, &OPERATIONS].map(|count| count.load(Relaxed));
        let mut offset = 0;
        for _ in 0..count {
            let request = Request { kind, offset, len: LEN, mem: buffer.mem(), fua: false };
            vbd.serve(&io, request).await.expect("served");
            if walk == "qcow2-flush" {
                vbd.flush(&io).await.expect("flushed");
            }
            offset = (offset + step) % size;
        }
        let after = [&ALLOCATIONS, &OPERATIONS].map(|count| count.load(Relaxed));
        println!("allocations {} operations {}", after[0] - before[0], after[1] - before[1]);
        // What ends with the disk is no part of a walk.
        *keep.borrow_mut() = Some(vbd);
    });
    served.expect("nothing fails");
    drop(kept);
}
