//! The thread of one descriptor of the FUSE device: take messages, serve, and sleep between them.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;

use ringtap_io::{Io, Op, OpenFile, Panic, Tasks};
use ringtap_vbd::Vbd;
use rustix::event::{EventfdFlags, eventfd};

use super::queue::{FuseQueue, Taken};
use super::request::Facts;
use super::{BACKGROUND, BESIDE, MOST};
use crate::driver::{self, Source, Turn};
use crate::queue::{keep_up, run_slot};
use crate::reclaim::become_io_flusher;

const STACK: usize = 256 << 10;

/// How a thread ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It was told to.
    Stopped,
    /// The file system was unmounted.
    Unmounted,
}

/// A thread that serves a descriptor.
pub(crate) struct QueueThread {
    bell: Arc<OpenFile>,
    handle: JoinHandle<io::Result<End>>,
}

impl QueueThread {
    /// Serve `device`; signal `ended` when that is over.
    pub(crate) fn start(
        (index, of): (usize, usize),
        device: OpenFile,
        vbd: Vbd,
        facts: Facts,
        ended: Arc<OpenFile>,
    ) -> io::Result<QueueThread> {
        let bell = Arc::new(OpenFile::new(eventfd(0, EventfdFlags::CLOEXEC)?));
        let theirs = bell.clone();
        let name = vbd.thread_name(&format!("fu{index}"));
        let run = move || {
            let span = vbd.span().clone();
            let _disk = span.enter();
            vbd.place_thread();
            let health = vbd.health().clone();
            let end = health.contain(|| run(device, vbd, facts, theirs, of));
            let end = end.unwrap_or_else(|stopped| Err(io::Error::other(stopped)));
            // It fails only where the count is full, and then it is seen anyway.
            let _ = rustix::io::write(&*ended, &1u64.to_ne_bytes());
            end
        };
        let handle = std::thread::Builder::new().name(name).stack_size(STACK).spawn(run)?;
        Ok(QueueThread { bell, handle })
    }

    /// Tell it to take no more.
    pub(crate) fn stop(&self) {
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }

    /// Wait for its end.
    pub(crate) fn join(self) -> io::Result<End> {
        self.handle.join().unwrap_or_else(|_| Err(io::Error::other("the queue thread panicked")))
    }
}

/// What its tasks and its turns tell the thread.
#[derive(Default)]
struct Seen {
    /// There may be a message.
    readable: Cell<bool>,
    /// Somebody waits for the next one.
    watching: Cell<bool>,
    stop: Cell<bool>,
    /// How it ends where nobody has told it to.
    end: Cell<Option<io::Result<End>>>,
}

async fn watch(io: Io, queue: Rc<FuseQueue>, seen: Rc<Seen>) {
    io.run(Op::PollIn { file: queue.device() }).await;
    seen.watching.set(false);
    seen.readable.set(true);
}

async fn wait_for_bell(io: Io, bell: Arc<OpenFile>, seen: Rc<Seen>) {
    io.run(Op::ReadEvent { file: bell.handle() }).await;
    seen.stop.set(true);
}

/// One of so many threads. Together they take all that the kernel sends in the background.
fn run(
    device: OpenFile,
    vbd: Vbd,
    facts: Facts,
    bell: Arc<OpenFile>,
    of: usize,
) -> io::Result<End> {
    become_io_flusher();
    let reactor = ringtap_io::reactor()?;
    let vbd = Rc::new(vbd);
    // Declared before the tasks, so dropped after them: they use its memory.
    let queue;
    let mut tasks = Tasks::new(reactor);
    let io = tasks.io().clone();
    let slots = BACKGROUND.div_ceil(of as u16) + BESIDE;
    queue = Rc::new(FuseQueue::new(io.clone(), device, vbd.clone(), facts, slots, MOST)?);
    keep_up(&io, &vbd);
    let seen = Rc::new(Seen::default());
    seen.readable.set(true);
    tasks.spawn(wait_for_bell(io.clone(), bell.clone(), seen.clone()));
    let messages = Messages { io, queue, vbd: vbd.clone(), seen };
    match Panic::catch(|| serve(&mut tasks, &messages, &bell)) {
        Ok(end) => end,
        // What slots were given fails: they answer when their operations have ended.
        Err(panic) => {
            vbd.health().fail(panic);
            tasks.cancel_all()?;
            let _ = Panic::catch(|| tasks.run_ready());
            Err(io::Error::other("its thread panicked"))
        }
    }
}

/// Until it is told to stop, or the file system is unmounted.
fn serve(tasks: &mut Tasks, messages: &Messages, bell: &Arc<OpenFile>) -> io::Result<End> {
    driver::run(messages, tasks)?;
    let Messages { io, queue, vbd, seen } = messages;
    let end = seen.end.take().unwrap_or(Ok(End::Stopped));
    let _hurry = vbd.hurry();
    while queue.in_flight() > 0 {
        tasks.run_ready();
        if queue.in_flight() > 0 {
            tasks.turn(true)?;
        }
    }
    vbd.account_cpu_time();
    queue.stop();
    let (cancel, device, bell) = (io.clone(), queue.device(), bell.clone());
    tasks.block_on(async move {
        cancel.run(Op::Cancel { file: device }).await;
        cancel.run(Op::Cancel { file: bell.handle() }).await;
    })?;
    tasks.run()?;
    end
}

/// The messages of one descriptor, read where there may be some.
struct Messages {
    io: Io,
    queue: Rc<FuseQueue>,
    vbd: Rc<Vbd>,
    seen: Rc<Seen>,
}

impl Messages {
    /// Read what there is; how the thread ends where there will be no more.
    fn take(&self, tasks: &mut Tasks) -> Option<io::Result<End>> {
        let mut new = Vec::new();
        let end = match self.queue.take(&mut new) {
            Ok(Taken::All) => {
                self.seen.readable.set(false);
                None
            }
            Ok(Taken::Slots) => None,
            Ok(Taken::Gone) => Some(Ok(End::Unmounted)),
            Err(error) => Some(Err(error)),
        };
        for tag in new {
            let (queue, vbd) = (self.queue.clone(), self.vbd.clone());
            tasks.spawn(run_slot(queue, vbd, self.io.clone(), tag));
        }
        end
    }
}

impl Source for Messages {
    fn turn(&self, tasks: &mut Tasks) -> io::Result<Turn> {
        tasks.run_ready();
        if self.seen.readable.get() && !self.seen.stop.get() {
            if let Some(end) = self.take(tasks) {
                self.seen.end.set(Some(end));
                return Ok(Turn::Over);
            }
            tasks.run_ready();
        }
        Ok(if self.seen.stop.get() { Turn::Over } else { Turn::Done })
    }

    fn has_more(&self) -> bool {
        self.seen.readable.get() && self.queue.has_room()
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    fn looks_again(&self) {
        self.seen.readable.set(true);
    }

    fn may_sleep(&self, tasks: &mut Tasks) -> bool {
        if !self.seen.readable.get() && !self.seen.watching.replace(true) {
            tasks.spawn(watch(self.io.clone(), self.queue.clone(), self.seen.clone()));
            tasks.run_ready();
        }
        true
    }

    fn with_vbd(&self, look: impl FnOnce(&Vbd)) {
        look(&self.vbd);
    }
}
