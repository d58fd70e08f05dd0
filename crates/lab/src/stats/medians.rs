//! The ratio of the medians of two arms, with its interval.

use serde::Serialize;

use super::bootstrap;

/// Rounds below which no interval is given: no distribution-free one at 95 % exists.
pub const LEAST_ROUNDS: usize = super::FEWEST_ROUNDS;
/// The same in every run, so that a report can be made again.
const SEED: u64 = 0x5eed;

/// The median; NaN for no values.
pub fn median(values: &[f64]) -> f64 {
    super::median(values).unwrap_or(f64::NAN)
}

/// How many times as much as another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// Ratio of the medians.
    pub value: f64,
    /// The 95 % interval; none below [`LEAST_ROUNDS`].
    pub interval: Option<(f64, f64)>,
}

impl Ratio {
    /// Ratio of the medians of values that were measured in the same rounds, with the interval of
    /// [`bootstrap::ratio_of_medians`]. `None` where a round lacks a value or the denominator is 0.
    pub fn of_rounds(ours: &[f64], theirs: &[f64]) -> Option<Ratio> {
        let value = median(ours) / median(theirs);
        if ours.len() != theirs.len() || !value.is_finite() {
            return None;
        }
        let pairs: Vec<(f64, f64)> = ours.iter().copied().zip(theirs.iter().copied()).collect();
        let enough = pairs.len() >= LEAST_ROUNDS;
        let interval = enough
            .then(|| bootstrap::ratio_of_medians(&pairs, bootstrap::RESAMPLES, SEED))
            .flatten();
        Some(Ratio { value, interval })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_holds_the_truth_and_its_width_follows_the_noise() {
        let theirs = [100.0, 102.0, 98.0, 101.0, 99.0, 100.0];
        let quiet = Ratio::of_rounds(&[200.0, 203.0, 197.0, 201.0, 199.0, 200.0], &theirs).unwrap();
        let loud = Ratio::of_rounds(&[200.0, 150.0, 250.0, 230.0, 170.0, 205.0], &theirs).unwrap();
        let (low, high) = quiet.interval.unwrap();
        assert!(low <= 2.0 && 2.0 <= high && high - low < 0.1, "{quiet:?}");
        let (low, high) = loud.interval.unwrap();
        assert!(low < 1.9 && 2.1 < high, "{loud:?}");
    }

    #[test]
    fn too_few_rounds_give_no_interval_and_gaps_no_ratio() {
        let five = [1.0; 5];
        assert_eq!(Ratio::of_rounds(&five, &five), Some(Ratio { value: 1.0, interval: None }));
        assert_eq!(Ratio::of_rounds(&five, &five[1..]), None);
        assert_eq!(Ratio::of_rounds(&five, &[0.0; 5]), None);
        assert_eq!(Ratio::of_rounds(&[], &[]), None);
    }
}
