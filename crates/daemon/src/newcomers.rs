//! Clients of the process itself that are about to come, and those of its control sockets that have come and said nothing yet.
//! While another process is about to take over they are left alone, for that to answer: this one would greet them and be gone.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

/// Whether they wait, and who has said nothing. Clones are the same process's.
#[derive(Clone)]
pub(crate) struct Newcomers(Arc<Shared>);

struct Shared {
    /// Readable while they need not wait.
    open: OwnedFd,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    wait: bool,
    /// Those that were greeted and have said nothing.
    silent: Vec<Arc<OwnedFd>>,
}

/// As long as it is there they wait.
#[must_use = "they go on once it is dropped"]
pub(crate) struct Waiting(Newcomers);

impl Newcomers {
    pub(crate) fn new() -> io::Result<Newcomers> {
        let open = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Newcomers(Arc::new(Shared { open, known: Mutex::default() })))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on nobody is taken, and nobody heard who has said nothing.
    pub(crate) fn have_wait(&self) -> Waiting {
        let mut known = self.known();
        known.wait = true;
        // It fails only where it is not readable anyway.
        let _ = rustix::io::read(&self.0.open, &mut [0; 8]);
        drop(known);
        Waiting(self.clone())
    }

    /// Whether they wait: then this is readable once they need not.
    pub(crate) fn wait(&self) -> bool {
        self.known().wait
    }

    /// Take a client, and greet it; `greeted` has one that has heard all of that. None where they wait.
    pub(crate) fn take<T>(
        &self,
        take: impl FnOnce(&mut dyn FnMut(&Arc<OwnedFd>)) -> T,
    ) -> Option<T> {
        let mut known = self.known();
        let Known { wait, silent } = &mut *known;
        (!*wait).then(|| take(&mut |socket| silent.push(socket.clone())))
    }

    /// Hear what one says; it has said nothing before. None where they wait.
    pub(crate) fn hear<T>(
        &self,
        socket: &Arc<OwnedFd>,
        hear: impl FnOnce() -> T,
        is_silent: impl FnOnce(&T) -> bool,
    ) -> Option<T> {
        let mut known = self.known();
        if known.wait {
            return None;
        }
        let heard = hear();
        if !is_silent(&heard) {
            known.silent.retain(|one| !Arc::ptr_eq(one, socket));
        }
        Some(heard)
    }

    /// One has gone.
    pub(crate) fn forget(&self, socket: &Arc<OwnedFd>) {
        self.known().silent.retain(|one| !Arc::ptr_eq(one, socket));
    }

    /// Those that were greeted and have said nothing.
    pub(crate) fn silent(&self) -> Vec<Arc<OwnedFd>> {
        self.known().silent.clone()
    }
}

impl AsFd for Newcomers {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.open.as_fd()
    }
}

impl Waiting {
    /// Another process has them.
    pub(crate) fn for_ever(self) {
        std::mem::forget(self);
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut known = self.0.known();
        known.wait = false;
        // It fails only where the count is full, and then it is readable.
        let _ = rustix::io::write(&self.0.0.open, &1u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_open(newcomers: &Newcomers) -> bool {
        let mut fds = [PollFd::new(newcomers, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).expect("it is looked at") == 1
    }

    #[test]
    fn who_has_said_nothing_waits_while_another_process_takes_over() {
        let newcomers = Newcomers::new().expect("an eventfd");
        let come = || Arc::new(eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor"));
        let (silent, loud) = (come(), come());
        for one in [&silent, &loud] {
            assert_eq!(newcomers.take(|greeted| greeted(one)), Some(()));
        }
        assert_eq!(newcomers.hear(&loud, || 3, |len| *len == 0), Some(3));
        assert_eq!(newcomers.hear(&silent, || 0, |len| *len == 0), Some(0));
        assert!(is_open(&newcomers) && !newcomers.wait());
        let waiting = newcomers.have_wait();
        assert!(!is_open(&newcomers) && newcomers.wait());
        assert_eq!(newcomers.take(|_| ()), None);
        assert_eq!(newcomers.hear(&silent, || 3, |len| *len == 0), None);
        let left = newcomers.silent();
        assert!(left.len() == 1 && Arc::ptr_eq(&left[0], &silent));
        drop(waiting);
        assert!(is_open(&newcomers) && !newcomers.wait());
        assert_eq!(newcomers.hear(&silent, || 3, |len| *len == 0), Some(3));
        assert!(newcomers.silent().is_empty());
        newcomers.have_wait().for_ever();
        assert!(!is_open(&newcomers) && newcomers.wait());
    }
}
