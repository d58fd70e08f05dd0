//! Raw images: the disk's bytes as they are, in a file or on a block device.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};

use ringtap_io::{File, Io, Nature, Op, OpenFile, PAGE};
use rustix::fs::{AtFlags, SeekFrom, StatxFlags};

use crate::{Boxed, Discard, Error, Extent, Image, Info, OpenError, OpenOptions, Status, lock};

const STATX_DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);

/// A raw image.
#[derive(Clone)]
pub struct Raw {
    file: File,
    /// The open file behind it; none where a simulation provides it.
    open: Option<Arc<lock::Locked>>,
    info: Info,
    lacks: Arc<Lacks>,
    /// A sync of the page cache failed. Linux then takes the lost pages for clean, so the next sync
    /// would succeed and lie: none is believed any more.
    lost: Arc<AtomicBool>,
}

/// What the file system turned out not to do.
#[derive(Default)]
struct Lacks {
    punch: AtomicBool,
    zero_range: AtomicBool,
    allocate: AtomicBool,
}

impl Raw {
    /// Open and lock a regular file or a block device.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Raw, OpenError> {
        let failed = |what| {
            let path: PathBuf = path.to_owned();
            move |source: io::Error| OpenError::Os { what, path, source }
        };
        let kind = fs::metadata(path).map_err(failed("open"))?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            let found = if kind.is_dir() { "directory" } else { "special file" };
            return Err(OpenError::Kind { path: path.to_owned(), found });
        }
        let flags = if options.cache.direct() { libc::O_DIRECT } else { 0 };
        let file = fs::File::options()
            .read(true)
            .write(!options.read_only)
            .custom_flags(flags | libc::O_CLOEXEC)
            .open(path)
            .map_err(failed("open"))?;
        let in_memory =
            work_in_memory_inline(&file).map_err(failed("look at the file system of"))?;
        let open = OpenFile::new(OwnedFd::from(file));
        open.set_nature(Nature { in_memory, page_cache: !options.cache.direct() });
        let file = lock::lock(open, path, !options.read_only)?;
        let size = size_of(&*file).map_err(failed("find the size of"))?;
        let (request_alignment, memory_alignment) = if options.cache.direct() {
            direct_alignment(&file).map_err(failed("find the O_DIRECT alignment of"))?
        } else {
            (1, 1)
        };
        let (logical, physical) = if kind.is_block_device() {
            (
                rustix::fs::ioctl_blksszget(&*file).unwrap_or(512),
                rustix::fs::ioctl_blkpbszget(&*file).unwrap_or(4096),
            )
        } else {
            (512, 4096)
        };
        let logical = logical.max(request_alignment as u32);
        let discard_alignment =
            if kind.is_block_device() { u64::from(logical) } else { request_alignment };
        let info = Info {
            format: "raw",
            size: size.next_multiple_of(512),
            read_only: options.read_only,
            request_alignment,
            memory_alignment,
            discard_alignment,
            logical_block_size: logical,
            physical_block_size: physical.max(logical),
            discard: true,
            fast_zero: true,
        };
        let handle = file.handle();
        Ok(Raw { open: Some(Arc::new(file)), ..Raw::simulated(handle, info) })
    }

    /// A raw image on a file that only the reactor knows, with the given facts.
    pub fn simulated(file: File, info: Info) -> Raw {
        Raw { file, open: None, info, lacks: Arc::default(), lost: Arc::default() }
    }

    async fn try_op(&self, io: &Io, op: Op, lacks: &AtomicBool) -> Result<(), Error> {
        if lacks.load(Relaxed) {
            return Err(Error::Unsupported);
        }
        let end = io.to_the_end(op).await.map_err(Error::from_errno);
        if end == Err(Error::Unsupported) {
            lacks.store(true, Relaxed);
        }
        end
    }

    async fn discard_range(
        &self,
        io: &Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Result<(), Error> {
        let (file, lacks) = (self.file, &*self.lacks);
        let punch = || self.try_op(io, Op::PunchHole { file, offset, len }, &lacks.punch);
        let zero = || self.try_op(io, Op::ZeroRange { file, offset, len }, &lacks.zero_range);
        match mode {
            Discard::Free => match punch().await {
                Err(Error::Unsupported) => Ok(()),
                end => end,
            },
            Discard::Zero { unmap: true } => match punch().await {
                Err(Error::Unsupported) => zero().await,
                end => end,
            },
            Discard::Zero { unmap: false } => match zero().await {
                Err(Error::Unsupported) if !lacks.allocate.load(Relaxed) => {
                    punch().await?;
                    self.try_op(io, Op::Allocate { file, offset, len }, &lacks.allocate).await
                }
                end => end,
            },
        }
    }
}

impl Image for Raw {
    fn info(&self) -> &Info {
        &self.info
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(self.clone())
    }

    fn map(&self, offset: u64, len: u64) -> Extent {
        Extent::Data { file: self.file, offset, len, writable: true }
    }

    fn flush<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async move {
            let lost = Error::Os(libc::EIO);
            if self.lost.load(SeqCst) {
                return Err(lost);
            }
            let end = io.sync(self.file).await.map_err(Error::from_errno);
            if end.is_err() && self.info.request_alignment == 1 {
                self.lost.store(true, SeqCst);
            }
            // One beside us may have failed meanwhile, and taken the error that was ours too.
            if end.is_ok() && self.lost.load(SeqCst) { Err(lost) } else { end }
        })
    }

    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.discard_range(io, offset, len, mode))
    }

    fn status(&self, offset: u64, len: u64) -> Result<Status, Error> {
        let all_data = Status { len, allocated: true, zero: false };
        let Some(open) = &self.open else { return Ok(all_data) };
        let seek = |from| rustix::fs::seek(&***open, from);
        let end = offset + len;
        // The size is rounded up to 512; the file ends where it ends, and zeros follow.
        let hole_to = |to: u64| Status { len: to.min(end) - offset, allocated: false, zero: true };
        match seek(SeekFrom::Data(offset)) {
            Ok(data) if data > offset => Ok(hole_to(data)),
            Ok(_) => match seek(SeekFrom::Hole(offset)) {
                Ok(hole) if hole > offset => Ok(Status { len: hole.min(end) - offset, ..all_data }),
                _ => Ok(all_data),
            },
            Err(rustix::io::Errno::NXIO) => Ok(hole_to(end)),
            // A block device, or a file system that cannot tell: all of it may be data.
            Err(_) => Ok(all_data),
        }
    }

    fn current_size(&self) -> Result<u64, Error> {
        let Some(open) = &self.open else { return Ok(self.info.size) };
        let size = size_of(&***open)
            .map_err(|error| Error::from_errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
        // A write to an incomplete last block made the file longer, not the disk.
        let whole = self.info.size.next_multiple_of(self.info.request_alignment);
        if size > self.info.size && size <= whole {
            return Ok(self.info.size);
        }
        Ok(size.next_multiple_of(512))
    }
}

/// tmpfs never waits for a disk but does not tell io_uring so, which then hands each request to a
/// worker thread. With O_NONBLOCK set io_uring tries at once, and that is all it takes. Gives
/// whether it is tmpfs.
fn work_in_memory_inline(file: &fs::File) -> io::Result<bool> {
    const TMPFS: u64 = 0x0102_1994;
    let in_memory = rustix::fs::fstatfs(file)?.f_type as u64 == TMPFS;
    if in_memory {
        let flags = rustix::fs::fcntl_getfl(file)?;
        rustix::fs::fcntl_setfl(file, flags | rustix::fs::OFlags::NONBLOCK)?;
    }
    Ok(in_memory)
}

fn size_of(file: impl std::os::fd::AsFd) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, SeekFrom::End(0))?)
}

/// The multiples that O_DIRECT asks of offsets and of memory: what the kernel says (Linux 6.1, ext4,
/// xfs, block devices), else what a read turns out to need.
fn direct_alignment(file: &OpenFile) -> io::Result<(u64, usize)> {
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
