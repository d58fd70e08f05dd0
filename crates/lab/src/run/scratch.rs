//! What a run makes beside its folder: the disks, and a folder for sockets. Both vanish with it.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::fs::{Advice, FlockOperation, Mode, OFlags, fadvise, flock, statvfs};
use tempfile::TempDir;

use crate::backend::volume;
use crate::error::{Error, Result};
use crate::host::mount_points;
use crate::stop::Stop;

/// Room that is left free on the file system of the disks.
const RESERVE: u64 = 256 << 20;
/// How long a lock of a server that has ended may stay.
const UNLOCKED: Duration = Duration::from_secs(5);
/// A socket's path must fit into `sockaddr_un`.
const LONGEST_SOCKET: usize = 107;

/// How the names of all scratch folders begin.
const PREFIX: &str = "ringtap-lab-";
/// The file in a scratch folder that its lab keeps locked as long as it lives.
const OWNER: &str = "owner";
/// How the name of a file ends that holds the node of a loop device, one that may not say itself what it lies on.
pub const LOOP_NOTE: &str = "loop";
/// A folder younger than this may belong to a lab that has not locked it yet.
const GRACE: Duration = Duration::from_secs(30);

/// The scratch folders.
#[derive(Debug)]
pub struct Scratch {
    disks: TempDir,
    sockets: TempDir,
    _locks: [File; 2],
}

impl Scratch {
    /// Makes them: disks in `dir`, sockets where temporary files go. Refused when `dir` has no room for `bytes`.
    pub fn create(dir: &Path, bytes: u64) -> Result<Scratch> {
        let dir = &fs::canonicalize(dir).map_err(Error::file("look at", dir))?;
        sweep(dir, GRACE);
        sweep(&std::env::temp_dir(), GRACE);
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
                .prefix(PREFIX)
                .tempdir_in(dir)
                .map_err(Error::file("make a folder in", dir))
        };
        let disks = make(dir)?;
        let mut sockets = make(&std::env::temp_dir())?;
        if sockets.path().as_os_str().len() + 48 > LONGEST_SOCKET {
            sockets = make(Path::new("/tmp"))?;
        }
        let locks = [own(disks.path())?, own(sockets.path())?];
        Ok(Scratch { disks, sockets, _locks: locks })
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

/// Marks a folder as belonging to this process, until it ends however it ends.
fn own(folder: &Path) -> Result<File> {
    let path = folder.join(OWNER);
    let file = File::create(&path).map_err(Error::file("create", &path))?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)
        .map_err(|e| Error::file("lock", &path)(e.into()))?;
    Ok(file)
}

/// Removes what labs left in `parent` that were killed before they could: mounts, volumes, loop devices and folders that nobody
/// owns any more. Says what it removed. What cannot be removed is another user's.
pub fn sweep(parent: &Path, grace: Duration) {
    // The kernel names mounts and the files of loop devices by their whole paths.
    let Ok(parent) = fs::canonicalize(parent) else { return };
    let entries = fs::read_dir(&parent).into_iter().flatten().flatten();
    for folder in entries.filter(|e| e.file_name().to_string_lossy().starts_with(PREFIX)) {
        let folder = folder.path();
        let age = fs::metadata(&folder).and_then(|m| m.modified()).map(|at| at.elapsed());
        if !matches!(age, Ok(Ok(age)) if age >= grace) {
            continue;
        }
        let Some(lock) = owner(&folder) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            continue;
        }
        // A file system on a loop device, the device, and the FUSE mount that it may lie on.
        unmount_below(&folder);
        detach_below(&folder);
        noted_loops(&folder)
            .iter()
            .filter(|node| lies_on_nothing(node))
            .for_each(|node| detach(node));
        unmount_below(&folder);
        if fs::remove_dir_all(&folder).is_ok() {
            eprintln!("removed what a killed lab had left: {}", folder.display());
        }
    }
}

/// The file of a scratch folder that its lab keeps locked, where folder and file are this user's: where temporary files go
/// others make folders of such names, too, and a pipe in one would hold who opens it.
fn owner(folder: &Path) -> Option<File> {
    let ours = |meta: &fs::Metadata| meta.uid() == rustix::process::geteuid().as_raw();
    fs::symlink_metadata(folder).ok().filter(|meta| meta.is_dir() && ours(meta))?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(folder.join(OWNER), flags, Mode::empty()).ok()?);
    file.metadata().is_ok_and(|meta| meta.is_file() && ours(&meta)).then_some(file)
}

/// Unmounts what is mounted below a folder, the innermost first.
fn unmount_below(folder: &Path) {
    for at in mount_points().into_iter().rev().filter(|at| at.starts_with(folder)) {
        let _ = crate::process::run_short("umount", [at], &Stop::default());
    }
}

/// Detaches loop devices on files below a folder, volumes on them first.
fn detach_below(folder: &Path) {
    for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let file = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        if Path::new(file.trim()).starts_with(folder) {
            let node = Path::new("/dev").join(entry.file_name());
            volume::remove_above(&node);
            detach(&node);
        }
    }
}

fn detach(node: &Path) {
    let _ = crate::process::run_short("losetup", [Path::new("-d"), node], &Stop::default());
}

/// The loop devices that notes in the folders of a lab's sockets name.
fn noted_loops(folder: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(folder).into_iter().flatten().flatten();
    folders
        .flat_map(|entry| fs::read_dir(entry.path()).into_iter().flatten().flatten())
        .filter(|file| file.path().extension().is_some_and(|end| end == LOOP_NOTE))
        .filter_map(|file| fs::read_to_string(file.path()).ok())
        .map(|node| PathBuf::from(node.trim()))
        .filter(|node| node.starts_with("/dev"))
        .collect()
}

/// Whether a loop device's file is on a file system that is mounted nowhere: its path is then the root of nothing.
fn lies_on_nothing(node: &Path) -> bool {
    let name = node.file_name().unwrap_or_default();
    let file = Path::new("/sys/block").join(name).join("loop/backing_file");
    fs::read_to_string(file).is_ok_and(|path| path.trim() == "/")
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

/// Bytes that the file system has allocated for a file; on one without such an account all of it.
pub fn allocated(path: &Path) -> Result<u64> {
    fs::metadata(path).map(|file| file.blocks() * 512).map_err(Error::file("look at", path))
}

/// Brings everything written to `path` to the device and drops its pages from this machine's cache, so that no arm
/// inherits another's dirty or cached pages. (On tmpfs the pages are the file: nothing happens.)
pub fn settle(path: &Path) -> Result<()> {
    let file = File::open(path).map_err(Error::file("open", path))?;
    file.sync_all().map_err(Error::file("sync", path))?;
    fadvise(&file, 0, None, Advice::DontNeed)
        .map_err(|e| Error::file("drop the cache of", path)(e.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_lab_left_is_removed_and_a_living_ones_is_not() {
        let parent = tempfile::Builder::new()
            .prefix("two words ")
            .tempdir_in(env!("CARGO_MANIFEST_DIR"))
            .unwrap();
        let living = Scratch::create(parent.path(), 0).unwrap();
        let left =
            tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent.path()).unwrap().keep();
        drop(own(&left).unwrap());
        fs::write(left.join("disk.raw"), vec![0; 1 << 20]).unwrap();
        let root = rustix::process::geteuid().is_root() && Path::new("/dev/loop-control").exists();
        let device = root.then(|| {
            let file = left.join("disk.raw");
            crate::backend::loopdev::LoopDevice::attach(&file, false).unwrap()
        });
        sweep(parent.path(), GRACE);
        assert!(left.exists(), "too young to judge");
        sweep(parent.path(), Duration::ZERO);
        assert!(!left.exists());
        assert!(living.disks().exists());
        if let Some(device) = device {
            let name = device.path().file_name().unwrap().to_owned();
            let file = Path::new("/sys/block").join(name).join("loop/backing_file");
            let backing = fs::read_to_string(file).unwrap_or_default();
            assert!(!backing.contains(left.to_str().unwrap()), "still attached: {backing}");
            // It is detached already; doing it again would hit another's.
            std::mem::forget(device);
        }
    }

    /// It waited for a writer for ever.
    #[test]
    fn what_others_put_there_holds_no_sweep() {
        let parent = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let folder = parent.path().join(format!("{PREFIX}{name}"));
            fs::create_dir(&folder).unwrap();
            folder
        };
        let (piped, linked) = (make("pipe"), make("link"));
        let pipe = piped.join(OWNER);
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        fs::write(parent.path().join("file"), "").unwrap();
        std::os::unix::fs::symlink(parent.path().join("file"), linked.join(OWNER)).unwrap();
        let (ended, end) = std::sync::mpsc::channel();
        let at = parent.path().to_owned();
        std::thread::spawn(move || {
            sweep(&at, Duration::ZERO);
            let _ = ended.send(());
        });
        let swept = end.recv_timeout(Duration::from_secs(60));
        // Whoever still waits for a writer has one.
        let _ = rustix::fs::open(&pipe, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty());
        swept.expect("the sweep waits for what a pipe gives");
        assert!(piped.exists() && linked.exists(), "none of the lab's");
        if rustix::process::geteuid().is_root() {
            let others = make("others");
            drop(own(&others).unwrap());
            std::os::unix::fs::chown(others.join(OWNER), Some(12_345), None).unwrap();
            sweep(parent.path(), Duration::ZERO);
            assert!(others.exists(), "another user's");
        }
    }
}
