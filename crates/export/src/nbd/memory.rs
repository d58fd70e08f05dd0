//! The buffers of a connection: kept for the next request, never more than the limit in all.

use std::cell::{Cell, RefCell};

use ringtap_io::{Buffer, Io, PAGE, Signal};

/// Buffers are of 2^n pages; the largest holds the largest payload.
const CLASSES: usize = 14;

pub(super) struct Memory {
    io: Io,
    limit: usize,
    spare: RefCell<[Vec<Buffer>; CLASSES]>,
    spare_bytes: Cell<usize>,
    used_bytes: Cell<usize>,
    given_back: Signal,
}

fn class_of(size: usize) -> usize {
    ((size / PAGE).trailing_zeros() as usize).min(CLASSES - 1)
}

impl Memory {
    /// At most `limit` bytes, which must be enough for the largest request.
    pub(super) fn new(io: Io, limit: usize) -> Memory {
        Memory {
            io,
            limit,
            spare: RefCell::default(),
            spare_bytes: Cell::new(0),
            used_bytes: Cell::new(0),
            given_back: Signal::default(),
        }
    }

    /// A page-aligned buffer of `len` bytes or more, not cleared; waits while too much is in use.
    /// ENOMEM where the system has none.
    pub(super) async fn take(&self, len: usize) -> Result<Buffer, i32> {
        let size = len.max(PAGE).next_power_of_two();
        while self.used_bytes.get() + size > self.limit && self.used_bytes.get() > 0 {
            self.given_back.wait(&self.io).await;
        }
        self.take_more(size)
    }

    /// As [`Memory::take`], without waiting: for little that someone needs who holds much.
    pub(super) fn take_more(&self, len: usize) -> Result<Buffer, i32> {
        let size = len.max(PAGE).next_power_of_two();
        let kept = self.spare.borrow_mut()[class_of(size)].pop();
        let buffer = match kept {
            Some(buffer) => {
                self.spare_bytes.set(self.spare_bytes.get() - size);
                buffer
            }
            None => {
                if self.used_bytes.get() + self.spare_bytes.get() + size > self.limit {
                    self.trim();
                }
                self.io.buffer(size)?
            }
        };
        self.used_bytes.set(self.used_bytes.get() + size);
        Ok(buffer)
    }

    /// Give back what [`Memory::take`] gave.
    pub(super) fn give_back(&self, buffer: Buffer) {
        let size = buffer.bytes().len();
        self.used_bytes.set(self.used_bytes.get() - size);
        self.spare_bytes.set(self.spare_bytes.get() + size);
        self.spare.borrow_mut()[class_of(size)].push(buffer);
        self.given_back.notify(&self.io);
    }

    /// Let go of all buffers that are not in use.
    pub(super) fn trim(&self) {
        *self.spare.borrow_mut() = Default::default();
        self.spare_bytes.set(0);
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use ringtap_io::{Ring, Tasks};

    use super::*;

    #[test]
    fn buffers_are_kept_within_the_limit() {
        let mut tasks = Tasks::new(Box::new(Ring::new().expect("io_uring")));
        let io = tasks.io().clone();
        let memory = Rc::new(Memory::new(io.clone(), 1 << 20));
        let taker = memory.clone();
        tasks
            .block_on(async move {
                let one = memory.take(300 << 10).await.expect("memory");
                assert_eq!(one.bytes().len(), 512 << 10);
                let two = memory.take(5000).await.expect("memory");
                let address = two.bytes().as_ptr();
                memory.give_back(two);
                let again = memory.take(8192).await.expect("memory");
                assert_eq!(again.bytes().as_ptr(), address);
                let waits = Rc::new(Cell::new(true));
                let seen = waits.clone();
                io.spawn(async move {
                    // Only room for it once `one` is back.
                    let three = taker.take(1 << 19).await.expect("memory");
                    seen.set(false);
                    taker.give_back(three);
                });
                io.sleep(1_000_000).await;
                assert!(waits.get());
                memory.give_back(one);
                io.sleep(1_000_000).await;
                assert!(!waits.get());
                memory.give_back(again);
                // More than is there at all is given where nothing else is in use.
                let all = memory.take(2 << 20).await.expect("memory");
                assert_eq!(memory.spare_bytes.get(), 0);
                memory.give_back(all);
            })
            .expect("the ring");
    }
}
