//! Lines over an axis, drawn by plotters: latency by percentile, and a snapshot's life.

use maud::{Markup, html};
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::names;
use crate::report::analysis::Analysis;
use crate::report::format;
use crate::report::latency::{self, Curves};
use crate::report::svg::{
    self, Area, BAND, Drawn, GRID, Ink, OURS, PEER, REFERENCE, SOFT, TEXT, draw, font,
};
use crate::run::folder::Arm;
use crate::sample::{Stage, Unit};
use crate::workload::Workload;

const WIDTH: u32 = 536;
/// Room for the names at the ends of the lines.
const NAMES: u32 = 188;
/// The least distance of two names.
const ROW: f64 = 15.0;

/// A line to draw.
struct Line {
    label: String,
    ink: Ink,
    /// Which of the lines of its colour.
    nth: usize,
    points: Vec<(f64, f64)>,
}

/// The latency charts of a workload, on one scale.
pub fn latency(
    analysis: &Analysis,
    stage: Stage,
    arms: &[&Arm],
    workload: &dyn Workload,
) -> Vec<Markup> {
    let all = latency::curves(analysis, stage, arms, workload);
    let values = || all.iter().flat_map(|c| &c.lines).flat_map(|l| &l.points).map(|p| p.1);
    let low = values().fold(f64::INFINITY, f64::min).max(1.0).log10() - 0.08;
    let high = values().fold(1.0, f64::max).log10() + 0.08;
    let figure = |curves: &Curves<'_>| {
        let without = arms.iter().filter(|arm| !curves.lines.iter().any(|l| l.label == arm.name));
        let without: Vec<String> = without.map(|arm| names::arm(arm)).collect();
        html! {
            figure.latency {
                figcaption {
                    "Latency" @if !curves.from.is_empty() { ", " (curves.from) }
                    "; medians of the rounds, logarithmic"
                    @if curves.coarse.is_some() { "; grey: finer than fio's log" }
                }
                div.scroll { (percentiles(workload.title(), (low, high), curves)) }
                @if !without.is_empty() { p.small.soft { "No percentile, for want of I/Os: " (without.join(", ")) "." } }
            }
        }
    };
    all.iter().map(figure).collect()
}

/// Percentiles, each step a tenth of the I/Os; both axes logarithmic.
fn percentiles(title: &str, (low, high): (f64, f64), curves: &Curves<'_>) -> Markup {
    const TICKS: [(f64, &str); 4] = [(0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9")];
    let beyond = |quantile: f64| -(1.0 - quantile).log10();
    let last = curves.lines.iter().flat_map(|line| &line.points).map(|p| p.0).fold(0.9, f64::max);
    let ticks: Vec<(f64, &str)> =
        TICKS.iter().filter(|(q, _)| *q <= last).map(|(q, name)| (beyond(*q), *name)).collect();
    let lines: Vec<Line> = curves
        .lines
        .iter()
        .map(|line| Line {
            label: names::named(line.label),
            ink: line.ink,
            nth: line.nth,
            points: line.points.iter().map(|(q, v)| (beyond(*q), v.log10())).collect(),
        })
        .collect();
    let (left, right) = (beyond(0.5) - 0.08, beyond(last) + 0.08);
    let coarse = curves.coarse.map(|coarse| coarse.log10().min(high)).filter(|top| *top > low);
    let height = (ROW * lines.len() as f64 + 52.0).max(220.0) as u32;
    let label = format!("{title}: latency {}", curves.from);
    draw((WIDTH, height), &label, |area| {
        let ys = svg::log_ticks(low, high).into_iter().map(f64::log10).collect();
        let xs = ticks.iter().map(|(at, _)| *at).collect();
        let name = |x: &f64| {
            let near = ticks.iter().find(|(at, _)| (at - x).abs() < 1e-6);
            near.map_or_else(String::new, |(_, name)| (*name).to_owned())
        };
        let time = |y: &f64| format::tick(10f64.powf(*y), Unit::Nanoseconds);
        let x = Scale { from: left, to: right, ticks: xs, label: &name };
        let y = Scale { from: low, to: high, ticks: ys, label: &time };
        plot(area, x, y, coarse, &lines)
    })
}

/// An axis with ticks of one's own. (plotters' `with_key_points` has no labels for numbers that are no whole ones.)
struct Scale<'a> {
    from: f64,
    to: f64,
    ticks: Vec<f64>,
    label: &'a dyn Fn(&f64) -> String,
}

impl Ranged for Scale<'_> {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (start, end): (i32, i32)) -> i32 {
        let share = (value - self.from) / (self.to - self.from).max(1e-12);
        start + (share * f64::from(end - start)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks.clone() }
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.from..self.to
    }
}

impl ValueFormatter<f64> for Scale<'_> {
    fn format_ext(&self, value: &f64) -> String {
        (self.label)(value)
    }
}

/// Lines with their names at their ends. Below `band` nothing can be told apart.
fn plot(area: &Area<'_>, x: Scale<'_>, y: Scale<'_>, band: Option<f64>, lines: &[Line]) -> Drawn {
    let (left, right, bottom) = (x.from, x.to, y.from);
    let mut chart = ChartBuilder::on(area)
        .margin_top(8)
        .margin_right(NAMES)
        .x_label_area_size(26)
        .y_label_area_size(62)
        .build_cartesian_2d(x, y)?;
    if let Some(top) = band {
        let ends = [(left, bottom), (right, top)];
        chart.draw_series([Rectangle::new(ends, BAND.filled())])?;
    }
    chart
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(GRID)
        .label_style(font(11.0, SOFT, HPos::Center))
        .draw()?;
    for line in lines {
        let style = line.ink.stroke_width(2);
        let points = line.points.iter().copied();
        match line.nth % 4 {
            0 => drop(chart.draw_series(LineSeries::new(points, style))?),
            nth => {
                let (dash, gap) = [(8, 3), (3, 3), (12, 5)][nth - 1];
                chart.draw_series(DashedLineSeries::new(points, dash, gap, style))?;
            }
        }
        let dots = line.points.iter().map(|point| Circle::new(*point, 3, line.ink.filled()));
        chart.draw_series(dots)?;
    }
    // A name stands where its line ends, or as near as the others let it.
    let (width, height) = area.dim_in_pixel();
    let end = (width - NAMES) as i32;
    let ends: Vec<(i32, i32)> = lines
        .iter()
        .map(|line| line.points.last().map_or((end, 0), |point| chart.backend_coord(point)))
        .collect();
    let wanted: Vec<f64> = ends.iter().map(|(_, y)| f64::from(*y)).collect();
    let places = svg::spread(&wanted, ROW, 10.0, f64::from(height) - 34.0);
    for ((line, place), from) in lines.iter().zip(places).zip(ends) {
        let y = place.round() as i32;
        let leader = vec![from, (end + 4, y), (end + 16, y)];
        area.draw(&plotters::element::DashedPathElement::new(leader, 1, 3, SOFT))?;
        let style = font(11.5, TEXT, HPos::Left);
        area.draw(&Text::new(line.label.clone(), (end + 20, y), style))?;
    }
    Ok(())
}

/// The life of a stage's snapshots: how fast it writes by the share of its chunks that have been copied.
pub fn life(analysis: &Analysis, stage: Stage) -> Markup {
    let curves: Vec<_> = analysis
        .curves
        .iter()
        .filter(|curve| curve.stage == stage && !curve.arm.contains('#'))
        .collect();
    if curves.is_empty() {
        return html! {};
    }
    let lines: Vec<Line> = curves
        .iter()
        .enumerate()
        .map(|(at, curve)| {
            let ours = curve.arm.starts_with("ringtap");
            let ink = if ours { OURS } else { [PEER, REFERENCE][at % 2] };
            let points = curve.points.iter().map(|point| (point.share, point.rate)).collect();
            Line { label: names::named(&curve.arm), ink, nth: 0, points }
        })
        .collect();
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let largest = points().map(|p| p.interval.map_or(p.rate, |i| i.1)).fold(0.0, f64::max);
    let ticks = svg::linear_ticks(largest);
    let top = ticks.last().copied().unwrap_or(1.0).max(largest);
    let chart = draw((WIDTH, 240), "write rate by the share of chunks that are copied", |area| {
        let share = |x: &f64| format!("{:.0} %", x * 100.0);
        let rate = |y: &f64| format::tick(*y, Unit::BytesPerSecond);
        let xs = vec![0.0, 0.25, 0.5, 0.75, 1.0];
        let x = Scale { from: -0.02, to: 1.02, ticks: xs, label: &share };
        let y = Scale { from: 0.0, to: top, ticks, label: &rate };
        plot(area, x, y, None, &lines)
    });
    html! {
        figure.life {
            figcaption {
                b { "The life of a snapshot: " }
                "write rate by the share of chunks already copied; the last point is a second pass"
            }
            div.scroll { (chart) }
        }
    }
}
