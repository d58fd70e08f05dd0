//! Group commit: flushes, or syncs, one after the other. Whoever asks for one while another is in flight waits for the next,
//! which serves all that wait.

use std::sync::PoisonError;

use ringtap_io::Event;
use ringtap_io::sync::{Mutex, MutexGuard, broken};

use crate::Error;

/// The turns of one file or image.
#[derive(Default)]
pub(crate) struct GroupCommit {
    turns: Mutex<Turns>,
    ended: Event,
}

#[derive(Default)]
struct Turns {
    /// So many have begun; the last of them may be in flight.
    begun: u64,
    running: bool,
    /// The last one whose end is that of all who waited for it, and how it ended.
    served: Option<(u64, Result<(), Error>)>,
}

/// A turn that is in flight. However it ends, others go on.
pub(crate) struct Turn<'a> {
    group: &'a GroupCommit,
    number: u64,
    /// None where whoever waits is to try by itself.
    end: Option<Result<(), Error>>,
}

impl GroupCommit {
    /// Whether one is in flight.
    pub(crate) fn is_running(&self) -> bool {
        self.turns().running
    }

    /// Have one begin, or wait for one that another began since: then none is needed, and this is its end.
    pub(crate) async fn turn(&self) -> Result<Option<Turn<'_>>, Error> {
        self.turn_while(|| Ok(())).await
    }

    /// As [`GroupCommit::turn`], as long as `goes` says so.
    pub(crate) async fn turn_while(
        &self,
        goes: impl Fn() -> Result<(), Error>,
    ) -> Result<Option<Turn<'_>>, Error> {
        let mut asked = None;
        loop {
            let ended = {
                let mut turns = self.turns();
                // One that begins from now on will do, whoever carries it out.
                let next = if broken("turn joined") { 0 } else { 1 };
                let wanted = *asked.get_or_insert(turns.begun + next);
                goes()?;
                if let Some((_, end)) = turns.served.filter(|(number, _)| *number >= wanted) {
                    return end.map(|()| None);
                }
                if !turns.running || broken("turns beside one another") {
                    return Ok(Some(self.begin(&mut turns)));
                }
                self.ended.listen()
            };
            ended.await;
        }
    }

    /// Have one begin that is one's own: of another's it is not known what has changed since.
    pub(crate) async fn own_turn(&self) -> Turn<'_> {
        loop {
            let ended = {
                let mut turns = self.turns();
                if !turns.running {
                    return self.begin(&mut turns);
                }
                self.ended.listen()
            };
            ended.await;
        }
    }

    fn begin(&self, turns: &mut Turns) -> Turn<'_> {
        turns.running = true;
        turns.begun += 1;
        Turn { group: self, number: turns.begun, end: None }
    }

    /// See [`crate::Image::abandon`].
    pub(crate) fn abandon(&self) {
        self.ended.close();
    }

    /// Nothing in it is ever half changed.
    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn<'_> {
    /// This is the end of all who waited for it, once it is over.
    pub(crate) fn serves(&mut self, end: Result<(), Error>) {
        self.end = Some(end);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        {
            let mut turns = self.group.turns();
            turns.running = false;
            if let Some(end) = self.end {
                turns.served = Some((self.number, end));
            }
        }
        if !broken("turn ended in silence") {
            self.group.ended.notify();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(end) => Some(end),
            Poll::Pending => None,
        }
    }

    fn begun(group: &GroupCommit) -> Turn<'_> {
        poll(pin!(group.turn())).expect("nobody else").expect("no error").expect("a turn")
    }

    #[test]
    fn who_waits_is_served_by_the_next_and_hears_how_that_ended() {
        for end in [Ok(()), Err(Error::Full)] {
            let group = GroupCommit::default();
            let mut first = begun(&group);
            let (mut second, mut third) = (pin!(group.turn()), pin!(group.turn()));
            assert!(poll(second.as_mut()).is_none() && poll(third.as_mut()).is_none());
            first.serves(Ok(()));
            drop(first);
            // The first began before they asked.
            let mut turn = poll(second).expect("its turn").expect("no error").expect("a turn");
            assert!(group.is_running() && poll(third.as_mut()).is_none());
            turn.serves(end);
            drop(turn);
            assert_eq!(
                poll(third).expect("served").map(|turn| turn.is_some()),
                end.map(|()| false)
            );
            assert!(!group.is_running());
        }
    }

    #[test]
    fn one_that_was_dropped_serves_nobody() {
        let group = GroupCommit::default();
        let first = begun(&group);
        let mut second = pin!(group.turn());
        assert!(poll(second.as_mut()).is_none());
        drop(first);
        let turn = poll(second).expect("its turn").expect("no error").expect("a turn");
        let mut own = pin!(group.own_turn());
        assert!(poll(own.as_mut()).is_none());
        drop(turn);
        assert!(poll(own).is_some());
    }
}
