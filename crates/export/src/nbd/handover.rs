//! Clients that go on in another server: the socket, what was agreed on, and what has come of a request that is not
//! whole.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::context::Contexts;
use super::exports::{Exports, Offered};
use super::handshake::Choice;
use crate::Stop;

/// How often it is looked for something that is about to come.
pub(super) const LOOK: Duration = Duration::from_millis(2);
/// How long the export of a client may take to come.
const COMES: Duration = Duration::from_secs(10);

/// A client that goes on in another server. None of its requests is in flight.
#[derive(Debug)]
pub struct Session {
    /// What its requests come by.
    pub socket: OwnedFd,
    /// The name of the export that it has chosen.
    pub export: String,
    /// Whether replies come in chunks.
    pub structured: bool,
    /// Whether headers are extended.
    pub extended: bool,
    /// The metadata contexts that it has selected, a bit for each by its number.
    pub contexts: u64,
    /// What it has sent of requests that were not looked at.
    pub input: Vec<u8>,
}

impl Session {
    /// The export that it has chosen, and what it may ask for; waited for where it is about to come.
    pub(super) fn choice(&self, exports: &Exports) -> Option<(Choice, Offered)> {
        let began = Instant::now();
        loop {
            let all = exports.all();
            let found = all.iter().position(|one| one.export.name == self.export);
            if let Some((export, offered)) = found.and_then(|at| Some((at, all.get(at)?.clone()))) {
                let contexts = Contexts::of_bits(self.contexts);
                let (structured, extended) = (self.structured, self.extended);
                return Some((Choice { export, structured, extended, contexts }, offered));
            }
            if began.elapsed() > COMES {
                tracing::error!(
                    "an NBD client is let go: its export {:?} has not come",
                    self.export
                );
                return None;
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// What a server has to do with others before and after it.
#[derive(Default)]
pub(super) struct Handover {
    state: Mutex<State>,
    pub(super) told: Condvar,
    /// Clients that have not chosen yet.
    pub(super) shaking_hands: AtomicUsize,
    /// Clients that speak TLS.
    pub(super) sealed: AtomicUsize,
}

#[derive(Default)]
pub(super) struct State {
    /// Whether clients go on elsewhere once this stops.
    pub(super) wanted: bool,
    pub(super) adopted: Vec<Session>,
    pub(super) left: Vec<Session>,
    /// Threads of clients.
    pub(super) threads: usize,
    /// Clients were told to leave, and are waited for; and they stay after all.
    pub(super) leaving: bool,
    pub(super) stay: bool,
    /// Rung for a client that was to leave, and goes on here, and where new ones are to wait or to come.
    pub(super) bell: Option<Stop>,
    /// Whether new clients wait at the sockets, as many as want that; and whether who takes them has seen it.
    pub(super) new_ones_wait: bool,
    pub(super) none_come: bool,
}

impl Handover {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.state().wanted
    }

    /// From now on who serves is told by this of clients that go on here.
    pub(super) fn tell_by(&self, bell: Stop) {
        self.state().bell = Some(bell);
    }

    /// Whether new clients are to be taken: who does that says so each time before it waits for them.
    pub(super) fn takes_new_ones(&self) -> bool {
        let mut state = self.state();
        state.none_come = state.new_ones_wait;
        self.told.notify_all();
        !state.none_come
    }

    pub(super) fn leave(&self, session: Session) {
        let mut state = self.state();
        if state.wanted {
            state.left.push(session);
            return;
        }
        state.adopted.push(session);
        state.bell.iter().for_each(Stop::raise);
    }

    pub(super) fn adopted(&self) -> Vec<Session> {
        std::mem::take(&mut self.state().adopted)
    }

    /// Clients were told to leave: wait until all have, or are to stay after all. Whether they have left.
    pub(super) fn have_left(&self) -> bool {
        let mut state = self.state();
        state.leaving = true;
        let waits = |state: &mut State| state.threads > 0 && !state.stay;
        state = self.told.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner);
        state.leaving = false;
        !std::mem::take(&mut state.stay)
    }
}

/// The thread of a client, counted while this lives.
pub(super) struct Running(Arc<Handover>);

impl Running {
    pub(super) fn new(handover: &Arc<Handover>) -> Running {
        handover.state().threads += 1;
        Running(handover.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.state().threads -= 1;
        self.0.told.notify_all();
    }
}

/// A client that has not chosen yet, counted while this lives.
pub(super) struct ShakingHands(Arc<Handover>);

impl ShakingHands {
    pub(super) fn new(handover: &Arc<Handover>) -> ShakingHands {
        handover.shaking_hands.fetch_add(1, SeqCst);
        ShakingHands(handover.clone())
    }
}

impl Drop for ShakingHands {
    fn drop(&mut self) {
        self.0.shaking_hands.fetch_sub(1, SeqCst);
    }
}

/// New clients wait at the sockets of a server for as long as this lives: for this one, or for the next.
pub struct NewOnesWait(pub(super) Arc<Handover>);

impl Drop for NewOnesWait {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.new_ones_wait = false;
        state.bell.iter().for_each(Stop::raise);
    }
}

/// One more is counted while this lives.
pub(super) struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    pub(super) fn new(count: &'a AtomicUsize) -> Counted<'a> {
        count.fetch_add(1, SeqCst);
        Counted(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// A copy of a client's descriptor.
pub(super) fn copy(socket: impl std::os::fd::AsFd) -> io::Result<OwnedFd> {
    socket.as_fd().try_clone_to_owned()
}
