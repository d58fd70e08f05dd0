//! bonnie++ column by column: Ringtap beside the best of all, and why the one is not the other.

use super::analysis::Analysis;
use super::claims::VM;
use super::column::Column;
use super::format;
use super::ranking::{self, Group};
use super::row::Row;
use crate::sample::{Metric, Stage};
use crate::stats::Decision;
use crate::workload::{self, bonnie};

const OURS: &str = "ringtap-vhost";
const SAME_WIRE: &str = "qsd-vhost";

/// bonnie++'s columns on each stage inside a guest, with Ringtap beside the best of all.
pub fn columns(analysis: &Analysis) -> Vec<Column> {
    let mut list = Vec::new();
    for &stage in VM {
        for workload in workload::all().filter(|w| w.has_columns()) {
            let ran =
                |metric: &Metric| analysis.find(stage, OURS, workload.name(), *metric).is_some();
            if !bonnie::PHASES.iter().any(ran) {
                continue;
            }
            list.extend(
                bonnie::PHASES
                    .iter()
                    .map(|&metric| column(analysis, stage, workload.name(), metric)),
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
            match analysis.answer(stage, OURS, &name, workload, metric) {
                Some(row) if row.bound.is_none() => {
                    column.ratio = row.ratio.map(|ratio| (ratio, row.interval.map(|i| (i.low, i.high))));
                    judge(analysis, &row)
                }
                _ => format!(
                    "behind: {name} was done in under half a second, so bonnie++ gives a bound; {}",
                    reasons(analysis, stage, workload, metric, &name)
                ),
            }
        }
    };
    column
}

/// The answer to Ringtap beside the best, in words; where the pair was not named before the run, only what was measured.
fn judge(analysis: &Analysis, row: &Row) -> String {
    let behind = row.ratio.map_or_else(String::new, |ratio| {
        format!("{} % behind", format::digits((1.0 - ratio) * 100.0))
    });
    let reasons = || reasons(analysis, row.stage, &row.workload, row.metric, &row.against);
    match row.decision {
        Decision::Slower => format!("{behind}: {}", reasons()),
        Decision::Exploratory => {
            format!("{behind}, exploratory (the best was found by looking): {}", reasons())
        }
        _ => format::verdict(row),
    }
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
    if let Some(row) = analysis.answer(stage, OURS, SAME_WIRE, workload, metric) {
        let by = format!("{}, 95 %: {}", format::ratio(&row), format::decision(&row));
        match row.decision {
            Decision::Slower => {
                reasons.push(format!("Ringtap itself: {by} of {SAME_WIRE} over the same transport"))
            }
            Decision::Faster | Decision::NoDifference { .. } if best != SAME_WIRE => reasons.push(
                format!("the transport: Ringtap has {by} of {SAME_WIRE} over the same transport"),
            ),
            _ => {}
        }
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
