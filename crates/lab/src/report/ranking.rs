//! Who is best at what, among those that may be ranked together: backends that go to the disk and flush when asked.

use serde::Serialize;

use super::analysis::{Analysis, Series, reference};
use super::{format, ledger};
use crate::run::folder::Arm;
use crate::sample::{Better, Metric, Sample, Stage, Value, twin};
use crate::stats::{Paired, median, verdict};
use crate::workload::durability::DURABLE;
use crate::workload::{Kind, Workload};

/// Who may be ranked with whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Goes to the disk and, as far as it was checked, flushes when asked.
    Durable,
    /// Goes through a page cache: reads may come from memory, writes end there.
    Cached,
    /// Was seen to acknowledge a flush without flushing.
    Lies,
}

/// What the durability check of an arm showed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Durability {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Flushes that reached the layer below for each fsync.
    pub flushes: f64,
    /// Whether that is enough.
    pub durable: bool,
    /// What was counted, and what the guest was told of its disk's cache.
    pub note: String,
}

/// The checks of all arms that were checked.
pub fn durability(series: &[Series], samples: &[Sample]) -> Vec<Durability> {
    series
        .iter()
        .filter(|s| s.metric == Metric::FlushPerSync)
        .filter_map(|s| {
            let values: Vec<f64> = s.values.iter().map(|(_, value)| value.value).collect();
            let flushes = median(&values)?;
            let durable = flushes >= DURABLE;
            let same = |sample: &&Sample| {
                sample.stage == s.stage && sample.arm == s.arm && sample.workload == s.workload
            };
            let note = samples.iter().find(same).and_then(|sample| sample.note.clone());
            let note = note.unwrap_or_default();
            Some(Durability { stage: s.stage, arm: s.arm.clone(), flushes, durable, note })
        })
        .collect()
}

/// An arm's group.
pub fn group(analysis: &Analysis, arm: &Arm) -> Group {
    let lies = check(analysis, arm).is_some_and(|check| !check.durable);
    match (lies, arm.cached) {
        (true, _) => Group::Lies,
        (false, true) => Group::Cached,
        (false, false) => Group::Durable,
    }
}

/// An arm's durability check.
fn check<'a>(analysis: &'a Analysis, arm: &Arm) -> Option<&'a Durability> {
    let on = |stage: Stage| {
        analysis.durability.iter().find(|check| check.stage == stage && check.arm == arm.backend)
    };
    // Two loads use the servers that one uses.
    on(arm.stage).or_else(|| match arm.stage {
        Stage::TwoGuests => on(Stage::Guest),
        Stage::TwoVms => on(Stage::Vm),
        Stage::Two => on(Stage::Host),
        _ => None,
    })
}

/// Whether an arm's flushes were counted.
pub fn is_checked(analysis: &Analysis, arm: &Arm) -> bool {
    check(analysis, arm).is_some()
}

/// Whether an arm's number of a workload may be ranked: its group is durable, and the ledger does not show a cache.
fn is_ranked(analysis: &Analysis, arm: &Arm, workload: &Workload) -> bool {
    group(analysis, arm) == Group::Durable && from_cache(analysis, arm, workload).is_none()
}

/// The share of what the program asked for that the device saw, where that is so little that a cache was measured.
pub fn from_cache(analysis: &Analysis, arm: &Arm, workload: &Workload) -> Option<f64> {
    let of = |row: &&ledger::Row| {
        row.stage == arm.stage && row.arm == arm.name && row.workload == workload.name
    };
    // What it reads is in the cache by its nature; what it copied was brought to the disk within its clock.
    if workload.kind == (Kind::FileCopy { durable: true }) {
        return None;
    }
    let row = analysis.ledger.iter().find(of)?;
    ledger::reaches_disk(&row.ledger).filter(|share| *share < ledger::CACHE)
}

/// What an arm reached beside the best of those ranked.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// Its median.
    pub median: Value,
    /// Times the best: 1 is the best, 0.5 half as good. None when a bound stands in the way.
    pub share: Option<f64>,
}

/// The best median of a workload's metric among the arms that are ranked.
pub fn best<'a>(
    analysis: &'a Analysis,
    stage: Stage,
    workload: &Workload,
    metric: Metric,
) -> Option<(&'a Arm, Value)> {
    analysis
        .run
        .arms
        .iter()
        .filter(|arm| arm.stage == stage && !is_twin(arm) && is_ranked(analysis, arm, workload))
        .filter_map(|arm| Some((arm, analysis.median(stage, &arm.name, workload.name, metric)?)))
        .filter(|(_, value)| value.value > 0.0)
        .reduce(|a, b| {
            let better = match metric.better() {
                Better::Higher => b.1.value > a.1.value,
                Better::Lower => b.1.value < a.1.value,
            };
            if better { b } else { a }
        })
}

/// An arm's cell of the heat table.
pub fn cell(
    analysis: &Analysis,
    arm: &Arm,
    workload: &Workload,
    metric: Metric,
    best: Option<Value>,
) -> Option<Cell> {
    let median = analysis.median(arm.stage, &arm.name, workload.name, metric)?;
    let share = best.filter(|best| !best.at_least && !median.at_least && median.value > 0.0);
    let share = share.map(|best| match metric.better() {
        Better::Higher => median.value / best.value,
        Better::Lower => best.value / median.value,
    });
    Some(Cell { median, share })
}

/// Whether an arm is a reference's second run.
pub fn is_twin(arm: &Arm) -> bool {
    arm.name == twin(&arm.backend)
}

/// Which backend for which load, in words: the best of those ranked, how far ahead of the reference, and who could not be
/// told apart from it. Nothing under six rounds.
pub fn answers(analysis: &Analysis) -> Vec<(Stage, Vec<String>)> {
    analysis
        .stages()
        .into_iter()
        .map(|(stage, arms)| {
            let lines = analysis
                .headlines(stage)
                .into_iter()
                .filter(|(workload, _)| workload.kind != Kind::Durability)
                .filter_map(|(workload, metric)| answer(analysis, stage, &arms, workload, metric))
                .collect();
            (stage, lines)
        })
        .filter(|(_, lines): &(Stage, Vec<String>)| !lines.is_empty())
        .collect()
}

fn answer(
    analysis: &Analysis,
    stage: Stage,
    arms: &[&Arm],
    workload: &Workload,
    metric: Metric,
) -> Option<String> {
    let (first, value) = best(analysis, stage, workload, metric)?;
    let ours = analysis.find(stage, &first.name, workload.name, metric)?;
    let compared = |arm: &Arm| -> Option<Paired> {
        let theirs = analysis.find(stage, &arm.name, workload.name, metric)?;
        Some(Paired::new(&ours.values, &theirs.values, metric.better(), analysis.run.plan.seed))
    };
    let floor = analysis.floor(stage, workload.name, metric).map_or(0.0, |floor| floor.floor);
    let mut alike = Vec::new();
    let mut ranked = 0;
    let mut next: Option<(&str, f64, (f64, f64))> = None;
    for arm in arms.iter().filter(|arm| arm.name != first.name && !is_twin(arm)) {
        if !is_ranked(analysis, arm, workload) {
            continue;
        }
        let Some(paired) = compared(arm) else { continue };
        let (Some(interval), Some(ratio)) = (paired.interval, paired.ratio) else { continue };
        ranked += 1;
        let ratio = ratio.number();
        if next.is_none_or(|(_, known, _)| ratio < known) {
            next = Some((arm.name.as_str(), ratio, (interval.low, interval.high)));
        }
        // Neither told apart nor, where it is, by more than what counts as equal or the reference differs from itself.
        let equal = interval.high <= 1.0 + verdict::SMALLEST_MARGIN;
        if interval.low <= 1.0 || equal || interval.centre <= 1.0 + floor {
            alike.push(arm.name.as_str());
        }
    }
    // Alone in its field nobody is best.
    if ranked == 0 {
        return None;
    }
    let name = reference(&analysis.run, stage)?;
    let lead = match analysis.row(stage, &first.name, name, workload.name, metric) {
        Some(row) => format!(
            ", {} times as good as {name} (95 %: {}, {} rounds)",
            format::ratio(row),
            format::decision(row),
            row.rounds
        ),
        // The reference itself is the best: then the next one says by how much.
        None => next.map_or_else(String::new, |(next, ratio, ends)| {
            format!(
                ", {} times as good as the next, {next} (95 %: {}, {} rounds)",
                format::digits(ratio),
                format::interval(Some(ends)),
                ours.values.len()
            )
        }),
    };
    let alike = match alike.len() {
        0 => "; all others are behind it".into(),
        n if n == ranked => "; none of the others can be told apart from it".into(),
        _ => format!("; not told apart from it: {}", alike.join(", ")),
    };
    Some(format!(
        "{} ({}): {} at {}{lead}{alike}.",
        capital(workload.title),
        metric.title(),
        first.name,
        format::value(value, metric.unit())
    ))
}

/// A program's name stays as it is.
fn capital(text: &str) -> String {
    if ["dd", "bonnie++", "find", "fio"].iter().any(|name| text.starts_with(name)) {
        return text.to_owned();
    }
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
