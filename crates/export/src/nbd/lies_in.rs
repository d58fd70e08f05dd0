//! Words that exports are known by, so that a disk is never moved into something that lies in itself: whoever has the disk elsewhere
//! and shows it again passes the words on.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::AsFd;

use ringtap_vbd::Disk;

/// More than chains of servers have.
const MOST: usize = 32;

/// What a listening socket is known by: the kernel numbers them, and a server that takes over has the same.
pub(super) fn of_socket(listener: &impl AsFd) -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let number = rustix::fs::fstat(listener).map_or(0, |facts| facts.st_ino);
    format!("{} {number}", boot.trim())
}

/// Those of an export: its own, by each socket, and those of what its disk lies in.
pub(super) fn words(sockets: &[String], name: &str, disk: &Disk) -> Vec<String> {
    let own = sockets.iter().map(|socket| {
        let mut hasher = DefaultHasher::new();
        (socket, name).hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    });
    // What is written goes to the topmost image.
    own.chain(disk.inspect().layers.lies_in).take(MOST).collect()
}
