//! Pipes that take large reads from the page cache to the socket: pages of the file change hands, and
//! nobody copies them but the client.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use ringtap_io::{Mem, OpenFile};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use super::budget::Share;

/// What a pipe holds, a page in each of its places; the kernel gives an ordinary user no more.
pub(super) const HOLDS: usize = 1 << 20;
/// Pipes of a connection. A user may have 64 MiB in all.
const MOST: usize = 8;

/// An empty pipe, or one with the data of one reply.
pub(super) struct Pipe {
    read: OpenFile,
    write: OpenFile,
}

impl Pipe {
    fn new() -> io::Result<Pipe> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        fcntl_setpipe_size(&write, HOLDS)?;
        Ok(Pipe { read: OpenFile::new(read), write: OpenFile::new(write) })
    }

    /// Where `len` bytes are to be read into.
    pub(super) fn to_fill(&self, len: usize) -> Mem {
        Mem::of_pipe(self.write.handle(), len)
    }

    /// The `len` bytes that were read into it.
    pub(super) fn to_send(&self, len: usize) -> Mem {
        Mem::of_pipe(self.read.handle(), len)
    }
}

/// The pipes of a connection. What is in them counts as its memory.
pub(super) struct Pipes {
    share: Rc<Share>,
    free: RefCell<Vec<Pipe>>,
    used: Cell<usize>,
    refused: Cell<bool>,
}

impl Pipes {
    pub(super) fn new(share: Rc<Share>) -> Pipes {
        Pipes { share, free: RefCell::default(), used: Cell::new(0), refused: Cell::new(false) }
    }

    pub(super) fn is_one_free(&self) -> bool {
        self.used.get() < MOST && !self.refused.get()
    }

    /// Give no more pipes.
    pub(super) fn refuse(&self) {
        self.refused.set(true);
    }

    /// An empty pipe; none where all are in use, or the kernel gives no more.
    pub(super) fn take(&self) -> Option<Pipe> {
        if !self.is_one_free() {
            return None;
        }
        let kept = self.free.borrow_mut().pop();
        let pipe = match kept {
            Some(pipe) => pipe,
            None if !self.share.take(HOLDS, None) => return None,
            None => match Pipe::new() {
                Ok(pipe) => pipe,
                Err(_) => {
                    self.share.give_back(HOLDS);
                    self.refuse();
                    return None;
                }
            },
        };
        self.used.set(self.used.get() + 1);
        Some(pipe)
    }

    /// Give back what [`Pipes::take`] gave, emptied.
    pub(super) fn give_back(&self, pipe: Pipe) {
        if self.share.is_wanted() {
            self.close(pipe);
            self.trim();
            return;
        }
        self.used.set(self.used.get() - 1);
        self.free.borrow_mut().push(pipe);
    }

    /// Let go of a pipe that may not be empty.
    pub(super) fn close(&self, pipe: Pipe) {
        self.used.set(self.used.get() - 1);
        drop(pipe);
        self.share.give_back(HOLDS);
    }

    /// Let go of all pipes that are not in use.
    pub(super) fn trim(&self) {
        let free = std::mem::take(&mut *self.free.borrow_mut());
        self.share.give_back(free.len() * HOLDS);
    }
}
