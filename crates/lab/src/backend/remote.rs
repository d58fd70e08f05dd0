//! Disks on an NBD server, under Ringtap's client and under QEMU's. Both are reached over vhost-user, so that one load drives them.

use super::{Access, Backend, Context, Reach, Served, qemu, ringtap};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};

/// Who is the server's client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// Ringtap.
    Ringtap,
    /// The same with each answer held back: known to be slower.
    Slow,
    /// qemu-storage-daemon.
    Qemu,
}

impl Client {
    pub(super) fn missing(self, env: &Env) -> Option<Missing> {
        match self {
            Client::Ringtap | Client::Slow => env.ringtap_serve(),
            Client::Qemu => env.program("qemu-storage-daemon", "qemu-system-common"),
        }
    }

    /// Serves what Ringtap calls `name`, and QEMU `node`.
    pub(super) fn serve(self, context: &Context<'_>, name: &str, node: &str) -> Result<Served> {
        match self {
            Client::Ringtap => ringtap::serve_store(context, name, None),
            Client::Slow => ringtap::serve_store(context, name, Some(ringtap::SLOWER)),
            Client::Qemu => qemu::export(&format!("{node},node-name=disk"), "", context),
        }
    }
}

/// A server of the disk's file, and its client.
pub struct OverNbd {
    /// The server.
    pub server: &'static dyn Backend,
    /// Its client.
    pub client: Client,
}

impl Backend for OverNbd {
    fn reach(&self) -> Reach {
        Reach::VhostUser
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        self.server.missing(env).or_else(|| self.client.missing(env))
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let log = context.log.with_extension("below.log");
        let Context { env, disk, sockets, stop, .. } = *context;
        let below = self.server.start(&Context { env, disk, sockets, log, stop })?;
        let Access::Nbd { uri, socket } = &below.access else {
            return Err(Error::Plan("a client of NBD needs an export".into()));
        };
        let node = format!("driver=nbd,server.type=unix,server.path={}", qemu::quoted(socket));
        let served = self.client.serve(context, uri, &node)?;
        Ok(Served { below: below.server, ..served })
    }

    fn cached(&self) -> bool {
        self.server.cached()
    }

    fn slow_of(&self) -> Option<&'static str> {
        (self.client == Client::Slow).then_some("ringtap-on-qemu-nbd")
    }

    fn remark(&self) -> Option<&'static str> {
        Some(
            "the server's CPU is the client's: that of the NBD server below is in the machine's alone",
        )
    }
}
