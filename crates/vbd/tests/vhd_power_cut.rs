//! Power cuts and failing disks under a VBD on VHDs of every kind, on the simulated disk: at every turn
//! the image that a cut would leave opens, checks clean and holds what it may hold.
//! `RINGTAP_SEEDS` sets how many seeds each kind is tried with; a failure names its seed.

mod common;

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use ringtap_image::vhd::{self, CreateOptions, Kind as VhdKind, Parent, Sabotage};
use ringtap_image::{CacheMode, Container, Identity, Image, RestartLog, Traits};
use ringtap_io::{File, Io, Tasks};
use ringtap_sim::{Ask, Chances, Disk, Fault, Guest, Promise, SECTOR, Sim, random_asks, turn_all};
use ringtap_vbd::{Kind, Request, Vbd};

use common::Served;

const SECTORS: u64 = 96;
const SIZE: u64 = SECTORS * SECTOR as u64;
/// Requests that a guest has under way at once.
const SLOTS: usize = 5;

fn seeds(default: u64) -> Range<u64> {
    let count = std::env::var("RINGTAP_SEEDS").ok().and_then(|text| text.parse().ok());
    0..count.unwrap_or(default)
}

/// Where an image lies, and of what kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    Fixed,
    Dynamic,
    /// On a device that held something else.
    DynamicOnDevice,
    /// Over a dynamic one.
    Differencing,
    /// Over a differencing one over a fixed one.
    Deep,
}

const CASES: [Case; 5] =
    [Case::Fixed, Case::Dynamic, Case::DynamicOnDevice, Case::Differencing, Case::Deep];

/// A disk with a chain of images on it, the last of which is served.
#[derive(Clone)]
struct Bench {
    seed: u64,
    disk: Disk,
    chain: Vec<File>,
    align: usize,
    device: bool,
    /// The restart log's memory.
    words: Arc<[AtomicU64]>,
}

/// Memory for a log that has to be flushed often.
fn blank() -> Arc<[AtomicU64]> {
    (0..RestartLog::words_for(60)).map(|_| AtomicU64::new(0)).collect()
}

/// Run one task to its end on a disk that moves all bytes at once.
fn run<T: 'static, F: Future<Output = T> + 'static>(disk: &Disk, task: impl FnOnce(Io) -> F) -> T {
    let mut tasks = Tasks::new(Box::new(Sim::new(disk, 1).chances(Chances::NEVER)));
    let io = tasks.io().clone();
    tasks.block_on(task(io)).expect("the simulation runs")
}

impl Bench {
    /// An image as it was made, and a guest that knows what is on it.
    fn new(seed: u64, case: Case) -> (Bench, Guest) {
        let mut rng = fastrand::Rng::with_seed(!seed);
        let disk = Disk::new(if rng.u8(0..4) == 0 { 4096 } else { SECTOR });
        let align = rng.choice([1, 512, 4096]).unwrap_or(1);
        let device = case == Case::DynamicOnDevice;
        let mut bench = Bench { seed, disk, chain: vec![], align, device, words: blank() };
        let guest = Guest::new(SECTORS, Promise::Flush);
        let base = match case {
            Case::Fixed | Case::Deep => VhdKind::Fixed,
            _ => VhdKind::Dynamic,
        };
        bench.add(base, &mut rng);
        let children = match case {
            Case::Differencing => 1,
            Case::Deep => 2,
            _ => 0,
        };
        let mut guest = guest;
        for _ in 0..children {
            bench.run(&guest, random_asks(&mut rng, SECTORS, 12), false);
            assert!(guest.failures().is_empty(), "{:?}", guest.failures());
            bench.close();
            bench.add(VhdKind::Differencing, &mut rng);
            guest = guest.after_power_cut(&bench.read_all()).expect("the child shows its parent");
        }
        (bench, guest)
    }

    fn add(&mut self, kind: VhdKind, rng: &mut fastrand::Rng) {
        let file = match self.device {
            true => {
                let file = self.disk.add_device(256 << 10, self.align);
                self.disk.poke(file, 0, &vec![0xbd; 256 << 10]);
                file
            }
            false => self.disk.add_file(0, self.align),
        };
        let block_size = 4096u32 << rng.u8(0..3);
        let parent = self.chain.last().copied();
        self.chain.push(file);
        let bench = self.clone();
        run(&self.disk, move |io| async move {
            let parent = match parent {
                Some(parent) => {
                    Some(Parent::read(&io, &bench.container(parent, true)).await.expect("a VHD"))
                }
                None => None,
            };
            let options = CreateOptions {
                size: SIZE,
                kind,
                force_size: true,
                block_size: Some(block_size),
                parent,
                id: Some([bench.chain.len() as u8; 16]),
            };
            let size = vhd::create(&io, &bench.container(file, false), &options).await;
            assert_eq!(size.expect("made"), SIZE);
        });
    }

    fn container(&self, file: File, read_only: bool) -> Container {
        let align = self.align;
        let traits = Traits {
            regular: !self.device,
            read_only,
            request_alignment: align as u64,
            memory_alignment: align.min(512),
            logical_block_size: 512,
            physical_block_size: 4096,
        };
        let disk = self.disk.clone();
        Container::simulated(file, disk.size(file), traits).with_time(move || disk.modified(file))
    }

    async fn open(&self, io: &Io, read_only: bool) -> Box<dyn Image> {
        let top = self.chain.len() - 1;
        let mut image: Option<Box<dyn Image>> = None;
        for (number, file) in self.chain.iter().enumerate() {
            let read_only = read_only || number + 1 < self.chain.len();
            let container = self.container(*file, read_only);
            let words = self.words.clone();
            let identity = Identity { boot: 1, file: (2, 3) };
            let restart = (number == top && !read_only).then(|| {
                self.disk.watch(*file, container.witness().clone());
                RestartLog::with(Arc::new(words), identity, u64::MAX).of(&container)
            });
            let opened = vhd::open_in_with(io, container, image.take(), restart).await;
            image = Some(opened.unwrap_or_else(|error| panic!("seed {}: {error}", self.seed)));
        }
        image.expect("a chain has an image")
    }

    /// The image opened anew, as after a reboot.
    fn vbd(&self, read_only: bool) -> Vbd {
        let bench = self.clone();
        let image = run(&self.disk, move |io| async move { bench.open(&io, read_only).await });
        Vbd::new(image, CacheMode::None)
    }

    /// Open, check and read all that is there. An error tells what is wrong.
    fn look(&self) -> Result<Vec<u8>, String> {
        let bench = self.clone();
        run(&self.disk, move |io| async move {
            let file = *bench.chain.last().expect("a chain has an image");
            let report = vhd::check(&io, &bench.container(file, true), false).await;
            let report = report.map_err(|error| error.to_string())?;
            if !report.corruptions.is_empty() {
                return Err(format!("{:?}", report.corruptions));
            }
            let vbd = Vbd::new(bench.open(&io, true).await, CacheMode::None);
            let buffer = io.buffer(SIZE as usize).expect("memory");
            let mem = buffer.mem();
            let request = Request { kind: Kind::Read, offset: 0, len: SIZE, mem, fua: false };
            vbd.serve(&io, request).await.map_err(|error| error.to_string())?;
            Ok(buffer.bytes().to_vec())
        })
    }

    fn read_all(&self) -> Vec<u8> {
        self.look().unwrap_or_else(|error| panic!("seed {}: {error}", self.seed))
    }

    fn check(&self, guest: &Guest) -> Result<(), String> {
        let values = ringtap_sim::stamps(&self.look()?, 0).map_err(|error| error.to_string())?;
        guest.model().check_disk_after_cut(&values).map_err(|wrong| wrong.to_string())
    }

    /// After a power cut: what was in memory is gone.
    fn on(&self, disk: Disk) -> Bench {
        Bench { disk, words: blank(), ..self.clone() }
    }

    /// What the server leaves if it is killed now.
    fn after_kill(&self, disk: &Disk, seed: u64) -> Bench {
        let words = self.words.iter().map(|word| AtomicU64::new(word.load(SeqCst))).collect();
        Bench { disk: disk.after_kill(seed), words, ..self.clone() }
    }

    /// The image as a killed server left it, served anew: a guest that lives on finds what it knows.
    fn look_alive(&self, guest: &Guest) -> Result<(), String> {
        self.close();
        let values = ringtap_sim::stamps(&self.look()?, 0).map_err(|error| error.to_string())?;
        let model = guest.model();
        for (sector, value) in (0..).zip(values) {
            let may = model.may_read(sector);
            if !may.contains(&value) {
                return Err(format!("sector {sector} reads as {value}, and was {may:?}"));
            }
        }
        Ok(())
    }

    /// Let the guest ask, on one queue or two, until it has no more to ask or the power goes; with
    /// `watch`, look at every turn at what a cut would leave. Gives what was wrong first.
    fn run(&self, guest: &Guest, asks: Vec<Ask>, watch: bool) -> Option<String> {
        self.run_after(guest, asks, watch, |_| ())
    }

    /// As [`Bench::run`], with faults that begin once the image is open.
    fn run_after(
        &self,
        guest: &Guest,
        asks: Vec<Ask>,
        watch: bool,
        faults: impl FnOnce(&Disk),
    ) -> Option<String> {
        let vbd = self.vbd(false);
        faults(&self.disk);
        self.run_on(&vbd, guest, asks, watch)
    }

    /// As [`Bench::run`], on an image that is open and stays so.
    fn run_on(&self, vbd: &Vbd, guest: &Guest, asks: Vec<Ask>, watch: bool) -> Option<String> {
        let wrong = Rc::new(std::cell::RefCell::new(None));
        let queues = 1 + self.seed % 2;
        let mut all: Vec<Tasks> = (0..queues)
            .map(|queue| {
                let mut sim = Sim::new(&self.disk, self.seed ^ (queue << 32));
                if watch {
                    let (bench, guest, wrong) = (self.clone(), guest.clone(), wrong.clone());
                    let mut turn = 0;
                    sim = sim.at_every_turn(move |cut| {
                        turn += 1;
                        let left = cut.after_power_cut(turn * 7 + bench.seed);
                        if let Err(what) = bench.on(left).check(&guest) {
                            wrong.borrow_mut().get_or_insert(format!("cut at {turn}: {what}"));
                        }
                    });
                }
                Tasks::new(Box::new(sim))
            })
            .collect();
        let mut asks = Some(asks);
        let slots = SLOTS / all.len();
        for tasks in &mut all {
            let served = Rc::new(Served::new(vbd.fork()));
            guest.spawn(tasks, &served, slots, asks.take().unwrap_or_default());
        }
        turn_all(&self.disk, &mut all);
        // Each queue hears of the cut before its tasks are dropped.
        for tasks in &mut all {
            if self.disk.is_cut() {
                let _told_before: std::io::Result<()> = tasks.turn(false);
            }
        }
        let wrong = wrong.borrow_mut().take();
        wrong.or(guest.wrong().map(|wrong| wrong.to_string()))
    }

    /// Close in good order.
    fn close(&self) {
        let bench = self.clone();
        run(&self.disk, move |io| async move {
            let vbd = Vbd::new(bench.open(&io, false).await, CacheMode::None);
            vbd.close(&io).await.expect("closed");
        });
    }
}

/// Look at a cut at every turn; let the power go at one of them; open what is left; go on; cut again.
fn trial(seed: u64, case: Case, sabotage: Option<Sabotage>) -> Option<String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut bench, mut guest) = Bench::new(seed, case);
    for _ in 0..2 {
        let cut = (rng.u8(0..4) > 0).then(|| rng.u64(1..120));
        let asks = random_asks(&mut rng, SECTORS, 30);
        vhd::sabotage(sabotage);
        let wrong = bench.run_after(&guest, asks, true, |disk| {
            if let Some(turns) = cut {
                disk.cut_power_at_turn(disk.turns() + turns);
            }
        });
        vhd::sabotage(None);
        if wrong.is_some() {
            return wrong;
        }
        let failures = guest.failures();
        assert!(failures.is_empty(), "seed {seed}, {case:?}: {failures:?}");
        bench = bench.on(bench.disk.after_power_cut(rng.u64(..)));
        let found = match bench.look() {
            Ok(found) => found,
            Err(error) => return Some(error),
        };
        guest = match guest.after_power_cut(&found) {
            Ok(guest) => guest,
            Err(wrong) => return Some(wrong.to_string()),
        };
    }
    None
}

/// A killed server is no power cut: the guest lives on, and finds all that was acknowledged, flushed or
/// not.
#[test]
fn a_killed_server_loses_nothing_that_was_acknowledged() {
    for (case, seed) in CASES.into_iter().flat_map(|case| seeds(12).map(move |seed| (case, seed))) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut bench, mut guest) = Bench::new(seed, case);
        for _ in 0..4 {
            let turns = rng.u64(1..120);
            let asks = random_asks(&mut rng, SECTORS, 40);
            let cut = |disk: &Disk| disk.cut_power_at_turn(disk.turns() + turns);
            if let Some(wrong) = bench.run_after(&guest, asks, false, cut) {
                panic!("seed {seed}, {case:?}: {wrong}");
            }
            bench = bench.after_kill(&bench.disk, rng.u64(..));
            guest = guest.after_kill();
            let alive = bench.after_kill(&bench.disk, 0).look_alive(&guest);
            alive.unwrap_or_else(|wrong| panic!("seed {seed}, {case:?}: {wrong}"));
        }
        // And what a power cut may take after all that is what was never flushed.
        let left = bench.on(bench.disk.after_power_cut(seed));
        left.check(&guest).unwrap_or_else(|wrong| panic!("seed {seed}, {case:?}: {wrong}"));
    }
}

fn try_power_cuts(case: Case) {
    for seed in seeds(8) {
        if let Some(wrong) = trial(seed, case, None) {
            panic!("seed {seed}, {case:?}: {wrong}");
        }
    }
}

#[test]
fn power_cuts_under_a_fixed_vhd() {
    try_power_cuts(Case::Fixed);
}

#[test]
fn power_cuts_under_a_dynamic_vhd() {
    try_power_cuts(Case::Dynamic);
}

#[test]
fn power_cuts_under_a_dynamic_vhd_on_a_device() {
    try_power_cuts(Case::DynamicOnDevice);
}

#[test]
fn power_cuts_under_a_differencing_vhd() {
    try_power_cuts(Case::Differencing);
    try_power_cuts(Case::Deep);
}

#[test]
fn sabotage_is_caught() {
    for (case, sabotage) in [
        (Case::DynamicOnDevice, Sabotage::RoomIsZeros),
        (Case::DynamicOnDevice, Sabotage::NoBarrier),
        (Case::Dynamic, Sabotage::NoBarrier),
        (Case::Differencing, Sabotage::NoBarrier),
        (Case::Differencing, Sabotage::BitsFirst),
    ] {
        let caught = (0..16).filter(|seed| trial(*seed, case, Some(sabotage)).is_some()).count();
        println!("{case:?}, {sabotage:?}: {caught} of 16");
        assert!(caught > 0, "{case:?} hides {sabotage:?} in all but {caught} of 16 seeds");
    }
}

/// A run in which operation number `n` fails; then a flush, and a cut that must lose nothing. Gives
/// whether the run had an operation `n`.
fn run_with_fault(seed: u64, case: Case, n: u64, fault: Fault) -> bool {
    let context = format!("seed {seed}, {case:?}, operation {n} gives {fault:?}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut bench, guest) = Bench::new(seed, case);
    // Through the page cache a failed sync is never made good; see power_cut.rs for that.
    if bench.align == 1 {
        bench.align = 512;
    }
    let asks = random_asks(&mut rng, SECTORS, 12);
    let vbd = bench.vbd(false);
    let last = bench.disk.operations() + n;
    bench.disk.fail_operations(last..last + 1, fault);
    if let Some(wrong) = bench.run_on(&vbd, &guest, asks, false) {
        panic!("{context}: {wrong}");
    }
    let met = bench.disk.operations() >= last;
    bench.disk.heal();
    let failures = guest.failures().len();
    if let Some(wrong) = bench.run_on(&vbd, &guest, vec![Ask::Flush], false) {
        panic!("{context}: {wrong}");
    }
    assert_eq!(guest.failures().len(), failures, "{context}");
    let left = bench.on(bench.disk.after_power_cut(seed));
    if let Err(wrong) = guest.after_power_cut(&left.read_all()) {
        panic!("{context}: {wrong}");
    }
    met
}

#[test]
fn every_operation_may_fail_once() {
    for case in CASES {
        for seed in seeds(2) {
            for fault in [Fault::Errno(libc::EIO), Fault::Errno(libc::ENOSPC), Fault::Short] {
                let mut n = 1;
                while run_with_fault(seed, case, n, fault) {
                    n += 1;
                }
                assert!(n > 5, "the run had operations to fail");
            }
        }
    }
}

/// Fault, flush and cut while the same image stays open: what a failed flush left is made good.
#[test]
fn a_flush_that_failed_is_made_good() {
    let mut failed = 0;
    for case in [Case::Dynamic, Case::DynamicOnDevice, Case::Differencing] {
        for seed in seeds(8) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let (mut bench, guest) = Bench::new(seed, case);
            bench.align = bench.align.max(512);
            let asks = random_asks(&mut rng, SECTORS, 40);
            let wrong = bench.run_after(&guest, asks, true, |disk| {
                for _ in 0..4 {
                    let n = disk.operations() + rng.u64(5..100);
                    disk.fail_operations(n..n + 1, Fault::Errno(libc::EIO));
                }
            });
            if let Some(wrong) = wrong {
                panic!("seed {seed}, {case:?}: {wrong}");
            }
            failed += guest.failures().iter().filter(|failure| failure.ask == Ask::Flush).count();
        }
    }
    assert!(failed > 0);
}

#[test]
fn a_full_disk_fails_writes_and_loses_nothing() {
    let mut full = 0;
    for case in [Case::Dynamic, Case::Differencing] {
        for seed in seeds(8) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let (bench, guest) = Bench::new(seed, case);
            let used: u64 = bench.chain.iter().map(|file| bench.disk.allocated(*file)).sum();
            let asks = random_asks(&mut rng, SECTORS, 40);
            let wrong = bench.run_after(&guest, asks, true, |disk| {
                disk.limit_space(used + rng.u64(8..80) * 512);
                disk.cut_power_at_turn(disk.turns() + rng.u64(40..250));
            });
            if let Some(wrong) = wrong {
                panic!("seed {seed}, {case:?}: {wrong}");
            }
            let left = bench.on(bench.disk.after_power_cut(seed));
            if let Err(wrong) = guest.after_power_cut(&left.read_all()) {
                panic!("seed {seed}, {case:?}: {wrong}");
            }
            let failures = guest.failures();
            assert!(failures.iter().all(|failure| failure.error == "Full"), "{failures:?}");
            full += failures.len();
        }
    }
    assert!(full > 10, "{full}");
}

#[test]
fn a_clean_close_leaves_a_footer_at_the_very_end() {
    for seed in seeds(20) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (bench, guest) = Bench::new(seed, Case::Dynamic);
        let vbd_bench = bench.clone();
        let asks = random_asks(&mut rng, SECTORS, 20);
        let (guest_too, served) = (guest.clone(), Rc::new(Served::new(bench.vbd(false))));
        let mut tasks = Tasks::new(Box::new(Sim::new(&bench.disk, seed)));
        guest_too.spawn(&mut tasks, &served, SLOTS, asks);
        tasks.run().expect("runs");
        run(&bench.disk, move |io| async move {
            served.vbd.close(&io).await.expect("closed");
            let file = *vbd_bench.chain.last().expect("an image");
            let report = vhd::check(&io, &vbd_bench.container(file, true), false).await;
            let report = report.expect("a report");
            assert_eq!((report.footers, report.leaked), (vec![], 0), "seed {seed}");
        });
        // Closed is stable.
        let left = bench.on(bench.disk.after_power_cut(seed));
        assert_eq!(left.read_all(), bench.read_all(), "seed {seed}");
    }
}

/// Writes to a fresh image cost one operation each, but for the file's growth: metadata waits for a
/// flush, which writes it once.
#[test]
fn a_fresh_write_is_one_operation() {
    for case in [Case::Dynamic, Case::Differencing] {
        let (mut bench, _) = Bench::new(4, case);
        bench.align = 512;
        let vbd = Rc::new(bench.vbd(false));
        let ask = |kind, sector: u64, sectors: u64| {
            let (vbd, before) = (vbd.clone(), bench.disk.operations());
            run(&bench.disk, move |io| async move {
                let buffer = io.buffer(sectors as usize * SECTOR).expect("memory");
                let (offset, len) = (sector * SECTOR as u64, sectors * SECTOR as u64);
                let request = Request { kind, offset, len, mem: buffer.mem(), fua: false };
                vbd.serve(&io, request).await.expect("served");
            });
            bench.disk.operations() - before
        };
        ask(Kind::Write, 0, 1);
        ask(Kind::Write, 88, 8);
        // Now and then room is reserved and the footer moved, in ever larger steps, or the parent's bitmap
        // is read.
        let costs: Vec<u64> = (0..12).map(|number| ask(Kind::Write, number * 8, 8)).collect();
        let cheap = costs.iter().filter(|cost| **cost == 1).count();
        assert!(cheap >= 6, "{case:?}: {costs:?}");
        let again: Vec<u64> = (0..12).map(|number| ask(Kind::Write, number * 8, 8)).collect();
        assert_eq!(again, [1; 12], "{case:?}");
        // Twelve bitmaps at most, the table's sector read and written, two syncs.
        assert!(ask(Kind::Flush, 0, 0) <= 12 + 2 + 2, "{case:?}");
        assert_eq!(ask(Kind::Flush, 0, 0), 1, "{case:?}: nothing is left to write");
    }
}
