//! The memory of a log, taken as it is needed: a log has room for far more changes than most images see between two flushes.
//!
//! What is mapped without memory is never touched: on a full file system that would end the process.

use std::iter;
use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;

use ringtap_io::SharedWords;

use super::{COUNT, FIRST, RECORD, RestartLog};

/// Changes of each half that have their memory from the start,
const LEAST: u64 = 2048;
/// and how many more are given theirs at once.
const STEP: u64 = 4096;

/// Changes that a log of that capacity surely has room for after a flush.
pub(super) fn least(capacity: u64) -> u64 {
    LEAST.min(capacity)
}

/// Words of these changes of each half.
fn of_changes(capacity: u64, changes: Range<u64>) -> impl Iterator<Item = Range<usize>> {
    let of_half = move |half: u64| {
        let [begin, end] = [changes.start, changes.end]
            .map(|number| FIRST + RECORD * (half * capacity + number) as usize);
        begin..end
    };
    (0..2).map(of_half)
}

/// Words that have their memory from the start.
pub(super) fn at_first(capacity: u64) -> impl Iterator<Item = Range<usize>> {
    let behind = RestartLog::words_for(capacity)..RestartLog::all_words_for(capacity);
    iter::once(0..FIRST).chain(of_changes(capacity, 0..least(capacity))).chain([behind])
}

impl RestartLog {
    /// As [`RestartLog::room`], where there is memory for `wanted` changes more or some can be had; else less.
    pub fn room_for(&self, wanted: u64) -> u64 {
        let count = self.word(COUNT[self.current()]);
        let needed = count.saturating_add(wanted).min(self.capacity);
        if needed > self.ready.load(SeqCst) {
            self.make_ready(needed);
        }
        self.ready.load(SeqCst).saturating_sub(count)
    }

    fn make_ready(&self, needed: u64) {
        let Some(file) = &self.file else { return };
        let ready = self.ready.load(SeqCst);
        let next = needed.next_multiple_of(STEP).min(self.capacity);
        let mut parts = of_changes(self.capacity, ready..next);
        if parts.all(|part| SharedWords::take_space(file, part).is_ok()) {
            self.ready.store(next, SeqCst);
        }
    }
}
