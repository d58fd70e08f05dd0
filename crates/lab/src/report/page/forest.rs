//! The forest: a row for each way, a column for each load, a ratio with its interval in each cell.

use maud::{Markup, html};

use super::marks::{self, Axis, Ratio};
use super::view::{Cell, Cost, Load, Per, View, Way};
use crate::report::format;
use crate::report::ranking::Group;

/// Loads `from` to `to` of a view; with the CPU time if `cost`. Of more ways than `most`, those that were measured with more of the loads.
pub fn table(view: &View<'_>, from: usize, to: usize, cost: bool, most: usize) -> Markup {
    let loads = &view.loads[from..to];
    let axes: Vec<Axis> = (from..to).map(|at| axis(view, at)).collect();
    let cost = view.cost.filter(|_| cost);
    let dearest = view.ways.iter().filter_map(|way| way.cost.as_ref()).map(Cost::sum);
    let dearest = dearest.fold(f64::MIN_POSITIVE, f64::max);
    let cells = |way: &Way<'_>| way.cells[from..to].iter().flatten().count();
    let ways: Vec<&Way<'_>> = view.ways.iter().filter(|way| cells(way) > 0).collect();
    let mut counts: Vec<usize> = ways.iter().map(|way| cells(way)).collect();
    counts.sort_unstable_by(|one, other| other.cmp(one));
    let least = counts.get(most).filter(|next| **next < counts[0]).map_or(0, |next| next + 1);
    let few = ways.iter().filter(|way| cells(way) < least).count();
    html! {
        div.scroll { table.forest {
            thead { tr {
                th scope="col" { "Times as fast as " (view.against) ": " span.soft { "right of the line is better" } }
                th.flush scope="col" title="Do flushes reach the disk when a program calls fsync?" { "fsync" }
                @for (load, axis) in loads.iter().zip(&axes) { th.plot scope="col" { (head(load, view.loads.iter().any(|load| load.named))) (axis.head()) } }
                @if let Some((workload, per)) = cost {
                    th.cost scope="col" {
                        "CPU per " @match per { Per::Io => "I/O", Per::Gib => "GiB" } ", " (super::names::load(workload, workload.headline()[0]))
                        span.keys { span.key.server {} "server " span.key.client {} "client " span.key.kernel {} "kernel" }
                    }
                }
            } }
            tbody { @for way in ways.iter().copied().filter(|way| cells(way) >= least) { tr {
                th.way scope="row" title=(format!("{}: {}", way.arm.name, way.arm.title)) {
                    (way.label) @if way.group == Group::Cached { span.badge title="goes through a page cache: not ranked with those that go to the disk" { "page cache" } }
                }
                (flush(way))
                @for ((at, load), axis) in (from..to).zip(loads).zip(&axes) {
                    @match &way.cells[at] {
                        Some(cell) => (self::cell(view, way, load, cell, *axis)),
                        None => td.plot.none title="not run with this load" {},
                    }
                }
                @if let Some((_, per)) = cost { td.cost { @if let Some(cost) = &way.cost { (bar(cost, dearest, per)) } } }
            } } }
        } }
        @if few > 0 { p.soft.small { (few) " more ways, measured with fewer of these loads, stand in the cards below." } }
    }
}

/// One axis for all of a load's ratios.
fn axis(view: &View<'_>, at: usize) -> Axis {
    let cells = view.ways.iter().filter_map(|way| way.cells[at].as_ref());
    let ends = cells.flat_map(|cell| {
        let (low, high) = cell.interval.or(cell.ratio.map(|r| (r, r))).unwrap_or((1.0, 1.0));
        [low, high, cell.ratio.unwrap_or(1.0)]
    });
    Axis::around(marks::RATIO, ends)
}

/// `some`: other loads were named before the run.
fn head(load: &Load, some: bool) -> Markup {
    html! {
        span title=(format!("{}, {}", load.workload.name(), load.metric.title())) { (load.title) }
        @if load.failed { " " strong.bad title="the same way measured twice differs from itself" { "control failed" } }
        @else if load.blind { " " strong.bad title="Ringtap with 20 % more time in the server was not told from Ringtap as it is: that no difference was seen says nothing; one that was seen still holds" { "blind here" } }
        @else if some && !load.named { " " span.soft title="no comparison in it was named before the run" { "(exploratory)" } }
    }
}

/// A tick where flushes reach the disk, a cross where they do not.
fn flush(way: &Way<'_>) -> Markup {
    let (class, sign, said) = match way.flushes {
        Some((true, count)) => (
            "good",
            "✓",
            format!("flushes reach the disk: {} for each fsync", format::digits(count)),
        ),
        Some((false, count)) => (
            "bad",
            "✗",
            format!(
                "flushes do not reach the disk: {} for each fsync; never ranked",
                format::digits(count)
            ),
        ),
        None => ("soft", "–", "flushes were not counted".into()),
    };
    html! { td.flush title=(said) { span class=(class) role="img" aria-label=(said) { (sign) } } }
}

/// A cell in words.
fn said(way: &Way<'_>, load: &Load, cell: &Cell) -> String {
    let mut text = format!("{}, {}", way.label, load.title);
    if let Some(median) = cell.median {
        text += &format!(": {}", format::value(median, load.metric.unit()));
    }
    if let Some(ratio) = cell.ratio {
        text += &format!(", {}{} times as good", cell.bound, format::digits(ratio));
    }
    if cell.interval.is_some() {
        text += &format!(" (95 %: {})", format::interval(cell.interval));
    }
    if !cell.word.text.is_empty() {
        text += &format!("; {}", cell.word.text);
    }
    if let Some(share) = cell.from_cache {
        text +=
            &format!("; a cache: the device saw {} % of the bytes", format::digits(share * 100.0));
    }
    if cell.unsteady {
        text += "; not steady from round to round";
    }
    text
}

fn cell(view: &View<'_>, way: &Way<'_>, load: &Load, cell: &Cell, axis: Axis) -> Markup {
    let said = said(way, load, cell);
    let class =
        format!("plot {}", if cell.from_cache.is_some() { "apart" } else { cell.word.class });
    html! {
        td class=(class) title=(said) {
            @if let Some(ratio) = cell.ratio {
                (marks::ratio(axis, &Ratio {
                    label: &said,
                    ratio,
                    interval: cell.interval,
                    band: load.band,
                    published: None,
                    ink: way.ink,
                    open: !matches!(cell.word.class, "faster" | "slower" | "same"),
                }))
                span.num { (cell.bound) (format::digits(ratio)) @if cell.from_cache.is_some() { "*" } i { (cell.word.mark) } }
            } @else if way.label == view.against {
                span.one { "1" }
            } @else if cell.word.class == "failed" {
                span.bad { "failed" }
            } @else if let Some(median) = cell.median {
                span.one { (format::value(median, load.metric.unit())) }
            }
        }
    }
}

/// CPU time as a bar of its parts.
pub fn bar(cost: &Cost, dearest: f64, per: Per) -> Markup {
    let unit = |value: f64| match per {
        Per::Io => format!("{} µs", format::digits(value)),
        Per::Gib => format!("{} s", format::digits(value)),
    };
    html! {
        span.bar { @for (class, value) in &cost.parts {
            i class=(class) style=(format!("width:{:.1}%", 100.0 * value / dearest)) title=(format!("{class}: {}", unit(*value))) {}
        } }
        span.num { (unit(cost.sum())) }
    }
}
