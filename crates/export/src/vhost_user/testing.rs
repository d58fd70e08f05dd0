//! A guest's side of a ring made of arbitrary bytes, for fuzz targets and property tests.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::{VhostUserInflight, VhostUserMemoryRegion};

use super::inflight::Inflight;
use super::mapping::Maps;
use super::memory::{Memory, Region};
use super::request::{Asked, Chain};
use super::virtqueue::{Addresses, RingError, Virtqueue};

/// Guest memory is two regions of this size, one after the other in guest addresses.
pub const REGION: u64 = 32 << 10;
/// The guest address of the first region.
pub const GUEST: u64 = 0x10_0000;
/// The front-end's own address of the first; the second lies far from it.
pub(super) const USER: [u64; 2] = [0x7000_0000_0000, 0x7f00_0000_0000];
/// The rings lie at the end of the first region, the descriptor table at its beginning.
const AVAILABLE: u64 = 17 << 10;
pub(super) const USED: u64 = 20 << 10;
pub(super) const ADDRESSES: Addresses =
    Addresses { descriptors: USER[0], available: USER[0] + AVAILABLE, used: USER[0] + USED };

/// Take up a queue from a region of requests in flight that another server left; gives the requests.
///
/// # Panics
/// Where one of them is none of the queue's, or comes twice: that is what is being looked for.
pub fn take_up(region: &[u8], queues: (u16, u16), index: u16, size: u16, used: u16) -> Vec<u16> {
    let file = File::from(memfd_create("inflight", MemfdFlags::CLOEXEC).expect("memfd"));
    ftruncate(&file, region.len() as u64).expect("its size");
    file.write_all_at(region, 0).expect("the region");
    let message = VhostUserInflight::new(region.len() as u64, 0, queues.0, queues.1);
    let Ok(inflight) = Inflight::map(&message, &file, &Maps::default()) else { return Vec::new() };
    let _noted = inflight.write_cache();
    inflight.note_write_cache(true);
    let Some(mut queue) = inflight.queue(index, size) else { return Vec::new() };
    let left = queue.take_up(used);
    let mut seen = std::collections::HashSet::new();
    assert!(left.iter().all(|head| *head < size && seen.insert(*head)), "{left:?} of {size}");
    // What is taken up is answered; then nothing is left.
    for head in &left {
        queue.fetched(*head);
        queue.answering(*head);
    }
    queue.answered(left.iter().copied(), used.wrapping_add(left.len() as u16));
    assert!(queue.take_up(used.wrapping_add(left.len() as u16)).is_empty());
    left
}

/// A ring in memory filled by the caller.
pub struct GuestRing {
    pub(super) memory: Arc<Memory>,
    ring: Virtqueue,
    bases: [u64; 2],
    pub(super) file: File,
}

/// What became of one chain.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing was available.
    Nothing,
    /// The ring itself is broken.
    Broken(RingError),
    /// A request for the device, of so many bytes.
    Device(u64),
    /// The guest asks for the identity.
    Identity,
    /// The request alone is bad.
    Bad,
}

impl GuestRing {
    /// Memory that begins with `bytes` (the descriptor table), with the chain `head` made available.
    ///
    /// # Panics
    /// Where there is no memory for a memfd.
    pub fn new(bytes: &[u8], size: u16, heads: &[u16]) -> GuestRing {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("memfd"));
        ftruncate(&file, 2 * REGION).expect("its size");
        file.write_all_at(&bytes[..bytes.len().min(AVAILABLE as usize)], 0).expect("the table");
        let mut available = vec![0u8; 4];
        available[2..4].copy_from_slice(&(heads.len() as u16).to_le_bytes());
        available.extend(heads.iter().flat_map(|head| head.to_le_bytes()));
        file.write_all_at(&available, AVAILABLE).expect("the available ring");
        let regions: Vec<Region> = [0, 1]
            .map(|i: u64| {
                let (guest, user) = (GUEST + i * REGION, USER[i as usize]);
                let region = VhostUserMemoryRegion::new(guest, REGION, user, i * REGION);
                Region::map(&region, &file, &Maps::default()).expect("a mapping")
            })
            .into();
        let memory = Memory::new(regions);
        let bases =
            USER.map(|user| memory.at_user_address(user, REGION).map_or(0, |base| base as u64));
        let ring = Virtqueue::new(&memory, ADDRESSES, size, false, 0).expect("the ring");
        GuestRing { memory: Arc::new(memory), ring, bases, file }
    }

    /// Fetch and parse the next chain, check that everything it names is guest memory, answer it.
    ///
    /// # Panics
    /// Where a chain reaches memory that is not the guest's: that is what is being looked for.
    pub fn serve_one(&mut self) -> Outcome {
        let head = match self.ring.fetch() {
            Ok(Some(head)) => head,
            Ok(None) => return Outcome::Nothing,
            Err(error) => return Outcome::Broken(error),
        };
        let mut chain = Chain::default();
        // SAFETY: the memory outlives the chain, which is parsed once.
        let asked = match unsafe { chain.parse(&self.ring, &self.memory, head) } {
            Ok(asked) => asked,
            Err(error) => return Outcome::Broken(error),
        };
        let (readable, writable) = chain.iovecs();
        for iov in readable.iter().chain(writable) {
            let (start, len) = (iov.iov_base as u64, iov.iov_len as u64);
            let inside = |base: &u64| start >= *base && start + len <= base + REGION;
            // The host may have put the two side by side, either first.
            let (low, high) = (self.bases[0].min(self.bases[1]), self.bases[0].max(self.bases[1]));
            let joined = low + REGION == high && start >= low && start + len <= high + REGION;
            assert!(joined || self.bases.iter().any(inside), "{start:#x}+{len:#x}");
        }
        let outcome = match asked {
            Asked::Device(request) => {
                assert!(request.mem.is_empty() || request.len == request.mem.len() as u64);
                Outcome::Device(request.len)
            }
            Asked::Identity(_) => Outcome::Identity,
            Asked::Bad(..) => Outcome::Bad,
        };
        let written = chain.answer(Ok(()), 0);
        chain.rest();
        assert_eq!(chain.storage(), 0, "an idle slot keeps no long lists");
        self.ring.put_used(0, head, written);
        self.ring.publish(1);
        outcome
    }

    /// The ring as another program sees it, at the same addresses of such memory.
    #[cfg(test)]
    pub(super) fn another_ring(&self, memory: &Memory) -> Virtqueue {
        Virtqueue::new(memory, ADDRESSES, self.ring.size(), false, 0).expect("the ring")
    }

    /// The used index, as the guest sees it.
    #[cfg(test)]
    pub(super) fn used(&self) -> u16 {
        self.word(USED + 2)
    }

    /// Make one more chain available.
    #[cfg(test)]
    pub(super) fn make_available(&self, head: u16) {
        let index = self.word(AVAILABLE + 2);
        let place = AVAILABLE + 4 + 2 * u64::from(index % self.ring.size());
        self.write(GUEST + place, &head.to_le_bytes());
        self.write(GUEST + AVAILABLE + 2, &index.wrapping_add(1).to_le_bytes());
    }

    #[cfg(test)]
    fn word(&self, offset: u64) -> u16 {
        u16::from_le_bytes(self.read(GUEST + offset, 2).try_into().expect("two bytes"))
    }

    #[cfg(test)]
    pub(super) fn write(&self, guest: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, guest - GUEST).expect("guest memory");
    }

    /// Bytes of guest memory.
    ///
    /// # Panics
    /// Where they are past its end.
    pub fn read(&self, guest: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, guest - GUEST).expect("guest memory");
        bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::chains::*;
    use super::*;

    #[test]
    fn an_ordinary_read() {
        let entries = [
            Entry(HEADER, 16, NEXT, 1),
            Entry(DATA, 4096, NEXT | WRITE, 2),
            Entry(STATUS, 1, WRITE, 0),
        ];
        let mut ring = GuestRing::new(&with_header(&entries, 0), 16, &[0]);
        assert_eq!(ring.serve_one(), Outcome::Device(4096));
        assert_eq!(ring.read(STATUS, 1), [0]);
        assert_eq!(ring.read(GUEST + USED, 12), [0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(ring.serve_one(), Outcome::Nothing);
    }

    #[test]
    fn a_write_whose_header_and_data_share_a_descriptor() {
        let entries = [Entry(HEADER, 16 + 512, NEXT, 1), Entry(STATUS, 1, WRITE, 0)];
        let mut ring = GuestRing::new(&with_header(&entries, 1), 16, &[0]);
        assert_eq!(ring.serve_one(), Outcome::Device(512));
    }

    #[test]
    fn a_buffer_over_two_regions_is_one_request() {
        let entries = [
            Entry(HEADER, 16, NEXT, 1),
            Entry(DATA - 512, 1024, NEXT | WRITE, 2),
            Entry(STATUS, 1, WRITE, 0),
        ];
        let mut ring = GuestRing::new(&with_header(&entries, 0), 16, &[0]);
        assert_eq!(ring.serve_one(), Outcome::Device(1024));
    }

    #[test]
    fn indirect_tables_are_followed_once() {
        let inner = [
            Entry(HEADER, 16, NEXT, 1),
            Entry(DATA, 512, NEXT | WRITE, 2),
            Entry(STATUS, 1, WRITE, 0),
        ];
        let place = GUEST + 0x1000;
        let memory = |outer: Entry, inner: &[Entry]| {
            let mut bytes = with_header(&[outer], 0);
            let inner = table(inner);
            bytes[0x1000..0x1000 + inner.len()].copy_from_slice(&inner);
            bytes
        };
        let serve =
            |outer, inner: &[Entry]| GuestRing::new(&memory(outer, inner), 16, &[0]).serve_one();
        assert_eq!(serve(Entry(place, 48, INDIRECT, 0), &inner), Outcome::Device(512));
        let broken = |outcome| matches!(outcome, Outcome::Broken(RingError::Indirect { .. }));
        assert!(broken(serve(Entry(place, 47, INDIRECT, 0), &inner)));
        assert!(broken(serve(Entry(place, 0, INDIRECT, 0), &inner)));
        assert!(broken(serve(Entry(place, 48, INDIRECT | NEXT, 0), &inner)));
        assert!(broken(serve(Entry(GUEST + 2 * REGION - 16, 48, INDIRECT, 0), &inner)));
        assert!(broken(serve(Entry(place, 16, INDIRECT, 0), &[Entry(place, 16, INDIRECT, 0)])));
        let looping = [Entry(HEADER, 16, NEXT, 1), Entry(DATA, 512, NEXT | WRITE, 0)];
        let outcome = serve(Entry(place, 32, INDIRECT, 0), &looping);
        assert_eq!(outcome, Outcome::Broken(RingError::Loop { head: 0 }));
    }

    #[test]
    fn discards_and_zeroes_are_one_range_that_is_not_too_long() {
        const DISCARD: u32 = 11;
        const ZEROES: u32 = 13;
        let most = super::super::request::MOST_ZEROED;
        let serve = |kind, len: u32, sector: u64, sectors: u32, flags: u32| {
            let entries = [Entry(HEADER, 16 + len, NEXT, 1), Entry(STATUS, 1, WRITE, 0)];
            let mut bytes = with_header(&entries, kind);
            bytes.extend(sector.to_le_bytes());
            bytes.extend([sectors, flags].map(u32::to_le_bytes).concat());
            GuestRing::new(&bytes, 16, &[0]).serve_one()
        };
        for kind in [DISCARD, ZEROES] {
            assert_eq!(serve(kind, 16, 5, 8, 0), Outcome::Device(4096));
            assert_eq!(serve(kind, 16, 0, most, 0), Outcome::Device(4 << 30));
            assert_eq!(serve(kind, 16, 0, most + 1, 0), Outcome::Bad, "longer than was told");
            assert_eq!(serve(kind, 16, u64::MAX, 8, 0), Outcome::Bad, "past every end");
            assert_eq!(serve(kind, 16, 5, 8, 2), Outcome::Bad, "a flag that there is not");
            assert_eq!(serve(kind, 15, 5, 8, 0), Outcome::Bad, "a part of a range");
            assert_eq!(serve(kind, 32, 5, 8, 0), Outcome::Bad, "two ranges");
            assert_eq!(serve(kind, 0, 5, 8, 0), Outcome::Bad, "none");
        }
        assert_eq!(serve(ZEROES, 16, 5, 8, 1), Outcome::Device(4096));
        assert_eq!(serve(DISCARD, 16, 5, 8, 1), Outcome::Bad, "a discard has no unmap");
    }

    #[test]
    fn what_is_wrong_with_one_request_stays_its_own() {
        let status = Entry(STATUS, 1, WRITE, 0);
        for (entries, why) in [
            (vec![Entry(HEADER, 15, NEXT, 1), status.clone()], "a short header"),
            (
                vec![Entry(HEADER, 16, NEXT, 1), Entry(DATA, 100, NEXT | WRITE, 2), status.clone()],
                "not whole sectors",
            ),
            (
                vec![Entry(HEADER, 16, NEXT, 1), Entry(1, 512, NEXT | WRITE, 2), status.clone()],
                "not guest memory",
            ),
            (
                vec![Entry(DATA, 512, NEXT | WRITE, 1), Entry(HEADER, 16, NEXT, 2), status.clone()],
                "readable after writable",
            ),
            (
                vec![
                    Entry(HEADER, 16, NEXT, 1),
                    Entry(DATA, 0, NEXT | WRITE, 2),
                    Entry(DATA, 512, NEXT | WRITE, 3),
                    status.clone(),
                ],
                "an empty descriptor",
            ),
            (
                vec![Entry(HEADER, 16, NEXT, 1), Entry(0, 0, NEXT, 2), status.clone()],
                "an empty descriptor, also where it names no memory",
            ),
        ] {
            let mut ring = GuestRing::new(&with_header(&entries, 0), 16, &[0]);
            assert_eq!(ring.serve_one(), Outcome::Bad, "{why}");
        }
        let silent = [Entry(HEADER, 16, 0, 0)];
        let mut ring = GuestRing::new(&with_header(&silent, 0), 16, &[0]);
        assert_eq!(ring.serve_one(), Outcome::Broken(RingError::NoStatus { head: 0 }));
    }

    #[test]
    fn broken_rings_are_named() {
        let looping = [Entry(HEADER, 16, NEXT, 0)];
        let mut ring = GuestRing::new(&with_header(&looping, 0), 16, &[0]);
        assert_eq!(ring.serve_one(), Outcome::Broken(RingError::Loop { head: 0 }));
        let far = [Entry(HEADER, 16, NEXT, 16)];
        let mut ring = GuestRing::new(&with_header(&far, 0), 16, &[0]);
        assert_eq!(ring.serve_one(), Outcome::Broken(RingError::Number { number: 16, size: 16 }));
        let mut ring = GuestRing::new(&[], 4, &[9]);
        assert_eq!(ring.serve_one(), Outcome::Broken(RingError::Number { number: 9, size: 4 }));
        let mut ring = GuestRing::new(&[], 4, &[0; 5]);
        assert_eq!(ring.serve_one(), Outcome::Broken(RingError::Index { from: 0, to: 5, size: 4 }));
    }

    #[test]
    fn memory_that_is_cut_short_breaks_its_own_ring_alone() {
        let entries = [
            Entry(HEADER, 16, NEXT, 1),
            Entry(DATA, 4096, NEXT | WRITE, 2),
            Entry(STATUS, 1, WRITE, 0),
        ];
        let bytes = with_header(&entries, 0);
        let mut ring = GuestRing::new(&bytes, 16, &[0, 0]);
        let mut other = GuestRing::new(&bytes, 16, &[0]);
        assert_eq!(ring.serve_one(), Outcome::Device(4096));
        // All of it goes: the available index is zero now, which one request ago was passed.
        ftruncate(&ring.file, 0).expect("cut");
        let broken = RingError::Index { from: 1, to: 0, size: 16 };
        assert_eq!(ring.serve_one(), Outcome::Broken(broken));
        assert_eq!(other.serve_one(), Outcome::Device(4096));
        // The second region alone: what is written to it is lost, the ring is whole.
        ftruncate(&other.file, REGION).expect("cut");
        assert_eq!(other.serve_one(), Outcome::Nothing);
        let mut third = GuestRing::new(&bytes, 16, &[0]);
        ftruncate(&third.file, REGION).expect("cut");
        assert_eq!(third.serve_one(), Outcome::Device(4096));
    }

    fn entry() -> impl Strategy<Value = Entry> {
        let address = prop_oneof![
            4 => (0..2 * REGION).prop_map(|offset| GUEST + offset),
            1 => any::<u64>(),
            1 => Just(HEADER),
        ];
        let len = prop_oneof![3 => 0u32..5000, 1 => Just(16), 1 => Just(512), 1 => any::<u32>()];
        (address, len, 0u16..8, 0u16..9).prop_map(|(a, l, f, n)| Entry(a, l, f, n))
    }

    proptest! {
        #[test]
        fn no_chain_reaches_past_guest_memory(
            entries in prop::collection::vec(entry(), 8),
            kind in prop_oneof![0u32..16, any::<u32>()],
            heads in prop::collection::vec(0u16..9, 0..9),
        ) {
            let mut ring = GuestRing::new(&with_header(&entries, kind), 8, &heads);
            for _ in 0..heads.len() + 1 {
                if matches!(ring.serve_one(), Outcome::Nothing | Outcome::Broken(_)) {
                    break;
                }
            }
        }

        /// However a good request is cut into descriptors, it asks for the same.
        #[test]
        fn cuts_do_not_matter(cuts in prop::collection::vec(1u32..700, 0..12), write in any::<bool>()) {
            let (mut entries, mut left) = (Vec::new(), 16 + 2048u32);
            let mut at = HEADER;
            let mut cut_header = |entries: &mut Vec<Entry>, len: u32| {
                entries.push(Entry(at, len, NEXT, entries.len() as u16 + 1));
                at += u64::from(len);
            };
            if write {
                for cut in cuts {
                    let len = cut.min(left);
                    if len > 0 {
                        cut_header(&mut entries, len);
                        left -= len;
                    }
                }
                if left > 0 {
                    cut_header(&mut entries, left);
                }
            } else {
                cut_header(&mut entries, 7);
                cut_header(&mut entries, 9);
                let (mut data, mut left) = (DATA, 2048u32);
                for cut in cuts.into_iter().chain([2048]) {
                    let len = cut.min(left);
                    if len > 0 {
                        entries.push(Entry(data, len, NEXT | WRITE, entries.len() as u16 + 1));
                        data += u64::from(len);
                        left -= len;
                    }
                }
            }
            entries.push(Entry(STATUS, 1, WRITE, 0));
            let mut ring = GuestRing::new(&with_header(&entries, u32::from(write)), 16, &[0]);
            prop_assert_eq!(ring.serve_one(), Outcome::Device(2048));
        }
    }
}
