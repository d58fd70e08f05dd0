//! From a descriptor chain to a request: header, data, status byte.
//!
//! Source: virtio 1.2, section 5.2.6. Descriptors may be cut anywhere (VIRTIO_F_ANY_LAYOUT).

use libc::iovec;
use ringtap_io::Mem;
use ringtap_vbd::{Error, Kind, Refusal, Request};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::memory::Memory;
use super::virtqueue::{RingError, Virtqueue};

const SECTOR: u64 = 512;
const HEADER: usize = 16;
const RANGE: usize = 16;
/// readv and writev take no more.
const MOST_IOVECS: usize = 1024;
/// Sectors of one discard or write-zeroes, as the guest is told: 4 GiB.
pub(crate) const MOST_ZEROED: u32 = 1 << 23;
/// Bytes of one read or write, far more than a driver asks for: a chain can name the same memory again and
/// again, and a request must come to its end before the server can.
const MOST_MOVED: usize = 256 << 20;
/// The lists of a chain's memory keep room for so many pieces from one chain to the next.
const KEPT_IOVECS: usize = 512;
/// Bytes of the identity a guest may ask for.
pub(crate) const ID_BYTES: usize = 20;

/// What a chain asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Asked {
    /// Something for the device.
    Device(Request),
    /// The identity, into this memory.
    Identity(Mem),
    /// Nothing that can be served: the answer, and what the log is told.
    Bad(Error, Refusal),
}

/// One chain, parsed. Its storage is used again for the next.
pub(crate) struct Chain {
    pub(crate) head: u16,
    readable: Vec<iovec>,
    writable: Vec<iovec>,
    status: *mut u8,
}

impl Default for Chain {
    fn default() -> Self {
        Chain { head: 0, readable: Vec::new(), writable: Vec::new(), status: std::ptr::null_mut() }
    }
}

/// Add memory to a list, joined to the last piece where it goes on from there. A list that is too
/// long already grows no more: only its end counts, which may be the status byte.
#[inline]
fn add(list: &mut Vec<iovec>, base: *mut u8, len: u64) {
    if let Some(last) = list.last_mut() {
        if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base {
            last.iov_len += len as usize;
            return;
        }
    }
    if list.len() > MOST_IOVECS + 1 {
        list.pop();
    }
    list.push(iovec { iov_base: base.cast(), iov_len: len as usize });
}

impl Chain {
    /// Take a chain apart. An error stops the queue; what is wrong with the request alone comes
    /// back as [`Asked::Bad`].
    ///
    /// # Safety
    /// What is asked names guest memory: `memory` must stay mapped until it has been served, and
    /// this chain must not be parsed again before.
    pub(crate) unsafe fn parse(
        &mut self,
        ring: &Virtqueue,
        memory: &Memory,
        head: u16,
    ) -> Result<Asked, RingError> {
        self.head = head;
        self.readable.clear();
        self.writable.clear();
        let (mut known, mut ordered, mut empty) = (true, true, false);
        let (readable, writable) = (&mut self.readable, &mut self.writable);
        ring.walk(memory, head, |descriptor| {
            empty |= descriptor.len() == 0;
            let list = if descriptor.is_write_only() {
                &mut *writable
            } else {
                ordered &= writable.is_empty();
                &mut *readable
            };
            let all = memory.pieces(descriptor.addr().0, descriptor.len().into(), |base, len| {
                add(list, base, len);
            });
            known &= all;
        })?;
        // The last writable byte is the status; without one there is nowhere to say anything.
        let last = self.writable.last_mut().ok_or(RingError::NoStatus { head })?;
        last.iov_len -= 1;
        self.status = last.iov_base.cast::<u8>().wrapping_add(last.iov_len);
        if last.iov_len == 0 {
            self.writable.pop();
        }
        // No driver sends empty ones: QEMU's devices stop at them.
        if !known {
            return Ok(malformed("a descriptor names memory that is not the guest's"));
        }
        if !ordered {
            return Ok(malformed("a descriptor to be read follows one to be written"));
        }
        if empty {
            return Ok(malformed("a descriptor has no length"));
        }
        // SAFETY: the iovecs stay as they are until the next `parse`, the memory as the caller says.
        let (out, into) =
            unsafe { (Mem::from_iovecs(&self.readable), Mem::from_iovecs(&self.writable)) };
        Ok(self.understand(out, into))
    }

    fn understand(&mut self, out: Mem, into: Mem) -> Asked {
        let mut header = [0; HEADER];
        if out.copy_to(&mut header) < HEADER {
            return malformed("its header is shorter than 16 bytes");
        }
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| header[at + i]));
        let kind = word(0);
        let sector = u64::from(word(8)) | u64::from(word(12)) << 32;
        let refusal = Refusal {
            operation: name(kind),
            offset: sector.checked_mul(SECTOR),
            length: None,
            why: "its sector is past the end of any disk",
        };
        if self.readable.len().max(self.writable.len()) > MOST_IOVECS {
            let why = "its memory is in more than 1024 pieces";
            return Asked::Bad(Error::Unsupported, Refusal { why, ..refusal });
        }
        let Some(offset) = refusal.offset else { return Asked::Bad(Error::Range, refusal) };
        let transfer = |kind, mem: Mem| {
            let len = mem.len() as u64;
            let bad = |why| Asked::Bad(Error::Range, Refusal { length: Some(len), why, ..refusal });
            if len % SECTOR != 0 {
                return bad("it is not of whole sectors of 512 bytes");
            }
            if mem.len() > MOST_MOVED {
                return bad("it is longer than 256 MiB");
            }
            Asked::Device(Request { kind, offset, len, mem, fua: false })
        };
        match kind {
            VIRTIO_BLK_T_IN => transfer(Kind::Read, into),
            VIRTIO_BLK_T_OUT => transfer(Kind::Write, self.data()),
            VIRTIO_BLK_T_FLUSH => {
                let (kind, mem) = (Kind::Flush, Mem::EMPTY);
                Asked::Device(Request { kind, offset: 0, len: 0, mem, fua: false })
            }
            VIRTIO_BLK_T_GET_ID => Asked::Identity(into),
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => range(kind, self.data()),
            _ => Asked::Bad(Error::Unsupported, refused(kind, "this device has no such operation")),
        }
    }

    /// What follows the header. Where the header ends inside an iovec that is trimmed in place, so
    /// that the usual chain (a descriptor for the header alone) goes to the kernel as it stands.
    fn data(&mut self) -> Mem {
        let (mut left, mut first) = (HEADER, 0);
        while let Some(iov) = self.readable.get_mut(first) {
            let cut = left.min(iov.iov_len);
            iov.iov_base = iov.iov_base.cast::<u8>().wrapping_add(cut).cast();
            iov.iov_len -= cut;
            left -= cut;
            if iov.iov_len > 0 {
                break;
            }
            first += 1;
        }
        // SAFETY: as in `parse`, whose caller's promise covers this window too.
        unsafe { Mem::from_iovecs(&self.readable[first..]) }
    }

    /// The memory the chain names, as parsed: to be read, to be written.
    pub(crate) fn iovecs(&self) -> (&[iovec], &[iovec]) {
        (&self.readable, &self.writable)
    }

    /// Bytes that the lists take beyond what they keep.
    #[inline]
    pub(crate) fn storage(&self) -> usize {
        let beyond = |list: &Vec<iovec>| list.capacity().saturating_sub(KEPT_IOVECS);
        (beyond(&self.readable) + beyond(&self.writable)) * size_of::<iovec>()
    }

    /// Answer: the status byte. Gives the bytes written, for the used ring.
    #[inline]
    pub(crate) fn answer(&mut self, end: Result<(), Error>, written: usize) -> u32 {
        let status = match end {
            Ok(()) => VIRTIO_BLK_S_OK,
            Err(Error::Unsupported) => VIRTIO_BLK_S_UNSUPP,
            Err(_) => VIRTIO_BLK_S_IOERR,
        };
        // SAFETY: `parse` found this byte in guest memory, which stays mapped until the answer.
        unsafe { self.status.write_volatile(status as u8) };
        written as u32 + 1
    }

    /// Where the status byte is.
    pub(crate) fn status(&self) -> iovec {
        iovec { iov_base: self.status.cast(), iov_len: 1 }
    }

    /// Answered, it keeps no long lists.
    #[inline]
    pub(crate) fn rest(&mut self) {
        if self.storage() > 0 {
            for list in [&mut self.readable, &mut self.writable] {
                list.clear();
                list.shrink_to(KEPT_IOVECS);
            }
        }
    }
}

fn name(kind: u32) -> &'static str {
    match kind {
        VIRTIO_BLK_T_IN => "read",
        VIRTIO_BLK_T_OUT => "write",
        VIRTIO_BLK_T_FLUSH => "flush",
        VIRTIO_BLK_T_GET_ID => "identity",
        VIRTIO_BLK_T_DISCARD => "discard",
        VIRTIO_BLK_T_WRITE_ZEROES => "write-zeroes",
        _ => "unknown",
    }
}

fn refused(kind: u32, why: &'static str) -> Refusal {
    Refusal { operation: name(kind), offset: None, length: None, why }
}

/// A chain of descriptors whose request cannot be read.
#[cold]
fn malformed(why: &'static str) -> Asked {
    Asked::Bad(Error::Range, Refusal { operation: "unknown", offset: None, length: None, why })
}

/// The one range of a discard or write-zeroes (the config says that one is the most).
fn range(kind: u32, data: Mem) -> Asked {
    let mut bytes = [0; RANGE];
    if data.len() != RANGE || data.copy_to(&mut bytes) != RANGE {
        return Asked::Bad(Error::Range, refused(kind, "it does not bring one range of 16 bytes"));
    }
    let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
    let sector = u64::from(word(0)) | u64::from(word(4)) << 32;
    let (sectors, flags) = (word(8), word(12));
    let len = u64::from(sectors) * SECTOR;
    let offset = sector.checked_mul(SECTOR);
    let bad =
        |error, why| Asked::Bad(error, Refusal { offset, length: Some(len), ..refused(kind, why) });
    let Some(offset) = offset else {
        return bad(Error::Range, "its sector is past the end of any disk");
    };
    let unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
    let kind = match kind {
        // virtio 1.2, 5.2.6.2: a discard with the unmap flag set is not supported.
        VIRTIO_BLK_T_DISCARD if unmap => {
            return bad(Error::Unsupported, "a discard has no flags");
        }
        VIRTIO_BLK_T_DISCARD => Kind::Discard,
        _ => Kind::WriteZeroes { unmap, fast: false },
    };
    if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 {
        return bad(Error::Unsupported, "its flags are unknown");
    }
    // A request must come to its end before the server can.
    if sectors > MOST_ZEROED {
        return bad(Error::Range, "it is longer than 4 GiB");
    }
    Asked::Device(Request { kind, offset, len, mem: Mem::EMPTY, fua: false })
}
