//! Latency curves: each arm's percentiles, of what the tool saw and, for loads by schedule, of what a client that keeps to
//! the schedule would have seen.

use maud::{Markup, html};

use super::analysis::{Analysis, reference};
use super::html::class;
use super::svg::{AXIS, TICKS, TITLE, WIDTH, labelled, log_ticks, n, spread};
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
/// Ways of drawing a line, so that those of one colour differ.
const DASHES: usize = 4;

/// An arm's percentiles; medians of the rounds, in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
struct Line<'a> {
    label: &'a str,
    class: &'static str,
    /// Which of the lines of its class.
    nth: usize,
    points: Vec<(f64, f64)>,
}

/// The curves of a workload: what they are measured from, and each arm's.
struct Curves<'a> {
    from: &'static str,
    coarse: Option<f64>,
    lines: Vec<Line<'a>>,
}

/// All that a workload has. Arms with a single percentile have no curve.
fn curves<'a>(
    analysis: &Analysis,
    stage: Stage,
    arms: &[&'a Arm],
    workload: &Workload,
) -> Vec<Curves<'a>> {
    let reference = reference(&analysis.run, stage).unwrap_or_default();
    let lines = |metrics: &[(f64, Metric)]| -> Vec<Line<'a>> {
        let mut lines: Vec<Line<'a>> = Vec::new();
        for arm in arms {
            let value = |metric| {
                analysis.median(stage, &arm.name, workload.name, metric).map(|value| value.value)
            };
            let points: Vec<(f64, f64)> = metrics
                .iter()
                .filter_map(|(quantile, metric)| Some((*quantile, value(*metric)?)))
                .filter(|(_, value)| *value > 0.0)
                .collect();
            if points.len() > 1 {
                let class = class(&arm.backend, reference);
                // The reference's twin looks unlike it, though it is the only other of its colour.
                let nth = lines.iter().filter(|line| line.class == class).count();
                lines.push(Line { label: &arm.name, class, nth, points });
            }
        }
        lines
    };
    let due = Curves { from: "from when it was due", coarse: Some(COARSE), lines: lines(&DUE) };
    let own = if due.lines.is_empty() { "" } else { "as fio counts it, from when it was sent" };
    let own = Curves { from: own, coarse: None, lines: lines(&OWN) };
    [due, own].into_iter().filter(|curves| !curves.lines.is_empty()).collect()
}

/// The charts of a workload, on one scale.
pub fn figures(
    analysis: &Analysis,
    stage: Stage,
    arms: &[&Arm],
    workload: &Workload,
) -> Vec<Markup> {
    let all = curves(analysis, stage, arms, workload);
    let values = || all.iter().flat_map(|c| &c.lines).flat_map(|l| &l.points).map(|p| p.1);
    let low = values().fold(f64::INFINITY, f64::min).max(1.0).log10() - 0.08;
    let high = values().fold(1.0, f64::max).log10() + 0.08;
    let figure = |curves: &Curves<'_>| {
        html! {
            figure.latency {
                figcaption {
                    "latency" @if !curves.from.is_empty() { " " b { (curves.from) } }
                    ": percentiles, medians of the rounds; less is better. One is shown only where 100 I/Os lie beyond it"
                    @if curves.coarse.is_some() { ". Grey: under the 1 ms that the log tells apart" }
                }
                (chart(&format!("{}: latency {}", workload.title, curves.from), (low, high), curves))
            }
        }
    };
    all.iter().map(figure).collect()
}

/// Lines over percentiles, each step a tenth of the I/Os; both axes logarithmic.
fn chart(title: &str, (low, high): (f64, f64), curves: &Curves<'_>) -> Markup {
    const LEFT: f64 = 62.0;
    const RIGHT: f64 = 152.0;
    const TOP: f64 = 8.0;
    const ROW: f64 = 15.0;
    const NAMES: [(f64, &str); 4] = [(0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9")];
    let lines = &curves.lines;
    let plot = (ROW * lines.len() as f64).max(170.0);
    let (end, bottom) = (WIDTH - RIGHT, TOP + plot);
    let height = bottom + AXIS;
    let beyond = |quantile: f64| -(1.0 - quantile).log10();
    let last = NAMES
        .iter()
        .filter(|(q, _)| lines.iter().any(|line| line.points.iter().any(|p| p.0 >= *q)))
        .map(|(q, _)| beyond(*q))
        .fold(1.0, f64::max);
    let first = beyond(0.5);
    let x = |quantile: f64| {
        LEFT + 8.0 + (end - LEFT - 16.0) * (beyond(quantile) - first) / (last - first)
    };
    let y = |value: f64| bottom - plot * (value.max(1.0).log10() - low) / (high - low).max(1e-9);
    // A name stands where its line ends, or as near as the others let it.
    let ends: Vec<f64> = lines.iter().map(|l| l.points.last().map_or(bottom, |p| y(p.1))).collect();
    let places = spread(&ends, ROW, TOP + ROW / 2.0, bottom - ROW / 2.0);
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(title) {
            @if let Some(coarse) = curves.coarse.filter(|coarse| coarse.log10() > low) {
                @let top = y(coarse.min(10f64.powf(high)));
                rect class="floor" x=(n(LEFT)) width=(n(end - LEFT)) y=(n(top)) height=(n(bottom - top)) {}
            }
            @for (tick, label) in labelled(log_ticks(low, high), y, ROW) {
                line class="grid" x1=(n(LEFT)) x2=(n(end)) y1=(n(y(tick))) y2=(n(y(tick))) {}
                @if let Some(label) = label { text class="tick" x=(n(LEFT - 6.0)) y=(n(y(tick) + 4.0)) text-anchor="end" { (label) } }
            }
            @for (quantile, name) in NAMES.iter().filter(|(q, _)| beyond(*q) <= last) {
                line class="grid" x1=(n(x(*quantile))) x2=(n(x(*quantile))) y1=(n(TOP)) y2=(n(bottom)) {}
                text class="tick" x=(n(x(*quantile))) y=(n(height - TICKS)) text-anchor="middle" { (name) }
            }
            text class="tick" x=(n((LEFT + end) / 2.0)) y=(n(height - TITLE)) text-anchor="middle" { "percentile; up: time of one I/O, logarithmic" }
            @for (line, place) in lines.iter().zip(&places) {
                @let look = format!("line {} d{}", line.class, line.nth % DASHES);
                @if let Some((quantile, value)) = line.points.last() {
                    path class="leader" d=(format!("M{} {}L{} {}", n(x(*quantile)), n(y(*value)), n(end + 6.0), n(*place))) {}
                }
                @let path: Vec<String> = line.points.iter().map(|(q, v)| format!("{},{}", n(x(*q)), n(y(*v)))).collect();
                polyline class=(look) points=(path.join(" ")) { title { (line.label) } }
                @for (quantile, value) in &line.points {
                    circle class=(format!("mark {}", line.class)) cx=(n(x(*quantile))) cy=(n(y(*value))) r="3.4" {
                        title { (line.label) " " (name(*quantile)) ": " (format::number(*value, Unit::Nanoseconds)) }
                    }
                }
                line class=(look) x1=(n(end + 6.0)) x2=(n(end + 24.0)) y1=(n(*place)) y2=(n(*place)) {}
                text class="label" x=(n(end + 28.0)) y=(n(place + 4.0)) { (line.label) }
            }
        }
    }
}

fn name(quantile: f64) -> String {
    format!("p{}", ((quantile * 1e6).round() / 1e4))
}

/// For `report.md`: the curves as a table, a column for each percentile that some arm has.
pub fn markdown(analysis: &Analysis, stage: Stage, workload: &Workload) -> String {
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
