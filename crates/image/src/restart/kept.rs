//! A log with changes whose image is gone from where it lay: deleted, or moved to another file system. It is kept for the image, and takes
//! no more memory than it holds changes.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::FallocateFlags;

use super::{CAPACITY, COUNT, FIRST, RECORD, TOLD, TURN};

/// Whether the log with this beginning holds changes; then give back what it does not need of its memory, once, and tell. Nobody has it
/// open.
pub(crate) fn give_back(log: &fs::File, path: &Path, words: &[u64; FIRST]) -> bool {
    let counts = [0, 1].map(|half| if words[TURN[half]] > 0 { words[COUNT[half]] } else { 0 });
    let changes = counts[0].saturating_add(counts[1]);
    if changes == 0 || words[TOLD] != 0 {
        return changes > 0;
    }
    let capacity = words[CAPACITY];
    let place =
        |half: u64, number: u64| 8 * (FIRST as u64 + RECORD as u64 * (half * capacity + number));
    for (half, count) in (0..).zip(counts) {
        let (from, to) = (place(half, count), place(half, capacity));
        if count < capacity && capacity < 1 << 32 {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(log, punch, from, to - from);
        }
    }
    let _ = log.write_all_at(&1u64.to_ne_bytes(), 8 * TOLD as u64);
    tracing::info!(
        "{} keeps {changes} changes that a killed process left for an image that is gone from where it was: moved to another \
         file system, it takes them up when it is opened there; if it was deleted, remove that file",
        path.display()
    );
    true
}
