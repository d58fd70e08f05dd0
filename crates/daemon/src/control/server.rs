//! The control socket: a thread takes connections, and each has a thread of its own, which waits for the client, and
//! for nothing else. Commands are carried out by the thread that serves (`serve.rs`), one at a time.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
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
use super::outgoing::{Events, Outgoing};
use super::refusal::Refusal;
use super::request::Request;
use super::shape::Write;
use super::table;
use super::wire::{self, Malformed, Scanner};
use crate::Error;
use crate::events::{Event, contained, spawn};
use crate::socket::{self, SocketFile};

/// Whoever may connect at all may use the server as its owner may.
const MODE: u32 = 0o600;
/// The most clients at a time; more are closed at once.
const CLIENTS: usize = 64;
/// How long to wait before taking another connection when the process is out of something.
const SHORT_OF: Duration = Duration::from_millis(100);
/// Bytes taken from a client at a time.
const PIECE: usize = 64 << 10;

/// A control socket that listens.
pub(crate) struct Listening {
    listener: UnixListener,
    file: SocketFile,
}

impl Listening {
    /// Listen there; the socket of a dead server is replaced.
    pub(crate) fn bind(path: &Path) -> Result<Listening, Error> {
        let (listener, file) = socket::unix(path, MODE)?;
        Ok(Listening { listener, file })
    }

    /// The socket, for the process that comes after this one.
    pub(crate) fn socket(&self) -> io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }
}

/// The control socket and its clients, until this drops.
pub(crate) struct Server {
    stop: Stop,
    thread: Option<JoinHandle<()>>,
    _file: SocketFile,
}

impl Server {
    /// Take clients: their commands come to `inbox`, and `events` are told to them.
    pub(crate) fn start(
        listening: Listening,
        inbox: Sender<Event>,
        events: Events,
    ) -> Result<Server, Error> {
        let failed = |source| Error::Process { tried: "set up the control socket", source };
        let Listening { listener, file } = listening;
        listener.set_nonblocking(true).map_err(failed)?;
        let stop = Stop::new().map_err(failed)?;
        let theirs = stop.clone();
        let thread = spawn("control", move || take_clients(&listener, &theirs, &inbox, &events))?;
        Ok(Server { stop, thread: Some(thread), _file: file })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take() {
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
    let out = Outgoing::new()?;
    events.add(&out);
    let (stop, inbox) = (stop.clone(), inbox.clone());
    let client = Client { socket, out, inbox, waiting: VecDeque::new() };
    spawn("control client", move || _ = contained(|| client.serve(&stop))).map_err(io::Error::other)
}

/// Whether something has happened, rather than that waiting failed.
fn wait(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> bool {
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
struct Client {
    socket: OwnedFd,
    out: Arc<Outgoing>,
    inbox: Sender<Event>,
    /// What it has sent and was not looked at yet: no more than what one piece held.
    waiting: VecDeque<Result<Value, Malformed>>,
}

impl Client {
    fn serve(mut self, stop: &Stop) {
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
