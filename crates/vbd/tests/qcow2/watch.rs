//! Somebody who looks at what every moment of a run would leave.

use std::cell::RefCell;
use std::rc::Rc;

use ringtap_sim::{Disk, Guest};

use super::Bench;

/// Looks at what power cuts would leave.
pub struct Watch {
    bench: Bench,
    guest: Guest,
    /// One turn in so many is looked at.
    every: u64,
    rng: RefCell<fastrand::Rng>,
    /// Whether it is the server that ends, not the power.
    kill: bool,
    wrong: RefCell<Option<String>>,
}

impl Watch {
    pub fn new(bench: &Bench, guest: &Guest, every: u64) -> Rc<Watch> {
        Rc::new(Watch::of(bench, guest, every))
    }

    /// One that looks at what a killed server would leave.
    pub fn of_kills(bench: &Bench, guest: &Guest, every: u64) -> Rc<Watch> {
        Rc::new(Watch { kill: true, ..Watch::of(bench, guest, every) })
    }

    fn of(bench: &Bench, guest: &Guest, every: u64) -> Watch {
        Watch {
            bench: bench.clone(),
            guest: guest.clone(),
            every,
            rng: RefCell::new(fastrand::Rng::with_seed(bench.seed)),
            kill: false,
            wrong: RefCell::default(),
        }
    }

    pub(super) fn look(&self, cut: &Disk) {
        let mut rng = self.rng.borrow_mut();
        if rng.u64(0..self.every) > 0 || self.wrong.borrow().is_some() {
            return;
        }
        let left = Bench { disk: cut.clone(), ..self.bench.clone() };
        let seen = match self.kill {
            true => left.after_kill(rng.u64(..)).look_alive(&self.guest),
            false => {
                let left = Bench { sabotage: None, ..left.after_power_cut(rng.u64(..)) };
                left.look(&self.guest).map(|_| ())
            }
        };
        if let Err(wrong) = seen {
            *self.wrong.borrow_mut() = Some(wrong);
        }
    }

    pub fn wrong(&self) -> Option<String> {
        self.wrong.borrow().clone()
    }
}
