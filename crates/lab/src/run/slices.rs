//! How long each load is measured in a round, where the plan leaves that to the loads' own noise: the time of all of them together
//! stays as it is, and those whose rates vary more get more of it.
//!
//! What decides is how far rates vary from round to round about what each arm and each round has in common, and never which arm is
//! faster: so no answer can choose its own time. All arms of a load are measured equally long in a round.

use std::time::Duration;

use super::running::Running;
use crate::plan::Plan;

/// The first rounds are measured as the plan says, and looked at; then the parts stay.
const PILOT: u32 = 4;
/// No load gets less or more than these parts of what the plan says.
const LEAST: f64 = 0.5;
const MOST: f64 = 2.0;
/// Less noise than this says nothing: a handful of rounds may agree by chance.
const QUIET: f64 = 0.01;

/// A load of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Its name.
    pub name: &'static str,
    /// Arms that it runs on.
    pub arms: usize,
}

/// What was measured so far.
#[derive(Debug, Default)]
pub struct Slices {
    seen: Vec<Seen>,
}

#[derive(Debug)]
struct Seen {
    load: &'static str,
    arm: String,
    round: u32,
    log: f64,
}

impl Slices {
    /// Takes a rate into account.
    pub fn note(&mut self, load: &'static str, arm: &str, round: u32, rate: f64) {
        if rate > 0.0 && round < PILOT {
            self.seen.push(Seen { load, arm: arm.to_owned(), round, log: rate.ln() });
        }
    }

    /// For each load of these arms that is measured for a time, how long that is in a round of the plan.
    pub fn times(
        &self,
        plan: &Plan,
        round: u32,
        arms: &[&Running],
    ) -> Vec<(&'static str, Duration)> {
        let mut loads: Vec<Load> = Vec::new();
        for workload in arms.iter().flat_map(|arm| arm.rounds()) {
            match loads.iter_mut().find(|load| load.name == workload.name()) {
                Some(load) => load.arms += 1,
                None if workload.job().is_some() => {
                    loads.push(Load { name: workload.name(), arms: 1 });
                }
                None => {}
            }
        }
        let parts = match plan.sized_by_noise {
            true => self.parts(round, &loads),
            false => vec![1.0; loads.len()],
        };
        let time = |part: f64| Duration::from_secs_f64(plan.seconds * part);
        loads.iter().zip(parts).map(|(load, part)| (load.name, time(part))).collect()
    }

    /// For each load its part of the time that the plan says in a round: 1 as long as nothing is known.
    pub fn parts(&self, round: u32, loads: &[Load]) -> Vec<f64> {
        if round < PILOT {
            return vec![1.0; loads.len()];
        }
        let noise: Option<Vec<f64>> = loads.iter().map(|load| self.noise(load.name)).collect();
        match noise {
            // The variance of a mean falls with its time: so the sum of all variances is least.
            Some(noise) => share(loads, &noise),
            None => vec![1.0; loads.len()],
        }
    }

    /// The standard deviation of what neither the arm nor the round explains.
    fn noise(&self, load: &str) -> Option<f64> {
        let of: Vec<&Seen> = self.seen.iter().filter(|seen| seen.load == load).collect();
        let mut arms: Vec<&str> = of.iter().map(|seen| seen.arm.as_str()).collect();
        arms.sort_unstable();
        arms.dedup();
        let mut rounds: Vec<u32> = of.iter().map(|seen| seen.round).collect();
        rounds.sort_unstable();
        rounds.dedup();
        let at = |arm: &str, round| {
            of.iter().find(|seen| seen.arm == arm && seen.round == round).map(|seen| seen.log)
        };
        // Rounds in which none is missing.
        let table: Vec<Vec<f64>> = rounds
            .iter()
            .filter_map(|round| arms.iter().map(|arm| at(arm, *round)).collect())
            .collect();
        if table.len() < PILOT as usize || arms.len() < 2 {
            return None;
        }
        let mean = |values: &mut dyn Iterator<Item = f64>| {
            let (sum, count) = values.fold((0.0, 0.0), |(sum, n), value| (sum + value, n + 1.0));
            sum / count
        };
        let of_arm: Vec<f64> =
            (0..arms.len()).map(|arm| mean(&mut table.iter().map(|row| row[arm]))).collect();
        let all = mean(&mut of_arm.iter().copied());
        let mut squares = 0.0;
        for row in &table {
            let of_round = mean(&mut row.iter().copied());
            squares += row
                .iter()
                .zip(&of_arm)
                .map(|(value, arm)| (value - of_round - arm + all).powi(2))
                .sum::<f64>();
        }
        let free = (table.len() - 1) * (arms.len() - 1);
        Some((squares / free as f64).sqrt().max(QUIET))
    }
}

/// Parts by noise and by the root of the number of arms, within the bounds, that cost as much as one part for each.
fn share(loads: &[Load], noise: &[f64]) -> Vec<f64> {
    let wish: Vec<f64> =
        loads.iter().zip(noise).map(|(load, noise)| noise / (load.arms as f64).sqrt()).collect();
    let mut parts: Vec<Option<f64>> = vec![None; loads.len()];
    let cost = |at: usize| loads[at].arms as f64;
    loop {
        let all: f64 = (0..loads.len()).map(cost).sum();
        let fixed: f64 = (0..loads.len()).filter_map(|at| Some(parts[at]? * cost(at))).sum();
        let free: Vec<usize> = (0..loads.len()).filter(|&at| parts[at].is_none()).collect();
        let wished: f64 = free.iter().map(|&at| wish[at] * cost(at)).sum();
        let scale = if wished > 0.0 { (all - fixed) / wished } else { 0.0 };
        // Of those beyond a bound the one furthest beyond is set first: the others then have another scale.
        let beyond = |at: usize| {
            let part = wish[at] * scale;
            (part / MOST).max(LEAST / part.max(f64::MIN_POSITIVE))
        };
        let worst = free.iter().copied().max_by(|&a, &b| beyond(a).total_cmp(&beyond(b)));
        match worst.filter(|&at| beyond(at) > 1.0) {
            Some(at) => parts[at] = Some((wish[at] * scale).clamp(LEAST, MOST)),
            None => {
                return (0..loads.len())
                    .map(|at| parts[at].unwrap_or_else(|| wish[at] * scale))
                    .collect();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOADS: [Load; 3] = [
        Load { name: "calm", arms: 8 },
        Load { name: "wild", arms: 4 },
        Load { name: "mild", arms: 4 },
    ];

    /// Rates of every arm in so many rounds: each arm and each round has a level of its own.
    fn seen(rounds: u32, noise: [f64; 3]) -> Slices {
        let mut slices = Slices::default();
        for round in 0..rounds {
            for (load, noise) in LOADS.iter().zip(noise) {
                for arm in 0..load.arms {
                    let wave =
                        f64::from((round * 5 + arm as u32 * 3 + round * arm as u32) % 7) - 3.0;
                    let level = 1.0 + arm as f64 + f64::from(round);
                    let rate = 1000.0 * level * (noise * wave / 2.0).exp();
                    slices.note(load.name, &format!("arm{arm}"), round, rate);
                }
            }
        }
        slices
    }

    fn cost(parts: &[f64]) -> f64 {
        LOADS.iter().zip(parts).map(|(load, part)| load.arms as f64 * part).sum()
    }

    #[test]
    fn what_varies_more_is_measured_longer_and_all_together_as_long() {
        let parts = seen(4, [0.02, 0.12, 0.06]).parts(4, &LOADS);
        assert!(parts[1] > 1.2 && parts[0] < 0.8 && parts[1] > parts[2], "{parts:?}");
        assert!((cost(&parts) - 16.0).abs() < 1e-9, "{parts:?}");
        assert!(parts.iter().all(|part| (LEAST..=MOST).contains(part)), "{parts:?}");
    }

    #[test]
    fn nothing_changes_before_there_is_something_to_know() {
        assert_eq!(seen(3, [0.02, 0.12, 0.06]).parts(3, &LOADS), [1.0; 3]);
        // One round of a load lacks an arm: it counts for nothing.
        let mut slices = seen(4, [0.02, 0.12, 0.06]);
        slices
            .seen
            .retain(|seen| (seen.load, seen.round, seen.arm.as_str()) != ("wild", 1, "arm2"));
        assert_eq!(slices.parts(4, &LOADS), [1.0; 3]);
    }

    #[test]
    fn who_is_faster_has_no_say() {
        // Levels of arms and rounds as they were above; here one arm is ten times as fast in one load.
        let usual = seen(4, [0.03, 0.05, 0.04]);
        let mut other = seen(4, [0.03, 0.05, 0.04]);
        for seen in other.seen.iter_mut().filter(|seen| seen.load == "mild" && seen.arm == "arm1") {
            seen.log += 10f64.ln();
        }
        let (one, two) = (usual.parts(4, &LOADS), other.parts(4, &LOADS));
        assert!(one.iter().zip(&two).all(|(a, b)| (a - b).abs() < 1e-9), "{one:?} {two:?}");
    }

    #[test]
    fn what_was_decided_once_stays() {
        let early = seen(4, [0.02, 0.12, 0.06]).parts(4, &LOADS);
        assert_eq!(seen(12, [0.02, 0.12, 0.06]).parts(11, &LOADS), early);
    }

    #[test]
    fn bounds_hold_however_far_apart_the_noise_is() {
        for noise in [[0.0, 5.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0], [5.0, 5.0, 5.0]] {
            let parts = seen(4, noise).parts(4, &LOADS);
            assert!(parts.iter().all(|part| (LEAST..=MOST).contains(part)), "{noise:?} {parts:?}");
            assert!(cost(&parts) <= 16.0 + 1e-9, "{noise:?} {parts:?}");
        }
    }
}
