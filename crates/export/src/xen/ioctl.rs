//! Requests to /dev/xen/gntdev.
//!
//! Source: Linux, include/uapi/xen/gntdev.h.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Numbers as ioctls without a direction have them: size, letter, number.
pub(super) const fn number(size: usize, number: u64) -> u64 {
    (size as u64) << 16 | (b'G' as u64) << 8 | number
}

pub(super) const UNMAP: u64 = number(16, 1);

pub(super) fn ioctl(device: &OwnedFd, request: u64, argument: *mut u64) -> io::Result<()> {
    // SAFETY: the callers hand over what the request of that number reads and writes.
    match unsafe { libc::ioctl(device.as_raw_fd(), request, argument) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Take grants out of the device's list. They must be mapped no more.
pub(super) fn forget(device: &OwnedFd, index: u64, count: usize) {
    let mut argument = [index, count as u64];
    if let Err(error) = ioctl(device, UNMAP, argument.as_mut_ptr()) {
        tracing::debug!("cannot give up {count} grants: {error}");
    }
}
