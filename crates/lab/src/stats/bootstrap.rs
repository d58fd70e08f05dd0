//! The ratio of medians, with an interval by resampling whole rounds: a round's two values stay together, so what
//! slowed both of them in that round cancels.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Resamples for a report.
pub const RESAMPLES: usize = 10_000;

/// 95 % percentile interval of median(a)/median(b) over `pairs` of (a, b), from `resamples` draws of the generator
/// seeded with `seed`. `None` without pairs.
pub fn ratio_of_medians(pairs: &[(f64, f64)], resamples: usize, seed: u64) -> Option<(f64, f64)> {
    if pairs.is_empty() || resamples == 0 {
        return None;
    }
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut over = vec![0.0; pairs.len()];
    let mut under = vec![0.0; pairs.len()];
    let mut ratios = Vec::with_capacity(resamples);
    for _ in 0..resamples {
        for (a, b) in over.iter_mut().zip(&mut under) {
            (*a, *b) = pairs[random.random_range(0..pairs.len())];
        }
        ratios.push(middle(&mut over) / middle(&mut under));
    }
    ratios.sort_by(f64::total_cmp);
    let at = |share: f64| ratios[((resamples - 1) as f64 * share).round() as usize];
    Some((at(0.025), at(0.975)))
}

fn middle(values: &mut [f64]) -> f64 {
    let half = values.len() / 2;
    let even = values.len() % 2 == 0;
    let (below, &mut upper, _) = values.select_nth_unstable_by(half, f64::total_cmp);
    if even {
        let lower = below.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        (lower + upper) / 2.0
    } else {
        upper
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_interval() {
        let pairs: Vec<(f64, f64)> =
            (1..=10).map(|i| (100.0 + f64::from(i), 50.0 + f64::from(i % 3))).collect();
        let one = ratio_of_medians(&pairs, 10_000, 7).unwrap();
        assert_eq!(ratio_of_medians(&pairs, 10_000, 7), Some(one));
        assert_ne!(ratio_of_medians(&pairs, 10_000, 8), Some(one));
        assert!(one.0 < 2.07 && 2.07 < one.1, "{one:?}");
    }

    #[test]
    fn what_slows_both_cancels() {
        // The level swings by a factor of four between rounds; the ratio within each is exactly two.
        let pairs: Vec<(f64, f64)> =
            (0..9).map(|i| f64::from(1 + i % 4)).map(|level| (2.0 * level, level)).collect();
        let (low, high) = ratio_of_medians(&pairs, 10_000, 1).unwrap();
        assert!((low - 2.0).abs() < 1e-12 && (high - 2.0).abs() < 1e-12);
    }

    #[test]
    fn middle_of_even_and_odd() {
        assert_eq!(middle(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(middle(&mut [4.0, 1.0, 3.0, 2.0]), 2.5);
    }
}
