//! Which requests come one by one, so that the queue's thread may sleep in a write itself.
//!
//! A write of the ring's past the page cache of a file is ended by a worker of the kernel (seen on Linux
//! 6.12 with ext4), one that somebody waits for in its own system call is not, and waking the worker,
//! which wakes us, takes longer than waking us. But who sleeps in a write hears nothing else, so
//! it is tried only where requests have come one by one for a while, and no more once one did not.

use std::io;

use ringtap_io::{Tasks, Time};

use crate::tuning::{LONGEST, ROW};

/// Decides whether the thread of a queue may sleep in a write.
#[derive(Default)]
pub(crate) struct Synchronous {
    row: u32,
    requests: usize,
}

impl Synchronous {
    /// Called before each turn, with how many requests are in flight or wait to be. Where one write has
    /// come alone, and such do, it is the turn, and when it began is told. `others` says then whether more came
    /// meanwhile.
    #[inline]
    pub(crate) fn turn(
        &mut self,
        tasks: &mut Tasks,
        requests: usize,
        others: impl FnOnce(&mut Tasks) -> bool,
    ) -> io::Result<Option<Time>> {
        if !self.may_sleep(requests) || !tasks.has_lone_write() {
            return Ok(None);
        }
        let began = tasks.io().now();
        if tasks.turn_in_write()? {
            let took = tasks.io().now().saturating_sub(began);
            self.slept(took, others(tasks));
        } else {
            self.row = 0;
        }
        Ok(Some(began))
    }

    #[inline]
    fn may_sleep(&mut self, requests: usize) -> bool {
        if requests > 1 {
            self.row = 0;
        } else if requests > self.requests {
            self.row = self.row.saturating_add(1);
        }
        self.requests = requests;
        requests == 1 && self.row > ROW
    }

    #[inline]
    fn slept(&mut self, time: Time, others: bool) {
        self.requests = 0;
        if others || time > LONGEST {
            self.row = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use ringtap_io::{File, Key, Mem, Op, Reactor};

    use super::*;

    /// What becomes of a lone write.
    #[derive(Clone, Copy, PartialEq)]
    enum Fate {
        Made { nanos: Time },
        Refused,
    }

    struct Disk {
        fate: Rc<Cell<Fate>>,
        now: Time,
    }

    impl Reactor for Disk {
        fn turn(
            &mut self,
            submit: &mut Vec<(Key, Op)>,
            done: &mut Vec<(Key, i32)>,
            _: bool,
        ) -> io::Result<()> {
            done.extend(submit.drain(..).map(|(key, _)| (key, 1)));
            Ok(())
        }

        fn has_lone_write(&mut self, submit: &[(Key, Op)]) -> bool {
            !submit.is_empty()
        }

        fn turn_in_write(
            &mut self,
            submit: &mut Vec<(Key, Op)>,
            done: &mut Vec<(Key, i32)>,
        ) -> io::Result<bool> {
            let fate = self.fate.get();
            if let Fate::Made { nanos } = fate {
                self.now += nanos;
            }
            self.turn(submit, done, false).map(|()| fate != Fate::Refused)
        }

        fn now(&self) -> Time {
            self.now
        }
    }

    struct Queue {
        tasks: Tasks,
        fate: Rc<Cell<Fate>>,
        synchronous: Synchronous,
    }

    impl Queue {
        fn new() -> Queue {
            let fate = Rc::new(Cell::new(Fate::Made { nanos: LONGEST }));
            let disk = Disk { fate: fate.clone(), now: 0 };
            Queue { tasks: Tasks::new(Box::new(disk)), fate, synchronous: Synchronous::default() }
        }

        /// A write comes and is served; whether this thread turned to it alone.
        fn write(&mut self, others: bool) -> bool {
            let io = self.tasks.io().clone();
            self.tasks.spawn(async move {
                let file = File::from_parts(0, 0);
                let mem = Mem::of_kernel(0, 512);
                io.run(Op::Write { file, offset: 0, mem, durable: false }).await;
            });
            self.tasks.run_ready();
            let alone = self.synchronous.turn(&mut self.tasks, 1, |_| others).expect("a turn");
            let alone = alone.is_some();
            if !alone {
                self.tasks.turn(true).expect("a turn");
            }
            self.tasks.run_ready();
            assert_eq!(self.tasks.count(), 0, "it has ended");
            let none = self.synchronous.turn(&mut self.tasks, 0, |_| false).expect("a turn");
            assert_eq!(none, None);
            alone
        }

        /// How many pass before one is alone.
        fn until_alone(&mut self) -> usize {
            (0..).find(|_| self.write(false)).unwrap_or_default()
        }
    }

    #[test]
    fn only_after_a_row_of_lone_requests_is_one_slept_in() {
        let mut queue = Queue::new();
        assert_eq!(queue.until_alone(), ROW as usize);
        assert!(queue.write(false) && queue.write(false), "and those behind it");
        // One that is looked at again and again is one.
        let mut synchronous = Synchronous::default();
        assert!((0..2 * ROW).all(|_| !synchronous.may_sleep(1)));
    }

    #[test]
    fn what_does_not_suit_a_lone_write_ends_the_row() {
        let spoil: [fn(&mut Queue); 4] = [
            |queue| {
                assert!(
                    !queue.synchronous.may_sleep(2) && !queue.synchronous.may_sleep(0),
                    "two at once"
                )
            },
            |queue| assert!(queue.write(true), "another comes meanwhile"),
            |queue| {
                queue.fate.set(Fate::Made { nanos: LONGEST + 1 });
                assert!(queue.write(false));
            },
            |queue| {
                queue.fate.set(Fate::Refused);
                assert!(queue.write(false));
            },
        ];
        for (index, spoil) in spoil.into_iter().enumerate() {
            let mut queue = Queue::new();
            queue.until_alone();
            spoil(&mut queue);
            assert_eq!(queue.until_alone(), ROW as usize, "{index}");
        }
    }
}
