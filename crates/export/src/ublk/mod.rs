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
mod leave;
mod list;
mod namespace;
mod pieces;
mod queue;
mod record;
mod steps;
#[doc(hidden)]
pub mod testing;
mod thread;
mod wire;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ringtap_io::OpenFile;
use ringtap_sandbox::DeviceAct;
use ringtap_vbd::{Disk, Listening};
use rustix::event::{PollFd, PollFlags, poll};

pub use self::brokered::for_server;
pub use self::device::Device;
pub use self::list::{Listed, list, reap};
pub use self::namespace::{leave_mount_namespace, let_go_of, let_go_of_disks};
pub use self::record::made_folder;
use self::steps::{Running, join};
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
    /// Raised when a panic stops the disk.
    failure: (Stop, Listening),
    vbd: Disk,
    handing_over: AtomicBool,
}

impl Server {
    /// Start to serve. When this returns the block device is there.
    pub fn start(device: Device, vbd: Disk) -> Result<Server, Error> {
        let server = Server::prepare(device, vbd)?;
        server.claim()?;
        server.begin()?;
        Ok(server)
    }

    /// The first step of that: threads with their memory. Another may serve the device still.
    pub fn prepare(device: Device, vbd: Disk) -> Result<Server, Error> {
        let (path, vbd) = (device.path(), vbd.apart());
        let failed = |tried, source| Error::Os { tried, path: path.clone(), source };
        keep_in_memory();
        keep_alive();
        let failure = Stop::at_failure(&vbd);
        let failure = failure.map_err(|source| failed("make an eventfd for", source))?;
        let running = Running::new(device).map_err(|e| failed("make an eventfd for", e))?;
        let (running, handing_over) = (Mutex::new(running), AtomicBool::new(false));
        let server = Server { path, running, failure, vbd, handing_over };
        server.step(|running| running.prepare(&server.vbd))?;
        Ok(server)
    }

    /// The second: the device is this server's, and every slot waits for a request. None comes yet.
    pub fn claim(&self) -> Result<(), Error> {
        self.step(Running::claim)
    }

    /// The last: the block device is there, and requests come.
    pub fn begin(&self) -> Result<(), Error> {
        self.step(Running::begin)?;
        let taken_over = self.running().device.taken_over;
        if taken_over.is_some_and(|size| size != self.vbd.size()) {
            self.resized();
        }
        Ok(())
    }

    fn step(&self, step: impl FnOnce(&mut Running) -> Result<(), Error>) -> Result<(), Error> {
        let mut running = self.running();
        let end = step(&mut running);
        if end.is_err() {
            running.give_up();
        }
        end
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the block device is there when the process has ended, and waits for the next server.
    pub fn outlives_its_server(&self) -> bool {
        self.running().device.info.features & feature::RECOVERY == feature::RECOVERY
    }

    /// Why its users could not go on with another server.
    pub fn must_stay(&self) -> Option<&'static str> {
        if !self.outlives_its_server() {
            return Some(
                "the kernel ends an ordinary user's device with its server: restart the server, or end that export",
            );
        }
        (!self.running().device.can_be_left).then_some(
            "before Linux 6.16 the driver loses requests that come while a device is let go of: restart the server, or end that export",
        )
    }

    /// From now on the word to stop leaves the block device there, for another process or, once this is taken back, for
    /// this one: its requests wait.
    pub fn hand_over(&self, wanted: bool) {
        self.handing_over.store(wanted, SeqCst);
    }

    /// The number of the device.
    pub fn number(&self) -> u32 {
        self.running().device.info.id
    }

    /// The block device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the block device is there: nobody has taken it away.
    pub fn is_there(&self) -> bool {
        !self.running().ended
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
        if self.running().let_go {
            self.step(|running| running.come_back(&self.vbd))?;
            tracing::info!("{} goes on", self.path.display());
        }
        let over = self.running().over.clone();
        wait([stop, &self.failure.0], &over)
            .map_err(|source| failed("wait for the threads of", source))?;
        let mut running = self.running();
        if stop.is_raised() && self.handing_over.load(SeqCst) && !self.failure.0.is_raised() {
            let threads = running.leave();
            // Storage may keep them waiting, and nobody else is to wait for that.
            drop(running);
            let ends = threads.into_iter().map(join).collect();
            return self.running().has_left(ends);
        }
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

    /// Requests that wait for room fail, and none waits from now on: it is about to end.
    pub fn give_up_waiting(&self) {
        self.vbd.give_up_own();
    }

    /// Give the block device the size that the disk has now.
    pub fn resized(&self) {
        let mut running = self.running();
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
