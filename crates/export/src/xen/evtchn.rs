//! /dev/xen/evtchn: being called by a frontend, and calling it.
//!
//! Source: Linux, include/uapi/xen/evtchn.h. A port that has called is silent until it is written
//! back.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use ringtap_io::OpenFile;
use rustix::fs::{Mode, OFlags, open};

const DEVICE: &str = "/dev/xen/evtchn";

const fn number(size: usize, number: u64) -> u64 {
    (size as u64) << 16 | (b'E' as u64) << 8 | number
}

const BIND_INTERDOMAIN: u64 = number(8, 1);
const NOTIFY: u64 = number(4, 4);

/// One port, on a file of its own.
pub(crate) struct Port {
    pub(crate) file: OpenFile,
    port: u32,
    silent: Cell<bool>,
}

fn ioctl(device: &impl AsFd, request: u64, argument: &mut [u32; 2]) -> io::Result<u32> {
    let fd = device.as_fd().as_raw_fd();
    // SAFETY: both requests read no more than two words.
    let result = unsafe { libc::ioctl(fd, request, argument.as_mut_ptr()) };
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

impl Port {
    /// Bind to a port of another domain.
    pub(crate) fn bind(domain: u16, remote: u32) -> io::Result<Port> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = OpenFile::new(open(DEVICE, flags, Mode::empty())?);
        let port = ioctl(&file, BIND_INTERDOMAIN, &mut [domain.into(), remote])?;
        Ok(Port { file, port, silent: Cell::new(false) })
    }

    /// Call the other side.
    pub(crate) fn notify(&self) -> io::Result<()> {
        ioctl(&self.file, NOTIFY, &mut [self.port, 0]).map(drop)
    }

    /// Take the calls that have come. It stays silent until [`Port::listen`].
    pub(crate) fn take(&self) {
        let mut calls = [0; 8];
        // Nothing there: whoever waits for a call waits on.
        if rustix::io::read(&self.file, &mut calls).is_ok() {
            self.silent.set(true);
        }
    }

    /// Let the other side call again.
    pub(crate) fn listen(&self) -> io::Result<()> {
        if self.silent.replace(false) {
            rustix::io::write(&self.file, &self.port.to_ne_bytes())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_numbers_of_the_header() {
        assert_eq!((BIND_INTERDOMAIN, NOTIFY), (0x08_4501, 0x04_4504));
    }
}
