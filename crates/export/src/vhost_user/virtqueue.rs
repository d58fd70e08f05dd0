//! A split virtqueue in the guest's memory.
//!
//! Its descriptors are the `virtio-queue` crate's. That crate's queue can neither name a chain by its
//! head (which taking up a killed server's requests needs), nor publish a batch with one store, nor
//! honour VRING_AVAIL_F_NO_INTERRUPT, nor say what is wrong with a chain; so the ring is driven
//! here. Source: virtio 1.2, section 2.7.

use std::sync::atomic::{AtomicU16, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::atomic::{Ordering::SeqCst, fence};

use virtio_bindings::bindings::virtio_ring::{VRING_AVAIL_F_NO_INTERRUPT, VRING_USED_F_NO_NOTIFY};
use virtio_queue::desc::split::Descriptor;

use super::memory::Memory;

/// The largest queue served.
pub(crate) const MAX_QUEUE_SIZE: u16 = 1024;

/// Where the front-end says the three parts of the ring are, in its own addresses.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Addresses {
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// Why a queue cannot be served on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A part of the ring does not lie in the guest's memory, or is not aligned.
    #[error("the {part} of the ring is not in guest memory or not aligned: {address:#x}")]
    Address {
        /// Which part.
        part: &'static str,
        /// Where it should be.
        address: u64,
    },
    /// The available index is further ahead than the queue is long.
    #[error("the available index went from {from} to {to} in a queue of {size}")]
    Index {
        /// What was fetched so far.
        from: u16,
        /// What the ring says.
        to: u16,
        /// The queue's size.
        size: u16,
    },
    /// A descriptor number is not below the table's length.
    #[error("descriptor {number} named in a table of {size}")]
    Number {
        /// The number found.
        number: u32,
        /// The table's length.
        size: u32,
    },
    /// A chain longer than its table: it loops.
    #[error("the chain from descriptor {head} loops")]
    Loop {
        /// Where it begins.
        head: u16,
    },
    /// An indirect table inside an indirect table, with a next, of a bad length or out of memory.
    #[error("a bad indirect table of {len} bytes at {address:#x}")]
    Indirect {
        /// Its guest address.
        address: u64,
        /// Its length in bytes.
        len: u32,
    },
    /// The front-end has truncated a file that the guest's memory lies in.
    #[error("the front-end cut the guest's memory short")]
    Memory,
    /// A chain without a byte to answer in.
    #[error("the chain from descriptor {head} has no room for a status byte")]
    NoStatus {
        /// Where it begins.
        head: u16,
    },
}

/// Bytes of the used ring: flags, index, entries, and from where on the guest is to kick.
pub(crate) fn used_ring_size(size: u16) -> u64 {
    6 + 8 * u64::from(size)
}

/// The ring, by its places in this process. The [`Memory`] it was made from must outlive it.
pub(crate) struct Virtqueue {
    descriptors: *const Descriptor,
    available: *const AtomicU16,
    used: *const AtomicU16,
    size: u16,
    event_idx: bool,
    next_available: u16,
    next_used: u16,
    /// The used index when the guest was last told of it.
    told: u16,
}

impl Virtqueue {
    /// A ring of `size` entries, a power of two up to [`MAX_QUEUE_SIZE`].
    pub(crate) fn new(
        memory: &Memory,
        addresses: Addresses,
        size: u16,
        event_idx: bool,
        next_available: u16,
    ) -> Result<Virtqueue, RingError> {
        let entries = u64::from(size);
        let place = |part, address: u64, len: u64, align: u64| {
            let base = memory.at_user_address(address, len);
            base.filter(|base| (*base as u64) % align == 0)
                .ok_or(RingError::Address { part, address })
        };
        let Addresses { descriptors, available, used } = addresses;
        let descriptors = place("descriptor table", descriptors, 16 * entries, 16)?;
        let available = place("available ring", available, 6 + 2 * entries, 2)?;
        let used = place("used ring", used, used_ring_size(size), 4)?;
        let mut ring = Virtqueue {
            descriptors: descriptors.cast(),
            available: available.cast(),
            used: used.cast(),
            size,
            event_idx,
            next_available,
            next_used: 0,
            told: 0,
        };
        ring.next_used = ring.used(1).load(Acquire);
        ring.told = ring.next_used;
        Ok(ring)
    }

    fn available(&self, word: usize) -> &AtomicU16 {
        // SAFETY: `new` checked 3 + size words; callers stay below that.
        unsafe { &*self.available.add(word) }
    }

    fn used(&self, word: usize) -> &AtomicU16 {
        // SAFETY: `new` checked 3 + 4 * size words; callers stay below that.
        unsafe { &*self.used.add(word) }
    }

    /// The available index reached so far.
    pub(crate) fn next_available(&self) -> u16 {
        self.next_available
    }

    pub(crate) fn set_next_available(&mut self, next: u16) {
        self.next_available = next;
    }

    /// The used index as published.
    pub(crate) fn next_used(&self) -> u16 {
        self.next_used
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// Whether the guest has made something available.
    #[inline]
    pub(crate) fn has_available(&self) -> bool {
        self.available(1).load(Relaxed) != self.next_available
    }

    /// Fetch the next chain's head.
    #[inline]
    pub(crate) fn fetch(&mut self) -> Result<Option<u16>, RingError> {
        let index = self.available(1).load(Acquire);
        let (from, size) = (self.next_available, self.size);
        let waiting = index.wrapping_sub(from);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > size {
            return Err(RingError::Index { from, to: index, size });
        }
        let head = self.available(2 + usize::from(from % size)).load(Relaxed);
        if head >= size {
            return Err(RingError::Number { number: head.into(), size: size.into() });
        }
        self.next_available = from.wrapping_add(1);
        Ok(Some(head))
    }

    /// Call `each` with every descriptor of a chain, indirect tables followed.
    pub(crate) fn walk(
        &self,
        memory: &Memory,
        head: u16,
        mut each: impl FnMut(Descriptor),
    ) -> Result<(), RingError> {
        let (mut table, mut size) = (self.descriptors, u32::from(self.size));
        let mut indirect = false;
        let (mut number, mut steps) = (u32::from(head), 0);
        loop {
            if number >= size {
                return Err(RingError::Number { number, size });
            }
            if steps >= size {
                return Err(RingError::Loop { head });
            }
            steps += 1;
            // SAFETY: `table` has `size` entries in mapped guest memory (checked by `new` or below).
            // The guest may change them under us: read once, unaligned allowed for indirect tables.
            let descriptor = unsafe { table.add(number as usize).read_unaligned() };
            if descriptor.refers_to_indirect_table() {
                let (address, len) = (descriptor.addr().0, descriptor.len());
                let bad = RingError::Indirect { address, len };
                let entries = len / 16;
                if indirect
                    || descriptor.has_next()
                    || len % 16 != 0
                    || entries == 0
                    || entries > u32::from(MAX_QUEUE_SIZE)
                {
                    return Err(bad);
                }
                let mut place = None;
                let known = memory.pieces(address, len.into(), |base, piece| {
                    place = (piece == u64::from(len)).then_some(base);
                });
                table = place.filter(|_| known).ok_or(bad)?.cast_const().cast();
                (size, indirect, number, steps) = (entries, true, 0, 0);
                continue;
            }
            let goes_on = descriptor.has_next();
            number = descriptor.next().into();
            each(descriptor);
            if !goes_on {
                return Ok(());
            }
        }
    }

    /// Where in the used ring that answer stands, and its bytes.
    pub(crate) fn used_entry(&self, ahead: u16) -> (u64, u64) {
        (4 + 8 * u64::from(self.next_used.wrapping_add(ahead) % self.size), 8)
    }

    /// Where in the used ring the words stand by which kicks are asked for, the used index between them.
    pub(crate) fn used_words(&self) -> [(u64, u64); 2] {
        [(0, 4), (used_ring_size(self.size) - 2, 2)]
    }

    /// Put an answer `ahead` places behind the published ones; [`Virtqueue::publish`] shows it.
    #[inline]
    pub(crate) fn put_used(&self, ahead: u16, head: u16, written: u32) {
        let place = usize::from(self.next_used.wrapping_add(ahead) % self.size);
        let word = 2 + 4 * place;
        self.used(word).store(head, Relaxed);
        self.used(word + 1).store(0, Relaxed);
        self.used(word + 2).store(written as u16, Relaxed);
        self.used(word + 3).store((written >> 16) as u16, Relaxed);
    }

    /// Show the guest `count` answers that were put.
    #[inline]
    pub(crate) fn publish(&mut self, count: u16) {
        self.next_used = self.next_used.wrapping_add(count);
        self.used(1).store(self.next_used, Release);
    }

    /// Answers published since the last [`Virtqueue::must_notify`].
    #[inline]
    pub(crate) fn unnotified(&self) -> u16 {
        self.next_used.wrapping_sub(self.told)
    }

    /// Whether the guest wants an interrupt for what was published since the last time.
    #[inline]
    pub(crate) fn must_notify(&mut self) -> bool {
        let (old, new) = (self.told, self.next_used);
        if old == new {
            return false;
        }
        self.told = new;
        // The answers must be visible before the guest's wish is read.
        fence(SeqCst);
        if !self.event_idx {
            return u32::from(self.available(0).load(Relaxed)) & VRING_AVAIL_F_NO_INTERRUPT == 0;
        }
        let wanted = self.available(2 + usize::from(self.size)).load(Relaxed);
        new.wrapping_sub(wanted).wrapping_sub(1) < new.wrapping_sub(old)
    }

    /// Ask for a kick at the next request; true if one has come already.
    pub(crate) fn enable_kicks(&self) -> bool {
        if self.event_idx {
            self.used(2 + 4 * usize::from(self.size)).store(self.next_available, Relaxed);
        } else {
            self.used(0).store(0, Relaxed);
        }
        // The wish must be visible before the index is read, or a request could slip between.
        fence(SeqCst);
        self.has_available()
    }

    /// Ask for no kicks. With EVENT_IDX none come anyway until the next wish.
    pub(crate) fn disable_kicks(&self) {
        if !self.event_idx {
            self.used(0).store(VRING_USED_F_NO_NOTIFY as u16, Relaxed);
        }
    }
}
