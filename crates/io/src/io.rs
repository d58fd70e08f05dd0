//! What a task asks for operations: list one, await its result.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::patience::Patience;
use crate::pool::{Buffer, Pool};
use crate::sessions::Sessions;
use crate::waiting::Waiting;
use crate::wake::{TaskId, Wakes};
use crate::{Elsewhere, File, Key, Mem, Op, Reactor, Time};

/// The most that one operation may move: io_uring and pread both stop near 2 GiB.
const MOST: usize = 1 << 30;

/// The rest of a transfer, with a positive errno where it fails.
pub type BoxedTransfer<'a, T> = Pin<Box<dyn Future<Output = Result<T, i32>> + 'a>>;

/// Whether an operation has moved the whole window.
#[inline]
pub fn is_all(result: i32, mem: &Mem) -> bool {
    usize::try_from(result) == Ok(mem.len())
}

#[derive(Clone, Copy)]
pub(crate) enum State {
    Free,
    InFlight(TaskId),
    /// As that, of a file that is elsewhere.
    Elsewhere(TaskId, File),
    /// Of a file that is elsewhere, carried out on one of this machine in its place.
    Lent(TaskId, File),
    Done(i32),
}

pub(crate) struct Shared {
    pub(crate) reactor: RefCell<Box<dyn Reactor>>,
    pub(crate) submit: RefCell<Vec<(Key, Op)>>,
    states: RefCell<Vec<State>>,
    free: RefCell<Vec<Key>>,
    pub(crate) in_flight: Cell<usize>,
    pub(crate) ready: RefCell<Vec<TaskId>>,
    pub(crate) current: Cell<TaskId>,
    pub(crate) spawned: RefCell<Vec<Spawned>>,
    pub(crate) now: Cell<Time>,
    /// Notified at the end of each turn.
    pub(crate) turned: Waiting,
    pool: Rc<Pool>,
    pub(crate) wakes: Arc<Wakes>,
    pub(crate) sessions: RefCell<Sessions<dyn Session>>,
}

/// What one thread has of a [`crate::Remote`].
pub trait Session {
    /// Begin an operation. [`Io::ended`] or an [`crate::Ender`] says its result, now or later and once, as io_uring
    /// would give it; until then its memory may be used. Must not wait.
    fn begin(&self, io: &Io, key: Key, op: Op);

    /// Have an operation end as soon as may be: on return, or soon after without the help of this thread's
    /// tasks.
    fn cancel(&self, io: &Io, key: Key);

    /// An operation that [`Io::begin_here`] has handed to a file of this machine has failed there, with this result: that may
    /// be its end, or it goes on as one that was just begun.
    fn failed_here(&self, io: &Io, key: Key, result: i32) {
        io.ended(key, result);
    }
}

/// A task that was started by another.
pub(crate) struct Spawned {
    pub(crate) task: Pin<Box<dyn Future<Output = ()>>>,
    pub(crate) at_end: AtEnd,
}

/// What becomes of a task once no other is left that is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtEnd {
    /// It is waited for.
    Awaited,
    /// Its operations are cancelled; then it goes with the thread.
    Cancelled,
    /// It goes with the thread.
    Dropped,
}

/// The door of one queue thread to its reactor. Clones are the same door.
#[derive(Clone)]
pub struct Io {
    pub(crate) shared: Rc<Shared>,
}

impl Io {
    pub(crate) fn new(mut reactor: Box<dyn Reactor>) -> Io {
        let wakes = Wakes::new(reactor.alarm());
        let now = Cell::new(reactor.now());
        Io {
            shared: Rc::new(Shared {
                reactor: RefCell::new(reactor),
                submit: RefCell::default(),
                states: RefCell::default(),
                free: RefCell::default(),
                in_flight: Cell::new(0),
                ready: RefCell::default(),
                current: Cell::new(0),
                spawned: RefCell::default(),
                now,
                turned: Waiting::default(),
                pool: Rc::default(),
                wakes,
                sessions: RefCell::default(),
            }),
        }
    }

    /// The time of the present turn: one clock reading for everything that happens in it.
    #[inline]
    pub fn now(&self) -> Time {
        self.shared.now.get()
    }

    /// Operations that have been asked for and have not completed.
    pub fn in_flight(&self) -> usize {
        self.shared.in_flight.get()
    }

    /// A page-aligned buffer of `len` bytes; its bytes are not cleared. ENOMEM where there is none.
    pub fn buffer(&self, len: usize) -> Result<Buffer, i32> {
        self.shared.pool.take(len).ok_or(libc::ENOMEM)
    }

    /// Let go of the buffers that are kept for later ones.
    pub fn trim(&self) {
        self.shared.pool.trim();
    }

    /// Keep no image's file open that operations have named, once none is in flight: who had it may have closed it.
    pub fn forget_images(&self) {
        self.shared.reactor.borrow_mut().forget_images();
    }

    /// Start another task on this thread.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        self.spawn_until(AtEnd::Awaited, task);
    }

    /// As [`Io::spawn`], a task that serves others: nobody waits for its end, and it may go with the thread.
    pub fn spawn_beside(&self, task: impl Future<Output = ()> + 'static) {
        self.spawn_until(AtEnd::Dropped, task);
    }

    /// As [`Io::spawn`], a task that need not succeed: what it waits for does not keep the thread. When the thread ends
    /// ([`crate::Tasks::run`]) its operations are cancelled, and it may see that, or go with the thread.
    pub fn spawn_expendable(&self, task: impl Future<Output = ()> + 'static) {
        self.spawn_until(AtEnd::Cancelled, task);
    }

    fn spawn_until(&self, at_end: AtEnd, task: impl Future<Output = ()> + 'static) {
        self.shared.spawned.borrow_mut().push(Spawned { task: Box::pin(task), at_end });
    }

    /// Carry out one operation; the raw result.
    #[inline]
    pub fn run(&self, op: Op) -> OpFuture<'_> {
        OpFuture { io: self, step: Step::Asked(op) }
    }

    /// Read until `mem` is full or the file ends; gives the bytes read. Short reads and EINTR are
    /// carried on with here.
    #[inline]
    pub async fn read(&self, file: File, offset: u64, mem: Mem) -> Result<usize, i32> {
        self.read_blocks(file, offset, mem, 1).await
    }

    /// As [`Io::read`], of a file that is read in whole blocks: a read that stops inside one has met
    /// the file's end, and O_DIRECT would refuse to go on from there.
    #[inline]
    pub async fn read_blocks(
        &self,
        file: File,
        offset: u64,
        mem: Mem,
        block: usize,
    ) -> Result<usize, i32> {
        let first = self.begin_read(file, offset, mem).await;
        if is_all(first, &mem) {
            return Ok(mem.len());
        }
        self.read_on(file, offset, mem, block, first).await
    }

    /// The first operation of a read. Whoever awaits it without [`Io::read_blocks`] around it saves the instructions of that
    /// future; [`Io::read_on`] takes the result unless it [`is_all`].
    #[inline]
    pub fn begin_read(&self, file: File, offset: u64, mem: Mem) -> OpFuture<'_> {
        self.run(Op::Read { file, offset, mem: mem.window(0, MOST) })
    }

    /// Go on with a read whose first operation gave this; gives all the bytes read. Seldom, and so on the heap, where
    /// its state makes no other read larger.
    #[cold]
    pub fn read_on(
        &self,
        file: File,
        offset: u64,
        mem: Mem,
        block: usize,
        first: i32,
    ) -> BoxedTransfer<'_, usize> {
        Box::pin(async move {
            let (mut done, mut patience, mut result) = (0, Patience::default(), first);
            loop {
                match result {
                    0 => return Ok(done),
                    n if n > 0 => {
                        done += n as usize;
                        if done >= mem.len() || done % block != 0 {
                            return Ok(done);
                        }
                    }
                    // A pipe is full, and stays so until who asked for this empties it.
                    n if n == -libc::EAGAIN && mem.pipe().is_some() => return Err(libc::EAGAIN),
                    n => self.again(n, &mut patience).await?,
                }
                let rest = mem.window(done, MOST);
                result = self.run(Op::Read { file, offset: offset + done as u64, mem: rest }).await;
            }
        })
    }

    /// Write all of `mem`. Short writes and EINTR are carried on with here.
    #[inline]
    pub async fn write(&self, file: File, offset: u64, mem: Mem, durable: bool) -> Result<(), i32> {
        if mem.is_empty() {
            return Ok(());
        }
        let first = self.begin_write(file, offset, mem, durable).await;
        if is_all(first, &mem) {
            return Ok(());
        }
        self.write_on(file, offset, mem, durable, first).await
    }

    /// The first operation of a write that is not empty: as [`Io::begin_read`].
    #[inline]
    pub fn begin_write(&self, file: File, offset: u64, mem: Mem, durable: bool) -> OpFuture<'_> {
        self.run(Op::Write { file, offset, mem: mem.window(0, MOST), durable })
    }

    /// Go on with a write whose first operation gave this: as [`Io::read_on`].
    #[cold]
    pub fn write_on(
        &self,
        file: File,
        offset: u64,
        mem: Mem,
        durable: bool,
        first: i32,
    ) -> BoxedTransfer<'_, ()> {
        Box::pin(async move {
            let (mut done, mut patience, mut result) = (0, Patience::default(), first);
            loop {
                match result {
                    // A file that takes no bytes and names no error has no room for them.
                    0 => return Err(libc::ENOSPC),
                    n if n > 0 => done += n as usize,
                    n => self.again(n, &mut patience).await?,
                }
                if done >= mem.len() {
                    return Ok(());
                }
                let (rest, offset) = (mem.window(done, MOST), offset + done as u64);
                result = self.run(Op::Write { file, offset, mem: rest, durable }).await;
            }
        })
    }

    /// Make completed writes of the file stable.
    pub async fn sync(&self, file: File) -> Result<(), i32> {
        self.to_the_end(Op::Sync { file }).await
    }

    /// An operation without bytes to count, begun again on EINTR.
    pub async fn to_the_end(&self, op: Op) -> Result<(), i32> {
        self.to_the_end_told(op, |_| {}).await
    }

    /// The same; `tell` hears of every result of it, also where this is dropped before it comes.
    pub async fn to_the_end_told(&self, op: Op, tell: impl Fn(i32)) -> Result<(), i32> {
        let mut patience = Patience::default();
        loop {
            match (Told { asked: self.run(op), tell: &tell }).await {
                n if n >= 0 => return Ok(()),
                n => self.again(n, &mut patience).await?,
            }
        }
    }

    /// Sleep.
    pub async fn sleep(&self, nanos: u64) {
        self.run(Op::Timeout { nanos }).await;
    }

    pub(crate) fn complete(&self, key: Key, result: i32) {
        let shared = &*self.shared;
        let mut states = shared.states.borrow_mut();
        let Some(state) = states.get_mut(key as usize) else { return };
        if let State::Lent(task, file) = *state
            && result < 0
        {
            *state = State::Elsewhere(task, file);
            drop(states);
            return self.failed_here(file, key, result);
        }
        if let State::InFlight(task) | State::Elsewhere(task, _) | State::Lent(task, _) = *state {
            if matches!(state, State::Elsewhere(..)) {
                Elsewhere::end();
            }
            *state = State::Done(result);
            shared.in_flight.set(shared.in_flight.get() - 1);
            shared.ready.borrow_mut().push(task);
            #[cfg(debug_assertions)]
            shared.pool.is_free(key);
        }
    }

    /// From now on the operation is the reactor's. False where it has ended.
    pub(crate) fn is_here(&self, key: Key) -> bool {
        let mut states = self.shared.states.borrow_mut();
        let Some(state) = states.get_mut(key as usize) else { return false };
        let State::Elsewhere(task, file) = *state else { return false };
        *state = State::Lent(task, file);
        Elsewhere::end();
        true
    }

    fn is_in_flight(&self, key: Key) -> bool {
        let states = self.shared.states.borrow();
        matches!(states[key as usize], State::InFlight(_) | State::Elsewhere(..) | State::Lent(..))
    }

    /// The operation is wanted no more: have it end, and wait until it has. Its result.
    fn give_up(&self, key: Key) -> io::Result<i32> {
        self.cancel(key)?;
        while self.is_in_flight(key) {
            self.turn_without_new()?;
        }
        let state = &mut self.shared.states.borrow_mut()[key as usize];
        let State::Done(result) = std::mem::replace(state, State::Free) else {
            return Ok(-libc::ECANCELED);
        };
        self.shared.free.borrow_mut().push(key);
        Ok(result)
    }

    /// Have every operation end, and wait until all have. Their tasks may look at the results.
    pub(crate) fn give_up_all(&self) -> io::Result<()> {
        if self.in_flight() == 0 {
            return Ok(());
        }
        let keys = self.shared.states.borrow().len() as Key;
        for key in 0..keys {
            self.cancel(key)?;
        }
        while self.in_flight() > 0 {
            self.turn_without_new()?;
        }
        Ok(())
    }

    /// See [`crate::Tasks::close`].
    pub(crate) fn close(&self) -> io::Result<()> {
        let shared = &*self.shared;
        let mut submit = std::mem::take(&mut *shared.submit.borrow_mut());
        let mut reactor = shared.reactor.borrow_mut();
        let outcome = reactor.take_last(&mut submit);
        if outcome.is_err() {
            drop(reactor);
            shared.submit.borrow_mut().append(&mut submit);
            return outcome;
        }
        let closed = Box::new(Closed(reactor.now()));
        drop(std::mem::replace(&mut *reactor, closed));
        drop(reactor);
        let keys = shared.states.borrow().len() as Key;
        (0..keys).for_each(|key| self.complete(key, -libc::ENODEV));
        Ok(())
    }

    /// Have the operations of a task end, soon; whether it has any.
    pub(crate) fn cancel_of(&self, task: TaskId) -> io::Result<bool> {
        let its = |state: &State| match state {
            State::InFlight(of) | State::Elsewhere(of, _) | State::Lent(of, _) => *of == task,
            State::Free | State::Done(_) => false,
        };
        let states = self.shared.states.borrow();
        let keys: Vec<Key> =
            (0..).zip(&*states).filter(|(_, state)| its(state)).map(|(key, _)| key).collect();
        drop(states);
        keys.iter().try_for_each(|key| self.cancel(*key))?;
        Ok(!keys.is_empty())
    }

    fn cancel(&self, key: Key) -> io::Result<()> {
        let state = self.shared.states.borrow()[key as usize];
        if let State::Elsewhere(_, file) = state {
            let session = self.shared.sessions.borrow().known(file);
            if let Some(session) = session {
                session.cancel(self, key);
            }
            return Ok(());
        }
        if let State::Lent(task, _) = state {
            // Whatever comes of it here is its end.
            self.shared.states.borrow_mut()[key as usize] = State::InFlight(task);
        }
        if !self.is_in_flight(key) || self.take_back(key) {
            return Ok(());
        }
        let mut done = vec![];
        let outcome = self.shared.reactor.borrow_mut().cancel(key, &mut done);
        done.into_iter().for_each(|(key, result)| self.complete(key, result));
        outcome
    }

    /// Whether the operation had not been handed over yet: then it never is.
    fn take_back(&self, key: Key) -> bool {
        let mut submit = self.shared.submit.borrow_mut();
        let Some(place) = submit.iter().position(|(listed, _)| *listed == key) else {
            return false;
        };
        submit.remove(place);
        drop(submit);
        self.complete(key, -libc::ECANCELED);
        true
    }

    /// Take what completes, and hand over nothing. An error only where nothing has completed by it.
    fn turn_without_new(&self) -> io::Result<()> {
        let (before, mut done) = (self.in_flight(), vec![]);
        let wakes = &self.shared.wakes;
        let sleeps = wakes.fall_asleep_for_ends();
        let outcome = self.shared.reactor.borrow_mut().turn(&mut vec![], &mut done, sleeps);
        wakes.wake_up();
        wakes.take_ends(&mut done);
        done.into_iter().for_each(|(key, result)| self.complete(key, result));
        if self.in_flight() < before { Ok(()) } else { outcome }
    }
}

/// In the place of a reactor that was closed, and when that was: what is still asked for fails.
struct Closed(Time);

impl Reactor for Closed {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        _: bool,
    ) -> io::Result<()> {
        done.extend(submit.drain(..).map(|(key, _)| (key, -libc::ENODEV)));
        Ok(())
    }

    fn now(&self) -> Time {
        self.0
    }
}

/// An operation asked for; awaiting it gives the raw result.
///
/// Once polled it runs to its end, for the kernel may be using the memory it names: where it is dropped
/// before, that cancels it and waits for its end.
#[must_use = "an operation does nothing until it is awaited"]
pub struct OpFuture<'a> {
    io: &'a Io,
    step: Step,
}

enum Step {
    Asked(Op),
    InFlight(Key),
    Over,
}

impl Future for OpFuture<'_> {
    type Output = i32;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<i32> {
        let shared = &*self.io.shared;
        match self.step {
            Step::Asked(op) => {
                let mut states = shared.states.borrow_mut();
                let task = shared.current.get();
                let elsewhere = op.elsewhere();
                let state = match elsewhere {
                    None => State::InFlight(task),
                    Some(file) => State::Elsewhere(task, file),
                };
                let key = match shared.free.borrow_mut().pop() {
                    Some(key) => {
                        states[key as usize] = state;
                        key
                    }
                    None => {
                        states.push(state);
                        (states.len() - 1) as Key
                    }
                };
                shared.in_flight.set(shared.in_flight.get() + 1);
                #[cfg(debug_assertions)]
                shared.pool.is_used(key, &op);
                self.step = Step::InFlight(key);
                match elsewhere {
                    None => shared.submit.borrow_mut().push((key, op)),
                    Some(file) => {
                        drop(states);
                        self.io.begin_elsewhere(file, key, op);
                    }
                }
                Poll::Pending
            }
            Step::InFlight(key) => {
                let mut states = shared.states.borrow_mut();
                let State::Done(result) = states[key as usize] else { return Poll::Pending };
                states[key as usize] = State::Free;
                shared.free.borrow_mut().push(key);
                drop(states);
                self.step = Step::Over;
                Poll::Ready(result)
            }
            Step::Over => Poll::Pending,
        }
    }
}

impl OpFuture<'_> {
    /// Have it end; its result, where it was begun and nobody has that.
    fn give_up(&mut self) -> Option<i32> {
        let Step::InFlight(key) = std::mem::replace(&mut self.step, Step::Over) else {
            return None;
        };
        match self.io.give_up(key) {
            Ok(result) => Some(result),
            Err(error) => {
                // The kernel still owns the memory of this operation, and will never say that it is done;
                // whoever dropped this is about to free it. There is no safe way on.
                eprintln!("ringtap: the ring failed with an operation in flight: {error}");
                std::process::abort();
            }
        }
    }
}

impl Drop for OpFuture<'_> {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// An operation whose result is told, whoever waits for it.
struct Told<'a, F: Fn(i32)> {
    asked: OpFuture<'a>,
    tell: &'a F,
}

impl<F: Fn(i32)> Future for Told<'_, F> {
    type Output = i32;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<i32> {
        let end = Pin::new(&mut self.asked).poll(context);
        if let Poll::Ready(result) = end {
            (self.tell)(result);
        }
        end
    }
}

impl<F: Fn(i32)> Drop for Told<'_, F> {
    fn drop(&mut self) {
        if let Some(result) = self.asked.give_up() {
            (self.tell)(result);
        }
    }
}
