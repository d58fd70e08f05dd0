//! What has come from the server before this one, and waits for who asks for it; and what becomes of what is at the names of this
//! process.

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ringtap_export::{fuse, nbd, ublk, vhost_user};
use ringtap_vbd::Disk;

use crate::Address;

/// Whether what is at the names of this process belongs to another one: it must not be removed.
static NOT_OURS: AtomicBool = AtomicBool::new(false);

/// Whether sockets, mounts and the file of the process id stay where they are when this process ends.
pub(crate) fn leaves_all() -> bool {
    NOT_OURS.load(SeqCst)
}

/// The channel to the next server while there is one, and whether this process is told to end.
pub(super) static UNDER_WAY: Mutex<(Option<UnixStream>, bool)> = Mutex::new((None, false));

/// This process is told to end: it is followed by no other, unless that has all already.
pub(crate) fn told_to_end() {
    let mut under_way = lock(&UNDER_WAY);
    under_way.1 = true;
    if let Some(channel) = &under_way.0 {
        // What the next has said is heard, and nothing that it says from now on: it knows that.
        let _ = channel.shutdown(Shutdown::Read);
    }
}

/// What has come from the server before this one, and nobody has asked for yet.
pub(super) static COME: Mutex<Come> = Mutex::new(Come {
    listeners: vec![],
    front_ends: vec![],
    sessions: vec![],
    mounts: vec![],
    modified: vec![],
    devices: vec![],
    control: vec![],
});

pub(super) struct Come {
    pub(super) listeners: Vec<Listening>,
    pub(super) front_ends: Vec<(String, vhost_user::Connection)>,
    pub(super) sessions: Vec<(String, nbd::Session)>,
    pub(super) mounts: Vec<(PathBuf, fuse::Passed)>,
    pub(super) modified: Vec<(PathBuf, Duration)>,
    /// By the node names of their disks.
    pub(super) devices: Vec<(String, Arc<ublk::Server>)>,
    /// Clients of control sockets that were greeted and have said nothing.
    pub(super) control: Vec<OwnedFd>,
}

pub(super) struct Listening {
    pub(super) asked: String,
    pub(super) place: String,
    pub(super) socket: OwnedFd,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Which address was asked for, by that which a socket has.
static ASKED: Mutex<Option<HashMap<String, String>>> = Mutex::new(None);

/// Note that a socket listens there because somebody asked for it by that address.
pub(crate) fn note(place: &Address, asked: &Address) {
    let mut all = lock(&ASKED);
    all.get_or_insert_default().insert(place.to_string(), whole(asked));
}

pub(super) fn asked(place: &Address) -> String {
    let all = lock(&ASKED);
    let found = all.as_ref().and_then(|all| all.get(&place.to_string()).cloned());
    found.unwrap_or_else(|| place.to_string())
}

/// An address that means the same in every folder.
pub(super) fn whole(address: &Address) -> String {
    match address {
        Address::Unix(path) => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            Address::Unix(path).to_string()
        }
        address => address.to_string(),
    }
}

/// Sockets of the server before this one that listen where somebody asks for one.
pub(crate) fn inherited(address: &Address) -> Vec<OwnedFd> {
    let wanted = whole(address);
    let mut come = lock(&COME);
    let by_asked = come.listeners.iter().any(|one| one.asked == wanted);
    let fits = |one: &Listening| match by_asked {
        true => one.asked == wanted,
        false => one.place == wanted,
    };
    let (found, others) = std::mem::take(&mut come.listeners).into_iter().partition(fits);
    come.listeners = others;
    let found: Vec<Listening> = found;
    found.into_iter().map(|one| one.socket).collect()
}

/// The same of a UNIX socket's path.
pub(crate) fn inherited_at(path: &Path) -> Option<OwnedFd> {
    inherited(&Address::Unix(path.to_owned())).into_iter().next()
}

/// Clients of control sockets that the server before this one has greeted, and that have said nothing.
pub(crate) fn control_clients() -> Vec<OwnedFd> {
    std::mem::take(&mut lock(&COME).control)
}

/// The front-end that came to the server before this one by the socket at that path.
pub(crate) fn front_end(path: &str) -> Option<vhost_user::Connection> {
    let mut come = lock(&COME);
    let found = come.front_ends.iter().position(|(place, _)| place == path)?;
    Some(come.front_ends.swap_remove(found).1)
}

/// The NBD clients of the servers whose first socket is one of those.
pub(crate) fn sessions(places: &[String]) -> Vec<nbd::Session> {
    let mut come = lock(&COME);
    let all = std::mem::take(&mut come.sessions);
    let (found, others) = all.into_iter().partition(|(of, _)| places.contains(of));
    come.sessions = others;
    let found: Vec<(String, nbd::Session)> = found;
    found.into_iter().map(|(_, session)| session).collect()
}

/// Mount a disk over a file that `fits`, or go on with what the server before this one has mounted there: nobody answers yet who
/// looks at that.
pub(crate) fn mount(
    path: &Path,
    image: &Path,
    options: &fuse::Options,
    fits: impl FnOnce() -> Result<(), fuse::Error>,
) -> Result<fuse::Mount, fuse::Error> {
    if !lock(&COME).mounts.is_empty() {
        let resolved = fuse::resolve(path)?;
        let mut come = lock(&COME);
        if let Some(at) = come.mounts.iter().position(|(mounted, _)| *mounted == resolved) {
            let (_, passed) = come.mounts.swap_remove(at);
            let image = std::path::absolute(image).unwrap_or_else(|_| image.to_owned());
            return Ok(fuse::Mount::adopt(&resolved, &image, passed));
        }
    }
    fits()?;
    fuse::Mount::new(path, image, options)
}

/// Have a disk be a block device of this host, or go on with what the server before this one has let go of.
pub(crate) fn device(
    disk: &str,
    (image, number): (&Path, Option<u32>),
    vbd: &Disk,
    options: &ublk::Options,
) -> Result<Arc<ublk::Server>, ublk::Error> {
    let fits = |(of, server): &(String, Arc<ublk::Server>)| {
        of == disk && number.is_none_or(|number| number == server.number())
    };
    let mut come = lock(&COME);
    if let Some(at) = come.devices.iter().position(fits) {
        let (_, server) = come.devices.swap_remove(at);
        drop(come);
        server.begin()?;
        return Ok(server);
    }
    drop(come);
    let device = ublk::Device::open(image, number, vbd, options)?;
    Ok(ublk::Server::start(device, vbd.clone())?.into())
}

/// When the file there changed the last time, as the server before this one has shown it.
pub(crate) fn modified(path: &Path) -> Option<Duration> {
    let mut come = lock(&COME);
    let found = come.modified.iter().position(|(mounted, _)| mounted == path)?;
    Some(come.modified.swap_remove(found).1)
}

/// From now on what is at the names of this process belongs to another; or it is its own.
pub(super) fn leave_all(leaves: bool) {
    NOT_OURS.store(leaves, SeqCst);
    fuse::keep_mounts(leaves);
}
