//! Images that are being opened now: storage may never answer that, and then the end of the server does not wait for it.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long the end of a server waits for an image to be opened.
pub(crate) const OPENED_WITHIN: Duration = Duration::from_secs(30);

static NOW: Mutex<Vec<PathBuf>> = Mutex::new(vec![]);

fn now() -> MutexGuard<'static, Vec<PathBuf>> {
    NOW.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An image is being opened for as long as it is there.
pub(crate) struct BeingOpened(PathBuf);

impl BeingOpened {
    pub(crate) fn begin(path: &Path) -> BeingOpened {
        now().push(path.to_owned());
        BeingOpened(path.to_owned())
    }

    /// Those that are being opened.
    pub(crate) fn all() -> Vec<PathBuf> {
        now().clone()
    }
}

impl Drop for BeingOpened {
    fn drop(&mut self) {
        let mut now = now();
        let at = now.iter().position(|path| *path == self.0);
        at.map(|at| now.swap_remove(at));
    }
}
