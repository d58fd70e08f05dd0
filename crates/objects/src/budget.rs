//! What local caches take of a disk, and which of them make room.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::FlockOperation;

/// One object's folder.
struct Kept {
    folder: PathBuf,
    bytes: u64,
    used: SystemTime,
}

/// Take away whole objects that nobody uses, those used longest ago first, until `step` bytes more fit into `most`: whether
/// they do.
pub(crate) fn make_room(dir: &Path, most: u64, step: u64) -> bool {
    let mut all = match kept(dir) {
        Ok(all) => all,
        Err(error) => {
            tracing::warn!("cannot look through the cache folder {}: {error}", dir.display());
            return false;
        }
    };
    all.sort_by_key(|one| one.used);
    let mut spent: u64 = all.iter().map(|one| one.bytes).sum();
    for one in all {
        if spent + step <= most {
            break;
        }
        if take_away(&one.folder).unwrap_or(false) {
            tracing::info!("the cache lets go of {}", one.folder.display());
            spent = spent.saturating_sub(one.bytes);
        }
    }
    spent + step <= most
}

fn kept(dir: &Path) -> io::Result<Vec<Kept>> {
    let mut all = vec![];
    for entry in fs::read_dir(dir)? {
        let folder = entry?.path();
        let Ok(used) = fs::metadata(folder.join("used")).and_then(|facts| facts.modified()) else {
            continue;
        };
        let taken = |name| fs::metadata(folder.join(name)).map_or(0, |facts| facts.blocks() * 512);
        let bytes = taken("data") + taken("map");
        all.push(Kept { folder, bytes, used });
    }
    Ok(all)
}

/// Whether it could be: somebody may use it.
fn take_away(folder: &Path) -> io::Result<bool> {
    let path = folder.join("used");
    let used = File::open(&path)?;
    if rustix::fs::flock(&used, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Ok(false);
    }
    // Another may have taken it away before we had the lock, and a third have made it anew, whose lock is not ours.
    if !is_at(&path, &used) {
        return Ok(false);
    }
    // First what says that the rest is there; last what says whose it is.
    for name in ["map", "data", "about", "used"] {
        match fs::remove_file(folder.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    let _ = fs::remove_dir(folder);
    Ok(true)
}

/// Whether a file that is open is what lies there now, and not one that was taken away since.
pub(crate) fn is_at(path: &Path, file: &File) -> bool {
    let here = fs::metadata(path).map(|facts| (facts.dev(), facts.ino()));
    here.is_ok_and(|here| file.metadata().is_ok_and(|facts| (facts.dev(), facts.ino()) == here))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_taken_away_is_not_the_one_that_is_there_now() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("used");
        let first = File::create(&path).expect("made");
        assert!(is_at(&path, &first));
        fs::remove_file(&path).expect("removed");
        assert!(!is_at(&path, &first));
        let second = File::create(&path).expect("made");
        assert!(!is_at(&path, &first) && is_at(&path, &second));
    }
}
