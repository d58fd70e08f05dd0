//! Latency curves: each arm's percentiles, of what the tool saw and, for loads by schedule, of what a client that keeps to
//! the schedule would have seen.

use super::analysis::{Analysis, reference};
use super::svg::{self, Ink};
use super::{format, ranking};
use crate::run::folder::Arm;
use crate::sample::{Metric, Stage, Unit};
use crate::workload::Workload;

/// Percentiles by the tool's own clock.
const OWN: [(f64, Metric); 4] =
    [(0.5, Metric::P50), (0.9, Metric::P90), (0.99, Metric::P99), (0.999, Metric::P999)];
/// The same from when each request was due.
const DUE: [(f64, Metric); 4] = [
    (0.5, Metric::ScheduleP50),
    (0.9, Metric::ScheduleP90),
    (0.99, Metric::ScheduleP99),
    (0.999, Metric::ScheduleP999),
];
/// fio's log has whole milliseconds: what is due is known no better.
const COARSE: f64 = 1e6;

/// An arm's percentiles; medians of the rounds, in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Line<'a> {
    /// The arm.
    pub label: &'a str,
    /// Its colour.
    pub ink: Ink,
    /// Which of the lines of its colour.
    pub nth: usize,
    /// Quantiles with their times.
    pub points: Vec<(f64, f64)>,
}

/// The curves of a workload: what they are measured from, and each arm's.
pub struct Curves<'a> {
    /// From when times are counted, where there are two ways to do that.
    pub from: &'static str,
    /// Below this the tool's log tells nothing apart.
    pub coarse: Option<f64>,
    /// A line for each arm; a single percentile is a dot.
    pub lines: Vec<Line<'a>>,
}

/// All that a workload has.
pub fn curves<'a>(
    analysis: &Analysis,
    stage: Stage,
    arms: &[&'a Arm],
    workload: &dyn Workload,
) -> Vec<Curves<'a>> {
    let reference = reference(&analysis.run, stage).unwrap_or_default();
    let lines = |metrics: &[(f64, Metric)]| -> Vec<Line<'a>> {
        let mut lines: Vec<Line<'a>> = Vec::new();
        for arm in arms {
            let value = |metric| {
                analysis.median(stage, &arm.name, workload.name(), metric).map(|value| value.value)
            };
            let points: Vec<(f64, f64)> = metrics
                .iter()
                .filter_map(|(quantile, metric)| Some((*quantile, value(*metric)?)))
                .filter(|(_, value)| *value > 0.0)
                .collect();
            if !points.is_empty() {
                let ink = svg::ink(&arm.backend, reference);
                // The reference's twin looks unlike it, though it is the only other of its colour.
                let nth = lines.iter().filter(|line| line.ink == ink).count();
                lines.push(Line { label: &arm.name, ink, nth, points });
            }
        }
        lines
    };
    let due = Curves { from: "from when it was due", coarse: Some(COARSE), lines: lines(&DUE) };
    let own = if due.lines.is_empty() { "" } else { "as fio counts it, from when it was sent" };
    let own = Curves { from: own, coarse: None, lines: lines(&OWN) };
    // Where nobody has more than one percentile there is no curve: the tables have it.
    let is_curve = |curves: &Curves<'_>| curves.lines.iter().any(|line| line.points.len() > 1);
    [due, own].into_iter().filter(is_curve).collect()
}

fn name(quantile: f64) -> String {
    format!("p{}", ((quantile * 1e6).round() / 1e4))
}

/// For `report.md`: the curves as a table, a column for each percentile that some arm has.
pub fn markdown(analysis: &Analysis, stage: Stage, workload: &dyn Workload) -> String {
    let arms: Vec<&Arm> = analysis
        .run
        .arms
        .iter()
        .filter(|arm| arm.stage == stage && !ranking::is_twin(arm))
        .collect();
    let mut text = String::new();
    for curves in curves(analysis, stage, &arms, workload) {
        let has = |quantile: &f64| {
            curves.lines.iter().any(|line| line.points.iter().any(|point| point.0 == *quantile))
        };
        let quantiles: Vec<f64> = OWN.iter().map(|(quantile, _)| *quantile).filter(has).collect();
        let heads: Vec<String> = quantiles.iter().map(|quantile| name(*quantile)).collect();
        let from =
            if curves.from.is_empty() { String::new() } else { format!(", {}", curves.from) };
        text += &format!(
            "Latency{from}; medians of the rounds:\n\n| backend | {} |\n|---|{}\n",
            heads.join(" | "),
            "---|".repeat(heads.len())
        );
        for line in &curves.lines {
            let cell = |quantile: &f64| {
                let known = line.points.iter().find(|point| point.0 == *quantile);
                known.map_or_else(|| "–".into(), |p| format::number(p.1, Unit::Nanoseconds))
            };
            let cells: Vec<String> = quantiles.iter().map(cell).collect();
            text += &format!("| {} | {} |\n", line.label, cells.join(" | "));
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_named_as_people_do() {
        assert_eq!(OWN.map(|(quantile, _)| name(quantile)), ["p50", "p90", "p99", "p99.9"]);
    }
}
