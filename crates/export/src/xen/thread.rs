//! The thread of one ring: fetch, serve, publish, and sleep when there is nothing to do.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

use ringtap_io::{Io, Op, OpenFile, Panic, Reactor, Tasks};
use ringtap_vbd::Vbd;
use rustix::event::{EventfdFlags, eventfd};

use super::evtchn::Port;
use super::gntdev::Gntdev;
use super::persistent::PersistentGrants;
use super::queue::{Remembered, XenQueue};
use super::record::{Left, Record};
use super::ring::{BackRing, RingError};
use crate::driver::{self, Source, Turn};
use crate::poll::{Poller, batch, waking_takes};
use crate::queue::{keep_up, run_slot};
use crate::reclaim::become_io_flusher;

const STACK: usize = 256 << 10;

/// What a queue thread starts from.
pub(crate) struct Start {
    pub(crate) name: String,
    pub(crate) vbd: Vbd,
    pub(crate) ring: BackRing,
    pub(crate) port: Port,
    pub(crate) gntdev: Gntdev,
    /// Pages that may stay mapped; none where the frontend does not use the same again.
    pub(crate) kept: usize,
    /// Whether the frontend was offered discards.
    pub(crate) discards: bool,
    pub(crate) record: Option<Record>,
    pub(crate) left: Vec<Left>,
    /// A server before this one served the ring.
    pub(crate) take_over: bool,
}

/// A queue thread that runs.
pub(crate) struct QueueThread {
    bell: Arc<OpenFile>,
    handle: JoinHandle<()>,
}

/// Start a thread that works with a reactor of its own; an error where it cannot have one.
fn spawn<R>(
    name: String,
    reactor: impl FnOnce() -> io::Result<R> + Send + 'static,
    work: impl FnOnce(R) + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let (outcome, had) = channel();
    let builder = std::thread::Builder::new().name(name).stack_size(STACK);
    let handle = builder.spawn(move || {
        // Whoever starts it waits for the word.
        let _ = match reactor() {
            Ok(reactor) => outcome.send(Ok(())).map(|()| work(reactor)),
            Err(error) => outcome.send(Err(error)),
        };
    })?;
    match had.recv().unwrap_or_else(|_| Err(io::Error::other("the thread panicked"))) {
        Ok(()) => Ok(handle),
        Err(error) => {
            // Only then has it let go of what its work holds.
            let _ = handle.join();
            Err(error)
        }
    }
}

impl QueueThread {
    pub(crate) fn start(start: Start) -> io::Result<QueueThread> {
        let bell = Arc::new(OpenFile::new(eventfd(0, EventfdFlags::CLOEXEC)?));
        let theirs = bell.clone();
        let reactor = || {
            become_io_flusher();
            ringtap_io::reactor()
        };
        let (name, health) = (start.name.clone(), start.vbd.health().clone());
        let work = move |reactor| _ = health.contain(|| run(start, reactor, &theirs));
        let handle = spawn(name, reactor, work)?;
        Ok(QueueThread { bell, handle })
    }

    /// Ask it to take no more, to end what is in flight, and to end itself.
    pub(crate) fn stop(&self) {
        // It fails only where the count is full, and then the thread wakes anyway.
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }

    /// Wait for its end.
    pub(crate) fn join(self) {
        // One that panicked has said so to the disk.
        let _ = self.handle.join();
    }
}

/// What the tasks of one queue thread share.
struct Thread {
    name: String,
    io: Io,
    queue: Rc<XenQueue<Gntdev>>,
    vbd: Rc<Vbd>,
    port: Rc<Port>,
    /// The frontend's ring is beyond serving: nothing more is taken from it.
    broken: std::cell::Cell<bool>,
    stopping: Rc<std::cell::Cell<bool>>,
}

/// Take the frontend's calls until the file is cancelled.
async fn take_calls(io: Io, port: Rc<Port>) {
    while io.run(Op::PollIn { file: port.file.handle() }).await >= 0 {
        port.take();
    }
}

fn run(start: Start, reactor: Box<dyn Reactor>, bell: &Arc<OpenFile>) {
    let span = start.vbd.span().clone();
    let _disk = span.enter();
    // Declared before the tasks, so dropped after them: they use its memory.
    let thread;
    let mut tasks = Tasks::new(reactor);
    let io = tasks.io().clone();
    let Start { name, vbd, ring, port, gntdev, kept, discards, record, left, take_over } = start;
    let kept = (kept > 0).then(|| PersistentGrants::new(kept));
    let (vbd, past) = (Rc::new(vbd), Remembered { record, left });
    let queue = XenQueue::new(io.clone(), vbd.clone(), ring, gntdev, kept, discards, past);
    let queue = Rc::new(queue);
    thread = Thread {
        name,
        io: io.clone(),
        queue,
        vbd,
        port: Rc::new(port),
        broken: false.into(),
        stopping: Rc::default(),
    };
    keep_up(&io, &thread.vbd);
    for tag in 0..thread.queue.slots() {
        thread.spawn_slot(&mut tasks, tag);
    }
    tasks.spawn(take_calls(io.clone(), thread.port.clone()));
    let (stopping, bell) = (thread.stopping.clone(), bell.clone());
    let theirs = io.clone();
    tasks.spawn(async move {
        theirs.run(Op::ReadEvent { file: bell.handle() }).await;
        stopping.set(true);
    });
    if take_over {
        // The last server may have ended between an answer and its call.
        thread.call();
    }
    let health = thread.vbd.health().clone();
    let end =
        Panic::catch(|| driver::run(&thread, &mut tasks).and_then(|()| thread.end(&mut tasks)));
    let panic = match end {
        Ok(Ok(())) => return,
        // What is in flight can neither be ended nor left: no other ring may go on beside it.
        Ok(Err(error)) => Panic::of(format!("the io_uring of {} failed: {error}", thread.name)),
        Err(panic) => panic,
    };
    health.fail(panic);
    let refused = Panic::catch(|| thread.refuse(&mut tasks));
    if let Ok(Err(error)) = refused {
        tracing::error!("{}: requests in flight have no answer: {error}", thread.name);
    }
}

impl Thread {
    fn spawn_slot(&self, tasks: &mut Tasks, tag: u16) {
        tasks.spawn(run_slot(self.queue.clone(), self.vbd.clone(), self.io.clone(), tag));
    }

    /// Fetch, run what can run, publish.
    fn fetch(&self, tasks: &mut Tasks) -> Result<(), RingError> {
        let mut new = Vec::new();
        let most = batch(self.queue.in_flight());
        let fetched = if self.broken.get() { Ok(()) } else { self.queue.poll(&mut new, most) };
        for tag in new {
            self.spawn_slot(tasks, tag);
        }
        tasks.run_ready();
        self.publish(tasks);
        fetched
    }

    /// Show the answers; and those of a barrier that had waited for them.
    fn publish(&self, tasks: &mut Tasks) {
        loop {
            if self.queue.publish() {
                self.call();
            }
            tasks.run_ready();
            if !self.queue.has_answers() {
                return;
            }
        }
    }

    fn call(&self) {
        if let Err(error) = self.port.notify() {
            tracing::warn!("{} cannot call its guest: {error}", self.name);
        }
    }

    /// What slots were given fails: they answer when their operations have ended.
    fn refuse(&self, tasks: &mut Tasks) -> io::Result<()> {
        self.queue.stop();
        tasks.cancel_all()?;
        tasks.run_ready();
        self.publish(tasks);
        Ok(())
    }

    /// End what was fetched; fetch no more.
    fn end(&self, tasks: &mut Tasks) -> io::Result<()> {
        let _hurry = self.vbd.leave();
        while !self.queue.is_drained() {
            tasks.run_ready();
            self.publish(tasks);
            if !self.queue.is_drained() && !tasks.has_work() {
                tasks.turn(true)?;
            } else {
                tasks.turn(false)?;
            }
        }
        self.vbd.account_cpu_time();
        self.queue.stop();
        let (io, port) = (self.io.clone(), self.port.clone());
        tasks.block_on(async move {
            io.run(Op::Cancel { file: port.file.handle() }).await;
        })?;
        tasks.run()
    }
}

impl Source for Thread {
    const GATHERS: bool = true;

    fn poller() -> Poller {
        Poller::for_domains(waking_takes())
    }

    fn turn(&self, tasks: &mut Tasks) -> io::Result<Turn> {
        if let Err(problem) = self.fetch(tasks) {
            tracing::error!("{} stops, the guest's ring is broken: {problem}", self.name);
            self.broken.set(true);
        }
        Ok(if self.stopping.get() { Turn::Over } else { Turn::Done })
    }

    fn has_more(&self) -> bool {
        !self.broken.get() && self.queue.has_requests()
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    fn may_sleep(&self, _: &mut Tasks) -> bool {
        if !self.broken.get() && self.queue.enable_calls() {
            return false;
        }
        if let Err(error) = self.port.listen() {
            tracing::error!("{} cannot hear its guest: {error}", self.name);
        }
        true
    }

    fn with_vbd(&self, look: impl FnOnce(&Vbd)) {
        look(&self.vbd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_without_a_ring_does_not_start() {
        let none = || Err(io::Error::from_raw_os_error(libc::ENOMEM));
        let error = spawn("none".into(), none, |_: ringtap_io::Ring| panic!("it has no ring"))
            .expect_err("no ring");
        assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
        let (worked, did) = channel();
        let thread = spawn("one".into(), ringtap_io::Ring::new, move |_| {
            worked.send(()).expect("a listener")
        });
        thread.expect("a thread").join().expect("no panic");
        did.recv().expect("its word");
    }
}
