//! A ring for one task, of who has none.

use std::io;
use std::path::Path;

use ringtap_io::{Io, Tasks};

use crate::OpenError;

/// Run a task to its end on a ring of its own, or the one that the thread keeps; `path` is for the message where there is no ring.
pub fn on_a_ring<T: 'static, F: Future<Output = T> + 'static>(
    path: &Path,
    task: impl FnOnce(Io) -> F,
) -> Result<T, OpenError> {
    let failed = |source: io::Error| OpenError::Os {
        what: "set io_uring up for",
        path: path.into(),
        source,
    };
    let mut tasks = Tasks::new(ringtap_io::passing_reactor().map_err(failed)?);
    let task = task(tasks.io().clone());
    tasks.block_on(task).map_err(failed)
}
