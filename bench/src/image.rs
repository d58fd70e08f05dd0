//! The image that all servers serve, fully written.

use crate::interrupt;
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use rustix::process::{Flock, FlockType, fcntl_getlk};
use serde::Serialize;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// What lies under the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fs {
    /// A file in /dev/shm: the cost of software.
    Tmpfs,
    /// A file on a disk, reached with O_DIRECT: the whole path.
    Ext4,
    /// A device that moves no bytes: the cost of the wire.
    Null,
}

impl Fs {
    /// The word used on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Fs::Tmpfs => "tmpfs",
            Fs::Ext4 => "ext4",
            Fs::Null => "null",
        }
    }
}

/// Bytes of a no-op image.
pub const NULL_SIZE: u64 = 10 << 30;

/// The files of one experiment, removed when dropped.
pub struct Images {
    _dir: Option<TempDir>,
    direct: PathBuf,
    cached: PathBuf,
    place: String,
}

impl Images {
    /// Writes the images of `size` bytes. `dir` is where those on a disk go.
    ///
    /// Servers that use the page cache get a file of their own (`with_cached`): O_DIRECT writes to
    /// the same file would throw out of the cache what they read.
    pub fn write(fs: Fs, dir: &Path, size: u64, with_cached: bool) -> Result<Images> {
        let parent = match fs {
            Fs::Tmpfs => Path::new("/dev/shm"),
            Fs::Ext4 => dir,
            Fs::Null => {
                let (direct, cached) = Default::default();
                return Ok(Images {
                    _dir: None,
                    direct,
                    cached,
                    place: "none, a no-op device".into(),
                });
            }
        };
        let dir =
            tempfile::Builder::new().prefix("ringtap-bench-").tempdir_in(parent).with_context(
                || format!("cannot make a folder in {}: choose one by --dir", parent.display()),
            )?;
        let direct = dir.path().join("direct.raw");
        let cached = dir.path().join("cached.raw");
        write_image(&direct, size)?;
        if with_cached {
            write_image(&cached, size)?;
        }
        let kind = file_system(parent)?;
        let place = format!("{} MiB, fully written, in {} ({kind})", size >> 20, parent.display());
        Ok(Images { _dir: Some(dir), direct, cached, place })
    }

    /// Size and whereabouts, for the report.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The image for O_DIRECT.
    pub fn direct(&self) -> &Path {
        &self.direct
    }

    /// The image for servers that use the page cache.
    pub fn cached(&self) -> &Path {
        &self.cached
    }
}

/// Fills `path` with bytes that neither compress nor repeat: space that is only reserved costs
/// more at the first write, and zeros may cost less than data.
fn write_image(path: &Path, size: u64) -> Result<()> {
    let failed = || format!("cannot write {size} bytes to {}", path.display());
    let mut file = File::create(path).with_context(failed)?;
    let mut chunk = vec![0u8; 4 << 20];
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for word in chunk.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    let mut left = size;
    while left > 0 {
        interrupt::check()?;
        chunk[..8].copy_from_slice(&left.to_le_bytes());
        let part = left.min(chunk.len() as u64);
        file.write_all(&chunk[..part as usize]).with_context(failed)?;
        left -= part;
    }
    file.sync_all().with_context(failed)
}

/// Writes back what is dirty in the page cache, so that the next server does not pay for it.
pub fn settle(path: &Path) -> Result<()> {
    let failed = || format!("cannot sync {}", path.display());
    File::open(path).and_then(|file| file.sync_all()).with_context(failed)
}

/// Waits until nobody holds a lock on `path`, or fails after 5 s.
///
/// The kernel takes an io_uring with registered files apart some tens of milliseconds after the
/// process has ended; until then the files stay open, and locked.
pub fn wait_unlocked(path: &Path) -> Result<()> {
    let failed = || format!("cannot ask for locks on {}", path.display());
    let file = File::options().read(true).write(true).open(path).with_context(failed)?;
    let all = Flock::from(FlockType::WriteLock);
    for _ in 0..1000 {
        if fcntl_getlk(&file, &all).with_context(failed)?.is_none() {
            return Ok(());
        }
        interrupt::sleep(Duration::from_millis(5))?;
    }
    bail!("{} is still locked 5 s after its server ended", path.display())
}

/// The type of the file system that `path` is on, by its device number in the mount table.
pub(crate) fn file_system(path: &Path) -> Result<String> {
    let device = fs::metadata(path)?.dev();
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let found = mounts.lines().rev().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        (mount.split(' ').nth(2)? == device).then(|| kind.split(' ').next())?
    });
    Ok(found.unwrap_or("unknown").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_written_and_removed() {
        let home = tempfile::tempdir().unwrap();
        let images = Images::write(Fs::Ext4, home.path(), 5 << 20, true).unwrap();
        for path in [images.direct().to_path_buf(), images.cached().to_path_buf()] {
            let meta = fs::metadata(&path).unwrap();
            assert_eq!(meta.len(), 5 << 20);
            assert!(meta.blocks() * 512 >= 5 << 20, "sparse");
        }
        let folder = images.direct().parent().unwrap().to_path_buf();
        drop(images);
        assert!(!folder.exists());
    }

    #[test]
    fn waits_for_the_lock_of_a_server() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().display().to_string();
        // It holds the lock until its stdin ends.
        let script = "import fcntl, sys\n\
             f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX)\n\
             print('locked', flush=True); sys.stdin.read()";
        let mut holder = std::process::Command::new("python3")
            .args(["-c", script, &path])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut [0; 6]).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| wait_unlocked(file.path()));
            std::thread::sleep(Duration::from_millis(100));
            let early = waiting.is_finished();
            drop(holder.stdin.take());
            waiting.join().unwrap().unwrap();
            assert!(!early, "it did not wait");
        });
        holder.wait().unwrap();
    }

    #[test]
    fn names_the_file_system() {
        assert_eq!(file_system(Path::new("/proc/self")).unwrap(), "proc");
    }
}
