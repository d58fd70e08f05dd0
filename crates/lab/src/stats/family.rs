//! Many comparisons in one table: how to keep the chance of even one false claim at 5 %.
//!
//! Holm's procedure over exact p-values cannot reject anything with few rounds: six rounds give no p-value below 1/32,
//! and thirty rows ask for 1/600. The rows are not strangers, though: one round touches all of them. So the decision
//! is by Westfall and Young's step-down procedure with *whole rounds* flipped: were all differences noise, a round's
//! log ratios would be as likely with their signs turned, all at once. Each of the 2^n flips gives the largest
//! statistic of the table; a row is claimed when its own is among the largest 5 % of those. Like Holm's it steps down,
//! and it is never weaker than the exact test of a table with one row. Holm's p-values are printed beside it.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Up to this many rounds all flips are tried; beyond it, [`RANDOM_FLIPS`] seeded ones.
const ALL_FLIPS_UP_TO: usize = 15;
/// Flips drawn when there are too many to try all.
const RANDOM_FLIPS: usize = 20_000;
/// Up to this many rounds of two runs together all ways to deal them are tried; beyond it, as many seeded ones.
const ALL_DEALS_UP_TO: usize = 16;

/// Values by round.
pub type Rounds = Vec<(u32, f64)>;

/// Adjusted p-values, one for each row; a row is a list of (round, log ratio). Empty rows get 1.
pub fn step_down(rows: &[&[(u32, f64)]], seed: u64) -> Vec<f64> {
    let mut rounds: Vec<u32> =
        rows.iter().flat_map(|row| row.iter().map(|(round, _)| *round)).collect();
    rounds.sort_unstable();
    rounds.dedup();
    let place = |round: u32| rounds.binary_search(&round).unwrap_or(0);
    let rows: Vec<Vec<(usize, f64)>> = rows
        .iter()
        .map(|row| row.iter().map(|&(round, log)| (place(round), log)).collect())
        .collect();

    let mut steps = Steps::new(&rows, &vec![1.0; rounds.len()], statistic);
    for_each_flip(rounds.len(), seed, |signs| steps.visit(signs));
    steps.adjusted()
}

/// The same for two runs whose rounds do not pair; a row is the rounds of the first and those of the second. Had nothing
/// changed between them, any of the rounds could have been in either run, with all that was measured in it: whole rounds
/// are dealt anew.
pub fn step_down_between(rows: &[(Rounds, Rounds)], seed: u64) -> Vec<f64> {
    let places = |of: &dyn Fn(&(Rounds, Rounds)) -> Rounds| -> Vec<u32> {
        let mut rounds: Vec<u32> =
            rows.iter().flat_map(|row| of(row).into_iter().map(|(round, _)| round)).collect();
        rounds.sort_unstable();
        rounds.dedup();
        rounds
    };
    let (first, second) = (places(&|row| row.0.clone()), places(&|row| row.1.clone()));
    let place = |rounds: &[u32], round: u32| rounds.binary_search(&round).unwrap_or(0);
    let rows: Vec<Vec<(usize, f64)>> = rows
        .iter()
        .map(|(one, two)| {
            let one = one.iter().map(|&(round, log)| (place(&first, round), log));
            let two = two.iter().map(|&(round, log)| (first.len() + place(&second, round), log));
            one.chain(two).collect()
        })
        .collect();
    let mut sides = vec![-1.0; first.len()];
    sides.resize(first.len() + second.len(), 1.0);
    let mut steps = Steps::new(&rows, &sides, apart);
    for_each_deal(&sides, seed, |sides| steps.visit(sides));
    steps.adjusted()
}

type Statistic = fn(&[(usize, f64)], &[f64]) -> f64;

/// Counts, over patterns of signs, how often the largest statistic of a row and all weaker ones reaches the row's own.
struct Steps<'a> {
    rows: &'a [Vec<(usize, f64)>],
    statistic: Statistic,
    seen: Vec<f64>,
    /// The strongest row first.
    order: Vec<usize>,
    beaten: Vec<usize>,
    visits: usize,
}

impl<'a> Steps<'a> {
    fn new(rows: &'a [Vec<(usize, f64)>], straight: &[f64], statistic: Statistic) -> Steps<'a> {
        let seen: Vec<f64> = rows.iter().map(|row| statistic(row, straight)).collect();
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by(|&a, &b| seen[b].total_cmp(&seen[a]));
        Steps { rows, statistic, seen, order, beaten: vec![0; rows.len()], visits: 0 }
    }

    fn visit(&mut self, signs: &[f64]) {
        self.visits += 1;
        let mut largest = 0.0f64;
        // From the weakest row up: the k-th row competes with itself and all weaker ones.
        for &row in self.order.iter().rev() {
            largest = largest.max((self.statistic)(&self.rows[row], signs));
            if largest >= self.seen[row] - 1e-9 {
                self.beaten[row] += 1;
            }
        }
    }

    fn adjusted(&self) -> Vec<f64> {
        let mut adjusted = vec![1.0; self.rows.len()];
        let mut worst = 0.0f64;
        for &row in &self.order {
            if self.rows[row].is_empty() {
                continue;
            }
            worst = worst.max(self.beaten[row] as f64 / self.visits as f64);
            adjusted[row] = worst.min(1.0);
        }
        adjusted
    }
}

/// |sum| over its largest possible value, 0 to 1: a monotone function of Student's |t|.
fn statistic(row: &[(usize, f64)], signs: &[f64]) -> f64 {
    let sum: f64 = row.iter().map(|&(at, log)| log * signs[at]).sum();
    let squares: f64 = row.iter().map(|(_, log)| log * log).sum();
    if squares == 0.0 { 0.0 } else { sum.abs() / (squares * row.len() as f64).sqrt() }
}

/// |difference of the means| of the two sides by the largest that these values allow, 0 to 1: a monotone function of
/// Student's |t|.
fn apart(row: &[(usize, f64)], sides: &[f64]) -> f64 {
    let count = row.len() as f64;
    let mean = row.iter().map(|(_, log)| log).sum::<f64>() / count;
    let squares: f64 = row.iter().map(|(_, log)| (log - mean).powi(2)).sum();
    let second = row.iter().filter(|(at, _)| sides[*at] > 0.0);
    let (above, of) = second.fold((0.0, 0.0), |(sum, of), (_, log)| (sum + (log - mean), of + 1.0));
    // Equal values, but for rounding, or all on one side.
    if squares <= 1e-20 * count || of == 0.0 || of == count {
        return 0.0;
    }
    let between = above * above / of + above * above / (count - of);
    (between / squares).sqrt()
}

/// Calls `visit` with ways to deal the places to the two sides, each side as large as it is in `sides`.
fn for_each_deal(sides: &[f64], seed: u64, mut visit: impl FnMut(&[f64])) {
    let mut dealt = sides.to_vec();
    if sides.len() <= ALL_DEALS_UP_TO {
        let second = sides.iter().filter(|side| **side > 0.0).count();
        for pattern in (0..1u32 << sides.len()).filter(|p| p.count_ones() as usize == second) {
            for (bit, side) in dealt.iter_mut().enumerate() {
                *side = if pattern >> bit & 1 == 1 { 1.0 } else { -1.0 };
            }
            visit(&dealt);
        }
    } else {
        visit(sides);
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..RANDOM_FLIPS {
            for at in (1..dealt.len()).rev() {
                dealt.swap(at, random.random_range(0..=at));
            }
            visit(&dealt);
        }
    }
}

/// Calls `visit` with sign patterns. A pattern and its opposite give the same statistics, so the first sign is kept.
fn for_each_flip(rounds: usize, seed: u64, mut visit: impl FnMut(&[f64])) {
    let mut signs = vec![1.0; rounds];
    if rounds <= ALL_FLIPS_UP_TO {
        for pattern in 0..1u32 << rounds.saturating_sub(1) {
            for (bit, sign) in signs.iter_mut().skip(1).enumerate() {
                *sign = if pattern >> bit & 1 == 1 { -1.0 } else { 1.0 };
            }
            visit(&signs);
        }
    } else {
        // The pattern seen is one of those possible: counting it keeps the test exact.
        visit(&signs);
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..RANDOM_FLIPS {
            signs.iter_mut().for_each(|sign| *sign = if random.random() { -1.0 } else { 1.0 });
            visit(&signs);
        }
    }
}

/// Holm's adjusted p-values.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let mut adjusted = vec![1.0; p.len()];
    let mut worst = 0.0f64;
    for (step, &row) in order.iter().enumerate() {
        worst = worst.max(p[row] * (p.len() - step) as f64);
        adjusted[row] = worst.min(1.0);
    }
    adjusted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(logs: &[f64]) -> Vec<(u32, f64)> {
        (0..).zip(logs.iter().copied()).collect()
    }

    #[test]
    fn holm_worked_by_hand() {
        let adjusted = holm(&[0.01, 0.04, 0.03, 0.005]);
        for (got, want) in adjusted.iter().zip([0.03, 0.06, 0.06, 0.02]) {
            assert!((got - want).abs() < 1e-12, "{adjusted:?}");
        }
    }

    #[test]
    fn one_row_is_the_exact_flip_test() {
        let one = row(&[0.5, 0.52, 0.48, 0.51, 0.49, 0.5]);
        assert!((step_down(&[&one], 1)[0] - 1.0 / 32.0).abs() < 1e-12);
        let mixed = row(&[0.5, -0.5, 0.5, -0.5, 0.5, -0.5]);
        assert_eq!(step_down(&[&mixed], 1)[0], 1.0);
    }

    #[test]
    fn a_clear_row_among_noise_is_claimed_with_six_rounds() {
        let clear = row(&[0.9, 0.91, 0.88, 0.9, 0.92, 0.89]);
        let mut random = ChaCha8Rng::seed_from_u64(3);
        let noise: Vec<Vec<(u32, f64)>> = (0..30)
            .map(|_| (0..6).map(|r| (r, random.random_range(-0.05..0.05))).collect())
            .collect();
        let mut rows: Vec<&[(u32, f64)]> = noise.iter().map(Vec::as_slice).collect();
        rows.push(&clear);
        let adjusted = step_down(&rows, 1);
        assert!(adjusted[30] <= 0.05, "{}", adjusted[30]);
        let plain: Vec<f64> = rows
            .iter()
            .map(|row| {
                super::super::interval::signed_rank(&row.iter().map(|x| x.1).collect::<Vec<_>>())
                    .unwrap()
                    .p
            })
            .collect();
        assert!(holm(&plain)[30] > 0.5, "Holm cannot: this is why it does not decide");
    }

    #[test]
    fn two_runs_worked_by_hand() {
        let (one, two) = (row(&[0.0, 0.1, 0.2]), row(&[1.0, 1.1, 1.2]));
        // Of the 20 ways to deal six rounds two set them as far apart.
        assert!((step_down_between(&[(one.clone(), two)], 1)[0] - 0.1).abs() < 1e-12);
        assert_eq!(step_down_between(&[(one.clone(), one)], 1), [1.0]);
        assert!(step_down_between(&[], 1).is_empty());
        assert_eq!(step_down_between(&[(Vec::new(), Vec::new())], 1), [1.0]);
    }

    /// Two runs of six rounds, thirty rows: a clear change is claimed, and among tables of nothing at most one in twenty
    /// (and a little for chance) has a claim.
    #[test]
    fn changes_between_two_runs() {
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let mut lot =
            |shift: f64| -> Rounds { (0..6).map(|r| (r, shift + noise(&mut random))).collect() };
        let mut rows: Vec<(Rounds, Rounds)> = (0..30).map(|_| (lot(0.0), lot(0.0))).collect();
        rows.push((lot(0.0), lot(8.0)));
        assert!(step_down_between(&rows, 1)[30] <= 0.05);
        let tables = 200;
        let wrong = (0..tables)
            .filter(|_| {
                let rows: Vec<_> = (0..4).map(|_| (lot(0.0), lot(0.0))).collect();
                step_down_between(&rows, 1).iter().any(|p| *p <= 0.05)
            })
            .count();
        assert!((2..=20).contains(&wrong), "{wrong} of {tables}");
    }

    #[test]
    fn empty_rows_and_rows_of_zeros_are_not_claimed() {
        let zeros = row(&[0.0; 6]);
        assert_eq!(step_down(&[&[], &zeros], 1), vec![1.0, 1.0]);
        assert!(step_down(&[], 1).is_empty());
    }

    /// Twelve arms that are all the same, measured against one reference: in at most 5 % of tables (and a little for
    /// chance) is any row claimed.
    #[test]
    fn false_claims_in_a_table_of_nothing() {
        let mut random = ChaCha8Rng::seed_from_u64(11);
        let tables = 1500;
        let mut wrong = 0;
        for _ in 0..tables {
            let reference: Vec<f64> = (0..6).map(|_| noise(&mut random)).collect();
            let rows: Vec<Vec<(u32, f64)>> = (0..12)
                .map(|_| (0..6).map(|r| (r, noise(&mut random) - reference[r as usize])).collect())
                .collect();
            let rows: Vec<&[(u32, f64)]> = rows.iter().map(Vec::as_slice).collect();
            wrong += usize::from(step_down(&rows, 1).iter().any(|p| *p <= 0.05));
        }
        let share = f64::from(u32::try_from(wrong).unwrap()) / f64::from(tables);
        assert!(share <= 0.05, "false claims in {share} of the tables");
        assert!(share > 0.01, "a test that never claims has no power: {share}");
    }

    fn noise(random: &mut ChaCha8Rng) -> f64 {
        // Heavier tails than normal, symmetric.
        let centred: f64 = (0..6).map(|_| random.random_range(-0.5..0.5)).sum();
        if random.random_ratio(1, 20) { 4.0 * centred } else { centred }
    }
}
