//! Changes of watched files that a ring carries out.

use super::Ring;
use crate::watched::change_of;
use crate::{Key, Op};

impl Ring {
    /// Before an operation is handed over: what to say beside its key.
    #[inline]
    pub(super) fn watch_in_flight(&mut self, key: Key, op: &Op) -> u64 {
        let beside = self.watch(op);
        if beside != 0 {
            self.files.watched.keep(key, beside);
        }
        beside
    }

    #[inline]
    fn watch(&mut self, op: &Op) -> u64 {
        let Some((file, bytes, write)) = change_of(op) else { return 0 };
        match self.files.find(&self.ring, file) {
            Some(known) if known.watched => {
                self.files.watched.begin(file.slot() as usize, bytes, write)
            }
            _ => 0,
        }
    }

    /// Make a change here and now.
    pub(super) fn watch_here(&mut self, op: &Op, make: impl FnOnce(&mut Ring) -> i32) -> i32 {
        let beside = self.watch(op);
        self.files.watched.settle_begun();
        let result = make(self);
        self.files.watched.end(beside, result);
        self.files.watched.settle_ended();
        result
    }
}
