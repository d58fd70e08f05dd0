//! Who uses an export: so that it can be taken away from them, and from no others.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::alarm::Alarm;

/// The connections that have chosen an export.
#[derive(Default)]
pub(super) struct Users {
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Default)]
struct State {
    withdrawn: bool,
    next: u64,
    alarms: BTreeMap<u64, Arc<Alarm>>,
}

/// One of them, until it drops.
pub(super) struct User {
    users: Arc<Users>,
    number: u64,
}

impl Users {
    /// Count a connection, unless the export was withdrawn since the client saw it.
    pub(super) fn enter(self: &Arc<Self>, alarm: &Arc<Alarm>) -> Option<User> {
        let mut state = self.state();
        if state.withdrawn {
            return None;
        }
        state.next += 1;
        let number = state.next;
        state.alarms.insert(number, alarm.clone());
        Some(User { users: self.clone(), number })
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.state().alarms.len()
    }

    /// Let nobody in any more, and tell those who are there to end.
    pub(super) fn withdraw(&self) {
        let mut state = self.state();
        state.withdrawn = true;
        state.alarms.values().for_each(|alarm| alarm.stop());
    }

    /// Wait until nobody is there, though not for long.
    pub(super) fn wait_for(&self, limit: Duration) {
        let there = |state: &mut State| !state.alarms.is_empty();
        // Whether the time was up is seen by who looks again.
        drop(self.left.wait_timeout_while(self.state(), limit, there));
    }

    /// Wait until nobody is there.
    pub(super) fn wait(&self) {
        let state = self.state();
        let there = |state: &mut State| !state.alarms.is_empty();
        drop(self.left.wait_while(state, there).unwrap_or_else(PoisonError::into_inner));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.users.state().alarms.remove(&self.number);
        self.users.left.notify_all();
    }
}
