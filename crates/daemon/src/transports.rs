//! The transports by which disks are shown.

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use ringtap_export::{Stop, fuse, nbd, ublk, vhost_user, xen};
use ringtap_io::Panic;

use crate::facts::nbd_uri;
use crate::socket::unix_path;
use crate::{Address, handover};

/// How the thread of a server ends.
pub(crate) type End = Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// By what a server shows its disks.
pub(crate) enum Transport {
    /// To NBD clients, each by its name.
    Nbd {
        addresses: Vec<Address>,
        /// Where it is found, and whether by TLS alone.
        places: Vec<(Address, bool)>,
        server: Arc<nbd::Server>,
        /// Whether it goes on where it shows nothing.
        keeps_open: bool,
    },
    /// To a vhost-user front-end.
    VhostUser { path: String, server: Arc<vhost_user::Server> },
    /// As a file.
    Fuse(Arc<fuse::Server>),
    /// As a block device of this host.
    Ublk(Arc<ublk::Server>),
    /// To guests of Xen, whose toolstack names them.
    Xen {
        server: xen::Server,
        /// That of the one server of this host.
        _lock: File,
    },
}

impl Transport {
    /// A vhost-user server on a bound socket.
    pub(crate) fn vhost_user(
        listener: UnixListener,
        vbd: ringtap_vbd::Disk,
        options: vhost_user::Options,
        residence: Arc<dyn vhost_user::Residence>,
    ) -> Transport {
        let path = unix_path(&listener).display().to_string();
        let server = vhost_user::Server::new(listener, vbd, options).with_residence(residence);
        if let Some(connection) = handover::front_end(&path) {
            server.adopt(connection);
        }
        Transport::VhostUser { path, server: server.into() }
    }

    /// Why its clients could not go on elsewhere now; those that speak TLS need not where that is said.
    pub(crate) fn must_stay(&self, closes_tls: bool) -> Option<String> {
        let title = self.title();
        match self {
            Transport::Nbd { .. } if closes_tls => None,
            Transport::Nbd { server, .. } => {
                server.must_stay().map(|why| format!("{title}: {why}"))
            }
            Transport::VhostUser { server, .. } => {
                server.must_stay().map(|why| format!("{title}: {why}"))
            }
            Transport::Fuse(_) => None,
            Transport::Ublk(server) => server.must_stay().map(|why| format!("{title}: {why}")),
            Transport::Xen { .. } => {
                Some("guests of Xen are not handed over: restart the server, and they go on".into())
            }
        }
    }

    /// From now on the word to stop leaves clients connected, for whoever serves next; or it ends them again.
    pub(crate) fn hand_over(&self, wanted: bool) {
        match self {
            Transport::Nbd { server, .. } => server.hand_over(wanted),
            Transport::VhostUser { server, .. } => server.hand_over(wanted),
            Transport::Fuse(server) => server.hand_over(wanted),
            Transport::Ublk(server) => server.hand_over(wanted),
            Transport::Xen { .. } => {}
        }
    }

    /// Once it has ended: have it go on, when it serves again, with the clients that it left for another server.
    pub(crate) fn take_back(&self) {
        match self {
            Transport::Nbd { server, .. } => {
                server.left().into_iter().for_each(|session| server.adopt(session));
            }
            Transport::VhostUser { server, .. } => match server.left() {
                Ok(left) => left.into_iter().for_each(|connection| server.adopt(connection)),
                Err(error) => tracing::error!("a front-end is let go: {error}"),
            },
            Transport::Fuse(_) | Transport::Ublk(_) | Transport::Xen { .. } => {}
        }
    }

    /// Told to stop for another server, and waiting for some of its requests: have it serve on, with the clients that wait for
    /// none of them at once. False where all its clients do, or it is about to end.
    pub(crate) fn stays(&self, stop: &Stop) -> bool {
        match self {
            Transport::Nbd { server, .. } => server.take_back(stop),
            Transport::VhostUser { .. }
            | Transport::Fuse(_)
            | Transport::Ublk(_)
            | Transport::Xen { .. } => false,
        }
    }

    /// As a file that is mounted.
    pub(crate) fn fuse(
        mount: fuse::Mount,
        vbd: ringtap_vbd::Disk,
        options: fuse::Options,
    ) -> Transport {
        let server = fuse::Server::new(mount, vbd, options);
        if let Some(modified) = handover::modified(server.path()) {
            server.set_modified(modified);
        }
        Transport::Fuse(server.into())
    }

    /// Serve until the word to stop comes, or it ends by itself.
    pub(crate) fn serve(&self, stop: &Stop) -> End {
        match self {
            Transport::Nbd { server, .. } => match Panic::catch(|| server.serve(stop)) {
                Ok(end) => end.map_err(Into::into),
                // Without their listener none of them can be had.
                Err(panic) => {
                    let exports = server.exports();
                    exports.iter().for_each(|one| one.vbd.health().fail(panic.clone()));
                    Err(panic.into())
                }
            },
            Transport::VhostUser { server, .. } => server.serve(stop).map_err(Into::into),
            Transport::Fuse(server) => server.serve(stop).map_err(Into::into),
            Transport::Ublk(server) => server.serve(stop).map_err(Into::into),
            Transport::Xen { server, .. } => server.serve(stop).map_err(Into::into),
        }
    }

    /// What people know it by.
    pub(crate) fn title(&self) -> String {
        match self {
            Transport::Nbd { places, .. } => {
                let first = places.first().map(|(place, _)| place.to_string());
                format!("NBD {}", first.unwrap_or_default())
            }
            Transport::VhostUser { path, .. } => format!("vhost-user {path}"),
            Transport::Fuse(server) => format!("FUSE {}", server.path().display()),
            Transport::Ublk(server) => format!("ublk {}", server.path().display()),
            Transport::Xen { .. } => "Xen".into(),
        }
    }

    /// What its thread does.
    pub(crate) fn role(&self) -> &'static str {
        match self {
            Transport::Nbd { .. } => "nbd",
            Transport::VhostUser { .. } => "vu",
            Transport::Fuse(_) => "fuse",
            Transport::Ublk(_) => "ublk",
            Transport::Xen { .. } => "xen",
        }
    }

    /// As the control socket calls it, and short.
    pub(crate) fn names(&self) -> (&'static str, &'static str) {
        match self {
            Transport::Nbd { .. } => ("nbd", "nbd"),
            Transport::VhostUser { .. } => ("vhost-user-blk", "vhost"),
            Transport::Fuse(_) => ("fuse", "fuse"),
            Transport::Ublk(_) => ("__ringtap_ublk", "ublk"),
            Transport::Xen { .. } => ("__ringtap_xen", "xen"),
        }
    }

    /// Where clients find a disk of that export name.
    pub(crate) fn places(&self, name: &str) -> Vec<String> {
        match self {
            Transport::Nbd { places, .. } => {
                places.iter().map(|(address, tls)| nbd_uri(address, name, *tls)).collect()
            }
            Transport::VhostUser { path, .. } => vec![path.clone()],
            Transport::Fuse(server) => vec![server.path().display().to_string()],
            Transport::Ublk(server) => vec![server.path().display().to_string()],
            Transport::Xen { .. } => vec![name.to_owned()],
        }
    }

    /// Words by which it is known that something lies in the disk of that export name.
    pub(crate) fn lies_in(&self, name: &str) -> Vec<String> {
        match self {
            Transport::Nbd { server, .. } => server.lies_in(name),
            _ => vec![],
        }
    }

    /// Requests that wait for room by it fail, and none waits from now on: it is about to end. A guest of Xen's gives its disk back
    /// by itself.
    pub(crate) fn give_up_waiting(&self) {
        match self {
            Transport::Nbd { server, .. } => server.give_up_waiting(),
            Transport::VhostUser { server, .. } => server.give_up_waiting(),
            Transport::Fuse(server) => server.give_up_waiting(),
            Transport::Ublk(server) => server.give_up_waiting(),
            Transport::Xen { .. } => {}
        }
    }

    /// Whether its clients make their disk larger.
    pub(crate) fn grows(&self) -> bool {
        matches!(self, Transport::Fuse(server) if server.grows())
    }

    /// Tell whoever uses the disk that its size is another.
    pub(crate) fn resized(&self) {
        match self {
            // Who connects from now on sees it; the protocol has no word for others.
            Transport::Nbd { .. } => {}
            Transport::VhostUser { server, .. } => server.resized(),
            Transport::Fuse(server) => server.resized(),
            Transport::Ublk(server) => server.resized(),
            Transport::Xen { server, .. } => server.resized(),
        }
    }
}
