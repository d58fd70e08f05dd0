//! Medians with their 95 % intervals, in words.

use super::analysis::Analysis;
use super::format::{self, rounds};
use crate::sample::{Metric, Stage};

/// A median with its 95 % interval.
pub fn with_ends(
    analysis: &Analysis,
    stage: Stage,
    arm: &str,
    workload: &str,
    metric: Metric,
) -> Option<String> {
    let series = analysis.find(stage, arm, workload, metric)?;
    let median = format::value(series.median?, metric.unit());
    let ends = match series.interval {
        Some((low, high)) => {
            let end = |value| format::number(value, metric.unit());
            format!(" ({} to {})", end(low), end(high))
        }
        None if analysis.only_points() => String::new(),
        None => format!(" ({}, no interval)", rounds(series.values.len())),
    };
    Some(median + &ends)
}
