//! Statistics of paired rounds. The unit is one round of one arm; what happens within a run is never a sample.
//!
//! A *decision* rests on an exact interval of the paired log ratios ([`interval`]): signed ranks, or signs where the
//! ratios are skewed; where guests are booted, the rounds of a boot are one value. Its centre is the ratio that is printed;
//! without an interval that is the quotient of the medians, whose own interval resamples whole rounds ([`bootstrap`]). The comparisons of a question are guarded
//! as a whole ([`family`]). [`decision`] puts it in a word, and nothing else does.

pub mod bootstrap;
pub mod decision;
pub mod family;
pub mod former;
pub mod interval;
pub mod medians;
pub mod rates;
pub mod spread;
pub mod steady;

pub use decision::{Decision, Why};
pub use interval::{Interval, Method};

use crate::sample::{Better, Value};

/// Fewest rounds for which a distribution-free 95 % interval exists.
pub const FEWEST_ROUNDS: usize = 6;

/// The median; the mean of the middle two for an even count. `None` for no values.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// A median that may be a bound, because some of its values are.
///
/// Bounds from below: every true value is at least the one given, so the true median is at least the given median; it
/// is known exactly only when the bounded values all lie above it.
pub fn median_value(values: &[Value]) -> Option<Value> {
    let value = median(&values.iter().map(|v| v.value).collect::<Vec<_>>())?;
    let at_least = values.iter().any(|v| v.at_least && v.value <= value);
    Some(Value { value, at_least })
}

/// What is known about a ratio whose parts may be bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ratio {
    /// The ratio.
    Is(f64),
    /// The true ratio is at least this.
    AtLeast(f64),
    /// The true ratio is at most this.
    AtMost(f64),
}

impl Ratio {
    /// The number or the bound.
    pub fn number(self) -> f64 {
        match self {
            Ratio::Is(x) | Ratio::AtLeast(x) | Ratio::AtMost(x) => x,
        }
    }
}

/// One arm against another on one metric, by rounds.
#[derive(Clone, Debug)]
pub struct Paired {
    /// How many rounds have both.
    pub rounds: usize,
    /// The medians of both over those rounds.
    pub medians: (Option<Value>, Option<Value>),
    /// How many times as good the first is: above 1 is better, whichever way the metric points. The centre of the interval
    /// that decides, which always lies in it; without one the quotient of the medians.
    pub ratio: Option<Ratio>,
    /// 95 % joint-round bootstrap interval of the quotient of the medians.
    pub bootstrap: Option<(f64, f64)>,
    /// The interval that decides.
    pub interval: Option<Interval>,
    /// Log ratios by round number; empty when a value is a bound.
    pub logs: Vec<(u32, f64)>,
    /// Mean log ratios by block: what decides. A block is a boot where there are guests, else a round.
    pub blocks: Vec<(u32, f64)>,
}

impl Paired {
    /// Compares `ours` with `theirs`; each is a list of (round, value). Rounds that only one has are left out. `boot` says
    /// in which boot a round was; a round of no boot is a block of its own.
    pub fn new(
        ours: &[(u32, Value)],
        theirs: &[(u32, Value)],
        better: Better,
        seed: u64,
        boot: &dyn Fn(u32) -> Option<u32>,
    ) -> Paired {
        let pairs: Vec<(u32, Value, Value)> = ours
            .iter()
            .filter_map(|&(round, a)| {
                theirs.iter().find(|(r, _)| *r == round).map(|&(_, b)| (round, a, b))
            })
            .map(|(round, a, b)| match better {
                Better::Higher => (round, a, b),
                Better::Lower => (round, b, a),
            })
            .collect();
        let over: Vec<Value> = pairs.iter().map(|p| p.1).collect();
        let under: Vec<Value> = pairs.iter().map(|p| p.2).collect();
        let exact = pairs
            .iter()
            .all(|(_, a, b)| !a.at_least && !b.at_least && a.value > 0.0 && b.value > 0.0);
        let ratio = match (median_value(&over), median_value(&under)) {
            (Some(a), Some(b)) if b.value > 0.0 => match (a.at_least, b.at_least) {
                (false, false) => Some(Ratio::Is(a.value / b.value)),
                (true, false) => Some(Ratio::AtLeast(a.value / b.value)),
                (false, true) => Some(Ratio::AtMost(a.value / b.value)),
                (true, true) => None,
            },
            _ => None,
        };
        let (first, second) = (median_value(&over), median_value(&under));
        let medians = match better {
            Better::Higher => (first, second),
            Better::Lower => (second, first),
        };
        let mut paired = Paired {
            rounds: pairs.len(),
            medians,
            ratio,
            bootstrap: None,
            interval: None,
            logs: Vec::new(),
            blocks: Vec::new(),
        };
        if exact {
            paired.logs =
                pairs.iter().map(|(round, a, b)| (*round, (a.value / b.value).ln())).collect();
            paired.blocks = blocks(&paired.logs, boot);
            if pairs.len() >= FEWEST_ROUNDS {
                let plain: Vec<(f64, f64)> =
                    pairs.iter().map(|(_, a, b)| (a.value, b.value)).collect();
                paired.bootstrap = bootstrap::ratio_of_medians(&plain, bootstrap::RESAMPLES, seed);
                paired.interval = interval::decide(&paired.block_logs());
                paired.ratio = paired.interval.map(|of| Ratio::Is(of.centre)).or(ratio);
            }
        }
        paired
    }

    /// The log ratios that decide, one for each block.
    pub fn block_logs(&self) -> Vec<f64> {
        self.blocks.iter().map(|block| block.1).collect()
    }
}

/// The mean of the rounds of each boot.
pub fn blocks(logs: &[(u32, f64)], boot: &dyn Fn(u32) -> Option<u32>) -> Vec<(u32, f64)> {
    let mut sums: std::collections::BTreeMap<u32, (f64, f64)> = Default::default();
    for &(round, log) in logs {
        let (sum, count) = sums.entry(boot(round).unwrap_or(round)).or_default();
        *sum += log;
        *count += 1.0;
    }
    sums.into_iter().map(|(block, (sum, count))| (block, sum / count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(list: &[f64]) -> Vec<(u32, Value)> {
        (0..).zip(list.iter().map(|&v| Value::from(v))).collect()
    }

    fn bound(value: f64) -> Value {
        Value { value, at_least: true }
    }

    #[test]
    fn median_of_even_and_odd() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn bounds_above_the_median_do_not_matter() {
        let exact = median_value(&[1.0.into(), 2.0.into(), bound(9.0)]).unwrap();
        assert_eq!((exact.value, exact.at_least), (2.0, false));
        let bounded = median_value(&[1.0.into(), bound(2.0), 9.0.into()]).unwrap();
        assert_eq!((bounded.value, bounded.at_least), (2.0, true));
    }

    #[test]
    fn below_six_rounds_points_only() {
        let a = values(&[2.0, 2.1, 2.2, 2.0, 2.0]);
        let b = values(&[1.0, 1.0, 1.1, 1.0, 1.0]);
        let paired = Paired::new(&a, &b, Better::Higher, 1, &|_| None);
        assert!(matches!(paired.ratio, Some(Ratio::Is(r)) if (r - 2.0).abs() < 1e-12));
        assert!(paired.bootstrap.is_none() && paired.interval.is_none());
    }

    #[test]
    fn less_latency_is_a_ratio_above_one() {
        let fast = values(&[10.0; 6]);
        let slow = values(&[20.0; 6]);
        let paired = Paired::new(&fast, &slow, Better::Lower, 1, &|_| None);
        assert!(matches!(paired.ratio, Some(Ratio::Is(r)) if (r - 2.0).abs() < 1e-12));
        let interval = paired.interval.unwrap();
        assert!(
            (interval.low - 2.0).abs() < 1e-9 && (interval.high - 2.0).abs() < 1e-9,
            "all rounds equal"
        );
    }

    #[test]
    fn a_round_that_one_arm_lacks_is_left_out() {
        let a = values(&[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        let mut b = a.clone();
        b.remove(2);
        let paired = Paired::new(&a, &b, Better::Higher, 1, &|_| None);
        assert_eq!(paired.rounds, 6);
        assert!(paired.logs.iter().all(|(round, _)| *round != 2));
    }

    #[test]
    fn bounds_and_zeros_give_no_interval() {
        let mut a = values(&[5.0; 8]);
        let b = values(&[1.0; 8]);
        a.iter_mut().for_each(|v| v.1.at_least = true);
        let paired = Paired::new(&a, &b, Better::Higher, 1, &|_| None);
        assert_eq!(paired.ratio, Some(Ratio::AtLeast(5.0)));
        assert!(paired.interval.is_none() && paired.logs.is_empty());
        assert_eq!(
            Paired::new(&b, &a, Better::Higher, 1, &|_| None).ratio,
            Some(Ratio::AtMost(0.2))
        );
        assert_eq!(Paired::new(&a, &a, Better::Higher, 1, &|_| None).ratio, None);
        assert_eq!(Paired::new(&b, &values(&[0.0; 8]), Better::Higher, 1, &|_| None).ratio, None);
    }
}
