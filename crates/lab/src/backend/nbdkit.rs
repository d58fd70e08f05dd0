//! nbdkit's file plugin, over NBD on a UNIX socket.

use std::process::Command;

use super::ringtap::{READY, nbd_access};
use super::{Backend, Context, Entry, File, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::Result;
use crate::process::Server;
use crate::sample::Stage;

/// nbdkit; it has no O_DIRECT and works through the page cache.
#[derive(Debug)]
pub struct Nbdkit;

impl Backend for Nbdkit {
    fn reach(&self) -> Reach {
        Reach::Nbd
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.program("nbdkit", "nbdkit")
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let socket = context.sockets.join("nbdkit.nbd");
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket);
        command.arg("file").arg(format!("file={}", context.disk.display()));
        let mut server = Server::start(command, &context.log)?;
        server.wait_for_socket(&socket, READY, context.stop)?;
        Ok(Served::by(server, nbd_access(&socket)))
    }

    fn cached(&self) -> bool {
        true
    }
}

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[Entry::named(
        Stage::Host,
        120,
        "nbdkit",
        "nbdkit file, through the page cache",
        &Nbdkit,
    )],
    labels: &[("nbdkit", "nbdkit")],
    peers: &[],
};
