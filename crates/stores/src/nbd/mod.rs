//! Exports of NBD servers: a client of the protocol.
//!
//! `open` connects and agrees with the server ([`handshake`]). From then on each thread that uses the store has a
//! connection of its own, where the server allows several, up to a limit (`near`); beyond it a thread of the store's
//! (`owner`) has one for all others. A `Link` is such a connection: operations become requests (`requests`), which go out
//! together (`outgoing`), and replies are read in runs ([`replies`]), data of a large read straight to where it
//! belongs. A connection that is lost is looked for again (`redial`), and what was in flight is sent once more.
//!
//! Source of the protocol: doc/proto.md of github.com/NetworkBlockDevice/nbd.

mod channel;
mod dial;
mod far;
pub mod handshake;
mod landing;
mod link;
mod near;
mod outgoing;
mod owner;
mod redial;
pub mod replies;
mod requests;
#[cfg(test)]
mod requests_tests;
#[cfg(test)]
mod sim_tests;
mod uri;
pub mod wire;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ringtap_io::{Io, OpenRemote, Remote, Session};
use rustls::ClientConfig;

use dial::Connection;
use far::{Far, Owner};
use handshake::{ALLOCATION, Agreed, Error, Replies};
use near::{Near, Places};
use redial::Attempt;
pub use uri::{Server, Uri};
use wire::{EXTENDED_REQUEST_MAGIC, REQUEST_MAGIC, can, cmd};

use crate::{Facts, Options, Store, Tells};

/// An open export.
pub(crate) struct Nbd {
    uri: Uri,
    /// The context that tells what it holds.
    status: String,
    tls: Option<Arc<ClientConfig>>,
    agreed: Agreed,
    /// What the server has said last that the export lies in.
    lies_in: Mutex<Vec<String>>,
    shared: Mutex<Shared>,
    closed: AtomicBool,
    /// Told when it closes.
    closing: (Mutex<()>, Condvar),
    places: Places,
    /// Who wants a connection, where a test makes them.
    #[cfg(test)]
    wishes: Option<sim_tests::Wishes>,
}

#[derive(Default)]
struct Shared {
    /// That of opening, for the first who asks.
    spare: Option<Connection>,
    owner: Option<Arc<Owner>>,
    /// The sockets of all connections, by number.
    sockets: Vec<(u64, OwnedFd)>,
    numbered: u64,
    /// Since when there is one.
    since: Option<Instant>,
}

/// Connect to an export to look at one of its metadata contexts, such as `qemu:dirty-bitmap:NAME`, by
/// [`ringtap_io::Op::Status`]: its first two bits are told as those of `base:allocation` are. Nobody should read by that what is
/// data. Waits for the server.
pub fn open_context(uri: &Uri, context: &str) -> Result<Store, Error> {
    let tls = dial::credentials(uri)?;
    let connection = dial::dial(uri, tls.as_ref(), context, dial::LIMIT)?;
    if connection.agreed.status.is_none() {
        return Err(Error::Refused(format!("the server has no context {context} of it")));
    }
    store(uri, tls, connection, context, &Options { read_only: true })
}

/// See that a folder has what a connection by TLS takes.
pub(crate) fn check_certificates(folder: &Path) -> Result<(), Error> {
    dial::config_of(folder).map(drop)
}

/// Connect to an export.
pub(crate) fn open(uri: &Uri, options: &Options) -> Result<Store, Error> {
    let tls = dial::credentials(uri)?;
    let connection = dial::dial(uri, tls.as_ref(), ALLOCATION, dial::LIMIT)?;
    store(uri, tls, connection, ALLOCATION, options)
}

fn store(
    uri: &Uri,
    tls: Option<Arc<ClientConfig>>,
    connection: Connection,
    status: &str,
    options: &Options,
) -> Result<Store, Error> {
    let agreed = connection.agreed;
    if agreed.can(can::READ_ONLY) && !options.read_only {
        return Err(Error::Refused("the server lets nobody write to it: add --read-only".into()));
    }
    // Disks have whole sectors: what a last one lacks cannot be written to.
    let len = if options.read_only { agreed.size } else { agreed.size / 512 * 512 };
    if len != agreed.size {
        tracing::warn!(
            "{uri}: the last {} bytes are no whole sector, and no part of the disk",
            agreed.size - len
        );
    }
    let facts = Facts {
        len,
        read_only: options.read_only,
        block: agreed.block,
        preferred: agreed.preferred,
        rotational: agreed.can(can::ROTATIONAL),
        discard: agreed.can(can::TRIM),
        zero: agreed.can(can::WRITE_ZEROES),
        resizable: false,
        verified: false,
    };
    let lies_in = connection.lies_in.clone();
    let shared = Mutex::new(Shared { spare: Some(connection), ..Shared::default() });
    // One is the owner's.
    let near = if agreed.can(can::MULTI_CONN) { uri.connections.saturating_sub(1) } else { 0 };
    let nbd = Nbd {
        uri: uri.clone(),
        status: status.to_owned(),
        tls,
        agreed,
        lies_in: Mutex::new(lies_in),
        shared,
        closed: AtomicBool::new(false),
        closing: Default::default(),
        places: Places::new(near),
        #[cfg(test)]
        wishes: None,
    };
    let nbd = Arc::new(nbd);
    Ok(Store::new(OpenRemote::new(nbd.clone()), facts).telling(nbd))
}

impl Tells for Nbd {
    fn lies_in(&self) -> Vec<String> {
        self.lies_in.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Nbd {
    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    /// The connection of opening, once.
    fn take_spare(&self) -> Option<Connection> {
        self.shared().spare.take()
    }

    fn redial(self: &Arc<Self>, since: Instant, times: u32) -> Arc<Attempt> {
        Attempt::start(self.clone(), since, times)
    }

    /// Sleep, or until it closes.
    fn pause(&self, time: Duration) {
        let (lock, told) = &self.closing;
        let guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_closed() {
            let _ = told.wait_timeout(guard, time);
        }
    }

    /// Have a connection ended when the store is closed.
    fn know(self: &Arc<Self>, connection: &Connection) -> Known {
        let mut shared = self.shared();
        shared.numbered += 1;
        let number = shared.numbered;
        if let Ok(socket) = connection.socket.try_clone() {
            if shared.sockets.is_empty() {
                shared.since = Some(Instant::now());
            }
            shared.sockets.push((number, socket));
        }
        drop(shared);
        if self.is_closed() {
            connection.channel.shut();
        }
        Known { nbd: self.clone(), number }
    }

    /// Whether there has been one for so long, as far as is known.
    fn has_connections(&self, for_long: Duration) -> bool {
        let shared = self.shared();
        let since = shared.since.filter(|_| !shared.sockets.is_empty());
        since.is_some_and(|since| since.elapsed() >= for_long)
    }

    /// The thread for those who have no connection of their own.
    fn owner(self: &Arc<Self>) -> Arc<Owner> {
        let mut shared = self.shared();
        shared.owner.get_or_insert_with(|| Owner::start(self)).clone()
    }
}

/// A connection that ends with its store.
struct Known {
    nbd: Arc<Nbd>,
    number: u64,
}

impl Drop for Known {
    fn drop(&mut self) {
        self.nbd.shared().sockets.retain(|(number, _)| *number != self.number);
    }
}

impl Remote for Nbd {
    fn session(self: Arc<Self>, io: &Io) -> Rc<dyn Session> {
        match self.places.take() {
            true => Near::start(self, io),
            false => Far::new(self.owner()),
        }
    }

    fn close(&self) {
        self.closed.store(true, SeqCst);
        drop(self.closing.0.lock().unwrap_or_else(PoisonError::into_inner));
        self.closing.1.notify_all();
        let mut shared = self.shared();
        let spare = shared.spare.take().map(|connection| (0, connection.socket));
        for (_, socket) in shared.sockets.drain(..).chain(spare) {
            // Nothing is in flight, so that it comes between no other bytes; encrypted connections end without.
            if self.tls.is_none() {
                let (magic, rest) = match self.agreed.replies {
                    Replies::Extended => (EXTENDED_REQUEST_MAGIC, 24),
                    _ => (REQUEST_MAGIC, 20),
                };
                let mut goodbye = magic.to_be_bytes().to_vec();
                goodbye.extend([0, 0]);
                goodbye.extend(cmd::DISC.to_be_bytes());
                goodbye.extend(std::iter::repeat_n(0, rest));
                let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
                let _ = rustix::net::send(&socket, &goodbye, flags);
            }
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        }
        if let Some(owner) = shared.owner.take() {
            drop(shared);
            owner.close();
        }
    }
}
