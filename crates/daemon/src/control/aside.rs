//! Work that may last: done beside the thread that serves, which goes on meanwhile.

use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::Write;
use crate::running::Running;
use crate::threads::{contained, spawn};

impl Running {
    /// Find an answer on another thread, and reply.
    pub(crate) fn aside<A: Write + 'static>(
        &self,
        role: &str,
        reply: Reply<A>,
        work: impl FnOnce() -> Result<A, Refusal> + Send + 'static,
    ) {
        // Where there is no thread to be had the reply says that it failed, as it drops.
        if let Err(error) = spawn(role, move || _ = contained(|| reply.give(work()))) {
            tracing::error!("a command of a control client: {error}");
        }
    }
}
