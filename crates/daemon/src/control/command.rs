//! What a command is.

use super::outgoing::Reply;
use super::shape::{Take, Write};
use crate::running::Running;

/// What a client sends with a command.
pub(crate) trait Command: Take + Send + 'static {
    /// The command's name.
    const NAME: &'static str;
    /// What is answered.
    type Answer: Write + 'static;

    /// Carry it out, on the thread that serves: what takes long, or may wait for a guest, a client or a disk, goes to
    /// another (`Running::aside`).
    fn run(self, running: &mut Running, reply: Reply<Self::Answer>);
}
