//! `changes.html`: two runs beside each other, one file that opens without a network.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::across::Unlike;
use super::analysis::{Analysis, reference};
use super::change::{self, Change, Comparison};
use super::page::marks::{self, Axis, Ratio};
use super::page::{self, frame, names};
use super::words::state_in_words;
use super::{format, svg};
use crate::sample::{Metric, Stage, Unit, Value};
use crate::stats::FEWEST_ROUNDS;
use crate::workload;

/// The page.
pub fn render(before: &Analysis, after: &Analysis, comparison: &Comparison) -> String {
    let runs = [("Before", before), ("After", after)];
    frame::page(
        "Ringtap report, before and after",
        html! {
            h1 { "Before and after" }
            @for (name, Analysis { run, .. }) in &runs {
                p.soft { b { (name) } ": " (run.began) " · " (run.host.cpu) ", " (run.host.cpus) " CPUs · " (run.host.kernel) }
            }
            @for (name, analysis) in &runs {
                @if analysis.is_partial() { p.banner { (name) ": " (state_in_words(analysis)) } }
            }
            (answer(comparison))
            (unlike(&comparison.unlike))
            (charts(after, &comparison.changes))
            h2 { "Every comparison" }
            div.card { div.scroll { (table(&comparison.changes)) } }
            (only(comparison))
            (values(before, after, &comparison.changes))
            (method())
            (machines(before, after))
        },
    )
}

fn answer(comparison: &Comparison) -> Markup {
    let claims = change::claims(&comparison.changes);
    let points = comparison.changes.iter().all(|change| change.interval.is_none());
    html! {
        h2 { "What changed" }
        p { (change::sum(&comparison.changes)) }
        @if points {
            p { "No intervals: under " (FEWEST_ROUNDS) " rounds in either run there are points and no verdicts." }
        }
        ul { @for claim in &claims { li { (claim) } } }
    }
}

fn unlike(list: &[Unlike]) -> Markup {
    html! {
        @if !list.is_empty() {
            h2 { "What the two runs do not have in common" }
            p.soft.small { "Any of it may be what changed the numbers." }
            div.card { div.scroll { table {
                thead { tr { th { "what" } th { "before" } th { "after" } } }
                tbody { @for Unlike { what, before, after } in list { tr { td.prose { (what) } td.prose { (before) } td.prose { (after) } } } }
            } } }
        }
    }
}

/// A chart for each load and metric that has ratios.
fn charts(after: &Analysis, changes: &[Change]) -> Markup {
    let mut groups: Vec<(Stage, &str, Metric)> = Vec::new();
    for change in changes.iter().filter(|change| change.ratio.is_some()) {
        let group = (change.stage, change.workload.as_str(), change.metric);
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    let stages: BTreeSet<Stage> = groups.iter().map(|group| group.0).collect();
    html! {
        @for stage in stages {
            @let reference = reference(&after.run, stage).unwrap_or_default();
            h2 { (names::stage(stage)) }
            p.soft.small {
                "Times as good as before, each by the first way that both runs have, of the same round; that one itself as measured. "
                "Bar: 95 % interval; grey: the noise floor, the larger of both runs; ring: neither better nor worse."
            }
            div.cards {
                @for (_, workload, metric) in groups.iter().filter(|group| group.0 == stage) {
                    (chart(stage, workload, *metric, changes, reference))
                }
            }
        }
    }
}

fn chart(
    stage: Stage,
    workload: &str,
    metric: Metric,
    changes: &[Change],
    reference: &str,
) -> Markup {
    let of: Vec<&Change> = changes
        .iter()
        .filter(|c| (c.stage, c.workload.as_str(), c.metric) == (stage, workload, metric))
        .collect();
    let ends = of.iter().filter_map(|change| Some((change.ratio?, change.interval)));
    let ends = ends.flat_map(|(ratio, ends)| {
        let (low, high) = ends.unwrap_or((ratio, ratio));
        [ratio, low, high]
    });
    let axis = Axis::around(145, ends);
    let title =
        workload::find(workload).map_or_else(|| workload.to_owned(), |w| names::load(w, metric));
    html! {
        section.card {
            h3 { (title) }
            div.scroll { table.strips.change {
                thead { tr { th {} th.plot { (axis.head()) } th.n { "times as good" } th.n { "95 %" } th { "that is" } } }
                tbody { @for change in of { @if let Some(ratio) = change.ratio { tr {
                    th.way scope="row" title=(change.arm) { (names::named(&change.arm)) }
                    td.plot { (marks::ratio(axis, &Ratio {
                        label: &format!("{}: {} times as good as before", change.arm, format::digits(ratio)),
                        ratio,
                        interval: change.interval,
                        band: change.floor.map(|floor| (1.0 / (1.0 + floor), 1.0 + floor)),
                        published: None,
                        ink: svg::ink(&change.arm, reference),
                        open: change.verdict != change::BETTER && change.verdict != change::WORSE,
                    })) }
                    td.n { "× " (format::digits(ratio)) } td.n { (format::interval(change.interval)) }
                    td class=(format!("verdict {}", class(change))) { (change.verdict) }
                } } } }
            } }
        }
    }
}

fn class(change: &Change) -> &'static str {
    match change.verdict.as_str() {
        change::BETTER => "faster",
        change::WORSE => "slower",
        _ => "",
    }
}

fn table(changes: &[Change]) -> Markup {
    html! {
        table.sort {
            thead { tr {
                th { "stage" } th { "workload" } th { "metric" } th { "backend" } th.n { "before" } th.n { "after" } th { "by" }
                th.n { "times as good" } th.n { "95 %" } th { "verdict" } th.n { "p, whole table" } th.n { "rounds" }
            } }
            tbody { @for change in changes { tr {
                td { (change.stage.name()) } td.name { (change.workload) } td.name { (change.metric.title()) } td.name { (change.arm) }
                (value(change.before, change.metric.unit())) (value(change.after, change.metric.unit()))
                td.name { (change.by.as_deref().unwrap_or("as measured")) }
                td.n data-v=(change.ratio.map_or_else(String::new, |ratio| ratio.to_string())) { (change.ratio.map_or_else(|| "–".into(), format::digits)) }
                td.n { (format::interval(change.interval)) }
                td class=(class(change)) { (change.verdict) }
                td.n data-v=(change.p.map_or_else(String::new, |p| p.to_string())) { (page::probability(change.p)) }
                td.n { (change.rounds.0) ", " (change.rounds.1) }
            } } }
        }
    }
}

fn value(value: Value, unit: Unit) -> Markup {
    html! { td.n data-v=(value.value) { (format::value(value, unit)) } }
}

fn only(comparison: &Comparison) -> Markup {
    html! {
        @if !comparison.only.is_empty() {
            h2 { "In one of the runs only" }
            div.card { div.scroll { table {
                thead { tr { th { "has it" } th { "stage" } th { "backend" } th { "workloads" } th { "the other" } } }
                tbody { @for only in &comparison.only { tr {
                    td { (only.has) } td { (only.stage.name()) } td.name { (only.arm) }
                    td.prose { (only.workloads.join(", ")) } td.prose { (only.why) }
                } } }
            } } }
        }
    }
}

/// Every round of both.
fn values(before: &Analysis, after: &Analysis, changes: &[Change]) -> Markup {
    let rounds = |run: &Analysis, change: &Change| -> String {
        let series = run.find(change.stage, &change.arm, &change.workload, change.metric);
        let values = series.map(|series| series.values.as_slice()).unwrap_or_default();
        let unit = change.metric.unit();
        values.iter().map(|(_, v)| format::value(*v, unit)).collect::<Vec<_>>().join(", ")
    };
    html! {
        h2 { "Every round" }
        details.raw {
            summary { (changes.len()) " rows as measured; samples.jsonl of each run has them whole" }
            div.card { div.scroll { table.sort {
                thead { tr { th { "stage" } th { "workload" } th { "metric" } th { "backend" } th { "before" } th { "after" } } }
                tbody { @for change in changes { tr {
                    td { (change.stage.name()) } td.name { (change.workload) } td.name { (change.metric.title()) } td.name { (change.arm) }
                    td.small.prose { (rounds(before, change)) } td.small.prose { (rounds(after, change)) }
                } } }
            } } }
        }
    }
}

fn method() -> Markup {
    html! {
        h2 { "How it was compared" }
        ul {
            li { "Each value is divided by that of the first backend of the stage that both runs have, in the same round, so that a faster machine is no change. That backend itself is as measured: it shows the machine. What changed in it changes all others the other way round." }
            li { "Times as good: the Hodges–Lehmann ratio, turned so that above 1 is better, with its exact interval by rank sums. Rounds of two runs do not pair." }
            li { "Better and worse hold for the whole table at once with 95 %: step-down, whole rounds dealt anew to the two runs. They also lie beyond the noise floor of both runs." }
            li { "Two runs differ by more than their rounds show: what was booted anew, where files came to lie, what else ran. These intervals know nothing of that; only running both again does." }
            li { "Values that are bounds (≥) give no ratio. Rows of different versions of bonnie++ are not compared." }
        }
    }
}

/// Both machines, what differs in bold.
fn machines(before: &Analysis, after: &Analysis) -> Markup {
    let facts = |analysis: &Analysis| -> Vec<(String, String)> {
        let (run, plan) = (&analysis.run, &analysis.run.plan);
        let mut list: Vec<(String, String)> = [
            ("rounds", state_in_words(analysis)),
            ("disks", format!("{} MiB", plan.size >> 20)),
            ("fio", format!("{} s measured, {} s ramp", plan.seconds, plan.ramp)),
            ("seed", plan.seed.to_string()),
            ("system", run.host.system.clone()),
            ("kernel", run.host.kernel.clone()),
            ("CPU", format!("{} × {}", run.host.cpus, run.host.cpu)),
            ("memory", format!("{} MiB", run.host.memory >> 20)),
            ("disks on", format!("{} ({})", run.host.mount, run.host.file_system)),
            ("load at the start", format!("{:.2}", run.host.load)),
            ("lab", run.lab.clone()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        list.extend(run.host.state.iter().chain(&run.host.versions).cloned());
        list
    };
    let (one, two) = (facts(before), facts(after));
    let find = |list: &[(String, String)], name: &str| {
        list.iter()
            .find(|(of, _)| of == name)
            .map_or_else(|| "–".into(), |(_, value)| value.clone())
    };
    let mut names: Vec<&String> = one.iter().map(|(name, _)| name).collect();
    names.extend(
        two.iter().map(|(name, _)| name).filter(|name| !one.iter().any(|(of, _)| &of == name)),
    );
    html! {
        h2 { "The two machines" }
        div.card { div.scroll { table {
            thead { tr { th { "what" } th { "before" } th { "after" } } }
            tbody { @for name in names {
                @let (was, is) = (find(&one, name), find(&two, name));
                tr.unlike[was != is] { th { (name) } td.prose { (was) } td.prose { (is) } }
            } }
        } } }
    }
}
