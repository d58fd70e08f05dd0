//! vhost-user-blk: a listening socket, one front-end at a time, a thread for each of its queues.
//!
//! Source: QEMU, docs/interop/vhost-user.rst; virtio 1.2, section 5.2.

mod backend;
#[cfg(test)]
mod chains;
mod config;
mod dirty_log;
mod events;
#[cfg(test)]
mod front_end;
mod handover;
mod inflight;
#[cfg(test)]
mod limits_tests;
pub(crate) mod mapping;
mod memory;
#[cfg(test)]
mod migration_tests;
mod others;
mod peer;
mod queue;
mod relay;
mod request;
mod requests;
mod residence;
mod sources;
#[doc(hidden)]
pub mod talk;
#[doc(hidden)]
pub mod testing;
mod thread;
#[cfg(test)]
mod thread_tests;
mod told;
mod truncated;
mod virtqueue;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ringtap_vbd::Disk;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost::vhost_user::BackendReqHandler;

pub use handover::{Connection, Message};
pub use residence::Residence;
pub use virtqueue::RingError;

use self::backend::Backend;
use self::handover::Handover;
use self::mapping::Kept;
use self::others::Others;
use self::peer::Peer;
use self::relay::Relay;
use self::requests::Requests;
use self::told::Told;
use crate::Stop;

/// How a disk is shown to its front-end.
#[derive(Clone, Debug)]
pub struct Options {
    /// The most queues a front-end may use.
    pub queues: u16,
    /// What the guest reads as the disk's serial number; 20 bytes of it count.
    pub serial: String,
}

impl Default for Options {
    fn default() -> Self {
        Options { queues: 16, serial: "ringtap".to_owned() }
    }
}

/// Why a server ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The listening socket is of no use any more.
    #[error("cannot wait for front-ends on the vhost-user socket: {0}")]
    Listen(#[source] io::Error),
    /// A panic has stopped the disk.
    #[error("its disk was stopped by a panic")]
    Stopped,
}

/// Serves one device to one front-end after the other.
pub struct Server {
    listener: UnixListener,
    vbd: Disk,
    options: Options,
    /// Where to tell the front-end that the configuration changed.
    requests: Requests,
    residence: Option<Arc<dyn Residence>>,
    handover: Handover,
    told: Arc<Told>,
    /// Since when a message is carried out.
    handles: Mutex<Option<Instant>>,
    _mappings: Kept,
}

impl Server {
    /// A server on a bound socket.
    pub fn new(listener: UnixListener, vbd: Disk, options: Options) -> Server {
        let (requests, residence, vbd) = (Requests::default(), None, vbd.apart());
        let (handover, told, _mappings) = (Handover::default(), Arc::default(), Kept::new());
        let handles = Mutex::default();
        Server { listener, vbd, options, requests, residence, handover, told, handles, _mappings }
    }

    /// The same, of a disk whose image may be elsewhere.
    pub fn with_residence(self, residence: Arc<dyn Residence>) -> Server {
        Server { residence: Some(residence), ..self }
    }

    /// Serve until `stop` is raised, or the disk is stopped by a panic; then drain and leave. The last
    /// flush is the caller's.
    pub fn serve(&self, stop: &Stop) -> Result<(), Error> {
        let (failed, _listening) = Stop::at_failure(&self.vbd).map_err(Error::Listen)?;
        let stops = [stop, &failed];
        let health = self.vbd.health();
        health.contain(|| self.serve_until(stops)).unwrap_or(Err(Error::Stopped))?;
        if failed.is_raised() { Err(Error::Stopped) } else { Ok(()) }
    }

    fn serve_until(&self, stops: Stops<'_>) -> Result<(), Error> {
        self.listener.set_nonblocking(true).map_err(Error::Listen)?;
        if let Some(Connection { socket, requests, messages }) = self.handover.adopted() {
            self.requests.set(requests);
            self.serve_front_end(socket.into(), messages, stops);
        }
        while wait(&self.listener, stops, None).map_err(Error::Listen)? != Woken::ToStop {
            match self.listener.accept() {
                Ok((stream, _)) => self.serve_front_end(stream, vec![], stops),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::ECONNABORTED | libc::EINTR) => {}
                    // Out of descriptors or memory: others may give some back.
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS) => {
                        tracing::warn!("cannot accept a front-end yet: {error}");
                        std::thread::sleep(Duration::from_millis(100));
                    }
                    _ => return Err(Error::Listen(error)),
                },
            }
        }
        Ok(())
    }

    /// How long a message of a front-end is being carried out: a file that it brings, to be mapped say, may lie where nobody answers.
    pub fn handles_for(&self) -> Option<Duration> {
        let since = *self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        since.map(|since| since.elapsed())
    }

    /// Carry out a message that is there.
    fn handle(&self, handler: &mut Handler) -> io::Result<()> {
        let note = |since| {
            *self.handles.lock().unwrap_or_else(PoisonError::into_inner) = since;
        };
        note(Some(Instant::now()));
        let handled = handler.handle_request().map_err(io::Error::other);
        note(None);
        handled
    }

    /// Requests that wait for room fail, and none waits from now on: it is about to end.
    pub fn give_up_waiting(&self) {
        self.vbd.give_up_own();
    }

    /// Tell the front-end that the disk's size changed.
    pub fn resized(&self) {
        self.requests.tell_of_size();
    }

    /// Serve a front-end that has come, or one of which a server before this one was `told` all that.
    fn serve_front_end(&self, stream: UnixStream, told: Vec<Message>, stops: Stops<'_>) {
        let peer = Peer::of(&stream);
        // Whoever comes is told of with how it ends, or not at all.
        let tells = self.told.admits();
        match told.is_empty() {
            _ if !tells => {}
            true => tracing::info!("front-end connected, {peer}"),
            false => tracing::info!("front-end taken over, {peer}"),
        }
        let socket = stream.try_clone();
        let backend = Backend::new(self.vbd.clone(), self.options.clone())
            .with_peer(peer)
            .with_told(self.told.clone())
            .with_residence(self.residence.clone());
        let backend = Arc::new(Mutex::new(backend));
        // Its queues are stopped whatever happens.
        self.handover.serves(Some(backend.clone()));
        let end = self.vbd.health().contain(|| self.converse(stream, &backend, told, stops));
        let end = end.unwrap_or_else(|stopped| Err(io::Error::other(stopped)));
        let goes_on = matches!(end, Ok(Ended::Stopped)) && self.handover.is_wanted();
        match end {
            _ if !tells => {}
            Ok(_) if goes_on => {}
            Ok(_) => tracing::info!("front-end left"),
            Err(error) => tracing::warn!("the front-end is let go: {error}"),
        }
        let requests = self.requests.take();
        locked(&backend).stop_all();
        self.handover.serves(None);
        if goes_on {
            let left = socket.and_then(|socket| locked(&backend).leave(socket, requests));
            self.handover.leave(left);
        }
    }

    /// Until the front-end leaves or the stop is raised.
    fn converse(
        &self,
        stream: UnixStream,
        backend: &Arc<Mutex<Backend>>,
        told: Vec<Message>,
        stops: Stops<'_>,
    ) -> io::Result<Ended> {
        let (mut relay, socket) = Relay::new(stream)?;
        let mut handler = BackendReqHandler::from_stream(socket, backend.clone());
        for message in told {
            relay.replay(&message)?;
            self.handle(&mut handler)?;
            relay.drop_reply()?;
        }
        let served = relay.front_end().try_clone()?;
        let others = Others::beside(&self.listener, &served)?;
        loop {
            let pause = locked(backend).pause();
            match wait(&others, stops, pause)? {
                Woken::ToStop => return Ok(Ended::Stopped),
                Woken::Late => {
                    locked(backend).try_again().map_err(io::Error::other)?;
                    continue;
                }
                Woken::ToRead if !others.refuse()? => continue,
                Woken::ToRead => {}
            }
            let mut requests = None;
            self.handover.hears(true);
            let whole = relay.forward_message(&mut requests, stops);
            self.handover.hears(false);
            if !whole? {
                return Ok(Ended::Left);
            }
            if requests.is_some() {
                self.requests.set(requests);
            }
            let handled = self.handle(&mut handler);
            relay.forward_reply(handled.is_ok(), stops)?;
            handled?;
        }
    }
}

type Handler = BackendReqHandler<Mutex<Backend>>;

/// How a conversation has ended.
enum Ended {
    /// The front-end has left.
    Left,
    /// The server stops.
    Stopped,
}

/// The word to stop, and that of the disk's failure.
type Stops<'a> = [&'a Stop; 2];

/// Why a wait has ended.
#[derive(PartialEq, Eq)]
enum Woken {
    ToRead,
    ToStop,
    Late,
}

fn locked(backend: &Mutex<Backend>) -> MutexGuard<'_, Backend> {
    backend.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wait until something can be read or a stop is raised, or for so long.
fn wait(file: impl AsFd, stops: Stops<'_>, most: Option<Duration>) -> io::Result<Woken> {
    let most = most.and_then(|most| Timespec::try_from(most).ok());
    loop {
        let [stop, failed] = stops.map(|stop| PollFd::new(stop, PollFlags::IN));
        let mut fds = [stop, failed, PollFd::new(&file, PollFlags::IN)];
        match poll(&mut fds, most.as_ref()) {
            Ok(0) => return Ok(Woken::Late),
            Ok(_) if fds[..2].iter().any(|stop| !stop.revents().is_empty()) => {
                return Ok(Woken::ToStop);
            }
            Ok(_) if !fds[2].revents().is_empty() => return Ok(Woken::ToRead),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
