//! How comparisons were decided before November 2026, kept for one purpose: the table of error rates sets it beside
//! [`super::decision`] (`ringtap compare --self-test`). Half the width of the twin's interval was the floor, one family was
//! the whole page, six rounds were enough, and the margin followed the noise.

use super::Paired;

const SMALLEST_MARGIN: f64 = 0.03;
const LARGEST_MARGIN: f64 = 0.10;

/// What was said of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Better.
    Faster,
    /// Worse.
    Slower,
    /// The interval lay within the margin.
    Equivalent,
    /// More than one answer was possible.
    Unresolved,
}

/// From a row, its p-value adjusted for the page, and the noise floor of its load.
pub fn decide(paired: &Paired, adjusted_p: f64, floor: f64) -> Verdict {
    let Some(interval) = paired.interval else { return Verdict::Unresolved };
    let edge = floor.clamp(SMALLEST_MARGIN, LARGEST_MARGIN).ln_1p();
    let (low, high, centre) = (interval.low.ln(), interval.high.ln(), interval.centre.ln());
    if low > -edge && high < edge {
        return Verdict::Equivalent;
    }
    if adjusted_p <= super::decision::ALPHA && centre.abs() > floor.ln_1p() {
        if low > 0.0 {
            return Verdict::Faster;
        }
        if high < 0.0 {
            return Verdict::Slower;
        }
    }
    Verdict::Unresolved
}

/// Half the width of the twin's interval, as a share.
pub fn noise_floor(twin: &Paired) -> f64 {
    let width = twin.interval.map_or(0.0, |interval| interval.high.ln() - interval.low.ln());
    (width / 2.0).exp_m1()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Better, Value};

    #[test]
    fn noise_made_equal_what_was_not() {
        let list = |ratios: &[f64]| -> Vec<(u32, Value)> {
            (0..).zip(ratios.iter().map(|r| Value::from(*r))).collect()
        };
        let ones = list(&[1.0; 6]);
        let near = list(&[1.04, 1.05, 1.03, 1.04, 1.05, 1.04]);
        let near = Paired::new(&near, &ones, Better::Higher, 1, &|_| None);
        assert_eq!(decide(&near, 0.03, 0.08), Verdict::Equivalent);
        assert_eq!(decide(&near, 0.03, 0.02), Verdict::Faster);
        let twin = list(&[0.98, 1.02, 1.0, 1.01, 0.99, 1.0]);
        let twin = Paired::new(&twin, &ones, Better::Higher, 1, &|_| None);
        assert!((noise_floor(&twin) - 0.0202).abs() < 1e-3);
    }
}
