//! What a server offers, and who uses it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringtap_vbd::Disk;

use super::context;
use super::handshake::Facts;
use super::lies_in;
use super::listener::Listener;
use super::users::Users;
use super::wire::{MAX_PAYLOAD, can};

/// A device under a name.
#[derive(Clone)]
pub struct NamedExport {
    /// What clients choose it by, at most 4096 bytes.
    pub name: String,
    /// For people to read.
    pub description: String,
    /// The device.
    pub vbd: Disk,
}

/// An export, and who uses it.
#[derive(Clone)]
pub(super) struct Offered {
    pub(super) export: NamedExport,
    pub(super) users: Arc<Users>,
}

impl From<NamedExport> for Offered {
    fn from(export: NamedExport) -> Offered {
        let vbd = export.vbd.apart();
        Offered { export: NamedExport { vbd, ..export }, users: Arc::default() }
    }
}

/// What is offered now.
pub(super) struct Exports {
    list: Mutex<Arc<[Offered]>>,
    /// What no other listening socket is known by.
    pub(super) sockets: Vec<String>,
}

impl Exports {
    pub(super) fn new(exports: Vec<NamedExport>, listeners: &[Listener]) -> Exports {
        let list = Mutex::new(exports.into_iter().map(Offered::from).collect());
        Exports { list, sockets: listeners.iter().map(lies_in::of_socket).collect() }
    }

    /// What the handshake tells of one now.
    pub(super) fn facts(&self, export: &NamedExport) -> Facts {
        facts(export, lies_in::words(&self.sockets, &export.name, &export.vbd))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Arc<[Offered]>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All of them. Who keeps this keeps their images open.
    pub(super) fn all(&self) -> Arc<[Offered]> {
        self.lock().clone()
    }

    /// The one of those users, if it still is.
    pub(super) fn of(&self, users: &Arc<Users>) -> Option<Offered> {
        self.lock().iter().find(|one| Arc::ptr_eq(&one.users, users)).cloned()
    }
}

fn facts(export: &NamedExport, lies_in: Vec<String>) -> Facts {
    let info = export.vbd.info();
    // A flush is carried out on the image's file, so it covers what other connections wrote.
    let mut flags = can::FLUSH | can::FUA | can::CACHE | can::MULTI_CONN;
    flags |= if info.rotational { can::ROTATIONAL } else { 0 };
    if info.read_only {
        flags |= can::READ_ONLY;
    } else {
        flags |= can::WRITE_ZEROES | can::FAST_ZERO;
        flags |= if info.discard { can::TRIM } else { 0 };
    }
    let bitmaps = export.vbd.bitmaps();
    let shown = bitmaps.as_ref().map_or(&[][..], |bitmaps| bitmaps.shown());
    let preferred = info.physical_block_size.max(4096).checked_next_power_of_two();
    Facts {
        name: export.name.clone(),
        description: export.description.clone(),
        size: export.vbd.size(),
        flags,
        preferred_block: preferred.unwrap_or(4096).min(MAX_PAYLOAD),
        contexts: context::names(shown.iter().map(|(name, _)| name.as_str())),
        lies_in,
        available: export.vbd.health().failure().is_none(),
    }
}
