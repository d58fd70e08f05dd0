//! Connections that go on in another server: the socket, and the messages by which its back-end gets where this one is.
//!
//! What is passed on is itself vhost-user (vhost-user.rst): a state of that form is read by every version that speaks the
//! protocol.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::Server;
use super::backend::Backend;

/// How long a message of a front-end is waited for that is being handled, and how often it is looked.
const HANDLED: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(1);

/// A message as it may be handed in again.
#[derive(Debug)]
pub struct Message {
    /// Its number in vhost-user.rst.
    pub request: u32,
    /// What follows its header.
    pub payload: Vec<u8>,
    /// The descriptors that come with it.
    pub files: Vec<OwnedFd>,
}

/// A front-end that goes on in another server. Its queues do not run.
#[derive(Debug)]
pub struct Connection {
    /// What its messages come by; those that were not looked at are still in it.
    pub socket: OwnedFd,
    /// By what it is told of another size.
    pub requests: Option<OwnedFd>,
    /// What brings a fresh back-end where its last one was; at least one.
    pub messages: Vec<Message>,
}

/// What a server has to do with others before and after it.
#[derive(Default)]
pub(super) struct Handover(Mutex<State>);

#[derive(Default)]
struct State {
    /// Whether front-ends go on elsewhere once this stops.
    wanted: bool,
    /// One that comes from another server.
    adopted: Option<Connection>,
    /// The one that is served.
    serves: Option<Arc<Mutex<Backend>>>,
    /// Whether a message of it has come in part.
    in_part: bool,
    /// What has become of the one that was served as this stopped.
    left: Option<io::Result<Connection>>,
}

impl Handover {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn adopted(&self) -> Option<Connection> {
        self.lock().adopted.take()
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.lock().wanted
    }

    pub(super) fn serves(&self, backend: Option<Arc<Mutex<Backend>>>) {
        self.lock().serves = backend;
    }

    /// A message comes, or has come.
    pub(super) fn hears(&self, in_part: bool) {
        self.lock().in_part = in_part;
    }

    pub(super) fn leave(&self, left: io::Result<Connection>) {
        self.lock().left = Some(left);
    }
}

impl Server {
    /// The socket that listens, for another server.
    pub fn listener(&self) -> io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }

    /// Before it serves: go on with a front-end of another server.
    pub fn adopt(&self, connection: Connection) {
        self.handover.lock().adopted = Some(connection);
    }

    /// Why the front-end that is served now could not go on elsewhere.
    pub fn must_stay(&self) -> Option<String> {
        let backend = self.handover.lock().serves.clone()?;
        let until = Instant::now() + HANDLED;
        loop {
            if self.handover.lock().in_part {
                if Instant::now() > until {
                    return Some("its front-end has sent a message in part: try again".into());
                }
                std::thread::sleep(LOOK);
                continue;
            }
            let backend = match backend.try_lock() {
                Ok(backend) => backend,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // A queue that is stopped waits for its requests, and those for storage that may be silent.
                Err(TryLockError::WouldBlock) if Instant::now() > until => {
                    return Some(
                        "its front-end waits for requests in flight to end: try again".into(),
                    );
                }
                Err(TryLockError::WouldBlock) => {
                    std::thread::sleep(LOOK);
                    continue;
                }
            };
            return backend.messages().err().map(|why| why.to_string());
        }
    }

    /// From now on the word to stop leaves the front-end connected, for another server or, once this is taken back, for
    /// this one.
    pub fn hand_over(&self, wanted: bool) {
        self.handover.lock().wanted = wanted;
    }

    /// Once it has ended: the front-end that is to go on.
    ///
    /// # Errors
    /// Where there are no descriptors for it: it is let go then.
    pub fn left(&self) -> io::Result<Option<Connection>> {
        self.handover.lock().left.take().transpose()
    }
}
