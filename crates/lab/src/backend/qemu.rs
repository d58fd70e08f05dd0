//! QEMU's servers: qemu-nbd and qemu-storage-daemon. Both get the raw file with the host's cache bypassed.

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
        let socket = context.sockets.join("qsd.vhost");
        // Commas in a value are doubled.
        let quote = |path: &std::path::Path| path.display().to_string().replace(',', ",,");
        let mut command = Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(format!(
            "driver=file,node-name=disk,filename={},cache.direct=on,aio={},discard=unmap",
            quote(context.disk),
            self.aio
        ));
        command.arg("--export").arg(format!(
            "type=vhost-user-blk,id=export,node-name=disk,writable=on,{}addr.type=unix,addr.path={}",
            if self.cache == WriteCache::Through { "writethrough=on," } else { "" },
            quote(&socket)
        ));
        let mut server = Server::start(command, &context.log)?;
        server.wait_for_socket_file(&socket, READY, context.stop)?;
        Ok(Served::by(server, Access::VhostUser { socket }))
    }

    fn guest_sets_cache(&self) -> Option<super::WriteCache> {
        (self.cache == WriteCache::TurnedOn).then_some(super::WriteCache::On)
    }
}
