//! Bitmaps that outlive their server, on the simulated disk: servers that are killed, power cuts and clean stops at random
//! moments, while guests write and bitmaps are added, cleared and replaced. Each time what was marked is compared with what
//! was asked for and with what the disk holds. `RINGTAP_SEEDS` sets how many seeds are tried; a failure names its seed.

#[path = "common/container.rs"]
mod container;
#[path = "bitmaps/memory.rs"]
mod memory;
#[path = "bitmaps/moves.rs"]
mod moves;
#[path = "bitmaps/single.rs"]
mod single;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ringtap_image::bitmap_store::{Binding, KeptIn};
use ringtap_image::qcow2::{CreateOptions, Header, Parts, Qcow2, create};
use ringtap_image::{CacheMode, Container, Image, Raw, Traits};
use ringtap_io::{File, Io, Mem};
use ringtap_sim::{Disk, SECTOR, alone, queues, seeds, turn_all};
use ringtap_vbd::{BitmapChange, BitmapWrongs, Kind, Request, Tracker, Vbd};

use container::{container, timed};
use memory::KilledMemory;
use single::change;

const GRANULE: u64 = 4096;
const REGION: u64 = 64 << 10;
const SIZE: u64 = 8 * REGION;

/// What was seen to happen.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    killed: u32,
    cut: u32,
    closed: u32,
    bitmaps: u32,
    /// After power cuts: bitmaps of which not all is marked.
    partly: u32,
    marked: u32,
    replaced: u32,
}

/// What a bitmap is to hold.
#[derive(Clone, Debug)]
struct Wanted {
    /// What the disk held at the moment since which changes are noted.
    then: Rc<Vec<u8>>,
    /// Granules that were changed since.
    must: BTreeSet<u64>,
    /// And those that may have been.
    may: BTreeSet<u64>,
}

/// A bitmap by its name: what it holds, or may hold once a change is stable.
#[derive(Clone, Debug)]
struct Named {
    name: String,
    /// None: it may not be there.
    either: Vec<Option<Wanted>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Kill,
    Cut,
    Close,
}

/// What goes on with one disk over several servers.
struct World {
    seed: u64,
    disk: Disk,
    image: File,
    /// What tells the image from others.
    identity: &'static str,
    sidecar: File,
    qcow2: bool,
    memory: Arc<KilledMemory>,
    boot: u128,
    booted: u64,
    wrongs: BitmapWrongs,
    life: Rc<Life>,
    seen: Seen,
}

/// What one server's tasks share.
#[derive(Default)]
struct Life {
    named: RefCell<Vec<Named>>,
    /// Requests in flight.
    in_flight: RefCell<Vec<(u64, Range<u64>)>>,
    next: Cell<u64>,
    /// Regions of the log that were asked for.
    touched: RefCell<BTreeSet<u64>>,
    working: Cell<u32>,
    replaced: Cell<u32>,
}

fn granules(range: &Range<u64>) -> Range<u64> {
    range.start / GRANULE..range.end.div_ceil(GRANULE)
}

impl Life {
    fn begin(&self, range: &Range<u64>) -> u64 {
        let number = self.next.replace(self.next.get() + 1);
        self.in_flight.borrow_mut().push((number, range.clone()));
        self.touched.borrow_mut().extend(range.start / REGION..range.end.div_ceil(REGION));
        self.each(|wanted| wanted.may.extend(granules(range)));
        number
    }

    fn end(&self, number: u64, range: &Range<u64>) {
        self.in_flight.borrow_mut().retain(|(other, _)| *other != number);
        self.each(|wanted| wanted.must.extend(granules(range)));
    }

    fn each(&self, mut each: impl FnMut(&mut Wanted)) {
        let mut named = self.named.borrow_mut();
        named.iter_mut().flat_map(|one| one.either.iter_mut().flatten()).for_each(&mut each);
    }

    /// At a moment at which nothing is in flight, but what waits at the door.
    fn cleared(&self, then: Vec<u8>) -> Wanted {
        let may = self.in_flight.borrow().iter().flat_map(|(_, range)| granules(range)).collect();
        Wanted { then: Rc::new(then), must: BTreeSet::new(), may }
    }
}

impl World {
    fn new(seed: u64, wrongs: BitmapWrongs) -> World {
        let mut rng = fastrand::Rng::with_seed(seed);
        let disk = Disk::new(SECTOR);
        let qcow2 = rng.u8(0..3) == 0;
        let image = match rng.bool() && !qcow2 {
            true => disk.add_device(SIZE, 512),
            false => disk.add_file(if qcow2 { 0 } else { SIZE }, 512),
        };
        let sidecar = disk.add_file(0, 1);
        let (memory, life) = Default::default();
        let (boot, booted, seen, identity) = (7, u64::MAX, Seen::default(), "the image");
        let mut world = World {
            seed,
            disk,
            image,
            identity,
            sidecar,
            qcow2,
            memory,
            boot,
            booted,
            wrongs,
            life,
            seen,
        };
        if qcow2 {
            let image = container(&world.disk, image);
            let options =
                CreateOptions { size: SIZE, cluster_size: 4096, ..CreateOptions::default() };
            world.alone(async move |io| {
                create(&io, &image, None, &options).await.expect("an image");
                io.sync(image.file()).await.expect("stable");
            });
        }
        world.start_machine();
        world
    }

    fn alone<T: 'static>(&self, task: impl AsyncFnOnce(Io) -> T + 'static) -> T {
        alone(&self.disk, !self.seed, task)
    }

    fn start_machine(&mut self) {
        self.boot += 1;
        self.booted = self.disk.modified(self.image).max(self.disk.modified(self.sidecar)) + 1;
        self.disk.pass(1_000_000);
    }

    /// The image as the next server opens it.
    fn open(&self) -> Vbd {
        let (disk, file, qcow2) = (self.disk.clone(), self.image, self.qcow2);
        let sidecar =
            Container::simulated(self.sidecar, self.disk.size(self.sidecar), Traits::FILE);
        let (memory, boot, booted) = (self.memory.clone(), self.boot, self.booted);
        let identity = self.identity;
        let container = timed(&disk, file);
        disk.watch(file, container.witness().clone());
        let wrongs = self.wrongs;
        self.alone(async move |io| {
            let image: Box<dyn Image> = match qcow2 {
                false => Box::new(Raw::new(container.clone())),
                true => {
                    let header = Header::read(&io, &container).await.expect("a header");
                    let opened = Qcow2::open(&io, container.clone(), header, Parts::default());
                    Box::new(opened.await.expect("an image"))
                }
            };
            let vbd = Vbd::new(image, CacheMode::None);
            let binding = Binding::simulated(&container, identity.into(), boot, booted);
            let kept = KeptIn { sidecar, memory, binding, region: REGION };
            vbd.keep_bitmaps(&io, kept).await.expect("kept");
            vbd.sabotage_bitmaps(wrongs);
            vbd
        })
    }

    fn read_all(&self, vbd: &Vbd) -> Vec<u8> {
        let vbd = vbd.fork();
        self.alone(async move |io| read(&io, &vbd).await)
    }

    /// One server, from its start to its end.
    fn live(&mut self, rng: &mut fastrand::Rng) -> End {
        let vbd = self.open();
        let end = [End::Kill, End::Cut, End::Close][rng.usize(0..3)];
        if end != End::Close {
            self.disk.cut_power_at_turn(self.disk.turns() + rng.u64(1..400));
        }
        self.life.touched.borrow_mut().clear();
        self.life.in_flight.borrow_mut().clear();
        let mut all = queues(&self.disk, rng.u64(..), 2);
        self.life.working.set(4);
        for task in 0..4 {
            let tasks = &mut all[task % 2];
            let (vbd, life, rng) = (vbd.fork(), self.life.clone(), rng.fork());
            let io = tasks.io().clone();
            tasks.spawn(guest(io, vbd, life, rng));
        }
        let (own, life, forked) = (vbd.fork(), self.life.clone(), rng.fork());
        let io = all[0].io().clone();
        all[0].spawn(operator(io, own, life, self.disk.clone(), forked));
        turn_all(&self.disk, &mut all);
        self.memory.set_killed(self.disk.is_cut());
        match end {
            End::Close => {
                drop(all);
                let own = vbd.fork();
                self.alone(async move |io| own.disk().close(&io).await.expect("closed"));
                return End::Close;
            }
            _ => drop((all, vbd)),
        }
        self.memory.set_killed(false);
        end
    }

    /// What the next server finds.
    fn check(&mut self, end: End) -> Result<(), String> {
        let seed = self.seed;
        match end {
            End::Kill => self.disk = self.disk.after_kill(seed),
            End::Close => {}
            End::Cut => {
                self.disk = self.disk.after_power_cut(seed);
                self.memory.lose();
                self.start_machine();
            }
        }
        match end {
            End::Kill => self.seen.killed += 1,
            End::Cut => self.seen.cut += 1,
            End::Close => self.seen.closed += 1,
        }
        let vbd = self.open();
        let now = self.read_all(&vbd);
        let found = vbd.dirty_bitmaps();
        let touched = self.life.touched.borrow().clone();
        let mut next = vec![];
        for named in self.life.named.borrow().iter() {
            let found = found.iter().find(|one| one.name == named.name);
            let mut wrong = None;
            let marks = found.map(|one| &*one.marks);
            let is = |wanted: &&Option<Wanted>| {
                let end = fits(wanted.as_ref(), marks, &now, &touched, end);
                end.map_err(|why| wrong = Some(why)).is_ok()
            };
            // Which of two it is need not be known: what differs since this one is marked.
            let Some(wanted) = named.either.iter().find(is) else {
                let lost = found.and_then(|one| one.lost.clone());
                return Err(format!("{end:?}, {}: {wrong:?}, lost: {lost:?}", named.name));
            };
            let (Some(found), Some(wanted)) = (found, wanted) else { continue };
            let marked = marked(&found.marks);
            self.seen.bitmaps += 1;
            self.seen.marked += marked.len() as u32;
            let partly = end == End::Cut && (marked.len() as u64) < SIZE / GRANULE;
            self.seen.partly += u32::from(partly);
            let then = wanted.then.clone();
            let wanted = Wanted { then, must: marked.clone(), may: marked };
            next.push(Named { name: named.name.clone(), either: vec![Some(wanted)] });
        }
        if found.len() > next.len() {
            return Err("there is one that was removed".into());
        }
        self.seen.replaced += self.life.replaced.take();
        *self.life.named.borrow_mut() = next;
        // This server does nothing.
        drop(vbd);
        if end == End::Close {
            // It was opened, and so it is in use; nothing has changed.
            self.disk = self.disk.after_kill(seed);
        }
        Ok(())
    }
}

fn marked(tracker: &Tracker) -> BTreeSet<u64> {
    let (mut found, mut at) = (BTreeSet::new(), 0);
    while let Some(range) = tracker.next(at, u64::MAX) {
        found.extend(range.start / GRANULE..range.end / GRANULE);
        at = range.end;
    }
    found
}

/// Whether a bitmap that was found may be this one.
fn fits(
    wanted: Option<&Wanted>,
    found: Option<&Tracker>,
    now: &[u8],
    touched: &BTreeSet<u64>,
    end: End,
) -> Result<(), String> {
    let (wanted, found) = match (wanted, found) {
        (None, None) => return Ok(()),
        (Some(wanted), Some(found)) => (wanted, found),
        (wanted, _) => return Err(format!("there: {}", wanted.is_none())),
    };
    let marked = marked(found);
    let granule = GRANULE as usize;
    for (number, (before, after)) in
        wanted.then.chunks(granule).zip(now.chunks(granule)).enumerate()
    {
        if before != after && !marked.contains(&(number as u64)) {
            return Err(format!("granule {number} has changed and is not marked"));
        }
    }
    if end == End::Cut {
        let may = |granule: &u64| {
            wanted.may.contains(granule) || touched.contains(&(granule * GRANULE / REGION))
        };
        return match marked.iter().find(|granule| !may(granule)) {
            Some(granule) => Err(format!("granule {granule} is marked, and nobody went near it")),
            None => Ok(()),
        };
    }
    if let Some(granule) = wanted.must.difference(&marked).next() {
        return Err(format!("granule {granule} was written to and is not marked"));
    }
    match marked.difference(&wanted.may).next() {
        Some(granule) => Err(format!("granule {granule} is marked, and nobody wrote to it")),
        None => Ok(()),
    }
}

async fn read(io: &Io, vbd: &Vbd) -> Vec<u8> {
    let buffer = io.buffer(SIZE as usize).expect("memory");
    let request = Request { kind: Kind::Read, offset: 0, len: SIZE, mem: buffer.mem(), fua: false };
    vbd.serve(io, request).await.expect("it reads");
    buffer.bytes().to_vec()
}

async fn guest(io: Io, vbd: Vbd, life: Rc<Life>, mut rng: fastrand::Rng) {
    for _ in 0..rng.u32(1..60) {
        let from = SECTOR as u64 * rng.u64(0..SIZE / SECTOR as u64);
        let most = (SIZE - from).min(if rng.u8(0..8) == 0 { SIZE } else { 3 * GRANULE });
        let len = SECTOR as u64 * rng.u64(1..=most / SECTOR as u64);
        let mut buffer = io.buffer(len as usize).expect("memory");
        buffer.bytes_mut().fill(rng.u8(..));
        let kind = match rng.u8(0..10) {
            0 => Kind::Discard,
            1 => Kind::WriteZeroes { unmap: true, fast: false },
            2 => Kind::Flush,
            _ => Kind::Write,
        };
        let mem = if kind == Kind::Write { buffer.mem() } else { Mem::EMPTY };
        let fua = rng.u8(0..4) == 0;
        if kind == Kind::Flush {
            let request = Request { kind, offset: 0, len: 0, mem, fua: false };
            let _cut = vbd.serve(&io, request).await;
            continue;
        }
        let range = from..from + len;
        let number = life.begin(&range);
        if vbd.serve(&io, Request { kind, offset: from, len, mem, fua }).await.is_ok() {
            life.end(number, &range);
        }
        for _ in 0..rng.u32(0..4) {
            io.next_turn().await;
        }
    }
    life.working.set(life.working.get() - 1);
}

/// Adds, removes, clears and replaces bitmaps while guests are at work.
async fn operator(io: Io, vbd: Vbd, life: Rc<Life>, disk: Disk, mut rng: fastrand::Rng) {
    while life.working.get() > 0 && !disk.is_cut() {
        for _ in 0..rng.u32(0..20) {
            io.next_turn().await;
        }
        let name = format!("b{}", rng.u8(0..3));
        let there = life.named.borrow().iter().any(|one| one.name == name);
        let what = rng.u8(0..6);
        if there && what == 0 {
            replace(&io, &vbd, &life, &name, &mut rng).await;
            continue;
        }
        let (change, goes) = match (there, what) {
            (false, _) => {
                let (persistent, recording) = (true, true);
                let name = name.clone();
                (BitmapChange::Add { name, granularity: GRANULE, persistent, recording }, false)
            }
            (true, 1) => (BitmapChange::Remove(name.clone()), true),
            (true, _) => (BitmapChange::Clear(name.clone()), false),
        };
        let staged = vbd.stage_bitmaps(&io, vec![change]).await;
        let Ok(staged) = staged else { continue };
        let Ok(still) = vbd.quiesce(&io, 1 << 40).await else { continue };
        staged.switch(&still).await;
        let wanted = match goes {
            true => None,
            false => Some(life.cleared(still_content(&io, &still).await)),
        };
        {
            let mut named = life.named.borrow_mut();
            match named.iter_mut().find(|one| one.name == name) {
                Some(one) => one.either.push(wanted),
                None => named.push(Named { name: name.clone(), either: vec![None, wanted] }),
            }
        }
        drop(still);
        if staged.commit(&io).await.is_ok() {
            settle(&life, &name);
        }
    }
}

async fn still_content(io: &Io, still: &ringtap_vbd::Quiesced<'_>) -> Vec<u8> {
    read(io, &Vbd::new(still.image().expect("an image"), CacheMode::None)).await
}

/// The change is stable: the bitmap is the later of the two.
fn settle(life: &Life, name: &str) {
    let mut named = life.named.borrow_mut();
    if let Some(one) = named.iter_mut().find(|one| one.name == name) {
        one.either.drain(..one.either.len() - 1);
    }
    named.retain(|one| one.either != [None]);
}

impl PartialEq for Wanted {
    fn eq(&self, other: &Wanted) -> bool {
        Rc::ptr_eq(&self.then, &other.then)
    }
}

/// As a backup does: the marks are cleared only once it has ended well.
async fn replace(io: &Io, vbd: &Vbd, life: &Life, name: &str, rng: &mut fastrand::Rng) {
    let Ok(still) = vbd.quiesce(io, 1 << 40).await else { return };
    let of = vbd.dirty_bitmaps().into_iter().find(|one| one.name == name);
    let Some(of) = of else { return };
    let mut successor = vbd.succeed_bitmap(&of, &still);
    let wanted = life.cleared(still_content(io, &still).await);
    drop(still);
    let slot = {
        let mut named = life.named.borrow_mut();
        let Some(one) = named.iter_mut().find(|one| one.name == name) else { return };
        // Noted from now on, and not what is there before the end.
        one.either.push(Some(wanted));
        one.either.len() - 1
    };
    for _ in 0..rng.u32(0..60) {
        io.next_turn().await;
        // As another job goes on with the backup.
        if rng.u8(0..40) == 0 {
            successor = successor.leave();
            io.next_turn().await;
            let Some(same) = successor.take_up() else { return };
            successor = same;
        }
    }
    if rng.bool() {
        drop(successor);
        life.named.borrow_mut().iter_mut().filter(|one| one.name == name).for_each(|one| {
            one.either.remove(slot);
        });
        return;
    }
    let change = BitmapChange::Replace(name.into(), successor.marks().clone());
    let Ok(staged) = vbd.stage_bitmaps(io, vec![change]).await else { return };
    let Ok(still) = vbd.quiesce(io, 1 << 40).await else { return };
    staged.switch(&still).await;
    drop(still);
    let end = staged.commit(io).await;
    drop(successor);
    if end.is_ok() {
        life.replaced.set(life.replaced.get() + 1);
        settle(life, name);
    }
}

fn run(seed: u64, wrongs: BitmapWrongs, seen: &mut Seen) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut world = World::new(seed, wrongs);
    for _ in 0..4 {
        let end = world.live(&mut rng);
        world.check(end)?;
    }
    let all = world.seen;
    seen.killed += all.killed;
    seen.cut += all.cut;
    seen.closed += all.closed;
    seen.bitmaps += all.bitmaps;
    seen.partly += all.partly;
    seen.marked += all.marked;
    seen.replaced += all.replaced;
    Ok(())
}

#[test]
fn marks_are_exact_after_kills_and_stops_and_more_after_power_cuts() {
    let mut seen = Seen::default();
    for seed in seeds(150) {
        if let Err(why) = run(seed, BitmapWrongs::default(), &mut seen) {
            panic!("seed {seed}: {why}");
        }
    }
    println!("{seen:?}");
    assert!(seen.killed > 20 && seen.cut > 20 && seen.closed > 20, "{seen:?}");
    assert!(seen.bitmaps > 100 && seen.partly > 10 && seen.replaced > 10, "{seen:?}");
}

#[test]
fn servers_that_forget_something_are_noticed() {
    let notices = |wrongs: BitmapWrongs| {
        seeds(150).any(|seed| run(seed, wrongs, &mut Seen::default()).is_err())
    };
    assert!(notices(BitmapWrongs { unlogged: true, ..BitmapWrongs::default() }));
    assert!(notices(BitmapWrongs { unmarked: 5, ..BitmapWrongs::default() }));
    assert!(notices(BitmapWrongs { unflushed: true, ..BitmapWrongs::default() }));
}

impl World {
    /// A raw image in a regular file with one bitmap, which nobody is at work on.
    fn quiet(seed: u64) -> (World, Vbd) {
        let mut world = World::new(seed, BitmapWrongs::default());
        world.image = world.disk.add_file(SIZE, 512);
        world.qcow2 = false;
        world.start_machine();
        let vbd = world.open();
        let own = vbd.fork();
        world.alone(async move |io| {
            let (persistent, recording) = (true, true);
            let name = "b".into();
            let add = BitmapChange::Add { name, granularity: GRANULE, persistent, recording };
            change(&io, &own, vec![add]).await;
        });
        (world, vbd)
    }

    fn write(&self, vbd: &Vbd, granule: u64) {
        let own = vbd.fork();
        self.alone(async move |io| {
            let mut buffer = io.buffer(GRANULE as usize).expect("memory");
            buffer.bytes_mut().fill(granule as u8 + 1);
            let (kind, mem) = (Kind::Write, buffer.mem());
            let (offset, len) = (granule * GRANULE, GRANULE);
            let end = own.serve(&io, Request { kind, offset, len, mem, fua: false }).await;
            end.expect("the guest goes on");
        });
    }

    /// The server is killed, or the power is cut.
    fn end(&mut self, end: End) {
        match end {
            End::Cut => {
                self.disk = self.disk.after_power_cut(self.seed);
                self.memory.lose();
                self.start_machine();
            }
            _ => self.disk = self.disk.after_kill(self.seed),
        }
    }
}
