//! Below the first screen: a card for each published question and for each load, the chart first, words after.

use maud::{Markup, html};

use super::marks::{self, Axis, Ratio, Span, Strip};
use super::names::anchor;
use super::view::{self, Per, View};
use super::{curves, first, forest, names};
use crate::report::analysis::Analysis;
use crate::report::contention::Contention;
use crate::report::finding::{Answer, Finding, Outcome};
use crate::report::{format, svg};
use crate::run::folder::Arm;
use crate::sample::{Metric, Unit};
use crate::workload::Workload;

const STRIP: u32 = 132;
const SPAN: u32 = 220;

/// A card for each published question.
pub fn questions(analysis: &Analysis) -> Markup {
    html! {
        @if !analysis.findings.is_empty() {
            h2 id="questions" { "What was published, asked again" }
            p.soft { "Dot: times as good here, with its 95 % interval. Box: as published." }
            div.cards { @for finding in &analysis.findings { (question(analysis, finding)) } }
        }
    }
}

fn question(analysis: &Analysis, finding: &Finding) -> Markup {
    let figures = |answer: &Answer| answer.published.as_deref().and_then(range);
    let ends = finding.answers.iter().flat_map(|answer| {
        let ratio = answer.ratio.unwrap_or(1.0);
        let (low, high) = answer.interval.unwrap_or((ratio, ratio));
        let (from, to) = figures(answer).unwrap_or((1.0, 1.0));
        [ratio, low, high, from, to]
    });
    let axis = Axis::around(148, ends);
    html! {
        section.card id=(anchor(finding.question)) {
            h3 { (finding.question) }
            @if !finding.answers.is_empty() { div.scroll { table.claim {
                thead { tr { th { "pair and load" } th.plot { (axis.head()) } th { "here; published" } } }
                // What is a bound on both sides stands in the folded columns, if nobody published it.
                tbody { @for answer in finding.answers.iter().filter(|a| a.ratio.is_some() || a.published.is_some()) {
                    @let (class, said) = first::outcome(answer);
                    @let label = format!("{}, {}: {}", first::pair(answer), first::what(answer), first::here(answer));
                    tr {
                        td.prose { (first::pair(answer)) br; span.soft.small { (first::what(answer)) } }
                        td.plot { @if let Some(ratio) = answer.ratio { (marks::ratio(axis, &Ratio {
                            label: &label,
                            ratio,
                            interval: answer.interval,
                            band: None,
                            published: figures(answer),
                            ink: svg::ink(&answer.arm, ""),
                            open: !is_claimed(answer),
                        })) } }
                        td.said {
                            (first::here(answer)) br;
                            span.small {
                                @match (&answer.published, &answer.answer) {
                                    (Some(published), _) => { (published) ": " span class=(class) { (said) } }
                                    (None, Some(answer)) => span.soft { (answer) },
                                    (None, None) => {}
                                }
                                @if let Some(ringtap) = answer.ringtap.as_ref().filter(|words| !words.starts_with('–')) { br; span.soft { "Ringtap: " (ringtap) } }
                            }
                        }
                    }
                } }
            } } }
            p { b { "Published: " } (finding.published) ". " b { "Here: " } (finding.sum) }
            @if !finding.tables.is_empty() { details {
                summary { "Each way by itself: medians with their 95 % intervals" }
                @for told in &finding.tables {
                    p.soft.small { (told.title) }
                    div.scroll { table.sort {
                        thead { tr { @for head in &told.heads { th.wrap { (head) } } } }
                        tbody { @for row in &told.rows { tr { @for (at, value) in row.iter().enumerate() { td.name { @if at == 0 { (renamed(value)) } @else { (value) } } } } } }
                    } }
                }
            } }
            @if finding.question == "A fresh snapshot" { @for (stage, _) in analysis.stages() { (curves::life(analysis, stage)) } }
        }
    }
}

/// Whether more is said of a pair than what was measured.
fn is_claimed(answer: &Answer) -> bool {
    use Outcome::{Held, NoDifference, OtherSize, Reversed};
    let said = |words: &String| {
        ["faster", "slower", "no difference"].iter().any(|word| words.starts_with(word))
    };
    matches!(answer.outcome, Some(Held | OtherSize | Reversed | NoDifference))
        || answer.outcome.is_none() && answer.answer.as_ref().is_some_and(said)
}

/// A way's name with what stands in brackets behind it.
fn renamed(name: &str) -> String {
    let (name, more) = name.split_once(' ').map_or((name, ""), |(name, more)| (name, more));
    format!("{} {more}", names::named(name))
}

/// "0.17–0.19" or "5.2" as numbers; bounds and charts have none.
fn range(figures: &str) -> Option<(f64, f64)> {
    let first = figures.split_whitespace().next()?;
    let (low, high) = first.split_once('–').unwrap_or((first, first));
    Some((low.parse().ok()?, high.parse().ok()?))
}

/// A stage: the loads that did not fit on the first screen, then a card for each load.
pub fn stage(analysis: &Analysis, view: &View<'_>, is_first: bool) -> Markup {
    let arms: Vec<&Arm> = view.ways.iter().map(|way| way.arm).collect();
    let mut workloads: Vec<&'static dyn Workload> = view.loads.iter().map(|l| l.workload).collect();
    workloads.dedup_by_key(|workload| workload.name());
    // Those that fill the page's width last, so that they leave no gap.
    let columns =
        |of: &&dyn Workload| view.loads.iter().filter(|l| l.workload.name() == of.name()).count();
    workloads.sort_by_key(|workload| columns(workload) > 1);
    let from = if is_first { view.compared.min(first::LOADS) } else { 0 };
    let told = |finding: &Finding| finding.question == "A fresh snapshot";
    html! {
        h2 { (names::stage(view.stage)) @if from > 0 { ", load by load" } }
        @for start in (from..view.compared).step_by(first::LOADS) { section.first {
            (forest::table(view, start, (start + first::LOADS).min(view.compared), !is_first && start == from, usize::MAX))
        } }
        div.cards {
            @for workload in workloads { (load(analysis, view, &arms, workload)) }
            @if !analysis.findings.iter().any(told) {
                @if analysis.curves.iter().any(|curve| curve.stage == view.stage) { section.card { (curves::life(analysis, view.stage)) } }
            }
        }
    }
}

fn load(
    analysis: &Analysis,
    view: &View<'_>,
    arms: &[&Arm],
    workload: &'static dyn Workload,
) -> Markup {
    let at: Vec<usize> = (0..view.loads.len())
        .filter(|at| view.loads[*at].workload.name() == workload.name())
        .collect();
    let ends: Vec<f64> = at.iter().map(|at| end(analysis, view, *at)).collect();
    let costs: Vec<Option<(f64, Per)>> = arms
        .iter()
        .map(|arm| {
            let of = |per| Some((view::parts(analysis, arm, workload, per)?.sum(), per));
            of(Per::Io).or_else(|| of(Per::Gib))
        })
        .collect();
    let per = costs.iter().flatten().next().map(|(_, per)| *per);
    let tail = |arm: &Arm| analysis.median(arm.stage, &arm.name, workload.name(), Metric::P99);
    let tails = arms.iter().any(|arm| tail(arm).is_some());
    let notes =
        analysis.notes.iter().filter(|(of, name, _)| *of == view.stage && name == workload.name());
    let notes: Vec<&str> = notes.map(|(_, _, note)| note.as_str()).collect();
    let title = match &at[..] {
        [one] => names::load(workload, view.loads[*one].metric),
        _ => names::workload(workload).to_owned(),
    };
    let several = at.len() > 1;
    let class = if several { "card wide" } else { "card" };
    html! {
        section class=(class) {
            h3 title=(workload.name()) { (capital(&title)) }
            div.scroll { table.strips {
                thead { tr {
                    th { "" }
                    @for at in &at {
                        @let metric = view.loads[*at].metric;
                        th.n { (metric.title()) @if metric.better() == crate::sample::Better::Lower { span.soft { " (less is better)" } } } th {}
                    }
                    @if tails { th.n { "p99" } }
                    @if let Some(per) = per { th.n title="CPU time of client or guest, server and kernel threads together" { @match per { Per::Io => "CPU per I/O", Per::Gib => "CPU per GiB" } } }
                } }
                tbody { @for ((way, arm), cost) in view.ways.iter().zip(arms).zip(&costs) {
                    @if at.iter().any(|at| way.cells[*at].is_some()) { tr {
                        th.way scope="row" title=(way.arm.title) { (way.label) }
                        @for (at, end) in at.iter().zip(&ends) { (strip(analysis, view, way, *at, *end)) }
                        @if tails { td.n { (tail(arm).map_or_else(|| "–".into(), |value| format::value(value, Unit::Nanoseconds))) } }
                        @if per.is_some() { td.n { @match cost {
                            Some((sum, Per::Io)) => { (format::digits(*sum)) " µs" }
                            Some((sum, Per::Gib)) => { (format::digits(*sum)) " s" }
                            None => "–",
                        } } }
                    } }
                } }
            } }
            @let twins: Vec<&Arm> = analysis.run.arms.iter().filter(|arm| arm.stage == view.stage && analysis.find(view.stage, &arm.name, workload.name(), view.loads[at[0]].metric).is_some()).collect();
            @for figure in curves::latency(analysis, view.stage, &twins, workload) { (figure) }
            (contention(analysis, view, workload))
            @for at in &at {
                @if let Some(words) = decided(analysis, view, *at) { p.small { @if several { b { (view.loads[*at].metric.title()) ": " } } (words) } }
            }
            @for note in notes { p.small.soft { (note) "." } }
        }
    }
}

/// The end of an axis on which all rounds of all ways lie.
fn end(analysis: &Analysis, view: &View<'_>, at: usize) -> f64 {
    let load = &view.loads[at];
    let series = view.ways.iter().filter_map(|way| {
        analysis.find(view.stage, &way.arm.name, load.workload.name(), load.metric)
    });
    series.flat_map(|series| series.values.iter().map(|(_, v)| v.value)).fold(0.0, f64::max)
}

fn strip(analysis: &Analysis, view: &View<'_>, way: &view::Way<'_>, at: usize, end: f64) -> Markup {
    let load = &view.loads[at];
    let series = analysis.find(view.stage, &way.arm.name, load.workload.name(), load.metric);
    let Some((series, median)) = series.and_then(|series| Some((series, series.median?))) else {
        let failed = way.cells[at].as_ref().is_some_and(|cell| cell.word.class == "failed");
        return html! { td.n { @if failed { span.bad { "failed: see below" } } @else { "–" } } td.plot {} };
    };
    let value = format::value(median, load.metric.unit());
    let label = format!("{}, {}: {value}", way.label, load.title);
    html! {
        td.n data-v=(median.value) { (value) }
        td.plot {
            (marks::strip(STRIP, end, &Strip {
                label: &label,
                median: median.value,
                bound: median.at_least,
                interval: series.interval,
                rounds: series.values.iter().map(|(_, value)| value.value).collect(),
                ink: way.ink,
            }))
            @if way.cells[at].as_ref().is_some_and(|cell| cell.unsteady) { span.soft.small { "not steady" } }
        }
    }
}

/// What was decided of a load, in a sentence.
fn decided(analysis: &Analysis, view: &View<'_>, at: usize) -> Option<String> {
    let load = &view.loads[at];
    let rows = analysis.rows.iter().filter(|row| {
        row.question.is_some()
            && row.stage == view.stage
            && row.workload == load.workload.name()
            && row.metric == load.metric
    });
    let (mut parts, mut others) = (Vec::new(), Vec::<(String, Vec<String>)>::new());
    for row in rows {
        let (ours, theirs) = (names::named(&row.arm), names::named(&row.against));
        if row.decision.is_difference() {
            let (ratio, ends) = (format::ratio(row), format::decision(row));
            parts.push(format!("{ours} is {ratio} [{ends}] times as good as {theirs}"));
            continue;
        }
        let (said, pair) = (format::verdict(row), format!("{ours} and {theirs}"));
        let said = said.split(" (").next().unwrap_or(&said).to_owned();
        match others.iter_mut().find(|(known, _)| *known == said) {
            Some((_, pairs)) => pairs.push(pair),
            None => others.push((said, vec![pair])),
        }
    }
    parts.extend(others.into_iter().map(|(said, pairs)| format!("{said}: {}", pairs.join(", "))));
    if parts.is_empty() {
        // Where that is so of all loads, it is said once.
        let some = view.loads.iter().any(|load| load.named);
        return some.then(|| "Exploratory: no comparison in it was named before the run.".into());
    }
    Some(format!("{}.", capital(&parts.join("; "))))
}

/// Two loads at once: each one's p99 alone and together, and what each gets.
fn contention(analysis: &Analysis, view: &View<'_>, workload: &dyn Workload) -> Markup {
    if workload.shape().is_none() {
        return html! {};
    }
    let rows: Vec<&Contention> = analysis
        .contention
        .iter()
        .filter(|row| {
            row.stage == view.stage && row.workload == workload.name() && !row.arm.contains('#')
        })
        .collect();
    let times = || rows.iter().flat_map(|row| [row.alone, row.together]).flatten();
    if rows.is_empty() || times().next().is_none() {
        return html! {};
    }
    let scale = (
        times().fold(f64::INFINITY, f64::min).max(1.0).log10() - 0.05,
        times().fold(1.0, f64::max).log10() + 0.05,
    );
    let part =
        |value: Option<f64>| value.map_or_else(|| "–".into(), |v| format::number(v, Unit::Share));
    let time = |value: f64| format::number(value, Unit::Nanoseconds);
    let ink = |arm: &str| {
        svg::ink(
            arm,
            crate::report::analysis::reference(&analysis.run, view.stage).unwrap_or_default(),
        )
    };
    html! {
        details.contention {
            summary { "How the two loads get on: p99 alone (ring) and together (dot)" }
            div.scroll { table {
                thead { tr { th { "" } th { "load" } th.plot { (marks::span_head(SPAN, scale, |tick| format::tick(tick, Unit::Nanoseconds))) } th.n { "p99 alone" } th.n { "together" } th.n { "share of both" } th.n { "keeps of its rate alone" } } }
                tbody { @for row in rows { tr {
                    td.name { (names::named(&row.arm)) } td { (row.load) }
                    @match (row.alone, row.together) {
                        (Some(alone), Some(together)) => {
                            td.plot { (marks::span(SPAN, scale, &Span {
                                label: &format!("{}, {}: p99 {} alone, {} together", names::named(&row.arm), row.load, time(alone), time(together)),
                                alone,
                                together,
                                interval: row.interval,
                                ink: ink(&row.arm),
                            })) }
                            td.n { (time(alone)) } td.n { (time(together)) }
                        }
                        _ => { td.soft.small { "too few I/Os for a p99" } td.n { "–" } td.n { "–" } }
                    }
                    td.n { (part(row.share)) } td.n { (part(row.keeps)) }
                } } }
            } }
        }
    }
}

/// With a capital, unless it begins with a program's name.
fn capital(text: &str) -> String {
    if ["dd", "bonnie++", "find", "fio"].iter().any(|name| text.starts_with(name)) {
        return text.to_owned();
    }
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_figures_are_read() {
        assert_eq!(range("0.17–0.19"), Some((0.17, 0.19)));
        assert_eq!(range("5.2"), Some((5.2, 5.2)));
        assert_eq!(range("0.81–0.97 in bonnie++"), Some((0.81, 0.97)));
        assert_eq!(range("≤ 0.016"), None);
        assert_eq!(range("charts only"), None);
    }
}
