//! The state folder: where it is, and how files in it are written so that a power cut leaves them whole.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ringtap_sandbox::User;

use crate::user::{folder_of, make_for, own};

/// The folder of the user whom the server becomes.
static OF_USER: OnceLock<PathBuf> = OnceLock::new();

/// Keep records for that user, in a folder that this process, which is root, makes for it.
pub(crate) fn keep_as(user: &User) -> io::Result<()> {
    let Some(roots) = folder() else { return Ok(()) };
    let folder = folder_of(&roots, user);
    let _first = OF_USER.set(folder.clone());
    make_for(&folder, user)
}

/// The folder for records: systemd's for a unit, of the system for root, else of the user.
pub(super) fn folder() -> Option<PathBuf> {
    if let Some(folder) = OF_USER.get() {
        return Some(folder.clone());
    }
    let given = |name: &str| std::env::var_os(name).filter(|text| !text.is_empty());
    if let Some(folders) = given("STATE_DIRECTORY") {
        let folders = folders.to_string_lossy().into_owned();
        return folders.split(':').next().map(PathBuf::from);
    }
    if rustix::process::geteuid().is_root() {
        return Some(PathBuf::from("/var/lib/ringtap"));
    }
    let state = given("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let state = state.or_else(|| Some(PathBuf::from(given("HOME")?).join(".local/state")))?;
    Some(state.join("ringtap"))
}

/// The folder of that name below the one for records, where others cannot write; it is made where it is missing.
pub fn state_folder(name: &str) -> io::Result<PathBuf> {
    let none = || {
        io::Error::new(
            io::ErrorKind::NotFound,
            "no folder is known for what outlives a server (HOME)",
        )
    };
    let folder = folder().ok_or_else(none)?.join(name);
    make(&folder)?;
    is_ours(&folder)?;
    Ok(folder)
}

/// Make a folder where it is missing, and those that it lies in; stable when this returns.
pub(super) fn make(folder: &Path) -> io::Result<()> {
    let missing: Vec<&Path> = folder.ancestors().take_while(|one| !one.exists()).collect();
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    // The lowest last: each is named by the one above it.
    missing.into_iter().rev().try_for_each(sync_folder_of)
}

/// Make it stable what is called how in the folder of a file.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    fs::File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

/// Remove a file; it does not come back with a power cut.
pub fn remove_stably(path: &Path) -> io::Result<()> {
    fs::remove_file(path)?;
    sync_folder_of(path)
}

/// The same, made where it was not there yet; none where there can be none.
pub fn made_folder() -> Option<PathBuf> {
    let folder = folder()?;
    make(&folder).ok().map(|()| folder)
}

/// Others must not be able to write there.
pub(crate) fn is_ours(folder: &Path) -> io::Result<()> {
    let facts = fs::metadata(folder)?;
    if facts.uid() == own() && facts.permissions().mode() & 0o022 == 0 {
        return Ok(());
    }
    let why = format!("{} can be written to by others", folder.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// Have the file at `path` hold that; a power cut leaves what it held before, or this. `made` is what it is called until it is whole.
pub(crate) fn put(path: &Path, made: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = fs::File::options();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let mut file = options.open(made)?;
    let end = file.write_all(bytes).and_then(|()| file.sync_all());
    end.and_then(|()| fs::rename(made, path)).inspect_err(|_| {
        let _ = fs::remove_file(made);
    })?;
    sync_folder_of(path)
}
