//! Who holds a lock of a file, as /proc tells those who may look at other processes.

use std::fs;
use std::io;
use std::path::Path;

/// A process that holds a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process id.
    pub id: u32,
    /// The name of its program.
    pub name: String,
}

/// Which byte of which file.
#[derive(Clone, Copy, Debug)]
pub struct Locked {
    /// The device of the file.
    pub device: (u32, u32),
    /// The number of the file.
    pub inode: u64,
    /// The byte.
    pub byte: i64,
    /// A process and a descriptor of it that is not meant.
    pub but: (u32, i32),
}

/// Who has it locked, or may have: of a Ringtap of the same user that has secrets nobody is told what it locks.
pub(crate) fn find(locked: &Locked) -> Option<Holder> {
    let mut hidden = None;
    let (major, minor) = locked.device;
    let inode = format!("{major:02x}:{minor:02x}:{}", locked.inode);
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let Some(id) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let descriptors = match fs::read_dir(process.path().join("fdinfo")) {
            Ok(descriptors) => descriptors,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                hidden = hidden.or_else(|| hidden_ringtap(&process.path(), id));
                continue;
            }
            Err(_) => continue,
        };
        for descriptor in descriptors.flatten() {
            let number = descriptor.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
            let Ok(text) = fs::read_to_string(descriptor.path()) else { continue };
            let meant = number.is_none_or(|number| (id, number) != locked.but);
            if meant && text.lines().any(|line| covers(line, &inode, locked.byte)) {
                let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
                return Some(Holder { id, name: name.trim().to_owned() });
            }
        }
    }
    hidden
}

/// A Ringtap of this user that does not show what it has open.
fn hidden_ringtap(process: &Path, id: u32) -> Option<Holder> {
    let status = fs::read_to_string(process.join("status")).ok()?;
    let of = |what: &str| status.lines().find_map(|line| line.strip_prefix(what)).map(str::trim);
    let user = of("Uid:")?.split_whitespace().nth(1)?.parse().ok();
    let name = of("Name:").filter(|name| name.starts_with("ringtap"))?;
    let own = user == Some(rustix::process::geteuid().as_raw());
    own.then(|| Holder { id, name: format!("{name}, it seems: it has secrets in its memory") })
}

fn covers(line: &str, inode: &str, byte: i64) -> bool {
    if !line.starts_with("lock:") {
        return false;
    }
    let mut words = line.split_whitespace().skip_while(|word| *word != inode).skip(1);
    let first = words.next().and_then(|word| word.parse::<i64>().ok());
    let last = words.next().map(|word| word.parse::<i64>().unwrap_or(i64::MAX));
    matches!((first, last), (Some(first), Some(last)) if (first..=last).contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_lines_of_proc_are_read() {
        let line = "lock:\t1: OFDLCK  ADVISORY  READ -1 fe:00:1234 100 101";
        assert!(covers(line, "fe:00:1234", 101));
        assert!(!covers(line, "fe:00:1234", 102));
        assert!(!covers(line, "fe:00:123", 101));
        assert!(covers("lock:\t1: POSIX ADVISORY WRITE 7 fe:00:1234 0 EOF", "fe:00:1234", 203));
    }
}
