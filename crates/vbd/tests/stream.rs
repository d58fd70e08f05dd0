//! What lies below brought into the topmost image of a disk that is served, on the simulated disk, while the guest goes on,
//! the job is cancelled, the server is killed, and the power goes. `RINGTAP_SEEDS` sets how many seeds are tried; a
//! failure names its seed.

mod common;
#[path = "common/container.rs"]
mod container;
#[path = "common/faults.rs"]
mod faults;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ringtap_image::qcow2::{CreateOptions, Header, Parts, Qcow2, set_backing};
use ringtap_image::{Boxed, CacheMode, Format, Identity, Image, Raw, RestartLog};
use ringtap_io::{File, Io, Tasks};
use ringtap_sim::{
    Bench, Disk, End, Guest, Promise, Refuses, SECTOR, Sim, all_well, caught, hear_of_cut, queues,
    random_asks, seeds, turn_all,
};
use ringtap_vbd::{Busy, Job, Phase, Stream, StreamError, Vbd};

use common::Served;
use container::{log_memory, make, timed};

const SECTORS: u64 = 96;
const SIZE: u64 = SECTORS * SECTOR as u64;
/// Images on the lowest.
const OVERLAYS: usize = 3;
const SECOND: u64 = 1_000_000_000;

/// What is done wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    /// Requests write to what is being brought up.
    Unlocked,
    /// Requests that began before the job are not waited for.
    Impatient,
    /// The topmost image names what stays before it has the rest.
    NamedEarly,
}

/// A raw or qcow2 image, and overlays on it that name it and each other.
#[derive(Clone)]
struct Chain {
    seed: u64,
    disk: Disk,
    files: Vec<File>,
    sizes: Vec<u64>,
    logs: Vec<Arc<[AtomicU64]>>,
    boot: u128,
    /// The topmost.
    top: usize,
    wrong: Option<Wrong>,
    qcow2: bool,
    /// How many jobs have failed, and how often one that paused was resumed.
    failed: Rc<Cell<u64>>,
    resumed: Rc<Cell<u64>>,
}

impl Chain {
    fn new(seed: u64, wrong: Option<Wrong>) -> Chain {
        let disk = Disk::new(SECTOR);
        let qcow2 = seed % 2 == 0;
        // One of those in the middle may be shorter than what lies around it.
        let short = if seed % 5 == 0 { SIZE / 2 } else { SIZE };
        let sizes = vec![SIZE, SIZE, short, SIZE];
        let raw = if qcow2 { 0 } else { SIZE };
        let files: Vec<File> =
            (0..=OVERLAYS).map(|at| disk.add_file(if at == 0 { raw } else { 0 }, 512)).collect();
        let logs = files.iter().map(|_| log_memory(200)).collect();
        let (boot, top, failed, resumed) = (1, 0, Rc::default(), Rc::default());
        let chain =
            Chain { seed, disk, files, sizes, logs, boot, top, wrong, qcow2, failed, resumed };
        for (at, file) in chain.files.iter().enumerate().skip(if qcow2 { 0 } else { 1 }) {
            let extended_l2 = (seed + at as u64) % 3 == 0;
            let options = CreateOptions {
                size: chain.sizes[at],
                cluster_size: if extended_l2 { 16384 } else { 4096 << (seed / 3 % 2) },
                extended_l2,
                backing_file: at.checked_sub(1).map(|below| below.to_string()),
                ..CreateOptions::default()
            };
            make(&chain, *file, options);
        }
        chain
    }

    /// One of the images upon what it names, or upon what is there.
    fn layer<'a>(
        &'a self,
        io: &'a Io,
        at: usize,
        base: Option<Box<dyn Image>>,
    ) -> Boxed<'a, Result<Box<dyn Image>, String>> {
        Box::pin(async move {
            let container = timed(&self.disk, self.files[at]);
            if at == 0 && !self.qcow2 {
                return Ok(Box::new(Raw::new(container)) as Box<dyn Image>);
            }
            self.disk.watch(self.files[at], container.witness().clone());
            let header = Header::read(io, &container).await.map_err(|e| e.to_string())?;
            let name = header.backing_file.clone();
            let name = name.map(|name| String::from_utf8(name).expect("a number"));
            let base = match (base, name) {
                (_, None) => None,
                (Some(base), _) => Some(base),
                (None, Some(name)) => {
                    Some(self.layer(io, name.parse().expect("a number"), None).await?)
                }
            };
            let identity = Identity { boot: self.boot, file: (2, 3 + at as u64) };
            let words = self.logs[at].clone();
            let log = RestartLog::with(Arc::new(words), identity, u64::MAX);
            let parts = Parts { base, restart: Some(log.of(&container)), ..Parts::default() };
            let image = Qcow2::open(io, container, header, parts).await;
            Ok(Box::new(image.map_err(|error| error.to_string())?) as Box<dyn Image>)
        })
    }

    fn open(&self) -> Result<Vbd, String> {
        let chain = self.clone();
        let image = self.alone(async move |io| chain.layer(&io, chain.top, None).await);
        Ok(Vbd::new(image?, CacheMode::None))
    }

    /// A guest writes to each of the images while it is the topmost.
    fn fill(&mut self, guest: &Guest, rng: &mut fastrand::Rng) -> Result<(), String> {
        for top in 0..=OVERLAYS {
            self.top = top;
            if self.sizes[top] < SIZE {
                // What it would be like with other sizes is not known: it holds nothing.
                continue;
            }
            if top == OVERLAYS && rng.bool() {
                // All is below it.
                continue;
            }
            let vbd = self.open()?;
            let mut all = vec![Tasks::new(Box::new(Sim::new(&self.disk, self.seed)))];
            let served = Rc::new(Served::new(vbd.fork()));
            // What a shorter one hides reads as zeros.
            let sectors = self.sizes.iter().min().map_or(0, |size| size / SECTOR as u64);
            let sectors = if top + 1 < OVERLAYS { sectors } else { SECTORS };
            guest.spawn(&mut all[0], &served, 3, random_asks(rng, sectors, 40));
            turn_all(&self.disk, &mut all);
            let (io, disk) = (all[0].io().clone(), vbd.disk().clone());
            all[0].spawn(async move { disk.close(&io).await.expect("nothing fails here") });
            turn_all(&self.disk, &mut all);
        }
        Ok(())
    }

    /// Have a guest and the job at work, until both are done or all ends at a turn; gives whether the job was done.
    fn run(&self, guest: &Guest, rng: &mut fastrand::Rng) -> Result<bool, String> {
        let vbd = self.open()?;
        if rng.u8(0..6) > 0 {
            self.disk.cut_power_at_turn(self.disk.turns() + rng.u64(1..400));
        }
        let mut all = queues(&self.disk, self.seed, 2);
        let asks = random_asks(rng, SECTORS, 80);
        guest.spawn_on(&mut all, || Served::new(vbd.fork()), 3, asks);
        let (io, chain, closes) = (all[0].io().clone(), self.clone(), vbd.disk().clone());
        let (seed, job) = (rng.u64(..), Job::new());
        self.break_something(rng);
        let (seen, at_least) = (self.resumed.clone(), rng.u64(50..200));
        let resumed = move || seen.set(seen.get() + 1);
        faults::see_to(&io, &self.disk, &job, at_least, resumed);
        if rng.u8(0..5) == 0 {
            let (io, steers, turns) = (all[1].io().clone(), job.clone(), rng.u64(0..100));
            all[1].spawn(async move {
                for _ in 0..turns {
                    io.next_turn().await;
                }
                steers.cancel();
            });
        }
        let end: Rc<RefCell<Result<(), String>>> = Rc::new(RefCell::new(Ok(())));
        let (told, done) = (end.clone(), Rc::new(Cell::new(false)));
        let is_done = done.clone();
        all[0].spawn(async move {
            let end = chain.stream(&io, &vbd, &job, seed).await;
            job.is_at(Phase::Done);
            match end {
                Ok(()) => is_done.set(true),
                Err(why) if why != "cancelled" && !chain.disk.is_cut() => {
                    *told.borrow_mut() = Err(why);
                }
                Err(_) => {}
            }
        });
        turn_all(&self.disk, &mut all);
        faults::mend(&self.disk);
        if !self.disk.is_cut() && rng.bool() {
            let io = all[1].io().clone();
            all[1].spawn(async move { closes.close(&io).await.expect("nothing fails here") });
            turn_all(&self.disk, &mut all);
        }
        hear_of_cut(&self.disk, &mut all);
        end.borrow_mut().clone()?;
        guest.wrong().map_or(Ok(done.get()), |wrong| Err(wrong.to_string()))
    }

    /// What is below cannot be read in part, or the topmost image cannot be written to, or there is no room.
    fn break_something(&self, rng: &mut fastrand::Rng) {
        let at = rng.u64(0..SIZE / 512) * 512;
        match rng.u8(0..4) {
            0 => {
                let below = self.files[rng.usize(0..self.top)];
                self.disk.break_range(below, at..at + 65536, Refuses::Reads);
            }
            1 => self.disk.break_range(self.files[self.top], at..at + 65536, Refuses::Writes),
            2 => {
                let used: u64 = self.files.iter().map(|file| self.disk.allocated(*file)).sum();
                self.disk.limit_space(used + rng.u64(0..2) * 1024);
            }
            _ => {}
        }
    }

    /// The job, as the daemon does it.
    async fn stream(&self, io: &Io, vbd: &Vbd, job: &Job, seed: u64) -> Result<(), String> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let image = vbd.disk().image().map_err(|error| error.to_string())?;
        let depth = std::iter::successors(image.below(), |image| image.below()).count();
        if depth == 0 {
            return Ok(());
        }
        // The lowest of them has number 0.
        let above = (depth > 1 && rng.bool()).then(|| rng.u32(2..=depth as u32));
        for _ in 0..rng.u64(0..40) {
            io.next_turn().await;
        }
        let mut stream = Stream::new(vbd.disk().clone(), above);
        (stream.piece, stream.requests) = (8192, 3);
        stream.on_error = faults::any(&mut rng);
        stream.wrongs.unlocked = self.wrong == Some(Wrong::Unlocked);
        stream.wrongs.impatient = self.wrong == Some(Wrong::Impatient);
        stream.wrongs.unflushed = self.wrong == Some(Wrong::NamedEarly);
        stream.run(io, job).await.map_err(|error| match error {
            StreamError::Read { .. }
            | StreamError::Write { .. }
            | StreamError::Flush { .. }
            | StreamError::Status { .. } => {
                self.failed.set(self.failed.get() + 1);
                "cancelled".to_owned()
            }
            StreamError::Cancelled => "cancelled".to_owned(),
            error => error.to_string(),
        })?;
        faults::mend(&self.disk);
        let stays = above.map(|above| (0..above).try_fold(&*image, |image, _| image.below()));
        let stays = stays.flatten().map(Image::fork);
        let names: Vec<usize> = self.names(io).await?;
        let name = above.map(|above| names[above as usize].to_string());
        // The clock of one queue may be ahead of what another has in flight.
        let quiesced = loop {
            match vbd.quiesce(io, SECOND).await {
                Ok(quiesced) => break quiesced,
                Err(Busy::Late) if !self.disk.is_cut() => io.next_turn().await,
                Err(busy) => return Err(busy.to_string()),
            }
        };
        let file = timed(&self.disk, self.files[self.top]);
        let named = async {
            let backing = name.as_deref().map(|name| (name, Format::Qcow2.name()));
            set_backing(io, &file, backing).await.map_err(|error| error.to_string())
        };
        if self.wrong == Some(Wrong::NamedEarly) {
            named.await?;
            image.close(io).await.map_err(|error| error.to_string())?;
        } else {
            image.close(io).await.map_err(|error| error.to_string())?;
            named.await?;
        }
        let anew = self.layer(io, self.top, stays).await?;
        quiesced.larger(anew).map(drop).map_err(|error| error.to_string())
    }

    /// The numbers of the images, the topmost first.
    async fn names(&self, io: &Io) -> Result<Vec<usize>, String> {
        let mut names = vec![self.top];
        while let Some(at) = names.last().copied().filter(|at| *at > 0 || self.qcow2) {
            let header = Header::read(io, &timed(&self.disk, self.files[at])).await;
            let header = header.map_err(|error| error.to_string())?;
            let Some(name) = header.backing_file else { break };
            names.push(String::from_utf8(name).expect("text").parse().expect("a number"));
        }
        Ok(names)
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
        let logs = self.logs.iter().map(|words| end.leaves(words)).collect();
        let boot = self.boot + u128::from(end == End::PowerCut);
        Chain { disk, logs, boot, ..self.clone() }
    }

    fn look(&self, _: End) -> Result<Vec<u8>, String> {
        self.shown(Served::new(self.open()?), SECTORS)
    }
}

/// Streams with kills and power cuts in between; gives how many came to their end, how many failed, and how often one that
/// paused was resumed.
fn trial(seed: u64, wrong: Option<Wrong>) -> Result<[u64; 3], String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut chain = Chain::new(seed, wrong);
    let mut guest = Guest::new(SECTORS, Promise::Flush);
    chain.fill(&guest, &mut rng).map_err(|wrong| format!("before anything: {wrong}"))?;
    let mut done = 0;
    for _ in 0..4 {
        done += u64::from(chain.run(&guest, &mut rng)?);
        if !chain.disk.is_cut() {
            chain.disk.cut_power_at_turn(u64::MAX);
        }
        (chain, guest) = chain.ends(End::any(&mut rng), rng.u64(..), &guest)?;
    }
    Ok([done, chain.failed.get(), chain.resumed.get()])
}

#[test]
fn a_stream_loses_nothing() {
    let mut sum = [0; 3];
    for seen in all_well(seeds(300), (), |seed| trial(seed, None)) {
        sum.iter_mut().zip(seen).for_each(|(sum, seen)| *sum += seen);
    }
    let [done, failed, resumed] = sum;
    println!("{done} streams came to their end, {failed} failed, {resumed} resumed");
    assert!(done > 100 && failed > 10 && resumed > 10, "{sum:?}");
}

#[test]
fn what_is_done_wrong_is_caught() {
    for wrong in [Wrong::Unlocked, Wrong::Impatient, Wrong::NamedEarly] {
        caught(wrong, 3, 300, |seed| trial(seed, Some(wrong)).is_err());
    }
}
