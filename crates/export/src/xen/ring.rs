//! The ring a frontend shares: its requests out, answers in.
//!
//! Source: Xen, public/io/ring.h, the macros of the back end.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use super::pages::Pages;
use super::wire::{Abi, PAGE, Raw, Status, WORDS, answer};

/// Words of `struct blkif_sring`'s beginning.
const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 1;
const RSP_PROD: usize = 2;
const RSP_EVENT: usize = 3;
/// Where the first place lies, in words.
const FIRST: usize = 16;

/// Why a ring cannot be served on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// More requests than the ring has room for.
    #[error(
        "the frontend says it has put requests up to {to}, {from} are answered, and the ring holds {size}"
    )]
    Index {
        /// Requests answered.
        from: u32,
        /// What the ring says.
        to: u32,
        /// Places in the ring.
        size: u32,
    },
}

/// A ring, seen from its back end.
pub(crate) struct BackRing {
    pages: Pages,
    abi: Abi,
    size: u32,
    /// Requests fetched.
    fetched: u32,
    /// Answers published.
    published: u32,
}

/// Places in a ring of so many pages: as many as there is room for, rounded down to a power of two.
pub(crate) fn places(pages: usize, abi: Abi) -> u32 {
    let room = (pages * PAGE / 4).saturating_sub(FIRST) / abi.entry_words();
    if room == 0 { 0 } else { 1 << room.ilog2() }
}

impl BackRing {
    /// The ring on a frontend's pages, as far as it has been answered.
    pub(crate) fn new(pages: Pages, abi: Abi) -> BackRing {
        let size = places(pages.count(), abi);
        let published = pages.word(RSP_PROD).load(Acquire);
        BackRing { pages, abi, size, fetched: published, published }
    }

    /// The same, of which a server before this one fetched so many requests and did not answer them.
    pub(crate) fn with_left(self, left: u32) -> BackRing {
        BackRing { fetched: self.published.wrapping_add(left), ..self }
    }

    pub(crate) fn abi(&self) -> Abi {
        self.abi
    }

    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// Answers published, of all servers.
    pub(crate) fn published(&self) -> u32 {
        self.published
    }

    fn place(&self, index: u32) -> usize {
        FIRST + (index % self.size) as usize * self.abi.entry_words()
    }

    /// Whether the frontend has put something that was not fetched.
    #[inline]
    pub(crate) fn has_requests(&self) -> bool {
        self.pages.word(REQ_PROD).load(Relaxed) != self.fetched
    }

    /// Fetch the next request.
    #[inline]
    pub(crate) fn fetch(&mut self) -> Result<Option<Raw>, RingError> {
        let put = self.pages.word(REQ_PROD).load(Acquire);
        if put == self.fetched {
            return Ok(None);
        }
        // Beyond the answers there is room for a ring's worth, and what was fetched was put.
        let room = put.wrapping_sub(self.published);
        if room > self.size || room < self.fetched.wrapping_sub(self.published) {
            return Err(RingError::Index { from: self.published, to: put, size: self.size });
        }
        let from = self.place(self.fetched);
        let mut raw = [0; WORDS];
        for (i, word) in raw.iter_mut().take(self.abi.entry_words()).enumerate() {
            *word = self.pages.word(from + i).load(Relaxed);
        }
        self.fetched = self.fetched.wrapping_add(1);
        Ok(Some(raw))
    }

    /// Put an answer `ahead` places behind the published ones; [`BackRing::publish`] shows it.
    #[inline]
    pub(crate) fn put(&self, ahead: u32, id: u64, operation: u8, status: Status) {
        let to = self.place(self.published.wrapping_add(ahead));
        let (words, count) = answer(self.abi, id, operation, status);
        for (i, word) in words.into_iter().take(count).enumerate() {
            self.pages.word(to + i).store(word, Relaxed);
        }
    }

    /// Show the frontend `count` answers that were put; whether it wants to be called for them.
    #[inline]
    pub(crate) fn publish(&mut self, count: u32) -> bool {
        let new = self.published.wrapping_add(count);
        self.published = new;
        self.pages.word(RSP_PROD).store(new, Release);
        // The answers must be visible before the frontend's wish is read.
        fence(SeqCst);
        let wanted = self.pages.word(RSP_EVENT).load(Relaxed);
        new.wrapping_sub(wanted) < count
    }

    /// Ask to be called for the next request; true if it has come already.
    pub(crate) fn enable_calls(&self) -> bool {
        self.pages.word(REQ_EVENT).store(self.fetched.wrapping_add(1), Relaxed);
        // The wish must be visible before the index is read, or a request could slip between.
        fence(SeqCst);
        self.has_requests()
    }
}
