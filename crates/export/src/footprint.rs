//! What starting leaves in memory, given back.
//!
//! Starting runs code that serving does not: the command line, the formats, the sockets. The kernel
//! maps a piece of the program around each page that is touched, and leaves it mapped.

use std::ffi::c_void;
use std::fs;

use rustix::mm::{Advice, madvise};

use crate::areas::areas;

/// Unmap what of the program and its libraries nobody has changed; what is still needed comes back
/// from the page cache as it is touched. To be called before there are threads that map files.
pub fn give_back_startup() {
    let Ok(text) = fs::read_to_string("/proc/self/smaps") else { return };
    for area in areas(&text).iter().filter(|area| area.constant && area.changed == Some(0)) {
        let (start, len) = (area.range.start as *mut c_void, area.range.len());
        // SAFETY: it is a private mapping of a file in which no page differs from the file, and which
        // cannot be written to, so what is read there later is what was; and nobody takes programs and
        // libraries away to put another mapping in their place. Locked areas are refused, and stay.
        let _ = unsafe { madvise(start, len, Advice::LinuxDontNeed) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs this test again in a process of its own, for it needs one thread.
    #[test]
    fn what_is_given_back_comes_again_when_touched() {
        const CHILD: &str = "RINGTAP_TEST_FOOTPRINT";
        let name = "footprint::tests::what_is_given_back_comes_again_when_touched";
        if std::env::var_os(CHILD).is_none() {
            let output = std::process::Command::new(std::env::current_exe().expect("this test"))
                .args(["--exact", name, "--nocapture", "--test-threads", "1"])
                .env(CHILD, "1")
                .output()
                .expect("the test again");
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let resident = || {
            let text = fs::read_to_string("/proc/self/status").expect("the status");
            let line = text.lines().find_map(|line| line.strip_prefix("RssFile:"));
            let number = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
            number.expect("RssFile")
        };
        let before = resident();
        let own: Vec<u8> = (0..100).collect();
        give_back_startup();
        let after = resident();
        assert!(after < before, "{before} KiB, then {after}");
        assert_eq!(own.iter().map(|byte| u32::from(*byte)).sum::<u32>(), 4950);
        assert_eq!(format!("{:>8.3}", 1.5), "   1.500");
    }
}
