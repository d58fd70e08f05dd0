//! Files that are opened where no link may lead elsewhere, also by who may not call openat2: a filter of system calls cannot
//! see what it asks for, so that a unit with `RestrictSUIDSGID=` has none. Then the path is walked part by part.

use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat, open, openat, openat2, statat,
};
use rustix::io::Errno;

/// A folder on the way.
const FOLDER: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Open what is at that absolute path, on which there is no link.
pub fn open_without_links(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    match openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
        Err(Errno::NOSYS | Errno::PERM) => from_root(path, flags),
        found => found,
    }
}

/// Open what lies in a folder or below, and nowhere else. A link that stays in there is followed where openat2 can be had, and
/// refused where it cannot.
pub fn open_beneath(folder: OwnedFd, inside: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    match openat2(&folder, inside, flags, Mode::empty(), resolve) {
        Err(Errno::NOSYS | Errno::PERM) => walk(folder, inside, flags),
        found => found,
    }
}

fn from_root(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let inside = path.strip_prefix("/").map_err(|_| Errno::INVAL)?;
    walk(open("/", FOLDER, Mode::empty())?, inside, flags)
}

fn walk(from: OwnedFd, inside: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let mut at = from;
    let mut parts = inside.components().peekable();
    while let Some(part) = parts.next() {
        let Component::Normal(name) = part else { return Err(Errno::INVAL) };
        let wanted = if parts.peek().is_some() { FOLDER } else { flags | OFlags::NOFOLLOW };
        at = match openat(&at, name, wanted, Mode::empty()) {
            Err(Errno::NOTDIR) if is_link(statat(&at, name, AtFlags::SYMLINK_NOFOLLOW)) => {
                return Err(Errno::LOOP);
            }
            found => found?,
        };
    }
    // A link itself can be held, too.
    match is_link(rustix::fs::fstat(&at)) {
        true => Err(Errno::LOOP),
        false => Ok(at),
    }
}

fn is_link(facts: Result<Stat, Errno>) -> bool {
    facts.is_ok_and(|facts| FileType::from_raw_mode(facts.st_mode).is_symlink())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;

    #[test]
    fn who_walks_comes_where_no_link_leads() {
        let dir = tempfile::tempdir().expect("a folder");
        let root = dir.path().canonicalize().expect("it");
        fs::create_dir_all(root.join("a/b")).expect("folders");
        fs::write(root.join("a/b/file"), "").expect("a file");
        symlink("b", root.join("a/link")).expect("a link");
        symlink("file", root.join("a/b/link")).expect("a link");
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        for name in ["a/b/file", "a/b"] {
            let path = root.join(name);
            for found in [from_root(&path, flags), open_without_links(&path, flags)] {
                let found = found.expect("it is there");
                let by = format!("/proc/self/fd/{}", found.as_raw_fd());
                assert_eq!(fs::read_link(by).expect("its name"), path);
            }
        }
        assert!(from_root(Path::new("/"), FOLDER).is_ok());
        let below = |inside: &str| {
            walk(open(&root, FOLDER, Mode::empty()).expect("it"), Path::new(inside), flags)
        };
        assert!(below("a/b/file").is_ok());
        for (inside, errno) in [
            ("a/link/file", Errno::LOOP),
            ("a/b/link", Errno::LOOP),
            ("a/../a/b/file", Errno::INVAL),
            ("/a", Errno::INVAL),
            ("a/none", Errno::NOENT),
            ("a/b/file/x", Errno::NOTDIR),
        ] {
            assert_eq!(below(inside).err(), Some(errno), "{inside}");
        }
        assert_eq!(from_root(Path::new("a"), flags).err(), Some(Errno::INVAL));
    }
}
