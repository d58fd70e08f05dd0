//! The threads that work through a disk together, each with a reactor and some tasks of its own.

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use ringtap_io::{Io, Panic, Tasks};

/// How many work at once.
#[derive(Clone, Copy, Debug)]
pub struct Workers {
    /// Threads, each with a reactor of its own.
    pub threads: usize,
    /// Requests that each has in flight.
    pub tasks: usize,
}

impl Workers {
    /// A thread for each processor, up to four, and so many requests in flight in all.
    pub fn of(requests: usize) -> Workers {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        let threads = processors.min(4).min(requests.max(1));
        Workers { threads, tasks: requests.max(1).div_ceil(threads) }
    }

    /// A thread for each processor, with so many requests each, for work that keeps them busy.
    pub fn of_all(tasks: usize) -> Workers {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        Workers { threads: processors, tasks }
    }
}

/// How far the work is, for whoever shows it, and who wants it to end.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    read: AtomicU64,
    stop: Arc<AtomicBool>,
}

impl Progress {
    /// Bytes of the disk dealt with.
    pub fn done(&self) -> u64 {
        self.done.load(Relaxed)
    }

    /// Say how many bytes were dealt with by somebody else.
    pub fn set(&self, bytes: u64) {
        self.done.store(bytes, Relaxed);
    }

    /// Take no more pieces.
    pub fn stop(&self) {
        self.stop.store(true, Relaxed);
    }

    /// What [`Progress::stop`] sets; a signal's handler may.
    pub fn stop_flag(&self) -> Arc<AtomicBool> {
        self.stop.clone()
    }

    /// Bytes of that which had to be read.
    pub fn read(&self) -> u64 {
        self.read.load(Relaxed)
    }

    pub(crate) fn add_read(&self, bytes: u64) {
        self.read.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Relaxed);
    }

    /// Whether somebody has.
    pub fn stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }
}

/// Where the first failure is kept; the others stop when they see it.
pub(crate) struct Outcome<E> {
    failed: AtomicBool,
    error: Mutex<Option<E>>,
    panic: Mutex<Option<Panic>>,
}

impl<E> Default for Outcome<E> {
    fn default() -> Self {
        let failed = AtomicBool::new(false);
        Outcome { failed, error: Mutex::new(None), panic: Mutex::new(None) }
    }
}

impl<E> Outcome<E> {
    pub(crate) fn failed(&self) -> bool {
        self.failed.load(Relaxed)
    }

    pub(crate) fn fail(&self, error: E) {
        let mut kept = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        kept.get_or_insert(error);
        self.failed.store(true, Relaxed);
    }

    fn panicked(&self, panic: Panic) {
        let mut kept = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
        kept.get_or_insert(panic);
        self.failed.store(true, Relaxed);
    }

    fn take(&self) -> Option<E> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Run `tasks` tasks on each of `threads` threads until all have ended; the first failure of any.
/// `tools` makes what a thread's tasks share, on that thread; `task` is one of them. Where one panics the
/// others end, and the caller panics as it did.
pub(crate) fn run<W, E, F>(
    workers: Workers,
    outcome: &Arc<Outcome<E>>,
    tools: impl Fn() -> W + Sync,
    task: impl Fn(Io, Rc<W>) -> F + Sync,
) -> Result<(), E>
where
    W: 'static,
    E: From<io::Error> + Send + 'static,
    F: Future<Output = Result<(), E>> + 'static,
{
    let work = || {
        let mut loop_of_tasks = match ringtap_io::reactor() {
            Ok(reactor) => Tasks::new(reactor),
            Err(error) => return outcome.fail(error.into()),
        };
        let tools = Rc::new(tools());
        for _ in 0..workers.tasks.max(1) {
            let task = task(loop_of_tasks.io().clone(), tools.clone());
            let outcome = outcome.clone();
            loop_of_tasks.spawn(async move {
                if let Err(error) = task.await {
                    outcome.fail(error);
                }
            });
        }
        if let Err(error) = loop_of_tasks.run() {
            outcome.fail(error.into());
        }
    };
    let work = || Panic::catch(work).unwrap_or_else(|panic| outcome.panicked(panic));
    std::thread::scope(|scope| {
        for _ in 1..workers.threads {
            scope.spawn(work);
        }
        work();
    });
    if let Some(panic) = outcome.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
        panic.pass_on();
    }
    outcome.take().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_one_ends_all_and_is_the_callers() {
        let outcome = Arc::<Outcome<io::Error>>::default();
        let begun = AtomicU64::new(0);
        let theirs = outcome.clone();
        let panic = Panic::catch(|| {
            run(
                Workers { threads: 3, tasks: 2 },
                &outcome,
                || (),
                |io, _| {
                    let panics = begun.fetch_add(1, Relaxed) == 3;
                    let outcome = theirs.clone();
                    async move {
                        while !outcome.failed() {
                            io.sleep(1_000_000).await;
                            assert!(!panics, "as the test has it");
                        }
                        Ok(())
                    }
                },
            )
        });
        assert_eq!(panic.expect_err("a panic").message, "as the test has it");
    }
}
