//! Images on a simulated disk of another host: requests are late and out of order, fail and are given up, connections break and
//! servers are killed, while the guest lives on; then the power goes, or its own server is killed. `RINGTAP_SEEDS` sets
//! how many seeds are tried; a failure names its seed.

mod common;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::Path;

use ringtap_image::luks::{self, Derivation, Effort, Version};
use ringtap_image::qcow2::{self, Header, Parts, Qcow2, Repair, check};
use ringtap_image::{CacheMode, Container, Image, Luks, Raw, Secret, Traits};
use ringtap_io::{File, Io, Mem};
use ringtap_sim::{
    Befell, Bench as _, Disk, End, Guest, Lapse, Promise, RemoteDisk, Run, SECTOR, Weather,
    all_well, caught, random_asks, read_all, seeds,
};
use ringtap_stores::{Facts, Store};
use ringtap_vbd::{Kind, Request, Vbd};

use common::Served;

const SECTORS: u64 = 96;
const SIZE: u64 = SECTORS * SECTOR as u64;
const SLOTS: usize = 5;
const ASKS: usize = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Format {
    Raw,
    Qcow2,
    Luks,
}

/// An image on a disk of another host.
#[derive(Clone)]
struct Bench {
    seed: u64,
    format: Format,
    disk: Disk,
    file: File,
    len: u64,
    block: u32,
}

fn secret() -> Secret {
    Secret::new(b"hunter2").expect("memory")
}

impl Bench {
    fn new(seed: u64, format: Format) -> Bench {
        let mut rng = fastrand::Rng::with_seed(!seed);
        let block = [1, 512, 4096][rng.usize(0..3)];
        match format {
            Format::Raw => {
                let disk = Disk::new(if rng.bool() { 4096 } else { SECTOR });
                let file = disk.add_device(SIZE, 1);
                Bench { seed, format, disk, file, len: SIZE, block }
            }
            Format::Qcow2 => Bench::qcow2(seed, block, &mut rng),
            // One is made for each, and copied: to find a key takes long.
            Format::Luks => {
                thread_local! {
                    static MADE: RefCell<HashMap<u32, Bench>> = RefCell::default();
                }
                MADE.with_borrow_mut(|made| {
                    let one = made.entry(block).or_insert_with(|| Bench::luks(block));
                    Bench { seed, ..one.after(End::PowerCut, seed) }
                })
            }
        }
    }

    fn qcow2(seed: u64, block: u32, rng: &mut fastrand::Rng) -> Bench {
        let disk = Disk::new(SECTOR);
        let len = 8 * SIZE + (64 << 10);
        let file = disk.add_device(len, 1);
        let bench = Bench { seed, format: Format::Qcow2, disk, file, len, block };
        let options = qcow2::CreateOptions {
            size: SIZE,
            cluster_size: [4096, 8192][rng.usize(0..2)],
            ..qcow2::CreateOptions::default()
        };
        let container = bench.at_home(false);
        bench.alone(async move |io| {
            qcow2::create(&io, &container, None, &options).await.expect("an image");
        });
        bench
    }

    fn luks(block: u32) -> Bench {
        let disk = Disk::new(SECTOR);
        let file = disk.add_file(0, 1);
        let mut bench = Bench { seed: 0, format: Format::Luks, disk, file, len: 0, block };
        let options = luks::CreateOptions {
            version: Version::Luks1,
            derivation: Some(Derivation::Pbkdf2),
            effort: Effort::Exactly { iterations: 1000, memory: 0, cpus: 0 },
            ..luks::CreateOptions::default()
        };
        let container = bench.at_home(true);
        let offset = bench.alone(async move |io| {
            luks::create(&io, &container, SIZE, &options, &secret()).await.expect("a container")
        });
        bench.len = offset + SIZE;
        let (format, container) = (bench.format, bench.at_home(true));
        bench.alone(async move |io| {
            let vbd = open(&io, format, container).await.expect("a container");
            let zero = Kind::WriteZeroes { unmap: false, fast: false };
            for (kind, len) in [(zero, SIZE), (Kind::Flush, 0)] {
                let request = Request { kind, offset: 0, len, mem: Mem::EMPTY, fua: false };
                vbd.serve(&io, request).await.expect("zeros");
            }
        });
        bench
    }

    /// The image as its own host sees it.
    fn at_home(&self, regular: bool) -> Container {
        Container::simulated(self.file, self.len, Traits { regular, ..Traits::FILE })
    }

    /// Run one task on the disk as it is, there.
    fn facts(&self) -> Facts {
        Facts {
            len: self.len,
            read_only: false,
            block: self.block,
            preferred: 4096,
            rotational: false,
            discard: true,
            zero: true,
            resizable: false,
            verified: false,
        }
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

    /// The whole disk, on the image's own host; it must be without contradictions.
    fn look(&self, _: End) -> Result<Vec<u8>, String> {
        let (format, container) = (self.format, self.at_home(false));
        self.alone(async move |io| {
            if format == Format::Qcow2 {
                let report = check(&io, &container, Repair::Nothing).await;
                let report = report.map_err(|error| error.to_string())?;
                if report.corruptions > 0 {
                    return Err(format!("check: {report:?}"));
                }
            }
            let vbd = open(&io, format, container).await?;
            let found = read_all(&io, &Served::new(vbd), SECTORS).await;
            found.map_err(|error| error.to_string())
        })
    }
}

async fn open(io: &Io, format: Format, container: Container) -> Result<Vbd, String> {
    let image: Box<dyn Image> = match format {
        Format::Raw => Box::new(Raw::new(container)),
        Format::Qcow2 => {
            let header = Header::read(io, &container).await.map_err(|error| error.to_string())?;
            let image = Qcow2::open(io, container, header, Parts::default()).await;
            Box::new(image.map_err(|error| error.to_string())?)
        }
        Format::Luks => {
            let image = Luks::on(io, container, &secret(), false).await;
            Box::new(image.map_err(|error| error.to_string())?)
        }
    };
    Ok(Vbd::new(image, CacheMode::None))
}

fn weather(rng: &mut fastrand::Rng) -> Weather {
    let mut one_of = |odds: [u32; 3]| odds[rng.usize(0..3)];
    Weather {
        errors: one_of([0, 0, 60]),
        breaks: one_of([0, 60, 400]),
        kills: one_of([0, 200, 1000]),
        timeouts: one_of([0, 0, 30]),
    }
}

/// What came of all trials.
#[derive(Debug, Default)]
struct Sum {
    befell: Befell,
    failed: usize,
}

/// A guest asks in some weather until it has asked all, or the end comes: the power of the other host goes, or the guest's own
/// server is killed. What is left is opened, and asked on.
fn trial(seed: u64, format: Format, lapse: Option<Lapse>, sum: &mut Sum) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut bench = Bench::new(seed, format);
    let mut guest = Guest::new(SECTORS, Promise::Flush);
    for _ in 0..2 {
        let near = Disk::new(SECTOR);
        let mut clients = Run::new(&near, seed).queues(|sim| Box::new(sim));
        let mut remote = RemoteDisk::new(&bench.disk, bench.file, rng.u64(..)).lapse(lapse);
        if format == Format::Raw {
            let (watch, file, turns) = (guest.clone(), bench.file, Cell::new(0));
            remote = remote.at_every_turn(move |cut| {
                turns.set(turns.get() + 1);
                if turns.get() % 8 == 0 {
                    watch.check_raw_outcomes(cut, file);
                }
            });
        }
        let store = Store::new(remote.open(), bench.facts());
        let container = Container::of_store(Path::new("simulated:"), store);
        let io = clients[0].io().clone();
        let opened = async move { open(&io, format, container).await };
        let vbd = remote.block_on(&mut clients[0], opened)?;
        let weather = weather(&mut rng);
        remote.set_weather(weather);
        let (asks, slots) = (random_asks(&mut rng, SECTORS, ASKS), SLOTS / clients.len());
        guest.spawn_on(&mut clients, || Served::new(vbd.fork()), slots, asks);
        let most = if rng.u8(0..4) == 0 { usize::MAX } else { rng.usize(1..4000) };
        remote.run(&mut clients, most);
        if let Some(wrong) = guest.wrong() {
            return Err(wrong.to_string());
        }
        let failures = guest.failures();
        let may_fail = weather.errors > 0 || weather.timeouts > 0;
        assert!(failures.is_empty() || may_fail || lapse.is_some(), "seed {seed}: {failures:?}");
        let befell = remote.befell();
        sum.befell.breaks += befell.breaks;
        sum.befell.kills += befell.kills;
        sum.befell.timeouts += befell.timeouts;
        sum.failed += failures.len();
        drop((clients, vbd));
        // What qcow2 keeps in memory alone is gone with its server.
        let end = if format == Format::Qcow2 { End::PowerCut } else { End::any(&mut rng) };
        let left = match end {
            End::Kill => remote.settle(),
            End::PowerCut => remote.cut_power(rng.u64(..)),
        };
        bench = bench.on(left, end);
        guest = bench.finds(&guest, end)?;
    }
    Ok(())
}

fn try_all(format: Format, count: u64) {
    let mut sum = Sum::default();
    let ran = all_well(seeds(count), format, |seed| trial(seed, format, None, &mut sum)).len();
    println!("{format:?}, {ran} seeds: {sum:?}");
    let Befell { breaks, kills, timeouts } = sum.befell;
    let each = [breaks, kills, timeouts, sum.failed];
    assert!(ran < 20 || each.iter().all(|count| *count > 0), "{sum:?}");
}

#[test]
fn raw_images_keep_what_was_acknowledged() {
    try_all(Format::Raw, 100);
}

#[test]
fn qcow2_images_keep_what_was_acknowledged() {
    try_all(Format::Qcow2, 60);
}

#[test]
fn luks_containers_keep_what_was_acknowledged() {
    try_all(Format::Luks, 20);
}

#[test]
fn stores_that_break_their_word_are_caught() {
    for (format, lapse) in [
        (Format::Raw, Lapse::EarlyAnswers),
        (Format::Raw, Lapse::Overtaken),
        (Format::Qcow2, Lapse::EarlyAnswers),
        (Format::Qcow2, Lapse::Overtaken),
    ] {
        caught((format, lapse), 4, 40, |seed| {
            trial(seed, format, Some(lapse), &mut Sum::default()).is_err()
        });
    }
}
