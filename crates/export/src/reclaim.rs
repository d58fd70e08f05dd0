//! Keeping a server of this host's own block devices from waiting for itself.
//!
//! Short of memory, the kernel writes pages out to disks, and may have whoever asks for memory wait
//! for that. A server that waits so for the disk it serves waits for ever.

use std::ffi::c_void;

use rustix::mm::{Advice, MlockAllFlags, madvise, mlockall};
use rustix::process::{configure_io_flusher_behavior, geteuid};

use crate::areas::areas;

/// Have memory found for the calling thread, and those it starts, without waiting for a disk
/// (PR_SET_IO_FLUSHER; Linux 5.6).
pub fn become_io_flusher() {
    if let Err(error) = configure_io_flusher_behavior(true) {
        tracing::debug!("cannot become an I/O flusher (CAP_SYS_RESOURCE): {error}");
    }
}

/// Have another process killed where memory runs out: this one's disks are needed to make room.
pub fn keep_alive() {
    const FIRST: &str = "-1000";
    let path = "/proc/self/oom_score_adj";
    // Who is confined by now could not write it again.
    let done = std::fs::read_to_string(path).is_ok_and(|now| now.trim() == FIRST);
    if done {
        return;
    }
    if let Err(error) = std::fs::write(path, FIRST) {
        tracing::debug!("cannot tell the kernel to kill others first: {error}");
    }
}

/// Keep the whole process in memory: it must not be swapped out, nor its code be read anew, perhaps
/// from its own device. Which of the code and its constants is needed when memory is short, nobody
/// knows: all are brought in. Other memory stays from its first use on.
pub(crate) fn keep_in_memory() {
    if !geteuid().is_root() {
        // A limit of locked memory would make allocations fail later.
        return;
    }
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if let Err(error) = mlockall(flags) {
        tracing::warn!("cannot keep the server in memory (CAP_IPC_LOCK): {error}");
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    for code in areas(&maps).iter().filter(|area| area.constant).map(|area| &area.range) {
        let (start, len) = (code.start as *mut c_void, code.len());
        // SAFETY: it reads pages that may be read, and changes none.
        if let Err(error) = unsafe { madvise(start, len, Advice::LinuxPopulateRead) } {
            tracing::debug!("cannot bring the code at {:#x} into memory: {error}", code.start);
        }
    }
}
