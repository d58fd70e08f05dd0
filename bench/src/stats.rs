//! Medians, and the ratio of two arms with its interval.

use serde::Serialize;

/// Rounds below which no interval is given: no distribution-free one at 95 % exists.
pub const LEAST_ROUNDS: usize = 6;
const RESAMPLES: usize = 10_000;

/// The median; NaN for no values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
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
    /// Ratio of the medians of values that were measured in the same rounds.
    ///
    /// The interval is a percentile bootstrap over rounds: a round is drawn with both its values,
    /// so what made a round slow for both cancels. `None` where a round lacks a value or the
    /// denominator is 0.
    pub fn of_rounds(ours: &[f64], theirs: &[f64]) -> Option<Ratio> {
        let rounds = ours.len();
        let value = median(ours) / median(theirs);
        if rounds != theirs.len() || !value.is_finite() {
            return None;
        }
        if rounds < LEAST_ROUNDS {
            return Some(Ratio { value, interval: None });
        }
        let mut random = Lcg(0x5eed);
        let (mut a, mut b) = (vec![0.0; rounds], vec![0.0; rounds]);
        let mut ratios: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                for i in 0..rounds {
                    let round = random.below(rounds);
                    (a[i], b[i]) = (ours[round], theirs[round]);
                }
                median(&a) / median(&b)
            })
            .collect();
        ratios.sort_by(f64::total_cmp);
        let at = |quantile: f64| ratios[(quantile * (RESAMPLES - 1) as f64).round() as usize];
        Some(Ratio { value, interval: Some((at(0.025), at(0.975))) })
    }
}

/// Random numbers that are the same in every run, so that a report can be made again.
struct Lcg(u64);

impl Lcg {
    fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((u128::from(self.0) * bound as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn noise_common_to_a_round_cancels() {
        let theirs = [100.0, 50.0, 200.0, 80.0, 120.0, 160.0, 90.0];
        let ours = theirs.map(|v| v * 1.5);
        let ratio = Ratio::of_rounds(&ours, &theirs).unwrap();
        let (low, high) = ratio.interval.unwrap();
        assert!((ratio.value - 1.5).abs() < 1e-12 && (high - low).abs() < 1e-12);
    }

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
