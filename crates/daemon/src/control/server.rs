//! Control sockets: a thread takes connections, or makes one (`dial.rs`), and each has a thread of its own, which waits
//! for the client, and for nothing else. Commands are carried out by the thread that serves (`serve.rs`), one at a time.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ringtap_export::Stop;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::client::{Client, wait};
use super::dial;
use super::outgoing::Events;
use crate::handover;
use crate::newcomers::Newcomers;
use crate::running::Event;
use crate::socket::{self, SocketFile};
use crate::threads::{contained, spawn};
use crate::{Address, ControlAt, Error};

/// Whoever may connect at all may use the server as its owner may.
const MODE: u32 = 0o600;
/// The most clients at a time; more are closed at once.
const CLIENTS: usize = 64;
/// How long to wait before taking another connection when the process is out of something.
const SHORT_OF: Duration = Duration::from_millis(100);

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
        newcomers: &Newcomers,
    ) -> Result<Server, Error> {
        let failed = |source| Error::Process { tried: "set up the control socket", source };
        let stop = Stop::new().map_err(failed)?;
        let mut server = Server { stop, threads: vec![], _files: vec![] };
        // Which socket they came by is nothing to them.
        let greeted = handover::control_clients().into_iter();
        let greeted = greeted.map(|socket| go_on_with(socket, (inbox, events), newcomers));
        let mut greeted: Vec<Client> = greeted.collect::<io::Result<_>>().map_err(failed)?;
        for way in ways {
            let (stop, inbox, events) = (server.stop.clone(), inbox.clone(), events.clone());
            let thread = match way {
                Way::Listening { listener, file, .. } => {
                    server._files.push(file);
                    listener.set_nonblocking(true).map_err(failed)?;
                    let (come, newcomers) = (std::mem::take(&mut greeted), newcomers.clone());
                    let own = Taking { listener, stop, inbox, events, newcomers };
                    spawn("control", move || own.run(come))?
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

/// One that the server before this one has greeted.
fn go_on_with(
    socket: OwnedFd,
    (inbox, events): (&Sender<Event>, &Events),
    newcomers: &Newcomers,
) -> io::Result<Client> {
    let mut client = Client::new(socket, inbox, events)?;
    client.is_silent(newcomers);
    // No other process is about to take over yet.
    newcomers.take(|greeted| greeted(client.socket()));
    Ok(client)
}

/// A thread that takes clients.
struct Taking {
    listener: UnixListener,
    stop: Stop,
    inbox: Sender<Event>,
    events: Events,
    newcomers: Newcomers,
}

impl Taking {
    /// Take them until the server ends, and go on with those that the one before it has greeted.
    fn run(&self, greeted: Vec<Client>) {
        let mut clients: Vec<JoinHandle<()>> = vec![];
        for client in greeted {
            self.attend(Some(Ok(Some(client))), &mut clients);
        }
        loop {
            let waits = self.newcomers.wait();
            let next = if waits { self.newcomers.as_fd() } else { self.listener.as_fd() };
            let next = PollFd::from_borrowed_fd(next, PollFlags::IN);
            if !wait(&mut [PollFd::new(&self.stop, PollFlags::IN), next], None)
                || self.stop.is_raised()
            {
                break;
            }
            clients.retain(|client| !client.is_finished());
            let is_full = clients.len() >= CLIENTS;
            let client = self.newcomers.take(|silent| self.accept(is_full, silent));
            self.attend(client, &mut clients);
        }
        for client in clients {
            let _ = client.join();
        }
    }

    /// The next one, if there is one, and it may stay; greeted.
    fn accept(
        &self,
        is_full: bool,
        silent: &mut dyn FnMut(&Arc<OwnedFd>),
    ) -> io::Result<Option<Client>> {
        let socket = accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let socket = match socket {
            Ok(_) if is_full => {
                tracing::warn!("a control client is turned away: there are {CLIENTS} already");
                return Ok(None);
            }
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut client = Client::new(socket, &self.inbox, &self.events)?;
        if client.greet() {
            client.is_silent(&self.newcomers);
            silent(client.socket());
        }
        Ok(Some(client))
    }

    fn attend(
        &self,
        client: Option<io::Result<Option<Client>>>,
        clients: &mut Vec<JoinHandle<()>>,
    ) {
        let started = match client {
            None | Some(Ok(None)) => return,
            Some(client) => client.and_then(|client| {
                let (client, stop) = (client.into_iter(), self.stop.clone());
                let serve = move || _ = contained(|| client.for_each(|client| client.serve(&stop)));
                spawn("control client", serve).map_err(io::Error::other)
            }),
        };
        match started {
            Ok(thread) => clients.push(thread),
            Err(error) => {
                tracing::error!("cannot take a control client yet: {error}");
                thread::sleep(SHORT_OF);
            }
        }
    }
}
