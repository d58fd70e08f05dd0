//! From a message of the FUSE device to a request, or to its answer where no disk is asked.

use std::sync::Arc;
use std::time::Duration;

use ringtap_io::{Io, Mem};
use ringtap_vbd::{Error, Kind, Request, Vbd};

use super::shown::Shown;
use super::wire::{self, Attributes, Head, op, set, u32_at, u64_at};

/// What becomes of a message.
#[derive(Debug)]
pub(crate) enum Asked {
    /// It is a request for the device; what to answer when that has ended well.
    Device(Request, Answer),
    /// Where the next data, or the next hole, begins.
    Seek {
        /// From here on.
        offset: u64,
        /// Data, not a hole.
        data: bool,
    },
    /// It is answered here.
    Answer(Vec<u8>),
    /// It cannot be done: an errno.
    Failed(i32),
    /// It wants no answer.
    Nothing,
}

/// What follows the header of the answer to a request that ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Nothing.
    Empty,
    /// So many bytes of the slot's memory.
    Data(usize),
    /// The number of bytes that were written.
    Written(u32),
}

/// The facts of the file.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) read_only: bool,
    pub(crate) growable: bool,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) shown: Arc<Shown>,
}

/// Understand one message. `arguments` is what follows its header (without a write's bytes),
/// `carried` how many bytes of a write came with it, `memory` gives the slot's memory, so many
/// bytes of it.
pub(crate) fn understand(
    head: Head,
    arguments: &[u8],
    carried: usize,
    memory: impl Fn(usize) -> Mem,
    vbd: &Vbd,
    facts: &Facts,
) -> Asked {
    let message = Message { head, arguments, vbd, facts };
    message.understand(carried, memory).unwrap_or(Asked::Failed(libc::EINVAL))
}

struct Message<'a> {
    head: Head,
    arguments: &'a [u8],
    vbd: &'a Vbd,
    facts: &'a Facts,
}

impl Message<'_> {
    /// None where the message is too short for what it wants.
    fn understand(&self, carried: usize, memory: impl Fn(usize) -> Mem) -> Option<Asked> {
        let opcode = self.head.opcode;
        if matches!(opcode, op::FORGET | op::BATCH_FORGET) {
            return Some(Asked::Nothing);
        }
        if matches!(opcode, op::STATFS | op::DESTROY | op::RELEASE) {
            let statfs = opcode == op::STATFS;
            let answer = if statfs { wire::statfs_answer(self.vbd.size()) } else { vec![] };
            return Some(Asked::Answer(answer));
        }
        if self.head.node != wire::ROOT {
            return Some(Asked::Failed(libc::ENOENT));
        }
        match opcode {
            op::GETATTR => Some(Asked::Answer(self.attributes().answer())),
            op::SETATTR => self.set_attributes(),
            op::OPEN => self.open(),
            op::READ => self.read(memory),
            op::WRITE => self.write(carried, memory),
            op::FSYNC => Some(device(Kind::Flush, 0, 0, Mem::EMPTY, Answer::Empty)),
            op::FALLOCATE => self.fallocate(),
            op::LSEEK => self.seek(),
            // The kernel takes it that all of the kind are of no use here, and asks no more.
            _ => Some(Asked::Failed(libc::ENOSYS)),
        }
    }

    fn attributes(&self) -> Attributes {
        let size = self.vbd.size();
        Attributes {
            size,
            mode: self.facts.mode,
            uid: self.facts.uid,
            gid: self.facts.gid,
            blocks: self.facts.shown.blocks(size),
            time: self.facts.shown.modified(self.vbd),
            block: self.vbd.info().physical_block_size.clamp(512, 1 << 20),
        }
    }

    /// The time of the last change may be set, the owner is the server's. A disk keeps its size, or grows
    /// where it may; it is never made smaller.
    fn set_attributes(&self) -> Option<Asked> {
        let wanted = u32_at(self.arguments, 0)?;
        if wanted & (set::MODE | set::UID | set::GID) != 0 {
            return Some(Asked::Failed(libc::EPERM));
        }
        let size = u64_at(self.arguments, 16)?;
        if wanted & set::SIZE != 0 && size != self.vbd.size() {
            if self.facts.read_only {
                return Some(Asked::Failed(libc::EROFS));
            }
            if size < self.vbd.size() || !self.facts.growable {
                return Some(Asked::Failed(libc::EPERM));
            }
            if let Err(failed) = self.reach(size) {
                return Some(failed);
            }
        }
        if wanted & set::MTIME != 0 {
            let (seconds, nanos) = (u64_at(self.arguments, 40)?, u32_at(self.arguments, 60)?);
            let given = (wanted & set::MTIME_NOW == 0).then(|| {
                Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanos.into()))
            });
            self.facts.shown.set_modified(self.vbd, given);
        }
        Some(Asked::Answer(self.attributes().answer()))
    }

    fn open(&self) -> Option<Asked> {
        let flags = u32_at(self.arguments, 0)? as i32;
        if self.facts.read_only && flags & libc::O_ACCMODE != libc::O_RDONLY {
            return Some(Asked::Failed(libc::EROFS));
        }
        use wire::open_flag::{DIRECT_IO, PARALLEL_DIRECT_WRITES};
        // A handle, flags, padding.
        let mut out = vec![0; 16];
        out[8..12].copy_from_slice(&(DIRECT_IO | PARALLEL_DIRECT_WRITES).to_ne_bytes());
        Some(Asked::Answer(out))
    }

    fn read(&self, memory: impl Fn(usize) -> Mem) -> Option<Asked> {
        let (offset, wanted) = (u64_at(self.arguments, 8)?, u32_at(self.arguments, 16)? as usize);
        let len = self.within(offset, wanted as u64);
        let mem = memory(len as usize);
        if wanted > memory(wanted).len() {
            return Some(Asked::Failed(libc::EINVAL));
        }
        if len == 0 {
            return Some(Asked::Answer(vec![]));
        }
        Some(device(Kind::Read, offset, len, mem, Answer::Data(len as usize)))
    }

    /// As a block device does, unless it may grow: what lies past the end is not written, and if that
    /// is all of it there is no space.
    fn write(&self, carried: usize, memory: impl Fn(usize) -> Mem) -> Option<Asked> {
        let (offset, wanted) = (u64_at(self.arguments, 8)?, u32_at(self.arguments, 16)? as usize);
        if wanted != carried || wanted > memory(wanted).len() {
            return Some(Asked::Failed(libc::EINVAL));
        }
        if wanted == 0 {
            // How many were written, and padding.
            return Some(Asked::Answer(vec![0; 8]));
        }
        if let Err(failed) = self.reach(offset.saturating_add(wanted as u64)) {
            return Some(failed);
        }
        let len = self.within(offset, wanted as u64);
        if len == 0 {
            return Some(Asked::Failed(libc::ENOSPC));
        }
        let durable = u32_at(self.arguments, 32)? as i32 & libc::O_DSYNC != 0;
        let mem = memory(len as usize);
        let request = Request { kind: Kind::Write, offset, len, mem, fua: durable };
        Some(Asked::Device(request, Answer::Written(len as u32)))
    }

    fn fallocate(&self) -> Option<Asked> {
        let (offset, len) = (u64_at(self.arguments, 8)?, u64_at(self.arguments, 16)?);
        let mode = u32_at(self.arguments, 24)? as i32;
        let (keep, punch, zero) =
            (libc::FALLOC_FL_KEEP_SIZE, libc::FALLOC_FL_PUNCH_HOLE, libc::FALLOC_FL_ZERO_RANGE);
        let unmap = match mode {
            _ if mode == punch | keep => true,
            _ if mode & !keep == zero => false,
            _ => return Some(Asked::Failed(libc::EOPNOTSUPP)),
        };
        if mode & keep == 0 {
            if let Err(failed) = self.reach(offset.saturating_add(len)) {
                return Some(failed);
            }
        }
        let inside = self.within(offset, len);
        if inside < len && mode & keep == 0 {
            return Some(Asked::Failed(libc::ENOSPC));
        }
        if inside == 0 {
            return Some(Asked::Answer(vec![]));
        }
        let kind = Kind::WriteZeroes { unmap, fast: false };
        Some(device(kind, offset, inside, Mem::EMPTY, Answer::Empty))
    }

    /// SEEK_DATA and SEEK_HOLE: the kernel does the others by itself.
    fn seek(&self) -> Option<Asked> {
        let (offset, whence) = (u64_at(self.arguments, 8)?, u32_at(self.arguments, 16)? as i32);
        Some(match whence {
            libc::SEEK_DATA => Asked::Seek { offset, data: true },
            libc::SEEK_HOLE => Asked::Seek { offset, data: false },
            _ => Asked::Failed(libc::EINVAL),
        })
    }

    /// Have the disk reach to `end`, where it may grow.
    fn reach(&self, end: u64) -> Result<(), Asked> {
        if !self.facts.growable || end <= self.vbd.size() {
            return Ok(());
        }
        self.vbd.grow(end).map_err(|error| Asked::Failed(error.errno()))
    }

    /// How many of `len` bytes from `offset` lie on the disk.
    fn within(&self, offset: u64, len: u64) -> u64 {
        len.min(self.vbd.size().saturating_sub(offset))
    }
}

/// Where the next data (or hole) begins, at `offset` or after it; else an errno.
pub(crate) async fn seek(vbd: &Vbd, io: &Io, mut offset: u64, data: bool) -> Result<u64, i32> {
    let size = vbd.size();
    while offset < size {
        let status = vbd.status(io, offset, size - offset).await.map_err(Error::errno)?;
        if data != status.zero {
            return Ok(offset);
        }
        offset = offset.saturating_add(status.len.max(1));
    }
    // A hole begins at the end of every file, and no data does.
    if !data && offset == size { Ok(size) } else { Err(libc::ENXIO) }
}

fn device(kind: Kind, offset: u64, len: u64, mem: Mem, answer: Answer) -> Asked {
    Asked::Device(Request { kind, offset, len, mem, fua: false }, answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use ringtap_image::{CacheMode, OpenOptions, open};
    use std::path::Path;

    const SIZE: u64 = 1 << 20;
    const MOST: usize = 64 << 10;

    fn vbd() -> Vbd {
        let image = open(Path::new("null:1M"), &OpenOptions::default()).expect("an image");
        Vbd::new(image, CacheMode::None)
    }

    fn ask(opcode: u32, node: u64, arguments: &[u8], carried: usize) -> Asked {
        let head = Head { len: 0, opcode, unique: 1, node };
        // SAFETY: the memory is only measured here, never touched.
        let memory = |len: usize| unsafe { Mem::from_raw(std::ptr::null_mut(), len.min(MOST)) };
        let vbd = vbd();
        let shown = Arc::new(Shown::new(&vbd, None));
        let (read_only, growable) = (false, false);
        let facts = Facts { read_only, growable, mode: 0o600, uid: 0, gid: 0, shown };
        understand(head, arguments, carried, memory, &vbd, &facts)
    }

    fn transfer(offset: u64, size: u32) -> Vec<u8> {
        let mut arguments = vec![0; 40];
        arguments[8..16].copy_from_slice(&offset.to_ne_bytes());
        arguments[16..20].copy_from_slice(&size.to_ne_bytes());
        arguments
    }

    #[test]
    fn transfers_end_where_the_disk_does() {
        let read = |offset, size| ask(op::READ, wire::ROOT, &transfer(offset, size), 0);
        assert!(matches!(read(SIZE - 100, 4096), Asked::Device(_, Answer::Data(100))));
        assert!(matches!(read(SIZE, 4096), Asked::Answer(bytes) if bytes.is_empty()));
        assert!(matches!(read(u64::MAX, 4096), Asked::Answer(bytes) if bytes.is_empty()));
        assert!(matches!(read(0, 1 << 20), Asked::Failed(libc::EINVAL)), "more than was agreed");
        let write =
            |offset, size, carried| ask(op::WRITE, wire::ROOT, &transfer(offset, size), carried);
        assert!(matches!(write(SIZE - 100, 4096, 4096), Asked::Device(_, Answer::Written(100))));
        assert!(matches!(write(SIZE, 4096, 4096), Asked::Failed(libc::ENOSPC)));
        assert!(matches!(write(0, 4096, 4095), Asked::Failed(libc::EINVAL)), "bytes are missing");
        assert!(
            matches!(write(u64::MAX, 0, 0), Asked::Answer(bytes) if bytes == [0; 8]),
            "nothing"
        );
        assert!(matches!(ask(op::READ, 2, &transfer(0, 1), 0), Asked::Failed(libc::ENOENT)));
    }

    proptest! {
        #[test]
        fn whatever_is_asked_stays_within_disk_and_memory(
            opcode in prop_oneof![0u32..56, Just(4096), any::<u32>()],
            node in prop_oneof![Just(wire::ROOT), any::<u64>()],
            arguments in proptest::collection::vec(any::<u8>(), 0..100),
            place in proptest::option::of((0..2 * SIZE, 0..2 * MOST as u32)),
            honest in any::<bool>(),
            carried in 0..2 * MOST,
        ) {
            let arguments = place.map_or(arguments, |(offset, size)| transfer(offset, size));
            let said = u32_at(&arguments, 16).unwrap_or(0) as usize;
            let carried = if honest { said } else { carried };
            if let Asked::Device(request, answer) = ask(opcode, node, &arguments, carried) {
                prop_assert!(request.offset.checked_add(request.len).is_some_and(|end| end <= SIZE));
                if matches!(request.kind, Kind::Read | Kind::Write) {
                    prop_assert_eq!(request.mem.len() as u64, request.len);
                }
                if let Answer::Data(len) = answer {
                    prop_assert!(len <= MOST);
                }
            }
        }
    }
}
