//! Limits: how many requests, and bytes, a disk or a group of disks may have served in a second.
//!
//! A request that is to be held waits before the door, so that the disk can be made to stand still meanwhile. The requests of
//! a queue stand in line, those that read in one and those that change the disk in another; the first of a line takes from
//! the buckets (`bucket.rs`) what it and the next few need, and waits until it may use that. Queues, and the disks of
//! a group, so take turns. Only who waits has a timer.

mod bucket;
mod line;
#[cfg(all(test, feature = "shuttle"))]
mod models;
#[cfg(test)]
mod tests;
mod throttle;

use serde::Serialize;

pub(crate) use line::Lines;
pub(crate) use throttle::Throttle;
pub use throttle::{Fairness, ThrottleGroup, Waited};

/// The most that a limit may say, as QEMU has it.
pub(crate) const MOST: u64 = 1_000_000_000_000_000;

/// So much in a second; 0 is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Rate {
    /// In the long run.
    pub average: u64,
    /// For a while after a rest; 0: no more than in the long run.
    pub burst: u64,
    /// For so many seconds; 0 is 1.
    pub burst_seconds: u64,
}

/// Limits of everything, of reads, and of what changes the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs)] // they are told in the type's own doc
pub struct Rates {
    pub total: Rate,
    pub read: Rate,
    pub write: Rate,
}

/// What a disk, or a group of disks, may have served. Flushes are not held, and not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Requests a second.
    pub iops: Rates,
    /// Bytes a second. A discard counts as one sector.
    pub bps: Rates,
    /// Requests of more bytes than this count as so many more; 0: each counts as one.
    pub iops_size: u64,
}

impl Limits {
    /// Whether nothing is limited.
    pub fn is_none(&self) -> bool {
        self.rates().all(|(_, rate)| rate.average == 0)
    }

    /// Why they make no sense.
    pub fn check(&self) -> Result<(), String> {
        for (name, Rate { average, burst, burst_seconds }) in self.rates() {
            let most = average.max(burst).max(burst_seconds);
            if most > MOST || u128::from(burst) * u128::from(burst_seconds) > MOST.into() {
                return Err(format!("{name}: at most {MOST}"));
            }
            if burst > 0 && burst < average {
                return Err(format!(
                    "{name}: its burst, {burst}, is less than the limit, {average}"
                ));
            }
            if burst > 0 && average == 0 {
                return Err(format!("{name}: a burst needs the limit that it exceeds"));
            }
            if burst_seconds > 0 && burst == 0 {
                return Err(format!("{name}: the length of a burst needs the burst"));
            }
        }
        match self.iops_size > 0 && self.rates().take(3).all(|(_, rate)| rate.average == 0) {
            true => Err("iops-size needs a limit of requests".into()),
            false => Ok(()),
        }
    }

    /// All of them, by the names that QEMU has for them; those of requests first.
    pub fn rates(&self) -> impl Iterator<Item = (&'static str, Rate)> {
        let names = ["iops-total", "iops-read", "iops-write", "bps-total", "bps-read", "bps-write"];
        let of = |rates: Rates| [rates.total, rates.read, rates.write];
        names.into_iter().zip(of(self.iops).into_iter().chain(of(self.bps)))
    }
}
