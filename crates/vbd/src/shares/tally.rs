//! What ended, and how long it took: counted by a queue for itself, and brought to its tenant a chunk at a time.

use ringtap_io::Time;
use ringtap_io::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::cost;

/// Lengths up to 4 KiB, 16 KiB and so on.
const LENGTHS: usize = 6;
/// Requests that take about as long as one another: that read, and that change something, by length.
pub(super) const CLASSES: usize = 2 * LENGTHS;

fn class(change: bool, len: u64) -> usize {
    let length = (0..LENGTHS - 1).find(|length| len <= 4096 << (2 * length));
    usize::from(change) * LENGTHS + length.unwrap_or(LENGTHS - 1)
}

/// How many ended of each class, and how long they took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Latencies([(u64, Time); CLASSES]);

impl Latencies {
    pub(super) fn add(&mut self, change: bool, len: u64, took: Time) {
        let (count, nanos) = &mut self.0[class(change, len)];
        *count += 1;
        *nanos += took;
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (u64, Time)> {
        self.0.into_iter()
    }
}

/// What ended, of one queue, since it was brought to the tenant.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    requests: u64,
    bytes: u64,
    latencies: Latencies,
}

impl Tally {
    /// A request has ended.
    pub(crate) fn add(&mut self, change: bool, len: u64, took: Time) {
        self.requests += 1;
        self.bytes += len;
        self.latencies.add(change, len, took);
    }
}

/// What ended of a tenant, all its queues together.
#[derive(Debug, Default)]
pub(super) struct Sums {
    requests: AtomicU64,
    bytes: AtomicU64,
    latencies: [(AtomicU64, AtomicU64); CLASSES],
}

/// What ended of a tenant since it was looked at last.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ended {
    pub(super) requests: u64,
    pub(super) bytes: u64,
    /// How long they took, all together.
    pub(super) nanos: Time,
}

impl Ended {
    pub(super) fn cost(&self) -> u64 {
        cost(0).saturating_mul(self.requests).saturating_add(self.bytes)
    }
}

impl Sums {
    /// Bring what a queue has counted.
    pub(super) fn bring(&self, tally: &mut Tally) {
        if tally.requests == 0 {
            return;
        }
        let Tally { requests, bytes, latencies } = std::mem::take(tally);
        self.requests.fetch_add(requests, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
        for ((counts, sums), (count, nanos)) in self.latencies.iter().zip(latencies.all()) {
            if count > 0 {
                counts.fetch_add(count, Relaxed);
                sums.fetch_add(nanos, Relaxed);
            }
        }
    }

    /// Bytes that were moved for it, of whose latency nothing is known.
    pub(super) fn moved(&self, bytes: u64) {
        self.requests.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }

    /// Take what there is.
    pub(super) fn take(&self, into: &mut Latencies) -> Ended {
        let mut all = 0;
        for ((counts, sums), (count, nanos)) in self.latencies.iter().zip(&mut into.0) {
            if counts.load(Relaxed) > 0 {
                let took = sums.swap(0, Relaxed);
                (*count, *nanos) = (*count + counts.swap(0, Relaxed), *nanos + took);
                all += took;
            }
        }
        let (requests, bytes) = (self.requests.swap(0, Relaxed), self.bytes.swap(0, Relaxed));
        Ended { requests, bytes, nanos: all }
    }
}
