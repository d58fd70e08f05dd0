//! The kernel's table of mounts, as /proc/self/mountinfo tells it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use ringtap_sandbox::unescaped;

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Its own number, as fdinfo has it.
    pub(crate) id: u64,
    /// The number of its device, as stat(2) has it.
    pub(crate) device: (u32, u32),
    pub(crate) place: PathBuf,
    pub(crate) kind: String,
    pub(crate) source: String,
}

/// All mounts; one that lies on another comes after it.
pub(crate) fn mounts() -> io::Result<Vec<Entry>> {
    let table = fs::read("/proc/self/mountinfo")?;
    Ok(table.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

/// The mounts on a path, the topmost last.
pub(crate) fn mounts_on(path: &Path) -> io::Result<Vec<Entry>> {
    Ok(mounts()?.into_iter().filter(|entry| entry.place == path).collect())
}

/// Source: proc(5), "/proc/[pid]/mountinfo".
fn parse(line: &[u8]) -> Option<Entry> {
    let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let place = OsString::from_vec(unescaped(words.get(4)?));
    // The optional fields end with a lone hyphen.
    let end = words.iter().position(|word| *word == b"-")?;
    let text = |word: &[u8]| String::from_utf8_lossy(&unescaped(word)).into_owned();
    let device = text(words.get(2)?);
    let (major, minor) = device.split_once(':')?;
    Some(Entry {
        id: text(words.first()?).parse().ok()?,
        device: (major.parse().ok()?, minor.parse().ok()?),
        place: place.into(),
        kind: text(words.get(end + 1)?),
        source: text(words.get(end + 2)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_taken_apart() {
        let line =
            br"36 35 98:0 / /mnt/a\040b\134 rw,noatime master:1 shared:2 - fuse.ringtap tap:/x rw";
        let entry = parse(line).expect("an entry");
        assert_eq!(entry.place, Path::new(r"/mnt/a b\"));
        assert_eq!((entry.id, entry.device), (36, (98, 0)));
        assert_eq!((entry.kind.as_str(), entry.source.as_str()), ("fuse.ringtap", "tap:/x"));
        for odd in ["", "1 2 3 4", "1 2 3 4 / rw", "1 2 3 4 / rw - ext4"] {
            assert!(parse(odd.as_bytes()).is_none(), "{odd}");
        }
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(!mounts_on(Path::new("/")).expect("the table").is_empty());
    }
}
