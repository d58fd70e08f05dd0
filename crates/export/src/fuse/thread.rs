//! The thread of one descriptor of the FUSE device: take messages, serve, and sleep between them.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;

use ringtap_io::{Io, Op, OpenFile, Panic, Tasks, Time};
use ringtap_vbd::Vbd;
use rustix::event::{EventfdFlags, eventfd};

use super::queue::{FuseQueue, Taken};
use super::request::Facts;
use super::{MOST, SLOTS};
use crate::poll::{Poller, Wait};
use crate::queue::{keep_up, run_slot};
use crate::reclaim::become_io_flusher;

const STACK: usize = 256 << 10;
const ACCOUNT_EVERY: Time = 100_000_000;

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
        index: usize,
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
            let end = health.contain(|| run(device, vbd, facts, theirs));
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

/// What its tasks tell the thread.
#[derive(Default)]
struct Seen {
    /// There may be a message.
    readable: Cell<bool>,
    /// Somebody waits for the next one.
    watching: Cell<bool>,
    stop: Cell<bool>,
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

fn run(device: OpenFile, vbd: Vbd, facts: Facts, bell: Arc<OpenFile>) -> io::Result<End> {
    become_io_flusher();
    let reactor = ringtap_io::reactor()?;
    let vbd = Rc::new(vbd);
    // Declared before the tasks, so dropped after them: they use its memory.
    let queue;
    let mut tasks = Tasks::new(reactor);
    let io = tasks.io().clone();
    queue = Rc::new(FuseQueue::new(io.clone(), device, vbd.clone(), facts, SLOTS, MOST)?);
    keep_up(&io, &vbd);
    let seen = Rc::new(Seen::default());
    seen.readable.set(true);
    tasks.spawn(wait_for_bell(io.clone(), bell.clone(), seen.clone()));
    match Panic::catch(|| serve(&mut tasks, &queue, &vbd, &seen, &bell)) {
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
fn serve(
    tasks: &mut Tasks,
    queue: &Rc<FuseQueue>,
    vbd: &Rc<Vbd>,
    seen: &Rc<Seen>,
    bell: &Arc<OpenFile>,
) -> io::Result<End> {
    let io = tasks.io().clone();
    let (mut poller, mut accounted, mut new) = (Poller::default(), 0, Vec::new());
    let end = loop {
        tasks.run_ready();
        if seen.stop.get() {
            break Ok(End::Stopped);
        }
        if seen.readable.get() {
            match queue.take(&mut new) {
                Ok(Taken::All) => seen.readable.set(false),
                Ok(Taken::Slots) => {}
                Ok(Taken::Gone) => break Ok(End::Unmounted),
                Err(error) => break Err(error),
            }
            for tag in new.drain(..) {
                tasks.spawn(run_slot(queue.clone(), vbd.clone(), io.clone(), tag));
            }
        }
        tasks.run_ready();
        if tasks.has_work() || seen.stop.get() || (seen.readable.get() && queue.has_room()) {
            tasks.turn(false)?;
            poller.event(io.now());
        } else if poller.spin(io.now(), Wait::of(queue.in_flight())) {
            vbd.waits(true, poller.window());
            tasks.turn(false)?;
            if tasks.has_work() {
                poller.event(io.now());
            }
            seen.readable.set(true);
            std::hint::spin_loop();
        } else {
            if !seen.readable.get() && !seen.watching.replace(true) {
                tasks.spawn(watch(io.clone(), queue.clone(), seen.clone()));
                tasks.run_ready();
            }
            if io.now().saturating_sub(accounted) > ACCOUNT_EVERY {
                accounted = io.now();
                vbd.account_cpu_time();
            }
            vbd.waits(false, poller.window());
            tasks.turn(true)?;
            poller.event(io.now());
        }
    };
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
