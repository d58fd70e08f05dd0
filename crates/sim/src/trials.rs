//! Trials on the simulated disk, each by a seed.

use std::fmt::{Debug, Display};
use std::ops::Range;

/// From 0, so many; `RINGTAP_SEEDS` sets another number, and `RINGTAP_SEED` one alone: that which a failure names.
pub fn seeds(default: u64) -> Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    match number("RINGTAP_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("RINGTAP_SEEDS").unwrap_or(default),
    }
}

/// What each of the trials came to; each must end well.
///
/// # Panics
/// Where one does not: it is named.
pub fn all_well<T, E: Display>(
    seeds: Range<u64>,
    of: impl Debug,
    mut trial: impl FnMut(u64) -> Result<T, E>,
) -> Vec<T> {
    let mut well =
        |seed| trial(seed).unwrap_or_else(|wrong| panic!("seed {seed}, {of:?}: {wrong}"));
    seeds.map(&mut well).collect()
}

/// Whether what is done wrong on purpose is seen: by at least so many of so many seeds.
///
/// # Panics
/// Where fewer see it.
pub fn caught(wrong: impl Debug, least: usize, of: u64, mut seen: impl FnMut(u64) -> bool) {
    let caught = (0..of).filter(|seed| seen(*seed)).count();
    println!("{wrong:?}: {caught} of {of}");
    assert!(caught >= least, "{wrong:?} is hidden in all but {caught} of {of} seeds");
}
