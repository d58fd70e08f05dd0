//! Snapshots of a disk that is served, on the simulated disk: overlays take the place of images that are made stable only
//! afterwards, while the guest goes on and flushes, the server is killed, and the power goes. `RINGTAP_SEEDS` sets how many
//! seeds are tried; a failure names its seed.

#[path = "pivot/below.rs"]
mod below;
#[path = "pivot/boundaries.rs"]
mod boundaries;
mod common;
#[path = "common/container.rs"]
mod container;
#[path = "pivot/inside.rs"]
mod inside;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use ringtap_image::qcow2::{CreateOptions, Header, Parts, Qcow2};
use ringtap_image::{CacheMode, Identity, Image, RestartLog};
use ringtap_io::{File, Io};
use ringtap_sim::{
    Bench, Disk, End, Guest, Promise, SECTOR, all_well, hear_of_cut, queues, random_asks, seeds,
    turn_all,
};
use ringtap_vbd::{Busy, Quiesced, Vbd};

use below::Below;
use common::Served;
use container::{log_memory, make, timed};
use inside::Inside;

const SECTORS: u64 = 96;
const SIZE: u64 = SECTORS * SECTOR as u64;
const OVERLAYS: usize = 5;
const SECOND: u64 = 1_000_000_000;

/// What is done wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    /// The disk's flushes do not reach the former image.
    FormerForgotten,
    /// Nor do they once an overlay that took the image's place has given it back.
    FormersForgotten,
    /// A server begins with the topmost image's log alone.
    LogsBelowIgnored,
    /// The register learns of the new top after the guest has gone on.
    PivotToldLate,
    /// A raw image below is not made stable by the server that comes after a kill.
    RawBelowForgotten,
}

/// A raw image, overlays for it with a restart log each, and how many of them lie upon it.
#[derive(Clone)]
struct Chain {
    seed: u64,
    disk: Disk,
    files: Vec<File>,
    logs: Vec<Arc<[AtomicU64]>>,
    boot: u128,
    /// As the operator's register would say.
    top: Rc<Cell<usize>>,
    wrong: Option<Wrong>,
    below: Below,
    /// Bits of bitmaps, beside each log.
    bits: Vec<Arc<[AtomicU64]>>,
    /// Whether the lowest image has a bitmap, and how it goes on.
    inside: Option<Inside>,
}

/// What opens one of the overlays.
struct Opener {
    disk: Disk,
    file: File,
    words: Arc<[AtomicU64]>,
    bits: Arc<[AtomicU64]>,
    identity: Identity,
}

impl Opener {
    async fn open(&self, io: &Io, base: Option<Box<dyn Image>>) -> Result<Box<dyn Image>, String> {
        let container = timed(&self.disk, self.file);
        self.disk.watch(self.file, container.witness().clone());
        let header = Header::read(io, &container).await.map_err(|e| e.to_string())?;
        let log = RestartLog::with(Arc::new(self.words.clone()), self.identity, u64::MAX);
        let log = log.with_memory(self.bits.clone());
        let parts = Parts { base, restart: Some(log.of(&container)), ..Parts::default() };
        let image = Qcow2::open(io, container, header, parts).await;
        Ok(Box::new(image.map_err(|error| error.to_string())?))
    }
}

impl Chain {
    fn new(seed: u64, wrong: Option<Wrong>) -> Chain {
        Chain::upon(Below::of(seed), seed, wrong)
    }

    fn upon(below: Below, seed: u64, wrong: Option<Wrong>) -> Chain {
        let (disk, base) = below.begin();
        let overlays = (0..OVERLAYS).map(|_| disk.add_file(0, 512));
        let files: Vec<File> = std::iter::once(base).chain(overlays).collect();
        let logs = files.iter().map(|_| log_memory(200)).collect();
        let bits = files.iter().map(|_| (0..64).map(|_| AtomicU64::new(0)).collect()).collect();
        let (top, inside) = (Rc::default(), None);
        let chain = Chain { seed, disk, files, logs, boot: 1, top, wrong, below, bits, inside };
        let made = usize::from(below != Below::Qcow2);
        for (at, file) in chain.files.iter().enumerate().skip(made) {
            let options = CreateOptions {
                size: SIZE,
                cluster_size: if seed % 3 == 0 { 16384 } else { 4096 },
                extended_l2: seed % 3 == 0,
                backing_file: (at > 0).then(|| "below".into()),
                ..CreateOptions::default()
            };
            make(&chain, *file, options);
        }
        chain
    }

    fn opener(&self, at: usize) -> Opener {
        let identity = Identity { boot: self.boot, file: (2, 3 + at as u64) };
        Opener {
            disk: self.disk.clone(),
            file: self.files[at],
            words: self.logs[at].clone(),
            bits: self.bits[at].clone(),
            identity,
        }
    }

    /// The disk as the register says it is, each image with what its server left, the lowest first.
    fn open(&self) -> Result<Vbd, String> {
        let openers: Vec<Opener> = (0..=self.top.get()).map(|at| self.opener(at)).collect();
        let (lowest, top, wrong) = (self.below, self.top.get(), self.wrong);
        let image = self.alone(async move |io| {
            let mut below: Option<Box<dyn Image>> = None;
            for (at, opener) in openers.into_iter().enumerate() {
                if at == 0 && lowest != Below::Qcow2 {
                    let image = lowest.open(&io, timed(&opener.disk, opener.file)).await?;
                    if top > 0 && wrong != Some(Wrong::RawBelowForgotten) {
                        image.close(&io).await.map_err(|error| error.to_string())?;
                    }
                    below = Some(image);
                    continue;
                }
                if at < top && wrong == Some(Wrong::LogsBelowIgnored) {
                    opener.words.iter().for_each(|word| word.store(0, SeqCst));
                }
                let image = opener.open(&io, below.take()).await?;
                if at < top {
                    image.close(&io).await.map_err(|error| error.to_string())?;
                }
                below = Some(image);
            }
            below.ok_or_else(|| "no image".to_owned())
        });
        Ok(Vbd::new(image?, CacheMode::None))
    }

    /// Put overlay upon overlay while the guest asks, until it is done or all ends at a turn.
    fn run(&self, guest: &Guest, rng: &mut fastrand::Rng) -> Result<(), String> {
        let cut = (rng.u8(0..6) > 0).then(|| rng.u64(1..250));
        self.run_until(cut, guest, rng)
    }

    /// The same, until so many turns from now.
    fn run_until(
        &self,
        cut: Option<u64>,
        guest: &Guest,
        rng: &mut fastrand::Rng,
    ) -> Result<(), String> {
        let vbd = self.open()?;
        cut.inspect(|turns| self.disk.cut_power_at_turn(self.disk.turns() + turns));
        let mut all = queues(&self.disk, self.seed, 2);
        let asks = random_asks(rng, SECTORS, 80);
        guest.spawn_on(&mut all, || Served::new(vbd.fork()), 3, asks);
        let (io, chain, closes) = (all[0].io().clone(), self.clone(), vbd.disk().clone());
        let mut waits = fastrand::Rng::with_seed(rng.u64(..));
        let failed: Rc<RefCell<Option<String>>> = Rc::default();
        let told = failed.clone();
        all[0].spawn(async move {
            while chain.top.get() < OVERLAYS {
                if let Err(why) = chain.snapshot(&io, &vbd, &mut waits).await {
                    if !chain.disk.is_cut() {
                        *told.borrow_mut() = Some(why);
                    }
                    return;
                }
            }
        });
        turn_all(&self.disk, &mut all);
        if !self.disk.is_cut() && rng.bool() {
            let io = all[1].io().clone();
            all[1].spawn(async move { closes.close(&io).await.expect("nothing fails here") });
            turn_all(&self.disk, &mut all);
        }
        hear_of_cut(&self.disk, &mut all);
        let end = failed.borrow_mut().take();
        end.map_or(Ok(()), Err)?;
        guest.wrong().map_or(Ok(()), |wrong| Err(wrong.to_string()))
    }

    /// One snapshot, as the daemon takes it.
    async fn snapshot(&self, io: &Io, vbd: &Vbd, waits: &mut fastrand::Rng) -> Result<(), String> {
        let next = self.top.get() + 1;
        for _ in 0..waits.u64(0..6) {
            io.next_turn().await;
        }
        let base = vbd.disk().image().map_err(|error| error.to_string())?;
        let carried = self.carry(io, &*base, next).await?;
        let overlay = self.opener(next).open(io, Some(base.fork())).await?;
        if carried {
            self.is_written_down(next, &*base, &*overlay);
        }
        let second = match waits.bool() && next < OVERLAYS {
            true => Some(self.opener(next + 1).open(io, Some(overlay.fork())).await?),
            false => None,
        };
        let quiesced = self.quiesce(io, vbd).await?;
        let new = overlay.fork();
        let former = match self.wrong {
            Some(Wrong::FormerForgotten) => quiesced.replace(overlay).map(|_| None),
            _ => quiesced.overlay(overlay).map(Some),
        };
        let former = former.map_err(|error| error.to_string())?;
        let unused = second.as_ref().map(|second| second.fork());
        if let Some(second) = second {
            self.there_and_back(&quiesced, second)?;
        }
        if carried && self.inside == Some(Inside::Well) {
            inside::goes_on(&*base, &*new);
        }
        if self.wrong == Some(Wrong::PivotToldLate) {
            drop(quiesced);
            for _ in 0..60 {
                io.next_turn().await;
            }
            self.top.set(next);
        } else {
            self.top.set(next);
            drop(quiesced);
        }
        if let Some(unused) = unused {
            unused.close(io).await.map_err(|error| error.to_string())?;
        }
        for _ in 0..waits.u64(0..200) {
            io.next_turn().await;
        }
        match former {
            Some(former) => former.settle(io).await.map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }

    async fn quiesce<'a>(&self, io: &Io, vbd: &'a Vbd) -> Result<Quiesced<'a>, String> {
        // The clock of one queue may be ahead of what another has in flight.
        loop {
            match vbd.quiesce(io, SECOND).await {
                Ok(quiesced) => return Ok(quiesced),
                Err(Busy::Late) if !self.disk.is_cut() => io.next_turn().await,
                Err(busy) => return Err(busy.to_string()),
            }
        }
    }

    /// One more overlay, of which nothing comes: another disk of the same moment is refused its own.
    fn there_and_back(
        &self,
        quiesced: &Quiesced<'_>,
        overlay: Box<dyn Image>,
    ) -> Result<(), String> {
        let former = quiesced.overlay(overlay).map_err(|error| error.to_string())?;
        let back = match self.wrong {
            Some(Wrong::FormersForgotten) => {
                quiesced.replace(former.image().fork()).map(|_overlay| ())
            }
            _ => quiesced.put_back(&former),
        };
        back.map_err(|error| error.to_string())
    }
}

impl Bench for Chain {
    fn disk(&self) -> &Disk {
        &self.disk
    }

    fn seed(&self) -> u64 {
        !self.seed
    }

    fn on(&self, disk: Disk, end: End) -> Chain {
        let left = |all: &[Arc<_>]| all.iter().map(|words| end.leaves(words)).collect();
        let (logs, bits) = (left(&self.logs), left(&self.bits));
        let boot = self.boot + u128::from(end == End::PowerCut);
        Chain { disk, logs, bits, boot, top: Rc::new(Cell::new(self.top.get())), ..self.clone() }
    }

    fn look(&self, end: End) -> Result<Vec<u8>, String> {
        let vbd = self.open()?;
        let bitmaps = vbd.bitmaps();
        let found = self.shown(Served::new(vbd), SECTORS)?;
        if self.inside.is_some() {
            inside::misses_nothing(bitmaps.as_deref(), &found, end)?;
        }
        Ok(found)
    }
}

/// Snapshots with kills and power cuts in between; gives how many were taken.
fn trial(seed: u64, wrong: Option<Wrong>) -> Result<usize, String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut chain = Chain::new(seed, wrong);
    let mut guest = Guest::new(SECTORS, Promise::Flush);
    for _ in 0..4 {
        chain.run(&guest, &mut rng)?;
        (chain, guest) = chain.ends(End::any(&mut rng), rng.u64(..), &guest)?;
    }
    Ok(chain.top.get())
}

#[test]
fn a_snapshot_loses_nothing() {
    let taken: usize = all_well(seeds(400), (), |seed| trial(seed, None)).into_iter().sum();
    println!("{taken} snapshots");
    assert!(taken > 100, "{taken}");
}

#[test]
fn what_is_done_wrong_is_caught() {
    for wrong in [
        Wrong::FormerForgotten,
        Wrong::FormersForgotten,
        Wrong::LogsBelowIgnored,
        Wrong::PivotToldLate,
        Wrong::RawBelowForgotten,
    ] {
        // Raw images below are seldom the last to be flushed.
        let caught: Vec<u64> =
            (0..4_000).filter(|seed| trial(*seed, Some(wrong)).is_err()).take(4).collect();
        println!("{wrong:?}: {caught:?}");
        assert_eq!(caught.len(), 4, "{wrong:?}: {caught:?} of 4000");
    }
}
