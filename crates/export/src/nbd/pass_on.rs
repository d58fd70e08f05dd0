//! What a server has its clients do where another is to have them.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use super::handover::{LOOK, NewOnesWait, Session, State};
use super::server::Server;
use crate::Stop;

impl Server {
    /// Before it serves: go on with a client of another server.
    pub fn adopt(&self, session: Session) {
        self.handover.state().adopted.push(session);
    }

    /// Why its clients could not go on elsewhere.
    pub fn must_stay(&self) -> Option<String> {
        let sealed = self.handover.sealed.load(SeqCst);
        (sealed > 0).then(|| {
            format!(
                "{sealed} client(s) speak TLS, whose keys are not passed on: have them leave first, or, where they connect again \
                 by themselves, closed (upgrade --close-tls)"
            )
        })
    }

    /// Have new clients wait: who comes while others choose their exports would be one of those that are waited for, over and
    /// over.
    pub fn have_new_ones_wait(&self) -> NewOnesWait {
        let mut state = self.handover.state();
        state.new_ones_wait = true;
        state.none_come = false;
        state.bell.iter().for_each(Stop::raise);
        NewOnesWait(self.handover.clone())
    }

    /// Wait until no client comes any more ([`Server::have_new_ones_wait`]) and none is about to choose its export, though no
    /// longer than until then.
    pub fn wait_for_handshakes(&self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        let come = |state: &mut State| !state.none_come;
        let seen = self.handover.told.wait_timeout_while(self.handover.state(), left, come);
        drop(seen);
        while self.handover.shaking_hands.load(SeqCst) > 0 && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
    }

    /// From now on the word to stop leaves clients connected, for another server or, once this is taken back, for this one.
    pub fn hand_over(&self, wanted: bool) {
        self.handover.state().wanted = wanted;
    }

    /// Where it waits for clients that were told to leave: have it go on, with those that have left and with new ones at
    /// once, with the others when their requests have ended. The word to stop is taken back by that. False where it is
    /// about to end.
    pub fn take_back(&self, stop: &Stop) -> bool {
        let state = &mut *self.handover.state();
        if !state.leaving || state.stay || state.threads == 0 {
            return false;
        }
        stop.lower();
        (state.wanted, state.stay) = (false, true);
        state.adopted.append(&mut state.left);
        self.handover.told.notify_all();
        true
    }

    /// Once it has ended: the clients that are to go on.
    pub fn left(&self) -> Vec<Session> {
        std::mem::take(&mut self.handover.state().left)
    }
}
