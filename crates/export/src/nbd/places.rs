//! The places for connections at one listening socket.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::handshake::Refusal;
use super::limits::Limits;
use super::peer::Peer;

/// Connections past a limit that are told so politely at a time; further ones are closed at once.
const TOLD: usize = 16;

/// Who is connected to one listening socket.
pub(super) struct Places {
    name: String,
    limit: usize,
    of_peer: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    all: Side,
    peers: HashMap<Peer, Side>,
    /// Connections that are being told to go.
    told: usize,
}

/// A count that was found at its limit is logged once, until it has fallen well below it.
#[derive(Clone, Copy, Default)]
struct Side {
    count: usize,
    full: bool,
    refused: u64,
}

impl Side {
    /// Count a refusal; whether it is the first.
    fn refuse(&mut self) -> bool {
        self.refused += 1;
        !std::mem::replace(&mut self.full, true)
    }

    /// Count one off; how many were refused, where that is over now.
    fn leave(&mut self, limit: usize) -> Option<u64> {
        self.count -= 1;
        if !self.full || self.count > limit - limit.div_ceil(4) {
            return None;
        }
        self.full = false;
        Some(std::mem::take(&mut self.refused))
    }
}

/// A connection that is counted until this drops.
pub(super) struct Place {
    places: Arc<Places>,
    peer: Peer,
    /// Why it may not go on.
    pub(super) refusal: Option<Refusal>,
}

impl Places {
    /// No connection yet to the socket of that name.
    pub(super) fn new(name: String, limits: &Limits) -> Arc<Places> {
        let (limit, of_peer) = (limits.connections.max(1), limits.peer_connections.max(1));
        Arc::new(Places { name, limit, of_peer, taken: Mutex::default() })
    }

    /// A place for a new connection, or for telling it why there is none; none at all where too many
    /// are being told.
    pub(super) fn enter(self: &Arc<Self>, peer: Peer) -> Option<Place> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let name = &self.name;
        let refusal = if taken.all.count >= self.limit {
            if taken.all.refuse() {
                let limit = self.limit;
                tracing::warn!(
                    "NBD at {name}: all {limit} places are taken, clients are turned away \
                     (--nbd-connections)"
                );
            }
            Some(Refusal::Busy)
        } else if taken.peers.get(&peer).is_some_and(|side| side.count >= self.of_peer) {
            if taken.peers.entry(peer).or_default().refuse() {
                let limit = self.of_peer;
                tracing::warn!(
                    "NBD at {name}: {peer} has {limit} connections, more of it are turned away \
                     (--nbd-peer-connections)"
                );
            }
            Some(Refusal::PeerBusy)
        } else {
            None
        };
        if refusal.is_none() {
            taken.all.count += 1;
            taken.peers.entry(peer).or_default().count += 1;
        } else if taken.told == TOLD {
            return None;
        } else {
            taken.told += 1;
        }
        Some(Place { places: self.clone(), peer, refusal })
    }

    /// A place for a connection that had one, here or in another server: it is not turned away, though that one may not be free
    /// yet.
    pub(super) fn enter_again(self: &Arc<Self>, peer: Peer) -> Place {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all.count += 1;
        taken.peers.entry(peer).or_default().count += 1;
        drop(taken);
        Place { places: self.clone(), peer, refusal: None }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let places = &self.places;
        let mut taken = places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if self.refusal.is_some() {
            taken.told -= 1;
            return;
        }
        let name = &places.name;
        if let Some(refused) = taken.all.leave(places.limit) {
            tracing::info!("NBD at {name}: there are places again, {refused} clients were refused");
        }
        if let Some(side) = taken.peers.get_mut(&self.peer) {
            if let Some(refused) = side.leave(places.of_peer) {
                let peer = self.peer;
                tracing::info!("NBD at {name}: {peer} may connect again, {refused} were refused");
            }
            if side.count == 0 {
                taken.peers.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(connections: usize, peer_connections: usize) -> Arc<Places> {
        Places::new("x".into(), &Limits { connections, peer_connections, ..Limits::default() })
    }

    fn refusal(place: &Option<Place>) -> Option<Refusal> {
        place.as_ref().expect("a place to be told").refusal
    }

    #[test]
    fn one_peer_does_not_take_the_places_of_others() {
        let places = places(8, 4);
        let mut hostile: Vec<_> = (0..20).map(|_| places.enter(Peer::User(1))).collect();
        assert!(hostile[..4].iter().all(|place| refusal(place).is_none()));
        assert!(hostile[4..].iter().all(|place| refusal(place) == Some(Refusal::PeerBusy)));
        // All who may be told are being told.
        assert!(places.enter(Peer::User(1)).is_none());
        let other = places.enter(Peer::User(2));
        assert_eq!(refusal(&other), None);
        hostile.truncate(3);
        assert_eq!(refusal(&places.enter(Peer::User(1))), None);
    }

    #[test]
    fn a_full_socket_turns_everybody_away_until_somebody_leaves() {
        let places = places(2, 2);
        let mut there = vec![places.enter(Peer::User(1)), places.enter(Peer::User(2))];
        assert_eq!(refusal(&places.enter(Peer::User(3))), Some(Refusal::Busy));
        there.pop();
        assert_eq!(refusal(&places.enter(Peer::User(3))), None);
        // Who was here before, in another server or as this one was about to end, is not.
        there.push(places.enter(Peer::User(3)));
        there.push(Some(places.enter_again(Peer::User(3))));
        assert!(there.iter().all(|place| refusal(place).is_none()));
        assert_eq!(refusal(&places.enter(Peer::User(4))), Some(Refusal::Busy));
        drop(there);
        assert!(places.taken.lock().expect("a lock").peers.is_empty());
    }

    #[test]
    fn being_full_is_news_once() {
        let mut side = Side { count: 8, ..Side::default() };
        assert_eq!([side.refuse(), side.refuse()], [true, false]);
        assert_eq!([side.leave(8), side.leave(8)], [None, Some(2)]);
        assert!(side.refuse());
    }
}
