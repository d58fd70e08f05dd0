//! Messages of the FUSE device, as far as one file needs them.
//!
//! Source: Linux, include/uapi/linux/fuse.h, versions 7.23 and later. Integers are in the machine's
//! own order. What the kernel sends is read field by field, with a length check for each: a kernel
//! newer than this code may send longer messages, never shorter ones.

use std::time::Duration;

/// The one node: the file itself.
pub(crate) const ROOT: u64 = 1;
pub(crate) const MAJOR: u32 = 7;
/// The newest version this code was written to.
pub(crate) const MINOR: u32 = 38;
/// The oldest with everything used here (FUSE_LSEEK).
pub(crate) const OLDEST_MINOR: u32 = 24;

/// `struct fuse_in_header`.
pub(crate) const IN_HEADER: usize = 40;
/// `struct fuse_in_header` and `struct fuse_write_in`: a write's bytes follow.
pub(crate) const WRITE_HEADER: usize = IN_HEADER + 40;
/// `struct fuse_out_header`.
pub(crate) const OUT_HEADER: usize = 16;

pub(crate) mod op {
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const LSEEK: u32 = 46;
}

pub(crate) mod init_flag {
    pub(crate) const ASYNC_READ: u32 = 1 << 0;
    pub(crate) const BIG_WRITES: u32 = 1 << 5;
    pub(crate) const ASYNC_DIO: u32 = 1 << 15;
    pub(crate) const MAX_PAGES: u32 = 1 << 22;
}

pub(crate) mod open_flag {
    /// No page cache: the disk may be served over other transports at the same time.
    pub(crate) const DIRECT_IO: u32 = 1 << 0;
    /// Writes of one file need not wait for one another.
    pub(crate) const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

pub(crate) mod set {
    pub(crate) const MODE: u32 = 1 << 0;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const MTIME: u32 = 1 << 5;
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
}

/// FUSE_NOTIFY_INVAL_INODE, in the error field of a message that nobody asked for.
const INVALIDATE_INODE: i32 = 2;

/// The header of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    /// Bytes of the whole message, as it says itself.
    pub(crate) len: usize,
    pub(crate) opcode: u32,
    pub(crate) unique: u64,
    pub(crate) node: u64,
}

/// A field of `bytes`; none where they end before it.
fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    field(bytes, at).map(u32::from_ne_bytes)
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    field(bytes, at).map(u64::from_ne_bytes)
}

impl Head {
    /// The header of a message; none where the message is shorter than one.
    pub(crate) fn parse(message: &[u8]) -> Option<Head> {
        message.get(..IN_HEADER)?;
        Some(Head {
            len: u32_at(message, 0)? as usize,
            opcode: u32_at(message, 4)?,
            unique: u64_at(message, 8)?,
            node: u64_at(message, 16)?,
        })
    }
}

/// What the kernel said of itself in INIT, and what it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Init {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) readahead: u32,
    pub(crate) flags: u32,
}

impl Init {
    pub(crate) fn parse(arguments: &[u8]) -> Option<Init> {
        Some(Init {
            major: u32_at(arguments, 0)?,
            minor: u32_at(arguments, 4)?,
            readahead: u32_at(arguments, 8)?,
            flags: u32_at(arguments, 12)?,
        })
    }

    /// `struct fuse_init_out`.
    pub(crate) fn answer(&self, background: u16, most: u32) -> Vec<u8> {
        use init_flag::{ASYNC_DIO, ASYNC_READ, BIG_WRITES, MAX_PAGES};
        let mut out = Vec::with_capacity(64);
        let flags = self.flags & (ASYNC_READ | BIG_WRITES | ASYNC_DIO | MAX_PAGES);
        for word in [MAJOR, MINOR.min(self.minor), self.readahead, flags] {
            out.extend(word.to_ne_bytes());
        }
        // Requests in the background; from three quarters of that on the kernel calls it congested.
        out.extend(background.to_ne_bytes());
        out.extend((background / 4 * 3).to_ne_bytes());
        out.extend(most.to_ne_bytes());
        // Times are in nanoseconds.
        out.extend(1u32.to_ne_bytes());
        out.extend(((most / 4096) as u16).to_ne_bytes());
        out.resize(64, 0);
        out
    }
}

/// What `stat` shows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes {
    pub(crate) size: u64,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Blocks of 512 bytes that it takes.
    pub(crate) blocks: u64,
    /// Since 1970, of all three times.
    pub(crate) time: Duration,
    pub(crate) block: u32,
}

impl Attributes {
    /// `struct fuse_attr_out`. Not to be kept for any time: the disk may be resized.
    pub(crate) fn answer(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(104);
        // How long it may be kept: seconds, nanoseconds, padding.
        out.extend([0; 16]);
        let times = [self.time.as_secs(); 3];
        for long in [ROOT, self.size, self.blocks].into_iter().chain(times) {
            out.extend(long.to_ne_bytes());
        }
        // The times' nanoseconds, then mode, links, owner, group, device, block size, flags.
        let mode = libc::S_IFREG | self.mode;
        let words = [mode, 1, self.uid, self.gid, 0, self.block, 0];
        for word in [self.time.subsec_nanos(); 3].into_iter().chain(words) {
            out.extend(word.to_ne_bytes());
        }
        out
    }
}

/// `struct fuse_statfs_out` of a file system that is one full file.
pub(crate) fn statfs_answer(size: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(80);
    for long in [size.div_ceil(4096), 0, 0, 1, 0] {
        out.extend(long.to_ne_bytes());
    }
    for word in [4096u32, 255, 4096] {
        out.extend(word.to_ne_bytes());
    }
    out.resize(80, 0);
    out
}

/// `struct fuse_out_header`, of an answer with `len` bytes after it; `error` is an errno or 0.
pub(crate) fn answer_header(unique: u64, error: i32, len: usize) -> [u8; OUT_HEADER] {
    out_header(unique, -error, len)
}

fn out_header(unique: u64, error: i32, len: usize) -> [u8; OUT_HEADER] {
    let mut out = [0; OUT_HEADER];
    out[0..4].copy_from_slice(&((OUT_HEADER + len) as u32).to_ne_bytes());
    out[4..8].copy_from_slice(&error.to_ne_bytes());
    out[8..16].copy_from_slice(&unique.to_ne_bytes());
    out
}

/// The message by which the kernel forgets what it knows of the file's size.
pub(crate) fn forget_size() -> Vec<u8> {
    let mut out = out_header(0, INVALIDATE_INODE, 24).to_vec();
    out.extend(ROOT.to_ne_bytes());
    // An offset below 0: the attributes alone.
    out.extend((-1i64).to_ne_bytes());
    out.extend(0i64.to_ne_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_have_the_lengths_the_kernel_checks() {
        let init = Init { major: 7, minor: 45, readahead: 4096, flags: u32::MAX };
        let answer = init.answer(256, 1 << 20);
        assert_eq!(answer.len(), 64);
        assert_eq!(u32_at(&answer, 4), Some(MINOR));
        assert_eq!(u32_at(&answer, 20), Some(1 << 20));
        let (size, blocks, time) = (1 << 30, 24, Duration::new(7, 9));
        let attributes =
            Attributes { size, blocks, mode: 0o600, uid: 0, gid: 0, time, block: 4096 };
        let answer = attributes.answer();
        assert_eq!(
            (answer.len(), u32_at(&answer, 32), u32_at(&answer, 48)),
            (104, Some(24), Some(7))
        );
        assert_eq!(u32_at(&answer, 68), Some(9));
        assert_eq!(statfs_answer(4097).len(), 80);
        assert_eq!(forget_size().len(), 40);
        assert_eq!(u32_at(&forget_size(), 0), Some(40));
    }

    #[test]
    fn an_old_kernel_is_answered_in_its_own_version() {
        let init = Init { major: 7, minor: 31, readahead: 0, flags: 0 };
        let answer = init.answer(12, 4096);
        assert_eq!((u32_at(&answer, 4), u32_at(&answer, 12)), (Some(31), Some(0)));
    }
}
