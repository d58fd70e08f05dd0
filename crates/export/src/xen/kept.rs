//! Persistent grants: pages of a frontend that stay mapped, because it uses the same again and again.
//!
//! Data goes straight between them and the image. There is room for so many; what was not used for
//! longest goes first. A page that cannot be mapped is copied from and to, as any other.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use ringtap_io::Mem;

use super::gntdev::Foreign;
use super::pages::Pages;
use super::wire::Segment;

/// Pages mapped by one call, which can only be given up together.
struct Chunk {
    pages: Pages,
    grants: Vec<u32>,
    /// Leases that name it.
    users: u32,
    /// The turn it was used in last.
    used: u64,
}

/// The pages that are kept.
pub(crate) struct Kept {
    chunks: Vec<Option<Chunk>>,
    /// Chunk and page, by grant.
    places: HashMap<u32, (usize, usize)>,
    most: usize,
    turn: u64,
    spare: Vec<Lease>,
    wanted: Vec<u32>,
    /// The frontend was caught granting what cannot be mapped: nothing new is.
    refused: bool,
}

/// Kept pages in the order of a request's segments. Give it back by [`Kept::end`].
#[derive(Default)]
pub(crate) struct Lease {
    iovecs: Vec<libc::iovec>,
    chunks: Vec<usize>,
}

impl Lease {
    /// The memory. It is good until the lease ends.
    pub(crate) fn mem(&self) -> Mem {
        // SAFETY: the chunks stay mapped while the lease counts as their user, and the queue ends it
        // only once its request has been answered; the frontend may change the bytes.
        unsafe { Mem::from_iovecs(&self.iovecs) }
    }
}

impl Kept {
    /// Room for so many pages.
    pub(crate) fn new(most: usize) -> Kept {
        Kept {
            chunks: vec![],
            places: HashMap::new(),
            most,
            turn: 0,
            spare: vec![],
            wanted: vec![],
            refused: false,
        }
    }

    /// Map what the segments of a turn's requests name and is not yet mapped.
    pub(crate) fn map<'a>(
        &mut self,
        foreign: &impl Foreign,
        requests: impl Iterator<Item = &'a [Segment]>,
    ) {
        self.turn += 1;
        self.wanted.clear();
        for segment in requests.flatten() {
            match self.places.get(&segment.grant) {
                Some((chunk, _)) => {
                    if let Some(chunk) = self.chunks[*chunk].as_mut() {
                        chunk.used = self.turn;
                    }
                }
                None => self.wanted.push(segment.grant),
            }
        }
        if self.wanted.is_empty() || self.refused {
            return;
        }
        self.wanted.sort_unstable();
        self.wanted.dedup();
        while self.places.len() + self.wanted.len() > self.most {
            if !self.give_up_oldest() {
                return;
            }
        }
        match foreign.map(&self.wanted) {
            Ok(pages) => self.keep(pages),
            Err(error) => {
                tracing::warn!(
                    "cannot keep {} pages of domain {} mapped: {error}; they are copied instead",
                    self.wanted.len(),
                    foreign.domain()
                );
                self.refused = true;
            }
        }
    }

    fn keep(&mut self, pages: Pages) {
        let free = self.chunks.iter().position(Option::is_none);
        let number = free.unwrap_or_else(|| {
            self.chunks.push(None);
            self.chunks.len() - 1
        });
        for (page, grant) in self.wanted.iter().enumerate() {
            if let Entry::Vacant(place) = self.places.entry(*grant) {
                place.insert((number, page));
            }
        }
        let (grants, used) = (self.wanted.clone(), self.turn);
        self.chunks[number] = Some(Chunk { pages, grants, users: 0, used });
    }

    /// Give up the pages not used for longest; false where all are in use or were just asked for.
    fn give_up_oldest(&mut self) -> bool {
        let chunks = self.chunks.iter_mut().flatten();
        let oldest = chunks.filter(|chunk| chunk.users == 0 && chunk.used < self.turn);
        let Some(used) = oldest.map(|chunk| chunk.used).min() else { return false };
        for slot in &mut self.chunks {
            if let Some(chunk) = slot.take_if(|chunk| chunk.users == 0 && chunk.used == used) {
                for grant in &chunk.grants {
                    self.places.remove(grant);
                }
            }
        }
        true
    }

    /// The memory of a request's segments, where all of it is mapped.
    pub(crate) fn lease(&mut self, segments: &[Segment]) -> Option<Lease> {
        if segments.iter().any(|segment| !self.places.contains_key(&segment.grant)) {
            return None;
        }
        let mut lease = self.spare.pop().unwrap_or_default();
        for segment in segments {
            let (number, page) = *self.places.get(&segment.grant)?;
            let chunk = self.chunks.get_mut(number)?.as_mut()?;
            if !lease.chunks.contains(&number) {
                chunk.users += 1;
                lease.chunks.push(number);
            }
            let base = chunk.pages.address(page, segment.offset.into());
            let len = usize::from(segment.len);
            match lease.iovecs.last_mut() {
                Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base => {
                    last.iov_len += len;
                }
                _ => lease.iovecs.push(libc::iovec { iov_base: base.cast(), iov_len: len }),
            }
        }
        Some(lease)
    }

    /// A lease's request was answered.
    pub(crate) fn end(&mut self, mut lease: Lease) {
        for number in lease.chunks.drain(..) {
            if let Some(chunk) = &mut self.chunks[number] {
                chunk.users -= 1;
            }
        }
        lease.iovecs.clear();
        self.spare.push(lease);
    }
}
