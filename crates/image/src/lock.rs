//! The byte locks by which QEMU's programs and Ringtap keep off each other's images.
//!
//! Source: QEMU, block/file-posix.c, "raw_apply_lock_bytes". A program that holds permission `i` has
//! a shared OFD lock on byte 100 + i of the file, one that lets nobody else have it a shared lock on
//! byte 200 + i; each tests the other's bytes for locks before it goes on.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};

use ringtap_io::OpenFile;
use ringtap_sandbox::ask;

use crate::OpenError;

/// A killed server's locks stay until the kernel has ended its last I/O. Until then nobody may write
/// (an old write could land on a newer one), and nobody is to be seen holding them: wait so long.
const LAST_BREATH: Duration = Duration::from_secs(15);
/// Say what is waited for after this.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);

const HELD: i64 = 100;
const REFUSED: i64 = 200;

/// The permissions that matter here, by QEMU's bit numbers.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

fn lock_at(kind: i32, start: i64) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: 1,
        l_pid: 0,
    }
}

fn failed(path: &Path, source: nix::Error) -> OpenError {
    OpenError::Os { what: "lock", path: path.to_owned(), source: io::Error::from(source) }
}

/// An open image, locked.
#[derive(Debug)]
pub(crate) struct Locked(OpenFile);

impl Deref for Locked {
    type Target = OpenFile;

    fn deref(&self) -> &OpenFile {
        &self.0
    }
}

impl Drop for Locked {
    /// A ring may keep the open file description, and the locks with it, for a while after we are
    /// done: say at once that the next may have it.
    fn drop(&mut self) {
        let mut all = lock_at(libc::F_UNLCK, 0);
        all.l_len = 0;
        let _ = fcntl(self.0.as_fd(), FcntlArg::F_OFD_SETLK(&all));
    }
}

impl Locked {
    /// Have it for reading only from now on.
    pub(crate) fn stop_writing(&self) {
        self.set(libc::F_UNLCK, HELD);
    }

    /// Whether others may write to it from now on. Who has begun to goes on.
    pub(crate) fn let_write(&self, may: bool) {
        self.set(if may { libc::F_UNLCK } else { libc::F_RDLCK }, REFUSED);
    }

    fn set(&self, lock: i32, kind: i64) {
        for permission in [WRITE, RESIZE] {
            // What cannot be given back is held until it is closed.
            let _ = fcntl(self.0.as_fd(), FcntlArg::F_OFD_SETLK(&lock_at(lock, kind + permission)));
        }
    }
}

/// Lock an image for reading, and for writing too with `write`, or say who stands in the way.
pub(crate) fn lock(file: OpenFile, path: &Path, write: bool) -> Result<Locked, OpenError> {
    take(file.as_fd(), path, write)?;
    Ok(Locked(file))
}

/// An image to look at while others may write to it.
pub(crate) fn unlocked(file: OpenFile) -> Locked {
    Locked(file)
}

fn take(fd: BorrowedFd<'_>, path: &Path, write: bool) -> Result<(), OpenError> {
    let held: &[i64] = if write { &[CONSISTENT_READ, WRITE, RESIZE] } else { &[CONSISTENT_READ] };
    let refused = &[WRITE, RESIZE];
    let bytes = held.iter().map(|i| HELD + i).chain(refused.iter().map(|i| REFUSED + i));
    for byte in bytes {
        match fcntl(fd, FcntlArg::F_OFD_SETLK(&lock_at(libc::F_RDLCK, byte))) {
            Ok(_) => {}
            // A file system without locks: QEMU goes on without them too.
            Err(nix::Error::ENOLCK | nix::Error::EOPNOTSUPP | nix::Error::ENOSYS) => return Ok(()),
            Err(error) => return Err(failed(path, error)),
        }
    }
    let (began, mut told) = (Instant::now(), false);
    loop {
        match conflict(fd, path, held, refused)? {
            None => return Ok(()),
            Some(Conflict { holder: None, .. }) if began.elapsed() < LAST_BREATH => {
                if !told && began.elapsed() > PATIENCE {
                    told = true;
                    tracing::warn!(
                        "{} is locked, and nobody is to be seen who has it: waiting up to {LAST_BREATH:?} for the last I/O of a killed process",
                        path.display()
                    );
                }
                std::thread::sleep(PAUSE);
            }
            Some(Conflict { held, holder }) => {
                let advice = match (&holder, write) {
                    (Some(Holder::Ourselves), _) => {
                        "name it once, and nothing that is a backing file of something else here"
                    }
                    (_, true) => "stop that first, or open the image read-only in both places",
                    (_, false) => "stop that first; commands that only look have --force-share",
                };
                let (wanted, path) =
                    (if write { "for writing" } else { "for reading" }, path.to_owned());
                let holder = holder.map_or_else(|| unseen(&path), |holder| holder.to_string());
                return Err(OpenError::Locked { path, wanted, held, holder, advice });
            }
        }
    }
}

/// Who has it open for writing, as far as that can be told.
pub(crate) fn writer(fd: BorrowedFd<'_>, path: &Path) -> Option<(String, &'static str)> {
    let Conflict { held, holder } = conflict(fd, path, &[], &[WRITE, RESIZE]).ok().flatten()?;
    Some((holder.map_or_else(|| unseen(path), |holder| holder.to_string()), held))
}

struct Conflict {
    held: &'static str,
    holder: Option<Holder>,
}

/// Who holds a lock.
enum Holder {
    /// This process, by another descriptor.
    Ourselves,
    Process {
        id: u32,
        name: String,
    },
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Holder::Ourselves => f.write_str("this command itself"),
            Holder::Process { id, name } => write!(f, "process {id} ({name})"),
        }
    }
}

/// What stands in the way. Our own locks do not: they belong to this open file description.
fn conflict(
    fd: BorrowedFd<'_>,
    path: &Path,
    held: &[i64],
    refused: &[i64],
) -> Result<Option<Conflict>, OpenError> {
    let taken = |byte: i64| -> Result<bool, OpenError> {
        let mut probe = lock_at(libc::F_WRLCK, byte);
        fcntl(fd, FcntlArg::F_OFD_GETLK(&mut probe)).map_err(|source| failed(path, source))?;
        Ok(i32::from(probe.l_type) != libc::F_UNLCK)
    };
    let found = |held, byte| Conflict { held, holder: holder(fd, byte) };
    for permission in refused {
        if taken(HELD + permission)? {
            return Ok(Some(found("has it open for writing", HELD + permission)));
        }
    }
    for permission in held {
        if taken(REFUSED + permission)? {
            let held = match *permission {
                CONSISTENT_READ => "has it open, and lets nobody read it meanwhile",
                _ => "has it open for reading, and lets nobody write to it meanwhile",
            };
            return Ok(Some(found(held, REFUSED + permission)));
        }
    }
    Ok(None)
}

/// Who has this byte of the file locked, as the kernel tells who may know.
fn holder(fd: BorrowedFd<'_>, byte: i64) -> Option<Holder> {
    let file = rustix::fs::fstat(fd).ok()?;
    let device = (rustix::fs::major(file.st_dev as _), rustix::fs::minor(file.st_dev as _));
    let found = ask::holder(device, file.st_ino, byte, fd.as_raw_fd())?;
    Some(match found.id == std::process::id() {
        true => Holder::Ourselves,
        false => Holder::Process { id: found.id, name: found.name },
    })
}

/// What can be said of a holder that /proc does not show.
fn unseen(path: &Path) -> String {
    format!(
        "a process that is not visible here, of another user, in another container or with a secret in its memory \
         (as root of the host, lsof {} names it),",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_second_writer_is_refused_and_told_of_the_first() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("disk.raw");
        fs::write(&path, [0; 512]).expect("a file");
        let open = || {
            let file = fs::File::options().read(true).write(true).open(&path).expect("open");
            OpenFile::new(file.into())
        };
        let first = lock(open(), &path, true).expect("the first writer");
        let refused = |write| lock(open(), &path, write).expect_err("refused").to_string();
        let message = refused(true);
        let said =
            "disk.raw for writing: this command itself has it open for writing; name it once";
        assert!(message.contains(said), "{message}");
        assert!(refused(false).contains("disk.raw for reading: "));
        drop(first);
        let former = lock(open(), &path, true).expect("a writer");
        former.stop_writing();
        let _reader = lock(open(), &path, false).expect("a reader beside who reads");
        assert!(refused(true).contains("lets nobody write"));
        drop(_reader);
        former.let_write(true);
        drop(lock(open(), &path, true).expect("a writer beside who lets it"));
        former.let_write(false);
        assert!(refused(true).contains("lets nobody write"));
        drop(former);
        let _reader = lock(open(), &path, false).expect("a reader alone");
        let _second = lock(open(), &path, false).expect("a second reader");
        let message = refused(true);
        assert!(message.contains("for reading, and lets nobody write"), "{message}");
    }
}
