//! Which slot has which piece of an arena that has fewer pieces than there are slots.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// The free pieces, and the slots that wait for one, first come, first served. All of it belongs to
/// one thread.
pub(crate) struct Pieces {
    state: RefCell<State>,
}

struct State {
    free: Vec<usize>,
    waiting: VecDeque<(usize, Waker)>,
    /// What each slot that waited was given.
    given: Vec<Option<usize>>,
}

impl Pieces {
    /// `pieces` free ones for `slots` slots.
    pub(crate) fn new(pieces: usize, slots: usize) -> Pieces {
        let (free, waiting) = ((0..pieces).rev().collect(), VecDeque::with_capacity(slots));
        Pieces { state: RefCell::new(State { free, waiting, given: vec![None; slots] }) }
    }

    /// A piece for a slot, once there is one. A slot waits for one at a time.
    pub(crate) async fn take(&self, slot: usize) -> usize {
        if let Some(piece) = self.state.borrow_mut().free.pop() {
            return piece;
        }
        let mut waits = false;
        poll_fn(|context| {
            let state = &mut *self.state.borrow_mut();
            if let Some(piece) = state.given[slot].take() {
                return Poll::Ready(piece);
            }
            if !std::mem::replace(&mut waits, true) {
                state.waiting.push_back((slot, context.waker().clone()));
            }
            Poll::Pending
        })
        .await
    }

    /// A slot needs its piece no more: the next one may have it.
    pub(crate) fn give_back(&self, piece: usize) {
        let state = &mut *self.state.borrow_mut();
        match state.waiting.pop_front() {
            None => state.free.push(piece),
            Some((slot, waker)) => {
                state.given[slot] = Some(piece);
                waker.wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn who_came_first_is_served_first() {
        let pieces = Pieces::new(2, 5);
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(woken.clone());
        let context = &mut Context::from_waker(&waker);
        let mut slots: Vec<_> = (0..5).map(|slot| Box::pin(pieces.take(slot))).collect();
        assert_eq!(slots[4].as_mut().poll(context), Poll::Ready(0));
        assert_eq!(slots[0].as_mut().poll(context), Poll::Ready(1));
        for slot in [2, 1] {
            assert_eq!(slots[slot].as_mut().poll(context), Poll::Pending);
            assert_eq!(slots[slot].as_mut().poll(context), Poll::Pending, "it waits once");
        }
        pieces.give_back(1);
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        assert_eq!(slots[3].as_mut().poll(context), Poll::Pending, "it belongs to who waited");
        assert_eq!(slots[1].as_mut().poll(context), Poll::Pending, "he came second");
        assert_eq!(slots[2].as_mut().poll(context), Poll::Ready(1));
        pieces.give_back(0);
        assert_eq!(slots[1].as_mut().poll(context), Poll::Ready(0));
        pieces.give_back(0);
        assert_eq!(slots[3].as_mut().poll(context), Poll::Ready(0));
        pieces.give_back(1);
        assert_eq!(pin!(pieces.take(2)).poll(context), Poll::Ready(1), "nobody waits any more");
    }
}
