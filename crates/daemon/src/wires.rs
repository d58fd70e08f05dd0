//! The wires by which disks are shown.

use std::os::unix::net::UnixListener;
use std::sync::Arc;

use ringtap_export::{Stop, fuse, nbd, ublk, vhost_user};
use ringtap_io::Panic;

use crate::facts::nbd_uri;
use crate::plan::unix_path;
use crate::{Address, handover};

/// How the thread of a server ends.
pub(crate) type End = Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// By what a server shows its disks.
pub(crate) enum Wire {
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
}

impl Wire {
    /// A vhost-user server on a bound socket.
    pub(crate) fn vhost_user(
        listener: UnixListener,
        vbd: ringtap_vbd::Disk,
        options: vhost_user::Options,
        residence: Arc<dyn vhost_user::Residence>,
    ) -> Wire {
        let path = unix_path(&listener).display().to_string();
        let server = vhost_user::Server::new(listener, vbd, options).with_residence(residence);
        if let Some(connection) = handover::front_end(&path) {
            server.adopt(connection);
        }
        Wire::VhostUser { path, server: server.into() }
    }

    /// Why its clients could not go on elsewhere now.
    pub(crate) fn must_stay(&self) -> Option<String> {
        let title = self.title();
        match self {
            Wire::Nbd { server, .. } => server.must_stay().map(|why| format!("{title}: {why}")),
            Wire::VhostUser { server, .. } => {
                server.must_stay().map(|why| format!("{title}: {why}"))
            }
            Wire::Fuse(_) => None,
            Wire::Ublk(_) => {
                Some(format!("{title} is not handed over: restart the server, or end that export"))
            }
        }
    }

    /// From now on the word to stop leaves clients connected, for whoever serves next; or it ends them again.
    pub(crate) fn hand_over(&self, wanted: bool) {
        match self {
            Wire::Nbd { server, .. } => server.hand_over(wanted),
            Wire::VhostUser { server, .. } => server.hand_over(wanted),
            Wire::Fuse(server) => server.hand_over(wanted),
            Wire::Ublk(_) => {}
        }
    }

    /// As a file that is mounted.
    pub(crate) fn fuse(mount: fuse::Mount, vbd: ringtap_vbd::Disk, options: fuse::Options) -> Wire {
        let server = fuse::Server::new(mount, vbd, options);
        if let Some(modified) = handover::modified(server.path()) {
            server.set_modified(modified);
        }
        Wire::Fuse(server.into())
    }

    /// Serve until the word to stop comes, or it ends by itself.
    pub(crate) fn serve(&self, stop: &Stop) -> End {
        match self {
            Wire::Nbd { server, .. } => match Panic::catch(|| server.serve(stop)) {
                Ok(end) => end.map_err(Into::into),
                // Without their listener none of them can be had.
                Err(panic) => {
                    let exports = server.exports();
                    exports.iter().for_each(|one| one.vbd.health().fail(panic.clone()));
                    Err(panic.into())
                }
            },
            Wire::VhostUser { server, .. } => server.serve(stop).map_err(Into::into),
            Wire::Fuse(server) => server.serve(stop).map_err(Into::into),
            Wire::Ublk(server) => server.serve(stop).map_err(Into::into),
        }
    }

    /// What people know it by.
    pub(crate) fn title(&self) -> String {
        match self {
            Wire::Nbd { places, .. } => {
                let first = places.first().map(|(place, _)| place.to_string());
                format!("NBD {}", first.unwrap_or_default())
            }
            Wire::VhostUser { path, .. } => format!("vhost-user {path}"),
            Wire::Fuse(server) => format!("FUSE {}", server.path().display()),
            Wire::Ublk(server) => format!("ublk {}", server.path().display()),
        }
    }

    /// What its thread does.
    pub(crate) fn role(&self) -> &'static str {
        match self {
            Wire::Nbd { .. } => "nbd",
            Wire::VhostUser { .. } => "vu",
            Wire::Fuse(_) => "fuse",
            Wire::Ublk(_) => "ublk",
        }
    }

    /// As the control socket calls it, and short.
    pub(crate) fn names(&self) -> (&'static str, &'static str) {
        match self {
            Wire::Nbd { .. } => ("nbd", "nbd"),
            Wire::VhostUser { .. } => ("vhost-user-blk", "vhost"),
            Wire::Fuse(_) => ("fuse", "fuse"),
            Wire::Ublk(_) => ("__ringtap_ublk", "ublk"),
        }
    }

    /// Where clients find a disk of that export name.
    pub(crate) fn places(&self, name: &str) -> Vec<String> {
        match self {
            Wire::Nbd { places, .. } => {
                places.iter().map(|(address, tls)| nbd_uri(address, name, *tls)).collect()
            }
            Wire::VhostUser { path, .. } => vec![path.clone()],
            Wire::Fuse(server) => vec![server.path().display().to_string()],
            Wire::Ublk(server) => vec![server.path().display().to_string()],
        }
    }

    /// Tell whoever uses the disk that its size is another.
    pub(crate) fn resized(&self) {
        match self {
            // Who connects from now on sees it; the protocol has no word for others.
            Wire::Nbd { .. } => {}
            Wire::VhostUser { server, .. } => server.resized(),
            Wire::Fuse(server) => server.resized(),
            Wire::Ublk(server) => server.resized(),
        }
    }
}
