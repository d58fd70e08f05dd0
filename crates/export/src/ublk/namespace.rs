//! A mount namespace of the server's own, in which its devices are not mounted.
//!
//! The last process of a mount namespace unmounts, as it ends, what is mounted there. Where that is a
//! file system on a device this process serves (in a container, say), it would have to write to the
//! device, and wait for itself.
//!
//! Source: ublksrv, README, "mount namespace caveat"; mount_namespaces(7).

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::fuse::{MountEntry, mounts};

/// Disks on disks on disks, at most.
const DEEPEST: u32 = 16;

/// Leave the mount namespace for one of our own, which learns what is unmounted in the old one, and in
/// which nothing that lies on a ublk device is mounted. Before the first thread is started: those
/// that are there stay.
pub fn leave_mount_namespace() -> io::Result<()> {
    // SAFETY: it takes no descriptor from anybody.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS)? };
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    // What is mounted on another mount comes after it.
    for mount in mounts()?.iter().rev().filter(|mount| lies_on_ublk(mount)) {
        if let Err(error) = unmount(&mount.place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            tracing::warn!("cannot let go of {}: {error}", mount.place.display());
        }
    }
    Ok(())
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
