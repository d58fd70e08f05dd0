//! Memory for the requests in flight: some that each connection has for itself, the rest from what all
//! connections of the process share.
//!
//! What a client sends has room from here only as far as it has come, so that nobody keeps room by not sending. Those who wait for the
//! rest of theirs with all room taken would wait for one another: one of each peer may have more than there is.

use std::cell::Cell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::alarm::Alarm;
use super::limits::Limits;
use super::peer::Peer;

/// Bytes that all connections of the process share. One peer gets half of them at most.
pub struct Budget {
    limit: usize,
    state: Mutex<State>,
    /// How many wait; looked at without the lock.
    waiting: AtomicUsize,
}

#[derive(Default)]
struct State {
    used: usize,
    peers: HashMap<Peer, usize>,
    /// The peers of which one has more than there is.
    beyond: HashSet<Peer>,
    /// In the order they came.
    queue: VecDeque<Waiting>,
    next: u64,
}

struct Waiting {
    number: u64,
    peer: Peer,
    bytes: usize,
    /// Whether it is for the rest of what has come in part.
    rest: bool,
    alarm: Arc<Alarm>,
}

impl State {
    fn of(&self, peer: Peer) -> usize {
        self.peers.get(&peer).copied().unwrap_or(0)
    }

    /// Whether the peer's own half has room; what it lacks altogether it gets in any case.
    fn peer_has_room(&self, peer: Peer, bytes: usize, limit: usize) -> bool {
        let used = self.of(peer);
        used == 0 || used + bytes <= limit / 2
    }

    fn has_room(&self, bytes: usize, limit: usize) -> bool {
        self.used == 0 || self.used + bytes <= limit
    }

    fn add(&mut self, peer: Peer, bytes: usize) {
        self.used += bytes;
        *self.peers.entry(peer).or_default() += bytes;
    }

    /// Let the first that can have its memory now look again.
    fn call_next(&self, limit: usize) {
        let mut queue = self.queue.iter();
        let first = queue.find(|one| self.peer_has_room(one.peer, one.bytes, limit));
        if let Some(first) = first.filter(|one| self.has_room(one.bytes, limit)) {
            first.alarm.call();
        }
    }

    /// Let the first of a peer that waits for the rest of something have it, though there is no room.
    fn call_beyond(&self, peer: Peer) {
        let first = self.queue.iter().find(|one| one.rest && one.peer == peer);
        first.into_iter().for_each(|one| one.alarm.call());
    }
}

impl Budget {
    /// So many bytes.
    pub fn new(limit: usize) -> Arc<Budget> {
        let limit = limit.max(Limits::LEAST_MEMORY_OF_ALL);
        Arc::new(Budget { limit, state: Mutex::default(), waiting: AtomicUsize::new(0) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Take so many bytes, unless somebody waits who came before.
    fn take(&self, peer: Peer, bytes: usize, turn: u64) -> bool {
        let mut state = self.state();
        let before = state.queue.iter().take_while(|one| one.number < turn);
        for one in before {
            if state.peer_has_room(one.peer, one.bytes, self.limit) {
                return false;
            }
        }
        let room =
            state.has_room(bytes, self.limit) && state.peer_has_room(peer, bytes, self.limit);
        if room {
            state.add(peer, bytes);
        }
        room
    }

    fn give_back(&self, peer: Peer, bytes: usize) {
        let mut state = self.state();
        state.used -= bytes;
        if let Some(used) = state.peers.get_mut(&peer) {
            *used -= bytes;
            if *used == 0 {
                state.peers.remove(&peer);
            }
        }
        state.call_next(self.limit);
    }
}

/// What one connection has of it.
pub(super) struct Share {
    budget: Arc<Budget>,
    peer: Peer,
    alarm: Arc<Alarm>,
    held: Cell<usize>,
    /// Bytes of them that are of the budget.
    borrowed: Cell<usize>,
    /// Whether it is the one of its peer that may have more than there is.
    beyond: Cell<bool>,
}

/// A place in the queue.
pub(super) struct Turn<'a> {
    share: &'a Share,
    number: u64,
}

impl Share {
    /// Nothing yet. The alarm is called when there may be room for one who waits.
    pub(super) fn new(budget: Arc<Budget>, peer: Peer, alarm: Arc<Alarm>) -> Share {
        let (held, borrowed, beyond) = Default::default();
        Share { budget, peer, alarm, held, borrowed, beyond }
    }

    fn to_borrow(&self, bytes: usize) -> usize {
        let beyond = (self.held.get() + bytes).saturating_sub(Limits::OWN_MEMORY);
        beyond.saturating_sub(self.borrowed.get())
    }

    /// Hold so many bytes more, where there is room for them.
    pub(super) fn take(&self, bytes: usize, turn: Option<&Turn<'_>>) -> bool {
        let borrow = self.to_borrow(bytes);
        let number = turn.map_or(u64::MAX, |turn| turn.number);
        if borrow > 0 && !self.budget.take(self.peer, borrow, number) {
            return false;
        }
        self.borrowed.set(self.borrowed.get() + borrow);
        self.held.set(self.held.get() + bytes);
        true
    }

    /// Hold so many bytes more, whether there is room or not: few.
    pub(super) fn take_anyway(&self, bytes: usize) {
        let borrow = self.to_borrow(bytes);
        if borrow > 0 {
            self.budget.state().add(self.peer, borrow);
        }
        self.borrowed.set(self.borrowed.get() + borrow);
        self.held.set(self.held.get() + bytes);
    }

    /// Hold so many bytes more for the rest of something, whether there is room or not; false where another of its peer does.
    pub(super) fn take_beyond(&self, bytes: usize) -> bool {
        if !self.beyond.get() && !self.budget.state().beyond.insert(self.peer) {
            return false;
        }
        self.beyond.set(true);
        self.take_anyway(bytes);
        true
    }

    /// All of it has come, or nothing more will: another may.
    pub(super) fn no_more_beyond(&self) {
        if self.beyond.replace(false) {
            let mut state = self.budget.state();
            state.beyond.remove(&self.peer);
            state.call_beyond(self.peer);
        }
    }

    /// Let go of what was taken.
    pub(super) fn give_back(&self, bytes: usize) {
        self.held.set(self.held.get() - bytes);
        let keep = self.held.get().saturating_sub(Limits::OWN_MEMORY);
        let back = self.borrowed.get().saturating_sub(keep);
        if back > 0 {
            self.borrowed.set(self.borrowed.get() - back);
            self.budget.give_back(self.peer, back);
        }
    }

    /// Stand in the queue for so many bytes; whether they are for the `rest` of something.
    pub(super) fn queue(&self, bytes: usize, rest: bool) -> Turn<'_> {
        let bytes = self.to_borrow(bytes);
        let mut state = self.budget.state();
        let number = state.next;
        state.next += 1;
        let (peer, alarm) = (self.peer, self.alarm.clone());
        state.queue.push_back(Waiting { number, peer, bytes, rest, alarm });
        self.budget.waiting.fetch_add(1, Relaxed);
        // What was given back a moment ago called nobody.
        state.call_next(self.budget.limit);
        if rest && !state.beyond.contains(&peer) {
            state.call_beyond(peer);
        }
        drop(state);
        Turn { share: self, number }
    }

    /// Whether somebody waits for memory: what is only kept for later should go back.
    pub(super) fn is_wanted(&self) -> bool {
        self.budget.waiting.load(Relaxed) > 0
    }

    /// Whether others could have what this connection holds.
    pub(super) fn is_borrower(&self) -> bool {
        self.borrowed.get() > 0
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.held.set(0);
        self.give_back(0);
        self.no_more_beyond();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let budget = &self.share.budget;
        let mut state = budget.state();
        state.queue.retain(|one| one.number != self.number);
        budget.waiting.fetch_sub(1, Relaxed);
        state.call_next(budget.limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn share(budget: &Arc<Budget>, user: u32) -> Share {
        Share::new(budget.clone(), Peer::User(user), Arc::new(Alarm::new().expect("a timer")))
    }

    #[test]
    fn a_peer_gets_half_and_every_connection_some_for_itself() {
        let budget = Budget::new(64 * MIB);
        let [one, two, other] = [1, 1, 2].map(|user| share(&budget, user));
        assert!(one.take(33 * MIB, None));
        assert!(!two.take(2 * MIB, None), "the peer has its half");
        assert!(two.take(MIB, None));
        assert!(other.take(33 * MIB, None));
        assert_eq!(budget.state().used, 64 * MIB);
        assert!(!other.take(1, None));
        one.give_back(10 * MIB);
        assert!(!other.take(1, None), "the other's half is the other's");
        assert!(two.take(10 * MIB, None));
        drop((one, two, other));
        assert_eq!(budget.state().used, 0);
        assert!(budget.state().peers.is_empty());
    }

    #[test]
    fn who_waits_comes_before_who_comes_later() {
        let budget = Budget::new(64 * MIB);
        let [a, b, late] = [1, 2, 3].map(|user| share(&budget, user));
        assert!(a.take(33 * MIB, None) && b.take(21 * MIB, None));
        let waits = share(&budget, 4);
        let turn = waits.queue(25 * MIB, false);
        assert!(!waits.take(25 * MIB, Some(&turn)));
        assert!(a.is_wanted());
        assert!(!late.take(2 * MIB, None), "it would take what another waits for");
        assert!(late.take(MIB, None), "its own");
        b.give_back(13 * MIB);
        assert!(waits.alarm.was_called());
        assert!(waits.take(25 * MIB, Some(&turn)));
        drop(turn);
        assert!(!a.is_wanted());
        // Who waits for its own peer's half holds nobody else up.
        let more = share(&budget, 1);
        let turn = more.queue(20 * MIB, false);
        b.give_back(8 * MIB);
        assert!(late.take(2 * MIB, None));
        assert!(!more.take(20 * MIB, Some(&turn)));
    }
    /// Two that have a part each of what is to come whole would wait for one another.
    #[test]
    fn one_of_a_peer_has_the_rest_of_a_payload_beyond_what_there_is() {
        let budget = Budget::new(64 * MIB);
        let [one, two] = [1, 1].map(|user| share(&budget, user));
        assert!(one.take(17 * MIB, None) && two.take(17 * MIB, None));
        let (mine, theirs) = (one.queue(MIB, true), two.queue(MIB, true));
        assert!(one.alarm.was_called());
        assert!(!one.take(MIB, Some(&mine)) && one.take_beyond(MIB));
        assert!(!two.take_beyond(MIB), "one at a time");
        assert!(one.take_beyond(MIB));
        drop(mine);
        two.alarm.was_called();
        one.no_more_beyond();
        assert!(two.alarm.was_called() && two.take_beyond(MIB));
        drop(theirs);
        drop((one, two));
        let state = budget.state();
        assert!(state.used == 0 && state.beyond.is_empty());
    }
}
