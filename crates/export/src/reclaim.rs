//! Keeping a server of this host's own block devices from waiting for itself.
//!
//! Short of memory, the kernel writes pages out to disks, and may have whoever asks for memory wait
//! for that. A server that waits so for the disk it serves waits for ever.

use std::ffi::c_void;
use std::io;
use std::ops::Range;

use rustix::mm::{Advice, MlockAllFlags, madvise, mlockall};
use rustix::process::geteuid;

/// prctl(2): memory is found for this thread without writing to disks. Linux 5.6.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Have memory found for the calling thread, and those it starts, without waiting for a disk.
pub(crate) fn become_io_flusher() {
    // SAFETY: this prctl takes plain numbers.
    let set = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if set != 0 {
        let error = io::Error::last_os_error();
        tracing::debug!("cannot become an I/O flusher (CAP_SYS_RESOURCE): {error}");
    }
}

/// Have another process killed where memory runs out: this one's disks are needed to make room.
pub(crate) fn keep_alive() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
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
    for code in code(&maps) {
        let (start, len) = (code.start as *mut c_void, code.len());
        // SAFETY: it reads pages that may be read, and changes none.
        if let Err(error) = unsafe { madvise(start, len, Advice::LinuxPopulateRead) } {
            tracing::debug!("cannot bring the code at {:#x} into memory: {error}", code.start);
        }
    }
}

/// The code and constants of programs and libraries, in text of `/proc/PID/maps`.
fn code(maps: &str) -> Vec<Range<usize>> {
    let area = |line: &str| {
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let is_code = matches!(words.next()?, "r-xp" | "r--p") && words.nth(2)? != "0";
        let address = |text| usize::from_str_radix(text, 16).ok();
        is_code.then_some(address(start)?..address(end)?)
    };
    maps.lines().filter_map(area).collect()
}
