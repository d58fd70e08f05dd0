//! Which slot has which piece of an arena that has fewer pieces than there are slots.

use std::cell::RefCell;
use std::collections::VecDeque;

use ringtap_io::{Io, Signal};

/// The free pieces, and the slots that wait for one, first come, first served. All of it belongs to
/// one thread.
pub(crate) struct Pieces {
    state: RefCell<State>,
    /// A slot's, when it was given one.
    given: Vec<Signal>,
}

struct State {
    free: Vec<usize>,
    waiting: VecDeque<usize>,
    /// What each slot that waited was given.
    given: Vec<Option<usize>>,
}

impl Pieces {
    /// `pieces` free ones for `slots` slots.
    pub(crate) fn new(pieces: usize, slots: usize) -> Pieces {
        let (free, waiting) = ((0..pieces).rev().collect(), VecDeque::with_capacity(slots));
        let given = (0..slots).map(|_| Signal::default()).collect();
        Pieces { state: RefCell::new(State { free, waiting, given: vec![None; slots] }), given }
    }

    /// A piece for a slot, once there is one. A slot waits for one at a time.
    pub(crate) async fn take(&self, io: &Io, slot: usize) -> usize {
        let given = {
            let state = &mut *self.state.borrow_mut();
            if let Some(piece) = state.free.pop() {
                return piece;
            }
            state.waiting.push_back(slot);
            self.given[slot].wait(io)
        };
        given.await;
        let piece = self.state.borrow_mut().given[slot].take();
        piece.expect("only who gives a piece wakes its slot")
    }

    /// A slot needs its piece no more: the next one may have it.
    pub(crate) fn give_back(&self, io: &Io, piece: usize) {
        let state = &mut *self.state.borrow_mut();
        match state.waiting.pop_front() {
            None => state.free.push(piece),
            Some(slot) => {
                state.given[slot] = Some(piece);
                self.given[slot].notify(io);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use ringtap_io::{Ring, Tasks};

    use super::*;

    /// Slots that took a piece, in this order, with the pieces.
    type Taken = Rc<RefCell<Vec<(usize, usize)>>>;

    fn ask(tasks: &mut Tasks, pieces: &Rc<Pieces>, taken: &Taken, slot: usize) {
        let (io, pieces, taken) = (tasks.io().clone(), pieces.clone(), taken.clone());
        tasks.spawn(async move {
            let piece = pieces.take(&io, slot).await;
            taken.borrow_mut().push((slot, piece));
        });
        tasks.run_ready();
    }

    #[test]
    fn who_came_first_is_served_first() {
        let mut tasks = Tasks::new(Box::new(Ring::new().expect("a ring")));
        let (pieces, taken) = (Rc::new(Pieces::new(2, 5)), Taken::default());
        for slot in [4, 0, 2, 1] {
            ask(&mut tasks, &pieces, &taken, slot);
        }
        assert_eq!(taken.take(), [(4, 0), (0, 1)]);
        let give_back = |tasks: &mut Tasks, piece| {
            pieces.give_back(&tasks.io().clone(), piece);
            tasks.run_ready();
        };
        pieces.give_back(&tasks.io().clone(), 1);
        ask(&mut tasks, &pieces, &taken, 3);
        assert_eq!(taken.take(), [(2, 1)], "it belongs to who waited first");
        give_back(&mut tasks, 0);
        give_back(&mut tasks, 0);
        assert_eq!(taken.take(), [(1, 0), (3, 0)]);
        give_back(&mut tasks, 1);
        ask(&mut tasks, &pieces, &taken, 2);
        assert_eq!(taken.take(), [(2, 1)], "nobody waits any more");
        assert_eq!(tasks.count(), 0);
    }
}
