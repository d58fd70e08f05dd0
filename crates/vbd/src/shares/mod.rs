//! Fair share: what each disk has of the device that it lies on, where several want it.
//!
//! The disks of a backing device, and the jobs at work on it, are its tenants. Where any of them has a weight or a floor, each
//! takes what its requests cost from an allowance (`allowance.rs`), a chunk at a time with one atomic operation. Every few
//! milliseconds whoever takes next makes a plan (`planner.rs`): from what the tenants have had, and how much longer their
//! requests took than on a device at rest (`baseline.rs`), it sets the device's rate (`pace.rs`), and divides that
//! (`divide.rs`): floors first, the rest by weight, and what one does not want is the others'. So there is no thread and
//! no timer of a plan: on a device without requests nobody makes one.

mod allowance;
mod baseline;
mod device;
mod divide;
#[cfg(all(test, feature = "shuttle"))]
mod models;
mod pace;
mod planner;
mod tally;
mod tenant;
#[cfg(test)]
mod tests;

use serde::Serialize;

pub(crate) use device::Hears;
pub use device::{BackingDevice, DeviceShares};
pub(crate) use tally::Tally;
pub(crate) use tenant::{Taken, Tenant, Wait};
pub use tenant::{TenantState, Who};

/// The weight of a disk of which nothing is said, as cgroup's `io.weight` has it.
pub const WEIGHT: u32 = 100;
/// The most that a weight may be, as there.
pub const MOST_WEIGHT: u32 = 10_000;
/// The weight of a job: it has a tenth of what a disk has beside it, and all that no disk wants.
const JOB_WEIGHT: u32 = 10;
/// What a request costs beside its bytes, in bytes: what a small one takes of a device by its mere number.
const REQUEST: u64 = 32 << 10;

/// What a disk, or a group of disks, is to have of its device where others want it, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Share {
    /// Its part of the device by that of the others; 0: nothing is said, and it is 100 where others have one.
    pub weight: u32,
    /// Requests a second that it has before others have anything; 0 is none.
    pub floor_iops: u64,
    /// Bytes a second, likewise.
    pub floor_bps: u64,
}

impl Share {
    /// Whether nothing is said.
    pub fn is_none(&self) -> bool {
        *self == Share::default()
    }

    /// Why it makes no sense.
    pub fn check(&self) -> Result<(), String> {
        if self.weight > MOST_WEIGHT {
            return Err(format!("weight {}: write 1 to {MOST_WEIGHT}", self.weight));
        }
        let most = super::limits::MOST;
        if self.floor_iops.max(self.floor_bps) > most {
            return Err(format!("a floor is at most {most}"));
        }
        Ok(())
    }
}

/// What a request costs its device, in bytes.
fn cost(len: u64) -> u64 {
    len.saturating_add(REQUEST)
}
