//! What a file or a block device is, by something that does not outlive it: a record kept apart from the
//! image is found by that, and never taken for another's.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use ringtap_io::FileHandle;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Statx, StatxFlags};

use crate::boot;

/// The most devices one on top of the other: partitions, loop devices and the files they show.
const DEEPEST: u32 = 8;

/// The identity of the file or block device at `path`. None where the file system tells nothing but an
/// inode number, which the next file may have.
pub fn identity(path: &Path) -> Option<String> {
    identity_below(path, DEEPEST)
}

fn identity_below(path: &Path, deepest: u32) -> Option<String> {
    let file = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let facts = facts(&file)?;
    match FileType::from_raw_mode(facts.stx_mode.into()) {
        FileType::BlockDevice => {
            let (major, minor) = (facts.stx_rdev_major, facts.stx_rdev_minor);
            let folder = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
            device(&folder, deepest.checked_sub(1)?)
        }
        FileType::RegularFile => file_identity(&file, &facts),
        _ => None,
    }
}

fn facts(file: impl AsFd) -> Option<Statx> {
    let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::BTIME;
    rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted).ok()
}

/// The handle has the inode's number and generation; the time of birth stands for that where there is no
/// handle. Neither is anybody's to choose.
fn file_identity(file: impl AsFd, facts: &Statx) -> Option<String> {
    let born = facts.stx_mask & StatxFlags::BTIME.bits() != 0;
    let handle = FileHandle::of(&file).ok();
    if handle.is_none() && !born {
        return None;
    }
    let mut text = format!("file {}", facts.stx_ino);
    for word in handle.iter().flat_map(FileHandle::words) {
        text.push_str(&format!(" {word:x}"));
    }
    if born {
        let birth = facts.stx_btime;
        text.push_str(&format!(" born {}.{:09}", birth.tv_sec, birth.tv_nsec));
    }
    Some(text)
}

/// The handle in a file's identity, if there is one.
pub(super) fn handle_in(identity: &str) -> Option<FileHandle> {
    let mut words = identity.strip_prefix("file ")?.split(' ').skip(1);
    let mut handle = [0; FileHandle::WORDS];
    for word in &mut handle {
        *word = u64::from_str_radix(words.next()?, 16).ok()?;
    }
    Some(FileHandle::from_words(handle))
}

/// A device by the name that it has for good: the number of a device-mapper or loop device is the next
/// one's as soon as it is free. Where there is none, by what the kernel counts disks with.
fn device(folder: &Path, deepest: u32) -> Option<String> {
    let fact = |name: &str| {
        let text = fs::read_to_string(folder.join(name)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    if let Some(number) = fact("partition") {
        let disk = device(folder.parent()?, deepest.checked_sub(1)?)?;
        return Some(format!("partition {number} from {} of {disk}", fact("start")?));
    }
    if let Some(file) = fact("loop/backing_file") {
        let shown = identity_below(&PathBuf::from(file), deepest);
        if let Some(shown) = shown {
            let (offset, size) = (fact("loop/offset")?, fact("loop/sizelimit")?);
            return Some(format!("loop from {offset} for {size} of {shown}"));
        }
    } else {
        for name in ["dm/uuid", "md/uuid", "wwid", "device/wwid", "serial", "device/serial"] {
            if let Some(known) = fact(name) {
                return Some(format!("{name} {known}"));
            }
        }
    }
    // No folder that keeps a boot's identity by itself: the kernel's, or what the service manager tells.
    let boot = boot::identity(Path::new("/proc")).ok()?;
    Some(format!("disk {} of boot {boot:032x}", fact("diskseq")?))
}

/// That of what lies at `path`, where it is not a symbolic link.
#[cfg(test)]
fn identity_of_link(path: &Path) -> Option<String> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    file_identity(&file, &facts(&file)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_stays_with_a_file_and_ends_with_it() {
        let dir = tempfile::tempdir().expect("a folder");
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        fs::write(&one, "x").expect("written");
        let Some(first) = identity(&one) else {
            eprintln!("skipped: the file system tells nothing that stays with a file");
            return;
        };
        fs::rename(&one, &two).expect("moved");
        assert_eq!(identity(&two).as_ref(), Some(&first));
        fs::write(&two, "another content").expect("written");
        assert_eq!(identity(&two).as_ref(), Some(&first));
        std::os::unix::fs::symlink(&two, &one).expect("linked");
        assert_eq!(identity(&one).as_ref(), Some(&first));
        assert_ne!(identity_of_link(&one).as_ref(), Some(&first));
        fs::remove_file(&two).expect("removed");
        // What is made now may have its inode.
        for _ in 0..8 {
            fs::write(&two, "x").expect("written");
            assert_ne!(identity(&two).as_ref(), Some(&first));
            fs::remove_file(&two).expect("removed");
        }
    }

    #[test]
    fn devices_are_known_by_what_stays_with_them() {
        let dir = tempfile::tempdir().expect("a folder");
        let sys = |name: &str, facts: &[(&str, &str)]| {
            let folder = dir.path().join(name);
            for (name, text) in facts {
                let file = folder.join(name);
                fs::create_dir_all(file.parent().expect("a folder")).expect("made");
                fs::write(file, format!("{text}\n")).expect("written");
            }
            folder
        };
        let volume = sys("dm-0", &[("dm/uuid", "LVM-abc"), ("diskseq", "7")]);
        assert_eq!(device(&volume, 3).as_deref(), Some("dm/uuid LVM-abc"));
        let part = sys("dm-0/part1", &[("partition", "1"), ("start", "2048")]);
        let known = device(&part, 3);
        assert_eq!(known.as_deref(), Some("partition 1 from 2048 of dm/uuid LVM-abc"));
        fs::write(dir.path().join("disk.raw"), "").expect("written");
        let shown = dir.path().join("disk.raw");
        let file = shown.display().to_string();
        let of_file = sys(
            "loop0",
            &[("loop/backing_file", &file), ("loop/offset", "0"), ("loop/sizelimit", "0")],
        );
        let wanted = identity(&shown).map(|shown| format!("loop from 0 for 0 of {shown}"));
        assert_eq!(device(&of_file, 3), wanted);
        // One that has no name of its own is not the next of its number.
        let nameless = |seq| device(&sys("nbd0", &[("dm/uuid", ""), ("diskseq", seq)]), 3);
        assert!(nameless("7").is_some());
        assert_ne!(nameless("7"), nameless("8"));
        assert_eq!(device(&sys("old", &[("size", "1")]), 3), None);
    }
}
