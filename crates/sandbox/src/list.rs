//! What the operator lets a server have: said to the broker before the walls are up, and never after.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::call::{Call, What, as_path};

/// The operator's list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct List {
    /// UNIX sockets to bind, or to connect to.
    pub sockets: Vec<PathBuf>,
    /// Folders in and below which any UNIX socket may be bound or connected to.
    pub folders: Vec<PathBuf>,
    /// Hosts and ports of TCP to listen at.
    pub listen: Vec<(String, u16)>,
    /// Hosts and ports of TCP to connect to.
    pub dial: Vec<(String, u16)>,
    /// Whether any host and port will do for both.
    pub any_tcp: bool,
    /// Files to mount over, by FUSE.
    pub mounts: Vec<PathBuf>,
    /// Images to show as block devices of this host, by the names that the operator has for them.
    pub devices: Vec<PathBuf>,
    /// Whether any image will do for that.
    pub any_device: bool,
}

/// The kinds of lines.
const SOCKET: u64 = 1;
const FOLDER: u64 = 2;
const LISTEN: u64 = 3;
const DIAL: u64 = 4;
const ANY_TCP: u64 = 5;
const MOUNT: u64 = 6;
const DEVICE: u64 = 7;
const ANY_DEVICE: u64 = 8;
/// The most lines that a broker keeps.
const MOST: usize = 64 << 10;

impl List {
    /// Each line as it is said.
    pub(crate) fn lines(&self, mut say: impl FnMut(Call<'_>) -> io::Result<()>) -> io::Result<()> {
        let mut paths = |paths: &[PathBuf], kind| -> io::Result<()> {
            paths.iter().try_for_each(|path| say(Call::path(What::Allow, path).number(kind)))
        };
        paths(&self.sockets, SOCKET)?;
        paths(&self.folders, FOLDER)?;
        paths(&self.mounts, MOUNT)?;
        paths(&self.devices, DEVICE)?;
        for (places, kind) in [(&self.listen, LISTEN), (&self.dial, DIAL)] {
            for (host, port) in places {
                let call = Call { first: host.as_bytes(), ..Call::new(What::Allow) };
                say(Call { numbers: [kind, u64::from(*port), 0, 0], ..call })?;
            }
        }
        let all = [(self.any_tcp, ANY_TCP), (self.any_device, ANY_DEVICE)];
        let mut all = all.into_iter().filter(|(any, _)| *any);
        all.try_for_each(|(_, kind)| say(Call::new(What::Allow).number(kind)))
    }

    /// Take a line; false where it is none.
    pub(crate) fn take(&mut self, line: &Call<'_>) -> bool {
        let known = self.sockets.len() + self.folders.len() + self.mounts.len();
        let known = known + self.devices.len();
        if known + self.listen.len() + self.dial.len() >= MOST {
            return false;
        }
        let path = || absolute_one_day(as_path(line.first)).ok();
        let place = || {
            let host = String::from_utf8(line.first.to_vec()).ok()?;
            Some((host, u16::try_from(line.numbers[1]).ok()?))
        };
        match line.numbers[0] {
            SOCKET => path().map(|path| self.sockets.push(path)).is_some(),
            FOLDER => path().map(|path| self.folders.push(path)).is_some(),
            MOUNT => path().map(|path| self.mounts.push(path)).is_some(),
            LISTEN => place().map(|place| self.listen.push(place)).is_some(),
            DIAL => place().map(|place| self.dial.push(place)).is_some(),
            ANY_TCP => {
                self.any_tcp = true;
                true
            }
            // A name of an image need not be a path.
            DEVICE => {
                self.devices.push(as_path(line.first).to_owned());
                true
            }
            ANY_DEVICE => {
                self.any_device = true;
                true
            }
            _ => false,
        }
    }

    /// Whether a UNIX socket may be there: `place` is a path without links but for its last part.
    pub(crate) fn has_socket(&self, place: &Path) -> bool {
        has(&self.sockets, place) || self.folders.iter().any(|folder| place.starts_with(folder))
    }

    pub(crate) fn may_listen(&self, host: &str, port: u16) -> bool {
        self.any_tcp || self.listen.iter().any(|(other, its)| other == host && *its == port)
    }

    pub(crate) fn may_dial(&self, host: &str, port: u16) -> bool {
        self.any_tcp || self.dial.iter().any(|(other, its)| other == host && *its == port)
    }

    /// Whether there are to be block devices at all.
    pub(crate) fn has_devices(&self) -> bool {
        self.any_device || !self.devices.is_empty()
    }

    pub(crate) fn may_show(&self, image: &Path) -> bool {
        self.any_device || has(&self.devices, image)
    }

    pub(crate) fn has_mount(&self, place: &Path) -> bool {
        has(&self.mounts, place) || self.folders.iter().any(|folder| place.starts_with(folder))
    }
}

/// Whether it is one of these, all of which [`absolute`] has made: a thousand disks look at a thousand places each.
fn has(places: &[PathBuf], place: &Path) -> bool {
    places.iter().any(|one| one.as_os_str() == place.as_os_str())
}

/// A path with no link in it, but perhaps its last part, whose folder must exist.
pub(crate) fn absolute(path: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    match (absolute.parent(), absolute.file_name()) {
        (Some(folder), Some(name)) => Ok(folder.canonicalize()?.join(name)),
        // The root, or a path that ends in `..`.
        _ => absolute.canonicalize(),
    }
}

/// The same of one whose folders may be missing yet. Should a link stand for one of them then, it leads to another place, which is
/// not allowed.
fn absolute_one_day(path: &Path) -> io::Result<PathBuf> {
    let full = std::path::absolute(path)?;
    let mut missing = vec![];
    let mut there = &*full;
    loop {
        match (absolute(there), there.parent(), there.file_name()) {
            (Err(error), Some(folder), Some(name)) if error.kind() == ErrorKind::NotFound => {
                missing.push(name);
                there = folder;
            }
            (found, ..) => return Ok(missing.iter().rev().fold(found?, |at, name| at.join(name))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_is_allowed_and_nothing_else() {
        let list = List {
            sockets: vec!["/tmp/a.sock".into()],
            folders: vec!["/tmp".into()],
            listen: vec![("h".into(), 7)],
            dial: vec![("d".into(), 8)],
            any_tcp: false,
            mounts: vec!["/tmp/m".into()],
            devices: vec!["null:1M".into()],
            any_device: false,
        };
        let mut heard = List::default();
        let take = |call: Call<'_>| {
            assert!(heard.take(&call), "{call:?}");
            Ok(())
        };
        list.lines(take).expect("told");
        assert_eq!(heard, list);
        heard.folders.clear();
        assert!(heard.has_socket(Path::new("/tmp/a.sock")));
        assert!(!heard.has_socket(Path::new("/tmp/b.sock")));
        assert!(heard.may_listen("h", 7) && !heard.may_listen("h", 8) && !heard.may_listen("d", 8));
        assert!(heard.may_dial("d", 8) && !heard.may_dial("h", 7));
        assert!(heard.may_show(Path::new("null:1M")) && !heard.may_show(Path::new("null:2M")));
        assert!(heard.has_mount(Path::new("/tmp/m")) && !heard.has_mount(Path::new("/tmp/a.sock")));
    }

    #[test]
    fn a_path_is_found_whatever_links_lead_there() {
        let dir = tempfile::tempdir().expect("a folder");
        let real = dir.path().canonicalize().expect("it").join("real");
        std::fs::create_dir(&real).expect("made");
        std::os::unix::fs::symlink(&real, dir.path().join("link")).expect("a link");
        let found = absolute(&dir.path().join("link/s")).expect("found");
        assert_eq!(found, real.join("s"));
        let out = absolute(&real.join("../link/..")).expect("found");
        assert!(!out.starts_with(&real), "{out:?}");
        assert!(absolute(&dir.path().join("none/s")).is_err());
        // What is allowed may come later, and where it was said alone.
        let later = dir.path().join("link/none/deeper/s");
        let mut list = List::default();
        let line = Call::path(What::Allow, &later).number(SOCKET);
        assert!(list.take(&line), "a folder that is missing");
        std::fs::create_dir_all(real.join("none/deeper")).expect("made");
        assert!(list.has_socket(&absolute(&later).expect("found")));
        std::fs::remove_dir(real.join("none/deeper")).expect("removed");
        std::os::unix::fs::symlink("/tmp", real.join("none/deeper")).expect("a link");
        assert!(!list.has_socket(&absolute(&later).expect("found")));
    }
}
