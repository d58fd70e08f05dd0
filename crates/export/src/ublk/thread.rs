//! The thread of one queue of a ublk device: the driver wants all of a queue from one thread.

use std::io;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use ringtap_io::{OpenFile, Panic, Ring, Tasks};
use ringtap_vbd::Vbd;

use super::leave::Leave;
use super::queue::UblkQueue;
use super::wire::DeviceInfo;
use crate::arena::Arena;
use crate::driver::{self, Source, Turn};
use crate::poll::{Poller, Wait, waking_takes};
use crate::queue::{keep_up, run_slot};
use crate::reclaim::become_io_flusher;

const STACK: usize = 256 << 10;
/// A queue whose panics go on is left to the kernel.
const MOST_PANICS: usize = 1000;

/// What a thread and who starts it say to each other.
pub(crate) struct Start {
    /// It has its memory and its ring, or cannot have them.
    pub(crate) prepared: mpsc::Sender<io::Result<()>>,
    /// The file to serve the device by. Where none comes the thread ends.
    pub(crate) device: mpsc::Receiver<Arc<OpenFile>>,
    /// Every slot has asked for its first request; with which errno the driver refused one.
    pub(crate) fetching: mpsc::Sender<Option<i32>>,
    /// The word to let go of the device.
    pub(crate) leave: Arc<Leave>,
}

/// Start to serve a queue. `ended` is signalled when it is over.
pub(crate) fn start(
    index: u16,
    info: DeviceInfo,
    vbd: Vbd,
    start: Start,
    ended: Arc<OpenFile>,
) -> io::Result<JoinHandle<io::Result<()>>> {
    let name = vbd.thread_name(&format!("ub{index}"));
    std::thread::Builder::new().name(name).stack_size(STACK).spawn(move || {
        let span = vbd.span().clone();
        let _disk = span.enter();
        vbd.place_thread();
        let health = vbd.health().clone();
        let end = health.contain(|| run(index, info, vbd, start));
        let end = end.unwrap_or_else(|stopped| Err(io::Error::other(stopped)));
        // It fails only where the count is full, and then it is seen anyway.
        let _ = rustix::io::write(&*ended, &1u64.to_ne_bytes());
        end
    })
}

/// All that serving a queue takes and that may be wanting.
fn prepare(info: &DeviceInfo) -> io::Result<(Box<Ring>, Arena)> {
    let reactor = Box::new(Ring::new()?);
    if info.is_zero_copy() {
        reactor.register_buffers(info.depth)?;
    }
    Ok((reactor, UblkQueue::arena(info)?))
}

fn run(index: u16, info: DeviceInfo, vbd: Vbd, start: Start) -> io::Result<()> {
    become_io_flusher();
    let Start { prepared, device, fetching, leave } = start;
    let (reactor, arena) = match prepare(&info) {
        Ok(all) => all,
        Err(error) => {
            // Nobody listens: then the device is being given up already.
            let _ = prepared.send(Err(error));
            return Ok(());
        }
    };
    let _ = prepared.send(Ok(()));
    drop(prepared);
    let Ok(device) = device.recv() else { return Ok(()) };
    let vbd = Rc::new(vbd);
    // Declared before the tasks, so dropped after them: they use its memory.
    let queue;
    let mut tasks = Tasks::new(reactor);
    let io = tasks.io().clone();
    queue = Rc::new(UblkQueue::new(io.clone(), vbd.clone(), device, index, &info, arena)?);
    keep_up(&io, &vbd);
    let leaves = queue.clone();
    io.spawn_beside(async move {
        leave.asked().await;
        leaves.leave_soon();
    });
    for tag in 0..info.depth {
        tasks.spawn(run_slot(queue.clone(), vbd.clone(), io.clone(), tag));
    }
    tasks.run_ready();
    tasks.turn(false)?;
    tasks.run_ready();
    let _ = fetching.send(queue.failed());
    drop(fetching);
    // The driver's commands end only with the device: after a panic of this thread's own the queue goes on, to
    // answer that nothing can be had any more. Each ends one slot's task, which is begun again.
    for _ in 0..MOST_PANICS {
        match Panic::catch(|| serve(&mut tasks, &Requests { queue: &queue, vbd: &vbd })) {
            Ok(end) => {
                end?;
                return queue.failed().map_or(Ok(()), |no| Err(io::Error::from_raw_os_error(no)));
            }
            Err(panic) => vbd.health().fail(panic),
        }
        for tag in queue.take_left() {
            tasks.spawn(run_slot(queue.clone(), vbd.clone(), io.clone(), tag));
        }
    }
    // The kernel ends what is in flight as this thread ends. Until then its memory must stay.
    std::mem::forget(tasks);
    Err(io::Error::other("its thread panicked again and again"))
}

/// Until the driver has no more for any slot.
fn serve(tasks: &mut Tasks, requests: &Requests) -> io::Result<()> {
    driver::run(requests, tasks)?;
    // What a job has left here.
    tasks.run()?;
    requests.vbd.account_cpu_time();
    Ok(())
}

/// The requests of a queue: each is brought by a command of the slot that serves it.
struct Requests<'a> {
    queue: &'a UblkQueue,
    vbd: &'a Vbd,
}

impl Source for Requests<'_> {
    const ASKS: bool = true;
    const GATHERS: bool = true;

    fn poller() -> Poller {
        Poller::for_programs(waking_takes())
    }

    fn turn(&self, tasks: &mut Tasks) -> io::Result<Turn> {
        tasks.run_ready();
        #[cfg(feature = "sabotage")]
        crate::sabotage::turn();
        if tasks.count() == 0 {
            return Ok(Turn::Over);
        }
        if self.queue.may_leave(tasks.count()) {
            self.queue.leave_now();
            tasks.run_ready();
            // SAFETY: all that is listed or in flight are the slots' commands. The driver ends them as the ring is closed, and
            // moves a request's bytes only where this thread asks for completions.
            if let Err(error) = unsafe { tasks.close() } {
                tracing::error!("a ublk queue cannot be let go of, and is served on: {error}");
            }
            return Ok(Turn::Again);
        }
        Ok(Turn::Done)
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    fn waits_for(&self) -> Wait {
        Wait::of_reads(self.queue.in_flight(), self.queue.reads())
    }

    fn may_sleep(&self, _: &mut Tasks) -> bool {
        true
    }

    fn with_vbd(&self, look: impl FnOnce(&Vbd)) {
        look(self.vbd);
    }
}
