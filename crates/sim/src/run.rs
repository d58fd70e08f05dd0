//! One run on a simulated disk: by which orders, who watches it, and what is broken in it.

use std::cell::RefCell;
use std::rc::Rc;

use ringtap_io::{Io, Reactor, Tasks};

use crate::{Ask, Chances, Device, Disk, Guest, Lie, Sim, Wrong, hear_of_cut, turn_all};

/// Whoever watches.
type Look = Rc<RefCell<dyn FnMut(&Disk)>>;

/// A run that is still to begin.
#[derive(Clone)]
pub struct Run {
    disk: Disk,
    seed: u64,
    chances: Chances,
    lie: Option<Lie>,
    look: Option<Look>,
}

impl Run {
    /// By the orders that follow from a seed.
    pub fn new(disk: &Disk, seed: u64) -> Run {
        Run { disk: disk.clone(), seed, chances: Chances::default(), lie: None, look: None }
    }

    /// The disk moves all bytes at once.
    pub fn quiet(self) -> Run {
        Run { chances: Chances::NEVER, ..self }
    }

    /// The disk lies.
    pub fn lying(self, lie: Option<Lie>) -> Run {
        Run { lie, ..self }
    }

    /// Somebody looks at the disk at every turn, as [`Sim::at_every_turn`] has it.
    pub fn watched(self, look: impl FnMut(&Disk) + 'static) -> Run {
        Run { look: Some(Rc::new(RefCell::new(look))), ..self }
    }

    /// The reactor of one queue.
    pub fn reactor(&self, queue: u64) -> Sim {
        let mut sim = Sim::new(&self.disk, self.seed ^ (queue << 32)).chances(self.chances);
        if let Some(look) = self.look.clone() {
            sim = sim.at_every_turn(move |disk| (look.borrow_mut())(disk));
        }
        match self.lie {
            Some(lie) => sim.lie(lie),
            None => sim,
        }
    }

    /// One queue or two, as the seed says, with what is made of their reactors.
    pub fn queues(&self, of: impl Fn(Sim) -> Box<dyn Reactor>) -> Vec<Tasks> {
        let queues = 0..1 + self.seed % 2;
        queues.map(|queue| Tasks::new(of(self.reactor(queue)))).collect()
    }

    /// Let a guest ask, `slots` requests at once, until it has no more to ask or the power goes.
    pub fn guest<D: Device + 'static>(
        &self,
        guest: &Guest,
        device: impl FnMut() -> D,
        slots: usize,
        asks: Vec<Ask>,
    ) -> Result<(), Wrong> {
        let mut all = self.queues(|sim| Box::new(sim));
        let slots = slots / all.len();
        guest.spawn_on(&mut all, device, slots, asks);
        turn_all(&self.disk, &mut all);
        hear_of_cut(&self.disk, &mut all);
        guest.wrong().map_or(Ok(()), Err)
    }

    /// Run one task to its end.
    ///
    /// # Panics
    /// Where the power is cut meanwhile, or the task waits for what nobody does.
    pub fn task<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        task: impl FnOnce(Io) -> F,
    ) -> T {
        let mut tasks = Tasks::new(Box::new(self.reactor(0)));
        let task = task(tasks.io().clone());
        tasks.block_on(task).expect("the simulation runs")
    }
}

/// Run one task to its end on a queue of its own.
///
/// # Panics
/// Where the power is cut meanwhile, or the task waits for what nobody does.
pub fn alone<T: 'static>(disk: &Disk, seed: u64, task: impl AsyncFnOnce(Io) -> T + 'static) -> T {
    Run::new(disk, seed).task(move |io| async move { task(io).await })
}
