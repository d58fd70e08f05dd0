//! Trials by their seeds.

use std::fmt::Display;
use std::ops::Range;

/// As many seeds as `RINGTAP_SEEDS` says.
pub fn seeds(default: u64) -> Range<u64> {
    let count = std::env::var("RINGTAP_SEEDS").ok().and_then(|text| text.parse().ok());
    0..count.unwrap_or(default)
}

/// What all trials have done together; each must end well.
pub fn all_well<E: Display>(seeds: Range<u64>, trial: impl Fn(u64) -> Result<usize, E>) -> usize {
    let well = |seed| trial(seed).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    seeds.map(well).sum()
}
