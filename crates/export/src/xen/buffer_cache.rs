//! Buffers of large requests, used again by the next ones of a ring.
//!
//! What the allocator gives for each is fresh, and to fault its pages in costs a PV domain far more
//! than the copy into them: each goes by the hypervisor.

use ringtap_io::{Buffer, Io};

/// Up to this many bytes the thread's own pool keeps enough for a full ring.
const SMALL: usize = 64 << 10;
/// What is kept: a ring of 32 requests of 128 KiB, which is what Linux makes of large ones.
const MOST: usize = 4 << 20;

/// The buffers that no request holds.
#[derive(Default)]
pub(crate) struct BufferCache {
    free: Vec<Buffer>,
    bytes: usize,
}

impl BufferCache {
    /// A buffer of `len` bytes or more.
    pub(crate) fn take(&mut self, io: &Io, len: usize) -> Result<Buffer, i32> {
        if len <= SMALL {
            return io.buffer(len);
        }
        match self.free.iter().rposition(|buffer| buffer.bytes().len() >= len) {
            Some(place) => {
                let buffer = self.free.swap_remove(place);
                self.bytes -= buffer.bytes().len();
                Ok(buffer)
            }
            None => io.buffer(len.next_power_of_two()),
        }
    }

    /// Keep a buffer for the next request. Those kept longest make room for it.
    pub(crate) fn keep(&mut self, buffer: Buffer) {
        let len = buffer.bytes().len();
        if len <= SMALL || len > MOST {
            return;
        }
        while self.bytes + len > MOST {
            self.bytes -= self.free.remove(0).bytes().len();
        }
        self.bytes += len;
        self.free.push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use ringtap_io::{Ring, Tasks};

    use super::*;

    fn addresses(buffers: &[Buffer]) -> Vec<usize> {
        let mut all: Vec<usize> = buffers.iter().map(|b| b.bytes().as_ptr() as usize).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn a_full_ring_of_large_requests_uses_the_same_memory_again() {
        let tasks = Tasks::new(Box::new(Ring::new().expect("io_uring")));
        let (io, mut cache) = (tasks.io(), BufferCache::default());
        let take = |cache: &mut BufferCache| -> Vec<Buffer> {
            (0..32).map(|_| cache.take(io, 128 << 10).expect("memory")).collect()
        };
        let first = take(&mut cache);
        let before = addresses(&first);
        first.into_iter().for_each(|buffer| cache.keep(buffer));
        assert_eq!(addresses(&take(&mut cache)), before);
    }

    #[test]
    fn no_more_is_kept_than_that() {
        let tasks = Tasks::new(Box::new(Ring::new().expect("io_uring")));
        let (io, mut cache) = (tasks.io(), BufferCache::default());
        for len in [100 << 10, 1 << 20, 70 << 10, 300 << 10, 1 << 20, 1 << 20, 8 << 20, 1 << 20] {
            let buffer = cache.take(io, len).expect("memory");
            assert!(buffer.bytes().len() >= len);
            let other = cache.take(io, len).expect("memory");
            cache.keep(buffer);
            cache.keep(other);
            let kept: usize = cache.free.iter().map(|buffer| buffer.bytes().len()).sum();
            assert!(kept == cache.bytes && kept <= MOST, "{kept} of {}", cache.bytes);
        }
    }
}
