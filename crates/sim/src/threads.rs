//! Models of what threads share: the same few threads over and over, in an order of steps that a seed
//! chooses (feature `shuttle`; a step is a use of anything in [`ringtap_io::sync`]).
//!
//! Half of the orders are wholly random; the other half let one thread run on for as long as it can, with
//! few changes. Weak orderings are not modelled: every step is sequentially consistent.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use ringtap_io::{Alarm, Io, Key, Op, Reactor, Tasks, Time, sync};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::{Condvar, Mutex};
use shuttle::{Config, FailurePersistence, Runner};

use crate::{Chances, Disk, Sim};

pub use shuttle::thread::{JoinHandle, spawn};

/// Begin with this seed.
const SEED: u64 = 21;
/// Changes of thread in an order that has few.
const FEW: usize = 4;
/// Orders of both kinds that are tried before it is asked whether something was noticed.
const SOME: usize = 200;
/// Room for the futures of an unoptimised build.
const STACK: usize = 1 << 20;

fn number(name: &str) -> Option<usize> {
    std::env::var(name).ok()?.parse().ok()
}

fn config() -> Config {
    // What is noticed on purpose need not be told how to be seen again.
    let quiet = sync::is_broken();
    let mut config = Config::new();
    config.stack_size = STACK;
    config.silence_warnings = true;
    if quiet {
        config.failure_persistence = FailurePersistence::None;
    }
    config.max_steps = shuttle::MaxSteps::FailAfter(10_000_000);
    config
}

fn run(scheduler: impl Scheduler + 'static, model: fn()) {
    Runner::new(scheduler, config()).run(model);
}

fn run_some(seed: u64, orders: usize, model: fn()) {
    run(RandomScheduler::new_from_seed(seed, orders.div_ceil(2)), model);
    run(PctScheduler::new_from_seed(seed, FEW, orders.div_ceil(2)), model);
}

/// Run a model in so many orders, or `RINGTAP_ORDERS`, from the seed `RINGTAP_SEED`; it panics where something
/// is wrong, and the order is printed then.
pub fn try_orders(name: &str, orders: usize, model: fn()) {
    let seed = number("RINGTAP_SEED").map_or(SEED, |seed| seed as u64);
    let orders = number("RINGTAP_ORDERS").unwrap_or(orders);
    let began = Instant::now();
    println!("{name}: seed {seed}, {orders} orders");
    sync::break_only(None);
    run_some(seed, orders, model);
    println!("{name}: {:.1} s", began.elapsed().as_secs_f64());
}

/// See that a model notices what is broken on purpose, within so many orders, half of each kind.
///
/// # Panics
/// Where it does not.
pub fn must_notice(broken: &'static str, orders: usize, model: fn()) {
    let began = Instant::now();
    let hook = take_hook();
    set_hook(Box::new(|_| {}));
    sync::break_only(Some(broken));
    let mut tried = 0;
    let mut some = |seed| {
        tried += SOME;
        catch_unwind(AssertUnwindSafe(|| run_some(seed, SOME, model))).is_err()
    };
    let noticed = (SEED..SEED + orders.div_ceil(SOME) as u64).any(&mut some);
    sync::break_only(None);
    set_hook(hook);
    assert!(noticed, "nobody noticed in {orders} orders: {broken}");
    println!("noticed in {tried} orders: {broken}, {:.1} s", began.elapsed().as_secs_f64());
}

/// A number that is part of the order.
pub fn choose() -> u64 {
    use shuttle::rand::RngCore;
    shuttle::rand::thread_rng().next_u64()
}

/// Another thread ends a sleep by it.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    heard: Condvar,
}

impl Alarm for Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.heard.notify_one();
    }
}

impl Bell {
    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        while !*rung {
            rung = self.heard.wait(rung).unwrap_or_else(PoisonError::into_inner);
        }
        *rung = false;
    }
}

/// A reactor on a simulated disk, at each turn of which other threads may go on. Where its tasks wait for
/// nothing but another thread's it sleeps: one that nobody wakes ends a model as a deadlock.
struct Turning {
    sim: Sim,
    bell: Arc<Bell>,
}

impl Reactor for Turning {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        wait: bool,
    ) -> io::Result<()> {
        let sleeps = wait && submit.iter().all(|(_, op)| matches!(op, Op::Timeout { .. }));
        // Who unwinds is to end what is in flight, and no more.
        match std::thread::panicking() {
            true => {}
            false if sleeps => shuttle::thread::yield_now(),
            false => sync::step(),
        }
        if wait && submit.is_empty() && self.sim.is_idle() && !std::thread::panicking() {
            self.bell.wait();
            return Ok(());
        }
        self.sim.turn(submit, done, wait)
    }

    fn alarm(&mut self) -> Arc<dyn Alarm> {
        self.bell.clone()
    }

    fn now(&self) -> Time {
        self.sim.now()
    }
}

/// A queue thread's tasks on a simulated disk on which nothing fails.
pub fn queue(disk: &Disk) -> Tasks {
    let sim = Sim::new(disk, choose()).chances(Chances::NEVER);
    Tasks::new(Box::new(Turning { sim, bell: Arc::default() }))
}

/// Run one task to its end on a queue of its own.
pub fn alone<T: 'static, F: Future<Output = T> + 'static>(
    disk: &Disk,
    task: impl FnOnce(Io) -> F,
) -> T {
    let mut tasks = queue(disk);
    let task = task(tasks.io().clone());
    tasks.block_on(task).expect("the simulation runs")
}
