//! What the kernel tells of a file.

use std::fs;
use std::io;
use std::os::fd::AsFd;

use ringtap_io::{OpenFile, PAGE};
use rustix::fs::{AtFlags, SeekFrom, StatxFlags};

const STATX_DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);

/// tmpfs never waits for a disk but does not tell io_uring so, which then hands each request to a
/// worker thread. With O_NONBLOCK set io_uring tries at once, and that is all it takes. Gives
/// whether it is tmpfs.
pub(super) fn work_in_memory_inline(file: &fs::File) -> io::Result<bool> {
    const TMPFS: u64 = 0x0102_1994;
    let in_memory = rustix::fs::fstatfs(file)?.f_type as u64 == TMPFS;
    if in_memory {
        let flags = rustix::fs::fcntl_getfl(file)?;
        rustix::fs::fcntl_setfl(file, flags | rustix::fs::OFlags::NONBLOCK)?;
    }
    Ok(in_memory)
}

/// What the kernel says of the disk that it is or lies on; false where there is no one disk (tmpfs,
/// btrfs, a network).
pub(super) fn on_rotating_medium(file: &OpenFile) -> io::Result<bool> {
    let facts = rustix::fs::fstat(file)?;
    let is_device = rustix::fs::FileType::from_raw_mode(facts.st_mode).is_block_device();
    let device = if is_device { facts.st_rdev } else { facts.st_dev };
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    // A partition has no queue of its own: its disk has, one folder up.
    let told = ["queue", "../queue"].iter().find_map(|queue| {
        fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{queue}/rotational")).ok()
    });
    Ok(told.is_some_and(|told| told.trim() == "1"))
}

pub(super) fn len_of(file: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, SeekFrom::End(0))?)
}

/// The multiples that O_DIRECT asks of offsets and of memory: what the kernel says (Linux 6.1, ext4,
/// xfs, block devices), else what a read turns out to need.
pub(super) fn direct_alignment(file: &OpenFile) -> io::Result<(u64, usize)> {
    if let Ok(facts) = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, STATX_DIOALIGN) {
        let known = facts.stx_mask & STATX_DIOALIGN.bits() != 0;
        if known && facts.stx_dio_offset_align != 0 {
            return Ok((
                u64::from(facts.stx_dio_offset_align),
                facts.stx_dio_mem_align.max(1) as usize,
            ));
        }
    }
    let mut memory = vec![0u8; 3 * PAGE];
    let start = memory.as_ptr().align_offset(PAGE);
    for align in [1, 512, PAGE] {
        let buffer = &mut memory[start + align % PAGE..][..align];
        match rustix::io::pread(file, buffer, (align % PAGE) as u64) {
            Ok(_) => return Ok((align as u64, align)),
            Err(rustix::io::Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok((PAGE as u64, PAGE))
}
