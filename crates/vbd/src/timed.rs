//! For tests: devices that take a known time, and a clock that goes on only where there is nothing else to do.

use std::collections::BTreeMap;
use std::io;

use ringtap_io::{Key, Op, Reactor, Tasks, Time};

pub(crate) const SECOND: Time = 1_000_000_000;

/// What `serve` makes of an operation that comes at some time: when it ends, and how.
struct Timed<F> {
    now: Time,
    in_flight: BTreeMap<(Time, Key), i32>,
    serve: F,
}

/// Tasks whose operations end as `serve` says of each.
pub(crate) fn tasks(serve: impl FnMut(Time, Op) -> (Time, i32) + 'static) -> Tasks {
    // Not at the clock's beginning, before which nothing can have come in.
    Tasks::new(Box::new(Timed { now: SECOND, in_flight: BTreeMap::new(), serve }))
}

impl<F: FnMut(Time, Op) -> (Time, i32)> Reactor for Timed<F> {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        wait: bool,
    ) -> io::Result<()> {
        for (key, op) in submit.drain(..) {
            let (when, result) = (self.serve)(self.now, op);
            self.in_flight.insert((when, key), result);
        }
        if let Some(((next, _), _)) = self.in_flight.first_key_value().filter(|_| wait) {
            self.now = self.now.max(*next);
        }
        let later = self.in_flight.split_off(&(self.now + 1, 0));
        let over = std::mem::replace(&mut self.in_flight, later);
        done.extend(over.into_iter().map(|((_, key), result)| (key, result)));
        Ok(())
    }

    fn cancel(&mut self, key: Key, done: &mut Vec<(Key, i32)>) -> io::Result<()> {
        let found = self.in_flight.keys().find(|(_, other)| *other == key).copied();
        if let Some(place) = found {
            self.in_flight.remove(&place);
            done.push((key, -libc::ECANCELED));
        }
        Ok(())
    }

    fn now(&self) -> Time {
        self.now
    }
}
