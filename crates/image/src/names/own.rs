//! Whose a file is: whether anybody but its user, and root, could have written to it or put another in its
//! place.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::Place;

const FUSE: u64 = 0x6573_5546;
const STICKY: u32 = 0o1000;
const WRITTEN_BY_OTHERS: u32 = 0o022;

/// Whether only this user and root may write to the file `at`, and to what its path `path` leads through.
/// The error says who else may.
pub(super) fn is_own(at: &Path, path: &Path) -> Result<(), String> {
    let facts = fs::metadata(at).map_err(|error| format!("{}: {error}", path.display()))?;
    owned(&facts, path)?;
    // A device's group is that of those who may have any disk.
    if !facts.file_type().is_block_device() && facts.mode() & WRITTEN_BY_OTHERS != 0 {
        return Err(format!("{} can be written to by others", path.display()));
    }
    for (depth, folder) in path.ancestors().skip(1).enumerate() {
        let facts =
            fs::metadata(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        owned(&facts, folder)?;
        // From a sticky folder nobody takes what is another's away.
        let sticky = depth > 0 && facts.mode() & STICKY != 0;
        if facts.mode() & WRITTEN_BY_OTHERS != 0 && !sticky {
            return Err(format!("the folder {} can be written to by others", folder.display()));
        }
        if depth == 0 && !tells_the_truth(folder, facts.dev()) {
            return Err(format!("{} is a file system of another user's", folder.display()));
        }
    }
    Ok(())
}

/// Whether a file is where nobody but this user and root could have put it.
pub(crate) fn is_own_place(place: &Place) -> bool {
    is_own(&place.at(), place.path()).is_ok()
}

fn owned(facts: &Metadata, path: &Path) -> Result<(), String> {
    let own = rustix::process::geteuid().as_raw();
    match facts.uid() {
        0 => Ok(()),
        uid if uid == own => Ok(()),
        uid => Err(format!("{} belongs to user {uid}", path.display())),
    }
}

/// Whose a file is says, on a FUSE file system, who mounted that.
fn tells_the_truth(folder: &Path, device: u64) -> bool {
    if !rustix::fs::statfs(folder).is_ok_and(|facts| facts.f_type as u64 == FUSE) {
        return true;
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let users = [0, rustix::process::geteuid().as_raw()].map(|uid| format!("user_id={uid}"));
    mounts.lines().any(|line| mounted_by(line, &device, &users))
}

/// Whether a line of mountinfo tells of that device, mounted by one of the users. Source: proc(5).
fn mounted_by(line: &str, device: &str, users: &[String]) -> bool {
    let Some((front, back)) = line.split_once(" - ") else { return false };
    let options = back.split(' ').nth(2).unwrap_or_default();
    front.split(' ').nth(2) == Some(device)
        && options.split(',').any(|option| users.iter().any(|user| user == option))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown};

    #[test]
    fn a_file_is_ones_own_where_nobody_else_writes() {
        let dir = tempfile::tempdir().expect("a folder");
        let (folder, file) = (dir.path().join("a"), dir.path().join("a/file"));
        fs::create_dir(&folder).expect("made");
        fs::write(&file, "").expect("written");
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("changed");
        };
        mode(&folder, 0o755);
        mode(&file, 0o644);
        let refused = |said: &str| {
            let why = is_own(&file, &file).expect_err(said);
            assert!(why.contains(said), "{why}");
        };
        is_own(&file, &file).expect("nobody else writes there");
        for shared in [0o664, 0o646] {
            mode(&file, shared);
            refused("a/file can be written to");
        }
        mode(&file, 0o600);
        for shared in [0o775, 0o757, 0o1777] {
            mode(&folder, shared);
            refused("the folder");
        }
        mode(&folder, 0o755);
        // Above the folder a sticky one is as good.
        mode(dir.path(), 0o1777);
        is_own(&file, &file).expect("nobody takes the folder away");
        mode(dir.path(), 0o777);
        refused("the folder");
        mode(dir.path(), 0o700);
        if rustix::process::geteuid().is_root() {
            chown(&file, Some(12345), None).expect("root may");
            refused("belongs to user 12345");
            chown(&file, Some(0), None).expect("root may");
            chown(&folder, Some(12345), None).expect("root may");
            refused("belongs to user 12345");
        }
    }

    #[test]
    fn mounts_say_who_made_them() {
        let line = "36 35 0:32 / /home/a/m rw,nosuid - fuse.x x rw,user_id=1000,group_id=1000";
        let users = ["user_id=0".to_owned(), "user_id=5".to_owned()];
        assert!(!mounted_by(line, "0:32", &users));
        assert!(mounted_by(&line.replace("=1000", "=5"), "0:32", &users));
        assert!(!mounted_by(&line.replace("=1000", "=5"), "0:33", &users));
    }
}
