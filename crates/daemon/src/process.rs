//! What the whole process is told once: its limits, and where panics are reported.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{Write, stderr};

use ringtap_io::{Engine, Forbidden, Panic};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::Error;

/// Allow as many descriptors as the process may have: each connection and each queue takes some.
pub(crate) fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::warn!("cannot raise the limit of open files: {error}");
        }
    }
}

/// Settle what carries out operations, so that a host that has neither is told at the start, and not to the
/// first guest; and say so where it is not io_uring.
pub(crate) fn choose_engine() -> Result<(), Error> {
    drop(ringtap_io::reactor().map_err(Error::Ring)?);
    match ringtap_io::engine() {
        (Engine::IoUring, _) => {}
        (Engine::Threads, Some(Forbidden(errno))) => {
            let error = std::io::Error::from_raw_os_error(errno);
            tracing::warn!(
                "io_uring cannot be had ({error}): threads that block take its place, and a request costs more; \
                 look at sysctl kernel.io_uring_disabled, and in a container at its seccomp profile"
            );
        }
        (Engine::Threads, None) => tracing::info!("threads take the place of io_uring, as told"),
    }
    Ok(())
}

/// Have each panic of the process logged as it happens, with the disk whose thread it is.
pub fn report_panics() {
    Panic::report_to(|panic| {
        let trace = Backtrace::capture();
        let trace = match trace.status() {
            BacktraceStatus::Captured => format!("\n{trace}"),
            _ => String::new(),
        };
        let said = "an error of Ringtap itself, please report this line";
        if tracing::dispatcher::has_been_set() {
            tracing::error!("panic: {panic}: {said}{trace}");
        } else {
            // Who has closed stderr is not to make a second panic of it.
            let _ = writeln!(stderr(), "ringtap: panic: {panic}: {said}{trace}");
        }
    });
}
