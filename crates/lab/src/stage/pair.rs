//! Two guests that are loaded at once.

use std::time::Duration;

use ringtap_guest::Guest as Machine;

use crate::error::Result;
use crate::run::meter::Who;

/// Two guests, and a disk of each.
pub struct Pair<'a> {
    /// The guests.
    pub machines: [&'a Machine; 2],
    /// Their block devices.
    pub devices: [&'a str; 2],
    /// Whose CPU time is that of the path.
    pub who: Who,
    /// By how many milliseconds each guest's clock is ahead of this machine's.
    pub ahead: [f64; 2],
    /// How long before their common start they are told of it.
    pub notice: Duration,
    /// What comes before each load, alone or beside the other.
    pub ready: &'a dyn Fn() -> Result<()>,
}
