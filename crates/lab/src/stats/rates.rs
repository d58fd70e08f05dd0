//! The lab's own rates of error, by drawing runs whose truth is known: how often a procedure claims what is not, and how
//! often it sees what is. The one in use stands beside the one before it.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use super::decision::{self, Control, Decision, Member, Sensitivity};
use super::{Paired, Ratio, family, former, interval};

/// Draws of single comparisons.
pub const DRAWS: u32 = 2000;
/// Runs drawn for each line of the table.
pub const RUNS: u32 = 200;
/// Loads of a drawn run; each compares three arms with the reference: twelve comparisons, the most that a question has.
const LOADS: usize = 4;
const RIVALS: usize = 3;
/// The part of a slice's variance that its boot has, so that the rounds of a boot are alike.
const BOOT: f64 = 0.3;
/// How often a slice stalls, where slices stall; what is left of its rate is 0.2 to 0.8.
const STALLS: f64 = 0.08;
/// What the known-slow arm reaches: 20 % more latency.
const SLOW: f64 = 1.0 / 1.2;
/// The margin of a quick run.
const MARGIN: f64 = 0.08;

/// How often the deciding interval of `rounds` rounds leaves 1, when the true log ratio is `shift` and a round's log ratio
/// deviates by `noise`.
pub fn apart(noise: f64, rounds: usize, shift: f64, seed: u64) -> f64 {
    let mut draw = Draw::new(seed);
    let apart = (0..DRAWS)
        .filter(|_| {
            let logs: Vec<f64> = (0..rounds).map(|_| shift + noise * draw.normal()).collect();
            interval::decide(&logs).is_some_and(|i| i.low > 1.0 || i.high < 1.0)
        })
        .count();
    apart as f64 / f64::from(DRAWS)
}

/// What is true of a drawn run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Truth {
    /// Times as good as the reference the first arm is; the others equal it.
    pub ratio: f64,
    /// Standard deviation of the logarithm of a slice's rate.
    pub spread: f64,
    /// Whether 8 % of the slices stall.
    pub stalls: bool,
}

/// The truths of the table: equal, 1.2, 1.5 and 2 times, at three spreads, without and with stalls.
pub fn truths() -> Vec<Truth> {
    let mut list = Vec::new();
    for stalls in [false, true] {
        for spread in [0.1, 0.2, 0.4] {
            list.extend([1.0, 1.2, 1.5, 2.0].map(|ratio| Truth { ratio, spread, stalls }));
        }
    }
    list
}

/// A procedure, with the rounds and boots that it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Procedure {
    /// Before November 2026: six rounds.
    Former,
    /// The one in use: twelve rounds over six boots.
    Six,
    /// The one in use: twelve rounds over twelve boots.
    Twelve,
}

impl Procedure {
    /// All, in the order of the table.
    pub const ALL: [Procedure; 3] = [Procedure::Former, Procedure::Six, Procedure::Twelve];

    fn boots(self) -> (u32, u32) {
        match self {
            Procedure::Former => (6, 1),
            Procedure::Six => (6, 2),
            Procedure::Twelve => (12, 1),
        }
    }
}

/// What a procedure says of runs of one truth, as shares.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Said {
    /// Of the comparisons of the first arm, those called faster.
    pub faster: f64,
    /// Of the same, those called no different.
    pub same: f64,
    /// Of the runs, those in which anything is called that is not: an equal arm faster or slower, the first arm
    /// slower, or no different where it lies beyond the margin.
    pub wrong: f64,
}

/// Draws so many runs of a truth and asks a procedure.
pub fn said(procedure: Procedure, truth: Truth, runs: u32, seed: u64) -> Said {
    let mut draw = Draw::new(seed);
    let (mut faster, mut same, mut wrong) = (0, 0, 0);
    for run in 0..runs {
        let answers = answers(procedure, truth, &mut draw, seed ^ u64::from(run));
        let mut any = false;
        for (at, answer) in answers.iter().enumerate() {
            // The first arm of each load is the one that may differ.
            let (first, equal) = (at % RIVALS == 0, truth.ratio == 1.0);
            match answer {
                Answer::Faster if first => {
                    faster += 1;
                    any |= equal;
                }
                Answer::Same if first => {
                    same += 1;
                    any |= truth.ratio > 1.0 + MARGIN;
                }
                Answer::Faster | Answer::Slower => any = true,
                Answer::Same | Answer::None => {}
            }
        }
        wrong += u32::from(any);
    }
    let share = |count: u32, of: u32| f64::from(count) / f64::from(of);
    let loads = runs * LOADS as u32;
    Said { faster: share(faster, loads), same: share(same, loads), wrong: share(wrong, runs) }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Faster,
    Slower,
    Same,
    None,
}

/// The answers of one drawn run, the rivals of a load together.
fn answers(procedure: Procedure, truth: Truth, draw: &mut Draw, seed: u64) -> Vec<Answer> {
    let mut rows = Vec::new();
    let mut controls = Vec::new();
    for _ in 0..LOADS {
        let mut arm = |rate: f64| draw.arm(rate, truth, procedure.boots());
        let (reference, twin, slow) = (arm(1.0), arm(1.0), arm(SLOW));
        let rivals = [arm(truth.ratio), arm(1.0), arm(1.0)];
        let against = |arm: &[f64]| paired(arm, &reference, procedure.boots().1);
        controls.push((against(&twin), against(&slow)));
        rows.extend(rivals.iter().map(|arm| against(arm)));
    }
    if procedure == Procedure::Former {
        let logs: Vec<&[(u32, f64)]> = rows.iter().map(|row| row.logs.as_slice()).collect();
        let adjusted = family::step_down(&logs, seed);
        let decide = |(at, p): (usize, f64)| {
            let floor = former::noise_floor(&controls[at / RIVALS].0);
            match former::decide(&rows[at], p, floor) {
                former::Verdict::Faster => Answer::Faster,
                former::Verdict::Slower => Answer::Slower,
                former::Verdict::Equivalent => Answer::Same,
                former::Verdict::Unresolved => Answer::None,
            }
        };
        return adjusted.into_iter().enumerate().map(decide).collect();
    }
    let members: Vec<Member<'_>> = rows
        .iter()
        .enumerate()
        .map(|(at, paired)| {
            let (twin, slow) = &controls[at / RIVALS];
            let (control, sensitivity) = (Control::of(twin), Sensitivity::of(slow));
            Member { paired, control, sensitivity, same_generator: true, cut: false }
        })
        .collect();
    let decided = decision::family(&members, MARGIN, seed);
    decided
        .into_iter()
        .map(|decided| match decided.decision {
            Decision::Faster => Answer::Faster,
            Decision::Slower => Answer::Slower,
            Decision::NoDifference { .. } => Answer::Same,
            _ => Answer::None,
        })
        .collect()
}

/// A comparison of which only the logarithms of the rates are known, round by round.
fn paired(arm: &[f64], reference: &[f64], each: u32) -> Paired {
    let logs: Vec<(u32, f64)> = (0..).zip(arm.iter().zip(reference).map(|(a, b)| a - b)).collect();
    let plain: Vec<f64> = logs.iter().map(|log| log.1).collect();
    let blocks = super::blocks(&logs, &|round| Some(round / each));
    let means: Vec<f64> = blocks.iter().map(|block| block.1).collect();
    Paired {
        rounds: logs.len(),
        medians: (None, None),
        ratio: super::median(&plain).map(|centre| Ratio::Is(centre.exp())),
        bootstrap: None,
        interval: interval::decide(&means),
        logs,
        blocks,
    }
}

struct Draw(ChaCha8Rng);

impl Draw {
    fn new(seed: u64) -> Draw {
        Draw(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Twelve uniform numbers less six are as good as normal here.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.0.random::<f64>()).sum::<f64>() - 6.0
    }

    /// The logarithms of an arm's rates, boot by boot.
    fn arm(&mut self, rate: f64, truth: Truth, (boots, each): (u32, u32)) -> Vec<f64> {
        let mut list = Vec::new();
        for _ in 0..boots {
            let boot = BOOT.sqrt() * truth.spread * self.normal();
            for _ in 0..each {
                let own = (1.0 - BOOT).sqrt() * truth.spread * self.normal();
                let stalls = truth.stalls && self.0.random_bool(STALLS);
                let left = if stalls { self.0.random_range(0.2f64..0.8).ln() } else { 0.0 };
                list.push(rate.ln() + boot + own + left);
            }
        }
        list
    }
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

    /// Of equal arms at most one run in twenty (and a little for chance) has a claim; what is twice as good is seen; and
    /// the procedure in use is wrong no more often than the one before it.
    #[test]
    fn what_is_said_of_known_runs() {
        let truth = |ratio, spread, stalls| Truth { ratio, spread, stalls };
        let equal = said(Procedure::Twelve, truth(1.0, 0.1, true), RUNS, 7);
        assert!(equal.wrong <= 0.075, "{equal:?}");
        let twice = said(Procedure::Twelve, truth(2.0, 0.1, true), 20, 7);
        assert!(twice.faster > 0.9, "{twice:?}");
        let quiet = said(Procedure::Twelve, truth(1.0, 0.02, false), 20, 7);
        assert!(quiet.same > 0.9, "equal and quiet is no difference: {quiet:?}");
    }
}
