//! The loop of tasks of one queue thread.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use crate::io::AtEnd;
use crate::wake::TaskId;
use crate::wake::Wakes;
use crate::{Io, Key, Op, Reactor, Time};

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// A task's place; the next task in it has the same waker.
struct Slot {
    task: Option<Task>,
    at_end: AtEnd,
    waker: Waker,
}

/// The tasks of one thread and the reactor that carries out what they ask for.
///
/// A completed operation and a [`crate::Signal`] wake a task of this thread without its waker; who wakes one of
/// another thread, as [`crate::Event`] does, has the waker.
pub struct Tasks {
    io: Io,
    tasks: Vec<Slot>,
    /// Tasks whose end nobody waits for.
    unawaited: usize,
    wakes: Arc<Wakes>,
    free: Vec<TaskId>,
    submit: Vec<(Key, Op)>,
    done: Vec<(Key, i32)>,
    /// Those that this round runs, and which of them is next.
    ready: Vec<TaskId>,
    next: usize,
}

impl Tasks {
    /// An empty loop on a reactor.
    pub fn new(reactor: Box<dyn Reactor>) -> Tasks {
        let io = Io::new(reactor);
        let wakes = io.shared.wakes.clone();
        Tasks {
            io,
            tasks: Vec::new(),
            unawaited: 0,
            wakes,
            free: Vec::new(),
            submit: Vec::new(),
            done: Vec::new(),
            ready: Vec::new(),
            next: 0,
        }
    }

    /// The door that tasks of this loop use.
    pub fn io(&self) -> &Io {
        &self.io
    }

    /// Add a task; it runs at the next [`Tasks::run_ready`].
    pub fn spawn(&mut self, task: impl Future<Output = ()> + 'static) {
        self.add(Box::pin(task), AtEnd::Awaited);
    }

    fn add(&mut self, task: Task, at_end: AtEnd) {
        let id = self.free.pop().unwrap_or_else(|| {
            let id = self.tasks.len() as TaskId;
            self.tasks.push(Slot { task: None, at_end, waker: self.wakes.waker(id) });
            id
        });
        self.unawaited += usize::from(at_end != AtEnd::Awaited);
        self.tasks[id as usize].at_end = at_end;
        self.tasks[id as usize].task = Some(task);
        self.io.shared.ready.borrow_mut().push(id);
    }

    /// Tasks that have not ended, without those that [`Io::spawn_beside`] and [`Io::spawn_expendable`] started.
    pub fn count(&self) -> usize {
        let spawned = self.io.shared.spawned.borrow();
        let spawned = spawned.iter().filter(|one| one.at_end == AtEnd::Awaited).count();
        self.tasks.len() - self.free.len() - self.unawaited + spawned
    }

    /// Whether a task could run at once or after a turn, or an operation waits to be handed over.
    pub fn has_work(&self) -> bool {
        let shared = &*self.io.shared;
        self.is_interrupted()
            || !shared.ready.borrow().is_empty()
            || !shared.submit.borrow().is_empty()
            || !shared.spawned.borrow().is_empty()
            || shared.turned.is_awaited()
            || self.wakes.any()
    }

    /// Whether a task could run at once.
    pub fn has_ready(&self) -> bool {
        let shared = &*self.io.shared;
        self.is_interrupted()
            || !shared.ready.borrow().is_empty()
            || !shared.spawned.borrow().is_empty()
            || self.wakes.any()
    }

    /// Run every task that can go on, until none can.
    ///
    /// A task that panics has ended; the panic goes to the caller. Who catches it may go on with the other
    /// tasks by calling this again.
    pub fn run_ready(&mut self) {
        if self.next > 0 {
            let id = self.ready[self.next - 1];
            let slot = &mut self.tasks[id as usize];
            slot.task = None;
            self.unawaited -= usize::from(slot.at_end != AtEnd::Awaited);
            self.free.push(id);
        }
        loop {
            while let Some(id) = self.ready.get(self.next).copied() {
                self.next += 1;
                let Some(Slot { task: slot, waker, at_end }) = self.tasks.get_mut(id as usize)
                else {
                    continue;
                };
                let Some(task) = slot else { continue };
                self.io.shared.current.set(id);
                if task.as_mut().poll(&mut Context::from_waker(waker)).is_ready() {
                    *slot = None;
                    self.unawaited -= usize::from(*at_end != AtEnd::Awaited);
                    self.free.push(id);
                }
            }
            self.ready.clear();
            self.next = 0;
            if !self.io.shared.spawned.borrow().is_empty() {
                self.take_spawned();
            }
            if self.wakes.any() {
                self.take_told();
            }
            std::mem::swap(&mut self.ready, &mut *self.io.shared.ready.borrow_mut());
            if self.ready.is_empty() {
                return;
            }
        }
    }

    #[cold]
    fn take_spawned(&mut self) {
        let spawned = std::mem::take(&mut *self.io.shared.spawned.borrow_mut());
        for one in spawned {
            self.add(one.task, one.at_end);
        }
    }

    /// What other threads have told meanwhile.
    #[cold]
    fn take_told(&mut self) {
        self.wakes.take(&mut self.io.shared.ready.borrow_mut(), &mut self.done);
        for (key, result) in self.done.drain(..) {
            self.io.complete(key, result);
        }
    }

    /// Whether a task could go on in the present round.
    fn is_interrupted(&self) -> bool {
        self.next < self.ready.len()
    }

    /// Hand over what tasks asked for and take what has completed; with `wait`, sleep until
    /// something has or a task is woken, unless a task waits for no more than this turn. Then call
    /// [`Tasks::run_ready`].
    pub fn turn(&mut self, wait: bool) -> io::Result<()> {
        let wait = wait && !self.io.shared.turned.is_awaited() && self.wakes.fall_asleep();
        std::mem::swap(&mut self.submit, &mut *self.io.shared.submit.borrow_mut());
        let outcome =
            self.io.shared.reactor.borrow_mut().turn(&mut self.submit, &mut self.done, wait);
        if wait {
            self.wakes.wake_up();
        }
        self.completed();
        outcome
    }

    /// As [`Tasks::turn`], asleep until so many operations have completed or so many nanoseconds have
    /// passed; it may return sooner.
    pub fn turn_for(&mut self, events: u32, nanos: Time) -> io::Result<()> {
        if self.io.shared.turned.is_awaited() {
            return self.turn(false);
        }
        std::mem::swap(&mut self.submit, &mut *self.io.shared.submit.borrow_mut());
        let mut reactor = self.io.shared.reactor.borrow_mut();
        let outcome = reactor.turn_for(&mut self.submit, &mut self.done, events, nanos);
        drop(reactor);
        self.completed();
        outcome
    }

    /// Have every operation in flight end, and wait until all have; their tasks may then go on.
    pub fn cancel_all(&mut self) -> io::Result<()> {
        self.io.give_up_all()
    }

    /// Hand over what tasks have asked for, and close the reactor with that and all that is in flight, which ends with
    /// ENODEV; run the tasks once more then. An error where this reactor cannot: then nothing has changed but that some of
    /// it may be handed over.
    ///
    /// # Safety
    ///
    /// Nothing is listed or in flight but commands of drivers that end as the reactor is closed, and that touch no memory of
    /// this process but in a turn of this thread.
    pub unsafe fn close(&mut self) -> io::Result<()> {
        self.io.close()
    }

    fn completed(&mut self) {
        if !self.submit.is_empty() {
            // The reactor has failed before it took these.
            self.io.shared.submit.borrow_mut().append(&mut self.submit);
        }
        self.io.shared.now.set(self.io.shared.reactor.borrow().now());
        for (key, result) in self.done.drain(..) {
            self.io.complete(key, result);
        }
        self.io.shared.turned.happen(&self.io.shared.ready);
    }

    /// Run until every task has ended, and those that [`Io::spawn_expendable`] started have no operation in flight.
    pub fn run(&mut self) -> io::Result<()> {
        loop {
            self.run_ready();
            if self.count() == 0 && !self.cancel_expendable()? {
                return Ok(());
            }
            if !self.has_ready() {
                self.turn(true)?;
            }
        }
    }

    /// Have operations end whose tasks are not waited for otherwise; whether there were any. Their tasks may ask for more.
    fn cancel_expendable(&mut self) -> io::Result<bool> {
        let mut any = false;
        for (id, slot) in (0..).zip(&self.tasks) {
            if slot.task.is_some() && slot.at_end == AtEnd::Cancelled {
                any |= self.io.cancel_of(id)?;
            }
        }
        Ok(any)
    }

    /// Run one task to its end, beside those already here, and give what it gives.
    pub fn block_on<T: 'static>(
        &mut self,
        task: impl Future<Output = T> + 'static,
    ) -> io::Result<T> {
        let result = std::rc::Rc::new(std::cell::RefCell::new(None));
        let keep = result.clone();
        self.spawn(async move {
            let value = task.await;
            *keep.borrow_mut() = Some(value);
        });
        loop {
            self.run_ready();
            if let Some(value) = result.borrow_mut().take() {
                return Ok(value);
            }
            self.turn(true)?;
        }
    }
}

impl Drop for Tasks {
    /// Memory of an operation in flight must outlive it, so tasks go only when none is.
    fn drop(&mut self) {
        if let Err(error) = self.io.give_up_all() {
            // The kernel may use that memory for ever: then it is never freed, nor the ring.
            eprintln!("ringtap: the ring failed with operations in flight: {error}");
            std::mem::forget(self.io.clone());
            std::mem::forget(std::mem::take(&mut self.tasks));
        }
        // They hold the door, which holds them.
        self.io.shared.sessions.borrow_mut().clear();
        let spawned = std::mem::take(&mut *self.io.shared.spawned.borrow_mut());
        drop(spawned);
    }
}
