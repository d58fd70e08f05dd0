//! A simulated disk with a chain of VHDs on it, and a guest's view of it.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ringtap_image::vhd::{self, CreateOptions, Kind as VhdKind, Parent};
use ringtap_image::{CacheMode, Container, Identity, Image, RestartLog, Traits};
use ringtap_io::{File, Io};
use ringtap_sim::{
    Ask, Bench as _, Disk, End, Ends, Guest, Promise, Run, SECTOR, random_asks, read_all,
};
use ringtap_vbd::Vbd;

use crate::common::Served;
use crate::container::{blocks, log_memory};

pub const SECTORS: u64 = 96;
const SIZE: u64 = SECTORS * SECTOR as u64;
/// Requests that a guest has in flight at once.
pub const SLOTS: usize = 5;

/// Where an image lies, and of what kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    Fixed,
    Dynamic,
    /// On a device that held something else.
    DynamicOnDevice,
    /// Over a dynamic one.
    Differencing,
    /// Over a differencing one over a fixed one.
    Deep,
}

pub const CASES: [Case; 5] =
    [Case::Fixed, Case::Dynamic, Case::DynamicOnDevice, Case::Differencing, Case::Deep];

/// A disk with a chain of images on it, the last of which is served.
#[derive(Clone)]
pub struct Bench {
    pub seed: u64,
    pub disk: Disk,
    pub chain: Vec<File>,
    pub align: usize,
    pub device: bool,
    /// The restart log's memory.
    pub words: Arc<[AtomicU64]>,
    /// The log is taken for the image's own, whatever state that is in.
    pub blind: bool,
}

/// Memory for a log that has to be flushed often.
pub fn blank() -> Arc<[AtomicU64]> {
    log_memory(60)
}

/// Run one task to its end on a disk that moves all bytes at once.
pub fn run<T: 'static, F: Future<Output = T> + 'static>(
    disk: &Disk,
    task: impl FnOnce(Io) -> F,
) -> T {
    Run::new(disk, 1).quiet().task(task)
}

impl Bench {
    /// An image as it was made, and a guest that knows what is on it.
    pub fn new(seed: u64, case: Case) -> (Bench, Guest) {
        let mut rng = fastrand::Rng::with_seed(!seed);
        let disk = Disk::any(&mut rng);
        let align = rng.choice([1, 512, 4096]).unwrap_or(1);
        let device = case == Case::DynamicOnDevice;
        let mut bench =
            Bench { seed, disk, chain: vec![], align, device, words: blank(), blind: false };
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
            bench.run(&guest, random_asks(&mut rng, SECTORS, 12), false).expect("served");
            assert!(guest.failures().is_empty(), "{:?}", guest.failures());
            bench.close();
            bench.add(VhdKind::Differencing, &mut rng);
            guest = bench.finds(&guest, End::PowerCut).expect("the child shows its parent");
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

    pub fn container(&self, file: File, read_only: bool) -> Container {
        let traits = Traits { regular: !self.device, read_only, ..blocks(self.align as u64) };
        let disk = self.disk.clone();
        Container::simulated(file, disk.size(file), traits).with_time(move || disk.modified(file))
    }

    async fn open(&self, io: &Io, read_only: bool) -> Box<dyn Image> {
        let image = self.try_open(io, read_only, !read_only).await;
        image.unwrap_or_else(|error| panic!("seed {}: {error}", self.seed))
    }

    /// The image opened anew, with its restart log or without.
    pub async fn try_open(
        &self,
        io: &Io,
        read_only: bool,
        with_log: bool,
    ) -> Result<Box<dyn Image>, String> {
        let top = self.chain.len() - 1;
        let mut image: Option<Box<dyn Image>> = None;
        for (number, file) in self.chain.iter().enumerate() {
            let read_only = read_only || number + 1 < self.chain.len();
            let container = self.container(*file, read_only);
            let words = self.words.clone();
            let identity = Identity { boot: 1, file: (2, 3) };
            let restart = (number == top && with_log).then(|| {
                self.disk.watch(*file, container.witness().clone());
                let log = RestartLog::with(Arc::new(words), identity, u64::MAX);
                if self.blind { log } else { log.of(&container) }
            });
            let opened = vhd::open_in_with(io, container, image.take(), restart).await;
            image = Some(opened.map_err(|error| error.to_string())?);
        }
        image.ok_or_else(|| "a chain has an image".to_owned())
    }

    /// The image opened anew, as after a reboot.
    pub fn vbd(&self, read_only: bool) -> Vbd {
        let bench = self.clone();
        let image = run(&self.disk, move |io| async move { bench.open(&io, read_only).await });
        Vbd::new(image, CacheMode::None)
    }

    /// Open, check and read all that is there. An error tells what is wrong.
    pub fn read_whole(&self) -> Result<Vec<u8>, String> {
        let bench = self.clone();
        run(&self.disk, move |io| async move {
            let file = *bench.chain.last().expect("a chain has an image");
            let report = vhd::check(&io, &bench.container(file, true), false).await;
            let report = report.map_err(|error| error.to_string())?;
            if !report.corruptions.is_empty() {
                return Err(format!("{:?}", report.corruptions));
            }
            bench.read(&io, true, false).await
        })
    }

    /// All that the image shows to whoever opens it so.
    pub async fn read(&self, io: &Io, read_only: bool, with_log: bool) -> Result<Vec<u8>, String> {
        let image = self.try_open(io, read_only, with_log).await?;
        let vbd = Vbd::new(image, CacheMode::None);
        let found = read_all(io, &Served::new(vbd), SECTORS).await;
        found.map_err(|error| error.to_string())
    }

    /// Let the guest ask, on one queue or two, until it has no more to ask or the power goes; with
    /// `watch`, look at every turn at what a cut would leave. An error is what was wrong first.
    pub fn run(&self, guest: &Guest, asks: Vec<Ask>, watch: bool) -> Result<(), String> {
        self.run_after(guest, asks, watch, |_| ())
    }

    /// As [`Bench::run`], with faults that begin once the image is open.
    pub fn run_after(
        &self,
        guest: &Guest,
        asks: Vec<Ask>,
        watch: bool,
        faults: impl FnOnce(&Disk),
    ) -> Result<(), String> {
        let vbd = self.vbd(false);
        faults(&self.disk);
        self.run_on(&vbd, guest, asks, watch)
    }

    /// As [`Bench::run`], on an image that is open and stays so.
    pub fn run_on(
        &self,
        vbd: &Vbd,
        guest: &Guest,
        asks: Vec<Ask>,
        watch: bool,
    ) -> Result<(), String> {
        let (run, ends, seed) = (Run::new(&self.disk, self.seed), Ends::default(), self.seed);
        let run = match watch {
            true => run.watched(
                ends.watch_bench(self, guest, End::PowerCut, move |turn| [turn * 7 + seed]),
            ),
            false => run,
        };
        let end = serve(run, vbd, guest, asks);
        ends.seen().and(end)
    }

    /// Close in good order.
    pub fn close(&self) {
        let bench = self.clone();
        run(&self.disk, move |io| async move {
            let vbd = Vbd::new(bench.open(&io, false).await, CacheMode::None);
            vbd.close(&io).await.expect("closed");
        });
    }
}

pub fn serve(run: Run, vbd: &Vbd, guest: &Guest, asks: Vec<Ask>) -> Result<(), String> {
    let end = run.guest(guest, || Served::new(vbd.fork()), SLOTS, asks);
    end.map_err(|wrong| wrong.to_string())
}

impl ringtap_sim::Bench for Bench {
    fn disk(&self) -> &Disk {
        &self.disk
    }

    fn seed(&self) -> u64 {
        self.seed
    }

    fn on(&self, disk: Disk, end: End) -> Bench {
        Bench { disk, words: end.leaves(&self.words), ..self.clone() }
    }

    /// After a kill the image is taken up and closed before; it is without contradictions.
    fn look(&self, after: End) -> Result<Vec<u8>, String> {
        if after == End::Kill {
            self.close();
        }
        self.read_whole()
    }
}
