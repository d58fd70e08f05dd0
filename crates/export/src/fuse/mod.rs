//! FUSE: the disk as one plain file, for loop devices and for programs that know files only.
//!
//! It is mounted over a regular file, as qemu-storage-daemon does, not shown inside a directory: the
//! name is the user's, there is nothing to look up or to list, and the file's node is the mount's
//! own, which the kernel never forgets.
//!
//! The messages are read here, from /dev/fuse, and not by a library, because of where a write's
//! bytes land. A library reads a message into one buffer: the bytes lie 80 bytes off a page, and
//! O_DIRECT wants them copied. Here header and bytes are read apart, the bytes at a page, by the
//! very thread that writes them to the image. FUSE over io_uring (Linux 6.14) would save a system
//! call a request; distributions have it off (`fuse.enable_uring`), so it is not used.
//!
//! Source: Linux, include/uapi/linux/fuse.h and Documentation/filesystems/fuse.rst.

mod helper;
mod mount;
mod queue;
mod request;
mod shown;
mod table;
#[doc(hidden)]
pub mod testing;
mod thread;
mod wire;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ringtap_io::OpenFile;
use ringtap_vbd::Disk;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::process::{getegid, geteuid};

pub use self::mount::{Mount, Passed, keep_mounts, resolve};
use self::request::Facts;
use self::shown::Shown;
pub(crate) use self::table::{Entry as MountEntry, mounts};
use self::thread::{End, QueueThread};
use crate::Stop;

/// Mount a disk over a file, and take it off again: what a broker does for a server that may not.
pub fn mount_by(path: &Path, image: &Path, read_only: bool) -> io::Result<OwnedFd> {
    mount::mount_on_file(path, image, read_only).map_err(|error| match error {
        Error::Os { source, .. } => source,
        Error::Helper { why, .. } => io::Error::other(why),
        error => io::Error::other(error.to_string()),
    })
}

pub use self::mount::take_off_here as unmount_by;

/// Bytes of one read or write, at most. The kernel's own limit, unless it is told otherwise.
const MOST: usize = 1 << 20;
/// Requests in flight that nobody waits for at once, of loop devices and asynchronous I/O: the kernel keeps others back.
const BACKGROUND: u16 = 256;
/// So many of other kinds have a place on each thread whatever those wait for: a `stat` is answered though the disk is paused.
const BESIDE: u16 = 16;
/// More threads than this only wake each other: the kernel has one list of requests for all.
const MOST_THREADS: usize = 4;

/// How a disk is shown as a file.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether it is mounted read-only.
    pub read_only: bool,
    /// The file's permissions.
    pub mode: u32,
    /// Whether writing past its end makes the image larger.
    pub growable: bool,
    /// The most threads that serve it.
    pub queues: u16,
}

/// Why there is no file to serve, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something else than a regular file stands there.
    #[error(
        "{} is a {found}: --fuse takes a regular file to mount over, or a path where none is yet",
        path.display()
    )]
    Kind {
        /// The path.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// It would hide the image itself.
    #[error("{} is the image itself: mount over another file", path.display())]
    Image {
        /// The path.
        path: PathBuf,
    },
    /// It would hide a file that the disk consists of.
    #[error("{} lies below the disk, or has its data: mount over another file", path.display())]
    Below {
        /// The path.
        path: PathBuf,
    },
    /// Something is mounted there.
    #[error("{} is in use: {found} is mounted on it; unmount it, or choose another path", path.display())]
    Busy {
        /// The path.
        path: PathBuf,
        /// What is mounted.
        found: String,
    },
    /// A system call failed.
    #[error("cannot {tried} {}: {source}{hint}", path.display())]
    Os {
        /// What was tried.
        tried: &'static str,
        /// On what.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
        /// What to do, with the mark that joins it.
        hint: &'static str,
    },
    /// The mount helper refused.
    #[error("cannot mount over {} as this user: {why}", path.display())]
    Helper {
        /// The path.
        path: PathBuf,
        /// What it said.
        why: String,
    },
    /// The kernel and this program do not understand each other.
    #[error("cannot come to terms with the kernel over {}: {why}", path.display())]
    Init {
        /// The path.
        path: PathBuf,
        /// What happened.
        why: String,
    },
    /// A thread could not be started, or its ring failed.
    #[error("cannot serve {}: {source}", path.display())]
    Serve {
        /// The path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A panic has stopped the disk.
    #[error("the disk of {} was stopped by a panic", path.display())]
    Stopped {
        /// The path.
        path: PathBuf,
    },
    /// Somebody took it off.
    #[error("{} was unmounted by somebody else", path.display())]
    Unmounted {
        /// The path.
        path: PathBuf,
    },
}

/// Serves a device as a file.
pub struct Server {
    path: PathBuf,
    mount: Mutex<Mount>,
    /// One of the mount's descriptors, to tell the kernel something by.
    tell: Mutex<Option<Arc<OpenFile>>>,
    vbd: Disk,
    options: Options,
    /// What is shown of it that is not fixed; and since when it is so, where another process has said so.
    shown: Mutex<Option<Arc<Shown>>>,
    modified: Mutex<Option<Duration>>,
    /// Whether the file under it was made for it.
    made: bool,
    /// Which of all mounts it is.
    number: Option<mount::Number>,
    /// Whether the file goes on elsewhere once this stops.
    handing_over: AtomicBool,
    /// Whether a thread asks for the file's size, and is to ask again.
    asking: Arc<Mutex<Option<bool>>>,
}

/// How long the kernel's question for a new size is waited for.
const ASKED: Duration = Duration::from_millis(500);

impl Server {
    /// A server for what is mounted already.
    pub fn new(mount: Mount, vbd: Disk, options: Options) -> Server {
        let (path, made, number) = (mount.path().to_owned(), mount.is_made(), mount.number());
        let (shown, modified, vbd) = (Mutex::default(), Mutex::default(), vbd.apart());
        let (mount, tell, handing_over) =
            (Mutex::new(mount), Mutex::default(), AtomicBool::new(false));
        let asking = Arc::default();
        Server {
            path,
            mount,
            tell,
            vbd,
            options,
            shown,
            modified,
            made,
            number,
            handing_over,
            asking,
        }
    }

    /// Before it serves: its bytes changed then, the last time.
    pub fn set_modified(&self, modified: Duration) {
        *lock(&self.modified) = Some(modified);
    }

    /// When its bytes changed the last time, as `stat` shows it.
    pub fn modified(&self) -> Option<Duration> {
        lock(&self.shown).as_ref().map(|shown| shown.modified(&self.vbd))
    }

    /// From now on the word to stop leaves the file mounted, for another process or, once this is taken back, for this
    /// one.
    pub fn hand_over(&self, wanted: bool) {
        self.handing_over.store(wanted, SeqCst);
    }

    /// While it serves: what another process needs to go on.
    pub fn pass(&self) -> io::Result<Option<Passed>> {
        let tell = lock(&self.tell).clone();
        let Some(device) = tell else { return Ok(None) };
        let device = device.as_fd().try_clone_to_owned()?;
        // Its lock is held by the thread that serves.
        Ok(Some(Passed { device, made: self.made }))
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it makes its disk larger.
    pub fn grows(&self) -> bool {
        self.options.growable
    }

    /// Serve until `stop` is raised, or the disk is stopped by a panic; then unmount, drain and leave. The
    /// last flush is the caller's.
    pub fn serve(&self, stop: &Stop) -> Result<(), Error> {
        let stopped = || Error::Stopped { path: self.path.clone() };
        let end = self.vbd.health().contain(|| self.serve_until(stop));
        match (end, self.vbd.health().failure()) {
            (Ok(end), None) => end,
            _ => Err(stopped()),
        }
    }

    /// The process ends and does not wait for it: have nothing of it stay where it is mounted.
    pub fn leave_behind(&self) {
        mount::leave_nothing(&self.path, self.number, self.made);
    }

    fn serve_until(&self, stop: &Stop) -> Result<(), Error> {
        let failed = |source| Error::Serve { path: self.path.clone(), source };
        let mut mount = self.mount.lock().unwrap_or_else(PoisonError::into_inner);
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let count = cpus.min(MOST_THREADS).min(self.options.queues.max(1).into());
        let devices = mount.take_devices(count)?;
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
        let ended = Arc::new(OpenFile::new(eventfd));
        let (failure, _listening) = Stop::at_failure(&self.vbd).map_err(failed)?;
        let facts = self.facts(mount.image());
        if let Some(modified) = lock(&self.modified).take() {
            facts.shown.set_modified(&self.vbd, Some(modified));
        }
        *lock(&self.shown) = Some(facts.shown.clone());
        let (mut threads, of) = (vec![], devices.len());
        let mut started = Ok(());
        for (index, device) in devices.into_iter().enumerate() {
            if index == 0 {
                let again = device.try_clone().map_err(failed)?;
                *self.tell.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some(Arc::new(OpenFile::new(again)));
            }
            let (device, vbd) = (OpenFile::new(device), self.vbd.fork());
            vbd.serves("fuse", self.path.display().to_string(), index as u16);
            match QueueThread::start((index, of), device, vbd, facts.clone(), ended.clone()) {
                Ok(thread) => threads.push(thread),
                Err(error) => started = Err(error),
            }
        }
        let waited = started.and_then(|()| wait([stop, &failure], &ended));
        let goes_on = self.handing_over.load(SeqCst) && waited.is_ok() && !failure.is_raised();
        if goes_on {
            threads.iter().for_each(QueueThread::stop);
            let device = lock(&self.tell).take();
            let ends: Result<Vec<_>, _> = threads.into_iter().map(QueueThread::join).collect();
            ends.map_err(failed)?;
            if let Some(device) = device {
                mount.give_back(device.as_fd().try_clone_to_owned().map_err(failed)?);
            }
            return Ok(());
        }
        // While they serve: those who use the file may have to be heard before they let go of it.
        match mount.unmount() {
            Ok(true) => tracing::warn!(
                "{} was in use when it was unmounted: whoever has it open gets errors from now on",
                self.path.display()
            ),
            Ok(false) => {}
            Err(error) => tracing::warn!("cannot unmount {}: {error}", self.path.display()),
        }
        threads.iter().for_each(QueueThread::stop);
        let ends: Vec<_> = threads.into_iter().map(QueueThread::join).collect();
        *self.tell.lock().unwrap_or_else(PoisonError::into_inner) = None;
        waited.map_err(failed)?;
        let mut unmounted = false;
        for end in ends {
            unmounted |= end.map_err(failed)? == End::Unmounted;
        }
        match unmounted && !stop.is_raised() {
            true => Err(Error::Unmounted { path: self.path.clone() }),
            false => Ok(()),
        }
    }

    /// Requests that wait for room fail, and none waits from now on: it is about to end.
    pub fn give_up_waiting(&self) {
        self.vbd.give_up_own();
    }

    /// Tell the kernel that the disk's size changed, and have it ask for the new one: who asks the kernel
    /// later (a loop device, before Linux 6.17) is told what it knows. The question stands behind requests that are held, by a pause
    /// or limits: it is waited for no longer than half a second, for who waits may be the one to let them go.
    pub fn resized(&self) {
        let tell = self.tell.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(device) = tell else { return };
        match rustix::io::write(&*device, &wire::forget_size()) {
            Ok(_) => {
                // Not to keep the connection, should its threads have ended: nobody would answer.
                drop(device);
                self.have_it_asked();
            }
            // Nobody has asked for the size yet, so nobody knows the old one.
            Err(rustix::io::Errno::NOENT) => {}
            Err(error) => {
                tracing::warn!("cannot tell the kernel of {}'s size: {error}", self.path.display());
            }
        }
    }

    fn have_it_asked(&self) {
        match &mut *lock(&self.asking) {
            asking @ None => *asking = Some(false),
            Some(again) => {
                *again = true;
                return;
            }
        }
        let (path, asking) = (self.path.clone(), self.asking.clone());
        let (told, answered) = channel();
        let ask = move || {
            loop {
                // It fails where the file was unmounted meanwhile, and nobody knows its size then.
                let _ = std::fs::metadata(&path);
                let mut asking = lock(&asking);
                if asking.take() == Some(false) {
                    break;
                }
                *asking = Some(false);
            }
            let _ = told.send(());
        };
        match std::thread::Builder::new().name("size".into()).spawn(ask) {
            Ok(_) => _ = answered.recv_timeout(ASKED),
            Err(error) => {
                *lock(&self.asking) = None;
                tracing::warn!("{}: nobody asks for the new size: {error}", self.path.display());
            }
        }
    }

    fn facts(&self, image: Option<OwnedFd>) -> Facts {
        let read_only = self.options.read_only || self.vbd.info().read_only;
        let may = if read_only { 0o555 } else { 0o777 };
        Facts {
            read_only,
            growable: self.options.growable,
            mode: self.options.mode & may,
            uid: geteuid().as_raw(),
            gid: getegid().as_raw(),
            shown: Arc::new(Shown::new(&self.vbd, image)),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wait until a stop is raised or a thread has ended.
fn wait(stops: [&Stop; 2], ended: &OpenFile) -> io::Result<()> {
    loop {
        let [stop, failure] = stops.map(|stop| PollFd::new(stop, PollFlags::IN));
        let mut fds = [stop, failure, PollFd::new(ended, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
