//! Exact intervals for the centre of paired log ratios, and their p-values.

use serde::Serialize;

/// The level that all intervals keep at least.
pub const LEVEL: f64 = 0.95;

/// How an interval was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Hodges–Lehmann: order statistics of the Walsh averages, by the exact distribution of the signed-rank sum.
    /// Valid where the log ratios are symmetric.
    SignedRank,
    /// Order statistics of the log ratios themselves, by the binomial distribution. Valid for any distribution; taken
    /// where the log ratios are skewed.
    Sign,
}

/// An interval of a ratio.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Centre: the pseudo-median (signed rank) or median (sign).
    pub centre: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// The confidence really reached, 0.95 or a little above.
    pub confidence: f64,
    /// How it was made.
    pub method: Method,
    /// Exact two-sided p-value of "the ratio is 1".
    pub p: f64,
}

/// The interval that decides: signed ranks, or signs where `logs` are skewed. `None` when too few for 95 %.
pub fn decide(logs: &[f64]) -> Option<Interval> {
    if skewed(logs) { sign(logs) } else { signed_rank(logs) }
}

/// Whether the sample skewness is beyond twice its standard error. With fewer than 8 values it cannot be told.
pub fn skewed(logs: &[f64]) -> bool {
    let n = logs.len() as f64;
    if logs.len() < 8 {
        return false;
    }
    let mean = logs.iter().sum::<f64>() / n;
    let moment = |k: i32| logs.iter().map(|x| (x - mean).powi(k)).sum::<f64>() / n;
    let spread = moment(2);
    // Equal values: nothing but rounding is left of the spread.
    if spread.sqrt() <= 1e-12 * mean.abs().max(1e-3) {
        return false;
    }
    let skew = moment(3) / spread.powf(1.5) * (n * (n - 1.0)).sqrt() / (n - 2.0);
    let error = (6.0 * n * (n - 1.0) / ((n - 2.0) * (n + 1.0) * (n + 3.0))).sqrt();
    skew.abs() > 2.0 * error
}

/// Hodges–Lehmann interval.
pub fn signed_rank(logs: &[f64]) -> Option<Interval> {
    let n = logs.len();
    let tail = rank_sum_tail(n);
    let (cut, confidence) = widest_cut(&tail)?;
    let mut walsh = walsh(logs);
    walsh.sort_by(f64::total_cmp);
    Some(Interval {
        centre: super::median(&walsh)?.exp(),
        low: walsh[cut].exp(),
        high: walsh[walsh.len() - 1 - cut].exp(),
        confidence,
        method: Method::SignedRank,
        p: signed_rank_p(logs),
    })
}

/// The means of all pairs of values, each with itself too.
fn walsh(logs: &[f64]) -> Vec<f64> {
    let pairs = logs.iter().enumerate().flat_map(|(at, a)| logs[at..].iter().map(move |b| (a, b)));
    pairs.map(|(a, b)| (a + b) / 2.0).collect()
}

/// Sign interval.
pub fn sign(logs: &[f64]) -> Option<Interval> {
    let n = logs.len();
    let tail = binomial_tail(n);
    let (cut, confidence) = widest_cut(&tail)?;
    let mut sorted = logs.to_vec();
    sorted.sort_by(f64::total_cmp);
    let above = logs.iter().filter(|x| **x > 0.0).count();
    let below = logs.iter().filter(|x| **x < 0.0).count();
    let p = binomial_tail(above + below)
        .get(above.min(below))
        .map_or(1.0, |tail| (2.0 * tail).min(1.0));
    Some(Interval {
        centre: super::median(logs)?.exp(),
        low: sorted[cut].exp(),
        high: sorted[n - 1 - cut].exp(),
        confidence,
        method: Method::Sign,
        p,
    })
}

/// The ends of the interval of a level, signed ranks or signs as [`decide`]; `None` when too few for that level.
pub fn ends(logs: &[f64], level: f64) -> Option<(f64, f64)> {
    let tail = if skewed(logs) { binomial_tail(logs.len()) } else { rank_sum_tail(logs.len()) };
    let (cut, _) = cut_at(&tail, level)?;
    let mut values = if skewed(logs) { logs.to_vec() } else { walsh(logs) };
    values.sort_by(f64::total_cmp);
    Some((values[cut].exp(), values[values.len() - 1 - cut].exp()))
}

/// Exact one-sided p-value of "the centre of `logs` is at most `edge`", signed ranks or signs as [`decide`].
pub fn above(logs: &[f64], edge: f64) -> f64 {
    let moved: Vec<f64> = logs.iter().map(|log| log - edge).filter(|log| *log != 0.0).collect();
    if skewed(logs) {
        let below = moved.iter().filter(|log| **log < 0.0).count();
        return binomial_tail(moved.len()).get(below).copied().unwrap_or(1.0).min(1.0);
    }
    let (doubled, values) = doubled_ranks(&moved);
    let minus: usize =
        values.iter().zip(&doubled).filter(|(x, _)| **x < 0.0).map(|(_, rank)| rank).sum();
    cumulate(&subset_sums(&doubled))[minus].min(1.0)
}

/// Two lots of logarithms that do not pair: the Hodges–Lehmann ratio of the second to the first, with its interval by
/// the exact distribution of the rank sum. (centre, low, high); `None` when too few for 95 %.
pub fn shift(before: &[f64], after: &[f64]) -> Option<(f64, f64, f64)> {
    let (cut, _) = widest_cut(&mann_whitney_tail(before.len(), after.len()))?;
    let mut apart = differences(before, after);
    apart.sort_by(f64::total_cmp);
    let high = apart[apart.len() - 1 - cut].exp();
    Some((super::median(&apart)?.exp(), apart[cut].exp(), high))
}

/// The centre of [`shift`] alone, for lots that are too small for an interval.
pub fn centre_of_shift(before: &[f64], after: &[f64]) -> Option<f64> {
    super::median(&differences(before, after)).map(f64::exp)
}

fn differences(before: &[f64], after: &[f64]) -> Vec<f64> {
    after.iter().flat_map(|a| before.iter().map(move |b| a - b)).collect()
}

/// The largest index k with 2·P(statistic ≤ k) ≤ 0.05, and the confidence 1 − 2·P of the interval that leaves out k
/// order statistics at each end.
fn widest_cut(tail: &[f64]) -> Option<(usize, f64)> {
    cut_at(tail, LEVEL)
}

fn cut_at(tail: &[f64], level: f64) -> Option<(usize, f64)> {
    // One in a hundred is a hundredth, whatever 1 - 0.99 is to a computer.
    let both = 1.0 - level + 1e-12;
    let cut = tail.iter().take_while(|p| 2.0 * **p <= both).count().checked_sub(1)?;
    Some((cut, 1.0 - 2.0 * tail[cut]))
}

/// P(W ≤ w) for each w, W the signed-rank sum of n untied values: every subset of the ranks is as likely.
fn rank_sum_tail(n: usize) -> Vec<f64> {
    let ranks: Vec<usize> = (1..=n).collect();
    cumulate(&subset_sums(&ranks))
}

/// P(X ≤ k) for each k, X binomial(n, 1/2).
fn binomial_tail(n: usize) -> Vec<f64> {
    cumulate(&subset_sums(&vec![1; n]))
}

/// P(U ≤ u) for u up to half of n·m, U the Mann–Whitney count of n and m untied values: the coefficients of the Gaussian
/// binomial, by the binomial.
fn mann_whitney_tail(n: usize, m: usize) -> Vec<f64> {
    let mut ways = vec![0.0; n * m / 2 + 1];
    ways[0] = 1.0;
    let mut all = 1.0;
    for i in 1..=n {
        for at in (m + i..ways.len()).rev() {
            ways[at] -= ways[at - m - i];
        }
        for at in i..ways.len() {
            ways[at] += ways[at - i];
        }
        all *= (m + i) as f64 / i as f64;
    }
    cumulate(&ways.iter().map(|ways| ways / all).collect::<Vec<_>>())
}

/// The probability of each sum of a random subset of `weights`.
fn subset_sums(weights: &[usize]) -> Vec<f64> {
    let mut chance = vec![0.0; weights.iter().sum::<usize>() + 1];
    chance[0] = 1.0;
    for &weight in weights {
        for sum in (0..chance.len()).rev() {
            let with = if sum >= weight { chance[sum - weight] } else { 0.0 };
            chance[sum] = (chance[sum] + with) / 2.0;
        }
    }
    chance
}

fn cumulate(chance: &[f64]) -> Vec<f64> {
    chance
        .iter()
        .scan(0.0, |sum, p| {
            *sum += p;
            Some(*sum)
        })
        .collect()
}

/// Exact two-sided p-value of the signed-rank test, given the ties that there are; zeros are left out.
fn signed_rank_p(logs: &[f64]) -> f64 {
    let (doubled, values) = doubled_ranks(logs);
    let plus: usize =
        values.iter().zip(&doubled).filter(|(x, _)| **x > 0.0).map(|(_, rank)| rank).sum();
    let minus = doubled.iter().sum::<usize>() - plus;
    let tail = cumulate(&subset_sums(&doubled));
    (2.0 * tail[plus.min(minus)]).min(1.0)
}

/// Twice the mid-ranks by size, and the values in that order; zeros are left out.
fn doubled_ranks(logs: &[f64]) -> (Vec<usize>, Vec<f64>) {
    let mut values: Vec<f64> = logs.iter().copied().filter(|x| *x != 0.0).collect();
    values.sort_by(|a, b| a.abs().total_cmp(&b.abs()));
    // Twice the mid-rank is a whole number.
    let mut doubled = vec![0; values.len()];
    let mut from = 0;
    while from < values.len() {
        let mut to = from;
        while to + 1 < values.len() && values[to + 1].abs() == values[from].abs() {
            to += 1;
        }
        doubled[from..=to].fill(from + to + 2);
        from = to + 1;
    }
    (doubled, values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logs(ratios: &[f64]) -> Vec<f64> {
        ratios.iter().map(|r| r.ln()).collect()
    }

    #[test]
    fn five_values_have_no_interval_and_six_have_their_range() {
        assert!(signed_rank(&logs(&[1.0, 1.1, 1.2, 1.3, 1.4])).is_none());
        assert!(sign(&logs(&[1.0, 1.1, 1.2, 1.3, 1.4])).is_none());
        let six = logs(&[1.05, 1.1, 1.2, 1.3, 1.4, 1.5]);
        for interval in [signed_rank(&six).unwrap(), sign(&six).unwrap()] {
            assert!((interval.low - 1.05).abs() < 1e-12 && (interval.high - 1.5).abs() < 1e-12);
            assert!((interval.confidence - 0.96875).abs() < 1e-12);
            assert!((interval.p - 0.03125).abs() < 1e-12);
        }
    }

    /// Critical values of the signed-rank sum, two-sided 5 %, as in any table: n = 10: 8, n = 20: 52.
    #[test]
    fn signed_rank_critical_values() {
        for (n, critical) in [(6, 0), (7, 2), (8, 3), (10, 8), (15, 25), (20, 52)] {
            assert_eq!(widest_cut(&rank_sum_tail(n)).unwrap().0, critical, "n = {n}");
        }
    }

    /// Critical values of Mann and Whitney's U, two-sided 5 %, as in any table.
    #[test]
    fn mann_whitney_critical_values() {
        for (n, m, critical) in [(6, 6, 5), (6, 10, 11), (10, 10, 23), (20, 20, 127)] {
            assert_eq!(widest_cut(&mann_whitney_tail(n, m)).unwrap().0, critical, "{n} and {m}");
        }
        assert!(widest_cut(&mann_whitney_tail(3, 3)).is_none());
    }

    #[test]
    fn a_shift_of_two_lots() {
        let before = logs(&[1.0, 1.1, 0.9, 1.05, 0.95, 1.0]);
        let after: Vec<f64> = before.iter().map(|log| log + 2f64.ln()).collect();
        let (centre, low, high) = shift(&before, &after).unwrap();
        assert!((centre - 2.0).abs() < 1e-9 && low < 2.0 && 2.0 < high, "{low} {high}");
        assert!(low > 1.75 && high < 2.3, "{low} {high}");
    }

    /// P-value worked by hand: of 2^4 sign patterns of |1,2,3,4|, those with a rank sum of at most 1 are two.
    #[test]
    fn signed_rank_p_by_hand() {
        assert!((signed_rank_p(&[-0.1, 0.2, 0.3, 0.4]) - 2.0 * 2.0 / 16.0).abs() < 1e-12);
        assert!(
            (signed_rank_p(&[0.0, 0.2, 0.2, 0.2]) - 2.0 / 8.0).abs() < 1e-12,
            "zeros left out, ties kept"
        );
        assert_eq!(signed_rank_p(&[0.0, 0.0]), 1.0);
    }

    /// One of 2^4 sign patterns has a rank sum below of nothing; two have at most 1.
    #[test]
    fn one_sided_by_hand() {
        assert!((above(&[0.1, 0.2, 0.3, 0.4], 0.0) - 1.0 / 16.0).abs() < 1e-12);
        assert!((above(&[-0.1, 0.2, 0.3, 0.4], 0.0) - 2.0 / 16.0).abs() < 1e-12);
        assert!((above(&[0.1, 0.2, 0.3, 0.4], 0.5) - 1.0).abs() < 1e-12);
        assert_eq!(above(&[], 0.0), 1.0);
    }

    #[test]
    fn ninety_nine_of_a_hundred_need_eight() {
        let seven = logs(&[1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]);
        assert!(ends(&seven, 0.99).is_none());
        let eight = [&seven[..], &[1.8f64.ln()]].concat();
        let (low, high) = ends(&eight, 0.99).unwrap();
        assert!((low - 1.1).abs() < 1e-12 && (high - 1.8).abs() < 1e-12);
    }

    #[test]
    fn a_heavy_tail_turns_to_signs() {
        let mut tail = vec![0.01, -0.01, 0.02, -0.02, 0.0, 0.01, -0.01, 0.0, 0.02, 1.5];
        assert!(skewed(&tail));
        assert_eq!(decide(&tail).unwrap().method, Method::Sign);
        tail.pop();
        assert_eq!(decide(&tail).unwrap().method, Method::SignedRank);
        assert!(!skewed(&[0.3; 12]), "equal values are not skewed");
    }
}
