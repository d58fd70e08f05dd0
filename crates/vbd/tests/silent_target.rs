//! Targets of copies that are slow or fail as they are made stable, or answer nothing any more.

#[path = "common/container.rs"]
mod container;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use ringtap_image::{Allocation, Boxed, CacheMode, Discard, Extent, Image, Info, Status};
use ringtap_io::{File, Io, Tasks};
use ringtap_sim::{Disk, Sim};
use ringtap_vbd::{
    Action, Backup, Ending, Error, Job, Kind, Mirror, MirrorError, OnError, OnErrors, Phase,
    Request, Scratch, Trouble, Vbd, Wrongs,
};

const SIZE: u64 = 64 << 10;
const SECOND: u64 = 1_000_000_000;

/// What a flush finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// It takes ten minutes, once.
    Slow,
    /// The same, and meanwhile the disk is paused.
    Paused,
    /// It never ends, and nor does anything after it.
    Silent,
    /// It fails with that, and those after it do not: what was written is lost.
    Failing(Error),
}

/// An image whose first flush is not as others.
struct Held {
    image: Box<dyn Image>,
    target: Target,
    flushed: Arc<AtomicBool>,
    /// Where it lies, for what is lost.
    disk: Disk,
    file: File,
}

impl Held {
    fn is_silent(&self) -> bool {
        self.target == Target::Silent && self.flushed.load(SeqCst)
    }
}

impl Image for Held {
    fn info(&self) -> &Info {
        self.image.info()
    }

    fn fork(&self) -> Box<dyn Image> {
        let (image, flushed) = (self.image.fork(), self.flushed.clone());
        let (target, disk, file) = (self.target, self.disk.clone(), self.file);
        Box::new(Held { image, target, flushed, disk, file })
    }

    fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        if self.is_silent() { Extent::NotLoaded } else { self.image.map(offset, len) }
    }

    fn load<'a>(&'a self, _: &'a Io, _: u64) -> Boxed<'a, Result<(), Error>> {
        Box::pin(std::future::pending())
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
        Box::pin(async move {
            if !self.flushed.swap(true, SeqCst) {
                match self.target {
                    Target::Slow | Target::Paused => io.sleep(600 * SECOND).await,
                    Target::Silent => std::future::pending().await,
                    Target::Failing(error) => {
                        self.disk.poke(self.file, 0, &[0xee; SIZE as usize]);
                        return Err(error);
                    }
                }
            }
            self.image.flush(io).await
        })
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

/// How a job ends whose target is like that, after how many seconds, and whether that is a copy.
fn ended<F>(target: Target, limit: u64, job: F) -> (Result<(), MirrorError>, u64, bool)
where
    F: AsyncFnOnce(&Io, Vbd, Vbd, u64) -> Result<(), MirrorError> + 'static,
{
    ended_beside(target, async move |io: &Io, from: Vbd, to: Vbd, _: Vbd| {
        job(io, from, to, limit).await
    })
}

/// The same of one that has a third disk, of zeros.
fn ended_beside<F>(target: Target, job: F) -> (Result<(), MirrorError>, u64, bool)
where
    F: AsyncFnOnce(&Io, Vbd, Vbd, Vbd) -> Result<(), MirrorError> + 'static,
{
    let disk = Disk::new(512);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 5)));
    let raw = |file| container::raw(&disk, file);
    let [source, file, third] = [(); 3].map(|()| disk.add_file(SIZE, 512));
    disk.poke(source, 0, &[1; SIZE as usize]);
    let from = Vbd::new(raw(source), CacheMode::None);
    let third = Vbd::new(raw(third), CacheMode::None);
    let flushed = Arc::<AtomicBool>::default();
    let to = Held { image: raw(file), target, flushed: flushed.clone(), disk: disk.clone(), file };
    let to = Vbd::new(Box::new(to), CacheMode::None);
    if target == Target::Paused {
        let (disk, io) = (to.disk().clone(), tasks.io().clone());
        tasks.spawn(async move {
            while !flushed.load(SeqCst) {
                io.sleep(SECOND / 100).await;
            }
            disk.pause();
            io.sleep(604 * SECOND).await;
            disk.go_on();
        });
    }
    let end: Rc<Cell<Option<_>>> = Rc::default();
    let (tell, io) = (end.clone(), tasks.io().clone());
    tasks.spawn(async move {
        let began = io.now();
        let end = job(&io, from, to, third).await;
        tell.set(Some((end, (io.now() - began) / SECOND)));
    });
    // What is silent never ends.
    for _ in 0..10_000 {
        tasks.run_ready();
        if let Some((end, after)) = end.take() {
            let mut copy = [0; SIZE as usize];
            disk.peek(file, 0, &mut copy);
            return (end, after, copy == [1; SIZE as usize]);
        }
        let waits = tasks.io().in_flight() > 0;
        tasks.turn(waits).expect("the simulation runs");
    }
    panic!("it does not end");
}

async fn backup(io: &Io, from: Vbd, to: Vbd, limit: u64) -> Result<(), MirrorError> {
    let backup =
        Backup { limit: Some(limit), ..Backup::new(from.disk().clone(), to.disk().clone()) };
    let still = async || Ok::<(), Error>(());
    backup.begin(io, SECOND, still).await?.save(io, &Job::new()).await
}

async fn mirror(io: &Io, from: Vbd, to: Vbd, limit: u64) -> Result<(), MirrorError> {
    let mut mirror = Mirror::new(from.disk().clone(), to.disk().clone());
    mirror.limit = Some(limit);
    let still = async || Ok::<(), Error>(());
    mirror.run(io, &Job::new(), Ending::Copy, still).await.map(drop)
}

const EIO: Error = Error::Os(libc::EIO);

/// A job of which is heard what it meets; it is resumed when it pauses.
fn heard(io: &Io) -> (Job, Arc<Mutex<Vec<Trouble>>>) {
    let (job, heard) = (Job::new(), Arc::<Mutex<Vec<Trouble>>>::default());
    let own = heard.clone();
    job.hear_trouble(move |trouble| own.lock().expect("nobody panics").push(trouble));
    let (own, resumed) = (io.clone(), job.clone());
    io.spawn_beside(async move {
        while !matches!(resumed.progress().phase, Phase::Done | Phase::Failed) {
            own.sleep(SECOND).await;
            if resumed.progress().paused {
                resumed.resume();
            }
        }
    });
    (job, heard)
}

type End = (Result<(), MirrorError>, u64, bool);

/// How a mirror ends whose target fails so, and what is heard of it.
fn mirrored(error: Error, target: OnError, wrongs: Wrongs) -> (End, Vec<Trouble>) {
    let told = Rc::new(RefCell::new(None));
    let own = told.clone();
    let end =
        ended(Target::Failing(error), SECOND, async move |io: &Io, from: Vbd, to: Vbd, _: u64| {
            let (job, heard) = heard(io);
            *own.borrow_mut() = Some(heard);
            let mirror = Mirror::new(from.disk().clone(), to.disk().clone());
            let on_errors = OnErrors { source: OnError::Report, target };
            let mirror = Mirror { on_errors, wrongs, ..mirror };
            mirror.run(io, &job, Ending::Copy, async || Ok::<(), Error>(())).await.map(drop)
        });
    let heard = told.take().expect("it has begun");
    let heard = heard.lock().expect("nobody panics").clone();
    (end, heard)
}

#[test]
fn what_a_failed_flush_of_a_mirrors_target_may_have_lost_is_written_again() {
    let trouble = |error, action| vec![Trouble { write: true, error, action }];
    for (error, on, action) in [
        (EIO, OnError::Stop, Action::Stop),
        (EIO, OnError::Ignore, Action::Ignore),
        (Error::Full, OnError::StopWhereFull, Action::Stop),
    ] {
        let ((end, _, same), heard) = mirrored(error, on, Wrongs::default());
        end.unwrap_or_else(|why| panic!("{on:?}: {why}"));
        assert_eq!((same, heard), (true, trouble(error, action)), "{on:?}");
    }
    for (error, on) in [
        (EIO, OnError::Report),
        (EIO, OnError::StopWhereFull),
        // Through the page cache no later flush is believed.
        (Error::Lost, OnError::Ignore),
    ] {
        let ((end, ..), heard) = mirrored(error, on, Wrongs::default());
        assert!(matches!(end, Err(MirrorError::Flush { .. })), "{end:?}");
        assert_eq!(heard, trouble(error, Action::Report), "{on:?}");
    }
    // It would be seen if it were not.
    let wrongs = Wrongs { trusts: true, ..Wrongs::default() };
    let ((end, _, same), _) = mirrored(EIO, OnError::Stop, wrongs);
    assert!(end.is_ok() && !same);
}

/// What is left for another job is marked, too, where the target cannot be made stable.
#[test]
fn a_mirror_that_is_left_leaves_what_a_failed_flush_may_have_lost() {
    let (end, _, same) =
        ended(Target::Failing(EIO), SECOND, async |io: &Io, from: Vbd, to: Vbd, _: u64| {
            let still = async || Ok::<(), Error>(());
            let mirror = || Mirror::new(from.disk().clone(), to.disk().clone());
            let first = Job::new();
            first.hold();
            let (own, job) = (io.clone(), first.clone());
            io.spawn_beside(async move {
                while job.progress().phase != Phase::Ready {
                    own.sleep(SECOND / 100).await;
                }
                job.cancel_for_next();
            });
            let left = mirror().run(io, &first, Ending::Copy, still).await;
            assert!(matches!(left, Err(MirrorError::Cancelled)));
            let next = Job::new();
            next.go_on_from(first.take_unfinished().expect("it is left"));
            mirror().run(io, &next, Ending::Copy, still).await.map(drop)
        });
    end.expect("it goes on");
    assert!(same);
}

/// How a backup ends whose target fails so, while a guest changes the first half of the disk, or none of it, with scratch or
/// without, and what is heard of it.
fn saved(
    error: Error,
    target: OnError,
    (writes, sets_aside): (bool, bool),
    wrongs: Wrongs,
) -> (End, Vec<Trouble>) {
    let told = Rc::new(RefCell::new(None));
    let own = told.clone();
    let job = async move |io: &Io, from: Vbd, to: Vbd, scratch: Vbd| {
        let (job, heard) = heard(io);
        *own.borrow_mut() = Some(heard);
        let on_errors = OnErrors { source: OnError::Report, target };
        let backup = Backup::new(from.disk().clone(), to.disk().clone());
        let backup = Backup { on_errors, granularity: 4096, wrongs, ..backup };
        let still = async || Ok::<(), Error>(());
        let mut moment = backup.begin(io, SECOND, still).await?;
        if sets_aside {
            // Too little room for all of it, unless what the target has for good makes some.
            moment = moment.with_scratch(Scratch { disk: scratch.disk().clone(), room: SIZE / 4 });
        }
        let (own, guest) = (io.clone(), from.disk().fork());
        io.spawn_beside(async move {
            for at in 0..if writes { SIZE / 2 / 4096 } else { 0 } {
                let buffer = own.buffer(4096).expect("memory");
                let (kind, mem) = (Kind::Write, buffer.mem());
                let request = Request { kind, offset: at * 4096, len: 4096, mem, fua: false };
                guest.serve(&own, request).await.expect("the guest notices nothing");
            }
        });
        moment.save(io, &job).await
    };
    let end = ended_beside(Target::Failing(error), job);
    let heard = told.take().expect("it has begun");
    let heard = heard.lock().expect("nobody panics").clone();
    (end, heard)
}

/// As far as the disk still holds it, or scratch does.
#[test]
fn what_a_failed_flush_of_a_backups_target_may_have_lost_is_saved_again() {
    let trouble = |error, action| vec![Trouble { write: true, error, action }];
    for (error, on, action) in [
        (EIO, OnError::Stop, Action::Stop),
        (EIO, OnError::Ignore, Action::Ignore),
        (Error::Full, OnError::StopWhereFull, Action::Stop),
    ] {
        for how in [(false, false), (false, true), (true, true)] {
            let ((end, _, same), heard) = saved(error, on, how, Wrongs::default());
            end.unwrap_or_else(|why| panic!("{on:?}, {how:?}: {why}"));
            assert_eq!((same, heard), (true, trouble(error, action)), "{on:?}, {how:?}");
        }
        let ((end, ..), heard) = saved(error, on, (true, false), Wrongs::default());
        let gone = |why: &MirrorError| matches!(why, MirrorError::Gone { bytes, .. } if *bytes > 0);
        assert!(end.as_ref().is_err_and(gone), "{on:?}: {end:?}");
        assert_eq!(heard, trouble(error, Action::Report), "{on:?}");
    }
    for (error, on) in [
        (EIO, OnError::Report),
        (EIO, OnError::StopWhereFull),
        // Through the page cache no later flush is believed.
        (Error::Lost, OnError::Ignore),
    ] {
        let ((end, ..), heard) = saved(error, on, (false, true), Wrongs::default());
        assert!(matches!(end, Err(MirrorError::Flush { .. })), "{end:?}");
        assert_eq!(heard, trouble(error, Action::Report), "{on:?}");
    }
    // It would be seen if it were not.
    let wrongs = Wrongs { trusts: true, ..Wrongs::default() };
    let ((end, _, same), _) = saved(EIO, OnError::Stop, (true, true), wrongs);
    assert!(end.is_ok() && !same);
}

#[test]
fn a_target_that_is_slow_to_be_made_stable_is_waited_for_and_one_that_is_silent_is_not() {
    // No less than half a minute, and longer where guests may wait for long.
    for (limit, seconds) in [(SECOND, 30), (20 * SECOND, 120)] {
        for (job, end) in [
            ("backup", ended(Target::Silent, limit, backup)),
            ("mirror", ended(Target::Silent, limit, mirror)),
        ] {
            let (end, after, _) = end;
            let Err(MirrorError::Silent { limit: told }) = end else { panic!("{job}: {end:?}") };
            assert_eq!(told, seconds * SECOND, "{job}");
            assert!((seconds..seconds + limit / SECOND + 2).contains(&after), "{job}: {after} s");
        }
        for (job, end) in [
            ("backup", ended(Target::Slow, limit, backup)),
            ("mirror", ended(Target::Slow, limit, mirror)),
            ("backup into a disk that is paused", ended(Target::Paused, limit, backup)),
            ("mirror into a disk that is paused", ended(Target::Paused, limit, mirror)),
        ] {
            let (end, after, _) = end;
            end.unwrap_or_else(|error| panic!("{job}: {error}"));
            assert!((600..610).contains(&after), "{job}: {after} s");
        }
    }
}
