//! A reactor that holds some reads back for long, so that much happens while they are under way.

use std::io;

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
