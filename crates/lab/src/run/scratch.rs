//! What a run makes beside its folder: the disks, and a folder for sockets. Both vanish with it.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::fs::{Advice, fadvise, statvfs};
use tempfile::TempDir;

use crate::error::{Error, Result};
use crate::stop::Stop;

/// Room that is left free on the file system of the disks.
const RESERVE: u64 = 256 << 20;
/// How long a lock of a server that has ended may stay.
const UNLOCKED: Duration = Duration::from_secs(5);
/// A socket's path must fit into `sockaddr_un`.
const LONGEST_SOCKET: usize = 107;

/// The scratch folders.
#[derive(Debug)]
pub struct Scratch {
    disks: TempDir,
    sockets: TempDir,
}

impl Scratch {
    /// Makes them: disks in `dir`, sockets where temporary files go. Refused when `dir` has no room for `bytes`.
    pub fn create(dir: &Path, bytes: u64) -> Result<Scratch> {
        let room = statvfs(dir).map_err(|e| Error::file("look at", dir)(e.into()))?;
        let free = room.f_bavail * room.f_frsize;
        if free < bytes + RESERVE {
            return Err(Error::Plan(format!(
                "{} has {} MiB free, the disks need {} MiB and {} MiB to spare: give a smaller --size or another --dir",
                dir.display(),
                free >> 20,
                bytes >> 20,
                RESERVE >> 20
            )));
        }
        let make = |dir: &Path| {
            tempfile::Builder::new()
                .prefix("ringtap-lab-")
                .tempdir_in(dir)
                .map_err(Error::file("make a folder in", dir))
        };
        let disks = make(dir)?;
        let mut sockets = make(&std::env::temp_dir())?;
        if sockets.path().as_os_str().len() + 48 > LONGEST_SOCKET {
            sockets = make(Path::new("/tmp"))?;
        }
        Ok(Scratch { disks, sockets })
    }

    /// Where the disks are.
    pub fn disks(&self) -> &Path {
        self.disks.path()
    }

    /// An empty folder for the sockets of `name`.
    pub fn socket_folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.sockets.path().join(name.replace('#', "-"));
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(Error::file("empty", &folder))?;
        }
        fs::create_dir(&folder).map_err(Error::file("make", &folder))?;
        Ok(folder)
    }

    /// Makes a disk file of `bytes`, all of it written once with bytes that do not compress, and on the device when
    /// this returns.
    pub fn write_disk(&self, name: &str, bytes: u64, seed: u64, stop: &Stop) -> Result<PathBuf> {
        let path = self.disks.path().join(name);
        let mut file = File::create(&path).map_err(Error::file("create", &path))?;
        let mut block = vec![0; 1 << 20];
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.fill_bytes(&mut block);
        let mut left = bytes;
        while left > 0 {
            stop.check()?;
            let len = left.min(block.len() as u64);
            // Each block differs from the last, at the cost of a few bytes.
            random.fill_bytes(&mut block[..4096]);
            file.write_all(&block[..usize::try_from(len).unwrap_or(block.len())])
                .map_err(Error::file("write", &path))?;
            left -= len;
        }
        settle(&path)?;
        Ok(path)
    }
}

/// Waits until nobody holds a lock on `path`, for a few seconds at most. A server's file lives on for a moment after the
/// server has ended: the kernel takes its io_uring down later, and the next server would be refused.
pub fn wait_unlocked(path: &Path) -> Result<()> {
    let inode = fs::metadata(path).map_err(Error::file("look at", path))?.ino();
    let end = format!(":{inode}");
    let locked = || {
        let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
        locks.lines().any(|line| line.split_whitespace().any(|word| word.ends_with(&end)))
    };
    let until = Instant::now() + UNLOCKED;
    while locked() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Brings everything written to `path` to the device and drops its pages from this machine's cache, so that no arm
/// inherits another's dirty or cached pages. (On tmpfs the pages are the file: nothing happens.)
pub fn settle(path: &Path) -> Result<()> {
    let file = File::open(path).map_err(Error::file("open", path))?;
    file.sync_all().map_err(Error::file("sync", path))?;
    fadvise(&file, 0, None, Advice::DontNeed)
        .map_err(|e| Error::file("drop the cache of", path)(e.into()))
}
