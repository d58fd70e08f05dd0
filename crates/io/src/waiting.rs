//! Which tasks of one thread wait for something that happens again and again.

use std::cell::{Cell, RefCell};

use crate::wake::TaskId;

#[derive(Default)]
pub(crate) struct Waiting {
    count: Cell<u64>,
    tasks: RefCell<Vec<TaskId>>,
}

impl Waiting {
    /// It happens: who waits is ready.
    #[inline]
    pub(crate) fn happen(&self, ready: &RefCell<Vec<TaskId>>) {
        self.count.set(self.count.get().wrapping_add(1));
        if self.is_awaited() {
            ready.borrow_mut().append(&mut self.tasks.borrow_mut());
        }
    }

    /// Whether a task waits.
    #[inline]
    pub(crate) fn is_awaited(&self) -> bool {
        !self.tasks.borrow().is_empty()
    }

    /// How often it has happened.
    #[inline]
    pub(crate) fn count(&self) -> u64 {
        self.count.get()
    }

    pub(crate) fn list(&self, task: TaskId) {
        self.tasks.borrow_mut().push(task);
    }
}
