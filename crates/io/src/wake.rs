//! How a task is woken by another, of whatever thread.

use std::sync::{Arc, PoisonError};
use std::task::{Wake, Waker};

use crate::io::TaskId;
use crate::sync::atomic::{AtomicBool, Ordering::SeqCst};
use crate::sync::{Mutex, broken};

/// Ends the sleep of a reactor.
pub trait Alarm: Send + Sync {
    /// Have the turn end that waits, or else the next one that would.
    fn ring(&self);
}

/// That of a reactor whose tasks nobody else wakes.
pub(crate) struct Silent;

impl Alarm for Silent {
    fn ring(&self) {}
}

/// The tasks of one thread that were woken, until it looks.
pub(crate) struct Wakes {
    woken: Mutex<Vec<TaskId>>,
    any: AtomicBool,
    /// The thread sleeps, or is about to: who wakes a task rings the alarm.
    asleep: AtomicBool,
    alarm: Arc<dyn Alarm>,
}

/// What the waker of a task is made of. A task that takes the place of one that has ended may be woken in vain.
struct Handle {
    wakes: Arc<Wakes>,
    task: TaskId,
}

impl Wake for Handle {
    fn wake(self: Arc<Self>) {
        self.wakes.wake(self.task);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wakes.wake(self.task);
    }
}

impl Wakes {
    pub(crate) fn new(alarm: Arc<dyn Alarm>) -> Arc<Wakes> {
        let (any, asleep) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Wakes { woken: Mutex::new(Vec::new()), any, asleep, alarm })
    }

    pub(crate) fn waker(self: &Arc<Wakes>, task: TaskId) -> Waker {
        Waker::from(Arc::new(Handle { wakes: self.clone(), task }))
    }

    fn wake(&self, task: TaskId) {
        {
            let mut woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
            woken.push(task);
            self.any.store(true, SeqCst);
        }
        if self.asleep.load(SeqCst) && self.asleep.swap(false, SeqCst) {
            self.alarm.ring();
        }
    }

    /// Whether a task was woken.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.any.load(SeqCst)
    }

    /// Those that were woken, put behind those that are ready.
    #[inline]
    pub(crate) fn take(&self, ready: &mut Vec<TaskId>) {
        if self.any() {
            self.take_some(ready);
        }
    }

    #[cold]
    fn take_some(&self, ready: &mut Vec<TaskId>) {
        let mut woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        self.any.store(false, SeqCst);
        ready.append(&mut woken);
    }

    /// Before the thread sleeps: whether it may. It says so first and looks second; who wakes a task
    /// puts it there first and looks second. One of the two sees the other.
    #[inline]
    pub(crate) fn fall_asleep(&self) -> bool {
        let early = broken("slept before looking").then(|| self.any());
        self.asleep.store(true, SeqCst);
        let woken = early.unwrap_or_else(|| self.any());
        if woken {
            self.asleep.store(false, SeqCst);
        }
        !woken
    }

    /// After it has slept.
    #[inline]
    pub(crate) fn wake_up(&self) {
        self.asleep.store(false, SeqCst);
    }
}
