//! What is written down of exports: those that clients add, as they said; and that others are there no more.

use serde_json::{Map, Value, json};

use super::exports::{AddExport, ExportType};
use super::tls;
use crate::Address;
use crate::running::{DiskId, Running, ServerId};
use crate::transports::Transport;

/// An export as it may be added again, but for its node.
pub(super) fn wanted(export: &AddExport) -> Value {
    let mut all = Map::new();
    let mut put = |key: &str, value: Option<Value>| {
        all.extend(value.filter(|value| !value.is_null()).map(|value| (key.to_owned(), value)));
    };
    put("id", Some(export.id.clone().into()));
    put("writable", export.writable.map(Value::from));
    put("writethrough", export.writethrough.map(Value::from));
    match &export.of {
        ExportType::Nbd(of) => {
            put("type", Some("nbd".into()));
            // The node may be called otherwise by the time that it is added again, and clients go by this.
            put("name", Some(of.name.as_ref().unwrap_or(&export.node_name).clone().into()));
            put("description", of.description.clone().map(Value::from));
            put("bitmaps", of.bitmaps.clone().map(Value::from));
        }
        ExportType::Vhost(of) => {
            put("type", Some("vhost-user-blk".into()));
            put("addr", Some(json!({ "type": "unix", "path": of.path() })));
            put("logical-block-size", of.logical_block_size.map(Value::from));
            put("num-queues", of.num_queues.map(Value::from));
            put("__ringtap_serial", Some(of.serial(&export.node_name).into()));
        }
        ExportType::Fuse(of) => {
            put("type", Some("fuse".into()));
            put("mountpoint", Some(of.mountpoint.clone().into()));
            put("growable", of.growable.map(Value::from));
            put("allow-other", of.allow_other.map(|who| who.word().into()));
        }
        ExportType::Ublk(of) => {
            put("type", Some("__ringtap_ublk".into()));
            put("number", of.number.map(Value::from));
            put("num-queues", of.num_queues.map(Value::from));
            put("logical-block-size", of.logical_block_size.map(Value::from));
        }
    }
    all.into()
}

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
