//! Charts as inline SVG. Colours are classes, so that the page's light and dark themes reach them.

use maud::{Markup, html};
use serde::Serialize;

use super::format;
use crate::sample::{Unit, Value};

pub(super) const WIDTH: f64 = 500.0;
const LABEL: f64 = 122.0;
const ROOM: f64 = 74.0;
const ROW: f64 = 26.0;
/// Labels of ticks, and the axis's title below them.
pub(super) const AXIS: f64 = 38.0;
/// From a chart's lower edge to the labels of its ticks, and to the title.
pub(super) const TICKS: f64 = 22.0;
pub(super) const TITLE: f64 = 5.0;

/// What the label of a tick on an axis of time takes.
const TICK_ROOM: f64 = 44.0;

/// A bar: a median with the interval around it and the rounds behind it.
#[derive(Clone, Debug)]
pub struct Bar<'a> {
    /// The arm.
    pub label: &'a str,
    /// The class of its colour.
    pub class: &'static str,
    /// The median.
    pub median: Value,
    /// The interval of the median.
    pub interval: Option<(f64, f64)>,
    /// The value of each round.
    pub rounds: Vec<f64>,
}

/// Horizontal bars from zero; `axis` says what they measure.
pub fn bars(title: &str, axis: &str, unit: Unit, bars: &[Bar<'_>]) -> Markup {
    let ends = bars.iter().flat_map(|bar| bar.rounds.iter().copied().chain([bar.median.value]));
    let largest = ends.fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let ticks = linear_ticks(largest);
    let end = ticks.last().copied().unwrap_or(largest).max(largest);
    let x = |value: f64| LABEL + (WIDTH - LABEL - ROOM) * value / end;
    let height = ROW * bars.len() as f64 + AXIS;
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(title) {
            @for tick in &ticks {
                line class="grid" x1=(n(x(*tick))) x2=(n(x(*tick))) y1="0" y2=(n(height - AXIS)) {}
                text class="tick" x=(n(x(*tick))) y=(n(height - TICKS)) text-anchor="middle" { (tick_label(*tick, unit)) }
            }
            (axis_title(axis, height))
            @for (at, bar) in bars.iter().enumerate() {
                @let top = ROW * at as f64;
                @let middle = top + ROW / 2.0;
                text class="label" x=(n(LABEL - 8.0)) y=(n(middle + 4.0)) text-anchor="end" { (bar.label) }
                rect class=(bar.class) x=(n(LABEL)) y=(n(top + 4.0)) width=(n(x(bar.median.value) - LABEL)) height=(n(ROW - 8.0)) rx="2" {
                    title { (bar.label) ": " (format::value(bar.median, unit)) }
                }
                @if let Some((low, high)) = bar.interval {
                    path class="whisker" d=(format!(
                        "M{0} {2}V{3}M{1} {2}V{3}M{0} {4}H{1}",
                        n(x(low)), n(x(high)), n(middle - 5.0), n(middle + 5.0), n(middle)
                    )) {}
                }
                @for value in &bar.rounds {
                    circle class="dot" cx=(n(x(*value))) cy=(n(middle)) r="2.2" { title { (format::number(*value, unit)) } }
                }
                @let right = bar.rounds.iter().copied().fold(bar.median.value, f64::max);
                text class="value" x=(n(x(right) + 8.0)) y=(n(middle + 4.0)) { (format::value(bar.median, unit)) }
            }
        }
    }
}

/// One of two loads on an arm: its p99 alone and beside the other, in nanoseconds.
#[derive(Clone, Debug)]
pub struct Pair<'a> {
    /// The arm; loads of one follow each other.
    pub arm: &'a str,
    /// Which load.
    pub load: &'static str,
    /// The class of its colour.
    pub class: &'static str,
    /// Alone.
    pub alone: Option<f64>,
    /// Beside the other.
    pub together: Option<f64>,
    /// Its interval.
    pub interval: Option<(f64, f64)>,
    /// The load's share of what both get.
    pub share: Option<f64>,
}

/// From a ring to a dot for each load, on a logarithmic axis of time.
pub fn pairs(title: &str, axis: &str, loads: &[Pair<'_>]) -> Markup {
    const SUB: f64 = 172.0;
    const HALF: f64 = 20.0;
    const HEAD: f64 = 16.0;
    let values = || {
        let of = |load: &Pair<'_>| {
            let ends = load.interval.map_or([None, None], |(low, high)| [Some(low), Some(high)]);
            [load.alone, load.together].into_iter().chain(ends).flatten().collect::<Vec<_>>()
        };
        loads.iter().flat_map(of)
    };
    let low = values().fold(f64::INFINITY, f64::min).clamp(1.0, 1e15).log10() - 0.08;
    let high = values().fold(1.0, f64::max).log10() + 0.08;
    let x = |value: f64| {
        SUB + (WIDTH - SUB - ROOM) * (value.max(1.0).log10() - low) / (high - low).max(1e-9)
    };
    let end = HEAD + HALF * loads.len() as f64;
    let height = end + AXIS;
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(title) {
            text class="tick" x=(n(WIDTH - ROOM + 14.0)) y="11" { "share" }
            @for (tick, label) in labelled(log_ticks(low, high), x, TICK_ROOM) {
                line class="grid" x1=(n(x(tick))) x2=(n(x(tick))) y1=(n(HEAD)) y2=(n(end)) {}
                @if let Some(label) = label { text class="tick" x=(n(x(tick))) y=(n(height - TICKS)) text-anchor="middle" { (label) } }
            }
            text class="tick" x=(n((SUB + WIDTH - ROOM) / 2.0)) y=(n(height - TITLE)) text-anchor="middle" { (axis) }
            @for (at, load) in loads.iter().enumerate() {
                @let middle = HEAD + HALF * (at as f64 + 0.5);
                @if at == 0 || loads[at - 1].arm != load.arm {
                    @if at > 0 { line class="grid" x1="0" x2=(n(WIDTH)) y1=(n(middle - HALF / 2.0)) y2=(n(middle - HALF / 2.0)) {} }
                    text class="label" x=(n(LABEL - 2.0)) y=(n(middle + 4.0)) text-anchor="end" { (load.arm) }
                }
                text class="tick" x=(n(SUB - 8.0)) y=(n(middle + 4.0)) text-anchor="end" { (load.load) }
                @if let (Some(alone), Some(together)) = (load.alone, load.together) {
                    line class=(format!("span {}", load.class)) x1=(n(x(alone))) x2=(n(x(together))) y1=(n(middle)) y2=(n(middle)) {}
                }
                @if let Some((low, high)) = load.interval {
                    path class="whisker" d=(format!(
                        "M{0} {2}V{3}M{1} {2}V{3}M{0} {4}H{1}",
                        n(x(low)), n(x(high)), n(middle - 4.0), n(middle + 4.0), n(middle)
                    )) {}
                }
                @if let Some(alone) = load.alone {
                    circle class=(format!("ring {}", load.class)) cx=(n(x(alone))) cy=(n(middle)) r="4.4" {
                        title { (load.arm) ", " (load.load) ", alone: " (format::number(alone, Unit::Nanoseconds)) }
                    }
                }
                @if let Some(together) = load.together {
                    circle class=(format!("mark {}", load.class)) cx=(n(x(together))) cy=(n(middle)) r="5" {
                        title { (load.arm) ", " (load.load) ", together: " (format::number(together, Unit::Nanoseconds)) }
                    }
                }
                @if load.together.is_none() {
                    text class="tick" x=(n(SUB + 4.0)) y=(n(middle + 4.0)) { "too few I/Os for a p99" }
                }
                @if let Some(share) = load.share {
                    text class="value" x=(n(WIDTH - ROOM + 14.0)) y=(n(middle + 4.0)) { (format::number(share, Unit::Share)) }
                }
            }
        }
    }
}

/// A ratio with its interval.
#[derive(Clone, Debug)]
pub struct Shift<'a> {
    /// The arm.
    pub label: &'a str,
    /// The class of its colour.
    pub class: &'static str,
    /// The ratio.
    pub ratio: f64,
    /// Its interval.
    pub interval: Option<(f64, f64)>,
}

/// Ratios around 1 on a logarithmic axis; `floor` is the share by which equals may differ.
pub fn shifts(title: &str, axis: &str, floor: Option<f64>, arms: &[Shift<'_>]) -> Markup {
    let ends = arms.iter().flat_map(|arm| {
        let (low, high) = arm.interval.unwrap_or((arm.ratio, arm.ratio));
        [arm.ratio.ln().abs(), low.ln().abs(), high.ln().abs()]
    });
    // Both sides alike, and never so near that nothing looks like much.
    let reach = ends.fold(1.25f64.ln(), f64::max) * 1.08;
    let half = (WIDTH - LABEL - ROOM) / 2.0;
    let x = |ratio: f64| LABEL + half + half * (ratio.ln() / reach).clamp(-1.0, 1.0);
    let height = ROW * arms.len() as f64 + AXIS;
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(title) {
            @if let Some(floor) = floor {
                rect class="floor" x=(n(x(1.0 / (1.0 + floor)))) width=(n(x(1.0 + floor) - x(1.0 / (1.0 + floor)))) y="0" height=(n(height - AXIS)) {}
            }
            @for tick in ratio_ticks(reach) {
                line class=(if tick == 1.0 { "grid one" } else { "grid" }) x1=(n(x(tick))) x2=(n(x(tick))) y1="0" y2=(n(height - AXIS)) {}
                text class="tick" x=(n(x(tick))) y=(n(height - TICKS)) text-anchor="middle" { (tick) }
            }
            (axis_title(axis, height))
            @for (at, arm) in arms.iter().enumerate() {
                @let middle = ROW * at as f64 + ROW / 2.0;
                text class="label" x=(n(LABEL - 8.0)) y=(n(middle + 4.0)) text-anchor="end" { (arm.label) }
                @if let Some((low, high)) = arm.interval {
                    path class="whisker" d=(format!(
                        "M{0} {2}V{3}M{1} {2}V{3}M{0} {4}H{1}",
                        n(x(low)), n(x(high)), n(middle - 5.0), n(middle + 5.0), n(middle)
                    )) {}
                }
                circle class=(format!("mark {}", arm.class)) cx=(n(x(arm.ratio))) cy=(n(middle)) r="5" {
                    title { (arm.label) ": " (format::digits(arm.ratio)) " (" (format::interval(arm.interval)) ")" }
                }
                text class="value" x=(n(WIDTH - ROOM + 14.0)) y=(n(middle + 4.0)) { "× " (format::digits(arm.ratio)) }
            }
        }
    }
}

/// 1, and a few round ratios on either side of it.
fn ratio_ticks(reach: f64) -> Vec<f64> {
    let sides: &[&[f64]] = &[
        &[0.9, 1.1],
        &[0.8, 0.9, 1.1, 1.25],
        &[0.5, 0.7, 1.4, 2.0],
        &[0.2, 0.5, 2.0, 5.0],
        &[0.1, 0.3, 3.0, 10.0],
        &[0.01, 0.1, 10.0, 100.0],
    ];
    let fits = |ticks: &&&[f64]| ticks.iter().all(|tick| tick.ln().abs() <= reach);
    let ticks = sides.iter().rev().find(fits).copied().unwrap_or_default();
    [1.0].into_iter().chain(ticks.iter().copied()).collect()
}

/// An arm's cost: parts that add up, in CPU seconds.
#[derive(Clone, Debug)]
pub struct Cost<'a> {
    /// The arm.
    pub label: &'a str,
    /// Server, client: seconds, with the class of the colour.
    pub parts: Vec<(&'static str, f64)>,
}

/// Stacked bars.
pub fn cost(title: &str, axis: &str, arms: &[Cost<'_>]) -> Markup {
    let sum = |arm: &Cost<'_>| arm.parts.iter().map(|part| part.1).sum::<f64>();
    let largest = arms.iter().map(sum).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let ticks = linear_ticks(largest);
    let end = ticks.last().copied().unwrap_or(largest).max(largest);
    let x = |value: f64| LABEL + (WIDTH - LABEL - ROOM) * value / end;
    let height = ROW * arms.len() as f64 + AXIS;
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(title) {
            @for tick in &ticks {
                line class="grid" x1=(n(x(*tick))) x2=(n(x(*tick))) y1="0" y2=(n(height - AXIS)) {}
                text class="tick" x=(n(x(*tick))) y=(n(height - TICKS)) text-anchor="middle" { (tick_label(*tick, Unit::CpuPerMillion)) }
            }
            (axis_title(axis, height))
            @for (at, arm) in arms.iter().enumerate() {
                @let top = ROW * at as f64;
                text class="label" x=(n(LABEL - 8.0)) y=(n(top + ROW / 2.0 + 4.0)) text-anchor="end" { (arm.label) }
                @for (place, (class, value)) in arm.parts.iter().enumerate() {
                    @let before: f64 = arm.parts[..place].iter().map(|part| part.1).sum();
                    rect class=(class) x=(n(x(before))) y=(n(top + 4.0)) width=(n(x(*value) - LABEL)) height=(n(ROW - 8.0)) {
                        title { (arm.label) ": " (format::number(*value, Unit::CpuPerMillion)) }
                    }
                }
                text class="value" x=(n(x(sum(arm)) + 8.0)) y=(n(top + ROW / 2.0 + 4.0)) {
                    (format::number(sum(arm), Unit::CpuPerMillion))
                }
            }
        }
    }
}

/// A point of a curve: a median with its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    /// A share, 0 to 1.
    pub share: f64,
    /// Bytes a second.
    pub rate: f64,
    /// 95 % interval of `rate`, from six rounds on.
    pub interval: Option<(f64, f64)>,
}

/// A line through points.
#[derive(Clone, Debug)]
pub struct Curve<'a> {
    /// The arm.
    pub label: &'a str,
    /// In rising order of share.
    pub points: &'a [Point],
}

/// Lines over a share, from zero.
pub fn curves(title: &str, across: &str, up: &str, curves: &[Curve<'_>]) -> Markup {
    const HEIGHT: f64 = 260.0;
    const LEFT: f64 = 82.0;
    const TOP: f64 = 10.0;
    let tops =
        curves.iter().flat_map(|c| c.points.iter().map(|p| p.interval.map_or(p.rate, |i| i.1)));
    let largest = tops.fold(0.0, f64::max);
    let ticks = linear_ticks(largest.max(f64::MIN_POSITIVE));
    let top = ticks.last().copied().unwrap_or(1.0).max(largest);
    let x = |share: f64| LEFT + (WIDTH - LEFT - 24.0) * share;
    let y = |value: f64| HEIGHT - AXIS - (HEIGHT - AXIS - TOP) * value / top.max(f64::MIN_POSITIVE);
    let height = HEIGHT + 18.0 * curves.len() as f64;
    let middle = (HEIGHT - AXIS + TOP) / 2.0;
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(title) {
            @for tick in &ticks {
                line class="grid" x1=(n(LEFT)) x2=(n(x(1.0))) y1=(n(y(*tick))) y2=(n(y(*tick))) {}
                text class="tick" x=(n(LEFT - 6.0)) y=(n(y(*tick) + 4.0)) text-anchor="end" { (tick_label(*tick, Unit::BytesPerSecond)) }
            }
            @for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
                text class="tick" x=(n(x(share))) y=(n(HEIGHT - TICKS)) text-anchor="middle" { (format!("{:.0} %", share * 100.0)) }
            }
            (axis_title(across, HEIGHT))
            text class="tick" x="12" y=(n(middle)) text-anchor="middle" transform=(format!("rotate(-90 12 {})", n(middle))) { (up) }
            @for (at, curve) in curves.iter().enumerate() {
                @for point in curve.points {
                    @if let Some((low, high)) = point.interval {
                        line class=(format!("line thin c{}", at % 5)) x1=(n(x(point.share))) x2=(n(x(point.share))) y1=(n(y(low))) y2=(n(y(high))) {}
                    }
                }
                @let path: Vec<String> = curve.points.iter().map(|p| format!("{},{}", n(x(p.share)), n(y(p.rate)))).collect();
                polyline class=(format!("line c{}", at % 5)) points=(path.join(" ")) {}
                @for point in curve.points {
                    circle class=(format!("c{}d", at % 5)) cx=(n(x(point.share))) cy=(n(y(point.rate))) r="3" {
                        title { (curve.label) ": " (format::number(point.rate, Unit::BytesPerSecond)) " at " (format!("{:.0} %", point.share * 100.0)) }
                    }
                }
                @let row = HEIGHT + 18.0 * at as f64 + 10.0;
                circle class=(format!("c{}d", at % 5)) cx=(n(LEFT + 4.0)) cy=(n(row - 4.0)) r="4" {}
                text class="label" x=(n(LEFT + 14.0)) y=(n(row)) { (curve.label) }
            }
        }
    }
}

/// What an axis measures, below its ticks.
fn axis_title(words: &str, height: f64) -> Markup {
    html! {
        text class="tick" x=(n((LABEL + WIDTH - ROOM) / 2.0)) y=(n(height - TITLE)) text-anchor="middle" { (words) }
    }
}

/// Zero and up to five round numbers, the last not below `largest`.
fn linear_ticks(largest: f64) -> Vec<f64> {
    let raw = largest / 4.0;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .iter()
        .map(|m| m * power)
        .find(|step| *step >= raw)
        .unwrap_or(10.0 * power);
    (0..=5).map(|i| step * f64::from(i)).take_while(|tick| *tick < largest + step * 0.999).collect()
}

/// Powers of ten between the two exponents, and steps between them where there are few.
pub(super) fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    let within = |steps: &[f64]| -> Vec<f64> {
        (low.floor() as i32..=high.ceil() as i32)
            .flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)))
            .filter(|tick| (low..=high).contains(&tick.log10()))
            .collect()
    };
    let tens = within(&[1.0]);
    if tens.len() >= 4 {
        return tens;
    }
    let some = within(&[1.0, 2.0, 5.0]);
    if some.len() >= 3 { some } else { within(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]) }
}

/// Ticks of a time with their labels, none where it would come nearer than `room` to another. Powers of ten go first.
pub(super) fn labelled(
    ticks: Vec<f64>,
    x: impl Fn(f64) -> f64,
    room: f64,
) -> Vec<(f64, Option<String>)> {
    let is_ten = |tick: &f64| (tick.log10() - tick.log10().round()).abs() < 1e-6;
    let (tens, rest): (Vec<f64>, Vec<f64>) = ticks.iter().partition(|tick| is_ten(tick));
    let mut taken: Vec<f64> = Vec::new();
    for tick in tens.into_iter().chain(rest) {
        if taken.iter().all(|other| (x(tick) - x(*other)).abs() >= room) {
            taken.push(tick);
        }
    }
    let label = |tick: f64| taken.contains(&tick).then(|| tick_label(tick, Unit::Nanoseconds));
    ticks.into_iter().map(|tick| (tick, label(tick))).collect()
}

/// Places at least `room` apart within `from` to `to`, each as near to what it wants as its neighbours let it.
pub(super) fn spread(wanted: &[f64], room: f64, from: f64, to: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|a, b| wanted[*a].total_cmp(&wanted[*b]));
    let mut places = vec![0.0; wanted.len()];
    let mut least = from;
    for &at in &order {
        places[at] = wanted[at].max(least);
        least = places[at] + room;
    }
    let mut most = to;
    for &at in order.iter().rev() {
        places[at] = places[at].min(most);
        most = places[at] - room;
    }
    places
}

fn tick_label(value: f64, unit: Unit) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let text = format::number(value, unit);
    // 2.00 GB/s is 2 GB/s on an axis.
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, name) = text.split_at(end);
    if digits.contains('.') {
        format!("{}{name}", digits.trim_end_matches('0').trim_end_matches('.'))
    } else {
        text
    }
}

pub(super) fn n(value: f64) -> String {
    format!("{value:.1}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_the_end() {
        assert_eq!(linear_ticks(179_000.0), [0.0, 50_000.0, 100_000.0, 150_000.0, 200_000.0]);
        for largest in [1e-9, 0.3, 1.0, 7.3, 999.0, 1e12] {
            let ticks = linear_ticks(largest);
            assert!(*ticks.last().unwrap() >= largest * 0.999, "{largest}: {ticks:?}");
        }
        assert_eq!(log_ticks(1.9, 3.1), [100.0, 200.0, 500.0, 1000.0]);
        assert_eq!(log_ticks(0.82, 1.01), [7.0, 8.0, 9.0, 10.0]);
        assert_eq!(log_ticks(1.0, 5.0), [10.0, 100.0, 1000.0, 10_000.0, 100_000.0]);
    }

    #[test]
    fn labels_of_ticks_do_not_touch() {
        let labels = labelled(vec![5e6, 6e6, 7e6, 9e6], |tick| tick / 5e4, TICK_ROOM);
        let texts: Vec<_> = labels.into_iter().filter_map(|(_, label)| label).collect();
        assert_eq!(texts, ["5 ms", "9 ms"]);
        let labels = labelled(vec![5e4, 1e5, 2e5, 5e5, 1e6, 2e6], |tick| 70.0 * tick.log10(), 44.0);
        let texts: Vec<_> = labels.into_iter().filter_map(|(_, label)| label).collect();
        assert_eq!(texts, ["100 µs", "1 ms"], "rather than 50 and 500 µs");
    }

    #[test]
    fn names_stand_apart_and_near_what_they_belong_to() {
        assert_eq!(spread(&[50.0, 10.0], 15.0, 0.0, 100.0), [50.0, 10.0]);
        assert_eq!(spread(&[50.0, 52.0, 51.0], 15.0, 0.0, 100.0), [50.0, 80.0, 65.0]);
        assert_eq!(spread(&[99.0, 99.0], 15.0, 0.0, 100.0), [85.0, 100.0]);
        assert!(spread(&[], 15.0, 0.0, 1.0).is_empty());
    }

    #[test]
    fn axis_labels_lose_their_zeros() {
        assert_eq!(tick_label(2e9, Unit::BytesPerSecond), "2 GB/s");
        assert_eq!(tick_label(2.5e6, Unit::PerSecond), "2.5 M/s");
        assert_eq!(tick_label(100.0, Unit::PerSecond), "100/s");
    }
}
