//! The lab's own rates of error, by drawing runs whose truth is known: how often the procedure that decides claims what
//! is not, and how often it sees what is.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use super::{Paired, Ratio, Verdict, family, interval, verdict};

/// Draws of single comparisons.
pub const DRAWS: u32 = 2000;
/// Draws of whole tables.
pub const TABLES: u32 = 300;
/// Backends in a drawn table, beside the reference and its twin.
pub const WIDTH: usize = 12;

/// Standard deviation of log ratios.
pub fn deviation(logs: &[(u32, f64)]) -> f64 {
    let count = logs.len() as f64;
    let mean = logs.iter().map(|log| log.1).sum::<f64>() / count;
    (logs.iter().map(|log| (log.1 - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0)).sqrt()
}

/// How often the deciding interval of `rounds` rounds leaves 1, when the true log ratio is `shift` and a round's log ratio
/// deviates by `noise`.
pub fn apart(noise: f64, rounds: usize, shift: f64, seed: u64) -> f64 {
    let mut normal = normal(seed);
    let apart = (0..DRAWS)
        .filter(|_| {
            let logs: Vec<f64> = (0..rounds).map(|_| shift + noise * normal()).collect();
            interval::decide(&logs).is_some_and(|i| i.low > 1.0 || i.high < 1.0)
        })
        .count();
    apart as f64 / f64::from(DRAWS)
}

/// What verdicts do in whole tables.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Table {
    /// Rounds of each.
    pub rounds: usize,
    /// Share of tables in which an equal backend is called faster or slower.
    pub false_claims: f64,
    /// Share of tables in which the one that is slower is called so.
    pub power: f64,
}

/// Draws tables of a reference, its twin and [`WIDTH`] backends, all equal but one, whose log ratio is `shift`; verdicts
/// come about as in a report: noise floor, step-down over the whole table, margin of equality.
pub fn table(noise: f64, rounds: usize, shift: f64, seed: u64) -> Table {
    let mut normal = normal(seed);
    // The ratio of two has the noise of both.
    let each = noise / std::f64::consts::SQRT_2;
    let (mut wrong, mut seen) = (0, 0);
    for _ in 0..TABLES {
        let mut arm = || -> Vec<f64> { (0..rounds).map(|_| each * normal()).collect() };
        let reference = arm();
        let mut against = |shift: f64| -> Paired {
            let logs = arm().iter().zip(&reference).map(|(a, b)| shift + a - b).collect();
            paired(logs)
        };
        let floor = verdict::noise_floor(&against(0.0)).map_or(0.0, |floor| floor.0);
        let rows: Vec<Paired> =
            (0..WIDTH).map(|at| against(if at == 0 { shift } else { 0.0 })).collect();
        let logs: Vec<&[(u32, f64)]> = rows.iter().map(|row| row.logs.as_slice()).collect();
        let adjusted = family::step_down(&logs, seed);
        let verdicts: Vec<Verdict> =
            rows.iter().zip(adjusted).map(|(row, p)| verdict::decide(row, p, floor)).collect();
        let claims = |v: &&Verdict| matches!(v, Verdict::Faster | Verdict::Slower);
        wrong += u32::from(verdicts.iter().skip(1).any(|v| claims(&v)));
        seen += u32::from(verdicts.first() == Some(&Verdict::Slower));
    }
    let share = |count: u32| f64::from(count) / f64::from(TABLES);
    Table { rounds, false_claims: share(wrong), power: share(seen) }
}

/// A comparison of which only the log ratios are known.
fn paired(logs: Vec<f64>) -> Paired {
    Paired {
        rounds: logs.len(),
        ratio: super::median(&logs).map(|centre| Ratio::Is(centre.exp())),
        bootstrap: None,
        interval: interval::decide(&logs),
        logs: (0..).zip(logs).collect(),
    }
}

fn normal(seed: u64) -> impl FnMut() -> f64 {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    // Twelve uniform numbers less six are as good as normal here.
    move || (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOWER: f64 = -0.0513;

    #[test]
    fn error_rates_follow_the_noise() {
        let quiet = apart(0.01, 10, SLOWER, 1);
        let loud = apart(0.2, 10, SLOWER, 1);
        assert!(quiet > 0.99 && loud < 0.3, "{quiet} {loud}");
        for rounds in [6, 10, 20] {
            assert!(apart(0.03, rounds, 0.0, 2) <= 0.065, "{rounds}");
        }
    }

    #[test]
    fn a_whole_table_claims_what_is_and_little_else() {
        let quiet = table(0.005, 6, SLOWER, 1);
        assert!(quiet.power > 0.9 && quiet.false_claims <= 0.05, "{quiet:?}");
        let loud = table(0.2, 6, SLOWER, 1);
        assert!(loud.power < 0.3 && loud.false_claims <= 0.06, "{loud:?}");
    }

    #[test]
    fn the_deviation_of_a_handful() {
        let logs = [(0, 1.0), (1, 3.0), (2, 5.0)];
        assert!((deviation(&logs) - 2.0).abs() < 1e-12);
    }
}
