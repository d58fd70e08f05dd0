//! What `stat` shows of the file that is not fixed: when its bytes changed, and what room they take.
//!
//! Programs that copy files go by it. One that finds size and time as they were (rsync, tar) copies
//! nothing; one that finds fewer blocks than bytes (cp, tar) asks for the holes.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ringtap_vbd::Disk;
use rustix::fs::{FileType, fstat};

/// One for all threads that serve the file.
#[derive(Debug)]
pub(crate) struct Shown {
    image: Option<OwnedFd>,
    seen: Mutex<Seen>,
}

/// What the disk was like when somebody last looked.
#[derive(Debug)]
struct Seen {
    changes: u64,
    size: u64,
    modified: Duration,
}

impl Shown {
    /// Of the disk as it is now, which lies in `image`, where that is a file.
    pub(crate) fn new(vbd: &Disk, image: Option<OwnedFd>) -> Shown {
        let seen = Seen { changes: vbd.changes(), size: vbd.size(), modified: now() };
        Shown { image, seen: Mutex::new(seen) }
    }

    /// When it was last found changed, by whatever transport that came.
    pub(crate) fn modified(&self, vbd: &Disk) -> Duration {
        let seen = &mut *self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (changes, size) = (vbd.changes(), vbd.size());
        if (changes, size) != (seen.changes, seen.size) {
            *seen = Seen { changes, size, modified: now() };
        }
        seen.modified
    }

    /// Have it be of that time, or of now, as long as nothing else changes.
    pub(crate) fn set_modified(&self, vbd: &Disk, modified: Option<Duration>) {
        let seen = &mut *self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let modified = modified.unwrap_or_else(now);
        *seen = Seen { changes: vbd.changes(), size: vbd.size(), modified };
    }

    /// Blocks of 512 bytes that `size` bytes of it take: those of the image's file, where it is one,
    /// else all. Never none, for a file without any is taken for one great hole, and this one may
    /// have its bytes from a backing file.
    pub(crate) fn blocks(&self, size: u64) -> u64 {
        let all = size.div_ceil(512);
        let image = self.image.as_ref().and_then(|image| fstat(image).ok());
        match image.filter(|image| FileType::from_raw_mode(image.st_mode).is_file()) {
            Some(image) => (image.st_blocks as u64).clamp(1, all.max(1)),
            None => all,
        }
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
