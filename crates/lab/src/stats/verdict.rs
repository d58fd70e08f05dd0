//! What may be said about one row.

use serde::Serialize;

use super::{FEWEST_ROUNDS, Paired};

/// Two arms nearer than this are called equivalent, however quiet the machine.
pub const SMALLEST_MARGIN: f64 = 0.03;
/// However noisy the machine, nothing further apart than this is called equivalent.
pub const LARGEST_MARGIN: f64 = 0.10;
/// Chance of a false claim anywhere in the table.
pub const ALPHA: f64 = 0.05;
/// More rounds than this nobody runs: the answer is then "not by repeating".
const MOST_ROUNDS: usize = 500;

/// What may be said.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase", tag = "verdict")]
pub enum Verdict {
    /// Better than the other, beyond chance and beyond the noise floor.
    Faster,
    /// Worse than the other, beyond chance and beyond the noise floor.
    Slower,
    /// The whole interval lies within the margin around 1.
    Equivalent {
        /// The margin, as a share: the larger of 3 % and the noise floor, but at most 10 %.
        margin: f64,
    },
    /// The interval allows more than one answer.
    Unresolved {
        /// About how many more rounds would settle it, if the spread stays; `None` when repeating will not.
        more: Option<usize>,
    },
    /// Fewer than six rounds, or bounds instead of numbers: points only.
    None,
}

/// The verdict of a row: `paired`, the row's p-value adjusted for the whole table, and the noise floor of its workload
/// (a share; 0 when there was no A/A twin).
pub fn decide(paired: &Paired, adjusted_p: f64, floor: f64) -> Verdict {
    let Some(interval) = paired.interval else { return Verdict::None };
    let margin = floor.clamp(SMALLEST_MARGIN, LARGEST_MARGIN);
    let edge = margin.ln_1p();
    let (low, high, centre) = (interval.low.ln(), interval.high.ln(), interval.centre.ln());
    if low > -edge && high < edge {
        return Verdict::Equivalent { margin };
    }
    if adjusted_p <= ALPHA && centre.abs() > floor.ln_1p() {
        if low > 0.0 {
            return Verdict::Faster;
        }
        if high < 0.0 {
            return Verdict::Slower;
        }
    }
    Verdict::Unresolved { more: more_rounds(paired, centre, edge, floor.ln_1p()) }
}

/// Rounds that are missing until the interval, shrinking with the root of their number, either leaves 1 (a claim) or
/// lies within the margin (equivalence).
fn more_rounds(paired: &Paired, centre: f64, edge: f64, floor: f64) -> Option<usize> {
    let n = paired.logs.len();
    let count = n as f64;
    let mean = paired.logs.iter().map(|l| l.1).sum::<f64>() / count;
    let spread =
        (paired.logs.iter().map(|l| (l.1 - mean).powi(2)).sum::<f64>() / (count - 1.0)).sqrt();
    let size = centre.abs();
    // To be shown different, by a claim that the floor allows; or to be shown equal.
    let different = if size > floor { size } else { 0.0 };
    let equal = edge - size;
    let target = different.max(equal);
    if target <= 0.0 {
        return None;
    }
    // One more round is the least that can change anything, and the table asks more than a single row would.
    (n.max(FEWEST_ROUNDS) + 1..=MOST_ROUNDS)
        .find(|&m| (1.96 + 2.4 / (m - 1) as f64) * spread / (m as f64).sqrt() < target)
        .map(|m| m - n)
}

/// The noise floor that an A/A twin shows: half the width of its interval, as a share; and whether the interval holds
/// 1, as it must when nothing but noise differs.
pub fn noise_floor(twin: &Paired) -> Option<(f64, bool)> {
    let interval = twin.interval?;
    let half = (interval.high.ln() - interval.low.ln()) / 2.0;
    Some((half.exp_m1(), interval.low <= 1.0 && interval.high >= 1.0))
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::sample::{Better, Value};
    use crate::stats::{bootstrap, interval};

    fn paired(ratios: &[f64]) -> Paired {
        let ours: Vec<(u32, Value)> =
            (0..).zip(ratios.iter().map(|r| Value::from(100.0 * r))).collect();
        let theirs: Vec<(u32, Value)> =
            (0..).zip(ratios.iter().map(|_| Value::from(100.0))).collect();
        Paired::new(&ours, &theirs, Better::Higher, 1)
    }

    #[test]
    fn the_four_verdicts() {
        let fast = paired(&[1.5, 1.52, 1.49, 1.51, 1.5, 1.48]);
        assert_eq!(decide(&fast, 0.03, 0.02), Verdict::Faster);
        let slow = paired(&[0.5, 0.52, 0.49, 0.51, 0.5, 0.48]);
        assert_eq!(decide(&slow, 0.03, 0.02), Verdict::Slower);
        let same = paired(&[1.0, 1.01, 0.99, 1.0, 1.01, 0.99]);
        assert_eq!(decide(&same, 1.0, 0.0), Verdict::Equivalent { margin: 0.03 });
        let wide = paired(&[0.8, 1.3, 1.1, 0.9, 1.2, 1.0]);
        assert!(
            matches!(decide(&wide, 0.4, 0.02), Verdict::Unresolved { more: Some(more) } if more > 6)
        );
        assert_eq!(decide(&paired(&[2.0, 2.0, 2.0]), 0.0, 0.0), Verdict::None);
    }

    #[test]
    fn no_claim_without_the_table_or_below_the_floor() {
        let fast = paired(&[1.5, 1.52, 1.49, 1.51, 1.5, 1.48]);
        assert!(matches!(decide(&fast, 0.2, 0.02), Verdict::Unresolved { .. }));
        let little = paired(&[1.1, 1.11, 1.09, 1.1, 1.12, 1.08]);
        assert_eq!(decide(&little, 0.03, 0.02), Verdict::Faster);
        assert_eq!(
            decide(&little, 0.03, 0.2),
            Verdict::Unresolved { more: None },
            "noise is no equality"
        );
        let near = paired(&[1.04, 1.05, 1.03, 1.04, 1.05, 1.04]);
        assert_eq!(decide(&near, 0.03, 0.08), Verdict::Equivalent { margin: 0.08 });
    }

    #[test]
    fn the_floor_of_a_twin() {
        let (floor, holds) = noise_floor(&paired(&[0.98, 1.02, 1.0, 1.01, 0.99, 1.0])).unwrap();
        assert!((floor - 0.0202).abs() < 1e-3 && holds, "{floor}");
        assert!(!noise_floor(&paired(&[1.02, 1.02, 1.03, 1.01, 1.04, 1.05])).unwrap().1);
    }

    /// Rounds with 3 % noise and a drift shared by both arms: the interval that decides and the bootstrap cover the true
    /// ratio as often as they say.
    #[test]
    fn coverage_under_drift() {
        let mut random = ChaCha8Rng::seed_from_u64(5);
        let mut normal = move || (0..12).map(|_| random.random_range(-0.5..0.5)).sum::<f64>();
        let (trials, truth) = (500, 1.05);
        for (rounds, least_decision, least_bootstrap) in [(6, 0.94, 0.86), (10, 0.925, 0.90)] {
            let (mut decision, mut bootstrapped) = (0, 0);
            for trial in 0..trials {
                let mut drift = 0.0;
                let mut ours = Vec::new();
                let mut theirs = Vec::new();
                for _ in 0..rounds {
                    drift = 0.7 * drift + 0.03 * normal();
                    ours.push(truth * (drift + 0.03 * normal()).exp());
                    theirs.push((drift + 0.03 * normal()).exp());
                }
                let interval = interval::decide(
                    &ours.iter().zip(&theirs).map(|(a, b)| (a / b).ln()).collect::<Vec<_>>(),
                )
                .unwrap();
                decision += u32::from(interval.low <= truth && truth <= interval.high);
                let pairs: Vec<(f64, f64)> = ours.into_iter().zip(theirs).collect();
                let (low, high) = bootstrap::ratio_of_medians(&pairs, 500, trial).unwrap();
                bootstrapped += u32::from(low <= truth && truth <= high);
            }
            let share = |n: u32| f64::from(n) / trials as f64;
            assert!(
                share(decision) >= least_decision,
                "n = {rounds}: interval covers {}",
                share(decision)
            );
            assert!(
                share(bootstrapped) >= least_bootstrap,
                "n = {rounds}: bootstrap covers {}",
                share(bootstrapped)
            );
        }
    }
}
