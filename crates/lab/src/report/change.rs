//! Two runs beside each other: what changed from the first to the second.

use std::fmt::Write;

use serde::Serialize;

use super::across::{self, Unlike};
use super::analysis::{Analysis, Failure};
use super::{format, ranking};
use crate::run::folder::{Arm, State};
use crate::sample::{Better, Metric, Stage, Value};
use crate::stats::decision::{Sensitivity, Why};
use crate::stats::{self, FEWEST_ROUNDS, decision, family, interval};
use crate::workload;

/// Nearer than this is called the same.
const SAME: f64 = 0.05;
/// Notes of one workload that are told.
const MOST_NOTES: usize = 3;

/// One arm before and after.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Which workload.
    pub workload: String,
    /// By which metric.
    pub metric: Metric,
    /// Median before.
    pub before: Value,
    /// Median after.
    pub after: Value,
    /// Rounds of each that count, those of one boot as one.
    pub rounds: (usize, usize),
    /// The arm by whose value of the same round each value was divided, so that a faster machine is no change: the first of
    /// the stage that both runs have and that is not Ringtap's. None for that arm itself, which is as measured, and for all
    /// where there is none.
    pub by: Option<String>,
    /// Times as good as before (Hodges–Lehmann); above 1 is better.
    pub ratio: Option<f64>,
    /// Exact 95 % interval of `ratio`, by rank sums; from six rounds on in both runs.
    pub interval: Option<(f64, f64)>,
    /// p-value adjusted for the whole table (step-down, whole rounds dealt anew). None where nothing is said.
    pub p: Option<f64>,
    /// The larger noise floor of the two runs, as a share.
    pub floor: Option<f64>,
    /// Better, worse, the same, or why nothing can be said.
    pub verdict: String,
}

impl Change {
    /// Whether it is beyond chance, the whole table counted, and beyond the noise floor. How large it is, is not asked.
    pub fn is_shown(&self) -> bool {
        let edge = self.floor.unwrap_or(0.0).max(0.0).ln_1p();
        let outside = self.interval.is_some_and(|(low, high)| low > 1.0 || high < 1.0);
        outside
            && self.p.is_some_and(|p| p <= decision::ALPHA)
            && self.ratio.is_some_and(|ratio| ratio.ln().abs() > edge)
    }
}

/// What only one of the runs has.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Only {
    /// Which has it: "before" or "after".
    pub has: &'static str,
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Which workloads.
    pub workloads: Vec<String>,
    /// Why the other has it not.
    pub why: String,
}

/// All that can be said of two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// What they do not have in common.
    pub unlike: Vec<Unlike>,
    /// What both measured, in the order of the second.
    pub changes: Vec<Change>,
    /// What only one of them measured.
    pub only: Vec<Only>,
    /// Samples of the later run that failed.
    pub failed: Vec<Failure>,
    /// The later run's state, where it did not come to its end.
    pub partial: Option<String>,
}

/// "better" and "worse" as verdicts.
pub const BETTER: &str = "better";
/// See [`BETTER`].
pub const WORSE: &str = "worse";

/// Compares the headline metrics of two runs.
pub fn compare(before: &Analysis, after: &Analysis) -> Comparison {
    let mut unlike = across::conditions(&before.run, &after.run);
    unlike.extend(across::versions(&before.run, &after.run));
    let bonnie = across::versions_of_bonnie(&before.samples, &after.samples);
    unlike.extend(bonnie.clone());
    unlike.extend(notes(before, after));

    let mut changes = Vec::new();
    let mut rounds: Vec<(family::Rounds, family::Rounds)> = Vec::new();
    for (stage, arm, workload, metric) in headlines(after) {
        let pair = (
            before.median(stage, arm, workload, metric),
            after.median(stage, arm, workload, metric),
        );
        let (Some(was), Some(is)) = pair else { continue };
        let (mut change, logs) = change(before, after, (stage, arm, workload, metric), (was, is));
        let has_columns = workload::find(workload).is_some_and(|workload| workload.has_columns());
        match &bonnie {
            Some(Unlike { before, after, .. }) if has_columns => {
                (change.ratio, change.interval) = (None, None);
                change.verdict = format!("not compared: bonnie++ {before} and {after}");
                rounds.push(Default::default());
            }
            _ => {
                if change.interval.is_some() {
                    change.verdict = withheld(before, after, (stage, workload, metric));
                }
                let is_said = change.interval.is_some() && change.verdict.is_empty();
                rounds.push(if is_said { logs } else { Default::default() });
            }
        }
        changes.push(change);
    }
    let seed = before.run.plan.seed ^ after.run.plan.seed;
    for (change, p) in changes.iter_mut().zip(family::step_down_between(&rounds, seed)) {
        change.p = change.interval.filter(|_| change.verdict.is_empty()).map(|_| p);
        if change.verdict.is_empty() {
            let blind = [before, after].iter().any(|run| is_blind(run, change));
            change.verdict = decide(change, blind).into();
        }
    }
    Comparison {
        unlike,
        changes,
        only: only(before, after),
        failed: after.failures.clone(),
        partial: (after.run.state != State::Complete).then(|| super::words::state_in_words(after)),
    }
}

/// Why nothing is said of a load however many rounds there are: without an A/A control that held in both runs, nobody knows
/// how far its numbers lie apart by themselves. Empty where both held.
fn withheld(
    before: &Analysis,
    after: &Analysis,
    (stage, workload, metric): (Stage, &str, Metric),
) -> String {
    let runs = [("earlier", before), ("later", after)].into_iter();
    let why = |(name, run): (&str, &Analysis)| match run.floor(stage, workload, metric) {
        Some(floor) if floor.holds => None,
        Some(_) => Some(format!("withheld: the A/A control of the {name} run failed")),
        None => Some(format!("withheld: the {name} run has no A/A control")),
    };
    runs.filter_map(why).next().unwrap_or_default()
}

/// Whether the arm that is known to be slower was not seen to be in a change's load.
fn is_blind(run: &Analysis, change: &Change) -> bool {
    let floor = run.floor(change.stage, &change.workload, change.metric);
    floor.is_some_and(|floor| floor.sensitivity == Sensitivity::Blind)
}

fn decide(change: &Change, blind: bool) -> &'static str {
    let Some((low, high)) = change.interval.filter(|_| change.p.is_some()) else {
        return "points only";
    };
    let claim = change.is_shown();
    if low > 1.0 / (1.0 + SAME) && high < 1.0 + SAME {
        if blind {
            return format::why(Why::Blind);
        }
        "the same within 5 %"
    } else if claim && low > 1.0 {
        BETTER
    } else if claim && high < 1.0 {
        WORSE
    } else {
        "not resolved"
    }
}

type Of<'a> = (Stage, &'a str, &'a str, Metric);

/// What has a headline metric, twins left out.
fn headlines(analysis: &Analysis) -> impl Iterator<Item = Of<'_>> {
    analysis.series.iter().filter(|series| !series.arm.contains('#')).filter_map(|series| {
        let workload = workload::find(&series.workload)?;
        workload.headline().contains(&series.metric).then_some((
            series.stage,
            series.arm.as_str(),
            series.workload.as_str(),
            series.metric,
        ))
    })
}

/// The change without its verdict, unless that is known already, and the logarithms by round.
fn change(
    before: &Analysis,
    after: &Analysis,
    of: Of<'_>,
    (was, is): (Value, Value),
) -> (Change, (family::Rounds, family::Rounds)) {
    let (stage, arm, workload, metric) = of;
    let rounds =
        |run: &Analysis| run.find(stage, arm, workload, metric).map_or(0, |s| s.values.len());
    let mut change = Change {
        stage,
        arm: arm.into(),
        workload: workload.into(),
        metric,
        before: was,
        after: is,
        rounds: (rounds(before), rounds(after)),
        by: None,
        ratio: None,
        interval: None,
        p: None,
        floor: [before, after]
            .iter()
            .filter_map(|run| run.floor(stage, workload, metric))
            .map(|floor| floor.floor)
            .reduce(f64::max),
        verdict: String::new(),
    };
    let has = |run: &Analysis, name: &str| run.find(stage, name, workload, metric).is_some();
    // Ringtap is what is judged: taken by itself it would never be worse.
    let arms = after.run.arms.iter().filter(|arm| arm.stage == stage && !is_ringtap(arm));
    let mut arms = arms.map(|arm| &arm.name);
    let base = arms.find(|name| !name.contains('#') && has(before, name) && has(after, name));
    change.by = base.filter(|name| *name != arm).cloned();
    let logs = |run: &Analysis| logs(run, of, change.by.as_deref());
    let (Some(old), Some(new)) = (logs(before), logs(after)) else {
        change.verdict = "bounds in some rounds".into();
        return (change, Default::default());
    };
    change.rounds = (old.len(), new.len());
    let plain = |rounds: &family::Rounds| rounds.iter().map(|(_, log)| *log).collect::<Vec<_>>();
    let (one, two) = match metric.better() {
        Better::Higher => (plain(&old), plain(&new)),
        Better::Lower => (plain(&new), plain(&old)),
    };
    // Below six rounds a ratio without an interval.
    let few = old.len().min(new.len()) < FEWEST_ROUNDS;
    match interval::shift(&one, &two).filter(|_| !few) {
        Some((centre, low, high)) => {
            (change.ratio, change.interval) = (Some(centre), Some((low, high)));
        }
        None => change.ratio = interval::centre_of_shift(&one, &two),
    }
    (change, (old, new))
}

/// Whether Ringtap serves an arm's disk, or a part of it.
fn is_ringtap(arm: &Arm) -> bool {
    let name = arm.backend.as_str();
    let ours =
        name.starts_with("ringtap") || name.starts_with("tap-") || name.ends_with("-on-ringtap");
    ours || ranking::is_known_slow(arm)
}

/// Logarithms of an arm's values, each by the value of arm `by` in the same round. None where a value is a bound or no
/// positive number, which leaving out would hide, or where no round has both.
fn logs(analysis: &Analysis, of: Of<'_>, by: Option<&str>) -> Option<family::Rounds> {
    let (stage, arm, workload, metric) = of;
    let ours = analysis.find(stage, arm, workload, metric)?;
    let base = by.and_then(|by| analysis.find(stage, by, workload, metric));
    let mut logs = Vec::new();
    for (round, value) in &ours.values {
        let under = match base {
            None => 1.0.into(),
            Some(base) => match base.values.iter().find(|(of, _)| of == round) {
                Some((_, value)) => *value,
                None => continue,
            },
        };
        if value.at_least || under.at_least || value.value <= 0.0 || under.value <= 0.0 {
            return None;
        }
        logs.push((*round, (value.value / under.value).ln()));
    }
    let block = |round: u32| analysis.blocks.get(&(stage, round)).copied();
    (!logs.is_empty()).then(|| stats::blocks(&logs, &block))
}

fn only(before: &Analysis, after: &Analysis) -> Vec<Only> {
    let mut list: Vec<Only> = Vec::new();
    for (has, run, other) in [("before", before, after), ("after", after, before)] {
        for (stage, arm, workload, metric) in headlines(run) {
            if other.find(stage, arm, workload, metric).is_some() {
                continue;
            }
            let why = why_not(other, stage, arm, workload);
            let same = |only: &&mut Only| {
                (only.has, only.stage, &only.arm, &only.why) == (has, stage, &arm.to_owned(), &why)
            };
            match list.iter_mut().find(same) {
                Some(only) if only.workloads.iter().any(|known| known == workload) => {}
                Some(only) => only.workloads.push(workload.into()),
                None => list.push(Only {
                    has,
                    stage,
                    arm: arm.into(),
                    workloads: vec![workload.into()],
                    why,
                }),
            }
        }
    }
    list
}

/// What the notes of a workload say differently: how much it moved, at which rate it came.
fn notes(before: &Analysis, after: &Analysis) -> Vec<Unlike> {
    let of = |run: &Analysis, at: &(Stage, String)| -> String {
        let notes = run.notes.iter().filter(|(stage, name, _)| (stage, name) == (&at.0, &at.1));
        notes.map(|(.., note)| note.as_str()).take(MOST_NOTES).collect::<Vec<_>>().join("; ")
    };
    let mut places: Vec<(Stage, String)> =
        headlines(after).map(|(stage, _, workload, _)| (stage, workload.into())).collect();
    places.sort();
    places.dedup();
    let both = |unlike: &Unlike| !unlike.before.is_empty() && !unlike.after.is_empty();
    places
        .iter()
        .filter_map(|at| {
            let what = format!("what is noted of {} ({})", at.1, at.0);
            across::unlike(&what, of(before, at), of(after, at)).filter(both)
        })
        .collect()
}

/// Why a run has no number.
fn why_not(run: &Analysis, stage: Stage, arm: &str, workload: &str) -> String {
    let skip = run.run.skipped.iter().find(|skip| {
        skip.stage == stage
            && skip.backend == arm
            && skip.workload.as_deref().is_none_or(|of| of == workload)
    });
    let failed = run.failures.iter().find(|failure| {
        failure.stage == stage
            && failure.arm == arm
            && failure.workloads.iter().any(|of| of == workload)
    });
    match (skip, failed) {
        (Some(skip), _) => format!("could not run: {}", skip.missing.reason),
        (None, Some(failure)) => {
            format!("failed: {}", failure.error.lines().next().unwrap_or_default())
        }
        _ if !run.run.arms.iter().any(|of| of.stage == stage && of.name == arm) => {
            "the backend was not in its plan".into()
        }
        _ if !run.run.plan.workloads.iter().any(|of| of == workload) => {
            "the workload was not in its plan".into()
        }
        _ => "it has no number of it".into(),
    }
}

/// What changed, in sentences: the worse first.
pub fn claims(changes: &[Change]) -> Vec<String> {
    let of = |verdict: &'static str| changes.iter().filter(move |c| c.verdict == verdict);
    of(WORSE).chain(of(BETTER)).map(sentence).collect()
}

fn sentence(change: &Change) -> String {
    let title = workload::find(&change.workload).map_or("", |workload| workload.title());
    let by = match &change.by {
        Some(by) => format!(", each by {by} of its round"),
        None => ", as measured: the others are taken by it, and it shows the machine".into(),
    };
    let unit = change.metric.unit();
    format!(
        "{} {} is {} in {title} ({}): {} times as good as before (95 %: {}; {} and {} rounds{by}); {} before, {} after.",
        change.stage,
        change.arm,
        change.verdict,
        change.metric.title(),
        change.ratio.map_or_else(String::new, format::digits),
        format::interval(change.interval),
        change.rounds.0,
        change.rounds.1,
        format::value(change.before, unit),
        format::value(change.after, unit),
    )
}

/// How many of each verdict.
pub fn sum(changes: &[Change]) -> String {
    let count = |verdict: &str| changes.iter().filter(|c| c.verdict == verdict).count();
    let (better, worse) = (count(BETTER), count(WORSE));
    let same = changes.iter().filter(|c| c.verdict.starts_with("the same")).count();
    let unsaid = changes.len() - better - worse - same;
    format!(
        "Of {} comparisons: {better} better, {worse} worse, {same} the same within 5 %; of {unsaid} nothing can be said.",
        changes.len()
    )
}

/// The changes as a table in Markdown, which reads as plain text too.
pub fn markdown(before: &Analysis, after: &Analysis, comparison: &Comparison) -> String {
    let mut text = String::from("# Before and after\n\n");
    for (name, run) in [("Before", before), ("After", after)] {
        let state = super::words::state_in_words(run);
        let _ = writeln!(text, "{name}: {} ({}; {state}).", run.run.began, run.run.host.kernel);
    }
    let _ = writeln!(text, "\n{}\n", sum(&comparison.changes));
    claims(&comparison.changes).iter().for_each(|claim| text += &format!("- {claim}\n"));
    if !comparison.unlike.is_empty() {
        text += "\nThe two runs are not alike:\n\n| what | before | after |\n|---|---|---|\n";
    }
    for Unlike { what, before, after } in &comparison.unlike {
        let _ = writeln!(text, "| {what} | {before} | {after} |");
    }
    text += "\nEach value is taken by that of the first backend that both runs have and that is not Ringtap's, in the same round, so that a \
             faster machine is no change; that backend itself is as measured, and shows the machine. Where there is none all are as measured.\n\n";
    text += "| stage | workload | metric | backend | by | before | after | times as good | 95 % | p, whole table | rounds | verdict |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n";
    for change in &comparison.changes {
        let unit = change.metric.unit();
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {}, {} | {} |",
            change.stage,
            change.workload,
            change.metric.title(),
            change.arm,
            change.by.as_deref().unwrap_or("as measured"),
            format::value(change.before, unit),
            format::value(change.after, unit),
            change.ratio.map_or_else(|| "–".into(), format::digits),
            format::interval(change.interval),
            change.p.map_or_else(String::new, |p| format!("{p:.3}")),
            change.rounds.0,
            change.rounds.1,
            change.verdict,
        );
    }
    if !comparison.only.is_empty() {
        text += "\nIn one of the runs only:\n\n";
    }
    for Only { has, stage, arm, workloads, why } in &comparison.only {
        let _ =
            writeln!(text, "- {has}: {stage} {arm}, {}; the other: {why}", workloads.join(", "));
    }
    text
}
