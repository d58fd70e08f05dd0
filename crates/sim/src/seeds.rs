//! The seeds that a test on the simulated disk is tried with.

use std::ops::Range;

/// From 0, so many; `RINGTAP_SEEDS` sets another number, and `RINGTAP_SEED` one alone: that which a failure names.
pub fn seeds(default: u64) -> Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    match number("RINGTAP_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("RINGTAP_SEEDS").unwrap_or(default),
    }
}
