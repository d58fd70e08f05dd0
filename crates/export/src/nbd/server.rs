//! The server: takes connections and gives each a thread.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ringtap_vbd::Vbd;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{SocketFlags, accept_with, sockopt};

use super::alarm::Alarm;
use super::connection;
use super::context;
use super::handshake::{Facts, Refusal};
use super::wire::{MAX_PAYLOAD, can};
use crate::Stop;

/// Connections past the limit that are told so politely; further ones are closed at once.
const TOLD: usize = 16;
/// How long one of those may take to listen.
const TOLD_WITHIN: Duration = Duration::from_secs(2);
/// How long to wait before taking another connection when the process is out of something.
const SHORT_OF: Duration = Duration::from_millis(100);
/// Connections taken from one socket before the others, and the word to stop, have their turn.
const AT_ONCE: usize = 64;

/// Bytes of replies that may wait in a UNIX socket, and their bookkeeping beside them.
const SEND_BUFFER: usize = 256 << 10;

/// A socket that listens.
#[derive(Debug)]
pub enum Listener {
    /// A UNIX stream socket.
    Unix(UnixListener),
    /// A TCP socket.
    Tcp(TcpListener),
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// A device under a name.
#[derive(Clone)]
pub struct NamedExport {
    /// What clients choose it by, at most 4096 bytes.
    pub name: String,
    /// For people to read.
    pub description: String,
    /// The device.
    pub vbd: Arc<Vbd>,
}

/// What one client, and all of them, may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// How long a handshake may take.
    pub handshake: Duration,
    /// Requests of one connection under way; further ones stay in its socket.
    pub requests: usize,
    /// Bytes of one connection's requests under way; 64 MiB is the least.
    pub memory: usize,
    /// How long clients may take to receive their last replies when the server stops.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 256,
            handshake: Duration::from_secs(30),
            requests: 256,
            memory: 64 << 20,
            drain: Duration::from_secs(10),
        }
    }
}

/// Why the server could not go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A listening socket cannot be used.
    #[error("cannot {what} the NBD socket {socket}: {source}")]
    Socket {
        /// What was tried.
        what: &'static str,
        /// Which socket.
        socket: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Waiting for clients failed.
    #[error("cannot wait for NBD clients: {0}")]
    Wait(#[source] io::Error),
}

/// Serves exports on sockets.
pub struct Server {
    listeners: Vec<Listener>,
    exports: Arc<[NamedExport]>,
    limits: Limits,
}

struct Client {
    thread: JoinHandle<()>,
    alarm: Arc<Alarm>,
}

impl Server {
    /// A server of these exports; the first also answers to the empty name.
    pub fn new(listeners: Vec<Listener>, exports: Vec<NamedExport>) -> Server {
        Server { listeners, exports: exports.into(), limits: Limits::default() }
    }

    /// The same with other limits.
    pub fn with_limits(self, limits: Limits) -> Server {
        Server { limits, ..self }
    }

    /// Serve until `stop` is raised; then take no more requests, end those under way, flush, close.
    pub fn serve(&self, stop: &Stop) -> Result<(), Error> {
        for listener in &self.listeners {
            rustix::io::ioctl_fionbio(listener, true)
                .map_err(|error| failed("make non-blocking", listener, error.into()))?;
        }
        let mut clients: Vec<Client> = Vec::new();
        let count = Arc::new(AtomicUsize::new(0));
        let outcome = self.take_clients(stop, &mut clients, &count);
        for client in &clients {
            client.alarm.stop();
        }
        for client in clients {
            join(client);
        }
        outcome
    }

    fn take_clients(
        &self,
        stop: &Stop,
        clients: &mut Vec<Client>,
        count: &Arc<AtomicUsize>,
    ) -> Result<(), Error> {
        loop {
            let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
            fds.extend(self.listeners.iter().map(|socket| PollFd::new(socket, PollFlags::IN)));
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Error::Wait(error.into())),
            }
            if stop.is_raised() {
                return Ok(());
            }
            for listener in &self.listeners {
                self.take_from(listener, clients, count)?;
            }
            for i in (0..clients.len()).rev() {
                if clients[i].thread.is_finished() {
                    join(clients.swap_remove(i));
                }
            }
        }
    }

    /// Take connections that wait at a socket.
    fn take_from(
        &self,
        listener: &Listener,
        clients: &mut Vec<Client>,
        count: &Arc<AtomicUsize>,
    ) -> Result<(), Error> {
        use rustix::io::Errno;
        for _ in 0..AT_ONCE {
            match accept_with(listener, SocketFlags::CLOEXEC) {
                Ok(socket) => match self.welcome(socket, listener, count) {
                    Ok(Some(client)) => clients.push(client),
                    Ok(None) => tracing::warn!("too many NBD connections: one was closed"),
                    Err(error) => tracing::error!("cannot serve an NBD connection: {error}"),
                },
                Err(Errno::AGAIN) => return Ok(()),
                // The client was gone before we came, or the network had trouble.
                Err(
                    Errno::INTR
                    | Errno::CONNABORTED
                    | Errno::PROTO
                    | Errno::PERM
                    | Errno::NETDOWN
                    | Errno::HOSTDOWN
                    | Errno::HOSTUNREACH
                    | Errno::NETUNREACH,
                ) => {}
                Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                    tracing::error!("cannot take another NBD connection: {error}");
                    thread::sleep(SHORT_OF);
                    return Ok(());
                }
                Err(error) => return Err(failed("accept on", listener, error.into())),
            }
        }
        Ok(())
    }

    /// Give a connection its thread; none where there are far too many already.
    fn welcome(
        &self,
        socket: OwnedFd,
        listener: &Listener,
        count: &Arc<AtomicUsize>,
    ) -> io::Result<Option<Client>> {
        let before = count.fetch_add(1, SeqCst);
        let leave = Leave(count.clone());
        let mut limits = self.limits;
        let refusal = (before >= limits.connections).then_some(Refusal::Busy);
        if refusal.is_some() {
            limits.handshake = limits.handshake.min(TOLD_WITHIN);
            if before >= limits.connections + TOLD {
                return Ok(None);
            }
        }
        match listener {
            // Large replies wake the client less often; the kernel gives as much as it allows.
            Listener::Unix(_) => sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER)?,
            Listener::Tcp(_) => {
                sockopt::set_tcp_nodelay(&socket, true)?;
                // A client whose machine went away would hold its thread for ever.
                sockopt::set_socket_keepalive(&socket, true)?;
            }
        }
        let alarm = Arc::new(Alarm::new()?);
        let (exports, theirs) = (self.exports.clone(), alarm.clone());
        let thread = thread::Builder::new().name("nbd".into()).spawn(move || {
            let _leave = leave;
            if let Err(error) = connection::run(socket, theirs, exports, refusal, limits) {
                tracing::error!("an NBD connection failed: {error}");
            }
        })?;
        Ok(Some(Client { thread, alarm }))
    }
}

/// Counts a connection off, however it ends.
struct Leave(Arc<AtomicUsize>);

impl Drop for Leave {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

fn join(client: Client) {
    if client.thread.join().is_err() {
        tracing::error!("the thread of an NBD connection panicked");
    }
}

fn failed(what: &'static str, listener: &Listener, source: io::Error) -> Error {
    let socket = match listener {
        Listener::Unix(listener) => listener.local_addr().map(|address| format!("{address:?}")),
        Listener::Tcp(listener) => listener.local_addr().map(|address| address.to_string()),
    };
    Error::Socket { what, socket: socket.unwrap_or_default(), source }
}

/// What the handshake tells of an export now.
pub(super) fn facts(export: &NamedExport) -> Facts {
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
    let shown = export.vbd.bitmaps().map_or(&[][..], |bitmaps| bitmaps.shown());
    let preferred = info.physical_block_size.max(4096).checked_next_power_of_two();
    Facts {
        name: export.name.clone(),
        description: export.description.clone(),
        size: export.vbd.size(),
        flags,
        preferred_block: preferred.unwrap_or(4096).min(MAX_PAYLOAD),
        contexts: context::names(shown.iter().map(|(name, _)| name.as_str())),
    }
}
