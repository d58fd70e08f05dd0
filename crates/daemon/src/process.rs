//! What the whole process is told once: its limits, and where panics are reported.

use std::backtrace::{Backtrace, BacktraceStatus};

use ringtap_io::Panic;
use rustix::process::{Resource, getrlimit, setrlimit};

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
            eprintln!("ringtap: panic: {panic}: {said}{trace}");
        }
    });
}
