//! Mirrors step by step: what guests see of them, how they are steered, and how they end.

#[path = "common/container.rs"]
mod container;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use ringtap_image::{
    Allocation, Boxed, CacheMode, Discard, Extent, Image, Info, Null, OpenOptions, Raw, Status,
};
use ringtap_io::{Io, Mem, Tasks};
use ringtap_sim::{Disk, Sim, turn_all};
use ringtap_vbd::{
    Backup, Ending, Error, Job, Kind, Limits, Mirror, MirrorError, Phase, Request, Vbd, Wrongs,
};

const SIZE: u64 = 64 << 10;
const BLOCK: usize = 4096;

fn raw(disk: &Disk) -> Box<dyn Image> {
    container::raw(disk, disk.add_file(SIZE, 512))
}

fn vbd(image: Box<dyn Image>) -> Vbd {
    Vbd::new(image, CacheMode::None)
}

async fn write(io: &Io, vbd: &Vbd, offset: u64, value: u8) -> Result<(), Error> {
    let mut buffer = io.buffer(BLOCK).expect("memory");
    buffer.bytes_mut().fill(value);
    let (kind, len) = (Kind::Write, BLOCK as u64);
    vbd.serve(io, Request { kind, offset, len, mem: buffer.mem(), fua: false }).await
}

async fn read_all(io: &Io, vbd: &Vbd) -> Vec<u8> {
    let buffer = io.buffer(vbd.size() as usize).expect("memory");
    let (kind, len) = (Kind::Read, vbd.size());
    let request = Request { kind, offset: 0, len, mem: buffer.mem(), fua: false };
    vbd.serve(io, request).await.expect("it reads");
    buffer.bytes().to_vec()
}

async fn nothing() -> Result<(), Error> {
    Ok(())
}

/// Two queues of a simulated disk: a job's and a guest's.
struct Pair(Disk, Vec<Tasks>);

impl Pair {
    fn new(seed: u64) -> Pair {
        let disk = Disk::new(512);
        let tasks = |queue: u64| Tasks::new(Box::new(Sim::new(&disk, seed ^ (queue << 32))));
        let both = (0..2).map(tasks).collect();
        Pair(disk, both)
    }

    fn spawn(&mut self, queue: usize, task: impl AsyncFnOnce(Io) + 'static) {
        let io = self.1[queue].io().clone();
        self.1[queue].spawn(async move { task(io).await });
    }

    fn run(&mut self) {
        turn_all(&self.0, &mut self.1);
    }
}

/// A mirror that has requests change both at once, and is kept so until the job is told to complete.
fn held(from: &Vbd, to: &Vbd) -> (Mirror, Job) {
    let mut mirror = Mirror::new(from.disk().clone(), to.disk().clone());
    (mirror.piece, mirror.granularity, mirror.limit) = (8192, 4096, None);
    mirror.patience = Some(0);
    let job = Job::new();
    job.hold();
    (mirror, job)
}

/// Wait until requests change both.
async fn changes_both(io: &Io, vbd: &Vbd) {
    while vbd.moves_untouched(Kind::Write, 0, 512) {
        io.next_turn().await;
    }
}

#[test]
fn a_guest_that_scribbles_in_its_buffer_does_not_make_them_differ() {
    let mut differ = 0;
    for seed in 0..40 {
        let mut pair = Pair::new(seed);
        let (from, to) = (vbd(raw(&pair.0)), vbd(raw(&pair.0)));
        let ((mirror, job), guest) = (held(&from, &to), from.fork());
        let (steers, over) = (job.clone(), Rc::new(Cell::new(false)));
        pair.spawn(0, async move |io| {
            mirror.run(&io, &job, Ending::Copy, nothing).await.expect("a copy");
        });
        let scribbles = over.clone();
        pair.spawn(1, async move |io| {
            changes_both(&io, &guest).await;
            let buffer = Rc::new(RefCell::new(io.buffer(BLOCK).expect("memory")));
            let (own, mem) = (buffer.clone(), buffer.borrow().mem());
            let turns = io.clone();
            io.spawn(async move {
                let mut value = 0;
                while !scribbles.get() {
                    own.borrow_mut().bytes_mut().fill(value);
                    value = value.wrapping_add(1);
                    turns.next_turn().await;
                }
            });
            for at in 0..8 {
                let (kind, len, offset) = (Kind::Write, BLOCK as u64, at * BLOCK as u64);
                let request = Request { kind, offset, len, mem, fua: false };
                guest.serve(&io, request).await.expect("written");
            }
            over.set(true);
            steers.complete();
        });
        pair.run();
        let found: Rc<Cell<bool>> = Rc::default();
        let tell = found.clone();
        pair.spawn(0, async move |io| {
            tell.set(read_all(&io, &from).await != read_all(&io, &to).await);
        });
        pair.run();
        differ += usize::from(found.get());
    }
    assert_eq!(differ, 0, "of 40");
}

/// However much guests write; told to leave the disk where it is it ends as a copy.
#[test]
fn a_mirror_that_has_been_ready_stays_so() {
    let mut pair = Pair::new(11);
    let (from, to) = (vbd(raw(&pair.0)), vbd(raw(&pair.0)));
    let ((mut mirror, job), guest) = (held(&from, &to), from.fork());
    (mirror.still_bytes, mirror.patience) = (0, Some(1));
    let seen: Arc<Mutex<Vec<Phase>>> = Arc::default();
    let (steers, notes) = (job.clone(), seen.clone());
    job.hear(move |phase| notes.lock().expect("the list").push(phase));
    pair.spawn(0, async move |io| {
        let end = mirror.run(&io, &job, Ending::Pivot, nothing).await.expect("a copy");
        assert!(end.is_none(), "the disk stays where it is");
    });
    pair.spawn(1, async move |io| {
        while steers.progress().phase != Phase::Ready {
            io.next_turn().await;
        }
        for round in 0..400u64 {
            write(&io, &guest, round % 16 * BLOCK as u64, round as u8).await.expect("written");
            io.sleep(1_000_000).await;
        }
        assert_eq!(steers.progress().phase, Phase::Ready);
        steers.leave();
    });
    pair.run();
    let seen = seen.lock().expect("the list").clone();
    let ready = seen.iter().position(|phase| *phase == Phase::Ready).expect("it was ready");
    assert_eq!(seen[ready..], [Phase::Ready, Phase::Ending, Phase::Done], "{seen:?}");
    let same: Rc<Cell<bool>> = Rc::default();
    let tell = same.clone();
    pair.spawn(0, async move |io| {
        tell.set(read_all(&io, &from).await == read_all(&io, &to).await);
    });
    pair.run();
    assert!(same.get(), "the target is no copy");
}

/// An image of zeros that finds no room for a write, now or ever.
#[derive(Clone)]
struct Stuck(Null);

impl Image for Stuck {
    fn info(&self) -> &Info {
        self.0.info()
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(self.clone())
    }

    fn map(&self, _: u64, len: u64) -> Extent<'_> {
        Extent::Zero { len, writable: false }
    }

    fn allocate<'a>(
        &'a self,
        io: &'a Io,
        _: u64,
        _: u64,
    ) -> Boxed<'a, Result<Option<Allocation<'a>>, Error>> {
        Box::pin(async move {
            loop {
                io.next_turn().await;
            }
        })
    }

    fn flush<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        self.0.flush(io)
    }

    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        self.0.discard(io, offset, len, mode)
    }

    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        self.0.status(io, offset, len)
    }

    fn current_size(&self) -> Result<u64, Error> {
        self.0.current_size()
    }
}

#[test]
fn a_dead_target_holds_a_guest_up_no_longer_than_it_may() {
    let mut pair = Pair::new(3);
    let (from, to) = (vbd(raw(&pair.0)), vbd(Box::new(Stuck(Null::new(SIZE, false)))));
    let ((mut mirror, job), guest) = (held(&from, &to), from.fork());
    let limit = 1_000_000_000;
    mirror.limit = Some(limit);
    let over = Rc::new(Cell::new(0));
    let (failed, answered) = (over.clone(), over.clone());
    pair.spawn(0, async move |io| {
        let end = mirror.run(&io, &job, Ending::Pivot, nothing).await;
        assert!(matches!(end, Err(MirrorError::Late { limit: 1_000_000_000 })), "{:?}", end.err());
        assert_eq!(job.progress().phase, Phase::Failed);
        failed.set(failed.get() + 1);
    });
    pair.spawn(1, async move |io| {
        changes_both(&io, &guest).await;
        // The second waits for the range that the first holds.
        let (second, turns, counts) = (guest.fork(), io.clone(), answered.clone());
        io.spawn(async move {
            write(&turns, &second, 0, 2).await.expect("the guest sees nothing of it");
            counts.set(counts.get() + 1);
        });
        write(&io, &guest, 0, 1).await.expect("the guest sees nothing of it");
        answered.set(answered.get() + 1);
        write(&io, &guest, 8192, 3).await.expect("nor later");
        assert!(guest.moves_untouched(Kind::Write, 0, 512), "the filter is gone");
        answered.set(answered.get() + 1);
    });
    // What is stuck never ends, so neither do these queues.
    for _ in 0..2000 {
        for tasks in &mut pair.1 {
            tasks.run_ready();
            if tasks.count() > 0 {
                let waits = tasks.io().in_flight() > 0;
                tasks.turn(waits).expect("the simulation runs");
            }
        }
        if over.get() == 4 {
            return;
        }
    }
    panic!("{} of 4 came to an end", over.get());
}

/// Whether a copy is as the disk is whose last writes were answered, and are on their way to a slow target, when it ends.
fn ends_as_the_disk_is(wrongs: Wrongs) -> bool {
    let mut pair = Pair::new(12);
    let (from, to) = (vbd(raw(&pair.0)), vbd(raw(&pair.0)));
    let ((mut mirror, job), guest) = (held(&from, &to), from.fork());
    (mirror.max_slowdown, mirror.wrongs) = (Some(20), wrongs);
    // Four blocks in a second; reads and flushes are not held.
    let mut limits = Limits::default();
    limits.bps.write.average = 4 * BLOCK as u64;
    to.set_limits(limits);
    let same = Rc::new(Cell::new(false));
    let (tell, steers, target) = (same.clone(), job.clone(), to.fork());
    pair.spawn(0, async move |io| {
        mirror.run(&io, &job, Ending::Copy, nothing).await.expect("a copy");
        tell.set(read_all(&io, &from).await == read_all(&io, &target).await);
    });
    pair.spawn(1, async move |io| {
        changes_both(&io, &guest).await;
        while steers.progress().phase != Phase::Ready {
            io.sleep(1_000_000).await;
        }
        for at in 0..8 {
            write(&io, &guest, at * BLOCK as u64, 7).await.expect("written");
        }
        steers.complete();
    });
    pair.run();
    same.get()
}

#[test]
fn what_is_on_its_way_at_the_end_is_in_the_copy() {
    assert!(ends_as_the_disk_is(Wrongs::default()));
    assert!(!ends_as_the_disk_is(Wrongs { hasty: true, ..Wrongs::default() }), "nothing is proved");
}

/// What guests write goes on to it while nobody waits, until it is given up.
#[test]
fn a_dead_target_holds_no_guest_up_that_is_not_to_wait_for_it() {
    let mut pair = Pair::new(9);
    let (from, to) = (vbd(raw(&pair.0)), vbd(Box::new(Stuck(Null::new(SIZE, false)))));
    let ((mut mirror, job), guest) = (held(&from, &to), from.fork());
    (mirror.limit, mirror.max_slowdown) = (Some(1_000_000_000), Some(20));
    let over = Rc::new(Cell::new(0));
    let (failed, answered) = (over.clone(), over.clone());
    pair.spawn(0, async move |io| {
        let end = mirror.run(&io, &job, Ending::Pivot, nothing).await;
        assert!(matches!(end, Err(MirrorError::Late { limit: 1_000_000_000 })), "{:?}", end.err());
        failed.set(failed.get() + 1);
    });
    pair.spawn(1, async move |io| {
        changes_both(&io, &guest).await;
        for round in 0..4 {
            // Twice where the one before is on its way for ever.
            write(&io, &guest, round % 2 * 8192, 1).await.expect("the guest sees nothing of it");
        }
        assert!(!guest.moves_untouched(Kind::Write, 0, 512), "they were answered before that");
        answered.set(answered.get() + 1);
    });
    // What is stuck never ends, so neither do these queues.
    for _ in 0..4000 {
        for tasks in &mut pair.1 {
            tasks.run_ready();
            if tasks.count() > 0 {
                let waits = tasks.io().in_flight() > 0;
                tasks.turn(waits).expect("the simulation runs");
            }
        }
        if over.get() == 2 {
            return;
        }
    }
    panic!("{} of 2 came to an end", over.get());
}

#[test]
fn a_dead_target_of_a_backup_loses_the_backup_and_no_write() {
    let mut pair = Pair::new(8);
    let (from, to) = (vbd(raw(&pair.0)), vbd(Box::new(Stuck(Null::new(SIZE, false)))));
    let over = Rc::new(Cell::new(false));
    let tell = over.clone();
    pair.spawn(0, async move |io| {
        write(&io, &from, 0, 1).await.expect("written");
        let mut backup = Backup::new(from.disk().clone(), to.disk().clone());
        (backup.granularity, backup.limit) = (4096, Some(1_000_000));
        let moment = backup.begin(&io, 1 << 40, nothing).await.expect("nothing is in flight");
        write(&io, &from, 0, 2).await.expect("the guest sees nothing of it");
        assert!(!moment.is_whole() && read_all(&io, &from).await[0] == 2);
        let (view, buffer) = (moment.fork(), io.buffer(512).expect("memory"));
        let end = view.read(&io, 0, buffer.mem()).await;
        assert!(matches!(end, Err(MirrorError::Lost)), "{:?}", end.err());
        tell.set(true);
    });
    // What is stuck never ends, so neither does its queue.
    for _ in 0..2000 {
        let tasks = &mut pair.1[0];
        tasks.run_ready();
        if over.get() {
            return;
        }
        let waits = tasks.io().in_flight() > 0;
        tasks.turn(waits).expect("the simulation runs");
    }
    panic!("the guest's write did not come to an end");
}

#[test]
fn the_kernels_memory_is_refused_before_anything_is_written() {
    let mut pair = Pair::new(4);
    let (from, to) = (vbd(raw(&pair.0)), vbd(raw(&pair.0)));
    let ((mirror, job), guest) = (held(&from, &to), from.fork());
    let steers = job.clone();
    pair.spawn(0, async move |io| {
        mirror.run(&io, &job, Ending::Copy, nothing).await.expect("a copy");
    });
    pair.spawn(1, async move |io| {
        assert!(guest.moves_untouched(Kind::Write, 0, 512));
        changes_both(&io, &guest).await;
        assert!(guest.moves_untouched(Kind::Read, 0, 512));
        let (kind, len, mem) = (Kind::Write, 512, Mem::of_kernel(0, 512));
        let request = Request { kind, offset: 0, len, mem, fua: false };
        assert_eq!(guest.serve(&io, request).await, Err(Error::Unsupported));
        write(&io, &guest, 0, 1).await.expect("as the driver does it then");
        steers.complete();
    });
    pair.run();
}

#[test]
fn a_job_pauses_goes_on_keeps_to_its_rate_and_is_cancelled() {
    let mut pair = Pair::new(5);
    let (from, to) = (vbd(raw(&pair.0)), vbd(raw(&pair.0)));
    let mut mirror = Mirror::new(from.disk().clone(), to.disk().clone());
    // Clocks of the simulation jump where nothing else is in flight.
    (mirror.piece, mirror.requests, mirror.limit) = (4096, 1, None);
    let job = Job::new();
    job.pause();
    // Two seconds for all of it.
    job.set_rate(Some(SIZE / 2));
    let (steers, looks) = (job.clone(), from.fork());
    pair.spawn(0, async move |io| {
        let began = io.now();
        mirror.run(&io, &job, Ending::Copy, nothing).await.expect("a copy");
        let took = io.now() - began;
        assert!((1_500_000_000..6_000_000_000).contains(&took), "{took} ns");
        let progress = job.progress();
        assert_eq!((progress.phase, progress.total), (Phase::Done, progress.offset));
        assert!(progress.offset >= SIZE && progress.rate > 0, "{progress:?}");

        let again = Job::new();
        again.pause();
        let cancels = again.clone();
        let turns = io.clone();
        io.spawn(async move {
            turns.next_turn().await;
            cancels.cancel();
        });
        let mirror = Mirror::new(looks.disk().clone(), to.disk().clone());
        let end = mirror.run(&io, &again, Ending::Pivot, nothing).await;
        assert!(matches!(end, Err(MirrorError::Cancelled)), "{:?}", end.err());
    });
    pair.spawn(1, async move |io| {
        write(&io, &from, 0, 1).await.expect("written");
        for _ in 0..20 {
            io.next_turn().await;
        }
        let progress = steers.progress();
        assert_eq!((progress.phase, progress.offset), (Phase::Copying, 0));
        assert!(progress.paused && progress.total == SIZE, "{progress:?}");
        steers.resume();
    });
    pair.run();
}

#[test]
fn what_cannot_end_well_fails_and_leaves_the_disk_as_it_was() {
    let mut pair = Pair::new(6);
    let from = vbd(raw(&pair.0));
    let (target, next) = (raw(&pair.0), raw(&pair.0));
    pair.spawn(0, async move |io| {
        write(&io, &from, 0, 7).await.expect("written");
        let mirror = |to: Box<dyn Image>| Mirror::new(from.disk().clone(), vbd(to));
        let job = Job::new();
        for size in [SIZE / 2, 2 * SIZE] {
            let other = mirror(Box::new(Null::new(size, false)));
            let end = other.run(&io, &job, Ending::Pivot, nothing).await;
            assert!(matches!(end, Err(MirrorError::Size { .. })), "{:?}", end.err());
        }
        let larger = mirror(Box::new(Null::new(2 * SIZE, false)));
        assert!(matches!(larger.run(&io, &job, Ending::Copy, nothing).await, Ok(None)));
        let unwritten = mirror(Box::new(Null::new(SIZE, true)));
        let end = unwritten.run(&io, &job, Ending::Copy, nothing).await;
        assert!(matches!(end, Err(MirrorError::ReadOnly)), "{:?}", end.err());

        let refuses = async || Err::<(), _>("the register is full");
        let end = mirror(target.fork()).run(&io, &job, Ending::Pivot, refuses).await;
        assert!(matches!(&end, Err(MirrorError::Hook(why)) if why.to_string().contains("full")));
        write(&io, &from, 0, 8).await.expect("written");
        assert!(read_all(&io, &vbd(target.fork())).await[0] == 7, "the disk is the former image");

        // Another image takes its place before the job does.
        let held = Job::new();
        held.hold();
        let (steers, turns, disk) = (held.clone(), io.clone(), from.fork());
        io.spawn(async move {
            while steers.progress().phase != Phase::Ready {
                turns.next_turn().await;
            }
            let still = disk.quiesce(&turns, 1 << 40).await.expect("nothing is in flight");
            still.replace(next).expect("as large");
            steers.complete();
        });
        let end = mirror(target).run(&io, &held, Ending::Pivot, nothing).await;
        assert!(matches!(end, Err(MirrorError::Replaced)), "{:?}", end.err());
    });
    pair.run();
}

/// A raw image in a file that can grow.
fn file(folder: &std::path::Path, name: &str) -> Box<dyn Image> {
    let path = folder.join(name);
    std::fs::File::create(&path).and_then(|file| file.set_len(SIZE)).expect("a file");
    let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
    Box::new(Raw::open(path.as_path(), &options).expect("opened"))
}

#[test]
fn a_disk_that_grows_takes_its_copy_with_it_on_threads_of_their_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let (from, to) = (vbd(file(folder.path(), "from")), vbd(file(folder.path(), "to")));
    let (disk, target) = (from.disk().clone(), to.disk().clone());
    let run = |work: Box<dyn FnOnce(&mut Tasks)>| {
        let mut tasks = Tasks::new(ringtap_io::reactor().expect("a reactor"));
        work(&mut tasks);
    };
    let job = Job::new();
    job.hold();
    let over = Arc::new(AtomicBool::new(false));
    let former = std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (disk, over) = (disk.clone(), over.clone());
            scope.spawn(move || {
                run(Box::new(move |tasks| {
                    let (io, guest) = (tasks.io().clone(), disk.fork());
                    let work = async move {
                        let mut round = 0u64;
                        while !over.load(SeqCst) || round % 64 != 0 {
                            round += 1;
                            let blocks = disk.size() / BLOCK as u64;
                            let at = (round * 7 + thread) % blocks * BLOCK as u64;
                            write(&io, &guest, at, round as u8).await.expect("written");
                        }
                    };
                    tasks.block_on(work).expect("the ring works");
                }));
            });
        }
        let (steers, grows, follows) = (job.clone(), disk.clone(), target.clone());
        scope.spawn(move || {
            while steers.progress().phase != Phase::Ready {
                std::thread::yield_now();
            }
            grows.grow(2 * SIZE).expect("larger");
            while follows.size() < 2 * SIZE {
                std::thread::yield_now();
            }
            steers.complete();
        });
        let mut tasks = Tasks::new(ringtap_io::reactor().expect("a reactor"));
        let io = tasks.io().clone();
        let mut mirror = Mirror::new(disk.clone(), target.clone());
        (mirror.piece, mirror.granularity, mirror.patience) = (8192, 4096, Some(0));
        let work = async move {
            let end = mirror.run(&io, &job, Ending::Pivot, nothing).await.expect("a pivot");
            over.store(true, SeqCst);
            end.expect("the former image")
        };
        tasks.block_on(work).expect("the ring works")
    });
    assert_eq!((former.info().format, disk.size()), ("raw", 2 * SIZE));
    drop(former);
    let (mut tasks, now) = (Tasks::new(ringtap_io::reactor().expect("a reactor")), disk.fork());
    let io = tasks.io().clone();
    let bytes = tasks.block_on(async move { read_all(&io, &now).await }).expect("the ring works");
    let file = std::fs::read(folder.path().join("to")).expect("the target");
    assert_eq!(file.len(), bytes.len());
    assert!(file == bytes, "the target is the disk");
}

#[test]
fn what_a_disk_grows_by_is_copied_over_what_a_larger_target_held() {
    let folder = tempfile::tempdir().expect("a folder");
    let (from, to) = (vbd(file(folder.path(), "from")), folder.path().join("to"));
    std::fs::write(&to, vec![0xee; 3 * SIZE as usize]).expect("a larger file");
    let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
    let target = vbd(Box::new(Raw::open(to.as_path(), &options).expect("opened")));
    let mut tasks = Tasks::new(ringtap_io::reactor().expect("a reactor"));
    let io = tasks.io().clone();
    let work = async move {
        let job = Job::new();
        job.hold();
        let (steers, turns, disk) = (job.clone(), io.clone(), from.disk().clone());
        io.spawn(async move {
            while steers.progress().phase != Phase::Ready {
                turns.sleep(1000).await;
            }
            disk.grow(2 * SIZE).expect("larger");
            steers.complete();
        });
        let mirror = Mirror::new(from.disk().clone(), target);
        mirror.run(&io, &job, Ending::Copy, nothing).await.expect("a copy");
    };
    tasks.block_on(work).expect("the ring works");
    let copy = std::fs::read(&to).expect("the target");
    assert!(copy[..2 * SIZE as usize].iter().all(|byte| *byte == 0));
}
