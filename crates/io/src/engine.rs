//! Which reactor the process uses.

use std::io;
use std::sync::OnceLock;

use crate::{Reactor, Ring, Threads};

/// What a process may say in the place of what the host allows: `io_uring` or `threads`.
const VARIABLE: &str = "RINGTAP_IO";

/// A reactor for queue threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// [`Ring`].
    IoUring,
    /// [`Threads`].
    Threads,
}

/// Why the host has no io_uring for us: the errno of io_uring_setup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forbidden(pub i32);

static CHOSEN: OnceLock<(Engine, Option<Forbidden>)> = OnceLock::new();

/// Use this one. Before the first is made; false where it is another already.
pub fn use_engine(engine: Engine) -> bool {
    CHOSEN.get_or_init(|| (engine, None)).0 == engine
}

/// The one in use, and what forbade the other. Chosen when it is asked for first: as `RINGTAP_IO` says, else
/// io_uring where the kernel has it and lets us.
pub fn engine() -> (Engine, Option<Forbidden>) {
    *CHOSEN.get_or_init(choose)
}

fn choose() -> (Engine, Option<Forbidden>) {
    match std::env::var(VARIABLE).as_deref() {
        Ok("threads") => return (Engine::Threads, None),
        Ok("io_uring") => return (Engine::IoUring, None),
        _ => {}
    }
    let error = Ring::new().err().and_then(|error| error.raw_os_error());
    match error {
        // A sysctl or a filter of system calls; a kernel without it.
        Some(errno @ (libc::EPERM | libc::EACCES | libc::ENOSYS)) => {
            (Engine::Threads, Some(Forbidden(errno)))
        }
        // Another error is no reason: who needs a ring is told of it.
        _ => (Engine::IoUring, None),
    }
}

/// One for the calling thread.
pub fn reactor() -> io::Result<Box<dyn Reactor>> {
    match engine().0 {
        Engine::IoUring => match Ring::new() {
            // What is served goes on, and is flushed at the end.
            Err(error) if Ring::givers_are_gone(&error) => Ok(Box::new(Threads::new()?)),
            ring => Ok(Box::new(ring?)),
        },
        Engine::Threads => Ok(Box::new(Threads::new()?)),
    }
}
