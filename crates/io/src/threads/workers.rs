//! The threads that block in system calls, started when there is more to do than they are at.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use super::blocking::carry_out;
use crate::{Alarm, Key, Op};

/// The most threads of one reactor: so many of its transfers a disk can work at.
const MOST: usize = 16;

/// An operation and the descriptors it names.
pub(super) struct Job {
    pub(super) key: Key,
    pub(super) op: Op,
    pub(super) fd: RawFd,
    pub(super) pipe: Option<RawFd>,
}

// SAFETY: the memory that an operation names may be used by whoever carries it out, until it has completed
// (the promise of `Mem` and of `Io`), and it is handed on whole.
unsafe impl Send for Job {}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Threads that wait for one.
    idle: usize,
    ends: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    more: Condvar,
    ended: Mutex<Vec<(Key, i32)>>,
    /// Whether the reactor sleeps, and has to be told of what has ended.
    asleep: AtomicBool,
    doorbell: Arc<dyn Alarm>,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) -> MutexGuard<'_, Vec<(Key, i32)>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut queue = self.queue();
        loop {
            let Some(job) = queue.jobs.pop_front() else {
                if queue.ends {
                    return;
                }
                queue.idle += 1;
                queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
                continue;
            };
            drop(queue);
            let result = carry_out(&job.op, job.fd, job.pipe);
            self.ended().push((job.key, result));
            if self.asleep.swap(false, SeqCst) {
                self.doorbell.ring();
            }
            queue = self.queue();
        }
    }
}

pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    spare: Vec<(Key, i32)>,
}

impl Workers {
    pub(super) fn new(doorbell: Arc<dyn Alarm>) -> Workers {
        let shared = Shared {
            queue: Mutex::default(),
            more: Condvar::new(),
            ended: Mutex::default(),
            asleep: AtomicBool::new(false),
            doorbell,
        };
        Workers { shared: Arc::new(shared), threads: Vec::new(), spare: Vec::new() }
    }

    /// Have a job done; given back where there is no thread at all to do it, and none to be had.
    pub(super) fn take(&mut self, job: Job) -> Option<Job> {
        let mut queue = self.shared.queue();
        queue.jobs.push_back(job);
        let too_few = queue.jobs.len() > queue.idle;
        drop(queue);
        if too_few && self.threads.len() < MOST {
            let shared = self.shared.clone();
            // Named as the thread that it works for, so that its CPU time is found.
            let name = std::thread::current().name().unwrap_or("ringtap").to_owned();
            match Builder::new().name(name).spawn(move || shared.work()) {
                Ok(thread) => self.threads.push(thread),
                Err(_) if self.threads.is_empty() => return self.shared.queue().jobs.pop_back(),
                Err(_) => {}
            }
        }
        self.shared.more.notify_one();
        None
    }

    /// Take a job back that nobody has begun.
    pub(super) fn cancel(&self, key: Key) -> bool {
        let mut queue = self.shared.queue();
        let place = queue.jobs.iter().position(|job| job.key == key);
        place.is_some_and(|place| queue.jobs.remove(place).is_some())
    }

    /// What has ended since this was asked last; the list is to be given back, empty.
    pub(super) fn ended(&mut self) -> Vec<(Key, i32)> {
        let mut list = std::mem::take(&mut self.spare);
        std::mem::swap(&mut list, &mut *self.shared.ended());
        list
    }

    pub(super) fn give_back(&mut self, list: Vec<(Key, i32)>) {
        self.spare = list;
    }

    /// Before the reactor sleeps: false where something has ended.
    pub(super) fn fall_asleep(&self) -> bool {
        self.shared.asleep.store(true, SeqCst);
        self.shared.ended().is_empty()
    }

    pub(super) fn wake_up(&self) {
        self.shared.asleep.store(false, SeqCst);
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.queue().ends = true;
        self.shared.more.notify_all();
        for thread in self.threads.drain(..) {
            // It has nothing to say.
            let _ = thread.join();
        }
    }
}
