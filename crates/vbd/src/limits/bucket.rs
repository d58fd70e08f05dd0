//! Buckets of which requests take what they need. One that is empty lends: who takes from it is told when what he took is
//! there. So no request is too large for it, and none waits for ever.

use ringtap_io::Time;
use ringtap_io::sync::atomic::{AtomicU64, Ordering::SeqCst};
use ringtap_io::sync::broken;

use super::{Limits, Rate, Rates};

const SECOND: u128 = 1_000_000_000;
/// What a bucket holds, as time in which it fills: threads that wake late shall lose nothing by it.
const DEPTH: Time = 10_000_000;
/// What a queue takes at once, as time in which it comes in: a cache line that all share is then touched at most so often.
const CHUNK: Time = 200_000;
/// What a discard counts as, as Linux counts it: no byte is moved.
const SECTOR: u64 = 512;

/// Which of the limits concern a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Read,
    Write,
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Requests,
    Bytes,
}

/// Fills at a rate, up to its depth.
#[derive(Debug)]
pub(super) struct Bucket {
    per_second: u64,
    /// How long it takes to fill.
    depth: Time,
    /// When it will be, or was, empty of debt: what comes in until then has been taken.
    taken_until: AtomicU64,
}

impl Bucket {
    pub(super) fn new(per_second: u64, depth: Time) -> Bucket {
        Bucket { per_second: per_second.max(1), depth, taken_until: AtomicU64::new(0) }
    }

    /// How long it takes until so much has come in.
    fn time_of(&self, amount: u64) -> Time {
        let rate = u128::from(self.per_second);
        let nanos = (u128::from(amount) * SECOND + rate / 2) / rate;
        nanos.min(Time::MAX.into()) as Time
    }

    /// What comes in within so much time.
    fn amount_in(&self, time: Time) -> u64 {
        let amount = u128::from(self.per_second) * u128::from(time) / SECOND;
        amount.min(u64::MAX.into()) as u64
    }

    /// Take so much: when it may be used.
    pub(super) fn take(&self, now: Time, amount: u64) -> Time {
        let (takes, oldest) = (self.time_of(amount), now.saturating_sub(self.depth));
        let next = |until: u64| Some(until.max(oldest).saturating_add(takes));
        let before = if broken("budget taken twice") {
            let until = self.taken_until.load(SeqCst);
            self.taken_until.store(next(until).unwrap_or(until), SeqCst);
            Ok(until)
        } else {
            self.taken_until.fetch_update(SeqCst, SeqCst, next)
        };
        before.unwrap_or_else(|until| until).max(oldest)
    }
}

/// The buckets of one set of limits. Other limits are other buckets, which know nothing of what was taken from these.
#[derive(Debug)]
pub(super) struct Budget {
    buckets: Vec<(Unit, Option<Way>, Bucket)>,
    iops_size: u64,
}

impl Budget {
    /// None where nothing is limited.
    pub(super) fn new(limits: &Limits) -> Option<Budget> {
        let mut buckets = vec![];
        for (unit, Rates { total, read, write }) in
            [(Unit::Requests, limits.iops), (Unit::Bytes, limits.bps)]
        {
            for (way, rate) in [(None, total), (Some(Way::Read), read), (Some(Way::Write), write)] {
                buckets.extend(of_rate(rate).into_iter().map(|bucket| (unit, way, bucket)));
            }
        }
        (!buckets.is_empty()).then_some(Budget { buckets, iops_size: limits.iops_size })
    }

    /// In what time what a request needs comes in.
    fn cost(&self, way: Way, discard: bool, len: u64) -> Time {
        let of = |unit| {
            let amount = self.amount(unit, discard, len);
            self.of(unit, way).map(move |bucket| bucket.time_of(amount))
        };
        of(Unit::Requests).chain(of(Unit::Bytes)).max().unwrap_or(0)
    }

    fn of(&self, unit: Unit, way: Way) -> impl Iterator<Item = &Bucket> {
        let concerns = move |of: &Option<Way>| of.is_none_or(|of| of == way);
        let all = self.buckets.iter().filter(move |(of, ways, _)| *of == unit && concerns(ways));
        all.map(|(.., bucket)| bucket)
    }

    fn amount(&self, unit: Unit, discard: bool, len: u64) -> u64 {
        let len = if discard { len.min(SECTOR) } else { len };
        match unit {
            Unit::Bytes => len,
            Unit::Requests if self.iops_size == 0 => 1,
            Unit::Requests => len.div_ceil(self.iops_size).max(1),
        }
    }
}

fn of_rate(rate: Rate) -> Vec<Bucket> {
    let Rate { average, burst, burst_seconds } = rate;
    if average == 0 {
        return vec![];
    }
    let slow = Bucket::new(average, DEPTH);
    if burst <= average {
        return vec![slow];
    }
    // It empties at the one rate while it fills at the other.
    let depth = slow.time_of((burst - average).saturating_mul(burst_seconds.max(1)));
    vec![Bucket::new(average, depth.max(DEPTH)), Bucket::new(burst, DEPTH)]
}

/// What one line of one queue has taken from a budget, and not used yet.
#[derive(Debug)]
pub(super) struct Grant<B> {
    budget: B,
    requests: u64,
    bytes: u64,
    /// When it took last.
    taken: Time,
}

impl<B: std::ops::Deref<Target = Budget>> Grant<B> {
    pub(super) fn new(budget: B) -> Grant<B> {
        Grant { budget, requests: 0, bytes: 0, taken: 0 }
    }

    /// In what time what a request needs comes in; nothing is taken.
    pub(super) fn cost(&self, way: Way, discard: bool, len: u64) -> Time {
        self.budget.cost(way, discard, len)
    }

    /// Take what a request needs: when it may go.
    pub(super) fn take(&mut self, now: Time, way: Way, discard: bool, len: u64) -> Time {
        // The buckets would have run over meanwhile.
        if now.saturating_sub(self.taken) > DEPTH {
            (self.requests, self.bytes) = (0, 0);
        }
        let mut due = 0;
        for unit in [Unit::Requests, Unit::Bytes] {
            let needed = self.budget.amount(unit, discard, len);
            let have = match unit {
                Unit::Requests => &mut self.requests,
                Unit::Bytes => &mut self.bytes,
            };
            if *have < needed {
                let Some(chunk) = self.budget.of(unit, way).map(|one| one.amount_in(CHUNK)).min()
                else {
                    continue;
                };
                let more = chunk.max(needed - *have);
                let when = self.budget.of(unit, way).map(|bucket| bucket.take(now, more)).max();
                due = due.max(when.unwrap_or(0));
                *have += more;
                self.taken = now;
            }
            *have -= needed;
        }
        due
    }
}
