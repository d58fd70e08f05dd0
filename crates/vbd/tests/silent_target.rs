//! Targets of copies that are slow or fail as they are made stable, or answer nothing any more.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use ringtap_image::{
    Allocation, Boxed, CacheMode, Container, Discard, Extent, Image, Info, Raw, Status, Traits,
};
use ringtap_io::{Io, Tasks};
use ringtap_sim::{Disk, Sim};
use ringtap_vbd::{
    Action, Backup, Ending, Error, Job, Mirror, MirrorError, OnError, OnErrors, Trouble, Vbd,
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
    /// It fails, and those after it do not: what was written is lost.
    Failing,
}

/// An image whose first flush is not as others.
struct Held {
    image: Box<dyn Image>,
    target: Target,
    flushed: Arc<AtomicBool>,
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
        Box::new(Held { image, target: self.target, flushed })
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
                    Target::Failing => return Err(Error::Os(libc::EIO)),
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

/// How a job ends whose target is like that, and after how many seconds.
fn ended<F>(target: Target, limit: u64, job: F) -> (Result<(), MirrorError>, u64)
where
    F: AsyncFnOnce(&Io, Vbd, Vbd, u64) -> Result<(), MirrorError> + 'static,
{
    let disk = Disk::new(512);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 5)));
    let raw = || -> Box<dyn Image> {
        let (request_alignment, memory_alignment) = (512, 512);
        let traits = Traits { request_alignment, memory_alignment, ..Traits::FILE };
        Box::new(Raw::new(Container::simulated(disk.add_file(SIZE, 512), SIZE, traits)))
    };
    let from = Vbd::new(raw(), CacheMode::None);
    let flushed = Arc::<AtomicBool>::default();
    let to = Held { image: raw(), target, flushed: flushed.clone() };
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
        let end = job(&io, from, to, limit).await;
        tell.set(Some((end, (io.now() - began) / SECOND)));
    });
    // What is silent never ends.
    for _ in 0..10_000 {
        tasks.run_ready();
        if let Some(end) = end.take() {
            return end;
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

/// What was written is lost, perhaps: no policy has it made stable once more, which would go well.
#[test]
fn a_target_that_cannot_be_made_stable_ends_the_job_whatever_that_is_told_and_it_is_heard() {
    let on_errors = OnErrors { source: OnError::Report, target: OnError::Ignore };
    let heard = || {
        let (job, heard) = (Job::new(), Arc::<Mutex<Vec<Trouble>>>::default());
        let own = heard.clone();
        job.hear_trouble(move |trouble| own.lock().expect("nobody panics").push(trouble));
        (job, heard)
    };
    let still = async || Ok::<(), Error>(());
    let (job, backup_heard) = heard();
    let backup =
        ended(Target::Failing, SECOND, async move |io: &Io, from: Vbd, to: Vbd, _: u64| {
            let backup = Backup::new(from.disk().clone(), to.disk().clone());
            let moment = Backup { on_errors, ..backup }.begin(io, SECOND, still).await?;
            moment.save(io, &job).await
        });
    let (job, mirror_heard) = heard();
    let mirror =
        ended(Target::Failing, SECOND, async move |io: &Io, from: Vbd, to: Vbd, _: u64| {
            let mirror = Mirror::new(from.disk().clone(), to.disk().clone());
            let mirror = Mirror { on_errors, ..mirror };
            mirror.run(io, &job, Ending::Copy, still).await.map(drop)
        });
    for (end, heard) in [(backup.0, backup_heard), (mirror.0, mirror_heard)] {
        assert!(matches!(end, Err(MirrorError::Flush { .. })), "{end:?}");
        let (write, error, action) = (true, Error::Os(libc::EIO), Action::Report);
        assert_eq!(*heard.lock().expect("nobody panics"), [Trouble { write, error, action }]);
    }
}

#[test]
fn a_target_that_is_slow_to_be_made_stable_is_waited_for_and_one_that_is_silent_is_not() {
    // No less than half a minute, and longer where guests may wait for long.
    for (limit, seconds) in [(SECOND, 30), (20 * SECOND, 120)] {
        for (job, end) in [
            ("backup", ended(Target::Silent, limit, backup)),
            ("mirror", ended(Target::Silent, limit, mirror)),
        ] {
            let (end, after) = end;
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
            let (end, after) = end;
            end.unwrap_or_else(|error| panic!("{job}: {error}"));
            assert!((600..610).contains(&after), "{job}: {after} s");
        }
    }
}
