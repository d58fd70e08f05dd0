//! What is fetched before a guest asks for it: the rest of where it reads, and more where it reads on and on.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// A read that misses brings the rest of this many chunks: 1 MiB.
const BLOCK: u32 = 4;
/// The most that is fetched ahead of who reads in sequence: 8 MiB.
const MOST: u32 = 32;
/// Sequences that are known.
const RUNS: usize = 8;

#[derive(Clone, Copy, Default)]
struct Run {
    /// Up to where it was read.
    end: u32,
    /// Up to where it was fetched.
    fetched: u32,
    window: u32,
    used: u64,
}

/// The sequences that guests read in.
#[derive(Default)]
pub(crate) struct Ahead(Mutex<(u64, [Run; RUNS])>);

impl Ahead {
    /// Chunks of these numbers are read, some of which are not here: what had better be fetched with them.
    pub(crate) fn read(&self, chunks: Range<u32>) -> Range<u32> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, runs) = &mut *state;
        *now += 1;
        let goes_on = |run: &&mut Run| {
            run.used > 0
                && chunks.start <= run.fetched
                && chunks.end > run.end
                && chunks.start + BLOCK >= run.end
        };
        if let Some(run) = runs.iter_mut().find(goes_on) {
            run.window = (run.window * 2).min(MOST);
            let from = run.fetched.max(chunks.start);
            let to = (chunks.end + run.window).max(from);
            *run = Run { end: chunks.end, fetched: to, window: run.window, used: *now };
            return from..to;
        }
        let to = chunks.end.next_multiple_of(BLOCK);
        if let Some(run) = runs.iter_mut().min_by_key(|run| run.used) {
            *run = Run { end: chunks.end, fetched: to, window: BLOCK / 2, used: *now };
        }
        chunks.start / BLOCK * BLOCK..to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_reads_on_has_more_and_more_fetched_and_who_jumps_does_not() {
        let ahead = Ahead::default();
        assert_eq!(ahead.read(5..6), 4..8);
        assert_eq!(ahead.read(8..9), 8..13);
        assert_eq!(ahead.read(13..14), 13..22);
        assert_eq!(ahead.read(1001..1002), 1000..1004);
        assert_eq!(ahead.read(22..23), 22..39);
        assert_eq!(ahead.read(500..501), 500..504);
        // No run is longer than that.
        let mut at = 39;
        for _ in 0..10 {
            let fetched = ahead.read(at..at + 1);
            assert!(fetched.end - at <= MOST + 1, "{fetched:?}");
            at = fetched.end;
        }
    }
}
