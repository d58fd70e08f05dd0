//! What a tenant may have of its device: it comes in at a rate that each plan sets, and is taken a chunk at a time. One that is
//! empty lends, and says when what was taken will be there: so no request is too large for it, and none waits for ever.

use ringtap_io::Time;
use ringtap_io::sync::atomic::{AtomicU64, Ordering::SeqCst};
use ringtap_io::sync::broken;

const SECOND: u128 = 1_000_000_000;
/// What is kept of what was not used, as time in which it comes in: threads that wake late shall lose nothing by it.
pub(super) const DEPTH: Time = 10_000_000;
/// What a queue takes at once, as time in which it comes in.
const CHUNK: Time = 200_000;
/// The rate before there is a plan.
const UNLIMITED: u64 = u64::MAX;

/// Cost that may be used, so much in a second.
#[derive(Debug)]
pub(super) struct Allowance {
    per_second: AtomicU64,
    /// When it will be, or was, empty of debt.
    taken_until: AtomicU64,
}

impl Default for Allowance {
    fn default() -> Allowance {
        Allowance { per_second: AtomicU64::new(UNLIMITED), taken_until: AtomicU64::new(0) }
    }
}

fn time_of(amount: u64, rate: u64) -> Time {
    let nanos = u128::from(amount) * SECOND / u128::from(rate.max(1));
    nanos.min((Time::MAX / 4).into()) as Time
}

/// What is left of a debt where what pays for it comes in at another rate from now on.
pub(super) fn at_rate(due: Time, now: Time, before: u64, rate: u64) -> Time {
    let left = u128::from(due.saturating_sub(now)) * u128::from(before) / u128::from(rate.max(1));
    now.saturating_add(left.min((Time::MAX / 4).into()) as Time)
}

impl Allowance {
    pub(super) fn rate(&self) -> u64 {
        self.per_second.load(SeqCst)
    }

    pub(super) fn is_unlimited(&self) -> bool {
        self.rate() == UNLIMITED
    }

    /// What comes in while a queue uses one chunk.
    pub(super) fn chunk(&self) -> u64 {
        let chunk = u128::from(self.rate()) * u128::from(CHUNK) / SECOND;
        chunk.min((u64::MAX / 2).into()) as u64
    }

    /// Take so much: when it may be used, and at which rate it comes in.
    pub(super) fn take(&self, now: Time, amount: u64) -> (Time, u64) {
        let rate = self.rate();
        let (takes, oldest) = (time_of(amount, rate), now.saturating_sub(DEPTH));
        let next = |until: u64| Some(until.max(oldest).saturating_add(takes));
        let before = if broken("share taken twice") {
            let until = self.taken_until.load(SeqCst);
            self.taken_until.store(next(until).unwrap_or(until), SeqCst);
            Ok(until)
        } else {
            self.taken_until.fetch_update(SeqCst, SeqCst, next)
        };
        (before.unwrap_or_else(|until| until).max(oldest), rate)
    }

    /// From now on it comes in at another rate, for debts that there are, too. What another thread takes at the same moment is
    /// counted by either rate.
    pub(super) fn set(&self, now: Time, rate: u64) {
        let before = self.per_second.swap(rate.max(1), SeqCst);
        if before != UNLIMITED && before != rate {
            let scaled = |until| (until > now).then(|| at_rate(until, now, before, rate));
            if broken("debt kept") {
                return;
            }
            let _ = self.taken_until.fetch_update(SeqCst, SeqCst, scaled);
        }
    }

    /// Nobody is held by it any more, and nothing is owed.
    pub(super) fn lift(&self) {
        self.per_second.store(UNLIMITED, SeqCst);
        self.taken_until.store(0, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Time = 1_000_000_000;

    #[test]
    fn a_debt_is_paid_at_the_rate_that_holds() {
        let allowance = Allowance::default();
        assert_eq!(allowance.take(SECOND, 4096), (SECOND - DEPTH, UNLIMITED));
        allowance.set(SECOND, 1000);
        // It lends ten seconds of it.
        assert_eq!(allowance.take(SECOND, 10_000).0, SECOND - DEPTH);
        assert_eq!(allowance.take(SECOND, 0).0, 11 * SECOND - DEPTH);
        // At ten times the rate one is left.
        allowance.set(SECOND, 10_000);
        let due = allowance.take(SECOND, 0).0;
        assert!((due - SECOND).abs_diff(SECOND) <= DEPTH, "{due}");
        // And so it is of who waits for it.
        assert_eq!(at_rate(11 * SECOND, SECOND, 1000, 10_000), 2 * SECOND);
        assert_eq!(at_rate(SECOND / 2, SECOND, 1000, 10_000), SECOND);
        assert!(at_rate(Time::MAX, 0, u64::MAX, 1) < Time::MAX / 2);
    }
}
