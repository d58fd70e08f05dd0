//! For tests: threads of queues that panic where they are told to.

use std::sync::OnceLock;

static TURN: OnceLock<fn()> = OnceLock::new();

/// Have this called by the thread of a ublk queue in each of its turns, outside of any request. It may panic.
pub fn at_turns(step: fn()) {
    let _first = TURN.set(step);
}

pub(crate) fn turn() {
    if let Some(step) = TURN.get() {
        step();
    }
}
