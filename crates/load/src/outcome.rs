//! What a load measured, and how it is shown.

use crate::verify::Verified;
use crate::worker::Tally;
use crate::{LoadArgs, Output};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Quantiles of a latency, in nanoseconds; all 0 when nothing was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: u64,
    /// 9 of 10 requests took no longer.
    pub p90: u64,
    /// 99 of 100 requests took no longer.
    pub p99: u64,
    /// 999 of 1000 requests took no longer.
    pub p999: u64,
    /// The slowest request.
    pub max: u64,
}

impl Latency {
    pub(crate) fn of(histogram: &Histogram<u64>) -> Latency {
        if histogram.is_empty() {
            return Latency::default();
        }
        Latency {
            mean: histogram.mean(),
            p50: histogram.value_at_quantile(0.5),
            p90: histogram.value_at_quantile(0.9),
            p99: histogram.value_at_quantile(0.99),
            p999: histogram.value_at_quantile(0.999),
            max: histogram.max(),
        }
    }
}

/// What one load measured. Counts are of reads and writes; flushes stand apart.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Who drove the device: the virtio driver or io_uring, and how it waited.
    pub driver: String,
    /// Socket or file.
    pub target: String,
    /// `randread`, `randwrite`, `randrw`, `read` or `write`.
    pub rw: String,
    /// Bytes per request.
    pub bs: u64,
    /// Requests in flight per queue.
    pub depth: usize,
    /// Queues.
    pub queues: usize,
    /// Length of the measured window in seconds.
    pub seconds: f64,
    /// When it ended, in milliseconds since 1970.
    #[serde(default)]
    pub ended_ms: f64,
    /// Bytes moved in the window.
    pub bytes: u64,
    /// Reads and writes that ended well in the window.
    pub ios: u64,
    /// `ios` per second.
    pub iops: f64,
    /// `bytes` per second.
    pub bw_bytes: f64,
    /// Latency of `ios`.
    pub lat_ns: Latency,
    /// Flushes that ended well in the window.
    pub flushes: u64,
    /// Latency of `flushes`.
    pub flush_lat_ns: Latency,
    /// CPU seconds, user and system, that the load threads used in the window.
    pub cpu_seconds: f64,
    /// Reads and writes from the first to the last: ramp and drain too, reading back not.
    pub total_ios: u64,
    /// Writes among `total_ios`.
    pub total_writes: u64,
    /// Requests that failed, at any time.
    pub errors: u64,
    /// What the first failed request was.
    pub first_error: Option<String>,
    /// What `--verify` found.
    pub verify: Option<Verified>,
}

impl Outcome {
    pub(crate) fn new(args: &LoadArgs, driver: String, target: String, tally: Tally) -> Outcome {
        let seconds = tally.window.as_secs_f64();
        let per_second = |n: u64| if seconds > 0.0 { n as f64 / seconds } else { 0.0 };
        let ios = tally.latency.len();
        Outcome {
            driver,
            target,
            rw: args.rw.name().into(),
            bs: args.bs,
            depth: args.depth,
            queues: args.queues,
            seconds,
            ended_ms: tally.ended_ms,
            bytes: ios * args.bs,
            ios,
            iops: per_second(ios),
            bw_bytes: per_second(ios * args.bs),
            lat_ns: Latency::of(&tally.latency),
            flushes: tally.flush_latency.len(),
            flush_lat_ns: Latency::of(&tally.flush_latency),
            cpu_seconds: tally.cpu.as_secs_f64(),
            total_ios: tally.total_ios,
            total_writes: tally.total_writes,
            errors: tally.errors,
            first_error: tally.first_error,
            verify: tally.verified,
        }
    }

    /// True if a request failed or a block did not read back as written.
    pub fn failed(&self) -> bool {
        self.errors > 0 || self.verify.as_ref().is_some_and(|v| v.mismatches > 0)
    }

    /// The text to print for `--output`.
    pub fn render(&self, output: Output) -> String {
        match output {
            Output::Table => self.to_string(),
            Output::Json => serde_json::to_string(self).unwrap_or_else(|e| format!("\"{e}\"")),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} of {} bytes, depth {} × {} queue(s), {:.2} s on {} ({})",
            self.rw, self.bs, self.depth, self.queues, self.seconds, self.target, self.driver
        )?;
        writeln!(f, "IOPS      {:>12.0}", self.iops)?;
        writeln!(f, "MiB/s     {:>12.1}", self.bw_bytes / 1048576.0)?;
        writeln!(f, "latency   {}", Microseconds(&self.lat_ns))?;
        if self.flushes > 0 {
            let rate = self.flushes as f64 / self.seconds;
            writeln!(f, "flushes   {rate:>12.0} per second")?;
            writeln!(f, "latency   {}", Microseconds(&self.flush_lat_ns))?;
        }
        let per_io = self.cpu_seconds * 1e6 / self.ios.max(1) as f64;
        write!(f, "client CPU{:>12.2} s, {per_io:.2} µs per request", self.cpu_seconds)?;
        if let Some(error) = &self.first_error {
            write!(f, "\nerrors    {:>12}, the first: {error}", self.errors)?;
        }
        if let Some(verify) = &self.verify {
            write!(f, "\nverified  {:>12} blocks, {} wrong", verify.blocks, verify.mismatches)?;
            if let Some(offset) = verify.first_mismatch {
                write!(f, ", the first at byte {offset}")?;
            }
        }
        Ok(())
    }
}

struct Microseconds<'a>(&'a Latency);

impl fmt::Display for Microseconds<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Latency { mean, p50, p90, p99, p999, max } = self.0;
        let us = |ns: &u64| *ns as f64 / 1e3;
        write!(
            f,
            "mean {:.1}  p50 {:.1}  p90 {:.1}  p99 {:.1}  p99.9 {:.1}  max {:.1} µs",
            mean / 1e3,
            us(p50),
            us(p90),
            us(p99),
            us(p999),
            us(max)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_known_values() {
        let mut histogram = Histogram::<u64>::new(3).unwrap();
        for value in 1..=10_000 {
            histogram.record(value * 1000).unwrap();
        }
        let latency = Latency::of(&histogram);
        let near = |got: u64, want: u64| got.abs_diff(want) * 1000 <= want;
        assert!(near(latency.p50, 5_000_000), "{latency:?}");
        assert!(near(latency.p90, 9_000_000), "{latency:?}");
        assert!(near(latency.p99, 9_900_000), "{latency:?}");
        assert!(near(latency.p999, 9_990_000), "{latency:?}");
        assert!(near(latency.max, 10_000_000), "{latency:?}");
        assert!((latency.mean / 5_000_500.0 - 1.0).abs() < 1e-3, "{latency:?}");
    }

    #[test]
    fn nothing_measured_is_zero() {
        let empty = Histogram::<u64>::new(3).unwrap();
        assert_eq!(Latency::of(&empty), Latency::default());
    }
}
