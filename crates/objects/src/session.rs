//! What one thread has of an object: its reads, each ended by whoever brings the last of its bytes.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use ringtap_io::{Errand, File, Io, Key, Mem, Op, Session};

use crate::Object;

pub(crate) struct Near {
    object: Arc<Object>,
    /// By the keys of operations; what has ended is in the way of nothing.
    reads: RefCell<HashMap<Key, Arc<Read>>>,
    /// Reads of what the local cache has, by their keys; it may fail.
    lent: RefCell<Vec<Option<Op>>>,
}

/// A read that waits for bytes.
pub(crate) struct Read {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    errand: Mutex<Option<Errand>>,
}

impl Read {
    fn take(&self) -> Option<Errand> {
        self.errand.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// These pieces, one behind the other, are its bytes. Nothing is copied where nobody waits any more.
    pub(crate) fn end(&self, outcome: Result<Vec<Bytes>, i32>) {
        // Held while bytes are copied: who cancels takes the memory back.
        let mut held = self.errand.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Errand { op, ender }) = held.take() else { return };
        let result = match (outcome, op) {
            (Err(errno), _) => -errno,
            (Ok(pieces), Op::Read { mem, .. }) => copy(&pieces, &mem, self.len),
            (Ok(_), _) => -libc::EIO,
        };
        ender.end(result);
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        // Of a thread that has panicked.
        if let Some(errand) = self.take() {
            errand.ender.end(-libc::EIO);
        }
    }
}

fn copy(pieces: &[Bytes], mem: &Mem, len: u64) -> i32 {
    let mut done = 0;
    for piece in pieces {
        done += mem.window(done, piece.len()).copy_from(piece);
    }
    if done as u64 == len { done as i32 } else { -libc::EIO }
}

impl Near {
    pub(crate) fn new(object: Arc<Object>) -> Near {
        Near { object, reads: RefCell::default(), lent: RefCell::default() }
    }

    /// Have the local cache's file carry it out, in place of `op`.
    fn lend(&self, io: &Io, key: Key, local: File, op: Op) {
        let Op::Read { offset, mem, .. } = op else { return };
        let mut lent = self.lent.borrow_mut();
        let place = key as usize;
        if lent.len() <= place {
            lent.resize(place + 1, None);
        }
        lent[place] = Some(op);
        io.begin_here(key, Op::Read { file: local, offset, mem });
    }

    fn read(&self, io: &Io, key: Key, file: File, offset: u64, mem: Mem) {
        let len = (mem.len() as u64).min(self.object.size.saturating_sub(offset));
        if len == 0 {
            return io.ended(key, 0);
        }
        let mem = mem.window(0, len as usize);
        let numbers = self.object.numbers(offset, len);
        if let Some(recorder) = &self.object.recorder {
            recorder.note(numbers.clone());
        }
        let cache = self.object.cache.as_ref();
        if let Some(cache) =
            cache.filter(|cache| cache.has_all(numbers) && cache.is_whole_at(io.now()))
        {
            return self.lend(io, key, cache.file(), Op::Read { file, offset, mem });
        }
        self.fetch(io, key, file, offset, mem);
    }

    /// From memory, or from the server.
    fn fetch(&self, io: &Io, key: Key, file: File, offset: u64, mem: Mem) {
        let len = mem.len() as u64;
        if mem.is_kernels() {
            return io.ended(key, -libc::EOPNOTSUPP);
        }
        if let Some(pieces) = self.object.at_hand(offset, len) {
            return io.ended(key, copy(&pieces, &mem, len));
        }
        let op = Op::Read { file, offset, mem };
        let errand = Mutex::new(Some(Errand { op, ender: io.ender(key) }));
        let read = Arc::new(Read { offset, len, errand });
        self.reads.borrow_mut().insert(key, read.clone());
        self.object.read(read);
    }
}

impl Session for Near {
    fn begin(&self, io: &Io, key: Key, op: Op) {
        match op {
            Op::Read { file, offset, mem } => self.read(io, key, file, offset, mem),
            Op::Status { offset, len, .. } => {
                io.ended(key, self.object.holds(offset, len).to_result());
            }
            Op::Sync { .. } => io.ended(key, 0),
            Op::Write { .. } => io.ended(key, -libc::EROFS),
            _ => io.ended(key, -libc::EOPNOTSUPP),
        }
    }

    fn cancel(&self, _: &Io, key: Key) {
        let read = self.reads.borrow_mut().remove(&key);
        if let Some(Errand { ender, .. }) = read.and_then(|read| read.take()) {
            ender.end(-libc::ECANCELED);
        }
    }

    fn failed_here(&self, io: &Io, key: Key, result: i32) {
        let op = self.lent.borrow_mut().get_mut(key as usize).and_then(Option::take);
        match op {
            Some(Op::Read { file, offset, mem }) if !is_who_reads(result) => {
                let numbers = self.object.numbers(offset, mem.len() as u64);
                self.object.cannot_read_here(numbers, -result);
                self.fetch(io, key, file, offset, mem);
            }
            _ => io.ended(key, result),
        }
    }
}

/// Whether a read failed by who asked for it, or its memory, and not by the disk of the local cache.
fn is_who_reads(result: i32) -> bool {
    use libc::{EAGAIN, ECANCELED, EFAULT, EINTR, EINVAL, ENOBUFS, ENOMEM, EOPNOTSUPP};
    [EAGAIN, ECANCELED, EFAULT, EINTR, EINVAL, ENOBUFS, ENOMEM, EOPNOTSUPP].contains(&-result)
}

pub(crate) fn session(object: Arc<Object>) -> Rc<dyn Session> {
    Rc::new(Near::new(object))
}
