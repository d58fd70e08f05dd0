//! The same load straight on a file: what the kernel can do with nobody in between.

use crate::buffers::Buffers;
use crate::engine::{Done, Engine, Op};
use crate::outcome::Outcome;
use crate::{Error, LoadArgs};
use io_uring::types::Fixed;
use io_uring::{IoUring, opcode, squeue};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Opens `file` with O_DIRECT and runs the load on it.
pub fn run(args: &LoadArgs, file: &Path) -> anyhow::Result<Outcome> {
    let failed = |what| {
        let file = file.to_path_buf();
        move |source| Error::Native { what, file, source }
    };
    let mut opened = OpenOptions::new()
        .read(true)
        .write(args.rw.writes())
        .custom_flags(libc::O_DIRECT)
        .open(file)
        .map_err(failed("cannot open with O_DIRECT"))?;
    let capacity = opened.seek(SeekFrom::End(0)).map_err(failed("cannot size"))?;
    let builders = (0..args.queues)
        .map(|_| {
            let opened = &opened;
            move || Native::new(args, opened, file)
        })
        .collect();
    let tally = crate::drive(args, capacity, builders)?;
    let driver = "io_uring, O_DIRECT, registered file and buffers".into();
    Ok(Outcome::new(args, driver, file.display().to_string(), tally))
}

struct Native {
    ring: IoUring,
    buffers: Buffers,
    listed: Vec<squeue::Entry>,
    flushing: Vec<bool>,
    file: PathBuf,
}

impl Native {
    fn new(args: &LoadArgs, opened: &File, file: &Path) -> Result<Native, Error> {
        let failed = |what| {
            let file = file.to_path_buf();
            move |source| Error::Native { what, file, source }
        };
        let (len, depth) = (args.bs as usize, args.depth);
        let buffers = Buffers::anonymous(len, depth).map_err(failed("cannot get memory for"))?;
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(depth as u32)
            .map_err(failed("cannot make an io_uring for"))?;
        let submitter = ring.submitter();
        submitter.register_files(&[opened.as_raw_fd()]).map_err(failed("cannot register"))?;
        let list: Vec<_> = (0..depth)
            .map(|slot| libc::iovec { iov_base: buffers.pointer(slot).cast(), iov_len: len })
            .collect();
        // SAFETY: `buffers` is dropped after `ring` (see the order of the fields), so the kernel
        // never holds memory that is gone.
        unsafe { submitter.register_buffers(&list) }
            .map_err(failed("cannot register buffers (is `ulimit -l` too low?) for"))?;
        let listed = Vec::with_capacity(depth);
        let flushing = vec![false; depth];
        Ok(Native { ring, buffers, listed, flushing, file: file.to_path_buf() })
    }

    fn failed(&self, source: io::Error) -> Error {
        let file = self.file.clone();
        Error::Native { what: "cannot submit to", file, source }
    }
}

impl Engine for Native {
    fn list(&mut self, slot: usize, op: Op, offset: u64) {
        let (buffer, len) = (self.buffers.pointer(slot), self.buffers.len() as u32);
        self.flushing[slot] = op == Op::Flush;
        let entry = match op {
            Op::Read => {
                opcode::ReadFixed::new(Fixed(0), buffer, len, slot as u16).offset(offset).build()
            }
            Op::Write => {
                opcode::WriteFixed::new(Fixed(0), buffer, len, slot as u16).offset(offset).build()
            }
            Op::Flush => {
                opcode::Fsync::new(Fixed(0)).flags(io_uring::types::FsyncFlags::DATASYNC).build()
            }
        };
        self.listed.push(entry.user_data(slot as u64));
    }

    fn turn(&mut self, done: &mut Vec<Done>) -> Result<(), Error> {
        // SAFETY: every entry names a registered buffer of a slot that stays put and untouched
        // until its completion is seen below.
        let pushed = unsafe { self.ring.submission().push_multiple(&self.listed) };
        self.listed.clear();
        pushed.map_err(|e| self.failed(io::Error::other(e)))?;
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.failed(e)),
            }
        }
        for completion in self.ring.completion() {
            let slot = completion.user_data() as usize;
            let whole = if self.flushing[slot] { 0 } else { self.buffers.len() as i32 };
            let result = match completion.result() {
                error if error < 0 => error,
                count if count == whole => 0,
                // A file shorter than it was, or a disk that is full.
                _ => -libc::EIO,
            };
            done.push(Done { slot, result });
        }
        Ok(())
    }

    fn buffers(&mut self) -> &mut Buffers {
        &mut self.buffers
    }
}
