//! Trials by their seeds.

pub use ringtap_sim::seeds;
use std::fmt::Display;
use std::ops::Range;

/// What all trials have done together; each must end well.
pub fn all_well<E: Display>(seeds: Range<u64>, trial: impl Fn(u64) -> Result<usize, E>) -> usize {
    let well = |seed| trial(seed).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    seeds.map(well).sum()
}
