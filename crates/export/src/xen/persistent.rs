//! Persistent grants: pages of a frontend that stay mapped, because it uses the same again and again.
//!
//! This thread copies from and to them, which takes no call of the hypervisor. The disk never does: a
//! server that is killed has nothing in flight to pages that the kernel takes away from it. There is room
//! for so many; what was not used for longest goes first. A page that cannot be mapped is copied from and
//! to by the hypervisor, as any other.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::gntdev::Foreign;
use super::pages::Pages;
use super::wire::Segment;

/// A page not used for so many turns may go. A frontend that uses more than there is room for, all of them
/// in turn, has some of them copied by the hypervisor rather than each mapped anew.
const LONG: u64 = 1024;

/// Pages mapped by one call, which can only be given up together.
struct Chunk {
    pages: Pages,
    grants: Vec<u32>,
    /// The turn it was used in last.
    used: u64,
}

/// The pages that are kept.
pub(crate) struct PersistentGrants {
    chunks: Vec<Option<Chunk>>,
    /// Chunk and page, by grant.
    places: HashMap<u32, (usize, usize)>,
    most: usize,
    turn: u64,
    wanted: Vec<u32>,
    /// The frontend was caught granting what cannot be mapped: nothing new is.
    refused: bool,
}

impl PersistentGrants {
    /// Room for so many pages.
    pub(crate) fn new(most: usize) -> PersistentGrants {
        PersistentGrants {
            chunks: vec![],
            places: HashMap::new(),
            most,
            turn: 0,
            wanted: vec![],
            refused: false,
        }
    }

    /// Map what the segments name and is not yet mapped.
    pub(crate) fn map(&mut self, foreign: &impl Foreign, segments: impl Iterator<Item = Segment>) {
        self.turn += 1;
        self.wanted.clear();
        for segment in segments {
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
        self.chunks[number] = Some(Chunk { pages, grants, used });
    }

    /// Give up the pages not used for longest; false where all were used lately.
    fn give_up_oldest(&mut self) -> bool {
        let chunks = self.chunks.iter_mut().flatten();
        let oldest = chunks.filter(|chunk| chunk.used + LONG < self.turn);
        let Some(used) = oldest.map(|chunk| chunk.used).min() else { return false };
        for slot in &mut self.chunks {
            if let Some(chunk) = slot.take_if(|chunk| chunk.used == used) {
                for grant in &chunk.grants {
                    self.places.remove(grant);
                }
            }
        }
        true
    }

    /// Where a segment lies, if its page is mapped. Good until the next [`PersistentGrants::map`].
    #[inline]
    pub(crate) fn address(&self, segment: &Segment) -> Option<*mut u8> {
        let (chunk, page) = *self.places.get(&segment.grant)?;
        let pages = &self.chunks.get(chunk)?.as_ref()?.pages;
        Some(pages.address(page, segment.offset.into()))
    }
}
