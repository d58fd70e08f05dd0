//! What a disk held at one moment, kept while guests go on, on the simulated disk: power cuts, targets that fail, jobs
//! that are cancelled, readers beside. `RINGTAP_SEEDS` sets how many seeds are tried; a failure names its seed.

mod common;
#[path = "common/container.rs"]
mod container;
#[path = "common/faults.rs"]
mod faults;
#[path = "backup/scratch.rs"]
mod scratch;
#[path = "common/spec.rs"]
mod spec;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use ringtap_image::CacheMode;
use ringtap_image::qcow2::CreateOptions;
use ringtap_io::{File, Io};
use ringtap_sim::{
    Bench, Disk, End, Guest, Promise, Refuses, SECTOR, all_well, caught, hear_of_cut, queues,
    random_asks, read_all, seeds, turn_all,
};
use ringtap_vbd::{
    Backup, Breaks, Error, Job, Kind, MirrorError, Moment, OnErrors, Request, Scratch, Tracker,
    Vbd, Wrongs,
};

use common::Served;
use container::make;
use spec::Spec;

const SECTORS: u64 = 96;
const SIZE: u64 = SECTORS * SECTOR as u64;

/// What was seen to happen.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    whole: u32,
    later: u32,
    broken: u32,
    /// Those that were lost for the disk could not be read.
    unread: u32,
    /// How often a job that paused was resumed.
    resumed: u32,
    cancelled: u32,
    /// Jobs that others went on with.
    left: u32,
    /// Those whose scratch was too small.
    crowded: u32,
    cut: u32,
    killed: u32,
    reads: u32,
}

type Kept = Rc<RefCell<Option<Vec<u8>>>>;

#[derive(Clone)]
struct World {
    seed: u64,
    disk: Disk,
    source: Spec,
    target: Spec,
    wrongs: Wrongs,
    seen: Rc<RefCell<Seen>>,
    /// What a backup that is whole holds.
    kept: Kept,
    wrong: Rc<RefCell<Option<String>>>,
}

impl World {
    fn new(seed: u64, wrongs: Wrongs, rng: &mut fastrand::Rng) -> World {
        let disk = Disk::new(SECTOR);
        // Where space is short, only the target's is.
        let base = disk.add_device(SIZE, 512);
        let files: [File; 2] = std::array::from_fn(|_| disk.add_file(0, 512));
        let (source, target) = (Spec::Raw(base), Spec::Raw(files[1]));
        let (seen, kept, wrong) = Default::default();
        let mut world = World { seed, disk, source, target, wrongs, seen, kept, wrong };
        if rng.bool() {
            world.create(files[0]);
            world.source = Spec::Qcow2(files[0], None);
        }
        match rng.bool() {
            true => {
                world.create(files[1]);
                world.target = Spec::Qcow2(files[1], None);
            }
            false => world.disk.poke(files[1], 0, &vec![0xee; SIZE as usize]),
        }
        world
    }

    fn create(&self, file: File) {
        let options = CreateOptions { size: SIZE, cluster_size: 4096, ..CreateOptions::default() };
        make(self, file, options);
    }

    fn run(&self, guest: &Guest, rng: &mut fastrand::Rng) -> Result<(), String> {
        let (vbd, onto) = (self.source.served_by(self), self.target.served_by(self));
        if rng.bool() {
            self.disk.cut_power_at_turn(self.disk.turns() + rng.u64(1..600));
        }
        if rng.u8(0..6) == 0 && matches!(self.source, Spec::Raw(_)) {
            self.disk.limit_space(rng.u64(0..SIZE));
        } else if rng.u8(0..6) == 0 {
            let at = rng.u64(0..2 * SIZE);
            self.disk.break_range(self.target.file(), at..at + 512, Refuses::Writes);
        }
        let mut all = queues(&self.disk, self.seed, 2);
        let asks = random_asks(rng, SECTORS, 150);
        guest.spawn_on(&mut all, || Served::new(vbd.fork()), 3, asks);
        let backups_read_badly = Rc::new(Cell::new(false));
        // Sectors of a raw disk cannot be read from the moment on.
        let source = match &self.source {
            Spec::Raw(file) if rng.u8(0..4) == 0 => Some(*file),
            _ => None,
        };
        let backups = Rc::new(Backups {
            source,
            reads_badly: backups_read_badly.clone(),
            io: all[0].io().clone(),
            disk: self.disk.clone(),
            vbd,
            onto,
            guest: guest.clone(),
            fresh: Cell::new(matches!(self.target, Spec::Qcow2(..))),
            kept: self.kept.clone(),
            seen: self.seen.clone(),
            wrong: self.wrong.clone(),
            wrongs: self.wrongs,
            rng: RefCell::new(rng.fork()),
        });
        let count = rng.u8(1..4);
        all[0].spawn(async move { backups.run(count).await });
        turn_all(&self.disk, &mut all);
        if !self.disk.is_cut() {
            let failures = guest.failures();
            let is_well = failures.is_empty() || backups_read_badly.get();
            assert!(is_well, "seed {}: {failures:?}", self.seed);
        }
        hear_of_cut(&self.disk, &mut all);
        self.seen.borrow_mut().cut += u32::from(self.disk.is_cut());
        guest.wrong().map_or(Ok(()), |wrong| Err(wrong.to_string()))
    }

    /// A backup that is whole is what the disk was at its moment, and stays so.
    fn check(&self) -> Result<(), String> {
        if let Some(wrong) = self.wrong.take() {
            return Err(wrong);
        }
        let kept = self.kept.borrow();
        let Some(bytes) = &*kept else { return Ok(()) };
        match *bytes == self.target.shown_by(self) {
            true => Ok(()),
            false => Err("the backup is not what the disk was".into()),
        }
    }
}

impl Bench for World {
    fn disk(&self) -> &Disk {
        &self.disk
    }

    fn seed(&self) -> u64 {
        !self.seed
    }

    /// Nothing fails any more.
    fn on(&self, disk: Disk, _: End) -> World {
        faults::mend(&disk);
        World { disk, ..self.clone() }
    }

    /// The disk that was kept; what was kept of it is as it was.
    fn look(&self, _: End) -> Result<Vec<u8>, String> {
        self.check()?;
        Ok(self.source.shown_by(self))
    }
}

async fn read(io: &Io, vbd: &Vbd) -> Result<Vec<u8>, Error> {
    read_all(io, &Served::new(vbd.fork()), SECTORS).await
}

/// The backups of one run, one after the other.
struct Backups {
    /// The file of a disk that cannot be read in part.
    source: Option<File>,
    reads_badly: Rc<Cell<bool>>,
    io: Io,
    disk: Disk,
    vbd: Vbd,
    onto: Vbd,
    guest: Guest,
    fresh: Cell<bool>,
    kept: Kept,
    seen: Rc<RefCell<Seen>>,
    wrong: Rc<RefCell<Option<String>>>,
    wrongs: Wrongs,
    rng: RefCell<fastrand::Rng>,
}

impl Backups {
    async fn run(&self, count: u8) {
        let mut tracker: Option<Arc<Tracker>> = None;
        for _ in 0..count {
            self.kept.take();
            let turns = self.rng.borrow_mut().u64(0..30);
            for _ in 0..turns {
                self.io.next_turn().await;
            }
            let Some((end, bytes)) = self.back_up(&mut tracker).await else { return };
            if self.disk.is_cut() {
                return;
            }
            let mut seen = self.seen.borrow_mut();
            match end {
                Ok(()) => {
                    seen.whole += 1;
                    *self.kept.borrow_mut() = Some(bytes);
                }
                Err(MirrorError::Cancelled) => seen.cancelled += 1,
                Err(MirrorError::Write { .. } | MirrorError::Flush { .. }) => seen.broken += 1,
                Err(MirrorError::Read { .. } | MirrorError::Status { .. }) => seen.unread += 1,
                Err(MirrorError::Room { .. }) => seen.crowded += 1,
                Err(why) => panic!("{why}"),
            }
        }
    }

    async fn back_up(
        &self,
        tracker: &mut Option<Arc<Tracker>>,
    ) -> Option<(Result<(), MirrorError>, Vec<u8>)> {
        let (io, disk) = (&self.io, self.vbd.disk());
        let mut backup = Backup::new(disk.clone(), self.onto.disk().clone());
        let (cancel_after, save_after, readers) = {
            let mut rng = self.rng.borrow_mut();
            backup.granularity = 512 << rng.u8(0..5);
            backup.requests = rng.usize(1..5);
            backup.zeroed = self.fresh.take() && rng.bool();
            // Clocks of the simulation jump where nothing else is in flight.
            backup.limit = None;
            backup.changed = tracker.clone();
            backup.wrongs = self.wrongs;
            backup.on_errors = faults::either(&mut rng);
            let cancel_after = (rng.u8(0..4) == 0).then(|| rng.u64(0..100));
            (cancel_after, rng.u64(0..60), rng.u8(0..3))
        };
        self.seen.borrow_mut().later += u32::from(tracker.is_some());
        let bytes = RefCell::new(vec![]);
        let next = Cell::new(None);
        let still = async || {
            if self.source.is_some() {
                faults::mend(&self.disk);
            }
            let now = Vbd::new(disk.image()?, CacheMode::None);
            *bytes.borrow_mut() = read(io, &now).await?;
            self.guest.may_find(&bytes.borrow()).expect("what the guest wrote");
            next.set(Some(disk.track(4096)));
            Ok::<_, Error>(())
        };
        let moment = loop {
            match backup.begin(io, 1 << 40, &still).await {
                Ok(moment) => break moment,
                Err(_) if self.disk.is_cut() => return None,
                // The clock of one queue may be ahead of what another has in flight.
                Err(MirrorError::Busy) => io.next_turn().await,
                Err(why) => panic!("{why}"),
            }
        };
        if let Some(source) = self.source {
            self.reads_badly.set(true);
            let at = self.rng.borrow_mut().u64(0..SECTORS) * SECTOR as u64;
            self.disk.break_range(source, at..at + 512, Refuses::Reads);
        }
        let moment = self.with_scratch(moment).await;
        let on_errors = backup.on_errors;
        let bytes = Rc::new(bytes.into_inner());
        let reading = Rc::new(Cell::new(readers));
        for _ in 0..readers {
            self.read_beside(&moment, bytes.clone(), reading.clone());
        }
        for _ in 0..save_after {
            io.next_turn().await;
        }
        let nexts = self.rng.borrow_mut().u8(0..3);
        // Views are of this process, and so is what becomes of a tracker.
        let words = readers == 0 && tracker.is_none() && self.rng.borrow_mut().bool();
        let (moment, end) = self.save(moment, cancel_after, nexts, words, on_errors).await;
        // Later ones are of what has changed since the last that was whole.
        if end.is_ok() && tracker.is_none() {
            *tracker = next.take().map(Arc::new);
        }
        drop(moment);
        while reading.get() > 0 && !self.disk.is_cut() {
            io.next_turn().await;
        }
        Some((end, bytes.to_vec()))
    }

    /// Perhaps with scratch, which may be too small for one request.
    async fn with_scratch(&self, moment: Moment) -> Moment {
        let room = self.rng.borrow_mut().u64(1..2 * SIZE);
        if self.rng.borrow_mut().bool() {
            return moment;
        }
        let file = self.disk.add_device(SIZE, 512);
        let image = Spec::Raw(file).open(&self.io, &self.disk).await;
        let disk = Vbd::new(image, CacheMode::None).disk().clone();
        moment.with_scratch(Scratch { disk, room })
    }

    /// Save a moment, by a job or several, each of which goes on where the one before was left.
    async fn save(
        &self,
        mut moment: Moment,
        mut cancel_after: Option<u64>,
        mut nexts: u8,
        words: bool,
        on_errors: OnErrors,
    ) -> (Option<Moment>, Result<(), MirrorError>) {
        let io = &self.io;
        loop {
            let (job, for_next) = (Job::new(), nexts > 0);
            if for_next {
                cancel_after.get_or_insert(self.rng.borrow_mut().u64(0..100));
            }
            if let Some(turns) = cancel_after {
                let (io, job) = (io.clone(), job.clone());
                self.io.spawn(async move {
                    for _ in 0..turns {
                        io.next_turn().await;
                    }
                    match for_next {
                        true => job.cancel_for_next(),
                        false => job.cancel(),
                    }
                });
            }
            let (seen, turns) = (self.seen.clone(), self.rng.borrow_mut().u64(0..200));
            let resumed = move || seen.borrow_mut().resumed += 1;
            faults::see_to(io, &self.disk, &job, turns, resumed);
            let end = moment.save(io, &job).await;
            if end.is_ok() || !for_next || self.disk.is_cut() {
                return (Some(moment), end);
            }
            moment.leave(&job);
            let Some(left) = job.take_moment() else { return (None, end) };
            moment = left;
            self.seen.borrow_mut().left += 1;
            let (turns, is_last) = (self.rng.borrow_mut().u64(0..60), nexts == 1);
            for _ in 0..turns {
                io.next_turn().await;
            }
            if words && moment.set_aside() == 0 {
                // As another process would have it, from when the disk stands still.
                let own = self.vbd.disk().fork();
                if let Ok(_still) = own.quiesce(io, 1 << 40).await {
                    let said = moment.left();
                    drop(moment);
                    let mut backup = Backup::new(own.disk().clone(), self.onto.disk().clone());
                    backup.wrongs = self.wrongs;
                    moment = backup.go_on(&said).expect("the target holds it");
                    moment = moment.with_errors(on_errors);
                }
            }
            moment = moment.take_up();
            nexts -= 1;
            cancel_after = cancel_after.filter(|_| !is_last);
        }
    }

    /// Read the moment while it is kept, and see that it stays as it was.
    fn read_beside(&self, moment: &Moment, bytes: Rc<Vec<u8>>, reading: Rc<Cell<u8>>) {
        // By a view, and as a disk of its own.
        let view = moment.fork();
        let shown = Vbd::new(moment.image(&[]), CacheMode::None);
        let (io, wrong, seen) = (self.io.clone(), self.wrong.clone(), self.seen.clone());
        let mut rng = self.rng.borrow_mut().fork();
        self.io.spawn(async move {
            for _ in 0..20 {
                let from = rng.usize(0..SECTORS as usize);
                let to = rng.usize(from + 1..=SECTORS as usize);
                let range = from * SECTOR..to * SECTOR;
                let Ok(buffer) = io.buffer(range.len()) else { break };
                let (offset, len) = (range.start as u64, range.len() as u64);
                let read = match rng.u8(0..3) {
                    0 => view.read(&io, offset, buffer.mem()).await.map_err(drop),
                    1 => {
                        let (kind, mem) = (Kind::Read, buffer.mem());
                        let request = Request { kind, offset, len, mem, fua: false };
                        shown.serve(&io, request).await.map_err(drop)
                    }
                    _ => match shown.status(&io, offset, len).await {
                        Ok(status) => {
                            let held = &bytes[range.start..range.start + status.len as usize];
                            if status.zero && held.iter().any(|byte| *byte != 0) {
                                *wrong.borrow_mut() =
                                    Some("what is told to be zeros is not".into());
                            }
                            continue;
                        }
                        Err(_) => break,
                    },
                };
                match read {
                    Ok(()) if buffer.bytes() == &bytes[range] => seen.borrow_mut().reads += 1,
                    Ok(()) => *wrong.borrow_mut() = Some("a view changed".into()),
                    Err(_) => break,
                }
            }
            reading.set(reading.get() - 1);
        });
    }
}

fn trial(seed: u64, wrongs: Wrongs, seen: &mut Seen) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut world = World::new(seed, wrongs, &mut rng);
    world.seen = Rc::new(RefCell::new(*seen));
    let guest = Guest::new(SECTORS, Promise::Flush);
    let run = world.run(&guest, &mut rng);
    *seen = *world.seen.borrow();
    run?;
    if !world.disk.is_cut() {
        faults::mend(&world.disk);
        world.disk.cut_power_at_turn(u64::MAX);
        world.check()?;
    }
    // Tables of qcow2 in memory are gone with the server, here.
    let end = match End::any(&mut rng) {
        End::Kill if matches!(world.source, Spec::Raw(_)) => End::Kill,
        _ => End::PowerCut,
    };
    seen.killed += u32::from(end == End::Kill);
    world.after(end, rng.u64(..)).finds(&guest, end).map(drop)
}

#[test]
fn moments_of_disks_are_kept_under_load() {
    let mut seen = Seen::default();
    all_well(seeds(400), (), |seed| trial(seed, Wrongs::default(), &mut seen));
    println!("{seen:?}");
    let Seen { whole, later, broken, unread, resumed, cancelled, left, .. } = seen;
    let Seen { crowded, cut, killed, reads, .. } = seen;
    let all = [whole, later, broken, unread, resumed, cancelled, left, crowded, cut, killed, reads];
    assert!(all.iter().all(|count| *count > 10));
}

/// That backups are wrong in one way is seen.
fn is_caught(wrongs: Wrongs) {
    let mut seen = Seen::default();
    caught(wrongs, 6, 200, |seed| trial(seed, wrongs, &mut seen).is_err());
    println!("{seen:?}");
}

#[test]
fn writes_that_do_not_wait_are_caught() {
    is_caught(Wrongs { misses: 4, ..Wrongs::default() });
}

#[test]
fn a_target_that_is_not_flushed_is_caught() {
    is_caught(Wrongs { unflushed: true, ..Wrongs::default() });
}

#[test]
fn ranges_that_several_use_at_once_are_caught() {
    is_caught(Wrongs { unlocked: true, ..Wrongs::default() });
}

#[test]
fn a_moment_that_is_only_kept_takes_no_more_room_than_it_may() {
    let world = World::new(3, Wrongs::default(), &mut fastrand::Rng::with_seed(3));
    let (from, onto) = (world.source.served_by(&world), world.target.served_by(&world));
    let own = from.fork();
    world.alone(async move |io| {
        let backup = Backup { room: Some(3 * 4096), granularity: 4096, ..Backup::new(own, onto) };
        let moment = backup.begin(&io, 1 << 40, async || Ok::<_, Error>(())).await;
        let moment = Rc::new(moment.expect("nothing is in flight"));
        let shown = Vbd::new(moment.image(&[]), CacheMode::None);
        let (ended, holds) = (Rc::new(RefCell::new(None)), moment.clone());
        let (own, end, job) = (io.clone(), ended.clone(), Job::new());
        io.spawn(async move {
            *end.borrow_mut() = Some(holds.hold(&own, &job).await);
        });
        for granule in 0..4 {
            assert!(ended.borrow().is_none());
            let (kind, offset, len) =
                (Kind::WriteZeroes { unmap: false, fast: false }, granule * 4096, 512);
            let request = Request { kind, offset, len, mem: ringtap_io::Mem::EMPTY, fua: false };
            from.serve(&io, request).await.expect("the guest goes on");
            let read = read(&io, &shown).await;
            assert_eq!(read.is_ok(), granule < 3, "{granule}: {read:?}");
        }
        while ended.borrow().is_none() {
            io.next_turn().await;
        }
        let end = ended.take().expect("it has ended");
        assert!(matches!(end, Err(MirrorError::Room { left: 0, bytes: 4096 })), "{end:?}");
        assert!(!moment.is_whole());
    });
}

#[test]
fn a_request_whose_old_content_cannot_be_saved_fails_where_the_moment_must_not() {
    let new = |seed| World::new(seed, Wrongs::default(), &mut fastrand::Rng::with_seed(seed));
    let world = (0..).map(new).find(|world| matches!(world.target, Spec::Raw(_)));
    let world = world.expect("a seed");
    let (from, onto) = (world.source.served_by(&world), world.target.served_by(&world));
    world.disk.break_range(world.target.file(), 8192..12288, Refuses::Writes);
    let own = from.fork();
    world.alone(async move |io| {
        let room = Some(2 * 4096);
        let backup = Backup { room, granularity: 4096, ..Backup::new(own, onto) };
        let backup = Backup { breaks: Breaks::Request, limit: None, ..backup };
        let write = async |granule: u64, value: u8| {
            let mut buffer = io.buffer(512).expect("memory");
            buffer.bytes_mut().fill(value);
            let (kind, offset) = (Kind::Write, granule * 4096);
            let request = Request { kind, offset, len: 512, mem: buffer.mem(), fua: false };
            from.serve(&io, request).await
        };
        for granule in 0..4 {
            write(granule, 1).await.expect("nothing keeps it");
        }
        let before = read(&io, &from).await.expect("it reads");
        let moment = backup.begin(&io, 1 << 40, async || Ok::<_, Error>(())).await;
        let moment = moment.expect("nothing is in flight");
        let shown = Vbd::new(moment.image(&[]), CacheMode::None);
        // What the broken part of the target would have taken stays free.
        for _ in 0..3 {
            assert_eq!(write(2, 2).await, Err(Error::Os(libc::EIO)));
        }
        for granule in [0, 1, 0] {
            write(granule, 3).await.expect("its old content is saved");
        }
        assert_eq!(write(3, 3).await, Err(Error::Os(libc::EIO)), "there is no more room");
        assert!(moment.is_whole());
        assert_eq!(read(&io, &shown).await.as_ref(), Ok(&before), "the moment is kept");
        let now = read(&io, &from).await.expect("it reads");
        let values: Vec<u8> = (0..4).map(|granule| now[granule * 4096]).collect();
        assert_eq!(values, [3, 3, 1, 1]);
        drop((moment, shown));
        write(2, 4).await.expect("nobody waits for a moment that is gone");
    });
}
