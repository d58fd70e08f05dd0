//! Two runs and more: merged into one of more rounds, or set beside each other as before and after.

use std::fmt::Write;
use std::path::Path;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use super::analysis::{Analysis, reference};
use super::format;
use crate::error::{Error, Result};
use crate::run::folder::{self, Record, State};
use crate::sample::{Better, Metric, Sample, Stage};
use crate::stats::{FEWEST_ROUNDS, family, median, verdict};
use crate::workload;

/// Resamples and permutations.
const DRAWS: usize = 5000;

/// Puts runs of the same plan on the same machine together: rounds are counted on.
pub fn merge(runs: &[&Path]) -> Result<(Record, Vec<Sample>)> {
    let mut whole: Option<(Record, Vec<Sample>)> = None;
    for path in runs {
        let (record, samples) = folder::read(path)?;
        let Some((sum, all)) = &mut whole else {
            whole = Some((record, samples));
            continue;
        };
        if let Some(what) = difference(sum, &record) {
            return Err(Error::Plan(format!(
                "{} cannot be merged with {}: {what} differs; `ringtap report --before` sets two runs side by side",
                path.display(),
                runs.first().map_or(Path::new(""), |first| first).display()
            )));
        }
        let before = sum.plan.rounds;
        all.extend(samples.into_iter().map(|s| Sample { round: s.round + before, ..s }));
        sum.plan.rounds += record.plan.rounds;
        sum.ended = record.ended;
        if record.state != State::Complete {
            sum.state = record.state;
        }
        sum.troubles.extend(record.troubles);
    }
    whole.ok_or_else(|| Error::Plan("no run was named".into()))
}

/// What makes two runs unlike, in words.
fn difference(one: &Record, two: &Record) -> Option<&'static str> {
    let names = |r: &Record| r.arms.iter().map(|a| (a.stage, a.name.clone())).collect::<Vec<_>>();
    let (a, b) = (&one.plan, &two.plan);
    [
        ("the size of the disks", a.size == b.size),
        ("the measured time", a.seconds == b.seconds && a.ramp == b.ramp),
        ("the set of workloads", a.workloads == b.workloads),
        ("the set of backends that ran", names(one) == names(two)),
        ("the kernel", one.host.kernel == two.host.kernel),
        ("the processor", one.host.cpu == two.host.cpu && one.host.cpus == two.host.cpus),
        ("the file system of the disks", one.host.file_system == two.host.file_system),
        ("the version of a program", one.host.versions == two.host.versions),
    ]
    .into_iter()
    .find_map(|(what, same)| (!same).then_some(what))
}

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
    pub before: f64,
    /// Median after.
    pub after: f64,
    /// Times as good as before; above 1 is better. Each round's value is taken by its stage's reference in that round, so
    /// that a faster machine is no change; the reference itself is as it was measured.
    pub ratio: f64,
    /// 95 % bootstrap interval of `ratio`; from six rounds on in both runs.
    pub interval: Option<(f64, f64)>,
    /// p-value by permutation, adjusted for the whole table by Holm.
    pub p: Option<f64>,
    /// better, worse, or nothing that can be said.
    pub verdict: &'static str,
}

/// Compares the headline metrics that both runs have.
pub fn changes(before: &Analysis, after: &Analysis) -> Vec<Change> {
    let mut list = Vec::new();
    let mut random = ChaCha8Rng::seed_from_u64(before.run.plan.seed ^ after.run.plan.seed);
    for series in &after.series {
        let headline = workload::find(&series.workload)
            .is_some_and(|workload| workload.headline.contains(&series.metric));
        if !headline || series.arm.contains('#') {
            continue;
        }
        let find = |analysis: &Analysis| {
            logs(analysis, series.stage, &series.arm, &series.workload, series.metric)
        };
        let (Some(old), Some(new)) = (find(before), find(after)) else { continue };
        let middle = |analysis: &Analysis| {
            analysis
                .median(series.stage, &series.arm, &series.workload, series.metric)
                .map(|value| value.value)
        };
        let (Some(was), Some(is)) = (middle(before), middle(after)) else { continue };
        let sign = if series.metric.better() == Better::Higher { 1.0 } else { -1.0 };
        let centre = |logs: &[f64]| median(logs).unwrap_or(0.0);
        let ratio = (sign * (centre(&new) - centre(&old))).exp();
        let enough = old.len() >= FEWEST_ROUNDS && new.len() >= FEWEST_ROUNDS;
        let interval = enough.then(|| bootstrap(&old, &new, sign, &mut random));
        let p = enough.then(|| permutation(&old, &new, &mut random));
        list.push(Change {
            stage: series.stage,
            arm: series.arm.clone(),
            workload: series.workload.clone(),
            metric: series.metric,
            before: was,
            after: is,
            ratio,
            interval,
            p,
            verdict: "",
        });
    }
    let with: Vec<usize> = (0..list.len()).filter(|&at| list[at].p.is_some()).collect();
    let plain: Vec<f64> = with.iter().filter_map(|&at| list[at].p).collect();
    for (&at, adjusted) in with.iter().zip(family::holm(&plain)) {
        let change = &mut list[at];
        change.p = Some(adjusted);
        let floor = [before, after]
            .iter()
            .filter_map(|run| run.floor(change.stage, &change.workload, change.metric))
            .map(|floor| floor.floor)
            .fold(0.0, f64::max);
        let claim = adjusted <= verdict::ALPHA && change.ratio.ln().abs() > floor.ln_1p();
        change.verdict = match change.interval {
            Some((low, _)) if claim && low > 1.0 => "better",
            Some((_, high)) if claim && high < 1.0 => "worse",
            Some((low, high)) if low > 1.0 / 1.05 && high < 1.05 => "the same within 5 %",
            _ => "not resolved",
        };
    }
    list
}

/// Logarithms of an arm's values, each by its reference's value of the round.
fn logs(
    analysis: &Analysis,
    stage: Stage,
    arm: &str,
    workload: &str,
    metric: Metric,
) -> Option<Vec<f64>> {
    let ours = analysis.find(stage, arm, workload, metric)?;
    let name = reference(&analysis.run, stage)?;
    let base = (name != arm).then(|| analysis.find(stage, name, workload, metric)).flatten();
    let logs: Vec<f64> = ours
        .values
        .iter()
        .filter(|(_, value)| !value.at_least && value.value > 0.0)
        .filter_map(|(round, value)| match base {
            None => Some(value.value.ln()),
            Some(base) => {
                let (_, base) = base.values.iter().find(|(of, _)| of == round)?;
                (!base.at_least && base.value > 0.0).then(|| (value.value / base.value).ln())
            }
        })
        .collect();
    (!logs.is_empty()).then_some(logs)
}

fn bootstrap(old: &[f64], new: &[f64], sign: f64, random: &mut ChaCha8Rng) -> (f64, f64) {
    let mut draw = |logs: &[f64]| {
        let picked: Vec<f64> =
            logs.iter().map(|_| logs[random.random_range(0..logs.len())]).collect();
        median(&picked).unwrap_or(0.0)
    };
    let mut ratios: Vec<f64> = (0..DRAWS).map(|_| sign * (draw(new) - draw(old))).collect();
    ratios.sort_by(f64::total_cmp);
    let at = |share: f64| ratios[((DRAWS - 1) as f64 * share) as usize].exp();
    (at(0.025), at(0.975))
}

/// How often a difference of the means at least as large comes when the labels "before" and "after" are dealt anew.
fn permutation(old: &[f64], new: &[f64], random: &mut ChaCha8Rng) -> f64 {
    let mut all: Vec<f64> = old.iter().chain(new).copied().collect();
    let split = old.len();
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let seen = (mean(new) - mean(old)).abs();
    let mut as_far = 1;
    for _ in 0..DRAWS {
        for at in (1..all.len()).rev() {
            all.swap(at, random.random_range(0..=at));
        }
        let (a, b) = all.split_at(split);
        as_far += usize::from((mean(b) - mean(a)).abs() >= seen - 1e-12);
    }
    as_far as f64 / (DRAWS + 1) as f64
}

/// The changes as a table in Markdown, which reads as plain text too.
pub fn markdown(before: &Analysis, after: &Analysis, changes: &[Change]) -> String {
    let mut text = String::from("# Before and after\n\n");
    let _ = writeln!(
        text,
        "Before: {} ({}). After: {} ({}).\n",
        before.run.began, before.run.host.kernel, after.run.began, after.run.host.kernel
    );
    if let Some(what) = difference(&before.run, &after.run) {
        let _ = writeln!(text, "The two runs are not alike: {what} differs.\n");
    }
    text += "Each backend is taken by its stage's reference in the same round, so that a faster machine is no change; the \
             reference itself is as measured, and shows the machine.\n\n";
    text += "| stage | workload | metric | backend | before | after | times as good | 95 % | p (Holm) | verdict |\n|---|---|---|---|---|---|---|---|---|---|\n";
    for change in changes {
        let unit = change.metric.unit();
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            change.stage,
            change.workload,
            change.metric.title(),
            change.arm,
            format::number(change.before, unit),
            format::number(change.after, unit),
            format::digits(change.ratio),
            format::interval(change.interval),
            change.p.map_or_else(String::new, |p| format!("{p:.3}")),
            if change.interval.is_none() { "points only" } else { change.verdict },
        );
    }
    text
}
