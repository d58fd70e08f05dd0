//! Page-aligned buffers, kept and used again by the thread that made them.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::RefCell;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::Mem;

/// The alignment of every buffer: enough for O_DIRECT anywhere.
pub const PAGE: usize = 4096;

/// Buffers of up to 2^SMALLEST … 2^LARGEST bytes are kept, by power of two.
const SMALLEST: u32 = 12;
const LARGEST: u32 = 21;
/// From so many bytes on each is a mapping of its own, which the kernel has back when it is dropped: what was
/// aligned like this in the heap takes twice the room, and fits nothing else.
const MAPPED: usize = 256 << 10;
/// What one class may keep.
const KEEP_BYTES: usize = 2 << 20;

#[derive(Default)]
pub(crate) struct Pool {
    free: RefCell<[Vec<Block>; (LARGEST - SMALLEST + 1) as usize]>,
    /// What operations in flight use. A debug build sees to it that none of it is given back.
    #[cfg(debug_assertions)]
    used: RefCell<std::collections::HashMap<crate::Key, Vec<(usize, usize)>>>,
}

#[cfg(debug_assertions)]
impl Pool {
    /// An operation in flight uses memory.
    pub(crate) fn is_used(&self, key: crate::Key, op: &crate::Op) {
        use crate::Op;
        let (Op::Read { mem, .. }
        | Op::Write { mem, .. }
        | Op::Recv { mem, .. }
        | Op::Send { mem, .. }) = op
        else {
            return;
        };
        let mut pieces = vec![];
        if !mem.is_kernels() {
            mem.pieces(|(base, len)| pieces.push((base as usize, len)));
        }
        self.used.borrow_mut().insert(key, pieces);
    }

    /// The operation has completed.
    pub(crate) fn is_free(&self, key: crate::Key) {
        self.used.borrow_mut().remove(&key);
    }

    fn assert_free(&self, block: &Block) {
        let from = block.base.as_ptr() as usize;
        let to = from + block.layout.size();
        let used = self.used.borrow();
        let mut pieces = used.values().flatten();
        assert!(
            pieces.all(|(base, len)| *base >= to || base + len <= from),
            "a buffer is given back while an operation in flight uses it"
        );
    }
}

struct Block {
    base: NonNull<u8>,
    layout: Layout,
}

impl Block {
    fn new(capacity: usize) -> Option<Block> {
        let layout = Layout::from_size_align(capacity, PAGE).ok()?;
        let base = if capacity < MAPPED {
            // SAFETY: the layout's size is at least one page.
            unsafe { alloc_zeroed(layout) }
        } else {
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            // SAFETY: a new mapping, at an address of the kernel's choice.
            unsafe { mmap_anonymous(ptr::null_mut(), capacity, access, flags) }.ok()?.cast()
        };
        Some(Block { base: NonNull::new(base)?, layout })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let (base, len) = (self.base.as_ptr(), self.layout.size());
        if len < MAPPED {
            // SAFETY: `base` came from `alloc_zeroed` with this layout and is freed once.
            unsafe { dealloc(base, self.layout) }
        } else {
            // SAFETY: exactly the mapping that `new` made, and nobody uses it any more.
            let _ = unsafe { munmap(base.cast(), len) };
        }
    }
}

fn class_of(capacity: usize) -> Option<usize> {
    let bits = capacity.trailing_zeros();
    (SMALLEST..=LARGEST).contains(&bits).then(|| (bits - SMALLEST) as usize)
}

impl Pool {
    pub(crate) fn take(self: &Rc<Self>, len: usize) -> Option<Buffer> {
        let capacity = len.max(1 << SMALLEST).checked_next_power_of_two()?;
        let kept = class_of(capacity).and_then(|class| self.free.borrow_mut()[class].pop());
        let block = match kept {
            Some(block) => block,
            None => Block::new(capacity)?,
        };
        Some(Buffer { block: Some(block), len, pool: self.clone() })
    }

    pub(crate) fn trim(&self) {
        self.free.borrow_mut().iter_mut().for_each(Vec::clear);
    }

    fn give_back(&self, block: Block) {
        #[cfg(debug_assertions)]
        self.assert_free(&block);
        let capacity = block.layout.size();
        if let Some(class) = class_of(capacity) {
            let free = &mut self.free.borrow_mut()[class];
            if free.len() < (KEEP_BYTES / capacity).max(1) {
                free.push(block);
            }
        }
    }
}

/// A page-aligned buffer of one thread. Its bytes are whatever its last user left (zeros at first).
pub struct Buffer {
    block: Option<Block>,
    len: usize,
    pool: Rc<Pool>,
}

impl Buffer {
    fn base(&self) -> *mut u8 {
        self.block.as_ref().map_or(std::ptr::null_mut(), |block| block.base.as_ptr())
    }

    /// The buffer as memory for operations. The buffer must outlive them, which it does while the
    /// task that awaits them holds it: an operation in flight that is dropped waits for its end.
    pub fn mem(&self) -> Mem {
        // SAFETY: the block is live while `self` is; see the doc comment for operations.
        unsafe { Mem::from_raw(self.base(), self.len) }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes from `base` are initialised and ours.
        unsafe { std::slice::from_raw_parts(self.base(), self.len) }
    }

    /// The bytes, to change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` excludes other slices.
        unsafe { std::slice::from_raw_parts_mut(self.base(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.pool.give_back(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_used_again() {
        let pool = Rc::new(Pool::default());
        let first = pool.take(5000).expect("memory");
        let address = first.bytes().as_ptr() as usize;
        assert_eq!(address % PAGE, 0);
        assert_eq!(first.bytes().len(), 5000);
        drop(first);
        assert_eq!(pool.take(8000).expect("memory").bytes().as_ptr() as usize, address);
        pool.trim();
        assert!(pool.free.borrow().iter().all(Vec::is_empty));
        let large = pool.take(33 << 20).expect("memory");
        assert_eq!(large.bytes().len(), 33 << 20);
    }
}
