//! Whose the files are that Ringtap keeps for itself: this user's, or of a server that root starts and that becomes another
//! user, that one's already before.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ringtap_sandbox::User;
use rustix::fs::{Mode, OFlags};

static USER: OnceLock<u32> = OnceLock::new();

/// Who the server is, or is about to become.
pub(crate) fn own() -> u32 {
    USER.get().copied().unwrap_or_else(|| rustix::process::geteuid().as_raw())
}

/// For the whole process, once.
pub(crate) fn become_later(user: &User) {
    let _first = USER.set(user.id());
}

/// The folder of a user beside root's.
pub(crate) fn folder_of(roots: &Path, user: &User) -> PathBuf {
    let mut name = roots.file_name().unwrap_or_default().to_owned();
    name.push(format!("-{}", user.id()));
    roots.with_file_name(name)
}

/// Make a folder that is that user's alone, or see that there is one. It is theirs from its first moment.
pub(crate) fn make_for(folder: &Path, user: &User) -> io::Result<()> {
    let (id, name) = (user.id(), folder.display());
    let tried = |error: io::Error| {
        io::Error::new(error.kind(), format!("cannot make {name} for user {id}: {error}"))
    };
    match user.makes(|| DirBuilder::new().mode(0o700).create(folder)) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        end => return end.map_err(tried),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let held = rustix::fs::open(folder, flags, Mode::empty()).map_err(|it| tried(it.into()))?;
    let facts = rustix::fs::fstat(&held).map_err(|it| tried(it.into()))?;
    match facts.st_uid == id && facts.st_mode & 0o022 == 0 {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{name} is not a folder of user {id} alone"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, chown};

    #[test]
    fn a_users_folder_is_beside_roots_and_nobody_elses() {
        let user = "65534:65533".parse().expect("a user");
        let beside = folder_of(Path::new("/run/ringtap"), &user);
        assert_eq!(beside, Path::new("/run/ringtap-65534"));
        if !rustix::process::geteuid().is_root() {
            println!("skipped: only root makes folders for others");
            return;
        }
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path().join("ringtap-65534");
        for _first_and_again in 0..2 {
            make_for(&folder, &user).expect("made");
            let facts = folder.metadata().expect("it");
            assert_eq!((facts.mode() & 0o7777, facts.uid(), facts.gid()), (0o700, 65534, 65533));
        }
        chown(&folder, Some(1), None).expect("given away");
        let why = make_for(&folder, &user).expect_err("another's").to_string();
        assert!(why.contains("ringtap-65534 is not a folder of user 65534"), "{why}");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/", &link).expect("a link");
        assert!(make_for(&link, &user).is_err());
        assert!(make_for(&dir.path().join("none/at/all"), &user).is_err());
    }
}
