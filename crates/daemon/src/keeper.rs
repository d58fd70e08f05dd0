//! Who keeps the folder of disks as the disks are, and what there is to be written.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use crate::control::Held;

/// What has changed, and who is told of it.
pub(crate) struct Work {
    /// Before what is written: a file that names an image may not stand beside the next that does.
    pub(crate) removed: Vec<PathBuf>,
    pub(crate) written: Vec<(PathBuf, String)>,
    pub(crate) held: Vec<Held>,
}

/// Keeps the folder as the disks are.
pub(crate) struct Keeper {
    pub(crate) folder: PathBuf,
    /// What each file says, or is about to.
    pub(crate) texts: BTreeMap<PathBuf, String>,
    pub(crate) work: Option<Sender<Work>>,
    /// How much the thread has to do.
    pub(crate) undone: Arc<AtomicUsize>,
    /// Files that could not be written or removed: it is tried again with the next change.
    pub(crate) owed: BTreeSet<PathBuf>,
    pub(crate) thread: Option<JoinHandle<()>>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            // One that panicked has told of it.
            let _ = thread.join();
        }
    }
}
