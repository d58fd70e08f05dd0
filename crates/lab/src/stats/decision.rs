//! The one place where a comparison gets its answer. Table, findings, columns, ranking, page and JSON print what
//! [`family`] returned, and nothing else looks at an interval to say who is ahead.
//!
//! The comparisons of one question are named before the run and are one family: a difference is claimed by
//! Westfall and Young's step-down over whole blocks (boots where there are guests, else rounds) at 5 % for the family, "no
//! difference" by two one-sided tests (TOST) with Holm's correction at 5 % for the family. Both are exact.

use serde::Serialize;

use super::spread::deviation;
use super::{FEWEST_ROUNDS, Paired, family as flips, interval};

/// Chance of a false difference anywhere in a family; and that of a false "no difference".
pub const ALPHA: f64 = 0.05;
/// Fewest rounds for an answer.
pub const ROUNDS: usize = 12;
/// Fewest blocks (boots) for an answer: below it no distribution-free interval of 95 % exists.
pub const BLOCKS: usize = FEWEST_ROUNDS;
/// More blocks than this nobody runs: the answer is then "not by repeating".
const MOST_BLOCKS: usize = 500;
/// The level at which an A/A control must hold 1.
const CONTROL: f64 = 0.99;

/// The answer to one comparison.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "decision")]
pub enum Decision {
    /// Better than the other, beyond chance and beyond what two equal arms differ by.
    Faster,
    /// Worse than the other, beyond chance and beyond what two equal arms differ by.
    Slower,
    /// Nearer than the margin that the plan names, on a load that shows 20 % when it is there.
    NoDifference {
        /// The margin, as a share.
        margin: f64,
    },
    /// More than one answer is possible.
    Open {
        /// About how many more rounds would settle it, if the spread stays; `None` when repeating will not.
        more: Option<usize>,
    },
    /// There is no answer, whatever the numbers are.
    Withheld {
        /// Why.
        why: Why,
    },
    /// It was not named before the run: its interval stands by itself, and nothing is claimed.
    Exploratory,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    /// Fewer than [`ROUNDS`] rounds or [`BLOCKS`] boots.
    TooFew,
    /// The run says that it is whole, and samples of some rounds are not there: which they were nobody knows.
    RoundsMissing,
    /// Some values are bounds (bonnie++'s `+++++`).
    Bound,
    /// Two runs of the same arm differ by more than chance: the machine was not fit for this load.
    ControlFailed,
    /// The load has no A/A control.
    NoControl,
    /// The arm that is known to be slower was not seen to be: a difference could not have been seen either.
    Blind,
    /// No difference was seen, and no arm known to be slower, driven by the same load generator, was there to show that one
    /// could have been.
    Unproven,
    /// The two are driven by different load generators.
    OtherGenerator,
}

impl Decision {
    /// Whether it says faster, slower or no difference.
    pub fn is_answer(self) -> bool {
        matches!(self, Decision::Faster | Decision::Slower | Decision::NoDifference { .. })
    }

    /// Whether it says faster or slower.
    pub fn is_difference(self) -> bool {
        matches!(self, Decision::Faster | Decision::Slower)
    }

    /// Whether the load cannot show what it is asked about.
    pub fn is_blind(self) -> bool {
        self == Decision::Withheld { why: Why::Blind }
    }
}

/// What the A/A twin of a load showed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Control {
    /// The noise floor, as a share: the end of the twin's 95 % interval that is further from 1. No claim is smaller.
    pub floor: f64,
    /// Whether the twin's 99 % interval holds 1, as it must.
    pub holds: bool,
}

impl Control {
    /// From the twin's comparison with its original; `None` below six blocks or where values are bounds.
    pub fn of(twin: &Paired) -> Option<Control> {
        let interval = twin.interval?;
        let floor = interval.low.ln().abs().max(interval.high.ln().abs()).exp_m1();
        // Fewer than eight blocks have no interval of 99 %; their rounds have, and vary no more than chance allows.
        let logs = if interval::ends(&twin.block_logs(), CONTROL).is_some() {
            twin.block_logs()
        } else {
            twin.logs.iter().map(|log| log.1).collect()
        };
        let holds =
            interval::ends(&logs, CONTROL).is_none_or(|(low, high)| low <= 1.0 && high >= 1.0);
        Some(Control { floor, holds })
    }
}

/// Whether a load shows what is known to be slower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sensitivity {
    /// The slower arm was seen to be slower.
    Seen,
    /// It was not.
    Blind,
    /// There was none.
    Untried,
}

impl Sensitivity {
    /// From the comparison of the known-slow arm with the same arm as it is.
    pub fn of(slow: &Paired) -> Sensitivity {
        if slow.interval.is_none() {
            return Sensitivity::Untried;
        }
        let turned: Vec<f64> = slow.block_logs().iter().map(|log| -log).collect();
        if interval::above(&turned, 0.0) <= ALPHA { Sensitivity::Seen } else { Sensitivity::Blind }
    }
}

/// A comparison of a family, with what its load's controls showed.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// The numbers.
    pub paired: &'a Paired,
    /// What the A/A twin showed; `None` without one.
    pub control: Option<Control>,
    /// Whether the load shows a slower arm.
    pub sensitivity: Sensitivity,
    /// Whether one load generator drives both.
    pub same_generator: bool,
    /// Whether rounds of it are missing of a run that says that it is whole.
    pub cut: bool,
}

/// An answer with what it rests on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decided {
    /// The answer.
    pub decision: Decision,
    /// p-value of "equal", adjusted for the family.
    pub p: f64,
    /// p-value of "further apart than the margin", adjusted for the family.
    pub same_p: f64,
}

/// Decides the comparisons of one question. `margin` is the plan's: two arms nearer than this are called equal.
pub fn family(members: &[Member<'_>], margin: f64, seed: u64) -> Vec<Decided> {
    let blocks: Vec<Vec<(u32, f64)>> = members
        .iter()
        .map(|m| if withheld(m).is_none() { m.paired.blocks.clone() } else { Vec::new() })
        .collect();
    let rows: Vec<&[(u32, f64)]> = blocks.iter().map(Vec::as_slice).collect();
    let apart = flips::step_down(&rows, seed);
    // Of those that are asked at all, so that a load that failed costs the others nothing.
    let asked: Vec<usize> = (0..members.len()).filter(|&at| !rows[at].is_empty()).collect();
    let near: Vec<f64> =
        asked.iter().map(|&at| nearer(&members[at].paired.block_logs(), margin)).collect();
    let holm = flips::holm(&near);
    let mut same = vec![1.0; members.len()];
    asked.iter().zip(holm).for_each(|(&at, p)| same[at] = p);
    members
        .iter()
        .zip(apart.into_iter().zip(same))
        .map(|(member, (p, same_p))| Decided {
            decision: decide(member, p, same_p, margin, asked.len()),
            p,
            same_p,
        })
        .collect()
}

/// p-value of two one-sided tests: that the ratio is at least the margin away from 1.
fn nearer(logs: &[f64], margin: f64) -> f64 {
    let edge = margin.ln_1p();
    let turned: Vec<f64> = logs.iter().map(|log| -log).collect();
    interval::above(logs, -edge).max(interval::above(&turned, -edge))
}

fn withheld(member: &Member<'_>) -> Option<Why> {
    let paired = member.paired;
    if !member.same_generator {
        return Some(Why::OtherGenerator);
    }
    if member.cut {
        return Some(Why::RoundsMissing);
    }
    if paired.logs.is_empty() && paired.rounds > 0 {
        return Some(Why::Bound);
    }
    if paired.rounds < ROUNDS || paired.blocks.len() < BLOCKS {
        return Some(Why::TooFew);
    }
    match member.control {
        None => Some(Why::NoControl),
        Some(control) if !control.holds => Some(Why::ControlFailed),
        Some(_) => None,
    }
}

fn decide(member: &Member<'_>, p: f64, same_p: f64, margin: f64, family: usize) -> Decision {
    if let Some(why) = withheld(member) {
        return Decision::Withheld { why };
    }
    let (Some(interval), Some(control)) = (member.paired.interval, member.control) else {
        return Decision::Withheld { why: Why::TooFew };
    };
    let floor = control.floor;
    // Where two equal arms lie further apart than the margin, nothing is shown to be nearer.
    if same_p <= ALPHA && floor <= margin {
        return match member.sensitivity {
            Sensitivity::Seen => Decision::NoDifference { margin },
            Sensitivity::Blind => Decision::Withheld { why: Why::Blind },
            Sensitivity::Untried => Decision::Withheld { why: Why::Unproven },
        };
    }
    let (low, high, centre) = (interval.low.ln(), interval.high.ln(), interval.centre.ln());
    if p <= ALPHA && centre.abs() > floor.ln_1p() {
        if low > 0.0 {
            return Decision::Faster;
        }
        if high < 0.0 {
            return Decision::Slower;
        }
    }
    if member.sensitivity == Sensitivity::Blind {
        return Decision::Withheld { why: Why::Blind };
    }
    Decision::Open { more: more_rounds(member.paired, centre, margin, floor, family) }
}

/// Rounds that are missing until the interval of a row of a family of so many, shrinking with the root of the blocks,
/// either leaves 1 (a claim) or lies within the margin.
fn more_rounds(
    paired: &Paired,
    centre: f64,
    margin: f64,
    floor: f64,
    family: usize,
) -> Option<usize> {
    let blocks = paired.blocks.len();
    let spread = deviation(&paired.blocks);
    let (size, edge) = (centre.abs(), margin.ln_1p());
    // To be shown different, by a claim that the floor allows; or to be shown equal.
    let different = if size > floor.ln_1p() { size } else { 0.0 };
    let equal = if floor <= margin { edge - size } else { 0.0 };
    let target = different.max(equal);
    if target <= 0.0 {
        return None;
    }
    let reach = quantile(ALPHA / 2.0 / family.max(1) as f64);
    let each = paired.rounds.div_ceil(blocks.max(1));
    // One more block is the least that can change anything; few blocks have wider tails than a normal spread.
    (blocks + 1..=MOST_BLOCKS)
        .find(|&m| (reach + 2.4 / (m - 1) as f64) * spread / (m as f64).sqrt() < target)
        .map(|m| (m - blocks) * each)
}

/// The number of standard deviations beyond which a normal value lies with the chance `tail`, by bisection.
fn quantile(tail: f64) -> f64 {
    let (mut low, mut high) = (0.0f64, 10.0f64);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if upper_tail(middle) > tail { low = middle } else { high = middle }
    }
    low
}

/// P(Z > z) for z ≥ 0, by Simpson's rule; the rest beyond 12 is nothing.
fn upper_tail(z: f64) -> f64 {
    let (steps, density) = (400, |x: f64| (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt());
    let width = (12.0 - z) / f64::from(steps);
    let sum: f64 = (0..=steps)
        .map(|at| {
            let weight = match at {
                0 => 1.0,
                at if at == steps => 1.0,
                at if at % 2 == 1 => 4.0,
                _ => 2.0,
            };
            weight * density(z + width * f64::from(at))
        })
        .sum();
    sum * width / 3.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Better, Value};

    /// Rounds in boots of two.
    fn paired(ratios: &[f64]) -> Paired {
        let list = |f: &dyn Fn(f64) -> f64| -> Vec<(u32, Value)> {
            (0..).zip(ratios.iter().map(|r| Value::from(f(*r)))).collect()
        };
        Paired::new(&list(&|r| 100.0 * r), &list(&|_| 100.0), Better::Higher, 1, &|_| None)
    }

    fn around(centre: f64, spread: f64) -> Paired {
        let steps = [-1.0, 0.6, -0.4, 1.0, 0.1, -0.7, 0.5, -0.1, 0.8, -0.6, 0.3, -0.5];
        paired(&steps.map(|step| centre * (1.0 + spread * step)))
    }

    fn one(paired: &Paired, floor: f64, sensitivity: Sensitivity) -> Decision {
        let control = Some(Control { floor, holds: true });
        let member = Member { paired, control, sensitivity, same_generator: true, cut: false };
        family(&[member], 0.05, 1)[0].decision
    }

    #[test]
    fn the_four_answers() {
        let seen = Sensitivity::Seen;
        assert_eq!(one(&around(1.5, 0.02), 0.02, seen), Decision::Faster);
        assert_eq!(one(&around(0.5, 0.02), 0.02, seen), Decision::Slower);
        assert_eq!(one(&around(1.0, 0.01), 0.02, seen), Decision::NoDifference { margin: 0.05 });
        let open = one(&around(1.05, 0.3), 0.02, seen);
        assert!(matches!(open, Decision::Open { more: Some(more) } if more > 6), "{open:?}");
    }

    #[test]
    fn no_claim_is_smaller_than_what_two_equal_arms_differ_by() {
        let little = around(1.1, 0.01);
        assert_eq!(one(&little, 0.03, Sensitivity::Seen), Decision::Faster);
        assert_eq!(one(&little, 0.2, Sensitivity::Seen), Decision::Open { more: None });
        let equal = around(1.0, 0.01);
        assert_eq!(one(&equal, 0.2, Sensitivity::Seen), Decision::Open { more: None });
    }

    #[test]
    fn no_difference_is_said_only_where_one_could_be_seen() {
        let equal = around(1.0, 0.01);
        let why = |sensitivity| one(&equal, 0.02, sensitivity);
        assert_eq!(why(Sensitivity::Blind), Decision::Withheld { why: Why::Blind });
        assert_eq!(why(Sensitivity::Untried), Decision::Withheld { why: Why::Unproven });
        // What is seen is seen.
        assert_eq!(one(&around(1.5, 0.02), 0.02, Sensitivity::Blind), Decision::Faster);
        assert!(one(&around(1.05, 0.3), 0.02, Sensitivity::Blind).is_blind());
    }

    #[test]
    fn a_failed_control_vetoes_its_load() {
        let (fast, apart) = (around(1.5, 0.02), around(1.2, 0.02));
        let control = Control::of(&apart).unwrap();
        assert!(!control.holds && control.floor > 0.19, "{control:?}");
        let member = |control| Member {
            paired: &fast,
            control,
            sensitivity: Sensitivity::Seen,
            same_generator: true,
            cut: false,
        };
        let decided = family(&[member(Some(control)), member(None)], 0.05, 1);
        assert_eq!(decided[0].decision, Decision::Withheld { why: Why::ControlFailed });
        assert_eq!(decided[1].decision, Decision::Withheld { why: Why::NoControl });
        assert!(Control::of(&around(1.0, 0.05)).unwrap().holds);
    }

    #[test]
    fn the_floor_is_the_far_end_of_the_twin() {
        let twin = around(1.02, 0.05);
        let (floor, ends) = (Control::of(&twin).unwrap().floor, twin.interval.unwrap());
        assert!(ends.high - 1.0 > 1.0 - ends.low);
        assert!((floor - (ends.high - 1.0)).abs() < 1e-12);
    }

    #[test]
    fn few_rounds_bounds_and_other_generators_have_no_answer() {
        let few = paired(&[2.0; 11]);
        let member = |paired, same_generator| Member {
            paired,
            control: Some(Control { floor: 0.01, holds: true }),
            sensitivity: Sensitivity::Seen,
            same_generator,
            cut: false,
        };
        let fast = around(2.0, 0.02);
        let decided = family(&[member(&few, true), member(&fast, false)], 0.05, 1);
        assert_eq!(decided[0].decision, Decision::Withheld { why: Why::TooFew });
        assert_eq!(decided[1].decision, Decision::Withheld { why: Why::OtherGenerator });
        // Twelve rounds of four boots are four.
        let values: Vec<(u32, Value)> = (0..12).map(|n| (n, Value::from(2.0))).collect();
        let ones: Vec<(u32, Value)> = (0..12).map(|n| (n, Value::from(1.0))).collect();
        let boots = Paired::new(&values, &ones, Better::Higher, 1, &|round| Some(round / 3));
        assert_eq!(
            family(&[member(&boots, true)], 0.05, 1)[0].decision,
            Decision::Withheld { why: Why::TooFew }
        );
    }

    #[test]
    fn a_larger_family_asks_for_more_rounds() {
        let row = around(1.1, 0.4);
        let member = Member {
            paired: &row,
            control: Some(Control { floor: 0.01, holds: true }),
            sensitivity: Sensitivity::Seen,
            same_generator: true,
            cut: false,
        };
        let more = |members: &[Member<'_>]| match family(members, 0.05, 1)[0].decision {
            Decision::Open { more: Some(more) } => more,
            other => panic!("{other:?}"),
        };
        assert!(more(&[member; 12]) > more(&[member]));
    }

    #[test]
    fn normal_quantiles() {
        for (tail, z) in [(0.025, 1.95996), (0.005, 2.57583), (0.05 / 24.0, 2.86531)] {
            assert!((quantile(tail) - z).abs() < 1e-4, "{tail}: {}", quantile(tail));
        }
    }
}
