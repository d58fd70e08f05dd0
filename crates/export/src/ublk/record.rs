//! Which image a device shows, for people and for the next server; gone with the next boot.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

/// The mark of devices of ours, in the upper 16 bits of what the driver keeps for a server.
const OURS: u64 = 0x5254 << 48;

/// What the driver is to keep so that the next server of the same image knows its device: another file of
/// that name, in another container or since then, is not the same.
pub(crate) fn mark(image: &Path) -> u64 {
    let path = name(image).into_os_string().into_encoded_bytes();
    // Not its device's number, which may change when a file system is mounted again.
    let number = fs::metadata(image).map_or(0, |meta| match meta.file_type().is_block_device() {
        true => meta.rdev(),
        false => meta.ino(),
    });
    // FNV-1a.
    let bytes = path.into_iter().chain(number.to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    OURS | hash >> 16
}

/// Whether a device of that mark is one of ours.
pub(crate) fn is_ours(mark: u64) -> bool {
    mark & (0xffff << 48) == OURS
}

/// The image's path, the same from wherever it is named.
fn name(image: &Path) -> PathBuf {
    image.canonicalize().unwrap_or_else(|_| image.to_owned())
}

/// Where records are kept: only there for this boot, only for this user to write.
fn folder() -> Option<PathBuf> {
    if geteuid().is_root() {
        return Some("/run/ringtap/ublk".into());
    }
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    own.filter(|path| path.is_absolute()).map(|path| path.join("ringtap/ublk"))
}

/// The folder, which is there then: for who may open files in it, and make no folder.
pub fn made_folder() -> Option<PathBuf> {
    folder().filter(|folder| fs::create_dir_all(folder).is_ok())
}

/// Note the image of a device of that mark. Devices work without, but cannot be told apart by people.
pub(crate) fn write(id: u32, mark: u64, image: &Path) {
    let Some(folder) = folder() else { return };
    let path = folder.join(id.to_string());
    let mut text = format!("{mark:016x} ").into_bytes();
    text.extend(name(image).into_os_string().into_encoded_bytes());
    let written = fs::create_dir_all(&folder).and_then(|()| fs::write(&path, text));
    if let Err(error) = written {
        tracing::warn!("cannot note in {} which image it is: {error}", path.display());
    }
}

/// The image of a device of that mark, where it was noted.
pub(crate) fn read(id: u32, mark: u64) -> Option<PathBuf> {
    image_in(&fs::read(folder()?.join(id.to_string())).ok()?, mark)
}

/// What a record says is the image of a device of that mark.
pub(crate) fn image_in(record: &[u8], mark: u64) -> Option<PathBuf> {
    let image = record.strip_prefix(format!("{mark:016x} ").as_bytes())?;
    Some(OsString::from_vec(image.to_vec()).into())
}

pub(crate) fn remove(id: u32) -> io::Result<()> {
    match folder() {
        Some(folder) => fs::remove_file(folder.join(id.to_string())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_tells_images_apart_and_ours_from_others() {
        let (one, two) = (mark(Path::new("null:1M")), mark(Path::new("null:2M")));
        assert!(one != two && is_ours(one) && is_ours(two));
        assert!(!is_ours(0) && !is_ours(u64::MAX));
        let dir = tempfile::tempdir().expect("a folder");
        let (path, other) = (dir.path().join("disk"), dir.path().join("other"));
        fs::write(&path, "").expect("a file");
        fs::write(&other, "").expect("a file");
        let before = mark(&path);
        assert_eq!(mark(&dir.path().join("../").join(dir.path()).join("disk")), before);
        fs::rename(&other, &path).expect("another file");
        assert_ne!(mark(&path), before);
    }
}
