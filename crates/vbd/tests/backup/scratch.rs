//! Backups with scratch, whose job pauses, whose target is slow or answers nothing any more, whose scratch is too small: no
//! guest has an error, nor waits longer than it may, and a backup that ends well is what the disk was.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use ringtap_image::{Allocation, Boxed, CacheMode, Discard, Extent, Image, Info, Status};
use ringtap_io::{Io, Mem, Tasks};
use ringtap_sim::{Disk, Sim, seeds};
use ringtap_vbd::{Backup, Error, Job, Kind, MirrorError, Request, Scratch, Vbd, Wrongs};

use super::container::raw as raw_image;

const REGION: u64 = 4096;
const REGIONS: u64 = 24;
const SIZE: u64 = REGIONS * REGION;
const SECOND: u64 = 1_000_000_000;
/// The longest that a guest may wait.
const LIMIT: u64 = SECOND;

/// An image each of whose requests takes so long, until it answers nothing any more.
struct Slow {
    image: Box<dyn Image>,
    takes: u64,
    /// Requests that it still answers.
    left: Arc<AtomicU64>,
    waited: AtomicBool,
}

impl Image for Slow {
    fn info(&self) -> &Info {
        self.image.info()
    }

    fn fork(&self) -> Box<dyn Image> {
        let (image, left) = (self.image.fork(), self.left.clone());
        Box::new(Slow { image, takes: self.takes, left, waited: AtomicBool::new(false) })
    }

    fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        match self.waited.swap(false, SeqCst) {
            true => self.image.map(offset, len),
            false => Extent::NotLoaded,
        }
    }

    fn load<'a>(&'a self, io: &'a Io, _: u64) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async move {
            let left = self.left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
            if left.is_err() {
                std::future::pending::<()>().await;
            }
            io.sleep(self.takes).await;
            self.waited.store(true, SeqCst);
            Ok(())
        })
    }

    fn allocate<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
    ) -> Boxed<'a, Result<Option<Allocation<'a>>, Error>> {
        self.image.allocate(io, offset, len)
    }

    fn flush<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        self.image.flush(io)
    }

    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        self.image.discard(io, offset, len, mode)
    }

    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        self.image.status(io, offset, len)
    }

    fn current_size(&self) -> Result<u64, Error> {
        self.image.current_size()
    }
}

/// How the jobs ended.
#[derive(Debug, Default)]
struct Ends {
    whole: u32,
    /// Of these: while the job paused guests changed what the target did not have.
    set_aside: u32,
    crowded: u32,
    late: u32,
}

struct World {
    from: Vbd,
    to: Vbd,
    scratch: Vbd,
    job: Job,
    /// Guests that have not ended, and the longest that one has waited.
    guests: Rc<Cell<u32>>,
    waited: Rc<Cell<u64>>,
    held: Rc<RefCell<Vec<u8>>>,
    /// The most that was set aside while the job paused.
    aside: Rc<Cell<u64>>,
    end: Rc<RefCell<Option<Result<(), MirrorError>>>>,
}

async fn request(io: &Io, vbd: &Vbd, kind: Kind, range: (u64, u64), byte: u8) -> Vec<u8> {
    let (offset, len) = range;
    let mut buffer = io.buffer(len as usize).expect("memory");
    buffer.bytes_mut().fill(byte);
    let mem = if matches!(kind, Kind::Read | Kind::Write) { buffer.mem() } else { Mem::EMPTY };
    let request = Request { kind, offset, len, mem, fua: false };
    vbd.serve(io, request).await.expect("the guest notices nothing");
    buffer.bytes().to_vec()
}

/// A guest that changes the disk at random.
fn guest(tasks: &mut Tasks, world: &World, mut rng: fastrand::Rng) {
    let (io, vbd) = (tasks.io().clone(), world.from.fork());
    let (guests, waited, rests) = (world.guests.clone(), world.waited.clone(), rng.u64(1..SECOND));
    guests.set(guests.get() + 1);
    tasks.spawn(async move {
        for _ in 0..30 {
            io.sleep(rng.u64(0..rests)).await;
            let sector = rng.u64(0..SIZE / 512);
            let len = 512 * rng.u64(1..=24).min(SIZE / 512 - sector);
            let kind = match rng.u8(0..5) {
                0 => Kind::Discard,
                1 => Kind::WriteZeroes { unmap: rng.bool(), fast: false },
                _ => Kind::Write,
            };
            let began = io.now();
            request(&io, &vbd, kind, (512 * sector, len), rng.u8(..)).await;
            waited.set(waited.get().max(io.now() - began));
        }
        guests.set(guests.get() - 1);
    });
}

/// The backup, and who pauses its job.
fn back_up(tasks: &mut Tasks, world: &World, room: u64, wrongs: Wrongs, mut rng: fastrand::Rng) {
    let (io, job, end) = (tasks.io().clone(), world.job.clone(), world.end.clone());
    let (from, to) = (world.from.disk().clone(), world.to.disk().clone());
    let (own, held, scratch) = (world.from.fork(), world.held.clone(), world.scratch.fork());
    let aside = world.aside.clone();
    let backup = Backup {
        limit: Some(LIMIT),
        granularity: REGION,
        requests: rng.usize(1..4),
        wrongs,
        ..Backup::new(from.clone(), to)
    };
    tasks.spawn(async move {
        let still = async || {
            let now = Vbd::new(from.image()?, CacheMode::None);
            *held.borrow_mut() = request(&io, &now, Kind::Read, (0, SIZE), 0).await;
            Ok::<_, Error>(())
        };
        let moment = loop {
            match backup.begin(&io, SECOND, &still).await {
                Ok(moment) => break moment,
                Err(MirrorError::Busy) => io.next_turn().await,
                Err(why) => panic!("{why}"),
            }
        };
        let scratch = Scratch { disk: scratch.disk().clone(), room };
        let moment = Rc::new(moment.with_scratch(scratch));
        job.set_rate(Some(SIZE / rng.u64(1..6)));
        job.pause();
        let (pauses, paused, watched) = (io.clone(), job.clone(), moment.clone());
        io.spawn(async move {
            for _ in 0..3 {
                paused.pause();
                pauses.sleep(rng.u64(0..4 * SECOND)).await;
                aside.set(aside.get().max(watched.set_aside()));
                paused.resume();
                pauses.sleep(rng.u64(0..SECOND)).await;
            }
        });
        let ended = moment.save(&io, &job).await;
        *end.borrow_mut() = Some(ended);
        let _ = own;
    });
}

fn trial(seed: u64, wrongs: Wrongs, ends: &mut Ends) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let disk = Disk::new(512);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, seed)));
    let raw = |content: bool| {
        let file = disk.add_file(SIZE, 512);
        if content {
            disk.poke(file, 0, &(0..SIZE).map(|at| (at / 512) as u8 | 1).collect::<Vec<u8>>());
        }
        (file, raw_image(&disk, file))
    };
    let ((_, from), (target, to), (_, scratch)) = (raw(true), raw(true), raw(false));
    let takes = [0, SECOND / 100, SECOND / 3][rng.usize(0..3)];
    let is_dead = rng.u8(0..4) == 0;
    let left = if is_dead { rng.u64(0..20) } else { u64::MAX };
    let left = Arc::new(AtomicU64::new(left));
    let slow = Slow { image: to, takes, left, waited: AtomicBool::new(false) };
    let room = if rng.bool() { SIZE } else { rng.u64(1..SIZE / 2) };
    let (guests, waited, held, aside, end) = Default::default();
    let (from, to) = (Vbd::new(from, CacheMode::None), Vbd::new(Box::new(slow), CacheMode::None));
    let (scratch, job) = (Vbd::new(scratch, CacheMode::None), Job::new());
    let world = World { from, to, scratch, job, guests, waited, held, aside, end };
    for _ in 0..rng.u8(1..4) {
        guest(&mut tasks, &world, rng.fork());
    }
    back_up(&mut tasks, &world, room, wrongs, rng.fork());
    for turn in 0.. {
        tasks.run_ready();
        if world.guests.get() == 0 && world.end.borrow().is_some() {
            break;
        }
        assert!(turn < 200_000, "seed {seed}: it does not end");
        let waits = tasks.io().in_flight() > 0;
        tasks.turn(waits).expect("the simulation runs");
    }
    if world.waited.get() > LIMIT + LIMIT / 10 {
        return Err(format!("a guest has waited for {} ms", world.waited.get() / 1_000_000));
    }
    let end = world.end.take().expect("it has ended");
    match end {
        Ok(()) => {
            ends.whole += 1;
            ends.set_aside += u32::from(world.aside.get() > 0);
            let mut found = vec![0; SIZE as usize];
            disk.peek(target, 0, &mut found);
            match found == *world.held.borrow() {
                true => Ok(()),
                false => Err("the backup is not what the disk was".into()),
            }
        }
        Err(MirrorError::Room { .. }) if room < SIZE => {
            ends.crowded += 1;
            Ok(())
        }
        Err(MirrorError::Late { .. }) if is_dead || takes > 0 && room < SIZE => {
            ends.late += 1;
            Ok(())
        }
        Err(why) => Err(format!("{why}: {takes} ns, room for {room} bytes")),
    }
}

#[test]
fn a_backup_that_pauses_keeps_its_moment_in_scratch() {
    let mut ends = Ends::default();
    for seed in seeds(300) {
        if let Err(wrong) = trial(seed, Wrongs::default(), &mut ends) {
            panic!("seed {seed}: {wrong}");
        }
    }
    println!("{ends:?}");
    let Ends { whole, set_aside, crowded, late } = ends;
    assert!([whole, set_aside, crowded, late].iter().all(|count| *count > 10));
}

#[test]
fn scratch_that_is_not_read_is_caught() {
    let (mut ends, wrongs) =
        (Ends::default(), Wrongs { ignores_scratch: true, ..Wrongs::default() });
    let caught = seeds(100).filter(|seed| trial(*seed, wrongs, &mut ends).is_err()).count();
    println!("caught in {caught} of 100 seeds, {ends:?}");
    assert!(caught > 5);
}

/// Two large writes at once, each of which finds room for half of itself: that half goes on to the target, and so makes room.
#[test]
fn what_is_set_aside_in_part_goes_on_to_the_target() {
    const MIB: u64 = 1 << 20;
    let (size, half) = (8 * MIB, MIB);
    let disk = Disk::new(512);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 1)));
    let raw = || {
        let file = disk.add_file(size, 512);
        (file, Vbd::new(raw_image(&disk, file), CacheMode::None))
    };
    let ((source, from), (target, to), (_, scratch)) = (raw(), raw(), raw());
    let content: Vec<u8> = (0..size).map(|at| (at / 512) as u8 | 1).collect();
    disk.poke(source, 0, &content);
    let (io, job, guests) = (tasks.io().clone(), Job::new(), Rc::new(Cell::new(2)));
    let end = Rc::new(RefCell::new(None));
    let (own, told) = (from.fork(), end.clone());
    let backup = Backup {
        limit: Some(LIMIT),
        granularity: 65536,
        requests: 1,
        ..Backup::new(from.disk().clone(), to.disk().clone())
    };
    tasks.spawn(async move {
        let moment = loop {
            match backup.begin(&io, SECOND, &async || Ok::<_, Error>(())).await {
                Ok(moment) => break moment,
                Err(MirrorError::Busy) => io.next_turn().await,
                Err(why) => panic!("{why}"),
            }
        };
        let moment = moment.with_scratch(Scratch { disk: scratch.disk().clone(), room: 2 * half });
        // The job itself comes to nothing that the guests change, as long as they do.
        job.set_rate(Some(1));
        for at in [2 * MIB, 5 * MIB] {
            let (io, vbd, guests, job) = (io.clone(), own.fork(), guests.clone(), job.clone());
            io.clone().spawn(async move {
                request(&io, &vbd, Kind::Write, (at, 2 * half), 0).await;
                guests.set(guests.get() - 1);
                if guests.get() == 0 {
                    job.set_rate(None);
                }
            });
        }
        *told.borrow_mut() = Some(moment.save(&io, &job).await);
    });
    for turn in 0.. {
        tasks.run_ready();
        if end.borrow().is_some() {
            break;
        }
        assert!(turn < 200_000, "it does not end");
        let waits = tasks.io().in_flight() > 0;
        tasks.turn(waits).expect("the simulation runs");
    }
    end.take().expect("it has ended").expect("the backup is whole");
    let mut found = vec![0; size as usize];
    disk.peek(target, 0, &mut found);
    assert!(found == content, "the backup is not what the disk was");
}
