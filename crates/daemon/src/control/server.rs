//! Control sockets: a thread takes connections, or makes one (`dial.rs`), and each has a thread of its own, which waits
//! for the client, and for nothing else. Commands are carried out by the thread that serves (`serve.rs`), one at a time.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
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
