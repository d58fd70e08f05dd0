//! Who is best at what, among those that may be ranked together: backends that go to the disk and flush when asked.

use serde::Serialize;

use super::analysis::Analysis;
use super::durability::Durability;
use super::{format, ledger};
use crate::backend::{self, Reach};
use crate::run::folder::Arm;
use crate::sample::{Better, Metric, Stage, Value, twin};
use crate::stats::decision::{Decision, Why};
use crate::workload::Workload;

/// Who may be ranked with whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Goes to the disk and was seen to flush when asked.
    Durable,
    /// Its flushes were not counted: it is never named best.
    Unchecked,
    /// Goes through a page cache: reads may come from memory, writes end there.
    Cached,
    /// Was seen to acknowledge a flush without flushing.
    Lies,
}

/// An arm's group.
pub fn group(analysis: &Analysis, arm: &Arm) -> Group {
    match (check(analysis, arm).map(|check| check.durable), arm.cached) {
        (Some(false), _) => Group::Lies,
        (_, true) => Group::Cached,
        (Some(true), false) => Group::Durable,
        (None, false) => Group::Unchecked,
    }
}

/// What makes the load on an arm. Numbers of different generators are not compared: each has a cost of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Generator {
    /// fio and the other programs on a device or file.
    Device,
    /// fio's engine for NBD.
    Nbd,
    /// `ringtap-lab load`, over vhost-user without a guest.
    Load,
    /// fio's engine for Ceph.
    Rbd,
}

/// What makes the load on an arm. In a guest every disk is a device.
pub fn generator(arm: &Arm) -> Generator {
    let reach = backend::find(arm.stage, &arm.backend).map(|entry| entry.backend.reach());
    match (arm.stage, reach) {
        (_, Some(Reach::Rbd)) => Generator::Rbd,
        (stage, Some(Reach::Nbd)) if stage.is_of_host() => Generator::Nbd,
        (stage, Some(Reach::VhostUser | Reach::Native)) if stage.is_of_host() => Generator::Load,
        _ => Generator::Device,
    }
}

/// An arm's durability check.
pub fn check<'a>(analysis: &'a Analysis, arm: &Arm) -> Option<&'a Durability> {
    let on = |stage: Stage| {
        analysis.durability.iter().find(|check| check.stage == stage && check.arm == arm.backend)
    };
    // Two loads use the servers that one uses.
    on(arm.stage).or_else(|| on(crate::stage::of(arm.stage).of_one()?))
}

/// Whether an arm's number of a workload may be ranked: its group is durable, and the ledger does not show a cache; the arm
/// that is slower on purpose is none to choose.
pub fn is_ranked(analysis: &Analysis, arm: &Arm, workload: &dyn Workload) -> bool {
    group(analysis, arm) == Group::Durable
        && from_cache(analysis, arm, workload).is_none()
        && !is_known_slow(arm)
}

/// Whether an arm is the one that is slower on purpose.
pub fn is_known_slow(arm: &Arm) -> bool {
    backend::known_slow(arm.stage).is_some_and(|(slow, _)| slow == arm.backend)
}

/// The share of what the program asked for that the device saw, where that is so little that a cache was measured.
pub fn from_cache(analysis: &Analysis, arm: &Arm, workload: &dyn Workload) -> Option<f64> {
    let of = |row: &&ledger::Row| {
        row.stage == arm.stage && row.arm == arm.name && row.workload == workload.name()
    };
    // What it reads is in the cache by its nature; what it copied was brought to the disk within its clock.
    if workload.reads_from_cache() {
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
    workload: &dyn Workload,
    metric: Metric,
) -> Option<(&'a Arm, Value)> {
    analysis
        .run
        .arms
        .iter()
        .filter(|arm| arm.stage == stage && !is_twin(arm) && is_ranked(analysis, arm, workload))
        .filter_map(|arm| Some((arm, analysis.median(stage, &arm.name, workload.name(), metric)?)))
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
    workload: &dyn Workload,
    metric: Metric,
    best: Option<Value>,
) -> Option<Cell> {
    let median = analysis.median(arm.stage, &arm.name, workload.name(), metric)?;
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

/// Which way for which load, in words: the answers to the comparisons that were named before the run, and what has none.
pub fn answers(analysis: &Analysis) -> Vec<(Stage, Vec<String>)> {
    analysis
        .stages()
        .into_iter()
        .map(|(stage, _)| {
            let lines = analysis
                .headlines(stage)
                .into_iter()
                .filter(|(workload, _)| !workload.is_check())
                .filter_map(|(workload, metric)| answer(analysis, stage, workload, metric))
                .collect();
            (stage, lines)
        })
        .filter(|(_, lines): &(Stage, Vec<String>)| !lines.is_empty())
        .collect()
}

fn answer(
    analysis: &Analysis,
    stage: Stage,
    workload: &dyn Workload,
    metric: Metric,
) -> Option<String> {
    let rows = analysis.rows.iter().filter(|row| {
        row.question.is_some()
            && row.stage == stage
            && row.workload == workload.name()
            && row.metric == metric
    });
    let (mut parts, mut same, mut open, mut withheld) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::<(Why, Vec<String>)>::new());
    for row in rows {
        let pair = format!("{} and {}", row.arm, row.against);
        match row.decision {
            Decision::Faster | Decision::Slower => parts.push(format!(
                "{} is {} times as good as {} (95 %: {})",
                row.arm,
                format::ratio(row),
                row.against,
                format::decision(row)
            )),
            Decision::NoDifference { margin } => {
                same.push(format!("{pair} (within {} %)", format::digits(margin * 100.0)));
            }
            Decision::Withheld { why } => {
                match withheld.iter_mut().find(|(known, _)| *known == why) {
                    Some((_, pairs)) => pairs.push(pair),
                    None => withheld.push((why, vec![pair])),
                }
            }
            Decision::Open { .. } | Decision::Exploratory => open.push(pair),
        }
    }
    let mut list = |what: &str, pairs: Vec<String>| {
        if !pairs.is_empty() {
            parts.push(format!("{what}: {}", pairs.join(", ")));
        }
    };
    list("no different", same);
    list("not decided", open);
    for (why, pairs) in withheld {
        list(format::why(why), pairs);
    }
    (!parts.is_empty()).then(|| {
        format!("{} ({}): {}.", capital(workload.title()), metric.title(), parts.join("; "))
    })
}

/// A program's name stays as it is.
fn capital(text: &str) -> String {
    if ["dd", "bonnie++", "find", "fio"].iter().any(|name| text.starts_with(name)) {
        return text.to_owned();
    }
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
