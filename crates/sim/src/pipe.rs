//! Simulated eventfds and sockets.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An eventfd: a count of signals.
#[derive(Clone, Debug, Default)]
pub(crate) struct Event {
    pub(crate) count: u64,
}

/// What one end has sent and the other has not yet received; a closed one ends there.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub(crate) bytes: VecDeque<u8>,
    pub(crate) closed: bool,
}

/// One end of a pair of streams.
#[derive(Clone, Debug)]
pub(crate) struct Socket {
    incoming: Arc<Mutex<Stream>>,
    outgoing: Arc<Mutex<Stream>>,
}

impl Socket {
    pub(crate) fn pair() -> (Socket, Socket) {
        let (left, right) = <(Arc<Mutex<Stream>>, Arc<Mutex<Stream>>)>::default();
        let back = Socket { incoming: right.clone(), outgoing: left.clone() };
        (Socket { incoming: left, outgoing: right }, back)
    }

    pub(crate) fn incoming(&self) -> MutexGuard<'_, Stream> {
        self.incoming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn outgoing(&self) -> MutexGuard<'_, Stream> {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn close(&mut self) {
        self.outgoing().closed = true;
        self.incoming().closed = true;
    }

    /// Nothing more is sent.
    pub(crate) fn shut(&self) {
        self.outgoing().closed = true;
    }
}
