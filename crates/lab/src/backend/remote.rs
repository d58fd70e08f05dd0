//! Disks on an NBD server, under Ringtap's client and under QEMU's. Both are reached over vhost-user, so that one load drives them.

use super::{Access, Backend, Context, Entry, File, Peers, Reach, Served, nbdkit, qemu, ringtap};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::sample::Stage;

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

const QSD_ON_QEMU: OverNbd = OverNbd { server: &qemu::NBD, client: Client::Qemu };
const RINGTAP_ON_QEMU: OverNbd = OverNbd { server: &qemu::NBD, client: Client::Ringtap };
const SLOW_ON_QEMU: OverNbd = OverNbd { server: &qemu::NBD, client: Client::Slow };
const QSD_ON_NBDKIT: OverNbd = OverNbd { server: &nbdkit::Nbdkit, client: Client::Qemu };
const RINGTAP_ON_NBDKIT: OverNbd = OverNbd { server: &nbdkit::Nbdkit, client: Client::Ringtap };
const QSD_ON_OWN: OverNbd = OverNbd { server: &ringtap::NBD, client: Client::Qemu };
const RINGTAP_ON_OWN: OverNbd = OverNbd { server: &ringtap::NBD, client: Client::Ringtap };

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::usual(
            Stage::Remote,
            10,
            "qsd-on-qemu-nbd",
            "qemu-storage-daemon's NBD client on qemu-nbd",
            &QSD_ON_QEMU,
        ),
        Entry::usual(
            Stage::Remote,
            20,
            "ringtap-on-qemu-nbd",
            "ringtap serve nbd+unix: on qemu-nbd",
            &RINGTAP_ON_QEMU,
        ),
        Entry::usual(
            Stage::Remote,
            30,
            "qsd-on-nbdkit",
            "qemu-storage-daemon's NBD client on nbdkit file",
            &QSD_ON_NBDKIT,
        ),
        Entry::usual(
            Stage::Remote,
            40,
            "ringtap-on-nbdkit",
            "ringtap serve nbd+unix: on nbdkit file",
            &RINGTAP_ON_NBDKIT,
        ),
        Entry::usual(
            Stage::Remote,
            50,
            "qsd-on-ringtap",
            "qemu-storage-daemon's NBD client on ringtap serve --nbd",
            &QSD_ON_OWN,
        ),
        Entry::usual(
            Stage::Remote,
            60,
            "ringtap-on-ringtap",
            "ringtap serve nbd+unix: on ringtap serve --nbd",
            &RINGTAP_ON_OWN,
        ),
        Entry::usual(
            Stage::Remote,
            70,
            "slow",
            "ringtap-on-qemu-nbd with each answer held back by 20 % of its time: known to be slower",
            &SLOW_ON_QEMU,
        ),
    ],
    labels: &[
        ("qsd-on-qemu-nbd", "QEMU's client on qemu-nbd"),
        ("ringtap-on-qemu-nbd", "Ringtap on qemu-nbd"),
        ("qsd-on-nbdkit", "QEMU's client on nbdkit"),
        ("ringtap-on-nbdkit", "Ringtap on nbdkit"),
        ("qsd-on-ringtap", "QEMU's client on Ringtap's server"),
        ("ringtap-on-ringtap", "Ringtap on Ringtap's server"),
    ],
    peers: &[
        Peers {
            place: 290,
            stage: Stage::Remote,
            arm: "ringtap-on-qemu-nbd",
            against: &["qsd-on-qemu-nbd"],
        },
        Peers {
            place: 300,
            stage: Stage::Remote,
            arm: "ringtap-on-nbdkit",
            against: &["qsd-on-nbdkit"],
        },
        Peers {
            place: 310,
            stage: Stage::Remote,
            arm: "ringtap-on-ringtap",
            against: &["qsd-on-ringtap"],
        },
    ],
};
