//! The files of restart logs: where they lie, and whose they are.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::MAGIC;

/// The folder for logs: of the system for root, else of the user.
pub(super) fn usual_folder() -> PathBuf {
    let uid = rustix::process::geteuid();
    let run = match std::env::var_os("XDG_RUNTIME_DIR") {
        _ if uid.is_root() => Some(PathBuf::from("/run")),
        Some(folder) => Some(PathBuf::from(folder)),
        None => None,
    };
    match run.filter(|run| on_tmpfs(run)) {
        Some(run) => run.join("ringtap"),
        None => PathBuf::from(format!("/dev/shm/ringtap-{}", uid.as_raw())),
    }
}

pub(super) fn name_of(image: &rustix::fs::Stat) -> String {
    format!("{:x}-{:x}.restart", image.st_dev, image.st_ino)
}

/// Whether this user began to note changes in the log, or that cannot be seen. In a folder of somebody
/// else's, who may have put anything there, this user never did.
pub(super) fn may_hold_changes(folder: &Path, log: &Path) -> bool {
    if fs::metadata(folder).is_ok_and(|it| it.uid() != rustix::process::geteuid().as_raw()) {
        return false;
    }
    let mut begin = [0; 8];
    let file = fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open(log);
    let begun = file.and_then(|mut file| file.read_exact(&mut begin));
    match begun {
        Ok(()) => u64::from_ne_bytes(begin) == MAGIC,
        Err(error) => error.kind() != io::ErrorKind::UnexpectedEof,
    }
}

/// Open a file that belongs to this user, in a folder that does.
pub(crate) fn open_ours(folder: &Path, path: &Path, create: bool) -> io::Result<fs::File> {
    let file = fs::File::options()
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)?;
    let uid = rustix::process::geteuid().as_raw();
    if fs::metadata(folder)?.uid() != uid || file.metadata()?.uid() != uid {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{} belongs to another user", path.display()),
        ));
    }
    Ok(file)
}

/// Open a log, made where there is none, and hold it against whoever drops those that nobody has.
pub(super) fn open_to_keep(folder: &Path, path: &Path) -> io::Result<fs::File> {
    loop {
        let file = open_ours(folder, path, true)?;
        let shared = rustix::fs::FlockOperation::LockShared;
        rustix::io::retry_on_intr(|| rustix::fs::flock(&file, shared))?;
        if file.metadata()?.nlink() > 0 {
            return Ok(file);
        }
    }
}

fn on_tmpfs(folder: &Path) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    rustix::fs::statfs(folder).is_ok_and(|facts| facts.f_type as u64 == TMPFS)
}
