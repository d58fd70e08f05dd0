//! The server: takes connections and gives each a thread.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, accept_with, sockopt};

use super::alarm::Alarm;
use super::budget::{Budget, Share};
use super::credentials::Tls;
use super::exports::{Exports, NamedExport, Offered};
use super::handover::{Handover, Running, Session, ShakingHands, copy};
use super::lies_in;
use super::limits::Limits;
use super::listener::Listener;
use super::peer::Peer;
use super::places::Places;
use super::users::Users;
use super::welcome;
use crate::Stop;

/// How long a client that is turned away may take to listen.
const TOLD_WITHIN: Duration = Duration::from_secs(2);
/// How long to wait before taking another connection when the process is out of something.
const SHORT_OF: Duration = Duration::from_millis(100);
/// Connections taken from one socket before the others, and the word to stop, have their turn.
const AT_ONCE: usize = 64;

/// Bytes of replies that may wait in a UNIX socket, and their bookkeeping beside them.
const SEND_BUFFER: usize = 256 << 10;

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
    exports: Arc<Exports>,
    pub(super) handover: Arc<Handover>,
    limits: Limits,
    budget: Arc<Budget>,
    /// Of each listener.
    tls: Vec<Tls>,
    /// Whether the process was found to be out of descriptors or memory, and that was said.
    short: AtomicBool,
}

/// An export that was taken away, and whose clients were told to end.
pub struct Withdrawn(Arc<Users>);

impl Withdrawn {
    /// Wait until the last of them has: each request taken has ended then.
    pub fn wait(&self) {
        self.0.wait();
    }
}

struct Client {
    thread: JoinHandle<()>,
    alarm: Arc<Alarm>,
}

impl Server {
    /// A server of these exports; the first also answers to the empty name.
    pub fn new(listeners: Vec<Listener>, exports: Vec<NamedExport>) -> Server {
        let limits = Limits::default();
        let (budget, short) = (Budget::new(limits.memory_of_all), AtomicBool::new(false));
        let tls = vec![Tls::Off; listeners.len()];
        let exports = Arc::new(Exports::new(exports, &listeners));
        let handover = Arc::default();
        Server { listeners, exports, handover, limits, budget, tls, short }
    }

    /// The sockets that it takes connections from.
    pub fn listeners(&self) -> &[Listener] {
        &self.listeners
    }

    /// The exports that clients find now.
    pub fn exports(&self) -> Vec<NamedExport> {
        self.exports.all().iter().map(|one| one.export.clone()).collect()
    }

    /// Words by which it is known that something lies in the export of that name: its own, and those of what it lies in.
    pub fn lies_in(&self, name: &str) -> Vec<String> {
        let all = self.exports.all();
        let found = all.iter().find(|one| one.export.name == name);
        let words = |NamedExport { name, vbd, .. }: &NamedExport| {
            lies_in::words(&self.exports.sockets, name, vbd)
        };
        found.map_or_else(Vec::new, |one| words(&one.export))
    }

    /// Offer one more, to clients that come from now on.
    pub fn add(&self, export: NamedExport) {
        let mut exports = self.exports.lock();
        *exports = exports.iter().cloned().chain([export.into()]).collect();
    }

    /// How many connections use the export of that name.
    pub fn users(&self, name: &str) -> usize {
        self.exports
            .all()
            .iter()
            .find(|one| one.export.name == name)
            .map_or(0, |it| it.users.count())
    }

    /// Wait until no connection uses the export of that name, though no longer than so: one that has just left is
    /// counted until its thread has ended.
    pub fn wait_until_unused(&self, name: &str, limit: Duration) {
        let exports = self.exports.all();
        let users = exports.iter().find(|one| one.export.name == name).map(|one| one.users.clone());
        drop(exports);
        if let Some(users) = users {
            users.wait_for(limit);
        }
    }

    /// Requests that wait for room fail, and none waits from now on: it is about to end.
    pub fn give_up_waiting(&self) {
        self.exports.all().iter().for_each(|one| one.export.vbd.give_up_own());
    }

    /// Offer the export of that name no more, and have the connections that use it end as if the server did; what waits for room
    /// by them fails. Other exports and their clients go on.
    pub fn withdraw(&self, name: &str) -> Option<Withdrawn> {
        let mut exports = self.exports.lock();
        let Offered { export, users } = exports.iter().find(|one| one.export.name == name)?.clone();
        *exports = exports.iter().filter(|one| one.export.name != name).cloned().collect();
        drop(exports);
        users.withdraw();
        export.vbd.give_up_own();
        Some(Withdrawn(users))
    }

    /// The same with what each of the listeners has of TLS; what is not said is off.
    pub fn with_tls(self, mut tls: Vec<Tls>) -> Server {
        tls.resize(self.listeners.len(), Tls::Off);
        Server { tls, ..self }
    }

    /// The same with other limits.
    pub fn with_limits(self, limits: Limits) -> Server {
        let memory = limits.memory.max(Limits::LEAST_MEMORY);
        let budget = Budget::new(limits.memory_of_all);
        Server { limits: Limits { memory, ..limits }, budget, ..self }
    }

    /// The same with memory that it shares with other servers of the process.
    pub fn with_budget(self, budget: Arc<Budget>) -> Server {
        Server { budget, ..self }
    }

    /// Serve until `stop` is raised; then take no more requests, end those in flight, flush, close. Where clients go on
    /// elsewhere ([`Server::hand_over`]) they are left as they are, between two requests.
    pub fn serve(&self, stop: &Stop) -> Result<(), Error> {
        for listener in &self.listeners {
            rustix::io::ioctl_fionbio(listener, true)
                .map_err(|error| failed("make non-blocking", listener, error.into()))?;
        }
        let mut clients: Vec<Client> = Vec::new();
        let places = |one: &Listener| Places::new(name_of(one), &self.limits);
        let places = self.listeners.iter().map(places).zip(self.tls.iter().cloned());
        let places: Vec<_> = places.collect();
        let bell = Stop::new().map_err(Error::Wait)?;
        self.handover.tell_by(bell.clone());
        let outcome = loop {
            self.adopt_clients(&mut clients, &places);
            let outcome = self.take_clients([stop, &bell], &mut clients, &places);
            if outcome.is_err() || !self.handover.is_wanted() {
                clients.iter().for_each(|client| client.alarm.stop());
                break outcome;
            }
            clients.iter().for_each(|client| client.alarm.leave());
            if self.handover.have_left() {
                break outcome;
            }
        };
        clients.into_iter().for_each(join);
        outcome
    }

    /// Go on with clients of another server, or of this one, that were to leave it.
    fn adopt_clients(&self, clients: &mut Vec<Client>, places: &[(Arc<Places>, Tls)]) {
        for session in self.handover.adopted() {
            // By whichever of them it came: the limits are alike.
            let is_unix = sockopt::socket_domain(&session.socket) == Ok(AddressFamily::UNIX);
            let fits = |(one, _): &(&Listener, _)| matches!(one, Listener::Unix(_)) == is_unix;
            let found = self.listeners.iter().zip(places).find(fits);
            let found = found.or(self.listeners.iter().zip(places).next());
            let Some((listener, places)) = found else { continue };
            let taken = copy(&session.socket)
                .and_then(|socket| self.welcome(socket, listener, places, Some(session)));
            match taken {
                Ok(client) => clients.extend(client),
                Err(error) => tracing::error!("an NBD client is let go: {error}"),
            }
        }
    }

    fn take_clients(
        &self,
        [stop, bell]: [&Stop; 2],
        clients: &mut Vec<Client>,
        places: &[(Arc<Places>, Tls)],
    ) -> Result<(), Error> {
        loop {
            let mut fds = vec![PollFd::new(stop, PollFlags::IN), PollFd::new(bell, PollFlags::IN)];
            let takes = self.handover.takes_new_ones();
            let all = self.listeners.iter().filter(|_| takes);
            fds.extend(all.map(|socket| PollFd::new(socket, PollFlags::IN)));
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Error::Wait(error.into())),
            }
            if stop.is_raised() {
                return Ok(());
            }
            if bell.is_raised() {
                bell.lower();
                self.adopt_clients(clients, places);
            }
            for (listener, places) in self.listeners.iter().zip(places).filter(|_| takes) {
                self.take_from(listener, clients, places)?;
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
        places: &(Arc<Places>, Tls),
    ) -> Result<(), Error> {
        use rustix::io::Errno;
        for _ in 0..AT_ONCE {
            match accept_with(listener, SocketFlags::CLOEXEC) {
                Ok(socket) => match self.welcome(socket, listener, places, None) {
                    Ok(client) => {
                        self.short.store(false, Relaxed);
                        clients.extend(client);
                    }
                    Err(error) => self.is_short("serve an NBD connection", &error),
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
                    self.is_short("take another NBD connection", &error.into());
                    thread::sleep(SHORT_OF);
                    return Ok(());
                }
                Err(error) => return Err(failed("accept on", listener, error.into())),
            }
        }
        Ok(())
    }

    /// Say once that the process is out of something, until it is not.
    fn is_short(&self, tried: &str, error: &io::Error) {
        if !self.short.swap(true, Relaxed) {
            tracing::error!("cannot {tried}, clients have to wait or are closed: {error}");
        }
    }

    /// Give a connection its thread; none where there are far too many already.
    fn welcome(
        &self,
        socket: OwnedFd,
        listener: &Listener,
        (places, tls): &(Arc<Places>, Tls),
        session: Option<Session>,
    ) -> io::Result<Option<Client>> {
        let (socket, peer) = Peer::of(socket, listener);
        let place = match session {
            Some(_) => Some(places.enter_again(peer)),
            None => places.enter(peer),
        };
        let Some(place) = place else { return Ok(None) };
        let mut limits = self.limits;
        if place.refusal.is_some() {
            limits.handshake = limits.handshake.min(TOLD_WITHIN);
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
        let (exports, theirs, budget) = (self.exports.clone(), alarm.clone(), self.budget.clone());
        let (tls, handover) = (tls.clone(), self.handover.clone());
        let (running, shaking_hands) = (Running::new(&handover), ShakingHands::new(&handover));
        let thread = thread::Builder::new().name("nbd".into()).spawn(move || {
            let share = Share::new(budget, peer, theirs.clone());
            let refusal = place.refusal;
            let client = welcome::Client {
                socket,
                peer,
                alarm: theirs,
                exports,
                refusal,
                limits,
                share,
                tls,
                handover,
                shaking_hands,
                session,
            };
            if let Err(error) = welcome::run(client) {
                tracing::error!("an NBD connection failed: {error}");
            }
            drop(place);
            drop(running);
        })?;
        Ok(Some(Client { thread, alarm }))
    }
}

fn join(client: Client) {
    if client.thread.join().is_err() {
        tracing::error!("the thread of an NBD connection panicked");
    }
}

fn failed(what: &'static str, listener: &Listener, source: io::Error) -> Error {
    Error::Socket { what, socket: name_of(listener), source }
}

/// What people know a listening socket by.
fn name_of(listener: &Listener) -> String {
    let name = match listener {
        Listener::Unix(listener) => listener.local_addr().map(|address| {
            let path = address.as_pathname().map(|path| path.display().to_string());
            path.unwrap_or_else(|| format!("{address:?}"))
        }),
        Listener::Tcp(listener) => listener.local_addr().map(|address| address.to_string()),
    };
    name.unwrap_or_default()
}
