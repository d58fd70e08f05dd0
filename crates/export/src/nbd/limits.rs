//! What one client, one peer, and all of them together may take.

use std::time::Duration;

use super::wire::MAX_PAYLOAD;

/// What clients may take. A peer is a user (UNIX) or a host (TCP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at a time to one listening socket.
    pub connections: usize,
    /// Those of one peer.
    pub peer_connections: usize,
    /// How long a handshake may take.
    pub handshake: Duration,
    /// How long a connection may move no byte while no request of it is in flight on the disk; none:
    /// for ever.
    pub idle: Option<Duration>,
    /// How long a client that holds memory of all may keep it waiting while others want some: for a byte of its replies to be taken,
    /// or for a MiB more of a payload, or its end, to come.
    pub stalled: Duration,
    /// Requests of one connection in flight; further ones stay in its socket.
    pub requests: usize,
    /// Bytes of one connection in flight; [`Limits::LEAST_MEMORY`] at least.
    pub memory: usize,
    /// Bytes of all connections in flight, beyond [`Limits::OWN_MEMORY`] that each has for itself.
    pub memory_of_all: usize,
    /// How long clients may take to receive their last replies when the server stops.
    pub drain: Duration,
}

impl Limits {
    /// What the largest request takes.
    pub const LEAST_MEMORY: usize = MAX_PAYLOAD as usize;
    /// Memory of all must hold the largest request of two peers.
    pub const LEAST_MEMORY_OF_ALL: usize = 2 * Limits::LEAST_MEMORY;
    /// Bytes that a connection may have in flight whatever others do: 256 requests of 4 KiB.
    pub const OWN_MEMORY: usize = 1 << 20;
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 1024,
            peer_connections: 256,
            handshake: Duration::from_secs(10),
            idle: None,
            stalled: Duration::from_secs(10),
            requests: 256,
            memory: 64 << 20,
            memory_of_all: 512 << 20,
            drain: Duration::from_secs(10),
        }
    }
}
