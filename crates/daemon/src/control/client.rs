//! One client of a control socket: its commands, one at a time, and its replies.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use ringtap_export::Stop;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use serde_json::{Value, json};

use super::about::version;
use super::outgoing::{Events, Outgoing};
use super::refusal::Refusal;
use super::request::Request;
use super::shape::Write;
use super::table;
use super::wire::{self, Malformed, Scanner};
use crate::newcomers::Newcomers;
use crate::running::Event;

/// Bytes taken from a client at a time.
const PIECE: usize = 64 << 10;

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
    socket: Arc<OwnedFd>,
    out: Arc<Outgoing>,
    inbox: Sender<Event>,
    /// It has said nothing yet, and another process may go on with it: these know.
    silent: Option<Newcomers>,
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
        let (socket, inbox, silent) = (Arc::new(socket), inbox.clone(), None);
        Ok(Client { socket, out, inbox, silent, waiting: VecDeque::new() })
    }

    /// It was greeted and has said nothing.
    pub(super) fn is_silent(&mut self, newcomers: &Newcomers) {
        self.silent = Some(newcomers.clone());
    }

    /// Greet it; whether it has heard all of that.
    pub(super) fn greet(&self) -> bool {
        self.say(&json!({ "QMP": { "version": version().write(), "capabilities": [] } }));
        self.send() && self.out.state().bytes.is_empty()
    }

    pub(super) fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// What goes out to it.
    pub(super) fn out(&self) -> Arc<Outgoing> {
        self.out.clone()
    }

    /// Do as it says until it goes, or the server ends.
    pub(super) fn serve(mut self, stop: &Stop) {
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
            let may = idle && !ended && !unsent;
            let waits = self.silent.as_ref().filter(|newcomers| newcomers.wait());
            let reads = may && waits.is_none();
            let mut flags = if reads { PollFlags::IN } else { PollFlags::empty() };
            flags |= if unsent { PollFlags::OUT } else { PollFlags::empty() };
            let mut fds =
                vec![PollFd::new(stop, PollFlags::IN), PollFd::new(&self.out.wake, PollFlags::IN)];
            fds.extend(waits.map(|newcomers| PollFd::new(newcomers, PollFlags::IN)));
            // One that has hung up would wake us again and again.
            if !flags.is_empty() {
                fds.push(PollFd::new(&*self.socket, flags));
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
        let mut hear = || recv(self.socket.as_fd(), &mut piece[..], RecvFlags::DONTWAIT);
        let is_silent = |heard: &Result<_, Errno>| matches!(heard, Err(Errno::AGAIN | Errno::INTR));
        let heard = match &self.silent {
            None => hear(),
            Some(newcomers) => {
                // Another process is to hear it.
                let Some(heard) = newcomers.hear(&self.socket, hear, is_silent) else {
                    return Some(true);
                };
                if !is_silent(&heard) {
                    self.silent = None;
                }
                heard
            }
        };
        match heard {
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

impl Drop for Client {
    fn drop(&mut self) {
        if let Some(newcomers) = &self.silent {
            newcomers.forget(&self.socket);
        }
    }
}
