//! What a device has served: counts, bytes, latencies, CPU time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ringtap_io::probes;
use serde::Serialize;

use crate::in_flight::InFlight;
use crate::told::Told;
use crate::{Kind, Request};

/// Latencies are kept in buckets of 1/8 of a power of two: at most 12.5 % wide.
const SUB_BITS: u32 = 3;
const BUCKETS: usize = 64 << SUB_BITS;
const KINDS: usize = 5;

fn index(kind: Kind) -> usize {
    match kind {
        Kind::Read => 0,
        Kind::Write => 1,
        Kind::Flush => 2,
        Kind::Discard => 3,
        Kind::WriteZeroes { .. } => 4,
    }
}

/// The counters of one queue. Only its thread writes them, so plain loads and stores do.
pub(crate) struct QueueStats {
    kinds: [KindStats; KINDS],
    direct: AtomicU64,
    /// Without those that are enciphered or deciphered.
    bounced: AtomicU64,
    ciphered: AtomicU64,
    map_misses: AtomicU64,
    cpu_nanos: AtomicU64,
    pub(crate) in_flight: InFlight,
    pub(crate) told: Told,
}

struct KindStats {
    ended: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    latency: Box<[AtomicU64]>,
}

impl Default for KindStats {
    fn default() -> Self {
        KindStats {
            ended: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            latency: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

impl Default for QueueStats {
    fn default() -> Self {
        QueueStats {
            kinds: std::array::from_fn(|_| KindStats::default()),
            direct: AtomicU64::new(0),
            bounced: AtomicU64::new(0),
            ciphered: AtomicU64::new(0),
            map_misses: AtomicU64::new(0),
            cpu_nanos: AtomicU64::new(0),
            in_flight: InFlight::default(),
            told: Told::default(),
        }
    }
}

#[inline]
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(more), Relaxed);
}

#[inline]
fn bucket_of(nanos: u64) -> usize {
    let top = 63 - (nanos | 1).leading_zeros();
    if top < SUB_BITS {
        return nanos as usize;
    }
    let shift = top - SUB_BITS;
    (((shift + 1) as usize) << SUB_BITS) + ((nanos >> shift) as usize & ((1 << SUB_BITS) - 1))
}

/// The largest value that falls into a bucket.
fn bucket_top(bucket: usize) -> u64 {
    let sub = 1u64 << SUB_BITS;
    let (group, rest) = ((bucket as u64) >> SUB_BITS, bucket as u64 & (sub - 1));
    match group.checked_sub(1) {
        None => rest,
        Some(shift) => {
            (((sub + rest + 1) as u128) << shift).saturating_sub(1).min(u64::MAX.into()) as u64
        }
    }
}

impl QueueStats {
    #[inline]
    pub(crate) fn record(&self, request: &Request, nanos: u64, ok: bool) {
        let number = index(request.kind);
        probes::request_done(number as u64, request.offset, request.len, nanos, ok);
        let kind = &self.kinds[number];
        if ok {
            add(&kind.ended, 1);
            add(&kind.bytes, request.len);
        } else {
            add(&kind.failed, 1);
        }
        add(&kind.latency[bucket_of(nanos)], 1);
    }

    /// Requests that have ended, well or not.
    pub(crate) fn ended(&self) -> u64 {
        let of = |kind: &KindStats| kind.ended.load(Relaxed) + kind.failed.load(Relaxed);
        self.kinds.iter().map(of).sum()
    }

    /// Requests that have ended, well or not, and change a disk.
    pub(crate) fn changes(&self) -> u64 {
        let (write, zeroes) = (Kind::Write, Kind::WriteZeroes { unmap: false, fast: false });
        [write, Kind::Discard, zeroes]
            .into_iter()
            .map(|kind| &self.kinds[index(kind)])
            .map(|kind| kind.ended.load(Relaxed) + kind.failed.load(Relaxed))
            .sum()
    }

    #[inline]
    pub(crate) fn record_direct(&self, bytes: usize) {
        add(&self.direct, bytes as u64);
    }

    /// Bytes for a place, or from it, that go through a buffer.
    pub(crate) fn record_bounced(&self, bytes: usize, ciphered: bool) {
        add(if ciphered { &self.ciphered } else { &self.bounced }, bytes as u64);
    }

    /// Where bytes lie was not in memory.
    pub(crate) fn record_map_miss(&self, offset: u64) {
        probes::map_miss(offset);
        add(&self.map_misses, 1);
    }

    pub(crate) fn set_cpu_time(&self) {
        self.cpu_nanos.store(thread_cpu_nanos(), Relaxed);
    }

    /// Keep one entry for all queues that have ended (those that only the list still holds).
    pub(crate) fn fold_ended(all: &mut Vec<Arc<QueueStats>>) {
        let (ended, live): (Vec<_>, Vec<_>) =
            all.drain(..).partition(|queue| Arc::strong_count(queue) == 1);
        let sum = QueueStats::default();
        for queue in &ended {
            sum.add(queue);
        }
        *all = live;
        if !ended.is_empty() {
            all.push(Arc::new(sum));
        }
    }

    fn add(&self, other: &QueueStats) {
        for (mine, theirs) in self.kinds.iter().zip(&other.kinds) {
            add(&mine.ended, theirs.ended.load(Relaxed));
            add(&mine.failed, theirs.failed.load(Relaxed));
            add(&mine.bytes, theirs.bytes.load(Relaxed));
            for (mine, theirs) in mine.latency.iter().zip(&theirs.latency) {
                add(mine, theirs.load(Relaxed));
            }
        }
        for (mine, theirs) in [
            (&self.direct, &other.direct),
            (&self.bounced, &other.bounced),
            (&self.ciphered, &other.ciphered),
            (&self.map_misses, &other.map_misses),
            (&self.cpu_nanos, &other.cpu_nanos),
        ] {
            add(mine, theirs.load(Relaxed));
        }
        self.in_flight.add_busy(other.in_flight.busy());
    }
}

/// CPU time of the calling thread.
fn thread_cpu_nanos() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Latencies of one kind of request, in nanoseconds; each is the top of its bucket.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Latency {
    /// The median.
    pub p50: u64,
    /// 99 of 100 took no longer.
    pub p99: u64,
    /// 999 of 1000 took no longer.
    pub p999: u64,
    /// None took longer.
    pub max: u64,
}

/// Requests of one kind.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counts {
    /// Requests that ended well.
    pub ended: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Bytes of those that ended well.
    pub bytes: u64,
    /// From arrival to reply.
    pub latency_ns: Latency,
}

/// What a device has served.
#[derive(Clone, Debug, Default, Serialize)]
#[allow(missing_docs)] // those without are one per kind of request
pub struct Stats {
    pub read: Counts,
    pub write: Counts,
    pub flush: Counts,
    pub discard: Counts,
    pub write_zeroes: Counts,
    /// Bytes that went between a file and the memory that they were asked with.
    pub direct_bytes: u64,
    /// Bytes that went through a buffer of ours, for the file did not take them straight
    /// from the guest's memory or to it: they are not aligned, or enciphered.
    pub bounced_bytes: u64,
    /// Bytes of those that were enciphered or deciphered.
    pub ciphered_bytes: u64,
    /// How often it had to be read first where bytes lie.
    pub map_misses: u64,
    /// For how long queues had requests in flight, added up.
    pub busy_ns: u64,
    /// CPU time of the queue threads, as of their last rest.
    pub cpu_ns: u64,
}

impl Stats {
    pub(crate) fn sum<'a>(queues: impl Iterator<Item = &'a QueueStats>) -> Stats {
        let sum = QueueStats::default();
        queues.for_each(|queue| sum.add(queue));
        let counts = |kind: usize| {
            let kind = &sum.kinds[kind];
            Counts {
                ended: kind.ended.load(Relaxed),
                failed: kind.failed.load(Relaxed),
                bytes: kind.bytes.load(Relaxed),
                latency_ns: kind.latency(),
            }
        };
        Stats {
            read: counts(0),
            write: counts(1),
            flush: counts(2),
            discard: counts(3),
            write_zeroes: counts(4),
            direct_bytes: sum.direct.load(Relaxed),
            bounced_bytes: sum.bounced.load(Relaxed) + sum.ciphered.load(Relaxed),
            ciphered_bytes: sum.ciphered.load(Relaxed),
            map_misses: sum.map_misses.load(Relaxed),
            busy_ns: sum.in_flight.busy(),
            cpu_ns: sum.cpu_nanos.load(Relaxed),
        }
    }
}

/// How many requests took no longer than so many nanoseconds, and longer than the next fewer: those that there are.
pub type Latencies = Vec<(u64, u64)>;

impl Stats {
    /// The latencies of reads, writes, flushes, discards and writes of zeros, all queues together.
    pub(crate) fn latencies<'a>(queues: impl Iterator<Item = &'a QueueStats>) -> [Latencies; 5] {
        let sum = QueueStats::default();
        queues.for_each(|queue| sum.add(queue));
        sum.kinds.each_ref().map(|kind| {
            let counts = kind.latency.iter().map(|count| count.load(Relaxed));
            let counts = counts.enumerate().filter(|(_, count)| *count > 0);
            counts.map(|(bucket, count)| (bucket_top(bucket), count)).collect()
        })
    }
}

impl KindStats {
    fn latency(&self) -> Latency {
        let counts: Vec<u64> = self.latency.iter().map(|count| count.load(Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        let quantile = |per_mille: u64| {
            let rank = (total * per_mille).div_ceil(1000).max(1);
            let mut seen = 0;
            let bucket = counts.iter().position(|count| {
                seen += count;
                seen >= rank
            });
            bucket.map_or(0, bucket_top)
        };
        Latency { p50: quantile(500), p99: quantile(990), p999: quantile(999), max: quantile(1000) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringtap_io::Mem;

    #[test]
    fn buckets_hold_what_falls_into_them() {
        let mut last = None;
        for shift in 0..64 {
            for add in [0, 1, 3, 7] {
                let nanos = (1u64 << shift).saturating_add(add << shift.max(3) >> 3);
                let bucket = bucket_of(nanos);
                assert!(bucket < BUCKETS);
                assert!(bucket_top(bucket) >= nanos, "{nanos}");
                assert!(bucket == 0 || bucket_top(bucket - 1) < nanos, "{nanos}");
                assert!(bucket_top(bucket) - nanos <= nanos / 8, "{nanos}");
                last = last.max(Some(bucket));
            }
        }
        assert!(last < Some(BUCKETS));
    }

    #[test]
    fn queues_sum_and_ended_ones_are_kept() {
        let request =
            |len| Request { kind: Kind::Write, offset: 0, len, mem: Mem::EMPTY, fua: false };
        let mut all: Vec<_> = (0..4).map(|_| Arc::new(QueueStats::default())).collect();
        for (i, queue) in all.iter().enumerate() {
            queue.record(&request(100), 1000 << i, true);
            queue.record(&request(100), 10, i != 3);
            queue.record_bounced(30, i == 0);
            queue.record_direct(70);
        }
        let live = all[1].clone();
        QueueStats::fold_ended(&mut all);
        assert_eq!(all.len(), 2);
        live.record(&request(1), 1, true);
        live.record_bounced(1, true);
        live.record_map_miss(0);
        let stats = Stats::sum(all.iter().map(|queue| &**queue));
        assert_eq!((stats.write.ended, stats.write.failed, stats.write.bytes), (8, 1, 701));
        assert!(stats.write.latency_ns.max >= 8000 && stats.write.latency_ns.max < 9000);
        assert_eq!((stats.read.ended, stats.bounced_bytes), (0, 121));
        assert_eq!((stats.direct_bytes, stats.ciphered_bytes, stats.map_misses), (280, 31, 1));
        let [read, write, flush, ..] = Stats::latencies(all.iter().map(|queue| &**queue));
        let took_long = write.iter().filter(|(top, _)| *top > 500);
        assert_eq!(took_long.map(|(_, count)| count).sum::<u64>(), 4);
        assert_eq!((read.len() + flush.len(), write.iter().map(|(_, count)| count).sum()), (0, 9));
    }
}
