//! The thread of one queue: fetch, serve, publish, and sleep when there is nothing to do.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::Release};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ringtap_io::{Io, Op, OpenFile, Panic, Signal, Tasks, Time};
use ringtap_vbd::Vbd;
use rustix::event::{EventfdFlags, eventfd};

use super::dirty_log::Logging;
use super::inflight::QueueInflight;
use super::memory::Memory;
use super::queue::VirtioQueue;
use super::request::ID_BYTES;
use super::told::Told;
use super::truncated;
use super::virtqueue::{Addresses, RingError, Virtqueue};
use crate::driver::{self, Source, Turn};
use crate::poll::{batch, coalesce};
use crate::queue::{keep_up, run_slot};

const STACK: usize = 256 << 10;
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// After so many kicks in a row that brought nothing, there is a pause before the next is taken.
const IN_VAIN: u32 = 64;
const LEAST_PAUSE: Time = 100_000;
const MOST_PAUSE: Time = 20_000_000;

/// What the control side tells a running queue.
enum Command {
    /// Signal this when answers are published; none: the front-end polls.
    Call(Option<Arc<OpenFile>>),
    /// Use other memory; what comes with it is dropped once that is so.
    Memory(Arc<Memory>, Sender<()>),
    /// Log what is written to guest memory into this; what comes with it is dropped once that is so.
    Log(Option<Logging>, Sender<()>),
    /// Drain and end.
    Stop,
}

struct Mailbox {
    commands: Mutex<Vec<Command>>,
    full: AtomicBool,
    bell: OpenFile,
}

/// What a queue thread starts from.
pub(crate) struct Start {
    pub(crate) index: u16,
    pub(crate) vbd: Vbd,
    pub(crate) ring: Virtqueue,
    pub(crate) addresses: Addresses,
    pub(crate) event_idx: bool,
    pub(crate) memory: Arc<Memory>,
    pub(crate) inflight: Option<QueueInflight>,
    pub(crate) logging: Option<Logging>,
    pub(crate) kick: Arc<OpenFile>,
    pub(crate) call: Option<Arc<OpenFile>>,
    pub(crate) error: Option<Arc<OpenFile>>,
    pub(crate) identity: [u8; ID_BYTES],
    pub(crate) told: Arc<Told>,
}

/// Carries a [`Start`] into its thread.
struct Sent(Start);

// SAFETY: the ring and the inflight record hold pointers into mappings that `Start` keeps alive by
// reference counts which are themselves Send; only the new thread uses them.
unsafe impl Send for Sent {}

/// A queue thread that runs.
pub(crate) struct QueueThread {
    mailbox: Arc<Mailbox>,
    handle: JoinHandle<io::Result<u16>>,
}

impl QueueThread {
    pub(crate) fn start(start: Start) -> io::Result<QueueThread> {
        let bell = OpenFile::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let mailbox =
            Arc::new(Mailbox { commands: Mutex::default(), full: AtomicBool::new(false), bell });
        let theirs = mailbox.clone();
        let sent = Sent(start);
        let handle = std::thread::Builder::new()
            .name(sent.0.vbd.thread_name(&format!("vq{}", sent.0.index)))
            .stack_size(STACK)
            .spawn(move || {
                let sent = sent;
                let span = sent.0.vbd.span().clone();
                let _disk = span.enter();
                sent.0.vbd.place_thread();
                let (index, health) = (sent.0.index, sent.0.vbd.health().clone());
                let end = health.contain(|| run(sent.0, &theirs));
                end.unwrap_or_else(|stopped| Err(io::Error::other(stopped))).inspect_err(
                    |problem| {
                        tracing::error!(
                            queue = index,
                            "the queue stops, its ring failed: {problem}"
                        );
                    },
                )
            })?;
        Ok(QueueThread { mailbox, handle })
    }

    pub(crate) fn set_call(&self, call: Option<Arc<OpenFile>>) {
        self.mailbox.post(Command::Call(call));
    }

    /// Serve from other memory. On return no request uses the old one, and the next uses this: the
    /// front-end may unmap the one and name the other as soon as it is told.
    pub(crate) fn set_memory(&self, memory: Arc<Memory>) {
        self.post_and_wait(|dropped| Command::Memory(memory, dropped));
    }

    /// Log into this from now on. On return nothing is logged elsewhere any more.
    pub(crate) fn set_logging(&self, logging: Option<Logging>) {
        self.post_and_wait(|dropped| Command::Log(logging, dropped));
    }

    fn post_and_wait(&self, command: impl FnOnce(Sender<()>) -> Command) {
        let (dropped, used) = channel();
        self.mailbox.post(command(dropped));
        // A thread that has ended leaves its mail unopened.
        while used.recv_timeout(LOOK_AGAIN) == Err(RecvTimeoutError::Timeout)
            && !self.handle.is_finished()
        {}
    }

    /// Drain and end; the available index reached.
    pub(crate) fn stop(self) -> io::Result<u16> {
        self.mailbox.post(Command::Stop);
        self.handle.join().unwrap_or_else(|_| Err(io::Error::other("the queue thread panicked")))
    }
}

impl Mailbox {
    fn post(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        self.full.store(true, Release);
        // It fails only where the count is full, and then the thread wakes anyway.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

/// What the tasks of one queue thread share.
struct Thread {
    io: Io,
    index: u16,
    mailbox: Arc<Mailbox>,
    addresses: Addresses,
    event_idx: bool,
    queue: Rc<VirtioQueue>,
    vbd: Rc<Vbd>,
    kick: Arc<OpenFile>,
    call: Rc<Caller>,
    error: Option<Arc<OpenFile>>,
    told: Arc<Told>,
    /// The queue is beyond serving; its thread stays for commands.
    broken: Cell<bool>,
    /// Its ring lies in memory that the front-end has taken away.
    unplaced: Cell<bool>,
    /// How often memory of any guest had been cut short when this one's was looked at.
    cuts: Cell<usize>,
}

/// Signals the guest: once at a time, however often it is asked to meanwhile.
#[derive(Default)]
struct Caller {
    file: std::cell::RefCell<Option<Arc<OpenFile>>>,
    wanted: Cell<bool>,
    wake: Signal,
    ending: Cell<bool>,
}

impl Caller {
    async fn run(self: Rc<Self>, io: Io) {
        while !self.ending.get() {
            if !self.wanted.replace(false) {
                self.wake.wait(&io).await;
                continue;
            }
            let file = self.file.borrow().clone();
            if let Some(file) = file {
                io.run(Op::SignalEvent { file: file.handle() }).await;
            }
        }
    }

    fn call(&self, io: &Io) {
        self.wanted.set(true);
        self.wake.notify(io);
    }
}

/// Take kicks until the file is cancelled or broken. A guest that kicks without making anything available, or a
/// file that always has a signal, is heeded less and less often.
async fn drain_kicks(io: Io, file: Arc<OpenFile>, call: Rc<Caller>, queue: Rc<VirtioQueue>) {
    let (mut in_vain, mut reached, mut pause) = (0, queue.next_available(), LEAST_PAUSE);
    while io.run(Op::ReadEvent { file: file.handle() }).await > 0 && !call.ending.get() {
        let before = std::mem::replace(&mut reached, queue.next_available());
        if before != reached {
            (in_vain, pause) = (0, LEAST_PAUSE);
        } else if in_vain < IN_VAIN {
            in_vain += 1;
        } else {
            io.run(Op::Timeout { nanos: pause }).await;
            pause = (pause * 2).min(MOST_PAUSE);
            if call.ending.get() {
                return;
            }
        }
    }
}

async fn drain_bell(io: Io, mailbox: Arc<Mailbox>, call: Rc<Caller>) {
    // Rung while it is being cancelled, it is not to be waited for again.
    while io.run(Op::ReadEvent { file: mailbox.bell.handle() }).await > 0 && !call.ending.get() {}
}

fn run(start: Start, mailbox: &Arc<Mailbox>) -> io::Result<u16> {
    let mut tasks = Tasks::new(ringtap_io::reactor()?);
    let io = tasks.io().clone();
    let Start {
        index,
        vbd,
        ring,
        addresses,
        event_idx,
        memory,
        inflight,
        logging,
        kick,
        call,
        error,
        identity,
        told,
    } = start;
    let vbd = Rc::new(vbd);
    let queue =
        VirtioQueue::new(io.clone(), ring, memory, inflight, logging, identity, vbd.clone());
    let queue = Rc::new(queue);
    let caller = Rc::new(Caller::default());
    caller.file.replace(call);
    keep_up(&io, &vbd);
    tasks.spawn(caller.clone().run(io.clone()));
    tasks.spawn(drain_kicks(io.clone(), kick.clone(), caller.clone(), queue.clone()));
    tasks.spawn(drain_bell(io.clone(), mailbox.clone(), caller.clone()));
    let thread = Thread {
        io: io.clone(),
        index,
        mailbox: mailbox.clone(),
        addresses,
        event_idx,
        queue,
        vbd,
        kick,
        call: caller,
        error,
        told,
        broken: Cell::new(false),
        unplaced: Cell::new(false),
        cuts: Cell::new(truncated::cuts()),
    };
    // A killed server may have published answers and not told of them.
    thread.call.call(&io);
    let end = Panic::catch(|| {
        driver::run(&thread, &mut tasks)?;
        thread.end(&mut tasks)
    });
    end.unwrap_or_else(|panic| thread.refuse(&mut tasks, panic))
}

impl Thread {
    /// Carry out what the control side says; whether the thread is to end.
    fn heed(&self, tasks: &mut Tasks) -> io::Result<bool> {
        // Carrying out one may take up the bell of the next.
        while self.mailbox.full.swap(false, AcqRel) {
            let commands = std::mem::take(
                &mut *self.mailbox.commands.lock().unwrap_or_else(PoisonError::into_inner),
            );
            for command in commands {
                match command {
                    Command::Call(call) => {
                        self.cancel_call(tasks)?;
                        self.call.file.replace(call);
                        // Answers may have been published while there was nothing to signal.
                        self.call.call(&self.io);
                    }
                    Command::Memory(memory, _dropped) => self.use_memory(tasks, memory)?,
                    Command::Log(logging, _dropped) => self.queue.set_logging(logging),
                    Command::Stop => return Ok(true),
                }
            }
        }
        Ok(false)
    }

    fn use_memory(&self, tasks: &mut Tasks, memory: Arc<Memory>) -> io::Result<()> {
        self.drain(tasks)?;
        let (size, next) = (self.queue.size(), self.queue.next_available());
        match Virtqueue::new(&memory, self.addresses, size, self.event_idx, next) {
            Ok(ring) => {
                self.queue.replace_memory(memory, ring);
                self.unplaced.set(false);
            }
            // It may come back, larger: a front-end takes a region away to grow it.
            Err(problem) => {
                if self.told.admits() {
                    tracing::warn!(queue = self.index, "the queue waits: {problem}");
                }
                self.unplaced.set(true);
            }
        }
        Ok(())
    }

    /// A panic of this thread's own stops the disk, too. What slots were given fails: they answer when their
    /// operations have ended.
    fn refuse(&self, tasks: &mut Tasks, panic: Panic) -> io::Result<u16> {
        self.vbd.health().fail(panic);
        self.queue.stop();
        tasks.cancel_all()?;
        let answered = Panic::catch(|| {
            tasks.run_ready();
            self.queue.publish();
            self.tell(tasks);
            tasks.turn(false)
        });
        answered.unwrap_or(Ok(()))?;
        Err(io::Error::other("its thread panicked"))
    }

    /// Answer what has ended, fetch, run what can run, publish.
    ///
    /// Answers come first: what has ended is in flight no more, and its slot, still in the cache, is
    /// the first to be used again. They are told of before more is handed to the disk, for a file in
    /// memory does all of that in the system call, and the guest would wait until its end.
    fn exchange(&self, tasks: &mut Tasks) -> Result<(), RingError> {
        tasks.run_ready();
        let on_disk = self.queue.in_flight();
        self.tell_of_answers(tasks, on_disk, self.may_fetch());
        let fetched = self.fetch(tasks, batch(on_disk));
        tasks.run_ready();
        self.tell_of_answers(tasks, on_disk, fetched.is_ok() && self.may_fetch());
        fetched
    }

    /// Give so many chains to slots, and what a killed server left.
    fn fetch(&self, tasks: &mut Tasks, most: usize) -> Result<(), RingError> {
        let cuts = truncated::cuts();
        if self.cuts.replace(cuts) != cuts && self.queue.has_lost_memory() {
            return Err(RingError::Memory);
        }
        let mut new = Vec::new();
        let fetched = if self.may_use_ring() { self.queue.poll(&mut new, most) } else { Ok(()) };
        for tag in new {
            tasks.spawn(run_slot(self.queue.clone(), self.vbd.clone(), self.io.clone(), tag));
        }
        fetched
    }

    /// Publish what was answered, and signal the guest unless that may wait.
    fn tell_of_answers(&self, tasks: &mut Tasks, on_disk: usize, goes_on: bool) {
        self.queue.publish();
        let unnotified = self.queue.unnotified();
        if unnotified > 0 && !coalesce(unnotified, on_disk, goes_on) {
            self.tell(tasks);
        }
    }

    /// Signal the guest if it wants to be told of what was published.
    fn tell(&self, tasks: &mut Tasks) {
        if self.queue.must_notify() {
            self.call.call(&self.io);
            tasks.run_ready();
        }
    }

    fn may_fetch(&self) -> bool {
        self.may_use_ring() && self.queue.has_available()
    }

    fn may_use_ring(&self) -> bool {
        !self.broken.get() && !self.unplaced.get()
    }

    /// Wait until every request fetched has been answered, and those that a killed server had fetched; fetch
    /// no more.
    fn drain(&self, tasks: &mut Tasks) -> io::Result<()> {
        let _hurry = self.vbd.leave();
        loop {
            if let Err(problem) = self.fetch(tasks, 0) {
                self.give_up(&problem);
            }
            tasks.run_ready();
            self.queue.publish();
            self.tell(tasks);
            let all = !self.may_use_ring() || !self.queue.has_left();
            if all && self.queue.is_drained() {
                return Ok(());
            }
            tasks.turn(true)?;
        }
    }

    fn give_up(&self, problem: &RingError) {
        if self.broken.replace(true) {
            return;
        }
        let queue = self.index;
        if self.told.admits() {
            tracing::error!(queue, "the queue stops, the guest's ring is broken: {problem}");
        }
        if let Some(file) = self.error.clone() {
            let io = self.io.clone();
            self.io.spawn(async move {
                io.run(Op::SignalEvent { file: file.handle() }).await;
            });
        }
    }

    /// A pipe that nobody reads may hold a signal for ever.
    fn cancel_call(&self, tasks: &mut Tasks) -> io::Result<()> {
        let file = self.call.file.borrow().clone();
        if let Some(file) = file {
            let io = self.io.clone();
            // One more turn lets a signal through that has room to go.
            tasks.turn(false)?;
            tasks.run_ready();
            // One that is cancelled is not to be followed by another.
            self.call.wanted.set(false);
            tasks.block_on(async move {
                io.run(Op::Cancel { file: file.handle() }).await;
            })?;
        }
        Ok(())
    }

    fn end(&self, tasks: &mut Tasks) -> io::Result<u16> {
        self.drain(tasks)?;
        self.vbd.account_cpu_time();
        self.queue.stop();
        self.cancel_call(tasks)?;
        self.call.ending.set(true);
        self.call.wake.notify(&self.io);
        let (io, kick, mailbox) = (self.io.clone(), self.kick.clone(), self.mailbox.clone());
        let error = self.error.clone();
        tasks.block_on(async move {
            io.run(Op::Cancel { file: kick.handle() }).await;
            io.run(Op::Cancel { file: mailbox.bell.handle() }).await;
            if let Some(error) = error {
                io.run(Op::Cancel { file: error.handle() }).await;
            }
        })?;
        tasks.run()?;
        Ok(self.queue.next_available())
    }
}

impl Source for Thread {
    const GATHERS: bool = true;

    fn turn(&self, tasks: &mut Tasks) -> io::Result<Turn> {
        if self.heed(tasks)? {
            return Ok(Turn::Over);
        }
        if let Err(problem) = self.exchange(tasks) {
            self.give_up(&problem);
        }
        Ok(Turn::Done)
    }

    fn has_more(&self) -> bool {
        self.may_fetch()
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    fn may_sleep(&self, _: &mut Tasks) -> bool {
        !(self.may_use_ring() && self.queue.enable_kicks())
    }

    fn woke(&self) {
        self.queue.disable_kicks();
    }

    fn with_vbd(&self, look: impl FnOnce(&Vbd)) {
        look(&self.vbd);
    }
}
