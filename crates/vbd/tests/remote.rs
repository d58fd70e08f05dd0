//! Images on a simulated disk of another host: requests are late and out of order, fail and are given up, connections break and
//! servers are killed, while the guest lives on; then the power goes, or its own server is killed. `RINGTAP_SEEDS` sets
//! how many seeds are tried; a failure names its seed.

mod common;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;

use ringtap_image::luks::{self, Derivation, Effort, Version};
use ringtap_image::qcow2::{self, Header, Parts, Qcow2, Repair, check};
use ringtap_image::{CacheMode, Container, Image, Luks, Raw, Secret, Traits};
use ringtap_io::{File, Io, Mem, Tasks};
use ringtap_sim::{
    Befell, Disk, Guest, Lapse, Promise, RemoteDisk, SECTOR, Sim, Weather, alone, random_asks,
    read_all, seeds,
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
                    Bench { seed, disk: one.disk.after_power_cut(seed), ..one.clone() }
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
    fn alone<T: 'static>(&self, task: impl AsyncFnOnce(Io) -> T + 'static) -> T {
        alone(&self.disk, self.seed, task)
    }

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

    /// The whole disk, on the image's own host; it must be without contradictions.
    fn read_all(&self) -> Result<Vec<u8>, String> {
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

    /// Whether what is there is what a guest that lives on may read.
    fn check_now(&self, guest: &Guest) -> Result<(), String> {
        guest.may_find(&self.read_all()?).map_err(|wrong| wrong.to_string())
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
        let queues = 1 + seed % 2;
        let client = |queue| Tasks::new(Box::new(Sim::new(&near, seed ^ (queue << 32))));
        let mut clients: Vec<Tasks> = (0..queues).map(client).collect();
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
        let mut asks = Some(random_asks(&mut rng, SECTORS, ASKS));
        let slots = SLOTS / clients.len();
        for tasks in &mut clients {
            let served = Rc::new(Served::new(vbd.fork()));
            guest.spawn(tasks, &served, slots, asks.take().unwrap_or_default());
        }
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
        if format != Format::Qcow2 && rng.bool() {
            bench.disk = remote.settle();
            guest = guest.after_kill();
            bench.check_now(&guest)?;
        } else {
            bench.disk = remote.cut_power(rng.u64(..));
            guest = guest.after_power_cut(&bench.read_all()?).map_err(|it| it.to_string())?;
        }
    }
    Ok(())
}

fn try_all(format: Format, count: u64) {
    let (mut sum, mut ran) = (Sum::default(), 0);
    for seed in seeds(count) {
        if let Err(wrong) = trial(seed, format, None, &mut sum) {
            panic!("seed {seed}, {format:?}: {wrong}");
        }
        ran += 1;
    }
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
        let caught =
            (0..40).filter(|seed| trial(*seed, format, Some(lapse), &mut Sum::default()).is_err());
        let caught = caught.count();
        println!("{format:?}, {lapse:?}: {caught} of 40");
        assert!(caught > 3, "{format:?}: {lapse:?} is hidden in all but {caught} of 40 seeds");
    }
}
