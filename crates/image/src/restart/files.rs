//! The files of restart logs: where they lie, and whose they are.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use ringtap_sandbox::User;
use rustix::fs::{FlockOperation, flock};

use super::{MAGIC, RestartLog};
use crate::user::{folder_of, make_for, own};

/// The operator's folder for logs.
static FOLDER: OnceLock<PathBuf> = OnceLock::new();
/// That of the user whom the server becomes.
static OF_USER: OnceLock<PathBuf> = OnceLock::new();
/// Where ordinary users without a folder of their own on tmpfs have one.
const SHARED: &str = "/dev/shm";

impl RestartLog {
    /// The folder for logs: of the system for root, else of the user.
    pub fn usual_folder() -> PathBuf {
        usual_folder()
    }

    /// The same, made where it was not there yet.
    pub fn made_folder() -> io::Result<PathBuf> {
        let folder = usual_folder();
        make_folder(&folder).map(|()| folder)
    }
}

/// Keep restart logs in this folder, which is made where it is missing: for the whole process, once, before
/// the first image is opened.
///
/// # Errors
/// Where it cannot be made, or belongs to another user.
pub fn set_folder(folder: &Path) -> io::Result<()> {
    make_folder(folder)?;
    let folder = fs::canonicalize(folder)?;
    let _first = FOLDER.set(folder);
    Ok(())
}

/// Whether [`set_folder`] was called.
pub fn has_folder() -> bool {
    FOLDER.get().is_some()
}

/// Whether the operator's folder is on a disk, which outlives the machine's boot as no log does.
pub fn folder_is_on_disk() -> bool {
    OF_USER.get().or(FOLDER.get()).is_some_and(|folder| !on_memory(folder))
}

/// Keep logs for that user, in a folder that this process, which is root, makes for it.
pub(crate) fn keep_as(user: &User) -> io::Result<()> {
    let make = |folder: &Path| make_for(folder, user);
    let folder = match (FOLDER.get(), Path::new("/run")) {
        (Some(told), _) => folder_of(told, user),
        (None, run) if on_tmpfs(run) => folder_of(&run.join("ringtap"), user),
        (None, _) => folder_in(Path::new(SHARED), &format!("ringtap-{}", user.id()), make),
    };
    // Whether there is one or not: what is root's is not the user's.
    let _first = OF_USER.set(folder.clone());
    make(&folder)
}

/// Make a folder that only this user may look into, or see that there is one.
pub(crate) fn make_folder(folder: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let facts = fs::symlink_metadata(folder)?;
    let (name, mode) = (folder.display(), facts.mode() & 0o7777);
    let why = match is_ours(&facts) && facts.is_dir() {
        true if mode & 0o022 == 0 => return Ok(()),
        true => format!(
            "others may write to {name}, whose mode is {mode:04o}: name a folder that is this user's alone, or take that \
             right from them (chmod go-w)"
        ),
        false => format!("{name} is not a folder of this user"),
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

fn is_ours(facts: &fs::Metadata) -> bool {
    facts.uid() == own()
}

/// The folder for logs: the operator's, else of the system for root, else of the user.
pub(super) fn usual_folder() -> PathBuf {
    if let Some(folder) = OF_USER.get().or(FOLDER.get()) {
        return folder.clone();
    }
    let uid = rustix::process::geteuid();
    let run = match std::env::var_os("XDG_RUNTIME_DIR") {
        _ if uid.is_root() => Some(PathBuf::from("/run")),
        Some(folder) => Some(PathBuf::from(folder)),
        None => None,
    };
    // That of another user, whose session this was begun in, is of no use.
    let is_own =
        |run: &PathBuf| uid.is_root() || fs::metadata(run).is_ok_and(|facts| is_ours(&facts));
    match run.filter(|run| on_tmpfs(run) && is_own(run)) {
        Some(run) => run.join("ringtap"),
        None => folder_in(Path::new(SHARED), &format!("ringtap-{}", uid.as_raw()), make_folder),
    }
}

/// This user's folder in one that everybody may write to: of that name, or, where somebody else has taken
/// it, of one that begins so. Nobody can take away or rename what is there already (the sticky bit).
fn folder_in(shared: &Path, name: &str, make: impl FnOnce(&Path) -> io::Result<()>) -> PathBuf {
    let usual = shared.join(name);
    let ours = |path: &Path| {
        fs::symlink_metadata(path).is_ok_and(|facts| facts.is_dir() && is_ours(&facts))
    };
    if ours(&usual) || usual.symlink_metadata().is_err() {
        return usual;
    }
    let begins = format!("{name}.");
    let entries = fs::read_dir(shared).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with(&begins)) && ours(path)
        })
        .collect();
    names.sort();
    names.into_iter().next().unwrap_or_else(|| {
        let drawn = getrandom::u64().unwrap_or_default();
        let new = shared.join(format!("{begins}{drawn:016x}"));
        match make(&new) {
            Ok(()) => new,
            Err(_) => usual,
        }
    })
}

/// What tells an image's file, or the device that holds it, from others on this machine.
pub(super) fn place_of(image: &rustix::fs::Stat) -> (u64, u64) {
    match rustix::fs::FileType::from_raw_mode(image.st_mode).is_block_device() {
        true => (u64::MAX, image.st_rdev),
        false => (image.st_dev, image.st_ino),
    }
}

pub(super) fn name_of(image: &rustix::fs::Stat) -> String {
    name_at(place_of(image))
}

/// How the log is called of the image's file that lies there.
pub(super) fn name_at((device, inode): (u64, u64)) -> String {
    format!("{device:x}-{inode:x}.restart")
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

/// How long a killed server may have its log.
const DYING: Duration = Duration::from_secs(5);

/// Have the log to oneself; the files of a server that was killed are closed some time after its end. Fails where `gives_up` says
/// that there is nothing to wait for, or somebody has it for long.
pub(super) fn hold(log: &fs::File, gives_up: impl Fn() -> bool) -> bool {
    let end = Instant::now() + DYING;
    while flock(log, FlockOperation::NonBlockingLockExclusive).is_err() {
        if gives_up() || Instant::now() >= end {
            return false;
        }
        thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Open a log, made where there is none, and hold it against whoever drops those that nobody has.
pub(super) fn open_to_keep(folder: &Path, path: &Path) -> io::Result<fs::File> {
    loop {
        let file = open_ours(folder, path, true)?;
        rustix::io::retry_on_intr(|| flock(&file, FlockOperation::LockShared))?;
        // Not where it was removed meanwhile; it may have another name yet.
        let own = file.metadata()?.ino();
        if fs::symlink_metadata(path).is_ok_and(|facts| facts.ino() == own) {
            return Ok(file);
        }
    }
}

fn on_tmpfs(folder: &Path) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    rustix::fs::statfs(folder).is_ok_and(|facts| facts.f_type as u64 == TMPFS)
}

fn on_memory(folder: &Path) -> bool {
    const RAMFS: u64 = 0x8584_58f6;
    let kind = rustix::fs::statfs(folder).map(|facts| facts.f_type as u64);
    on_tmpfs(folder) || kind.is_ok_and(|kind| kind == RAMFS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_others_may_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path().join("logs");
        make_folder(&folder).expect("made");
        for (mode, refused) in [(0o755, false), (0o750, false), (0o775, true), (0o1777, true)] {
            fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).expect("set");
            let end = make_folder(&folder);
            assert_eq!(end.is_err(), refused, "{mode:o}: {end:?}");
            assert!(end.err().is_none_or(|why| why.to_string().contains(&format!("{mode:04o}"))));
        }
    }

    #[test]
    fn a_folder_that_somebody_else_took_is_passed_by() {
        let shared = tempfile::tempdir().expect("a folder");
        let usual = shared.path().join("ringtap-0");
        assert_eq!(folder_in(shared.path(), "ringtap-0", make_folder), usual);
        fs::create_dir(&usual).expect("made");
        assert_eq!(folder_in(shared.path(), "ringtap-0", make_folder), usual);
        fs::remove_dir(&usual).expect("gone");
        // A link of another's to somewhere is no folder of ours either.
        std::os::unix::fs::symlink("/", &usual).expect("a link");
        let other = folder_in(shared.path(), "ringtap-0", make_folder);
        assert_ne!(other, usual);
        assert!(other.is_dir());
        assert_eq!(
            folder_in(shared.path(), "ringtap-0", make_folder),
            other,
            "the same the next time"
        );
        if rustix::process::geteuid().is_root() {
            let another_users = shared.path().join("ringtap-0.0");
            fs::create_dir(&another_users).expect("made");
            std::os::unix::fs::chown(&another_users, Some(65534), None).expect("given away");
            assert_eq!(folder_in(shared.path(), "ringtap-0", make_folder), other);
            assert!(make_folder(&another_users).is_err());
        }
    }
}
