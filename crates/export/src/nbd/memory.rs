//! The buffers of a connection: kept for the next request, never more than the limit in all, nor than
//! its share of what all connections may hold.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ringtap_io::{Buffer, Io, PAGE, Signal};

use super::budget::{Share, Turn};
use super::limits::Limits;

/// Of a payload there is room for so many bytes more than have come.
pub(super) const STEP: usize = Limits::OWN_MEMORY;
/// Buffers are of 2^n pages; the largest holds the largest payload.
const CLASSES: usize = 14;

pub(super) struct Memory {
    io: Io,
    limit: usize,
    share: Rc<Share>,
    spare: RefCell<[Vec<Buffer>; CLASSES]>,
    spare_bytes: Cell<usize>,
    used_bytes: Cell<usize>,
    given_back: Signal,
    waiting: Cell<usize>,
}

fn class_of(size: usize) -> usize {
    ((size / PAGE).trailing_zeros() as usize).min(CLASSES - 1)
}

impl Memory {
    /// At most `limit` bytes, which must be enough for the largest request.
    pub(super) fn new(io: Io, limit: usize, share: Rc<Share>) -> Memory {
        Memory {
            io,
            limit,
            share,
            spare: RefCell::default(),
            spare_bytes: Cell::new(0),
            used_bytes: Cell::new(0),
            given_back: Signal::default(),
            waiting: Cell::new(0),
        }
    }

    /// A page-aligned buffer of `len` bytes or more, not cleared; waits while too much is in use.
    /// ENOMEM where the system has none.
    pub(super) async fn take(&self, len: usize) -> Result<Buffer, i32> {
        let size = len.max(PAGE).next_power_of_two();
        let mut turn = None;
        loop {
            let used = self.used_bytes.get();
            if used == 0 || used + size <= self.limit {
                if let Some(buffer) = self.try_take(size, turn.as_ref()) {
                    return buffer;
                }
                if turn.is_none() {
                    turn = Some(self.share.queue(size, false));
                    continue;
                }
            }
            self.wait().await;
        }
    }

    fn try_take(&self, size: usize, turn: Option<&Turn<'_>>) -> Option<Result<Buffer, i32>> {
        if let Some(buffer) = self.kept(size) {
            return Some(Ok(buffer));
        }
        if self.used_bytes.get() + self.spare_bytes.get() + size > self.limit {
            self.trim();
        }
        if !self.share.take(size, turn) {
            self.trim();
            if !self.share.take(size, turn) {
                return None;
            }
        }
        Some(self.new_buffer(size))
    }

    /// As [`Memory::take`], for a payload that has yet to come. Of what others could have only as much is taken as is needed for the
    /// first bytes of it, which are told: for more [`Memory::take_rest`].
    pub(super) async fn take_for_payload(&self, len: usize) -> Result<(Buffer, usize), i32> {
        let size = len.max(PAGE).next_power_of_two();
        if size <= STEP {
            return Ok((self.take(len).await?, size));
        }
        while self.used_bytes.get() > 0 && self.used_bytes.get() + size > self.limit {
            self.wait().await;
        }
        if let Some(buffer) = self.kept(size) {
            return Ok((buffer, size));
        }
        if self.used_bytes.get() + self.spare_bytes.get() + size > self.limit {
            self.trim();
        }
        self.take_share(STEP, false).await;
        let buffer = self.io.buffer(size).inspect_err(|_| self.share.give_back(STEP))?;
        self.used_bytes.set(self.used_bytes.get() + size);
        Ok((buffer, STEP))
    }

    /// The payload has come as far as that: room for the next bytes of the buffer that it has. Gives how many of them there is room
    /// for now.
    pub(super) async fn take_rest(&self, room: usize) -> usize {
        self.take_share(STEP, true).await;
        room + STEP
    }

    /// All of it has come.
    pub(super) fn has_rest(&self) {
        self.share.no_more_beyond();
    }

    /// Wait until there are so many bytes, for the `rest` of something or not.
    async fn take_share(&self, bytes: usize, rest: bool) {
        let mut turn = None;
        loop {
            if self.share.take(bytes, turn.as_ref()) {
                return;
            }
            self.trim();
            if self.share.take(bytes, turn.as_ref()) || rest && self.share.take_beyond(bytes) {
                return;
            }
            match turn {
                None => turn = Some(self.share.queue(bytes, rest)),
                Some(_) => self.wait().await,
            }
        }
    }

    async fn wait(&self) {
        self.waiting.set(self.waiting.get() + 1);
        self.given_back.wait(&self.io).await;
        self.waiting.set(self.waiting.get() - 1);
    }

    /// As [`Memory::take`], without waiting: for little that someone needs who holds much.
    pub(super) fn take_more(&self, len: usize) -> Result<Buffer, i32> {
        let size = len.max(PAGE).next_power_of_two();
        if let Some(buffer) = self.kept(size) {
            return Ok(buffer);
        }
        self.share.take_anyway(size);
        self.new_buffer(size)
    }

    fn kept(&self, size: usize) -> Option<Buffer> {
        let buffer = self.spare.borrow_mut()[class_of(size)].pop()?;
        self.spare_bytes.set(self.spare_bytes.get() - size);
        self.used_bytes.set(self.used_bytes.get() + size);
        Some(buffer)
    }

    /// A buffer that the share has room for already.
    fn new_buffer(&self, size: usize) -> Result<Buffer, i32> {
        let buffer = self.io.buffer(size).inspect_err(|_| self.share.give_back(size))?;
        self.used_bytes.set(self.used_bytes.get() + size);
        Ok(buffer)
    }

    /// Give back what [`Memory::take`] gave.
    pub(super) fn give_back(&self, buffer: Buffer) {
        let size = buffer.bytes().len();
        self.used_bytes.set(self.used_bytes.get() - size);
        self.spare_bytes.set(self.spare_bytes.get() + size);
        self.spare.borrow_mut()[class_of(size)].push(buffer);
        if self.share.is_wanted() {
            self.trim();
        }
        self.given_back.notify(&self.io);
    }

    /// Let go of all buffers that are not in use.
    pub(super) fn trim(&self) {
        *self.spare.borrow_mut() = Default::default();
        self.io.trim();
        self.share.give_back(self.spare_bytes.replace(0));
    }

    /// Whether any is in use.
    pub(super) fn is_used(&self) -> bool {
        self.used_bytes.get() > 0
    }

    /// Whether somebody waits for some.
    pub(super) fn is_waited_for(&self) -> bool {
        self.waiting.get() > 0
    }

    /// Let who waits look again.
    pub(super) fn look_again(&self) {
        self.given_back.notify(&self.io);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ringtap_io::{Ring, Tasks};

    use super::super::alarm::Alarm;
    use super::super::budget::Budget;
    use super::super::peer::Peer;
    use super::*;

    fn share(budget: &Arc<Budget>) -> Rc<Share> {
        let alarm = Arc::new(Alarm::new().expect("a timer"));
        Rc::new(Share::new(budget.clone(), Peer::Unknown, alarm))
    }

    #[test]
    fn buffers_are_kept_within_the_limit() {
        let mut tasks = Tasks::new(Box::new(Ring::new().expect("io_uring")));
        let io = tasks.io().clone();
        let memory = Rc::new(Memory::new(io.clone(), 1 << 20, share(&Budget::new(0))));
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

    #[test]
    fn spare_buffers_go_back_where_another_connection_waits() {
        let mut tasks = Tasks::new(Box::new(Ring::new().expect("io_uring")));
        let io = tasks.io().clone();
        let budget = Budget::new(64 << 20);
        let (one, other) = (share(&budget), share(&budget));
        let memory = Memory::new(io, 64 << 20, one.clone());
        let waits = other.clone();
        tasks
            .block_on(async move {
                let [large, small] = [32 << 20, PAGE].map(|len| memory.take(len));
                let (large, small) = (large.await.expect("memory"), small.await.expect("memory"));
                memory.give_back(large);
                assert!(one.is_borrower() && !waits.take(16 << 20, None));
                let turn = waits.queue(16 << 20, false);
                memory.give_back(small);
                assert!(!one.is_borrower());
                assert!(waits.take(16 << 20, Some(&turn)));
            })
            .expect("the ring");
        assert!(other.is_borrower());
    }
}
