//! QEMU's servers: qemu-nbd and qemu-storage-daemon. Both get the raw file with the host's cache bypassed.

use std::path::Path;
use std::process::Command;

use super::ringtap::{READY, nbd_access};
use super::{Access, Backend, Context, Entry, File, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::Result;
use crate::process::Server;
use crate::sample::Stage;

/// qemu-nbd on a UNIX socket.
#[derive(Debug)]
pub struct Nbd {
    /// `io_uring`, `threads` or `native`.
    pub aio: &'static str,
    /// `none`, or another of QEMU's words.
    pub cache: &'static str,
}

impl Nbd {
    /// Past the host's page cache.
    pub const fn by(aio: &'static str) -> Nbd {
        Nbd { aio, cache: "none" }
    }
}

impl Backend for Nbd {
    fn reach(&self) -> Reach {
        Reach::Nbd
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.program("qemu-nbd", "qemu-utils")
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let socket = context.sockets.join("qemu.nbd");
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--shared=0", "--format=raw", "--discard=unmap"]);
        command
            .arg(format!("--aio={}", self.aio))
            .arg(format!("--cache={}", self.cache))
            .arg(format!("--socket={}", socket.display()))
            .arg(context.disk);
        let mut server = Server::start(command, &context.log)?;
        server.wait_for_socket(&socket, READY, context.stop)?;
        Ok(Served::by(server, nbd_access(&socket)))
    }

    fn cached(&self) -> bool {
        self.cache != "none"
    }
}

/// qemu-storage-daemon with a vhost-user-blk export.
#[derive(Debug)]
pub struct VhostUser {
    /// `io_uring`, `threads` or `native`.
    pub aio: &'static str,
    /// Its write cache.
    pub cache: WriteCache,
}

/// A value of an option: commas in it are doubled.
pub(super) fn quoted(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// Whether one of QEMU's modules is installed, which may be in a package of its own.
pub(super) fn has_module(name: &str) -> bool {
    let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let here = Path::new("/usr/lib/qemu").join(name).exists();
    here || folders.map(|folder| folder.path().join("qemu").join(name)).any(|path| path.exists())
}

/// qemu-storage-daemon with a node called `disk`, over vhost-user; `more` are options of the export, each with a comma.
pub(super) fn export(node: &str, more: &str, context: &Context<'_>) -> Result<Served> {
    let socket = context.sockets.join("qsd.vhost");
    let mut command = Command::new("qemu-storage-daemon");
    command.arg("--blockdev").arg(node).arg("--export").arg(format!(
        "type=vhost-user-blk,id=export,node-name=disk,writable=on,{more}addr.type=unix,addr.path={}",
        quoted(&socket)
    ));
    let mut server = Server::start(command, &context.log)?;
    server.wait_for_socket_file(&socket, READY, context.stop)?;
    Ok(Served::by(server, Access::VhostUser { socket }))
}

/// What qemu-storage-daemon does with the writes of a vhost-user guest. It says at first that it keeps none back, and keeps
/// them back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteCache {
    /// As it comes: a guest believes what it says, and never flushes.
    AsItComes,
    /// `writethrough=on`: each write is flushed.
    Through,
    /// The guest turns the cache on, and flushes.
    TurnedOn,
}

impl VhostUser {
    /// As it comes.
    pub const fn by(aio: &'static str) -> VhostUser {
        VhostUser { aio, cache: WriteCache::AsItComes }
    }
}

impl Backend for VhostUser {
    fn reach(&self) -> Reach {
        Reach::VhostUser
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.program("qemu-storage-daemon", "qemu-system-common")
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let through = if self.cache == WriteCache::Through { "writethrough=on," } else { "" };
        let (file, aio) = (quoted(context.disk), self.aio);
        let node = format!("driver=file,filename={file},cache.direct=on,aio={aio},discard=unmap");
        export(&format!("{node},node-name=disk"), through, context)
    }

    fn guest_sets_cache(&self) -> Option<super::WriteCache> {
        (self.cache == WriteCache::TurnedOn).then_some(super::WriteCache::On)
    }
}

pub(super) const NBD: Nbd = Nbd::by("io_uring");
const UNSAFE: Nbd = Nbd { aio: "threads", cache: "unsafe" };
pub(super) const QSD: VhostUser = VhostUser::by("io_uring");
const QSD_BY_THREADS: VhostUser = VhostUser::by("threads");
const QSD_BY_NATIVE: VhostUser = VhostUser::by("native");
const QSD_THROUGH: VhostUser = VhostUser { aio: "io_uring", cache: WriteCache::Through };
const QSD_TURNED_ON: VhostUser = VhostUser { aio: "io_uring", cache: WriteCache::TurnedOn };
const QSD_URING: &str = "qemu-storage-daemon over vhost-user, cache.direct=on, aio=io_uring";
const QSD_WRITETHROUGH: &str = "qsd-vhost with writethrough=on";
const QSD_THREADS: &str = "qemu-storage-daemon over vhost-user, cache.direct=on, aio=threads";
const QSD_NATIVE: &str = "qemu-storage-daemon over vhost-user, cache.direct=on, aio=native";

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::usual(Stage::Host, 70, "qemu-nbd", "qemu-nbd, cache=none, aio=io_uring", &NBD),
        Entry::named(
            Stage::Host,
            90,
            "qemu-nbd-threads",
            "qemu-nbd, cache=none, aio=threads",
            &Nbd::by("threads"),
        ),
        Entry::named(
            Stage::Host,
            100,
            "qemu-nbd-native",
            "qemu-nbd, cache=none, aio=native",
            &Nbd::by("native"),
        ),
        Entry::named(
            Stage::Host,
            110,
            "qemu-nbd-unsafe",
            "qemu-nbd, cache=unsafe: it ignores flushes",
            &UNSAFE,
        ),
        Entry::usual(Stage::Host, 150, "qsd-vhost", QSD_URING, &QSD),
        Entry::named(Stage::Host, 160, "qsd-vhost-writethrough", QSD_WRITETHROUGH, &QSD_THROUGH),
        Entry::named(Stage::Host, 180, "qsd-vhost-threads", QSD_THREADS, &QSD_BY_THREADS),
        Entry::named(Stage::Host, 190, "qsd-vhost-native", QSD_NATIVE, &QSD_BY_NATIVE),
        Entry::usual(Stage::Guest, 70, "qsd-vhost", QSD_URING, &QSD),
        Entry::named(Stage::Guest, 80, "qsd-vhost-writethrough", QSD_WRITETHROUGH, &QSD_THROUGH),
        Entry::named(Stage::Guest, 100, "qsd-vhost-threads", QSD_THREADS, &QSD_BY_THREADS),
        Entry::named(Stage::Guest, 110, "qsd-vhost-native", QSD_NATIVE, &QSD_BY_NATIVE),
        Entry::usual(Stage::Vm, 200, "qsd-vhost", QSD_URING, &QSD),
        Entry::named(
            Stage::Vm,
            210,
            "qsd-vhost-writeback",
            "qsd-vhost, the guest has turned the write cache on, which is off at first",
            &QSD_TURNED_ON,
        ),
        Entry::named(Stage::Vm, 220, "qsd-vhost-writethrough", QSD_WRITETHROUGH, &QSD_THROUGH),
        Entry::usual(Stage::Two, 80, "qemu-nbd", "qemu-nbd, cache=none, aio=io_uring", &NBD),
        Entry::usual(Stage::Two, 150, "qsd-vhost", QSD_URING, &QSD),
        Entry::usual(Stage::TwoGuests, 30, "qsd-vhost", QSD_URING, &QSD),
        Entry::usual(Stage::TwoVms, 50, "qsd-vhost", QSD_URING, &QSD),
    ],
    labels: &[
        ("qemu-nbd", "qemu-nbd"),
        ("qemu-nbd-threads", "qemu-nbd, threads"),
        ("qemu-nbd-native", "qemu-nbd, Linux AIO"),
        ("qemu-nbd-unsafe", "qemu-nbd, cache=unsafe"),
        ("qsd-vhost", "qemu-storage-daemon"),
        ("qsd-vhost-threads", "qemu-storage-daemon, threads"),
        ("qsd-vhost-native", "qemu-storage-daemon, Linux AIO"),
        ("qsd-vhost-writeback", "qemu-storage-daemon, cache turned on"),
        ("qsd-vhost-writethrough", "qemu-storage-daemon, writethrough"),
    ],
    peers: &[],
};
