//! Which requests are in flight, in memory that outlives this process.
//!
//! The front-end keeps the buffer and hands it to the next server, so that a killed server's
//! requests are served by its successor, each exactly once. Source: vhost-user.rst, "Inflight I/O
//! tracking", the layout for split virtqueues.

use std::fmt::{Display, Formatter};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering::Relaxed, Ordering::Release};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserInflight;

use super::mapping::{Mapping, Maps};
use super::virtqueue::MAX_QUEUE_SIZE;

const VERSION: u16 = 1;
const ALIGN: u64 = 64;

#[repr(C)]
struct Header {
    features: AtomicU64,
    version: AtomicU16,
    desc_num: AtomicU16,
    last_batch_head: AtomicU16,
    used_idx: AtomicU16,
}

#[repr(C)]
struct Descriptor {
    inflight: AtomicU8,
    padding: [u8; 5],
    next: AtomicU16,
    counter: AtomicU64,
}

/// Behind the queues' regions we keep what else the next server must know: whether the guest turned
/// its write cache off. Another program's buffer has no such place.
const TAIL: u64 = 64;
const CACHE_ON: u64 = 0x7269_6e67_7461_7001;
const CACHE_OFF: u64 = 0x7269_6e67_7461_7000;

fn region_size(queue_size: u16) -> u64 {
    let bytes = size_of::<Header>() + size_of::<Descriptor>() * usize::from(queue_size);
    (bytes as u64).next_multiple_of(ALIGN)
}

/// Bytes of a buffer of ours. Every queue has room for the longest: QEMU 10 asks for 128 entries, lets
/// its guest make the queue one of 256, and names 128 again when it hands the buffer over.
fn own_size(queues: u16) -> u64 {
    region_size(MAX_QUEUE_SIZE) * u64::from(queues) + TAIL
}

/// Make a buffer for so many queues, for the front-end to keep.
pub(crate) fn create(
    queues: u16,
    queue_size: u16,
    maps: &Maps,
) -> std::io::Result<(VhostUserInflight, File, Inflight)> {
    let size = own_size(queues);
    let file = File::from(memfd_create("ringtap-inflight", MemfdFlags::CLOEXEC)?);
    ftruncate(&file, size)?;
    let message = VhostUserInflight::new(size, 0, queues, queue_size);
    let inflight = Inflight::map(&message, &file, maps)?;
    Ok((message, file, inflight))
}

/// The mapped buffer.
#[derive(Clone)]
pub(crate) struct Inflight {
    mapping: Arc<Mapping>,
    queues: u16,
    queue_size: u16,
}

impl Display for Inflight {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "the inflight buffer for {} queues of {} entries", self.queues, self.queue_size)
    }
}

impl Inflight {
    /// Map the buffer that the front-end kept.
    pub(crate) fn map(
        message: &VhostUserInflight,
        file: &File,
        maps: &Maps,
    ) -> std::io::Result<Inflight> {
        let VhostUserInflight { mmap_size, mmap_offset, num_queues, mut queue_size } = *message;
        if mmap_size == own_size(num_queues) {
            queue_size = MAX_QUEUE_SIZE;
        }
        let wanted = region_size(queue_size) * u64::from(num_queues);
        if mmap_size < wanted || wanted == 0 {
            let text = format!(
                "the inflight buffer has {mmap_size} bytes, and {num_queues} queues of \
                 {queue_size} entries take {wanted}"
            );
            return Err(std::io::Error::other(text));
        }
        let mapping = Mapping::new(file, mmap_offset, mmap_size, maps);
        let mapping = Arc::new(mapping.map_err(std::io::Error::other)?);
        Ok(Inflight { mapping, queues: num_queues, queue_size })
    }

    fn tail(&self) -> Option<&AtomicU64> {
        let offset = region_size(self.queue_size) * u64::from(self.queues);
        if (self.mapping.len() as u64) < offset + TAIL {
            return None;
        }
        let base = self.mapping.base();
        // SAFETY: the mapping reaches past `offset`, a multiple of 64 in a page-aligned mapping;
        // the word is atomic, so others may change it.
        Some(unsafe { &*base.wrapping_add(offset as usize).cast::<AtomicU64>() })
    }

    /// Note for the next server whether the guest's write cache is on.
    pub(crate) fn note_write_cache(&self, on: bool) {
        if let Some(tail) = self.tail() {
            tail.store(if on { CACHE_ON } else { CACHE_OFF }, Release);
        }
    }

    /// What the last server noted.
    pub(crate) fn write_cache(&self) -> Option<bool> {
        match self.tail()?.load(Relaxed) {
            CACHE_ON => Some(true),
            CACHE_OFF => Some(false),
            _ => None,
        }
    }

    /// The part of one queue, where the buffer has room for it.
    pub(crate) fn queue(&self, index: u16, size: u16) -> Option<QueueInflight> {
        if index >= self.queues || size > self.queue_size {
            return None;
        }
        let offset = region_size(self.queue_size) * u64::from(index);
        let base = self.mapping.base().wrapping_add(offset as usize);
        Some(QueueInflight {
            header: base.cast(),
            descriptors: base.wrapping_add(size_of::<Header>()).cast(),
            size,
            counter: 0,
            _mapping: self.mapping.clone(),
        })
    }
}

/// The record of one queue.
pub(crate) struct QueueInflight {
    header: *const Header,
    descriptors: *const Descriptor,
    size: u16,
    /// The order in which requests were fetched, over all servers.
    counter: u64,
    _mapping: Arc<Mapping>,
}

impl QueueInflight {
    fn header(&self) -> &Header {
        // SAFETY: `map` checked that the mapping holds this queue's region, which begins 8-byte
        // aligned in a page-aligned mapping; every field is atomic, so others may change it.
        unsafe { &*self.header }
    }

    fn descriptor(&self, head: u16) -> &Descriptor {
        let index = usize::from(head % self.size);
        // SAFETY: as above; `index` is below the number of entries the region has room for.
        unsafe { &*self.descriptors.add(index) }
    }

    /// Take up what the last server left: the heads it had fetched and not answered, oldest first.
    /// `used_idx` is what the used ring says.
    pub(crate) fn take_up(&mut self, used_idx: u16) -> Vec<u16> {
        let header = self.header();
        if header.version.load(Relaxed) != VERSION {
            header.desc_num.store(self.size, Relaxed);
            header.used_idx.store(used_idx, Relaxed);
            header.version.store(VERSION, Release);
        }
        // The last server may have died between publishing a batch and taking it off the record.
        let published = used_idx.wrapping_sub(header.used_idx.load(Relaxed));
        let mut head = header.last_batch_head.load(Relaxed);
        for _ in 0..published.min(self.size) {
            let descriptor = self.descriptor(head);
            descriptor.inflight.store(0, Relaxed);
            head = descriptor.next.load(Relaxed);
        }
        header.used_idx.store(used_idx, Release);
        let mut left: Vec<(u64, u16)> = (0..self.size)
            .map(|head| (head, self.descriptor(head)))
            .filter(|(_, descriptor)| descriptor.inflight.load(Relaxed) != 0)
            .map(|(head, descriptor)| (descriptor.counter.load(Relaxed), head))
            .collect();
        left.sort_unstable();
        self.counter = left.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        left.into_iter().map(|(_, head)| head).collect()
    }

    /// A request was fetched.
    #[inline]
    pub(crate) fn fetched(&mut self, head: u16) {
        let descriptor = self.descriptor(head);
        descriptor.counter.store(self.counter, Relaxed);
        descriptor.inflight.store(1, Release);
        self.counter = self.counter.wrapping_add(1);
    }

    /// A request is about to be answered: put it on the list of this batch.
    #[inline]
    pub(crate) fn answering(&self, head: u16) {
        let header = self.header();
        self.descriptor(head).next.store(header.last_batch_head.load(Relaxed), Relaxed);
        header.last_batch_head.store(head, Release);
    }

    /// The batch was published by this value of the used index.
    #[inline]
    pub(crate) fn answered(&self, batch: impl Iterator<Item = u16>, used_idx: u16) {
        for head in batch {
            self.descriptor(head).inflight.store(0, Release);
        }
        self.header().used_idx.store(used_idx, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn successor(message: &VhostUserInflight, file: &File) -> QueueInflight {
        Inflight::map(message, file, &Maps::default())
            .expect("the buffer")
            .queue(1, 8)
            .expect("the queue")
    }

    #[test]
    fn a_successor_takes_up_what_was_left_in_order() {
        let (message, file, first) = create(2, 8, &Maps::default()).expect("a buffer");
        let mut queue = first.queue(1, 8).expect("the queue");
        assert!(queue.take_up(65_530).is_empty());
        for head in [5, 0, 3, 7] {
            queue.fetched(head);
        }
        queue.answering(0);
        queue.answered([0].into_iter(), 65_531);
        let mut second = successor(&message, &file);
        assert_eq!(second.take_up(65_531), [5, 3, 7]);
        second.fetched(0);
        assert_eq!(successor(&message, &file).take_up(65_531), [5, 3, 7, 0]);
    }

    #[test]
    fn a_batch_that_was_published_is_not_served_again() {
        let (message, file, first) = create(2, 8, &Maps::default()).expect("a buffer");
        let mut queue = first.queue(1, 8).expect("the queue");
        queue.take_up(10);
        for head in [1, 2, 3] {
            queue.fetched(head);
        }
        // Dies after the used index went to 12 and before anything else.
        queue.answering(1);
        queue.answering(3);
        assert_eq!(successor(&message, &file).take_up(12), [2]);
        assert_eq!(successor(&message, &file).take_up(12), [2]);
    }

    #[test]
    fn a_batch_that_was_not_published_is_served_again() {
        let (message, file, first) = create(2, 8, &Maps::default()).expect("a buffer");
        let mut queue = first.queue(1, 8).expect("the queue");
        queue.take_up(0);
        queue.fetched(4);
        queue.answering(4);
        assert_eq!(successor(&message, &file).take_up(0), [4]);
    }

    #[test]
    fn a_successor_learns_of_the_write_cache() {
        let (mut message, file, first) = create(2, 8, &Maps::default()).expect("a buffer");
        assert_eq!(first.write_cache(), None);
        first.queue(1, 8).expect("the queue").fetched(7);
        for on in [false, true] {
            first.note_write_cache(on);
            let next = Inflight::map(&message, &file, &Maps::default());
            assert_eq!(next.expect("the buffer").write_cache(), Some(on));
        }
        message.mmap_size = 2 * region_size(8);
        let foreign =
            Inflight::map(&message, &file, &Maps::default()).expect("another program's buffer");
        foreign.note_write_cache(true);
        assert_eq!(foreign.write_cache(), None);
    }

    #[test]
    fn a_queue_may_be_longer_than_the_front_end_said() {
        let (message, file, first) = create(2, 128, &Maps::default()).expect("a buffer");
        assert_eq!((message.num_queues, message.queue_size), (2, 128));
        let mut queues = [0, 1].map(|index| first.queue(index, 256).expect("room for it"));
        queues.iter_mut().for_each(|queue| assert!(queue.take_up(0).is_empty()));
        queues[0].fetched(255);
        queues[1].fetched(200);
        let next = Inflight::map(&message, &file, &Maps::default()).expect("the buffer");
        let left = [0, 1].map(|index| next.queue(index, 256).expect("room for it").take_up(0));
        assert_eq!(left, [[255], [200]]);
        assert!(next.queue(2, 8).is_none() && next.queue(0, 2048).is_none());
    }

    #[test]
    fn a_buffer_too_small_is_refused() {
        let (mut message, file, _) = create(1, 8, &Maps::default()).expect("a buffer");
        message.num_queues = 60_000;
        assert!(Inflight::map(&message, &file, &Maps::default()).is_err());
    }
}
