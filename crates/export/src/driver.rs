//! The one loop of the threads of all transports: take requests, serve and answer them, and wait awake or asleep.

use std::io;

use ringtap_io::{Tasks, Time};
use ringtap_vbd::Vbd;

use crate::poll::{BATCH_WAIT, Batching, Poller, Wait};

/// Reading the clock of a thread's CPU time is a system call: not at every rest.
const ACCOUNT_EVERY: Time = 100_000_000;

/// What a turn of a source has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// All is done that can be done without waiting.
    Done,
    /// There is more to do at once.
    Again,
    /// Nothing more is to be served.
    Over,
}

/// How the requests of one thread come, and how their answers go.
pub(crate) trait Source {
    /// Whether requests come by operations that its tasks have asked for. Those are handed over by the very
    /// system call that waits for their end; elsewhere a guest's requests are looked for once more before.
    const ASKS: bool = false;
    /// Whether several of many requests on the disk are waited for rather than the next.
    const GATHERS: bool = false;

    /// What to wait awake for, and for how long.
    fn poller() -> Poller {
        Poller::default()
    }

    /// Take what has come, run the tasks, answer.
    fn turn(&self, tasks: &mut Tasks) -> io::Result<Turn>;

    /// Whether more could be taken at once.
    fn has_more(&self) -> bool {
        false
    }

    /// Requests taken and not answered.
    fn in_flight(&self) -> usize;

    /// What the thread waits for where it has nothing to do.
    fn waits_for(&self) -> Wait {
        Wait::of(self.in_flight())
    }

    /// It waits awake: at the next turn it looks for requests, though nothing tells of any.
    fn looks_again(&self) {}

    /// Have the thread be woken by what comes from now on; whether nothing has come meanwhile, so that it may sleep.
    fn may_sleep(&self, tasks: &mut Tasks) -> bool;

    /// It has slept.
    fn woke(&self) {}

    /// Show its device, where it has one already.
    fn with_vbd(&self, look: impl FnOnce(&Vbd));
}

/// Serve until it is over.
pub(crate) fn run<S: Source>(source: &S, tasks: &mut Tasks) -> io::Result<()> {
    let io = tasks.io().clone();
    let mut poller = S::poller();
    let mut batching = Batching::default();
    let mut accounted = 0;
    let mut account = |now: Time| {
        if now.saturating_sub(accounted) > ACCOUNT_EVERY {
            accounted = now;
            source.with_vbd(Vbd::account_cpu_time);
        }
    };
    loop {
        match source.turn(tasks)? {
            Turn::Done => {}
            Turn::Again => continue,
            Turn::Over => return Ok(()),
        }
        let (in_flight, more) = (source.in_flight(), source.has_more());
        let now = io.now();
        let may_gather = S::GATHERS && !more && !tasks.has_ready();
        if let Some(events) = batching.wait_for(now, in_flight).filter(|_| may_gather) {
            account(now);
            // It sleeps now: another thread may wait awake.
            poller.event(now);
            tasks.turn_for(events, BATCH_WAIT)?;
            batching.woken(io.now(), tasks.has_ready());
        } else if !S::ASKS && (more || tasks.has_work()) {
            tasks.turn(false)?;
            poller.event(io.now());
        } else if poller.spin(now, source.waits_for()) {
            source.with_vbd(|vbd| vbd.waits(true, poller.window()));
            tasks.turn(false)?;
            if tasks.has_ready() {
                poller.event(io.now());
            }
            source.looks_again();
            std::hint::spin_loop();
        } else if source.may_sleep(tasks) {
            account(now);
            source.with_vbd(|vbd| vbd.waits(false, poller.window()));
            tasks.turn(true)?;
            poller.event(io.now());
            source.woke();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use ringtap_io::{Key, Op, Reactor};

    use super::*;

    /// What a thread did, in order.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Did {
        Turn,
        Armed,
        HandedOver(usize),
        Waited(usize),
        Gathered(u32),
        Woke,
    }

    type Log = Rc<RefCell<Vec<Did>>>;

    /// What it is given has ended at once; it takes a second whenever it is waited for.
    struct Disk(Log, Time);

    impl Reactor for Disk {
        fn turn(
            &mut self,
            submit: &mut Vec<(Key, Op)>,
            done: &mut Vec<(Key, i32)>,
            wait: bool,
        ) -> io::Result<()> {
            let did = if wait { Did::Waited } else { Did::HandedOver };
            self.0.borrow_mut().push(did(submit.len()));
            self.1 += if wait { 1_000_000_000 } else { 1_000 };
            done.extend(submit.drain(..).map(|(key, _)| (key, 0)));
            Ok(())
        }

        fn turn_for(
            &mut self,
            _: &mut Vec<(Key, Op)>,
            _: &mut Vec<(Key, i32)>,
            events: u32,
            _: Time,
        ) -> io::Result<()> {
            self.0.borrow_mut().push(Did::Gathered(events));
            Ok(())
        }

        fn now(&self) -> Time {
            self.1
        }
    }

    /// Each turn does what it is told: how many requests there are for it, and whether more can be taken.
    struct Told<const ASKS: bool> {
        log: Log,
        turns: RefCell<Vec<(usize, bool)>>,
        now: Cell<(usize, bool)>,
        /// So many times something comes while it is about to sleep.
        surprises: Cell<usize>,
    }

    impl<const ASKS: bool> Source for Told<ASKS> {
        const ASKS: bool = ASKS;
        const GATHERS: bool = true;

        fn turn(&self, tasks: &mut Tasks) -> io::Result<Turn> {
            tasks.run_ready();
            let Some(next) = self.turns.borrow_mut().pop() else { return Ok(Turn::Over) };
            self.log.borrow_mut().push(Did::Turn);
            self.now.set(next);
            let io = tasks.io().clone();
            if next.0 == 1 {
                tasks.spawn(async move {
                    io.run(Op::Timeout { nanos: 1 }).await;
                });
                tasks.run_ready();
            }
            Ok(Turn::Done)
        }

        fn has_more(&self) -> bool {
            self.now.get().1
        }

        fn in_flight(&self) -> usize {
            self.now.get().0
        }

        fn may_sleep(&self, _: &mut Tasks) -> bool {
            self.log.borrow_mut().push(Did::Armed);
            let left = self.surprises.get();
            self.surprises.set(left.saturating_sub(1));
            left == 0
        }

        fn woke(&self) {
            self.log.borrow_mut().push(Did::Woke);
        }

        fn with_vbd(&self, _: impl FnOnce(&Vbd)) {}
    }

    fn driven<const ASKS: bool>(mut turns: Vec<(usize, bool)>, surprises: usize) -> Vec<Did> {
        let log = Log::default();
        turns.reverse();
        let mut tasks = Tasks::new(Box::new(Disk(log.clone(), 0)));
        let (turns, now, surprises) = (turns.into(), Cell::default(), surprises.into());
        let source = Told::<ASKS> { log: log.clone(), turns, now, surprises };
        run(&source, &mut tasks).expect("the disk is well");
        drop((source, tasks));
        Rc::into_inner(log).expect("no other").into_inner()
    }

    #[test]
    fn who_has_nothing_to_do_sleeps_unless_something_came_as_it_said_so() {
        let slept = [Did::Turn, Did::Armed, Did::Waited(0), Did::Woke];
        assert_eq!(driven::<false>(vec![(0, false)], 0), slept);
        let twice = [Did::Turn, Did::Armed, Did::Turn, Did::Armed, Did::Waited(0), Did::Woke];
        assert_eq!(driven::<false>(vec![(0, false), (0, false)], 1), twice);
    }

    #[test]
    fn what_was_asked_for_is_handed_over_before_or_by_the_wait() {
        // Others may be looked for once more first.
        assert_eq!(driven::<false>(vec![(1, false)], 0), [Did::Turn, Did::HandedOver(1)]);
        let by_the_wait = [Did::Turn, Did::Armed, Did::Waited(1), Did::Woke];
        assert_eq!(driven::<true>(vec![(1, false)], 0), by_the_wait);
    }

    #[test]
    fn several_of_many_are_waited_for_while_no_more_can_be_taken() {
        assert_eq!(driven::<false>(vec![(32, false)], 0), [Did::Turn, Did::Gathered(8)]);
        assert_eq!(driven::<false>(vec![(32, true)], 0), [Did::Turn, Did::HandedOver(0)]);
        assert_eq!(driven::<true>(vec![(32, false)], 0), [Did::Turn, Did::Gathered(8)]);
    }
}
