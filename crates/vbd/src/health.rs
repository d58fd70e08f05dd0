//! Whether a disk can still be served: a panic that belongs to it stops it, and no other.
//!
//! What the panic left half changed in memory is not looked at again. Every request ends with
//! [`Error::Stopped`], those in flight, too; the image is neither flushed nor closed, and its restart log
//! stays for the next server. Its locks stay with the process: other threads may have operations in flight
//! on its files, and only the process's end ends them all for certain.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Poll;

use ringtap_image::Error;
use ringtap_io::Panic;

type Listener = Box<dyn FnOnce(&Panic) + Send>;

/// Whether a disk is stopped, and who is told when it is.
#[derive(Default)]
pub struct Health {
    failure: OnceLock<Panic>,
    listeners: Mutex<Listeners>,
}

#[derive(Default)]
struct Listeners {
    next: u64,
    all: Vec<(u64, Listener)>,
}

/// Who holds it is told when the disk is stopped.
#[must_use = "nobody is told once it is dropped"]
pub struct Listening {
    health: Arc<Health>,
    number: u64,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.health.lock().all.retain(|(number, _)| *number != self.number);
    }
}

impl Health {
    /// The panic that stopped the disk.
    #[inline]
    pub fn failure(&self) -> Option<&Panic> {
        self.failure.get()
    }

    /// Stop the disk. Only the first time counts.
    pub fn fail(&self, panic: Panic) {
        if self.failure.set(panic).is_err() {
            return;
        }
        let listeners = std::mem::take(&mut self.lock().all);
        let Some(panic) = self.failure() else { return };
        listeners.into_iter().for_each(|(_, listener)| listener(panic));
    }

    /// Call `listener` when the disk is stopped, on whichever thread that happens: at once if it is.
    pub fn when_failed(
        self: &Arc<Health>,
        listener: impl FnOnce(&Panic) + Send + 'static,
    ) -> Listening {
        let mut listeners = self.lock();
        let number = listeners.next;
        listeners.next += 1;
        match self.failure() {
            Some(panic) => {
                drop(listeners);
                listener(panic);
            }
            None => listeners.all.push((number, Box::new(listener))),
        }
        Listening { health: self.clone(), number }
    }

    fn lock(&self) -> MutexGuard<'_, Listeners> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Do something of the disk's; a panic in it stops the disk.
    pub fn contain<T>(&self, work: impl FnOnce() -> T) -> Result<T, Error> {
        if self.failure().is_some() {
            return Err(Error::Stopped);
        }
        Panic::catch(work).map_err(|panic| self.stopped_by(panic))
    }

    /// Go on with a part of a request.
    #[inline]
    pub(crate) fn contain_poll<T>(
        &self,
        poll: impl FnOnce() -> Poll<Result<T, Error>>,
    ) -> Poll<Result<T, Error>> {
        if self.failure().is_some() {
            return Poll::Ready(Err(Error::Stopped));
        }
        match Panic::catch(poll) {
            Ok(poll) => poll,
            Err(panic) => Poll::Ready(Err(self.stopped_by(panic))),
        }
    }

    /// As [`Health::contain`], for what waits.
    pub(crate) async fn contain_all<T>(
        &self,
        work: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let mut work = pin!(work);
        poll_fn(|context| self.contain_poll(|| work.as_mut().poll(context))).await
    }

    #[cold]
    fn stopped_by(&self, panic: Panic) -> Error {
        self.fail(panic);
        Error::Stopped
    }
}
