//! The client's side: what it has in flight, and who waits for it.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringtap_io::{Errand, Holds, Io, Key, Mem, Op, Remote, Session};

/// What is asked of the server.
#[derive(Clone, Debug)]
pub(super) enum Work {
    Read { offset: u64, len: usize },
    Write { offset: u64, data: Arc<[u8]>, durable: bool },
    Sync,
    Zero { offset: u64, len: u64, keep_space: bool },
    Forget { offset: u64, len: u64 },
}

/// A request on its way.
#[derive(Clone, Debug)]
pub(super) struct Parcel {
    pub(super) number: u64,
    pub(super) work: Work,
}

struct Waiting {
    errand: Errand,
    work: Work,
}

#[derive(Default)]
struct Inner {
    last: u64,
    waiting: BTreeMap<u64, Waiting>,
    unsent: Vec<u64>,
}

/// What all threads of the client have in flight.
#[derive(Default)]
pub(super) struct Net(Mutex<Inner>);

impl Net {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn take_unsent(&self) -> Vec<Parcel> {
        let mut inner = self.lock();
        let numbers = std::mem::take(&mut inner.unsent);
        let parcel = |number| {
            let waiting = inner.waiting.get(&number)?;
            Some(Parcel { number, work: waiting.work.clone() })
        };
        numbers.into_iter().filter_map(parcel).collect()
    }

    /// All that is in flight goes by another connection, in its order.
    pub(super) fn send_again(&self) {
        let mut inner = self.lock();
        inner.unsent = inner.waiting.keys().copied().collect();
    }

    pub(super) fn answered(&self, number: u64, result: i32, data: &[u8]) {
        // One that was given up or cancelled is nobody's any more.
        let Some(waiting) = self.lock().waiting.remove(&number) else { return };
        if let Op::Read { mem, .. } = waiting.errand.op {
            mem.copy_from(data);
        }
        waiting.errand.ender.end(result);
    }

    /// One that nobody answers has waited for too long. False where none waits.
    pub(super) fn give_one_up(&self, rng: &mut fastrand::Rng) -> bool {
        let mut inner = self.lock();
        let count = inner.waiting.len();
        if count == 0 {
            return false;
        }
        let number = inner.waiting.keys().nth(rng.usize(0..count)).copied();
        let waiting = number.and_then(|number| inner.waiting.remove(&number));
        drop(inner);
        if let Some(waiting) = waiting {
            waiting.errand.ender.end(-libc::ETIMEDOUT);
        }
        true
    }

    fn begin(&self, errand: Errand, work: Work) -> u64 {
        let mut inner = self.lock();
        inner.last += 1;
        let number = inner.last;
        inner.waiting.insert(number, Waiting { errand, work });
        inner.unsent.push(number);
        number
    }
}

impl Remote for Net {
    fn session(self: Arc<Self>, _: &Io) -> Rc<dyn Session> {
        Rc::new(Near { net: self, numbers: RefCell::default() })
    }

    fn close(&self) {}
}

/// What one thread has of it.
struct Near {
    net: Arc<Net>,
    numbers: RefCell<HashMap<Key, u64>>,
}

fn copied(mem: Mem) -> Arc<[u8]> {
    let mut bytes = vec![0; mem.len()];
    mem.copy_to(&mut bytes);
    bytes.into()
}

impl Session for Near {
    fn begin(&self, io: &Io, key: Key, op: Op) {
        let work = match op {
            Op::Read { offset, mem, .. } => Work::Read { offset, len: mem.len() },
            Op::Write { offset, mem, durable, .. } => {
                Work::Write { offset, data: copied(mem), durable }
            }
            Op::Sync { .. } => Work::Sync,
            Op::PunchHole { offset, len, .. } => Work::Zero { offset, len, keep_space: false },
            Op::ZeroRange { offset, len, .. } => Work::Zero { offset, len, keep_space: true },
            Op::Forget { offset, len, .. } => Work::Forget { offset, len },
            Op::Status { len, .. } => {
                return io.ended(key, Holds { len, hole: false, zero: false }.to_result());
            }
            _ => return io.ended(key, -libc::EOPNOTSUPP),
        };
        let number = self.net.begin(Errand { op, ender: io.ender(key) }, work);
        self.numbers.borrow_mut().insert(key, number);
    }

    fn cancel(&self, io: &Io, key: Key) {
        if let Some(number) = self.numbers.borrow_mut().remove(&key) {
            if self.net.lock().waiting.remove(&number).is_some() {
                io.ended(key, -libc::ECANCELED);
            }
        }
    }
}
