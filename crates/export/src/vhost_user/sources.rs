//! Files that a front-end shares, kept to be passed on to another server.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Weak};

use vhost::vhost_user::message::{VhostUserInflight, VhostUserLog};

/// Files of one front-end that are kept to be passed on: guests have their memory in a few.
const MOST_FILES: usize = 32;

/// Files that a front-end shares, as far as they are kept.
#[derive(Default)]
pub(super) struct Sources {
    memory: Vec<(u64, u64, Weak<File>)>,
    pub(super) inflight: Option<(VhostUserInflight, File)>,
    pub(super) log: Option<(VhostUserLog, File)>,
}

impl Sources {
    /// Keep a file of guest memory for as long as anybody has what this gives; one that is kept already is kept once.
    pub(super) fn keep(&mut self, file: &File) -> Option<Arc<File>> {
        let found = file.metadata().ok()?;
        self.memory.retain(|(.., kept)| kept.strong_count() > 0);
        let same = |(device, inode, _): &&(u64, u64, Weak<File>)| {
            (*device, *inode) == (found.dev(), found.ino())
        };
        if let Some(kept) = self.memory.iter().find(same).and_then(|(.., kept)| kept.upgrade()) {
            return Some(kept);
        }
        if self.memory.len() >= MOST_FILES {
            return None;
        }
        let kept = Arc::new(file.try_clone().ok()?);
        self.memory.push((found.dev(), found.ino(), Arc::downgrade(&kept)));
        Some(kept)
    }
}
