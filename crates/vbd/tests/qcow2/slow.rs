//! A reactor that holds some reads back for long, so that much happens while they are in flight.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use ringtap_io::{Key, Op, Reactor, Time};
use ringtap_sim::Sim;

/// Turns that a read may be held back for.
const LONGEST: u64 = 60;

pub struct Slow {
    sim: Sim,
    rng: fastrand::Rng,
    turns: u64,
    /// Until which turn.
    held: Vec<(u64, Key, Op)>,
}

impl Slow {
    pub fn new(sim: Sim, seed: u64) -> Slow {
        Slow { sim, rng: fastrand::Rng::with_seed(seed), turns: 0, held: Vec::new() }
    }
}

impl Reactor for Slow {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        wait: bool,
    ) -> io::Result<()> {
        self.turns += 1;
        let (turns, rng) = (self.turns, &mut self.rng);
        let (hold, mut go): (Vec<_>, Vec<_>) = submit
            .drain(..)
            .partition(|(_, op)| matches!(op, Op::Read { .. }) && rng.u8(0..3) == 0);
        self.held.extend(hold.into_iter().map(|(k, op)| (turns + rng.u64(1..LONGEST), k, op)));
        // With nothing else to wait for, the held ones go.
        let idle = wait && go.is_empty() && self.turns % 8 == 0;
        self.held.retain(|(until, key, op)| {
            let goes = *until <= turns || idle;
            if goes {
                go.push((*key, *op));
            }
            !goes
        });
        let end = self.sim.turn(&mut go, done, wait && self.held.is_empty());
        if end.is_err() {
            done.extend(self.held.drain(..).map(|(_, key, _)| (key, -libc::EIO)));
        }
        end
    }

    fn now(&self) -> Time {
        self.sim.now()
    }
}

/// A reactor that keeps reads from beginning while it is told to.
pub struct Held {
    sim: Sim,
    hold: Rc<Cell<bool>>,
    held: Vec<(Key, Op)>,
}

impl Held {
    pub fn new(sim: Sim, hold: &Rc<Cell<bool>>) -> Held {
        Held { sim, hold: hold.clone(), held: Vec::new() }
    }
}

impl Reactor for Held {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        wait: bool,
    ) -> io::Result<()> {
        if !self.hold.get() {
            submit.append(&mut self.held);
        }
        // Only the guest's have this size.
        let big = |op: &Op| matches!(op, Op::Read { mem, .. } if mem.len() == 8192);
        if self.hold.get() {
            let (hold, go) = submit.drain(..).partition(|(_, op)| big(op));
            self.held.extend::<Vec<_>>(hold);
            submit.extend::<Vec<_>>(go);
        }
        self.sim.turn(submit, done, wait)
    }

    fn now(&self) -> Time {
        self.sim.now()
    }
}
