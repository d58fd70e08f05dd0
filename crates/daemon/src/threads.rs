//! Threads of the process, and what a panic in one of them ends.

use std::thread::{self, JoinHandle};

use ringtap_io::Panic;

use crate::Error;

/// Our threads wait and log; they need no more.
const STACK: usize = 256 << 10;
/// Those that carry out what takes long have the futures of a whole job there, which are large where nothing is optimised.
const WORKING_STACK: usize = 4 << 20;

/// Start a thread. A panic in it is reported, and ends what it does alone: disks are served on.
pub(crate) fn spawn(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    spawn_with(name, STACK, run)
}

/// The same for one that moves bytes.
pub(crate) fn spawn_working(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    spawn_with(name, WORKING_STACK, run)
}

fn spawn_with(
    name: &str,
    stack: usize,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    let role = name.to_owned();
    spawn_that(name, stack, move || {
        if Panic::catch(run).is_err() {
            tracing::error!(
                "the thread {role:?} has ended by a panic; what it did is not done until a restart"
            );
        }
    })
}

/// Start a thread without which the process is of no use.
pub(crate) fn spawn_vital(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    spawn_that(name, STACK, || {
        if Panic::catch(run).is_err() {
            std::process::abort();
        }
    })
}

fn spawn_that(
    name: &str,
    stack: usize,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    thread::Builder::new()
        .name(name.to_owned())
        .stack_size(stack)
        .spawn(run)
        .map_err(|source| Error::Process { tried: "start a thread", source })
}

/// Do something for a client of the control socket: a panic in it is reported, and ends that command alone. What it
/// held is dropped, and whoever waits for that is told so.
pub(crate) fn contained<T>(work: impl FnOnce() -> T) -> Option<T> {
    Panic::catch(work).ok()
}
