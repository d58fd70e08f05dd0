//! How a task is woken by another, of whatever thread.

use std::sync::{Arc, PoisonError};
use std::task::{Wake, Waker};

use crate::sync::atomic::{AtomicBool, Ordering::SeqCst};
use crate::sync::{Mutex, broken};
use crate::{Alarm, Key};

/// A task of a thread, among those that there are.
pub(crate) type TaskId = u32;

/// The tasks of one thread that were woken, until it looks.
pub(crate) struct Wakes {
    told: Mutex<Told>,
    any: AtomicBool,
    /// The thread sleeps, or is about to: who wakes a task rings the alarm.
    asleep: AtomicBool,
    alarm: Arc<dyn Alarm>,
}

#[derive(Default)]
struct Told {
    woken: Vec<TaskId>,
    /// Operations that another thread has ended.
    ended: Vec<(Key, i32)>,
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
        Arc::new(Wakes { told: Mutex::new(Told::default()), any, asleep, alarm })
    }

    pub(crate) fn waker(self: &Arc<Wakes>, task: TaskId) -> Waker {
        Waker::from(Arc::new(Handle { wakes: self.clone(), task }))
    }

    fn wake(&self, task: TaskId) {
        self.tell(|told| told.woken.push(task));
    }

    /// An operation has ended.
    pub(crate) fn end(&self, key: Key, result: i32) {
        self.tell(|told| told.ended.push((key, result)));
    }

    fn tell(&self, what: impl FnOnce(&mut Told)) {
        {
            let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            what(&mut told);
            self.any.store(true, SeqCst);
        }
        if self.asleep.load(SeqCst) && self.asleep.swap(false, SeqCst) {
            self.alarm.ring();
        }
    }

    /// Whether a task was woken, or an operation has ended.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.any.load(SeqCst)
    }

    /// Those that were woken, put behind those that are ready, and what has ended.
    pub(crate) fn take(&self, ready: &mut Vec<TaskId>, ended: &mut Vec<(Key, i32)>) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        self.any.store(false, SeqCst);
        ready.append(&mut told.woken);
        ended.append(&mut told.ended);
    }

    /// What has ended alone.
    pub(crate) fn take_ends(&self, ended: &mut Vec<(Key, i32)>) {
        if self.any() {
            let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            ended.append(&mut told.ended);
        }
    }

    /// As [`Wakes::fall_asleep`], of a thread that looks at what has ended alone.
    pub(crate) fn fall_asleep_for_ends(&self) -> bool {
        self.asleep.store(true, SeqCst);
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if !told.ended.is_empty() {
            self.asleep.store(false, SeqCst);
        }
        told.ended.is_empty()
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
