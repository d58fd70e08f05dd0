//! What is written down of exports: those that clients add, as they said; and that others are there no more.

use serde_json::Value;

use super::tls;
use crate::Address;
use crate::ids::{DiskId, ServerId};
use crate::running::Running;
use crate::transports::Transport;

impl Running {
    /// An export has come that a client wants.
    pub(super) fn note_export(&mut self, disk: DiskId, mut wanted: Value) {
        let id = wanted["id"].as_str().unwrap_or_default();
        let server = self.exports.iter().find(|export| export.id == id).map(|export| export.server);
        let transport = server.and_then(|server| Some(&*self.servers.get(&server)?.transport));
        if let Some(Transport::Nbd { places, keeps_open, .. }) = transport {
            let first = places.first().map(|(place, _)| place.to_string());
            wanted["server"] = first.unwrap_or_default().into();
            let creds = self.nbd_creds.as_ref().filter(|_| *keeps_open);
            if let Some((id, named)) = creds {
                wanted["tls-creds"] = tls::noted(id, named);
            }
            if let Some(most) = self.nbd_most.filter(|_| *keeps_open) {
                wanted["max-connections"] = most.into();
            }
        }
        if let Some(served) = self.disks.get_mut(&disk) {
            served.disk.keeping.exports.push(wanted);
        }
    }

    /// A client has taken an export away.
    pub(super) fn forget_export(&mut self, id: &str) {
        let Some(export) = self.exports.iter().find(|export| export.id == id) else { return };
        let transport = self.servers.get(&export.server).map(|serving| serving.transport.clone());
        let places =
            transport.as_ref().map(|transport| transport.places(&export.name)).unwrap_or_default();
        let Some(served) = self.disks.get_mut(&export.disk) else { return };
        let disk = &mut served.disk;
        let noted = disk.keeping.exports.len();
        disk.keeping.exports.retain(|export| export["id"] != id);
        if disk.keeping.exports.len() < noted {
            return;
        }
        let is_there = |path: &std::path::Path| {
            let path = std::path::absolute(path).unwrap_or(path.into());
            places.iter().any(|place| path == std::path::Path::new(place))
        };
        match transport.as_deref() {
            Some(Transport::Nbd { addresses, .. }) => {
                disk.nbd.retain(|one| !addresses.contains(one))
            }
            Some(Transport::VhostUser { .. }) => disk.vhost_user.retain(|one| match one {
                Address::Unix(path) => !is_there(path),
                _ => true,
            }),
            Some(Transport::Fuse(_)) => disk.fuse.retain(|path| !is_there(path)),
            Some(Transport::Ublk(_)) => disk.ublk = None,
            Some(Transport::Xen { .. }) => {}
            None => {}
        }
    }

    /// A client has taken a server away, with all its exports.
    pub(super) fn forget_exports_of(&mut self, server: ServerId) {
        let of = self.exports.iter().filter(|export| export.server == server);
        let ids: Vec<String> = of.map(|export| export.id.clone()).collect();
        ids.iter().for_each(|id| self.forget_export(id));
    }
}
