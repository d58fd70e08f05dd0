//! A mount namespace of the server's own, in which its devices are not mounted.
//!
//! The last process of a mount namespace unmounts, as it ends, what is mounted there. Where that is a
//! file system on a device this process serves (in a container, say), it would have to write to the
//! device, and wait for itself. Those stay that hold files of the server's own: such a disk is not served by
//! it.
//!
//! Source: ublksrv, README, "mount namespace caveat"; mount_namespaces(7).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, major, minor, open};
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::fuse::{MountEntry, mounts};

/// Disks on disks on disks, at most.
const DEEPEST: u32 = 16;

/// Leave the mount namespace for one of our own, which learns what is unmounted in the old one. Before the
/// first thread is started: those that are there stay.
pub fn leave_mount_namespace() -> io::Result<()> {
    // SAFETY: it takes no descriptor from anybody.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS)? };
    Ok(mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?)
}

/// Have nothing mounted in that namespace that lies on a ublk device, unless a file is open in it, or one of
/// `places` is there. Once all files are open, and before any device is served.
pub fn let_go_of_disks<'a>(places: impl IntoIterator<Item = &'a Path>) -> io::Result<()> {
    let mounts = mounts()?;
    let held: Vec<OwnedFd> = places.into_iter().filter_map(nearest).collect();
    let used = used_mounts()?;
    drop(held);
    let is_used = |mount: &MountEntry| {
        // What is mounted on another goes with it.
        let mut those = mounts.iter().filter(|other| used.contains(&other.id));
        those.any(|other| other.place.starts_with(&mount.place))
    };
    // What is mounted on another mount comes after it.
    for mount in mounts.iter().rev().filter(|mount| lies_on_ublk(mount) && !is_used(mount)) {
        let place = &mount.place;
        if let Err(error) = ringtap_sandbox::let_go(place).unwrap_or_else(|| detach(place)) {
            tracing::warn!("cannot let go of {}: {error}", mount.place.display());
        }
    }
    Ok(())
}

fn detach(place: &Path) -> io::Result<()> {
    Ok(unmount(place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?)
}

/// The same of one mount, for who may not: if it is there, and lies on a ublk device.
pub fn let_go_of(place: &Path) -> io::Result<()> {
    let mounts = mounts()?;
    match mounts.iter().any(|mount| mount.place == place && lies_on_ublk(mount)) {
        true => detach(place),
        false => Err(rustix::io::Errno::PERM.into()),
    }
}

/// The nearest to a path of what is there of it, to hold on to.
fn nearest(path: &Path) -> Option<OwnedFd> {
    let path = std::path::absolute(path).ok()?;
    path.ancestors().find_map(|path| open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok())
}

/// The numbers of the mounts in which this process has files.
fn used_mounts() -> io::Result<Vec<u64>> {
    let mut used = vec![];
    for entry in fs::read_dir("/proc/self/fdinfo")? {
        // The folder itself is one of them, and gone by then.
        let facts = fs::read_to_string(entry?.path()).unwrap_or_default();
        let number = facts.lines().find_map(|line| line.strip_prefix("mnt_id:"));
        used.extend(number.and_then(|number| number.trim().parse::<u64>().ok()));
    }
    Ok(used)
}

fn lies_on_ublk(mount: &MountEntry) -> bool {
    // File systems over several devices have a number that is none of theirs.
    let source = fs::metadata(&mount.source).ok().filter(|meta| meta.file_type().is_block_device());
    let number = source.map_or(mount.device, |meta| (major(meta.rdev()), minor(meta.rdev())));
    mount.place != Path::new("/") && is_ublk(&numbered(number), DEEPEST)
}

fn numbered((major, minor): (u32, u32)) -> PathBuf {
    format!("/sys/dev/block/{major}:{minor}").into()
}

/// Whether a block device, named in sysfs, is one of ublk's, a part of one, or lies on one.
fn is_ublk(device: &Path, depth: u32) -> bool {
    let (Some(depth), Ok(device)) = (depth.checked_sub(1), device.canonicalize()) else {
        return false;
    };
    let named = |part: &std::ffi::OsStr| part.to_string_lossy().starts_with("ublkb");
    if device.iter().any(named) {
        return true;
    }
    // What is told of a part of a disk is told of the whole one, a folder above.
    let mut below = vec![];
    for whole in [Some(device.as_path()), device.parent()].into_iter().flatten() {
        if let Ok(file) = fs::read_to_string(whole.join("loop/backing_file")) {
            let below_it = fs::metadata(file.trim_end()).map(|meta| meta.dev());
            below.extend(below_it.map(|dev| numbered((major(dev), minor(dev)))).ok());
        }
        let slaves = fs::read_dir(whole.join("slaves")).into_iter().flatten().flatten();
        below.extend(slaves.map(|slave| slave.path()));
    }
    below.iter().any(|device| is_ublk(device, depth))
}
