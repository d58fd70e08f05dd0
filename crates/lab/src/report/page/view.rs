//! What the page draws from: ways × loads as plain values, so that how it looks and how it was decided change apart.

use std::collections::BTreeMap;

use super::names;
use crate::report::analysis::{Analysis, reference};
use crate::report::ranking::{self, Group};
use crate::report::row::Row;
use crate::report::svg::{self, Ink};
use crate::report::{format, steady};
use crate::run::folder::Arm;
use crate::sample::{Metric, Stage, Value};
use crate::stats::decision::{Decision, Sensitivity, Why};
use crate::workload::Workload;

/// A stage: its ways against its loads.
pub struct View<'a> {
    /// Where.
    pub stage: Stage,
    /// What all others are compared with, as a reader calls it.
    pub against: String,
    /// The loads: those that most ways were tried with first, and last those that nothing was compared in.
    pub loads: Vec<Load>,
    /// How many of them have a comparison.
    pub compared: usize,
    /// The ways, the reference first.
    pub ways: Vec<Way<'a>>,
    /// What the bars of CPU time are of, where there are any.
    pub cost: Option<(&'static dyn Workload, Per)>,
}

/// What a cost is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Per {
    /// One I/O, in microseconds of CPU time.
    Io,
    /// A GiB, in seconds of CPU time.
    Gib,
}

/// A load with the metric that is read off it.
pub struct Load {
    /// The workload.
    pub workload: &'static dyn Workload,
    /// The metric.
    pub metric: Metric,
    /// What a reader calls it.
    pub title: String,
    /// Between the reference and its twin.
    pub band: Option<(f64, f64)>,
    /// Whether the twin showed that the reference is not even equal to itself.
    pub failed: bool,
    /// Whether the way that is slower on purpose was not seen to be.
    pub blind: bool,
    /// Whether any comparison in it was named before the run.
    pub named: bool,
}

/// A way of serving a disk.
pub struct Way<'a> {
    /// Its arm.
    pub arm: &'a Arm,
    /// What a reader calls it.
    pub label: String,
    /// Its colour.
    pub ink: Ink,
    /// Whether its flushes reach the disk; none where they were not counted.
    pub flushes: Option<(bool, f64)>,
    /// Whether it may be ranked.
    pub group: Group,
    /// Its cell of each load.
    pub cells: Vec<Option<Cell>>,
    /// Its CPU time by part, for the view's cost.
    pub cost: Option<Cost>,
}

/// A way beside the reference in one load.
pub struct Cell {
    /// The median.
    pub median: Option<Value>,
    /// Times as good as the reference.
    pub ratio: Option<f64>,
    /// `≥ ` or `≤ ` where that is a bound.
    pub bound: &'static str,
    /// The interval that decides.
    pub interval: Option<(f64, f64)>,
    /// What may be said.
    pub word: Word,
    /// Whether the comparison was not named before the run.
    pub exploratory: bool,
    /// Whether its median stands for rounds that moved.
    pub unsteady: bool,
    /// The share of what was asked for that the device saw, where that is so little that a cache was measured.
    pub from_cache: Option<f64>,
}

/// A decision as the page shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct Word {
    /// Its class: `faster`, `slower`, `same`, `open` or `none`.
    pub class: &'static str,
    /// Its sign.
    pub mark: &'static str,
    /// In words.
    pub text: String,
}

/// CPU time: server, client or guest, kernel threads.
pub struct Cost {
    /// The parts, with their classes.
    pub parts: Vec<(&'static str, f64)>,
}

impl Cost {
    /// All of it.
    pub fn sum(&self) -> f64 {
        self.parts.iter().map(|part| part.1).sum()
    }
}

/// A row's decision as the page shows it.
pub fn word(row: &Row) -> Word {
    let (class, mark) = match row.decision {
        Decision::Faster => ("faster", "▲"),
        Decision::Slower => ("slower", "▼"),
        Decision::NoDifference { .. } => ("same", "="),
        Decision::Open { .. } | Decision::Withheld { why: Why::Unproven } => ("open", "?"),
        Decision::Withheld { why: Why::ControlFailed | Why::Blind } => ("none", "⊘"),
        Decision::Withheld { why: Why::OtherGenerator } => ("none", "≠"),
        Decision::Withheld { .. } | Decision::Exploratory => ("none", ""),
    };
    Word { class, mark, text: format::verdict(row) }
}

/// Every stage that has a comparison or a number of its own.
pub fn views(analysis: &Analysis) -> Vec<View<'_>> {
    let all = analysis.stages().into_iter();
    all.filter_map(|(stage, arms)| view(analysis, stage, &arms)).collect()
}

fn view<'a>(analysis: &'a Analysis, stage: Stage, arms: &[&'a Arm]) -> Option<View<'a>> {
    let name = reference(&analysis.run, stage)?;
    let mut loads: Vec<Load> = analysis
        .headlines(stage)
        .into_iter()
        .filter(|(workload, metric)| {
            // Bounds cannot be compared, and how evenly two loads share is no question of which way is better.
            !workload.is_check()
                && *metric != Metric::Jain
                && (exact(analysis, arms, *workload, *metric) > 1 || arms.len() == 1)
        })
        .map(|(workload, metric)| {
            let named = |row: &&Row| {
                row.stage == stage && row.workload == workload.name() && row.metric == metric
            };
            let floor = analysis.floor(stage, workload.name(), metric);
            Load {
                workload,
                metric,
                title: names::load(workload, metric),
                band: floor.map(|floor| floor.twin),
                failed: floor.is_some_and(|floor| !floor.holds),
                blind: floor.is_some_and(|floor| floor.sensitivity == Sensitivity::Blind),
                named: analysis.rows.iter().filter(named).any(|row| row.question.is_some()),
            }
        })
        .collect();
    if loads.is_empty() {
        return None;
    }
    let compares = |load: &Load| {
        let row = |row: &&Row| {
            row.stage == stage && row.workload == load.workload.name() && row.metric == load.metric
        };
        analysis.rows.iter().filter(row).any(|row| row.against == name && row.ratio.is_some())
    };
    let compared = loads.iter().filter(|load| compares(load)).count();
    loads.sort_by_cached_key(|load| {
        let has = |arm: &&&Arm| {
            analysis.find(stage, &arm.name, load.workload.name(), load.metric).is_some()
        };
        (!compares(load), std::cmp::Reverse(arms.iter().filter(has).count()))
    });
    let cost = dearest(analysis, stage, arms);
    let ways = arms.iter().filter(|arm| !ranking::is_twin(arm)).map(|arm| Way {
        arm,
        label: names::arm(arm),
        ink: svg::ink(&arm.backend, name),
        flushes: ranking::check(analysis, arm).map(|check| (check.durable, check.flushes)),
        group: ranking::group(analysis, arm),
        cells: loads.iter().map(|load| cell(analysis, arm, name, load)).collect(),
        cost: cost.and_then(|(workload, per)| parts(analysis, arm, workload, per)),
    });
    let ways = ways.filter(|way| way.cells.iter().any(Option::is_some)).collect();
    let against = names::way(name).to_owned();
    Some(View { stage, against, loads, compared, ways, cost })
}

/// The medians of a load that are no bounds.
fn exact(analysis: &Analysis, arms: &[&Arm], workload: &dyn Workload, metric: Metric) -> usize {
    let median = |arm: &&&Arm| analysis.median(arm.stage, &arm.name, workload.name(), metric);
    arms.iter().filter(|arm| median(arm).is_some_and(|value| !value.at_least)).count()
}

fn cell(analysis: &Analysis, arm: &Arm, reference: &str, load: &Load) -> Option<Cell> {
    let Load { workload, metric, .. } = load;
    let median = analysis.median(arm.stage, &arm.name, workload.name(), *metric);
    let row = analysis.row(arm.stage, &arm.name, reference, workload.name(), *metric);
    let failure = analysis.failure(arm.stage, &arm.name, workload.name());
    if median.is_none() && failure.is_none() {
        return None;
    }
    let word = match (row, median) {
        (_, None) => Word { class: "failed", mark: "✗", text: "failed".into() },
        (Some(row), _) => word(row),
        (None, _) => Word { class: "none", mark: "", text: String::new() },
    };
    Some(Cell {
        median,
        ratio: row.and_then(|row| row.ratio),
        bound: match row.and_then(|row| row.bound) {
            Some(">=") => "≥ ",
            Some(_) => "≤ ",
            None => "",
        },
        interval: row.and_then(|row| row.interval).map(|i| (i.low, i.high)),
        word,
        exploratory: row.is_some_and(|row| row.question.is_none()),
        unsteady: steady::is_unsteady(
            &analysis.steadiness,
            arm.stage,
            &arm.name,
            workload.name(),
            *metric,
        ),
        from_cache: ranking::from_cache(analysis, arm, *workload),
    })
}

const BY_IO: [(&str, Metric); 3] =
    [("server", Metric::ServerCpu), ("client", Metric::ClientCpu), ("kernel", Metric::KernelCpu)];
const BY_GIB: [(&str, Metric); 3] = [
    ("server", Metric::ServerCpuGib),
    ("client", Metric::ClientCpuGib),
    ("kernel", Metric::KernelCpuGib),
];

/// The load of which most ways have their CPU time, small I/Os before large ones.
fn dearest(
    analysis: &Analysis,
    stage: Stage,
    arms: &[&Arm],
) -> Option<(&'static dyn Workload, Per)> {
    let mut counts: BTreeMap<usize, (&'static dyn Workload, Per)> = BTreeMap::new();
    for (workload, _) in analysis.headlines(stage).into_iter().rev() {
        for per in [Per::Gib, Per::Io] {
            let has = |arm: &&&Arm| parts(analysis, arm, workload, per).is_some();
            let count = arms.iter().filter(has).count();
            if count > 0 {
                // Time for an I/O says more of a server than time for a GiB does.
                counts.insert(count * 2 + usize::from(per == Per::Io), (workload, per));
            }
        }
    }
    counts.into_values().next_back()
}

/// The CPU time of an arm in a workload by its parts.
pub fn parts(analysis: &Analysis, arm: &Arm, workload: &dyn Workload, per: Per) -> Option<Cost> {
    let metrics = match per {
        Per::Io => BY_IO,
        Per::Gib => BY_GIB,
    };
    let value = |metric| {
        let median = analysis.median(arm.stage, &arm.name, workload.name(), metric)?;
        Some(median.value)
    };
    let parts: Vec<(&'static str, f64)> =
        metrics.into_iter().filter_map(|(class, metric)| Some((class, value(metric)?))).collect();
    (!parts.is_empty()).then_some(Cost { parts })
}

/// The stage that a reader wants first: a guest, then the host, then several loads at once.
pub fn first<'a, 'b>(views: &'b [View<'a>]) -> Option<&'b View<'a>> {
    views.iter().min_by_key(|view| crate::stage::of(view.stage).words().place)
}
