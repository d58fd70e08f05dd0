//! Whether a process sees what others write to a file that it has mapped.

use std::fs;
use std::os::fd::AsFd;

/// Whether a file is one of the kernel's own memory, which alone has seals. Of any other its file system is asked, which may be
/// one that whoever sent the file has made, and not answer.
pub(crate) fn is_memory(file: impl AsFd) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok()
}

/// Whether it has mapped that file there so that it sees no change of others, nor they one of its own. Where that cannot be
/// seen it is believed that it has not.
pub(crate) fn is_private(process: u32, file: impl AsFd, address: u64) -> bool {
    let maps = fs::read_to_string(format!("/proc/{process}/maps"));
    if !is_memory(&file) {
        return false;
    }
    let (Ok(maps), Ok(facts)) = (maps, rustix::fs::fstat(file)) else { return false };
    maps.lines().any(|line| says_private(line, facts.st_ino, address))
}

/// Whether a line such as `7f00-7f10 rw-p 00001000 00:01 1234 /memfd:x (deleted)` of /proc/PID/maps is a
/// private mapping of that inode around that address.
fn says_private(line: &str, inode: u64, address: u64) -> bool {
    let mut words = line.split_ascii_whitespace();
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let range = words.next().and_then(|range| range.split_once('-'));
    let range = range.and_then(|(from, to)| Some(number(from)?..number(to)?));
    let private = words.next().is_some_and(|rights| rights.ends_with('p'));
    let is_this = words.nth(2).and_then(|text| text.parse().ok()) == Some(inode);
    private && is_this && range.is_some_and(|range| range.contains(&address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_alone_is_looked_at() {
        use rustix::fs::{MemfdFlags, memfd_create};
        for flags in [MemfdFlags::CLOEXEC, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING] {
            assert!(is_memory(memfd_create("memory", flags).expect("memory")));
        }
        let (end, _other) = rustix::pipe::pipe().expect("a pipe");
        for file in [fs::File::open("/proc/self/maps").expect("it").into(), end] {
            let file: std::os::fd::OwnedFd = file;
            assert!(!is_memory(&file), "{file:?}");
        }
    }

    #[test]
    fn lines_of_maps_are_read() {
        let line = "7f00aa000000-7f00ab000000 rw-p 00000000 00:01 1234   /memfd:mem (deleted)";
        assert!(says_private(line, 1234, 0x7f00_aa00_1000));
        assert!(!says_private(line, 1235, 0x7f00_aa00_1000), "another file");
        assert!(!says_private(line, 1234, 0x7f00_ab00_0000), "behind it");
        assert!(!says_private(&line.replace("rw-p", "rw-s"), 1234, 0x7f00_aa00_1000));
        assert!(!says_private("", 0, 0));
    }
}
