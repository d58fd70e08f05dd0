//! Control sockets: a thread takes connections, or makes one (`dial.rs`), and each has a thread of its own, which waits
//! for the client, and for nothing else. Commands are carried out by the thread that serves (`serve.rs`), one at a time.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ringtap_export::Stop;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, accept_with, recv, send};
use serde_json::{Value, json};

use super::about::version;
use super::dial;
use super::outgoing::{Events, Outgoing};
use super::refusal::Refusal;
use super::request::Request;
use super::shape::Write;
use super::table;
use super::wire::{self, Malformed, Scanner};
use crate::events::{Event, contained, spawn};
use crate::socket::{self, SocketFile};
use crate::{Address, ControlAt, Error};

/// Whoever may connect at all may use the server as its owner may.
const MODE: u32 = 0o600;
/// The most clients at a time; more are closed at once.
const CLIENTS: usize = 64;
/// How long to wait before taking another connection when the process is out of something.
const SHORT_OF: Duration = Duration::from_millis(100);
/// Bytes taken from a client at a time.
const PIECE: usize = 64 << 10;

/// A way to clients, ready for them.
pub(crate) enum Way {
    /// A socket that listens.
    Listening { listener: UnixListener, file: SocketFile, path: PathBuf },
    /// One to connect to.
    Dialled(PathBuf),
}

impl Way {
    /// Listen there, where that is meant; the socket of a dead server is replaced.
    pub(crate) fn prepare(at: &ControlAt) -> Result<Way, Error> {
        Ok(match at {
            ControlAt::Listen(path) => {
                let (listener, file) = socket::unix(path, MODE)?;
                Way::Listening { listener, file, path: path.clone() }
            }
            ControlAt::Dial(path) => Way::Dialled(path.clone()),
        })
    }

    /// The socket that listens, for the process that comes after this one.
    pub(crate) fn socket(&self) -> Option<(Address, OwnedFd)> {
        let Way::Listening { listener, path, .. } = self else { return None };
        Some((Address::Unix(path.clone()), listener.as_fd().try_clone_to_owned().ok()?))
    }
}

/// The control sockets and their clients, until this drops.
pub(crate) struct Server {
    stop: Stop,
    threads: Vec<JoinHandle<()>>,
    _files: Vec<SocketFile>,
}

impl Server {
    /// Take clients: their commands come to `inbox`, and `events` are told to them.
    pub(crate) fn start(
        ways: Vec<Way>,
        inbox: &Sender<Event>,
        events: &Events,
    ) -> Result<Server, Error> {
        let failed = |source| Error::Process { tried: "set up the control socket", source };
        let stop = Stop::new().map_err(failed)?;
        let mut server = Server { stop, threads: vec![], _files: vec![] };
        for way in ways {
            let (stop, inbox, events) = (server.stop.clone(), inbox.clone(), events.clone());
            let thread = match way {
                Way::Listening { listener, file, .. } => {
                    server._files.push(file);
                    listener.set_nonblocking(true).map_err(failed)?;
                    spawn("control", move || take_clients(&listener, &stop, &inbox, &events))?
                }
                Way::Dialled(path) => {
                    spawn("control dial", move || dial::dial(&path, &stop, &inbox, &events))?
                }
            };
            server.threads.push(thread);
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.raise();
        for thread in self.threads.drain(..) {
            // One that panicked has told of it.
            let _ = thread.join();
        }
    }
}

fn take_clients(listener: &UnixListener, stop: &Stop, inbox: &Sender<Event>, events: &Events) {
    let mut clients: Vec<JoinHandle<()>> = vec![];
    while wait(&mut [PollFd::new(stop, PollFlags::IN), PollFd::new(listener, PollFlags::IN)], None)
    {
        if stop.is_raised() {
            break;
        }
        clients.retain(|client| !client.is_finished());
        match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(_) if clients.len() >= CLIENTS => {
                tracing::warn!("a control client is turned away: there are {CLIENTS} already");
            }
            Ok(socket) => match start(socket, stop, inbox, events) {
                Ok(thread) => clients.push(thread),
                Err(error) => tracing::error!("cannot serve a control client: {error}"),
            },
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(error) => {
                tracing::error!("cannot take a control client yet: {error}");
                thread::sleep(SHORT_OF);
            }
        }
    }
    for client in clients {
        let _ = client.join();
    }
}

fn start(
    socket: OwnedFd,
    stop: &Stop,
    inbox: &Sender<Event>,
    events: &Events,
) -> io::Result<JoinHandle<()>> {
    let (client, stop) = (Client::new(socket, inbox, events)?, stop.clone());
    spawn("control client", move || _ = contained(|| client.serve(&stop))).map_err(io::Error::other)
}

/// Whether something has happened, rather than that waiting failed.
pub(super) fn wait(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> bool {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match poll(fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => true,
        Err(error) => {
            tracing::error!("cannot wait for control clients: {error}");
            false
        }
    }
}

/// One connection.
pub(super) struct Client {
    socket: OwnedFd,
    out: Arc<Outgoing>,
    inbox: Sender<Event>,
    /// What it has sent and was not looked at yet: no more than what one piece held.
    waiting: VecDeque<Result<Value, Malformed>>,
}

impl Client {
    /// Of a socket that blocks nowhere.
    pub(super) fn new(
        socket: OwnedFd,
        inbox: &Sender<Event>,
        events: &Events,
    ) -> io::Result<Client> {
        let out = Outgoing::new()?;
        events.add(&out);
        Ok(Client { socket, out, inbox: inbox.clone(), waiting: VecDeque::new() })
    }

    /// What goes out to it.
    pub(super) fn out(&self) -> Arc<Outgoing> {
        self.out.clone()
    }

    /// Greet it, and do as it says until it goes, or the server ends.
    pub(super) fn serve(mut self, stop: &Stop) {
        self.say(&json!({ "QMP": { "version": version().write(), "capabilities": [] } }));
        let (mut scanner, mut ended) = (Scanner::default(), false);
        loop {
            self.out.give_up_waiting();
            if !self.go_on() {
                return;
            }
            let (idle, unsent, due) = {
                let state = self.out.state();
                let due = state.under_way.as_ref().and_then(|it| Some(it.otherwise.as_ref()?.0));
                (state.under_way.is_none() && self.waiting.is_empty(), !state.bytes.is_empty(), due)
            };
            let stopping = stop.is_raised();
            if stopping || (ended && idle && !unsent) {
                return;
            }
            // Who does not take its replies is asked for no more commands.
            let reads = idle && !ended && !unsent;
            let mut flags = if reads { PollFlags::IN } else { PollFlags::empty() };
            flags |= if unsent { PollFlags::OUT } else { PollFlags::empty() };
            let mut fds =
                vec![PollFd::new(stop, PollFlags::IN), PollFd::new(&self.out.wake, PollFlags::IN)];
            // One that has hung up would wake us again and again.
            if !flags.is_empty() {
                fds.push(PollFd::new(&self.socket, flags));
            }
            let timeout = due.map(|due| due.saturating_duration_since(Instant::now()));
            if !wait(&mut fds, timeout) {
                return;
            }
            self.out.awake();
            if reads {
                match self.receive(&mut scanner) {
                    Some(more) => ended = !more,
                    None => return,
                }
            }
        }
    }

    fn say(&self, value: &Value) {
        self.out.state().bytes.extend(wire::line(value));
    }

    /// Send what the client takes at once; whether it is still there.
    fn send(&self) -> bool {
        let mut state = self.out.state();
        while !state.bytes.is_empty() {
            match send(self.socket.as_fd(), &state.bytes, SendFlags::NOSIGNAL) {
                Ok(sent) => _ = state.bytes.drain(..sent),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => return false,
            }
        }
        !state.cut
    }

    /// Take what the client sent; whether there may be more, and nothing where it is gone.
    fn receive(&mut self, scanner: &mut Scanner) -> Option<bool> {
        let mut piece = vec![0; PIECE];
        match recv(self.socket.as_fd(), &mut piece[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Some(false),
            Ok((_, len)) => {
                scanner.feed(&piece[..len], |value| self.waiting.push_back(value));
                Some(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Some(true),
            Err(_) => None,
        }
    }

    /// Look at what was sent, until a command is under way, or a reply is not taken: no more than one waits. Whether the
    /// client is still there.
    fn go_on(&mut self) -> bool {
        while self.send() {
            let idle = {
                let state = self.out.state();
                state.under_way.is_none() && state.bytes.is_empty()
            };
            let next = if idle { self.waiting.pop_front() } else { None };
            let Some(value) = next else { return true };
            let request = value
                .map_err(|error| (None, Refusal::new(error.to_string())))
                .and_then(Request::of);
            match request {
                Ok(request) => self.command(request),
                Err((id, refusal)) => self.out.begin(id).give(Err(refusal)),
            }
        }
        false
    }

    fn command(&mut self, request: Request) {
        let Request { command, arguments, id } = request;
        let reply = self.out.begin(id);
        let negotiated = self.out.state().negotiated;
        let refusal = match (table::find(&command), &*command) {
            (_, table::NEGOTIATE) if negotiated => {
                Refusal::no_command("Capabilities negotiation is already complete, command ignored")
            }
            (_, table::NEGOTIATE) => {
                let taken = table::negotiate(arguments);
                // From here on it hears of events.
                self.out.state().negotiated = taken.is_ok();
                return reply.give(taken);
            }
            _ if !negotiated => Refusal::no_command(format!(
                "Expecting capabilities negotiation with '{}'",
                table::NEGOTIATE
            )),
            (None, _) => Refusal::no_command(format!("The command {command} has not been found")),
            (Some(entry), _) => return entry.begin(arguments, reply, &self.inbox),
        };
        reply.give(Err(refusal));
    }
}
