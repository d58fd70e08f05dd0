//! Ways of serving a disk, one file each. A backend starts what it needs and says how the disk is reached.

pub mod absent;
pub mod loopdev;
pub mod native;
pub mod qemu;
pub mod ringtap;
pub mod ubd;

use std::path::{Path, PathBuf};

use crate::env::{Env, Missing};
use crate::error::Result;
use crate::process::Server;
use crate::sample::Stage;
use crate::stop::Stop;

/// How the load reaches the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// A plain file.
    File(PathBuf),
    /// A block device of the host.
    Block(PathBuf),
    /// An NBD export.
    Nbd {
        /// `nbd+unix:///?socket=…`
        uri: String,
    },
    /// A vhost-user-blk server that listens on a socket.
    VhostUser {
        /// The socket.
        socket: PathBuf,
    },
    /// A file that User-Mode Linux opens itself.
    Ubd(PathBuf),
    /// The same, with a loop device inside the guest on top.
    LoopOnUbd(PathBuf),
}

/// How a backend's disk will be reached, known before it is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// [`Access::File`]
    File,
    /// [`Access::Block`]
    Block,
    /// [`Access::Nbd`]
    Nbd,
    /// [`Access::VhostUser`]
    VhostUser,
    /// A disk inside the guest's own process.
    Inside,
}

/// What a backend may use while it starts.
#[derive(Debug)]
pub struct Context<'a> {
    /// The machine.
    pub env: &'a Env,
    /// The disk's file.
    pub disk: &'a Path,
    /// A folder for sockets, with a short name.
    pub sockets: &'a Path,
    /// Where the server's stderr goes.
    pub log: PathBuf,
    /// The wish to end.
    pub stop: &'a Stop,
}

/// A disk that is being served. Dropping it ends the serving.
#[derive(Debug)]
pub struct Served {
    /// How the disk is reached.
    pub access: Access,
    /// The server, where there is one.
    pub server: Option<Server>,
    /// The loop device, where there is one.
    pub device: Option<loopdev::LoopDevice>,
}

impl Served {
    fn by(server: Server, access: Access) -> Served {
        Served { access, server: Some(server), device: None }
    }

    /// Ends the serving and reports what went wrong with it.
    pub fn end(self) -> Result<()> {
        let Served { server, device, .. } = self;
        device.map_or(Ok(()), loopdev::LoopDevice::detach)?;
        server.map_or(Ok(()), Server::stop)
    }
}

/// A way of serving a disk.
pub trait Backend: Sync {
    /// How its disk is reached.
    fn reach(&self) -> Reach;
    /// Why it cannot run on this machine.
    fn missing(&self, env: &Env) -> Option<Missing>;
    /// Starts it. It is ready when this returns.
    fn start(&self, context: &Context<'_>) -> Result<Served>;
    /// What the CPU figures of this backend leave out, and other facts for the report.
    fn remark(&self) -> Option<&'static str> {
        None
    }
}

/// An entry of the catalogue.
pub struct Entry {
    /// The name in plans and flags.
    pub name: &'static str,
    /// Where its load runs.
    pub stage: Stage,
    /// What it is, with the options that make it comparable.
    pub title: &'static str,
    /// Compared unless the user names backends.
    pub usual: bool,
    /// The backend.
    pub backend: &'static dyn Backend,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.stage, self.name)
    }
}

/// All backends, in the order of the report. The first of a stage is what the others are measured against, and runs
/// twice (the A/A twin).
pub const CATALOGUE: &[Entry] = &[
    host("native", "the file itself, O_DIRECT", true, &native::Native),
    host(
        "loop",
        "loop device on the file, through the page cache",
        true,
        &loopdev::Loop { direct: false },
    ),
    host(
        "loop-direct",
        "loop device on the file, direct-io=on",
        true,
        &loopdev::Loop { direct: true },
    ),
    host("ringtap-nbd", "ringtap serve --nbd, cache=none", true, &ringtap::Nbd),
    host("qemu-nbd", "qemu-nbd, cache=none, aio=io_uring", true, &qemu::Nbd { aio: "io_uring" }),
    host(
        "qemu-nbd-threads",
        "qemu-nbd, cache=none, aio=threads",
        false,
        &qemu::Nbd { aio: "threads" },
    ),
    host(
        "qemu-nbd-native",
        "qemu-nbd, cache=none, aio=native",
        false,
        &qemu::Nbd { aio: "native" },
    ),
    host("ringtap-vhost", "ringtap serve --vhost-user, cache=none", true, &ringtap::VhostUser),
    host("qsd-vhost", QSD_URING, true, &qemu::VhostUser { aio: "io_uring" }),
    host("qsd-vhost-threads", QSD_THREADS, false, &qemu::VhostUser { aio: "threads" }),
    host("qsd-vhost-native", QSD_NATIVE, false, &qemu::VhostUser { aio: "native" }),
    host("lvm", "an LVM linear volume", true, &absent::Lvm),
    host("ublk", "ringtap over ublk", true, &absent::Ublk),
    guest("ubd", "User-Mode Linux opens the file itself (ubd)", true, &ubd::Ubd),
    guest("loop", "loop device inside the guest, on a ubd disk", true, &ubd::LoopOnUbd),
    guest("ringtap-vhost", "ringtap serve --vhost-user, cache=none", true, &ringtap::VhostUser),
    guest("qsd-vhost", QSD_URING, true, &qemu::VhostUser { aio: "io_uring" }),
    guest("qsd-vhost-threads", QSD_THREADS, false, &qemu::VhostUser { aio: "threads" }),
    guest("qsd-vhost-native", QSD_NATIVE, false, &qemu::VhostUser { aio: "native" }),
];

const QSD_URING: &str = "qemu-storage-daemon over vhost-user, cache.direct=on, aio=io_uring";
const QSD_THREADS: &str = "qemu-storage-daemon over vhost-user, cache.direct=on, aio=threads";
const QSD_NATIVE: &str = "qemu-storage-daemon over vhost-user, cache.direct=on, aio=native";

const fn host(
    name: &'static str,
    title: &'static str,
    usual: bool,
    backend: &'static dyn Backend,
) -> Entry {
    Entry { name, stage: Stage::Host, title, usual, backend }
}

const fn guest(
    name: &'static str,
    title: &'static str,
    usual: bool,
    backend: &'static dyn Backend,
) -> Entry {
    Entry { name, stage: Stage::Guest, title, usual, backend }
}

/// The backend of that name on that stage.
pub fn find(stage: Stage, name: &str) -> Option<&'static Entry> {
    CATALOGUE.iter().find(|entry| entry.stage == stage && entry.name == name)
}

/// Comparisons beside the one with the stage's reference: Ringtap with each peer over the same wire.
pub const PEERS: &[(Stage, &str, &[&str])] = &[
    (Stage::Host, "ringtap-nbd", &["qemu-nbd", "qemu-nbd-threads", "qemu-nbd-native"]),
    (Stage::Host, "ringtap-vhost", &["qsd-vhost", "qsd-vhost-threads", "qsd-vhost-native"]),
    (Stage::Guest, "ringtap-vhost", &["qsd-vhost", "qsd-vhost-threads", "qsd-vhost-native"]),
];
