//! The first pass over a disk, and what a job owes the copy.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::Range;

use crate::map::Map;

/// How far the first pass is, whose pieces are begun in their order, several at a time.
pub(super) struct First {
    /// All before this was begun.
    begun: Cell<u64>,
    /// Where pieces begin that have not been copied.
    in_hand: RefCell<BTreeSet<u64>>,
}

impl First {
    pub(super) fn from(offset: u64) -> First {
        First { begun: offset.into(), in_hand: RefCell::default() }
    }

    pub(super) fn begins(&self, piece: &Range<u64>) {
        self.begun.set(self.begun.get().max(piece.end));
        self.in_hand.borrow_mut().insert(piece.start);
    }

    pub(super) fn has_ended(&self, piece: &Range<u64>) {
        self.in_hand.borrow_mut().remove(&piece.start);
    }

    pub(super) fn is_over(&self) {
        self.begun.set(u64::MAX);
    }

    /// All before this is copied.
    pub(super) fn dealt_with(&self) -> u64 {
        self.in_hand.borrow().first().copied().unwrap_or(self.begun.get())
    }
}

/// Regions whose marks are cleared, and set again unless they are copied.
pub(super) struct Owed<'a> {
    pub(super) marks: &'a Map,
    pub(super) range: Option<Range<u64>>,
}

impl Owed<'_> {
    pub(super) fn paid(mut self) {
        self.range = None;
    }
}

impl Drop for Owed<'_> {
    fn drop(&mut self) {
        self.range.take().into_iter().for_each(|range| self.marks.mark(range));
    }
}
