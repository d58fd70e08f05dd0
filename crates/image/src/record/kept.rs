//! Records in the state folder, a file each.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::folder::{folder, is_ours, make, put, remove_stably, sync_folder_of};
use super::goes_on::Successor;
use super::identity;
use super::identity::handle_in;
use super::known::{Allowed, Known};
use crate::file_name::file_system_of;

/// The longest record that is read.
const LONGEST: u64 = 1 << 20;
/// The end of the name of a record that is being written, and how old one is that never will be.
const UNFINISHED: &str = "new";
const GIVEN_UP: Duration = Duration::from_secs(3600);
/// Held while a record is read, changed and written.
static CHANGING: Mutex<()> = Mutex::new(());
/// What is kept of an image. An identity is hashed for the file's name, and stands in it as well.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kept {
    identity: String,
    /// Where the image was at last, for who looks.
    path: String,
    /// The file system that it lies on, where that can be asked whether it is still there; else 0.
    #[serde(default)]
    file_system: u64,
    /// The device of that file system: a snapshot of it has the same identity, and not the same files.
    #[serde(default)]
    device: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) format: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) names: Vec<Allowed>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) data_of: Option<Known>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) successor: Option<Successor>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) restart_log: Option<String>,
}

impl Kept {
    fn is_empty(&self) -> bool {
        self.format.is_none()
            && self.names.is_empty()
            && self.data_of.is_none()
            && self.successor.is_none()
            && self.restart_log.is_none()
    }

    /// What is kept of the image at `path`.
    pub(super) fn of(path: &Path) -> Option<Kept> {
        let identity = identity(path)?;
        read(&folder()?, &identity)
    }

    /// Change what is kept of the image at `path`. `needless`: nothing has to be, so that it is no error
    /// where there can be none.
    pub(super) fn change(
        path: &Path,
        needless: bool,
        change: impl FnOnce(&mut Kept),
    ) -> io::Result<()> {
        let none = |why: &str| Err(io::Error::new(io::ErrorKind::Unsupported, why));
        let (Some(identity), Some(folder)) = (identity(path), folder()) else {
            return match needless {
                true => Ok(()),
                false => none("nothing but its path tells this file from others"),
            };
        };
        let _alone = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        let known = read(&folder, &identity);
        let mut kept = known.clone().unwrap_or_default();
        change(&mut kept);
        kept.identity = identity;
        let now = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        kept.path = now.display().to_string();
        let file = fs::File::open(path).ok();
        kept.file_system = file.as_ref().and_then(|file| file_system_of(file).ok()).unwrap_or(0);
        kept.device =
            file.as_ref().and_then(|file| file.metadata().ok()).map_or(0, |facts| facts.dev());
        match (kept.is_empty(), known) {
            (true, None) => Ok(()),
            // Else a power cut would bring back what does not hold any more.
            (true, Some(_)) => remove_stably(&file_of(&folder, &kept.identity)),
            (false, Some(_)) => write(&folder, &kept),
            (false, None) => {
                write(&folder, &kept)?;
                if let Some(file) = file.filter(|_| kept.file_system != 0) {
                    forget_gone(&folder, &file, &kept);
                }
                Ok(())
            }
        }
    }
}

fn file_of(folder: &Path, identity: &str) -> PathBuf {
    let hash = Sha256::digest(identity.as_bytes());
    folder.join(format!("{}.record", hex::encode(&hash[..16])))
}

/// How the file is called of bitmaps that are kept of the image at `path`, whether there is one or not.
pub(crate) fn sidecar_name(path: &Path) -> Option<PathBuf> {
    Some(file_of(&folder()?, &identity(path)?).with_extension(SIDECAR))
}

/// The end of a sidecar's name.
pub(crate) const SIDECAR: &str = "bitmaps";

/// The end of the name of the file beside records that says whose bitmaps an image's disk may have.
pub(crate) const COMING: &str = "moves";

/// Nobody's bitmaps come to the image at `path`.
pub(super) fn forget_coming(path: &Path) {
    let _ = sidecar_name(path).map(|name| fs::remove_file(name.with_extension(COMING)));
}

/// The path of the bitmaps that are kept of the image at `path`; none where it has none. `create`: it is to have some.
pub(crate) fn sidecar(path: &Path, create: bool) -> io::Result<Option<PathBuf>> {
    let none = || io::Error::new(io::ErrorKind::Unsupported, "nothing tells its file from others");
    let (Some(identity), Some(folder)) = (identity(path), folder()) else {
        return if create { Err(none()) } else { Ok(None) };
    };
    let file = file_of(&folder, &identity).with_extension(SIDECAR);
    if create {
        make(&folder)?;
        is_ours(&folder)?;
        let mut options = fs::File::options();
        options.write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(&file)?;
        sync_folder_of(&file)?;
    }
    match fs::symlink_metadata(&file) {
        Ok(facts) if facts.is_file() => is_ours(&folder).map(|()| Some(file)),
        Ok(_) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // Whoever may not look there has put nothing there, either (HOME is another user's). What others have put there
        // is told by the image's time that it does not know of all changes.
        Err(error) if !create && error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        Err(error) => Err(error),
    }
}

/// Remove the records of files that lay where `image` does and are proven to be gone: their file system, asked
/// for them by the name it has for each, says so. What it cannot be asked of stays.
fn forget_gone(folder: &Path, image: &fs::File, new: &Kept) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if is_given_up(&entry) {
            let _ = fs::remove_file(&path);
            continue;
        }
        let short = entry.metadata().is_ok_and(|facts| facts.is_file() && facts.len() <= LONGEST);
        if !short || path.extension().is_none_or(|ending| ending != "record") {
            continue;
        }
        let kept: Option<Kept> =
            fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let there = |kept: &&Kept| (kept.file_system, kept.device) == (new.file_system, new.device);
        let handle = kept.as_ref().filter(there);
        let handle = handle.and_then(|kept| handle_in(&kept.identity));
        if handle.is_some_and(|handle| handle.is_gone(image).unwrap_or(false)) {
            for beside in [SIDECAR, COMING] {
                let _ = fs::remove_file(path.with_extension(beside));
            }
            let _ = fs::remove_file(&path);
        }
    }
}

/// Whether it is a record that a server was killed as it wrote.
fn is_given_up(entry: &fs::DirEntry) -> bool {
    let written = entry.metadata().and_then(|facts| facts.modified()).ok();
    let age = written.and_then(|at| at.elapsed().ok()).unwrap_or_default();
    entry.path().extension().is_some_and(|ending| ending == UNFINISHED) && age > GIVEN_UP
}

fn read(folder: &Path, identity: &str) -> Option<Kept> {
    let path = file_of(folder, identity);
    let text = fs::metadata(&path).ok().filter(|facts| facts.len() <= LONGEST)?;
    if !text.is_file() || is_ours(folder).is_err() {
        return None;
    }
    let kept: Kept = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    (kept.identity == identity).then_some(kept)
}

/// A power cut leaves the record before or this one.
fn write(folder: &Path, kept: &Kept) -> io::Result<()> {
    make(folder)?;
    is_ours(folder)?;
    let path = file_of(folder, &kept.identity);
    let made = path.with_extension(format!("{}.{UNFINISHED}", std::process::id()));
    put(&path, &made, &serde_json::to_vec(kept)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_record_is_found_by_its_identity_alone_and_not_where_others_write() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path().join("state/ringtap");
        let kept = Kept {
            identity: "file 1".into(),
            path: "/a".into(),
            format: Some("raw".into()),
            ..Kept::default()
        };
        write(&folder, &kept).expect("written");
        assert_eq!(fs::metadata(&folder).expect("made").permissions().mode() & 0o777, 0o700);
        assert_eq!(read(&folder, "file 1"), Some(kept.clone()));
        assert_eq!(read(&folder, "file 2"), None);
        // Neither by a hash that happens to be the same.
        fs::rename(file_of(&folder, "file 1"), file_of(&folder, "file 2")).expect("moved");
        assert_eq!(read(&folder, "file 2"), None);
        write(&folder, &kept).expect("written");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("changed");
        assert_eq!(read(&folder, "file 1"), None);
        assert!(write(&folder, &kept).is_err());
    }

    #[test]
    fn changes_of_one_record_are_all_there() {
        let dir = tempfile::tempdir().expect("a folder");
        let image = dir.path().join("image");
        fs::write(&image, "image").expect("a file");
        let set = |data: Option<String>| Kept::change(&image, true, |kept| kept.restart_log = data);
        if identity(&image).is_none() || set(Some("0".into())).is_err() {
            eprintln!("skipped: there is nowhere to record an image");
            return;
        }
        std::thread::scope(|scope| {
            scope.spawn(|| (1..60).for_each(|at| set(Some(at.to_string())).expect("written")));
            for at in 0..60 {
                let format = Some(format!("format {at}"));
                let wanted = format.clone();
                Kept::change(&image, true, |kept| kept.format = format).expect("written");
                assert_eq!(Kept::of(&image).and_then(|kept| kept.format), wanted);
            }
        });
        let kept = Kept::of(&image).expect("a record");
        assert_eq!(kept.restart_log.as_deref(), Some("59"));
        Kept::change(&image, true, |kept| *kept = Kept::default()).expect("removed");
        assert_eq!(Kept::of(&image), None);
    }

    #[test]
    fn records_that_were_being_written_are_not_kept_for_ever() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a folder");
        let [old, new] = ["a.7.moves.new", "b.7.new"].map(|name| dir.path().join(name));
        for path in [&old, &new] {
            fs::write(path, "{").expect("written");
        }
        let then = std::time::SystemTime::now() - 2 * GIVEN_UP;
        let file = fs::File::options().write(true).open(&old).expect("there");
        file.set_modified(then).expect("set");
        forget_gone(dir.path(), &file, &Kept::default());
        assert!(!old.exists() && new.exists());
    }

    #[test]
    fn records_of_files_that_are_gone_go_and_no_others() {
        // A file system that can be asked for a file by its handle.
        let dir = tempfile::tempdir_in("/dev/shm").expect("a folder");
        let folder = dir.path().join("state");
        let make = |name: &str| {
            let path = dir.path().join(name);
            let file = fs::File::create(&path).expect("a file");
            let identity = identity(&path).expect("tmpfs has handles");
            let file_system = file_system_of(&file).expect("tmpfs is known");
            let kept =
                Kept { identity, file_system, format: Some("raw".into()), ..Kept::default() };
            write(&folder, &kept).expect("written");
            (path, kept)
        };
        let (there, kept) = make("there");
        let (gone, deleted) = make("gone");
        let (moved, renamed) = make("moved");
        let (other, elsewhere) = make("other");
        write(&folder, &Kept { file_system: 1, ..elsewhere.clone() }).expect("written");
        fs::remove_file(gone).expect("deleted");
        fs::remove_file(other).expect("deleted");
        fs::rename(moved, dir.path().join("new")).expect("moved");
        let image = fs::File::open(&there).expect("an image");
        if handle_in(&kept.identity).is_some_and(|handle| handle.is_gone(&image).is_err()) {
            eprintln!("skipped: file systems answer only root");
            return;
        }
        forget_gone(&folder, &image, &kept);
        let found = |kept: &Kept| read(&folder, &kept.identity).is_some();
        assert_eq!([&kept, &deleted, &renamed, &elsewhere].map(found), [true, false, true, true]);
    }
}
