//! /dev/xen/gntdev: pages that frontends grant, mapped or copied.
//!
//! Source: Linux, include/uapi/xen/gntdev.h; Xen, public/grant_table.h.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, open};

use super::ioctl::{ioctl, number};
use super::pages::Pages;
use crate::vhost_user::mapping::Other;

const DEVICE: &str = "/dev/xen/gntdev";

/// Of a map with room for one reference; the driver reads as many as it is told.
const MAP: u64 = number(24, 0);
const COPY: u64 = number(16, 8);

const SOURCE_IS_GRANT: u16 = 1 << 0;
const TARGET_IS_GRANT: u16 = 1 << 1;
const FAILED: i16 = -1;

/// One copy between a granted page and memory of this process: `struct gntdev_grant_copy_segment`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Copy {
    source: u64,
    target: u64,
    len: u16,
    flags: u16,
    status: i16,
    padding: u16,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    FromFrontend,
    ToFrontend,
}

impl Copy {
    /// A copy of `len` bytes at `offset` of the page granted as `grant`; the bytes must lie in it.
    pub(crate) fn new(
        domain: u16,
        grant: u32,
        offset: u16,
        local: *mut u8,
        len: u16,
        way: Way,
    ) -> Copy {
        let foreign = u64::from(grant) | u64::from(offset) << 32 | u64::from(domain) << 48;
        let (source, target, flags) = match way {
            Way::FromFrontend => (foreign, local as u64, SOURCE_IS_GRANT),
            Way::ToFrontend => (local as u64, foreign, TARGET_IS_GRANT),
        };
        Copy { source, target, len, flags, status: FAILED, padding: 0 }
    }

    /// Grant, offset in its page, local memory, bytes, and which way they go.
    pub(crate) fn parts(&self) -> (u32, usize, *mut u8, usize, Way) {
        let (way, foreign, local) = match self.flags {
            SOURCE_IS_GRANT => (Way::FromFrontend, self.source, self.target),
            _ => (Way::ToFrontend, self.target, self.source),
        };
        let offset = usize::from((foreign >> 32) as u16);
        (foreign as u32, offset, local as *mut u8, self.len.into(), way)
    }

    /// Say whether it was made, in the driver's place.
    pub(crate) fn set_made(&mut self, made: bool) {
        self.status = if made { 0 } else { FAILED };
    }

    /// Whether it was made.
    pub(crate) fn succeeded(&self) -> bool {
        self.status == 0
    }
}

/// How pages of one domain are reached.
pub(crate) trait Foreign {
    /// The domain's number.
    fn domain(&self) -> u16;

    /// Map pages that may be written to. All or none.
    fn map(&self, grants: &[u32]) -> io::Result<Pages>;

    /// Make the copies; each says then whether it succeeded.
    ///
    /// # Safety
    /// The local memory of each is this process's, and nothing else uses it meanwhile.
    unsafe fn copy(&self, copies: &mut [Copy]) -> io::Result<()>;
}

/// The pages of a domain, by the kernel's driver.
pub(crate) struct Gntdev {
    device: Arc<OwnedFd>,
    domain: u16,
}

impl Gntdev {
    pub(crate) fn open(domain: u16) -> io::Result<Gntdev> {
        let device = open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Gntdev { device: Arc::new(device), domain })
    }
}

impl Foreign for Gntdev {
    fn domain(&self) -> u16 {
        self.domain
    }

    fn map(&self, grants: &[u32]) -> io::Result<Pages> {
        let counted = Other::take().map_err(io::Error::other)?;
        // Count, then where the driver puts the index, then domain and reference of each.
        let mut argument = vec![grants.len() as u64, 0];
        let reference = |grant: &u32| u64::from(self.domain) | u64::from(*grant) << 32;
        argument.extend(grants.iter().map(reference));
        ioctl(&self.device, MAP, argument.as_mut_ptr())?;
        Pages::granted(self.device.clone(), argument[1], grants.len(), counted)
    }

    unsafe fn copy(&self, copies: &mut [Copy]) -> io::Result<()> {
        let mut argument = [copies.len() as u64, copies.as_mut_ptr() as u64];
        ioctl(&self.device, COPY, argument.as_mut_ptr())
    }
}

#[cfg(test)]
mod tests {
    use super::super::ioctl::UNMAP;
    use super::*;

    #[test]
    fn requests_have_the_numbers_and_sizes_of_the_header() {
        assert_eq!((MAP, UNMAP, COPY), (0x18_4700, 0x10_4701, 0x10_4708));
        assert_eq!(size_of::<Copy>(), 24);
        let copy = Copy::new(5, 0x0102_0304, 512, std::ptr::null_mut(), 1024, Way::ToFrontend);
        assert_eq!((copy.target, copy.source), (0x0005_0200_0102_0304, 0));
        assert!(!copy.succeeded(), "what was never made did not succeed");
    }
}
