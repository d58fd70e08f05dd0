//! ublk: the disk as a block device of this host, `/dev/ublkbN` (Linux 6.5 and later).
//!
//! The driver's own commands go over the queue threads' own rings: a slot's answer and its next
//! request are one `Op::Command`, so a queue costs what every other transport's costs. The crate
//! `libublk` was weighed: it brings a ring, an executor and a buffer pool of its own for each queue,
//! so that each request would have to change from its loop to ours and back.
//!
//! From Linux 6.16 on a request's own pages are registered with its queue's ring
//! (UBLK_F_AUTO_BUF_REG) and go to the image and come from it uncopied, where the image holds the
//! bytes as they are and the server is trusted (root); bytes that must be looked at are copied through
//! the device's file (UBLK_F_USER_COPY). Else the driver copies them once, between a request's pages
//! and the slot's memory; user copy there would be the same copy and a system call more.
//!
//! A device outlives its server: it waits for another one of the same image (UBLK_F_USER_RECOVERY),
//! which is given again what the dead one had not answered.
//!
//! Source: Linux, Documentation/block/ublk.rst and include/uapi/linux/ublk_cmd.h.

mod brokered;
mod control;
mod descriptors;
mod device;
mod list;
mod namespace;
mod pieces;
mod queue;
mod record;
#[doc(hidden)]
pub mod testing;
mod thread;
mod wire;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use ringtap_io::OpenFile;
use ringtap_sandbox::DeviceAct;
use ringtap_vbd::{Disk, Listening};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

pub use self::brokered::for_server;
pub use self::device::Device;
pub use self::list::{Listed, list, reap};
pub use self::namespace::{leave_mount_namespace, let_go_of, let_go_of_disks};
pub use self::record::made_folder;
pub use self::wire::State;
use self::wire::feature;
use crate::Stop;
use crate::reclaim::{keep_alive, keep_in_memory};

/// How a disk is shown as a block device.
#[derive(Clone, Debug)]
pub struct Options {
    /// The most queues, each a thread; never more than there are processors.
    pub queues: u16,
}

/// Why there is no block device, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel has no ublk.
    #[error(
        "this kernel offers no ublk ({0}): try modprobe ublk_drv (Linux 6.5 or later). Without it, \
         serve the disk with --nbd and attach it with nbd-client, or with --fuse and losetup"
    )]
    Missing(io::Error),
    /// The driver does not speak as this program does.
    #[error(
        "this kernel's ublk is too old: Linux 6.5 or later is needed. Without it, serve the disk \
         with --nbd and attach it with nbd-client, or with --fuse and losetup"
    )]
    Old,
    /// A device of that number is there.
    #[error("/dev/ublkb{id} is in use: {}", taken(*.pid, *.served, *.ours, .image.as_deref()))]
    Taken {
        /// Its number.
        id: u32,
        /// Its server's process.
        pid: i32,
        /// Whether that is there.
        served: bool,
        /// Whether it is a Ringtap.
        ours: bool,
        /// The image it shows, where that is known.
        image: Option<PathBuf>,
    },
    /// No device could be made.
    #[error("cannot make {}: {source}{}", numbered(*.id), add_hint(source))]
    Add {
        /// The number asked for.
        id: Option<u32>,
        /// What the driver said.
        source: io::Error,
    },
    /// A device that waits for a server cannot be taken over.
    #[error(
        "cannot take over {}, which waits for its server: {source}; \
         `ringtap list --reap={id}` gives it up, and what its users had not flushed",
        path.display()
    )]
    Recover {
        /// The device.
        path: PathBuf,
        /// Its number.
        id: u32,
        /// What the driver said.
        source: io::Error,
    },
    /// A device that waits for a server takes writes, and the disk does not.
    #[error(
        "{} waits for a server and was made for writing: serve the disk without --read-only; \
         `ringtap list --reap={id}` gives the device up, and what its users had not flushed",
        path.display()
    )]
    Writable {
        /// The device.
        path: PathBuf,
        /// Its number.
        id: u32,
    },
    /// A system call or a command of the driver failed.
    #[error("cannot {tried} {}: {source}", path.display())]
    Os {
        /// What was tried.
        tried: &'static str,
        /// On what.
        path: PathBuf,
        /// What was said.
        source: io::Error,
    },
    /// A panic has stopped the disk.
    #[error("the disk of {} was stopped by a panic", path.display())]
    Failed {
        /// The device.
        path: PathBuf,
    },
    /// Somebody else stopped the device.
    #[error("{} was stopped by somebody else", path.display())]
    Stopped {
        /// The device.
        path: PathBuf,
    },
}

fn taken(pid: i32, served: bool, ours: bool, image: Option<&Path>) -> String {
    let what = match (image, ours) {
        (Some(image), _) => format!("it shows {}", image.display()),
        (None, true) => "it shows another image".into(),
        (None, false) => "it is not Ringtap's".into(),
    };
    match served {
        true => format!("{what}, served by process {pid}; choose another number"),
        false => format!(
            "{what}, and waits for its server; choose another number, or see `ringtap list`"
        ),
    }
}

fn numbered(id: Option<u32>) -> String {
    id.map_or("a ublk device".into(), |id| format!("/dev/ublkb{id}"))
}

fn add_hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => "; it takes root, or leave to use /dev/ublk-control",
        Some(libc::EINVAL) => "; numbers end below a million",
        _ => "",
    }
}

impl Error {
    /// Why /dev/ublk-control cannot be used.
    fn control(source: io::Error) -> Error {
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => Error::Missing(source),
            _ => Error::Os { tried: "open", path: "/dev/ublk-control".into(), source },
        }
    }
}

/// Serves a device as a block device of this host.
pub struct Server {
    path: PathBuf,
    running: Mutex<Running>,
    ended: Arc<OpenFile>,
    /// Raised when a panic stops the disk.
    failure: (Stop, Listening),
    vbd: Disk,
}

struct Running {
    device: Device,
    /// The device was deleted.
    ended: bool,
    threads: Vec<JoinHandle<io::Result<()>>>,
}

impl Server {
    /// Start to serve. When this returns the block device is there.
    pub fn start(device: Device, vbd: Disk) -> Result<Server, Error> {
        let path = device.path();
        let failed = |tried, source| Error::Os { tried, path: path.clone(), source };
        keep_in_memory();
        keep_alive();
        let signal = eventfd(0, EventfdFlags::CLOEXEC);
        let ended = signal.map_err(|error| failed("make an eventfd for", error.into()))?;
        let ended = Arc::new(OpenFile::new(ended));
        let failure = Stop::at_failure(&vbd);
        let failure = failure.map_err(|source| failed("make an eventfd for", source))?;
        let taken_over = device.taken_over;
        let mut running = Running { device, ended: false, threads: vec![] };
        if let Err(error) = running.begin(&vbd, &ended) {
            // One that was taken over goes on waiting: its users have not lost anything yet.
            if running.device.fresh {
                running.end();
            }
            return Err(error);
        }
        let server = Server { path, running: Mutex::new(running), ended, failure, vbd };
        if taken_over.is_some_and(|size| size != server.vbd.size()) {
            server.resized();
        }
        Ok(server)
    }

    /// The block device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the block device is there: nobody has taken it away.
    pub fn is_there(&self) -> bool {
        !self.running.lock().unwrap_or_else(PoisonError::into_inner).ended
    }

    /// Serve until `stop` is raised; then take the block device away and leave. The last flush is
    /// the caller's. It is taken away as well where somebody else stopped it. Where a thread of ours
    /// fails it stays, and others of its threads go on: it waits for the next server once the process
    /// ends. Where a panic has stopped the disk it is taken away: nothing can be had of it.
    pub fn serve(&self, stop: &Stop) -> Result<(), Error> {
        let stopped = || Error::Failed { path: self.path.clone() };
        let end = self.vbd.health().contain(|| self.serve_until(stop));
        match (end, self.vbd.health().failure()) {
            (Ok(end), None) => end,
            _ => Err(stopped()),
        }
    }

    fn serve_until(&self, stop: &Stop) -> Result<(), Error> {
        let failed = |tried, source| Error::Os { tried, path: self.path.clone(), source };
        wait([stop, &self.failure.0], &self.ended)
            .map_err(|source| failed("wait for the threads of", source))?;
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if !stop.is_raised() && self.vbd.health().failure().is_none() {
            if let Some(source) = running.failure() {
                running.device.fresh = false;
                return Err(failed("serve", source));
            }
        }
        let _hurry = self.vbd.hurry_all();
        self.write_back(running.device.info.id);
        let mut first = Ok(());
        for end in running.end() {
            first = first.and(end.map_err(|source| failed("serve", source)));
        }
        first?;
        match stop.is_raised() {
            true => Ok(()),
            false => Err(Error::Stopped { path: self.path.clone() }),
        }
    }

    /// Have the kernel write what it keeps of the block device, while somebody takes it.
    fn write_back(&self, id: u32) {
        let here = || brokered::write_back(&self.path);
        match control::ask_of(DeviceAct::WriteBack, id, here) {
            Ok(false) => {}
            Ok(true) => tracing::warn!(
                "{} is in use: whoever has it mounted gets errors from now on",
                self.path.display()
            ),
            Err(error) => tracing::error!("cannot write back {}: {error}", self.path.display()),
        }
    }

    /// Give the block device the size that the disk has now.
    pub fn resized(&self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let device = &mut running.device;
        if device.info.features & feature::UPDATE_SIZE == 0 {
            tracing::warn!(
                "{} keeps its size until it is served anew: this kernel cannot change it \
                 (Linux 6.16 can)",
                self.path.display()
            );
            return;
        }
        let target = device.target();
        if let Err(error) = device.control.resize(target, self.vbd.size()) {
            tracing::error!("cannot change the size of {}: {error}", self.path.display());
        }
    }
}

impl Running {
    /// Have every queue served, and the block device there.
    fn begin(&mut self, vbd: &Disk, ended: &Arc<OpenFile>) -> Result<(), Error> {
        let (path, info, target) = (self.device.path(), self.device.info, self.device.target());
        let failed = |tried, source| Error::Os { tried, path: path.clone(), source };
        let (prepared, ready) = mpsc::channel();
        let (fetching, heard) = mpsc::channel();
        let mut waiting = vec![];
        for index in 0..info.queues {
            let (give, device) = mpsc::channel();
            let (prepared, fetching) = (prepared.clone(), fetching.clone());
            let start = thread::Start { prepared, device, fetching };
            let vbd = vbd.fork();
            vbd.serves("ublk", path.display().to_string(), index);
            let thread = thread::start(index, info, vbd, start, ended.clone());
            self.threads.push(thread.map_err(|source| failed("start a thread for", source))?);
            waiting.push(give);
        }
        drop((prepared, fetching));
        let gone = || Err(io::Error::other("its thread ended"));
        for _ in &waiting {
            let end = ready.recv().unwrap_or_else(|_| gone());
            end.map_err(|source| failed("prepare to serve", source))?;
        }
        let file = Arc::new(OpenFile::new(self.device.claim()?));
        for give in &waiting {
            // One that has ended since says nothing below.
            let _ = give.send(file.clone());
        }
        drop(file);
        for _ in &waiting {
            match heard.recv() {
                Ok(None) => {}
                Ok(Some(errno)) => {
                    return Err(failed("fetch requests of", io::Error::from_raw_os_error(errno)));
                }
                Err(_) => gone().map_err(|source| failed("serve", source))?,
            }
        }
        let control = &mut self.device.control;
        match self.device.taken_over {
            Some(_) => control.end_recovery(target).map_err(|e| failed("take over", e)),
            None => control.start(target).map_err(|e| failed("start", e)),
        }
    }

    /// How a thread failed of those that have ended first, if one did: its end may end others.
    fn failure(&mut self) -> Option<io::Error> {
        loop {
            // It says that it has ended a moment before it does.
            let (ended, others): (Vec<_>, Vec<_>) =
                self.threads.drain(..).partition(JoinHandle::is_finished);
            self.threads = others;
            if !ended.is_empty() {
                return ended.into_iter().find_map(|thread| join(thread).err());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stop the device, wait for its threads, delete it. How the threads ended.
    fn end(&mut self) -> Vec<io::Result<()>> {
        self.ended = true;
        let path = self.device.path();
        let device = &mut self.device;
        let target = device.target();
        if let Err(error) = device.control.stop(target) {
            tracing::error!("cannot stop {}: {error}", path.display());
        }
        let ends = self.threads.drain(..).map(join).collect();
        if let Err(error) = device.delete() {
            tracing::error!("cannot delete {}: {error}", path.display());
        }
        ends
    }
}

fn join(thread: JoinHandle<io::Result<()>>) -> io::Result<()> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the queue thread panicked")))
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
