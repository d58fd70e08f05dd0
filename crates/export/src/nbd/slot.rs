//! Slots: each serves one request at a time and is used again.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ringtap_io::{Buffer, Io, Signal};

use super::request::{Command, Header};

/// A request on its way to a slot.
pub(super) struct Job {
    pub(super) header: Header,
    /// What to do, or the NBD error to answer with.
    pub(super) command: Result<Command, u32>,
    /// The payload of a write, or room for what a reply carries.
    pub(super) buffer: Option<Buffer>,
}

#[derive(Default)]
pub(super) struct Slot {
    job: Cell<Option<Job>>,
    wake: Signal,
    closed: Cell<bool>,
}

impl Slot {
    /// Wait for a job; none once the connection is over.
    pub(super) async fn next(&self, io: &Io) -> Option<Job> {
        loop {
            if let Some(job) = self.job.take() {
                return Some(job);
            }
            if self.closed.get() {
                return None;
            }
            self.wake.wait(io).await;
        }
    }
}

/// The slots of a connection.
pub(super) struct Slots {
    io: Io,
    most: usize,
    all: RefCell<Vec<Rc<Slot>>>,
    free: RefCell<Vec<usize>>,
    changed: Signal,
}

impl Slots {
    pub(super) fn new(io: Io, most: usize) -> Slots {
        Slots {
            io,
            most,
            all: RefCell::default(),
            free: RefCell::default(),
            changed: Signal::default(),
        }
    }

    /// A free slot, made by `start` where there are not yet as many as there may be.
    pub(super) async fn take(&self, start: impl Fn(usize, Rc<Slot>)) -> usize {
        loop {
            if let Some(free) = self.free.borrow_mut().pop() {
                return free;
            }
            let number = self.all.borrow().len();
            if number < self.most {
                let slot = Rc::new(Slot::default());
                self.all.borrow_mut().push(slot.clone());
                start(number, slot);
                return number;
            }
            self.changed.wait(&self.io).await;
        }
    }

    /// Let a slot that was taken serve.
    pub(super) fn hand(&self, number: usize, job: Job) {
        let slot = &self.all.borrow()[number];
        slot.job.set(Some(job));
        slot.wake.notify(&self.io);
    }

    /// The slot may be taken again.
    pub(super) fn release(&self, number: usize) {
        self.free.borrow_mut().push(number);
        self.changed.notify(&self.io);
    }

    pub(super) fn all_free(&self) -> bool {
        self.free.borrow().len() == self.all.borrow().len()
    }

    /// Wait until every slot is free.
    pub(super) async fn rest(&self) {
        while !self.all_free() {
            self.changed.wait(&self.io).await;
        }
    }

    /// Let the tasks of all slots end.
    pub(super) fn close(&self) {
        for slot in self.all.borrow().iter() {
            slot.closed.set(true);
            slot.wake.notify(&self.io);
        }
    }
}
