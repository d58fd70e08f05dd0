//! By how much guests are slowed for the target's sake: to a part of the rate that they write at by themselves, and no further.
//!
//! What that is, is seen at the beginning of each period, when nobody waits. For the rest of it there is a time for each
//! write by which it goes on at the latest, so that of the whole period the part comes about that guests are to have.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ringtap_io::Time;

/// How long a period is, and the beginning of it in which nobody waits.
const PERIOD: Time = 1_000_000_000;
const FREE: Time = 200_000_000;
/// The longest that a request waits, whatever was seen: clocks of threads differ.
const LONGEST: Time = 1_000_000_000;
/// Guests are not slowed to less than this part.
const LEAST: f64 = 0.05;

/// When guests' writes go on.
pub(crate) struct Brake {
    /// The part of their own rate that they have while they are slowed.
    part: f64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// When the period began.
    began: Time,
    /// Bytes of writes that began while nobody waited.
    free: u64,
    /// Bytes in a second that guests write by themselves; none where that was not seen yet.
    own_rate: Option<f64>,
    /// When the next write goes on.
    next: Time,
}

impl Brake {
    /// Of guests that are slowed by so many percent at most.
    pub(crate) fn new(percent: u32) -> Brake {
        let (wanted, free) =
            (1.0 - f64::from(percent.min(100)) / 100.0, FREE as f64 / PERIOD as f64);
        let part = ((wanted - free) / (1.0 - free)).max(LEAST);
        Brake { part, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For how long a write of so many bytes may be held up that begins now.
    pub(crate) fn patience(&self, now: Time, len: u64) -> Time {
        let mut state = self.lock();
        // Who has written nothing for as long as a look lasts is looked at anew: what was seen was another rate, or none.
        let idle = now > state.next.saturating_add(FREE);
        if state.began == 0 || now >= state.began.saturating_add(PERIOD) || idle {
            (state.began, state.free, state.next) = (now.max(1), 0, now);
        }
        if now < state.began.saturating_add(FREE) {
            state.free = state.free.saturating_add(len);
            state.next = state.next.max(now);
            return 0;
        }
        if state.free > 0 {
            let seen = state.free as f64 * 1e9 / FREE as f64;
            // One look is too short for few large writes.
            state.own_rate = Some(state.own_rate.map_or(seen, |rate| (3.0 * rate + seen) / 4.0));
            (state.free, state.next) = (0, now);
        }
        let Some(rate) = state.own_rate.filter(|_| self.part < 1.0) else { return 0 };
        let goes_on = state.next.clamp(now, now.saturating_add(LONGEST));
        state.next = goes_on.saturating_add((len as f64 * 1e9 / (rate * self.part)) as Time);
        goes_on - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 4096;

    /// Bytes that a guest writes in a second that brings a write each so many nanoseconds, and waits as long as it may.
    fn written(percent: u32, every: Time, seconds: u64) -> f64 {
        let brake = Brake::new(percent);
        let (mut now, mut bytes) = (PERIOD, 0);
        while now < PERIOD * (seconds + 1) {
            now += brake.patience(now, LEN).max(every);
            bytes += LEN;
        }
        bytes as f64 / seconds as f64
    }

    #[test]
    fn who_was_idle_is_not_held_to_that() {
        let brake = Brake::new(20);
        let mut now = PERIOD;
        // A write in 300 ms, for two periods; then as fast as they come.
        for _ in 0..7 {
            now += brake.patience(now, LEN) + 300_000_000;
        }
        let (burst, mut bytes) = (now, 0);
        while now < burst + PERIOD {
            now += brake.patience(now, LEN).max(100_000);
            bytes += LEN;
        }
        let least = 0.5 * (PERIOD / 100_000 * LEN) as f64;
        assert!(bytes as f64 > least, "{bytes} of {least}");
    }

    #[test]
    fn guests_keep_the_part_that_they_are_to_have() {
        for every in [100_000, 3_000_000] {
            let own = written(0, every, 20);
            for (percent, least) in [(10, 0.9), (20, 0.8), (50, 0.5)] {
                let part = written(percent, every, 20) / own;
                assert!((least - 0.02..least + 0.03).contains(&part), "{percent} %: {part}");
            }
            assert!((0.19..0.3).contains(&(written(95, every, 20) / own)));
        }
    }

    #[test]
    fn clocks_that_differ_hold_nobody_up_for_long() {
        let brake = Brake::new(50);
        brake.patience(100 * PERIOD, 1 << 20);
        brake.patience(100 * PERIOD + FREE, 1 << 30);
        for now in [0, 50 * PERIOD, 100 * PERIOD + FREE] {
            assert!(brake.patience(now, LEN) <= LONGEST);
        }
    }
}
