//! Power cuts and failing disks under a VBD on a raw image, in every cache mode, on the simulated
//! disk. `RINGTAP_SEEDS` sets how many seeds each mode is tried with; a failure names its seed.

mod common;
#[path = "common/container.rs"]
mod container;

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use ringtap_image::{CacheMode, Container, Raw, Traits};
use ringtap_io::{File, Tasks};
use ringtap_sim::{
    Ask, Bench as _, Disk, End, Fault, Guest, Lacks, Lie, Promise, Refuses, Run, SECTOR, all_well,
    caught, random_asks, seeds,
};
use ringtap_vbd::Vbd;

use common::Served;
use container::blocks;

const MODES: [CacheMode; 5] = [
    CacheMode::None,
    CacheMode::Writeback,
    CacheMode::Writethrough,
    CacheMode::DirectSync,
    CacheMode::Unsafe,
];
/// Requests that a guest has in flight at once.
const SLOTS: usize = 5;
const ASKS: usize = 40;

/// What is wrong with the VBD under test, on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sabotage {
    /// The disk lies.
    Disk(Lie),
    /// The VBD acknowledges a flush that it never asked the image for.
    FlushDropped,
    /// The VBD forgets that a request had FUA.
    FuaDropped,
}

/// A disk with one raw image on it, and how the image is to be served.
#[derive(Clone)]
struct Bench {
    seed: u64,
    cache: CacheMode,
    disk: Disk,
    file: File,
    size: u64,
    traits: Traits,
    sabotage: Option<Sabotage>,
}

impl Bench {
    /// An image that ends inside a block, under O_DIRECT.
    fn with_incomplete_block(seed: u64) -> Bench {
        let mut bench = Bench::new(seed, CacheMode::None);
        let sectors = 1 + seed % 15;
        bench.file = bench.disk.add_file(sectors * SECTOR as u64, 4096);
        bench.size = sectors * SECTOR as u64;
        bench.traits.regular = true;
        bench.traits.request_alignment = 4096;
        bench.traits.memory_alignment = 512;
        bench
    }

    /// Everything that the kind of file system or device decides is chosen by the seed.
    fn new(seed: u64, cache: CacheMode) -> Bench {
        let mut rng = fastrand::Rng::with_seed(!seed);
        let disk = Disk::any(&mut rng);
        let align = match (cache.direct(), rng.bool()) {
            (false, _) => 1,
            (true, false) => 512,
            (true, true) => 4096,
        };
        let device = rng.u8(0..4) == 0;
        // A file need not end with a whole block.
        let sectors = if device { 96 } else { rng.u64(90..=96) };
        let size = sectors * SECTOR as u64;
        let file = match device {
            true => disk.add_device(size, align),
            false => disk.add_file(size, align),
        };
        disk.set_lacks(file, Lacks::any(&mut rng, 4));
        let logical_block_size = align.max(SECTOR) as u32;
        let traits = Traits { regular: !device, logical_block_size, ..blocks(align as u64) };
        Bench { seed, cache, disk, file, size, traits, sabotage: None }
    }

    fn promise(&self) -> Promise {
        match self.cache {
            CacheMode::Unsafe => Promise::Nothing,
            CacheMode::Writethrough | CacheMode::DirectSync => Promise::Writethrough,
            CacheMode::None | CacheMode::Writeback => Promise::Flush,
        }
    }

    fn sectors(&self) -> u64 {
        self.size / SECTOR as u64
    }

    fn guest(&self) -> Guest {
        Guest::new(self.sectors(), self.promise())
    }

    /// The image opened anew, as after a reboot.
    fn open(&self) -> Vbd {
        Vbd::new(
            Box::new(Raw::new(Container::simulated(self.file, self.size, self.traits))),
            self.cache,
        )
    }

    /// Let the guest ask, on one queue or two, until it has no more to ask or the power goes. All that a power cut
    /// would leave at any turn is looked at.
    fn run(&self, guest: &Guest, asks: Vec<Ask>) -> Result<(), String> {
        let vbd = self.open();
        let (watch, file) = (guest.clone(), self.file);
        let lie = match self.sabotage {
            Some(Sabotage::Disk(lie)) => Some(lie),
            _ => None,
        };
        let run = Run::new(&self.disk, self.seed)
            .lying(lie)
            .watched(move |cut| watch.check_raw_outcomes(cut, file));
        let served = || Served {
            drops_flushes: self.sabotage == Some(Sabotage::FlushDropped),
            drops_fua: self.sabotage == Some(Sabotage::FuaDropped),
            ..Served::new(vbd.fork())
        };
        run.guest(guest, served, SLOTS, asks).map_err(|wrong| wrong.to_string())
    }

    /// Whether what is there now is what the guest may read.
    fn check_now(&self, guest: &Guest) -> Result<(), String> {
        self.disk.cut_power_at_turn(u64::MAX);
        guest.may_find(&self.look(End::Kill)?).map_err(|wrong| wrong.to_string())
    }
}

impl ringtap_sim::Bench for Bench {
    fn disk(&self) -> &Disk {
        &self.disk
    }

    fn seed(&self) -> u64 {
        self.seed
    }

    fn on(&self, disk: Disk, _: End) -> Bench {
        Bench { disk, ..self.clone() }
    }

    fn look(&self, _: End) -> Result<Vec<u8>, String> {
        self.shown(Served::new(self.open()), self.sectors())
    }
}

/// Look at a cut at every turn; let the power go at one of them; open what is left; go on; cut again.
fn trial(seed: u64, cache: CacheMode, sabotage: Option<Sabotage>) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut bench = Bench::new(seed, cache);
    bench.sabotage = sabotage;
    let mut guest = bench.guest();
    for _ in 0..2 {
        if rng.u8(0..4) > 0 {
            bench.disk.cut_power_at_turn(rng.u64(1..80));
        }
        bench.run(&guest, random_asks(&mut rng, bench.sectors(), ASKS))?;
        if sabotage.is_none() {
            let failures = guest.failures();
            assert!(failures.is_empty(), "seed {seed}, {cache:?}: {failures:?}");
            if !bench.disk.is_cut() {
                bench.check_now(&guest)?;
            }
        }
        (bench, guest) = bench.ends(End::PowerCut, rng.u64(..), &guest)?;
    }
    Ok(())
}

fn try_power_cuts(cache: CacheMode) {
    all_well(seeds(250), cache, |seed| trial(seed, cache, None));
}

#[test]
fn power_cuts_under_cache_none() {
    try_power_cuts(CacheMode::None);
}

#[test]
fn power_cuts_under_cache_writeback() {
    try_power_cuts(CacheMode::Writeback);
}

#[test]
fn power_cuts_under_cache_writethrough() {
    try_power_cuts(CacheMode::Writethrough);
}

#[test]
fn power_cuts_under_cache_directsync() {
    try_power_cuts(CacheMode::DirectSync);
}

#[test]
fn power_cuts_under_cache_unsafe() {
    try_power_cuts(CacheMode::Unsafe);
}

/// A killed server is no power cut: the guest lives on, and finds all that was acknowledged.
#[test]
fn a_killed_server_loses_nothing_that_was_acknowledged() {
    for cache in MODES {
        all_well(seeds(40), cache, |seed| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut bench = Bench::new(seed, cache);
            let mut guest = bench.guest();
            for _ in 0..3 {
                bench.disk.cut_power_at_turn(rng.u64(1..60));
                bench.run(&guest, random_asks(&mut rng, bench.sectors(), ASKS))?;
                bench = bench.after(End::Kill, rng.u64(..));
                guest = bench.finds(&guest, End::Kill)?;
            }
            // And what a power cut may take after all that is what was never flushed.
            bench.ends(End::PowerCut, seed, &guest)
        });
    }
}

/// A write to the last block makes the file end with a whole one; reads beside it must not mind.
#[test]
fn an_image_may_end_inside_a_block() {
    all_well(seeds(250), CacheMode::None, |seed| {
        let mut rng = fastrand::Rng::with_seed(seed);
        let bench = Bench::with_incomplete_block(seed);
        let guest = bench.guest();
        bench.run(&guest, random_asks(&mut rng, bench.sectors(), ASKS))?;
        let failures = guest.failures();
        assert!(failures.is_empty(), "seed {seed}: {failures:?}");
        bench.check_now(&guest)
    });
}

#[test]
fn sabotage_is_caught() {
    let disk = Sabotage::Disk;
    for (cache, sabotage) in [
        (CacheMode::None, Sabotage::FlushDropped),
        (CacheMode::None, Sabotage::FuaDropped),
        (CacheMode::None, disk(Lie::SyncDoesNothing)),
        (CacheMode::None, disk(Lie::DurableIsNot)),
        (CacheMode::None, disk(Lie::EarlyWrites)),
        (CacheMode::Writeback, Sabotage::FlushDropped),
        (CacheMode::Writeback, Sabotage::FuaDropped),
        (CacheMode::Writethrough, disk(Lie::SyncDoesNothing)),
        (CacheMode::DirectSync, disk(Lie::DurableIsNot)),
        (CacheMode::Unsafe, disk(Lie::EarlyWrites)),
        (CacheMode::Unsafe, disk(Lie::ZeroDoesNothing)),
    ] {
        caught((cache, sabotage), 6, 30, |seed| trial(seed, cache, Some(sabotage)).is_err());
    }
}

/// A run in which operation number `n` fails; then a flush, and a cut that must lose nothing. Gives
/// how many requests failed, or nothing where the run had no operation `n`.
fn run_with_fault(seed: u64, cache: CacheMode, n: u64, fault: Fault) -> Option<usize> {
    let context = format!("seed {seed}, cache {cache:?}, operation {n} gives {fault:?}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let bench = Bench::new(seed, cache);
    bench.disk.fail_operations(n..n + 1, fault);
    let guest = bench.guest();
    let run = |asks| {
        if let Err(wrong) = bench.run(&guest, asks) {
            panic!("{context}: {wrong}");
        }
    };
    run(random_asks(&mut rng, bench.sectors(), 12));
    let met = bench.disk.operations() >= n;
    let failures = guest.failures().len();
    bench.disk.heal();
    run(vec![Ask::Flush]);
    run(vec![Ask::Read(0..bench.sectors())]);
    let later = guest.failures().split_off(failures);
    assert!(later.is_empty() || flushes_stay_failed(cache, failures), "{context}: {later:?}");
    if let Err(wrong) = bench.ends(End::PowerCut, seed, &guest) {
        panic!("{context}: {wrong}");
    }
    met.then_some(failures)
}

/// Through the page cache a failed flush cannot be made good: those after it fail too.
fn flushes_stay_failed(cache: CacheMode, failures: usize) -> bool {
    failures > 0 && !cache.direct()
}

#[test]
fn every_operation_may_fail_once() {
    let mut tried = 0;
    for cache in MODES {
        for seed in seeds(8) {
            for (fault, told) in [
                (Fault::Errno(libc::EIO), true),
                (Fault::Errno(libc::ENOSPC), true),
                (Fault::Errno(libc::EINTR), false),
                (Fault::Short, false),
            ] {
                let mut n = 1;
                while let Some(failures) = run_with_fault(seed, cache, n, fault) {
                    assert!(
                        failures == usize::from(told)
                            || told && flushes_stay_failed(cache, failures),
                        "seed {seed}, cache {cache:?}, operation {n} gives {fault:?}: a failed \
                         operation is one requester's error, and {failures} failed"
                    );
                    n += 1;
                }
                tried += n - 1;
            }
        }
    }
    assert!(tried > 500, "{tried} operations failed, and the runs have more");
}

/// After a failed fsync, and after a failed write with RWF_DSYNC, Linux calls the pages clean that it could not write: the
/// next fsync succeeds without them. A flush that succeeds may not rest on that.
#[test]
fn a_flush_after_a_failed_flush_tells_the_truth() {
    let mut failed = 0;
    for cache in [CacheMode::Writeback, CacheMode::Writethrough] {
        let flushes = all_well(seeds(40), cache, |seed| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let bench = Bench::new(seed, cache);
            bench.disk.forget_on_failed_sync(true);
            let n = rng.u64(5..30);
            bench.disk.fail_operations(n..n + 1, Fault::Errno(libc::EIO));
            let guest = bench.guest();
            let run = bench.run(&guest, random_asks(&mut rng, bench.sectors(), ASKS));
            let flushes = guest.failures().into_iter().filter(|failure| failure.ask == Ask::Flush);
            run.map(|()| flushes.count())
        });
        failed += flushes.into_iter().sum::<usize>();
    }
    assert!(failed > 0);
}

/// It is told at once what is lost, and not once somebody has made room for what is not there any more.
#[test]
fn a_flush_that_the_page_cache_had_no_room_for_waits_for_none() {
    let bench = Bench::new(1, CacheMode::Writeback);
    let (guest, vbd) = (bench.guest(), bench.open());
    let told = Arc::new(AtomicBool::new(false));
    let tell = told.clone();
    vbd.wait_for_room(move || tell.store(true, SeqCst));
    let mut tasks = Tasks::new(Box::new(Run::new(&bench.disk, 1).quiet().reactor(0)));
    let served = Rc::new(Served::new(vbd));
    bench.disk.fail_operations(2..3, Fault::Errno(libc::ENOSPC));
    let write = Ask::Write { range: 0..1, durable: false };
    guest.spawn(&mut tasks, &served, 1, vec![write, Ask::Flush, Ask::Flush]);
    tasks.run().expect("the simulation runs");
    let errors: Vec<_> = guest.failures().into_iter().map(|failure| failure.error).collect();
    assert_eq!(errors, ["Lost", "Lost"]);
    assert!(!told.load(SeqCst), "nobody can make room for it");
}

#[test]
fn a_full_disk_fails_writes_and_loses_nothing() {
    let (mut full, mut seen) = (0, 0);
    for cache in MODES {
        all_well(seeds(60), cache, |seed| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let bench = Bench::new(seed, cache);
            bench.disk.limit_space(rng.u64(0..64) * 512);
            let guest = bench.guest();
            bench.disk.cut_power_at_turn(rng.u64(20..200));
            bench.run(&guest, random_asks(&mut rng, bench.sectors(), ASKS))?;
            bench.ends(End::PowerCut, seed, &guest)?;
            let failures = guest.failures();
            assert!(failures.iter().all(|failure| failure.error == "Full"), "{failures:?}");
            full += failures.len();
            seen += 1;
            Ok::<_, String>(())
        });
    }
    assert!(full > seen, "{full} failures in {seen} runs");
}

#[test]
fn bad_sectors_fail_their_requests_only() {
    let mut failed = 0;
    for cache in MODES {
        for seed in seeds(60) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let bench = Bench::new(seed, cache);
            let bad = 4096 * rng.u64(0..11);
            let refuses = rng.choice([Refuses::Reads, Refuses::Writes, Refuses::All]);
            bench.disk.break_range(bench.file, bad..bad + 4096, refuses.unwrap_or(Refuses::All));
            let guest = bench.guest();
            let asks = random_asks(&mut rng, bench.sectors(), ASKS);
            if let Err(wrong) = bench.run(&guest, asks) {
                panic!("seed {seed}, cache {cache:?}: {wrong}");
            }
            let touches = |range: &Range<u64>| range.start < (bad >> 9) + 8 && range.end > bad >> 9;
            for failure in guest.failures() {
                failed += 1;
                assert_eq!(failure.error, format!("Os({})", libc::EIO), "{failure:?}");
                let range = match &failure.ask {
                    Ask::Read(range) | Ask::Discard(range) => range,
                    Ask::Write { range, .. } | Ask::Zero { range, .. } => range,
                    Ask::Flush => panic!("a flush failed on a disk that flushes"),
                };
                assert!(touches(range), "seed {seed}, {cache:?}: {failure:?}, bad from {bad}");
            }
        }
    }
    assert!(failed > 500, "{failed}");
}

#[test]
fn a_seed_gives_the_same_run() {
    let turns = |seed| {
        let bench = Bench::new(seed, CacheMode::None);
        let guest = bench.guest();
        let mut rng = fastrand::Rng::with_seed(seed);
        bench.run(&guest, random_asks(&mut rng, bench.sectors(), ASKS)).expect("runs");
        (bench.disk.turns(), bench.disk.operations(), bench.look(End::Kill))
    };
    for seed in 0..10 {
        assert_eq!(turns(seed), turns(seed));
    }
}
