//! Images replaced by overlays on themselves while guests use the disk, on the simulated disk, and the power cut
//! around each. `RINGTAP_SEEDS` sets how many seeds are tried; a failure names its seed.

mod common;
#[path = "common/container.rs"]
mod container;

use std::cell::Cell;
use std::rc::Rc;

use ringtap_image::qcow2::{CreateOptions, Header, Parts, Qcow2};
use ringtap_image::{CacheMode, Image, Raw};
use ringtap_io::{File, Io};
use ringtap_sim::{
    Bench, Disk, End, Guest, Promise, SECTOR, all_well, caught, hear_of_cut, queues, random_asks,
    seeds, turn_all,
};
use ringtap_vbd::{Busy, Error, Kind, Request, Vbd};

use common::Served;
use container::{container, make};

const SECTORS: u64 = 96;
const SIZE: u64 = SECTORS * SECTOR as u64;
/// Overlays that each disk comes to have.
const OVERLAYS: usize = 6;
const SECOND: u64 = 1_000_000_000;

/// A raw image, overlays for it, and how many of them lie upon it.
#[derive(Clone)]
struct Chain {
    seed: u64,
    disk: Disk,
    files: Vec<File>,
    /// As the operator's register would say.
    top: Rc<Cell<usize>>,
    /// What was not flushed before is left in the former image, where no flush gets at it: wrong, on purpose.
    unflushed: bool,
}

async fn overlay(
    io: &Io,
    disk: &Disk,
    file: File,
    base: Box<dyn Image>,
) -> Result<Box<dyn Image>, String> {
    let header = Header::read(io, &container(disk, file)).await.map_err(|e| e.to_string())?;
    let parts = Parts { base: Some(base), ..Parts::default() };
    let image = Qcow2::open(io, container(disk, file), header, parts).await;
    Ok(Box::new(image.map_err(|error| error.to_string())?))
}

impl Chain {
    fn new(seed: u64, unflushed: bool) -> Chain {
        let disk = Disk::new(SECTOR);
        let files: Vec<File> =
            (0..=OVERLAYS).map(|at| disk.add_file(if at == 0 { SIZE } else { 0 }, 512)).collect();
        let chain = Chain { seed, disk, files, top: Rc::default(), unflushed };
        for file in &chain.files[1..] {
            let options = CreateOptions {
                size: SIZE,
                cluster_size: 4096,
                backing_file: Some("below".into()),
                ..CreateOptions::default()
            };
            make(&chain, *file, options);
        }
        chain
    }

    /// The disk as the register says it is.
    fn open(&self) -> Vbd {
        let (disk, files, top) = (self.disk.clone(), self.files.clone(), self.top.get());
        let image = self.alone(async move |io| {
            let mut image: Box<dyn Image> = Box::new(Raw::new(container(&disk, files[0])));
            for file in &files[1..=top] {
                image = overlay(&io, &disk, *file, image).await.expect("an overlay");
            }
            image
        });
        Vbd::new(image, CacheMode::None)
    }

    /// Put overlay upon overlay while the guest asks, until it is done or the power goes. Gives how often that was.
    fn run(&self, guest: &Guest, rng: &mut fastrand::Rng) -> Result<usize, String> {
        let vbd = self.open();
        if rng.u8(0..4) > 0 {
            self.disk.cut_power_at_turn(self.disk.turns() + rng.u64(1..200));
        }
        let mut all = queues(&self.disk, self.seed, 2);
        let asks = random_asks(rng, SECTORS, 60);
        guest.spawn_on(&mut all, || Served::new(vbd.fork()), 3, asks);
        let (io, disk, files) = (all[0].io().clone(), self.disk.clone(), self.files.clone());
        let (top, unflushed, waits) = (self.top.clone(), self.unflushed, rng.u64(0..3));
        let (before, closes) = (top.get(), vbd.disk().clone());
        all[0].spawn(async move {
            while top.get() + 1 < files.len() {
                for _ in 0..waits {
                    io.next_turn().await;
                }
                let next = files[top.get() + 1];
                let made = replace(&io, &vbd, &disk, next, unflushed).await;
                match made {
                    Ok(()) => top.set(top.get() + 1),
                    Err(why) if disk.is_cut() => return drop(why),
                    Err(why) => panic!("{why}"),
                }
            }
        });
        turn_all(&self.disk, &mut all);
        if !self.disk.is_cut() {
            let io = all[1].io().clone();
            all[1].spawn(async move {
                let _the_power_may_go: Result<(), Error> = closes.close(&io).await;
            });
            turn_all(&self.disk, &mut all);
        }
        hear_of_cut(&self.disk, &mut all);
        guest.wrong().map_or(Ok(self.top.get() - before), |wrong| Err(wrong.to_string()))
    }
}

impl Bench for Chain {
    fn disk(&self) -> &Disk {
        &self.disk
    }

    fn seed(&self) -> u64 {
        !self.seed
    }

    fn on(&self, disk: Disk, _: End) -> Chain {
        Chain { disk, ..self.clone() }
    }

    fn look(&self, _: End) -> Result<Vec<u8>, String> {
        self.shown(Served::new(self.open()), SECTORS)
    }
}

/// An overlay on the image takes its place.
async fn replace(
    io: &Io,
    vbd: &Vbd,
    disk: &Disk,
    next: File,
    unflushed: bool,
) -> Result<(), String> {
    // The clock of one queue may be ahead of what another has in flight.
    let quiesced = loop {
        match vbd.quiesce(io, SECOND).await {
            Ok(quiesced) => break quiesced,
            Err(Busy::Late) if !disk.is_cut() => io.next_turn().await,
            Err(busy) => return Err(busy.to_string()),
        }
    };
    let base = quiesced.image().map_err(|error| error.to_string())?;
    if !unflushed {
        base.flush(io).await.map_err(|error| error.to_string())?;
    }
    let image = overlay(io, disk, next, base).await?;
    quiesced.replace(image).map(drop).map_err(|error| error.to_string())
}

/// Replace with power cuts in between, and look at what is left.
fn trial(seed: u64, unflushed: bool) -> Result<usize, String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut chain = Chain::new(seed, unflushed);
    let mut guest = Guest::new(SECTORS, Promise::Flush);
    let mut replaced = 0;
    for _ in 0..2 {
        replaced += chain.run(&guest, &mut rng)?;
        if !chain.disk.is_cut() {
            chain.disk.cut_power_at_turn(u64::MAX);
            // Nobody ended it: it is there as after a kill.
            let found = chain.finds(&guest, End::Kill).map(drop);
            // Sabotage may be seen here first.
            assert!(unflushed || found.is_ok(), "seed {seed}: {found:?}");
            found?;
        }
        (chain, guest) = chain.ends(End::PowerCut, rng.u64(..), &guest)?;
    }
    Ok(replaced)
}

#[test]
fn overlays_take_the_place_of_images_under_load() {
    let replaced: usize = all_well(seeds(400), (), |seed| trial(seed, false)).into_iter().sum();
    println!("{replaced} images replaced");
    assert!(replaced > 100, "{replaced}");
}

#[test]
fn a_former_image_that_was_not_flushed_is_caught() {
    caught("unflushed", 6, 100, |seed| trial(seed, true).is_err());
}

#[test]
fn a_disk_that_others_hold_still_is_not_waited_for_too_long() {
    let chain = Chain::new(1, false);
    let vbd = chain.open();
    chain.alone(async move |io| {
        let first = vbd.quiesce(&io, SECOND).await.expect("nothing is in flight");
        assert_eq!(vbd.quiesce(&io, 1000).await.err(), Some(Busy::Late));
        // Another size is another disk.
        let small = Box::new(ringtap_image::Null::new(512, false));
        assert_eq!(first.replace(small).err(), Some(Error::Range));
        let unwritten = Box::new(ringtap_image::Null::new(SIZE, true));
        assert_eq!(first.replace(unwritten).err(), Some(Error::ReadOnly));
        drop(first);
        let mut buffer = io.buffer(512).expect("memory");
        buffer.bytes_mut().fill(7);
        let request =
            Request { kind: Kind::Write, offset: 0, len: 512, mem: buffer.mem(), fua: true };
        vbd.serve(&io, request).await.expect("it goes on");
    });
}
