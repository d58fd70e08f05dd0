//! bonnie++ column by column: Ringtap beside the best of all, and why the one is not the other.

use serde::Serialize;

use super::analysis::Analysis;
use super::findings::VM;
use super::format;
use super::ranking::{self, Group};
use crate::sample::{Metric, Stage, Value};
use crate::stats::{Paired, Ratio};
use crate::workload::{self, Kind, bonnie};

const OURS: &str = "ringtap-vhost";
const SAME_WIRE: &str = "qsd-vhost";

/// A bonnie++ column: the best backend of all, Ringtap, and why the one is not the other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Column {
    /// Where.
    pub stage: Stage,
    /// Which way bonnie++ ran.
    pub workload: &'static str,
    /// The column.
    pub metric: Metric,
    /// The best backend and its median, cached ones too.
    pub best: Option<(String, Value)>,
    /// Ringtap's median.
    pub ours: Option<Value>,
    /// Ringtap by the best, with its 95 % interval.
    pub ratio: Option<(f64, Option<(f64, f64)>)>,
    /// The answer in words.
    pub words: String,
}

/// bonnie++'s columns on each stage inside a guest, with Ringtap beside the best of all.
pub fn columns(analysis: &Analysis) -> Vec<Column> {
    let mut list = Vec::new();
    for &stage in VM {
        for workload in workload::CATALOGUE.iter().filter(|w| matches!(w.kind, Kind::Bonnie { .. }))
        {
            let ran =
                |metric: &Metric| analysis.find(stage, OURS, workload.name, *metric).is_some();
            if !bonnie::PHASES.iter().any(ran) {
                continue;
            }
            list.extend(
                bonnie::PHASES.iter().map(|&metric| column(analysis, stage, workload.name, metric)),
            );
        }
    }
    list
}

fn column(analysis: &Analysis, stage: Stage, workload: &'static str, metric: Metric) -> Column {
    let best = analysis
        .run
        .arms
        .iter()
        .filter(|arm| arm.stage == stage && !ranking::is_twin(arm))
        .filter_map(|arm| {
            Some((arm.name.clone(), analysis.median(stage, &arm.name, workload, metric)?))
        })
        .reduce(|a, b| if b.1.value > a.1.value { b } else { a });
    let ours = analysis.median(stage, OURS, workload, metric);
    let mut column =
        Column { stage, workload, metric, best, ours, ratio: None, words: String::new() };
    column.words = match (&column.best, column.ours) {
        (None, _) | (_, None) => match metric {
            Metric::PutChar | Metric::GetChar => {
                "not run (-f): since bonnie++ 1.92 it is one system call for each byte and measures the guest's processor".into()
            }
            _ => "not measured".into(),
        },
        (Some((_, best)), Some(ours)) if best.at_least && ours.at_least => {
            // Whose bound is the larger one says nothing.
            column.best = None;
            "bounds on both sides: bonnie++ prints +++++ where a phase takes under half a second".into()
        }
        (Some((name, _)), _) if name == OURS => "Ringtap is the best".into(),
        (Some((name, _)), _) => {
            let name = name.clone();
            match pair_of(analysis, stage, workload, metric, &name) {
                None => format!(
                    "behind: {name} was done in under half a second, so bonnie++ gives a bound; {}",
                    reasons(analysis, stage, workload, metric, &name)
                ),
                Some((ratio, ends)) => {
                    column.ratio = Some((ratio, ends));
                    judge(analysis, stage, workload, metric, &name, ratio, ends)
                }
            }
        }
    };
    column
}

/// Ringtap by another arm: the ratio of medians and its interval.
fn pair_of(
    analysis: &Analysis,
    stage: Stage,
    workload: &str,
    metric: Metric,
    against: &str,
) -> Option<(f64, Option<(f64, f64)>)> {
    let ours = analysis.find(stage, OURS, workload, metric)?;
    let theirs = analysis.find(stage, against, workload, metric)?;
    let paired = Paired::new(&ours.values, &theirs.values, metric.better(), analysis.run.plan.seed);
    let Ratio::Is(ratio) = paired.ratio? else { return None };
    Some((ratio, paired.interval.map(|i| (i.low, i.high))))
}

fn judge(
    analysis: &Analysis,
    stage: Stage,
    workload: &str,
    metric: Metric,
    best: &str,
    ratio: f64,
    ends: Option<(f64, f64)>,
) -> String {
    let Some((_, high)) = ends else {
        return "too few rounds to tell it from the best".into();
    };
    let floor = analysis.floor(stage, workload, metric).map_or(0.0, |floor| floor.floor);
    if high >= 1.0 {
        return "within noise of the best".into();
    }
    if high >= 1.0 - floor {
        return format!(
            "within the noise floor (±{} %) of the best",
            format::digits(floor * 100.0)
        );
    }
    let reasons = reasons(analysis, stage, workload, metric, best);
    format!("{} % behind: {reasons}", format::digits((1.0 - ratio) * 100.0))
}

/// Why Ringtap is behind the best, as far as this run can tell.
fn reasons(
    analysis: &Analysis,
    stage: Stage,
    workload: &str,
    metric: Metric,
    best: &str,
) -> String {
    let mut reasons = Vec::new();
    let arm = analysis.run.arms.iter().find(|arm| arm.stage == stage && arm.name == best);
    match arm.map(|arm| ranking::group(analysis, arm)) {
        Some(Group::Cached) => reasons.push(format!("{best} goes through a page cache")),
        Some(Group::Lies) => reasons.push(format!("{best} does not flush")),
        _ => {}
    }
    match pair_of(analysis, stage, workload, metric, SAME_WIRE) {
        Some((by, Some((low, high)))) if best != SAME_WIRE && high >= 1.0 => reasons.push(format!(
            "the wire: {SAME_WIRE} over the same wire is no faster (Ringtap has {} of it, 95 %: {}–{})",
            format::digits(by),
            format::digits(low),
            format::digits(high)
        )),
        Some((by, Some((low, high)))) => reasons.push(format!(
            "Ringtap itself: it has {} of {SAME_WIRE} over the same wire (95 %: {}–{})",
            format::digits(by),
            format::digits(low),
            format::digits(high)
        )),
        _ => {}
    }
    let ledger = analysis
        .ledger
        .iter()
        .find(|row| row.stage == stage && row.arm == OURS && row.workload == workload);
    if let Some(row) = ledger {
        reasons.push(format!("used up in Ringtap's row: {}", row.limiter));
    }
    if reasons.is_empty() {
        reasons.push("this run does not tell why".into());
    }
    reasons.join("; ")
}
