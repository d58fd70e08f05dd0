//! What starting leaves in memory, given back.
//!
//! Starting runs code that serving does not: the command line, the formats, the sockets. The kernel
//! maps a piece of the program around each page that is touched, and leaves it mapped.

use std::ffi::c_void;
use std::fs;
use std::ops::Range;

use rustix::mm::{Advice, madvise};

/// Unmap what of the program and its libraries nobody has changed; what is still needed comes back
/// from the page cache as it is touched. To be called before there are threads that map files.
pub(crate) fn give_back_startup() {
    let Ok(areas) = fs::read_to_string("/proc/self/smaps") else { return };
    for area in unchanged_files(&areas) {
        let (start, len) = (area.start as *mut c_void, area.len());
        // SAFETY: it is a private mapping of a file in which no page differs from the file, and which
        // cannot be written to, so what is read there later is what was; and nobody takes programs and
        // libraries away to put another mapping in their place. Locked areas are refused, and stay.
        let _ = unsafe { madvise(start, len, Advice::LinuxDontNeed) };
    }
}

/// The private mappings of files, in text of `/proc/PID/smaps`, that cannot be written to and hold
/// no page of their own.
fn unchanged_files(areas: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut candidate = None;
    for line in areas.lines() {
        if let Some(area) = read_only_file(line) {
            candidate = area;
        } else if let Some(own) = line.strip_prefix("Anonymous:") {
            let area = candidate.take();
            found.extend(area.filter(|_| own.trim() == "0 kB"));
        }
    }
    found
}

/// None where the line does not begin an area; then whether it is one that counts.
fn read_only_file(line: &str) -> Option<Option<Range<usize>>> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let area = address(start)?..address(end)?;
    let rights = words.next()?;
    let is_file = words.nth(2)? != "0";
    Some((is_file && matches!(rights, "r--p" | "r-xp")).then_some(area))
}

#[cfg(test)]
mod tests {
    use super::*;

    const AREAS: &str = "\
55d0c0000000-55d0c0200000 r--p 00000000 fe:00 123 /usr/bin/ringtap
Rss:                 700 kB
Anonymous:             0 kB
VmFlags: rd mr mw me sd
55d0c0200000-55d0c0a00000 r-xp 00200000 fe:00 123 /usr/bin/ringtap
Anonymous:             0 kB
55d0c0a00000-55d0c0b00000 r--p 00a00000 fe:00 123 /usr/bin/ringtap
Anonymous:           200 kB
55d0c0b00000-55d0c0b02000 rw-p 00b00000 fe:00 123 /usr/bin/ringtap
Anonymous:             0 kB
7f0000000000-7f0000200000 r--p 00000000 00:00 0
Anonymous:             0 kB
7f0000200000-7f0000300000 r--s 00000000 fe:00 124 /var/lib/disk
Anonymous:             0 kB
7ffff7ffa000-7ffff7ffc000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
";

    #[test]
    fn only_unchanged_private_files_are_given_back() {
        let found = unchanged_files(AREAS);
        assert_eq!(found, [0x55d0_c000_0000..0x55d0_c020_0000, 0x55d0_c020_0000..0x55d0_c0a0_0000]);
    }

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
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
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
