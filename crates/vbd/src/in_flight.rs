//! The requests that a queue has in flight, as another thread may look at them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed};
use std::time::Instant;

use ringtap_io::{Time, probes};
use serde::Serialize;

use crate::{Kind, Request};

/// Words of places; a queue that has more requests in flight shows so many.
const WORDS: usize = 4;
const PLACES: usize = WORDS * 64;
/// In a place: the kind stands above the length.
const LENGTH_BITS: u32 = 48;

/// Only its queue's thread writes here, so plain loads and stores do.
pub(crate) struct InFlight {
    used: [AtomicU64; WORDS],
    places: Box<[Place; PLACES]>,
    /// A moment on the clock of all and on the reactor's own.
    clock: OnceLock<(Instant, Time)>,
    busy: Busy,
}

/// For how long there has been a request in the first word of places, to which requests come first: as good as any.
#[derive(Default)]
struct Busy {
    /// Until the last moment of rest.
    nanos: AtomicU64,
    since: AtomicU64,
    /// The most that has been told, which never becomes less.
    told: AtomicU64,
}

#[derive(Default)]
struct Place {
    kind_and_length: AtomicU64,
    offset: AtomicU64,
    began: AtomicU64,
}

impl Default for InFlight {
    fn default() -> InFlight {
        let places = Box::new(std::array::from_fn(|_| Place::default()));
        InFlight { used: Default::default(), places, clock: OnceLock::new(), busy: Busy::default() }
    }
}

/// A request that has not ended.
#[derive(Clone, Debug, Serialize)]
pub struct Pending {
    /// What it asks for.
    pub kind: &'static str,
    /// Where, in bytes.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// How long ago it came.
    pub age_us: u64,
}

const NAMES: [&str; 5] = ["read", "write", "flush", "discard", "write-zeroes"];

pub(crate) fn number(kind: Kind) -> u64 {
    match kind {
        Kind::Read => 0,
        Kind::Write => 1,
        Kind::Flush => 2,
        Kind::Discard => 3,
        Kind::WriteZeroes { .. } => 4,
    }
}

impl InFlight {
    /// A request came; its place, where there is one.
    #[inline]
    pub(crate) fn begin(&self, request: &Request, now: Time) -> Option<usize> {
        let kind = number(request.kind);
        probes::request_start(kind, request.offset, request.len);
        let first = self.used[0].load(Relaxed);
        let (word, used) = if first != u64::MAX { (0, first) } else { self.free()? };
        let at = word * 64 + (!used).trailing_zeros() as usize;
        let place = &self.places[at % PLACES];
        place.kind_and_length.store(kind << LENGTH_BITS | request.len, Relaxed);
        place.offset.store(request.offset, Relaxed);
        place.began.store(now, Relaxed);
        self.used[word].store(used | (used + 1), Relaxed);
        if first == 0 {
            self.busy.since.store(now, Relaxed);
        }
        if self.clock.get().is_none() {
            self.set_clock(now);
        }
        Some(at)
    }

    #[cold]
    fn free(&self) -> Option<(usize, u64)> {
        let words = self.used.iter().map(|used| used.load(Relaxed)).enumerate();
        words.into_iter().find(|(_, used)| *used != u64::MAX)
    }

    #[cold]
    fn set_clock(&self, now: Time) {
        self.clock.get_or_init(|| (Instant::now(), now));
    }

    /// It has ended.
    #[inline]
    pub(crate) fn end(&self, place: Option<usize>, now: Time) {
        if let Some(place) = place {
            let used = &self.used[place / 64 % WORDS];
            let left = used.load(Relaxed) & !(1 << (place % 64));
            used.store(left, Relaxed);
            if left == 0 && place < 64 {
                let Busy { nanos, since, .. } = &self.busy;
                let more = now.saturating_sub(since.load(Relaxed));
                nanos.store(nanos.load(Relaxed).wrapping_add(more), Relaxed);
            }
        }
    }

    /// For how many nanoseconds there have been requests.
    pub(crate) fn busy(&self) -> u64 {
        let Busy { nanos, since, told } = &self.busy;
        // In this order: what ends meanwhile is counted the next time, and never twice.
        let ended = nanos.load(Acquire);
        let begun = since.load(Acquire);
        let going = match self.clock.get().filter(|_| self.used[0].load(Acquire) != 0) {
            Some(clock) => now(clock).saturating_sub(begun),
            None => 0,
        };
        let busy = ended.saturating_add(going);
        told.fetch_max(busy, Relaxed).max(busy)
    }

    /// Count those of a queue that has ended, too.
    pub(crate) fn add_busy(&self, nanos: u64) {
        self.busy.nanos.fetch_add(nanos, Relaxed);
    }

    /// Those in flight, the oldest first. One that ends meanwhile may be seen as another that took its place.
    pub(crate) fn look(&self) -> Vec<Pending> {
        let Some(now) = self.clock.get().map(now) else { return vec![] };
        let is_used = |at: &usize| self.used[at / 64].load(Relaxed) >> (at % 64) & 1 != 0;
        let pending = |at: usize| {
            let place = &self.places[at];
            let what = place.kind_and_length.load(Relaxed);
            Pending {
                kind: NAMES.get((what >> LENGTH_BITS) as usize).copied().unwrap_or("other"),
                offset: place.offset.load(Relaxed),
                length: what & ((1 << LENGTH_BITS) - 1),
                age_us: now.saturating_sub(place.began.load(Relaxed)) / 1000,
            }
        };
        let mut all: Vec<Pending> = (0..PLACES).filter(is_used).map(pending).collect();
        all.sort_by_key(|pending| std::cmp::Reverse(pending.age_us));
        all
    }
}

fn now((moment, then): &(Instant, Time)) -> Time {
    then + moment.elapsed().as_nanos() as Time
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringtap_io::Mem;

    #[test]
    fn what_has_not_ended_is_seen_and_no_more_than_there_is_room_for() {
        let requests = InFlight::default();
        assert!(requests.look().is_empty());
        let ask =
            |offset| Request { kind: Kind::Write, offset, len: 512, mem: Mem::EMPTY, fua: false };
        let mut places: Vec<_> = (0..300).map(|at| requests.begin(&ask(at), 1000 * at)).collect();
        assert_eq!(places.iter().flatten().count(), 256);
        assert_eq!(requests.look().len(), 256);
        let kept = places.swap_remove(70);
        places.into_iter().for_each(|place| requests.end(place, 5000));
        let seen = requests.look();
        assert_eq!(
            (seen.len(), seen[0].kind, seen[0].offset, seen[0].length),
            (1, "write", 70, 512)
        );
        requests.end(kept, 400_000);
        assert!(requests.look().is_empty());
    }

    #[test]
    fn busy_is_who_has_a_request_and_only_that_long() {
        let requests = InFlight::default();
        let ask = Request { kind: Kind::Read, offset: 0, len: 512, mem: Mem::EMPTY, fua: false };
        assert_eq!(requests.busy(), 0);
        let (one, other) = (requests.begin(&ask, 1000), requests.begin(&ask, 1500));
        requests.end(one, 1800);
        requests.end(other, 2100);
        let last = requests.begin(&ask, 5000);
        requests.end(last, 5010);
        assert_eq!(requests.busy(), 1110);
        // One that has not ended counts as far as it has come, and what was told stays.
        let _held = requests.begin(&ask, 600);
        let told = requests.busy();
        assert!(told >= 1510 && requests.busy() >= told);
        let sum = InFlight::default();
        sum.add_busy(1110);
        assert_eq!(sum.busy(), 1110);
    }
}
