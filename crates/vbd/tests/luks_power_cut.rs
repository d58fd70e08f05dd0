//! Power cuts and failing disks under a VBD on a LUKS container, on the simulated disk: what was
//! flushed is there, each sector is one that was written or whole as it was, and the header still
//! opens. `RINGTAP_SEEDS` sets how many seeds are tried; a failure names its seed.

mod common;
#[path = "common/container.rs"]
mod container;

use std::cell::RefCell;
use std::collections::HashMap;

use ringtap_image::luks::{CreateOptions, Derivation, Effort, Version, create};
use ringtap_image::{CacheMode, Container, Luks, Secret, Traits};
use ringtap_io::{File, Mem, Tasks};
use ringtap_sim::{
    Ask, Bench as _, Device, Disk, End, Fault, Guest, Lie, Promise, Run, SECTOR, Sim, all_well,
    alone, caught, random_asks, seeds,
};
use ringtap_vbd::Vbd;

use common::Served;
use container::blocks;

const SLOTS: usize = 5;
const ASKS: usize = 40;
const SECTORS: u64 = 96;
const SIZE: u64 = SECTORS * SECTOR as u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sabotage {
    Disk(Lie),
    FlushDropped,
}

/// A disk with one container on it.
#[derive(Clone)]
struct Bench {
    seed: u64,
    disk: Disk,
    file: File,
    len: u64,
    traits: Traits,
    sabotage: Option<Sabotage>,
}

fn secret() -> Secret {
    Secret::new(b"hunter2").expect("memory")
}

impl Bench {
    /// A new container, full of zeros as its guest sees it. One is made for each alignment, and
    /// copied.
    fn new(seed: u64) -> Bench {
        thread_local! {
            static MADE: RefCell<HashMap<usize, Bench>> = RefCell::default();
        }
        let align = fastrand::Rng::with_seed(!seed).choice([1, 512, 4096]).unwrap_or(512);
        MADE.with_borrow_mut(|made| {
            let one = made.entry(align).or_insert_with(|| Bench::made(align));
            Bench { seed, ..one.after(End::PowerCut, seed) }
        })
    }

    fn made(align: usize) -> Bench {
        let disk = Disk::new(SECTOR);
        let file = disk.add_file(0, align);
        let traits = blocks(align as u64);
        let mut bench = Bench { seed: 0, disk, file, len: 0, traits, sabotage: None };
        let options = CreateOptions {
            version: Version::Luks1,
            derivation: Some(Derivation::Pbkdf2),
            effort: Effort::Exactly { iterations: 1000, memory: 0, cpus: 0 },
            ..CreateOptions::default()
        };
        let made = bench.container();
        let made = bench.alone(async move |io| create(&io, &made, SIZE, &options, &secret()).await);
        bench.len = made.expect("a container") + SIZE;
        let served = Served::new(bench.open());
        let zero = Ask::Zero { range: 0..SECTORS, unmap: false, durable: false };
        bench.alone(async move |io| {
            for ask in [zero, Ask::Flush] {
                served.serve(&io, &ask, Mem::EMPTY).await.expect("zeros");
            }
        });
        bench
    }

    fn container(&self) -> Container {
        Container::simulated(self.file, self.len, self.traits)
    }

    /// The container opened anew, as after a reboot.
    fn open(&self) -> Vbd {
        let container = self.container();
        let opened = self.alone(async move |io| Luks::on(&io, container, &secret(), false).await);
        let cache =
            if self.traits.request_alignment == 1 { CacheMode::Writeback } else { CacheMode::None };
        Vbd::new(Box::new(opened.expect("a container")), cache)
    }

    /// Let the guest ask, on one queue or two, until it has no more to ask or the power goes.
    fn run(&self, vbd: &Vbd, guest: &Guest, asks: Vec<Ask>) -> Result<(), String> {
        let lie = match self.sabotage {
            Some(Sabotage::Disk(lie)) => Some(lie),
            _ => None,
        };
        let drops_flushes = self.sabotage == Some(Sabotage::FlushDropped);
        let served = || Served { drops_flushes, ..Served::new(vbd.fork()) };
        let end = Run::new(&self.disk, self.seed).lying(lie).guest(guest, served, SLOTS, asks);
        end.map_err(|wrong| wrong.to_string())
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
        self.shown(Served::new(self.open()), SECTORS)
    }
}

fn trial(seed: u64, sabotage: Option<Sabotage>) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut bench = Bench::new(seed);
    bench.sabotage = sabotage;
    let mut guest = Guest::new(SECTORS, Promise::Flush);
    for _ in 0..2 {
        let vbd = bench.open();
        bench.disk.cut_power_at_turn(bench.disk.turns() + rng.u64(1..120));
        bench.run(&vbd, &guest, random_asks(&mut rng, SECTORS, ASKS))?;
        let failures = guest.failures();
        assert!(failures.is_empty(), "seed {seed}: {failures:?}");
        (bench, guest) = bench.ends(End::PowerCut, rng.u64(..), &guest)?;
    }
    Ok(())
}

#[test]
fn power_cuts() {
    all_well(seeds(10), (), |seed| trial(seed, None));
}

#[test]
fn sabotage_is_caught() {
    for sabotage in [Sabotage::FlushDropped, Sabotage::Disk(Lie::SyncDoesNothing)] {
        caught(sabotage, 2, 8, |seed| trial(seed, Some(sabotage)).is_err());
    }
}

/// Cut while a container is being made: what is left opens, or is no container; never one that asks
/// for a secret and then takes none.
#[test]
fn a_container_is_there_whole_or_not_at_all() {
    let (mut opened, mut none) = (0, 0);
    for seed in seeds(12) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let disk = Disk::new(SECTOR);
        let file = disk.add_file(0, 512);
        let traits = Traits { request_alignment: 512, ..Bench::new(0).traits };
        let container = Container::simulated(file, 0, traits);
        disk.cut_power_at_turn(rng.u64(1..30));
        let options = CreateOptions {
            version: Version::Luks1,
            effort: Effort::Exactly { iterations: 1000, memory: 0, cpus: 0 },
            ..CreateOptions::default()
        };
        let mut tasks = Tasks::new(Box::new(Sim::new(&disk, seed)));
        let io = tasks.io().clone();
        let making = async move { create(&io, &container, SIZE, &options, &secret()).await };
        let _cut_or_not = tasks.block_on(making);
        drop(tasks);
        let disk = disk.after_power_cut(seed);
        let container = Container::simulated(file, disk.size(file), traits);
        let end = alone(&disk, seed, async move |io| {
            Luks::on(&io, container, &secret(), false).await.map(drop).map_err(|it| it.to_string())
        });
        match end {
            Ok(()) => opened += 1,
            Err(error) if error.contains("no LUKS header") => none += 1,
            Err(error) => panic!("seed {seed}: {error}"),
        }
    }
    assert!(none > 0 && opened + none > 0, "{opened} opened, {none} were none");
}

#[test]
fn every_operation_may_fail_once() {
    for seed in 0..2 {
        for fault in [Fault::Errno(libc::EIO), Fault::Short] {
            let mut rng = fastrand::Rng::with_seed(seed);
            let asks = random_asks(&mut rng, SECTORS, 8);
            let fresh = Bench::new(seed);
            for n in (1..).step_by(3) {
                let bench = fresh.after(End::PowerCut, 0);
                let guest = Guest::new(SECTORS, Promise::Flush);
                let vbd = bench.open();
                bench.disk.forget_on_failed_sync(true);
                let first = bench.disk.operations();
                bench.disk.fail_operations(first + n..first + n + 1, fault);
                let context = format!("seed {seed}, operation {n} gives {fault:?}");
                if let Err(wrong) = bench.run(&vbd, &guest, asks.clone()) {
                    panic!("{context}: {wrong}");
                }
                let met = bench.disk.operations() > first + n;
                bench.disk.heal();
                let failures = guest.failures();
                // Through the page cache a flush that failed cannot be made good by the next.
                let cached = bench.traits.request_alignment == 1;
                let may_fail = if cached { ASKS } else { 1 };
                let told = fault != Fault::Short;
                assert!(failures.len() <= if told { may_fail } else { 0 }, "{failures:?}");
                if let Err(wrong) = bench.ends(End::PowerCut, n, &guest) {
                    panic!("{context}: {wrong}");
                }
                if !met {
                    assert!(n > 5, "the run had operations to fail");
                    break;
                }
            }
        }
    }
}
