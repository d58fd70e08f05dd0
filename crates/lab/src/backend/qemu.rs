//! QEMU's servers: qemu-nbd and qemu-storage-daemon. Both get the raw file with the host's cache bypassed.

use std::path::Path;
use std::process::Command;

use super::ringtap::{READY, nbd_access};
use super::{Access, Backend, Context, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::Result;
use crate::process::Server;

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
