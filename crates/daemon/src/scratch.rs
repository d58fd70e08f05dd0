//! Scratch of backups: a file without a name, of which nothing stays however the server ends.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use ringtap_image::{CacheMode, Format, OpenOptions, Place, open_place, record};
use ringtap_vbd::{Scratch, Vbd};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

/// The most bytes that lie there, where nothing is said.
pub(crate) const ROOM: u64 = 1 << 30;
/// The end of a name that a file has for a moment, where a file system makes none without.
const NAMED: &str = "scratch";

/// Where it is to be, and how large.
#[derive(Clone, Debug)]
pub(crate) struct ScratchAt {
    /// The folder; none: that of records.
    pub(crate) folder: Option<PathBuf>,
    /// The most bytes that lie there at once.
    pub(crate) room: u64,
}

impl ScratchAt {
    /// Make one for a disk of so many bytes.
    pub(crate) fn make(&self, size: u64) -> Result<Scratch, String> {
        let own = self.folder.clone().map_or_else(|| record::state_folder("scratch"), Ok);
        let failed = |why: String| {
            let folder = own.as_ref().map(|folder| folder.display().to_string());
            format!(
                "cannot make scratch in {}: {why}; name another folder (`__ringtap_scratch`, --scratch), or do without: \
                 0 bytes (`__ringtap_scratch-limit`, --scratch-limit)",
                folder.unwrap_or_else(|_| "the folder of records".to_owned())
            )
        };
        let file = own.as_ref().map_err(ToString::to_string).and_then(|folder| {
            let file = unnamed(folder).map_err(|error| error.to_string())?;
            file.set_len(size.next_multiple_of(4096)).map_err(|error| error.to_string())?;
            Ok(file)
        });
        let file = file.map_err(failed)?;
        let place = Place::hold(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())));
        let place = place.map_err(|error| failed(error.to_string()))?;
        let (format, cache) = (Some(Format::Raw), CacheMode::Unsafe);
        let options = OpenOptions { format, cache, ..OpenOptions::default() };
        let image = open_place(&place, &options).map_err(|error| failed(error.to_string()))?;
        let disk = Vbd::new(image, cache).disk().clone();
        Ok(Scratch { disk, room: self.room })
    }
}

/// A file in a folder that has no name there.
fn unnamed(folder: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::openat(CWD, folder, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Ok(file.into()),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => named_for_a_moment(folder),
        Err(error) => Err(error.into()),
    }
}

/// Whether a file has a name as [`named_for_a_moment`] gives.
fn is_ours(path: &Path) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let name = path.file_name().and_then(|name| name.to_str());
    let stem = name.and_then(|name| name.strip_suffix(NAMED)?.strip_suffix('.'));
    stem.and_then(|stem| stem.split_once('-')).is_some_and(|(a, b)| is_number(a) && is_number(b))
}

/// The same where the file system makes none: its name is removed at once. A kill may come before that.
fn named_for_a_moment(folder: &Path) -> io::Result<File> {
    for entry in folder.read_dir()?.flatten() {
        let path = entry.path();
        // One that a server was killed just after making: it is longer only once it has no name.
        let is_empty = entry.metadata().is_ok_and(|it| it.is_file() && it.len() == 0);
        if is_empty && is_ours(&path) {
            let _ = std::fs::remove_file(path);
        }
    }
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (own, next) = (std::process::id(), NEXT.fetch_add(1, Relaxed));
    let path = folder.join(format!("{own}-{next}.{NAMED}"));
    let mut options = File::options();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(file),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_it_stays() {
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let at = ScratchAt { folder: Some(dir.path().to_owned()), room: 1 << 20 };
        let of_others = [("vm.scratch", ""), ("3-4.scratch", "data"), ("1-b.scratch", "")];
        for (name, content) in of_others.into_iter().chain([("1-2.scratch", "")]) {
            std::fs::write(dir.path().join(name), content).expect("a file");
        }
        let scratch = at.make((1 << 20) + 1).expect("it is made");
        assert_eq!(scratch.disk.size(), (1 << 20) + 4096);
        let file = named_for_a_moment(dir.path()).expect("a file");
        file.set_len(4096).expect("it is open");
        let left = dir.path().read_dir().expect("a folder").flatten();
        let mut left: Vec<_> = left.map(|entry| entry.file_name()).collect();
        left.sort();
        assert_eq!(left, ["1-b.scratch", "3-4.scratch", "vm.scratch"]);
        let missing = ScratchAt { folder: Some(dir.path().join("missing")), room: 1 };
        let why = missing.make(1).map(drop).expect_err("there is no folder");
        assert!(why.contains("missing") && why.contains("--scratch-limit"), "{why}");
    }
}
