//! The first page of `report.html`: answers in words, the heat table, who does not flush.

use maud::{Markup, html};

use super::analysis::Analysis;
use super::ranking::{self, Cell, Group};
use super::{format, words};
use crate::run::folder::Arm;
use crate::sample::{Metric, Stage};
use crate::stats::FEWEST_ROUNDS;
use crate::workload::Workload;

/// What others have published, asked again.
pub fn findings(analysis: &Analysis) -> Markup {
    let findings = &analysis.findings;
    html! {
        @if !findings.is_empty() {
            h2 { "Published findings, asked again" }
            @for finding in findings { section.card {
                h3 { (finding.question) }
                p { b { "Published: " } (finding.published) "." }
                p { b { "Here: " } (finding.sum) }
                ul { @for line in &finding.lines { li { (line) } } }
                @for told in &finding.tables {
                    p.soft.small { (told.title) "; medians (95 %)" }
                    div.scroll { table.sort {
                        thead { tr { @for head in &told.heads { th.wrap { (head) } } } }
                        tbody { @for row in &told.rows { tr { @for cell in row { td { (cell) } } } } }
                    } }
                }
                p.soft.small { "Conditions: " (finding.conditions) "." }
            } }
        }
        (columns(analysis))
    }
}

/// bonnie++'s columns, Ringtap beside the best of all.
fn columns(analysis: &Analysis) -> Markup {
    html! {
        @if !analysis.columns.is_empty() {
            section.card {
                h3 { "bonnie++ column by column: Ringtap beside the best of all, cached ones too" }
                div.scroll { table.sort {
                    thead { tr {
                        th { "stage" } th { "workload" } th { "column" } th { "best" } th.n { "its median" }
                        th.n { "ringtap-vhost" } th.n { "by the best" } th.n { "95 %" } th { "that means" }
                    } }
                    tbody { @for column in &analysis.columns { tr {
                        @let unit = column.metric.unit();
                        td { (column.stage.name()) } td.name { (column.workload) } td.name { (column.metric.title()) }
                        @match &column.best {
                            Some((name, value)) => { td.name { (name) } td.n data-v=(value.value) { (format::value(*value, unit)) } }
                            None => { td {} td.n data-v="" { "–" } }
                        }
                        td.n data-v=(column.ours.map_or_else(String::new, |v| v.value.to_string())) { (column.ours.map_or_else(|| "–".into(), |v| format::value(v, unit))) }
                        td.n data-v=(column.ratio.map_or_else(String::new, |r| r.0.to_string())) { (column.ratio.map_or_else(|| "–".into(), |r| format::digits(r.0))) }
                        td.n { (format::interval(column.ratio.and_then(|r| r.1))) }
                        td.prose { (column.words) }
                    } } }
                } }
            }
        }
    }
}

/// Answers in words.
pub fn answers(analysis: &Analysis) -> Markup {
    let answers = ranking::answers(analysis);
    html! {
        h2 { "Which one for which load" }
        @if answers.is_empty() {
            p {
                @if analysis.only_points() {
                    "No answer yet: under " (FEWEST_ROUNDS) " rounds there are points, no intervals and no verdicts."
                } @else {
                    "No two backends of one stage were measured with one load and may be ranked together."
                }
            }
        }
        @for (stage, lines) in &answers {
            h3 { (stage.name()) span.soft.small { " — " (words::stage(analysis, *stage)) } }
            ul { @for line in lines { li { (line) } } }
        }
        @if !answers.is_empty() {
            p.soft.small { "Best means the best median among backends that go to the disk and flush when asked. \u{201c}Not told apart\u{201d} is one comparison at 95 %, or a difference within 3 % or the noise floor; it is not guarded for the whole table, as the verdicts below are." }
        }
    }
}

/// Every backend by every load, as a part of the best.
pub fn heat(analysis: &Analysis) -> Markup {
    html! {
        h2 { "Times the best" }
        p.soft.small { "1 is the best of those ranked; 0.50 is half as good. In italics: not ranked, because the backend goes through a page cache or does not flush, or because the device saw less than half of the bytes that were asked for. Sort by a column with a click, or with Enter on its head." }
        @for (stage, arms) in analysis.stages() {
            (heat_of(analysis, stage, &arms, &analysis.headlines(stage)))
        }
        (at_equal_cpu(analysis))
    }
}

/// The same for what a second of the whole path's CPU buys.
fn at_equal_cpu(analysis: &Analysis) -> Markup {
    let stages: Vec<_> = analysis
        .stages()
        .into_iter()
        .map(|(stage, arms)| (stage, arms, analysis.costs(stage)))
        .filter(|(_, _, columns)| !columns.is_empty())
        .collect();
    html! {
        @if !stages.is_empty() {
            h2 { "Times the best, at equal CPU" }
            p.soft.small { "I/Os, or bytes, for a CPU second of the whole path: client or guest, server and kernel threads together. 1 is the cheapest of those ranked." }
            @for (stage, arms, columns) in stages { (heat_of(analysis, stage, &arms, &columns)) }
        }
    }
}

fn heat_of(
    analysis: &Analysis,
    stage: Stage,
    arms: &[&Arm],
    columns: &[(&'static Workload, Metric)],
) -> Markup {
    if columns.is_empty() {
        return html! {};
    }
    let bests: Vec<_> = columns
        .iter()
        .map(|(workload, metric)| ranking::best(analysis, stage, workload, *metric).map(|b| b.1))
        .collect();
    let mut rows: Vec<(Group, &Arm)> = arms
        .iter()
        .filter(|arm| !ranking::is_twin(arm))
        .map(|arm| (ranking::group(analysis, arm), *arm))
        .collect();
    rows.sort_by_key(|row| row.0);
    html! {
        div.card { h3 { (stage.name()) } div.scroll { table.heat.sort {
            thead { tr {
                th { "backend" }
                @for (workload, metric) in columns {
                    th.n title=(format!("{}, {}", workload.title, metric.title())) {
                        (workload.name) @if workload.headline.len() > 1 && workload.headline.contains(metric) { br; (metric.title()) }
                    }
                }
                th { "ranked" }
            } }
            tbody { @for (group, arm) in rows { tr {
                td.name title=(arm.title) { (arm.name) }
                @for ((workload, metric), best) in columns.iter().zip(&bests) {
                    @let cached = ranking::from_cache(analysis, arm, workload);
                    (heat_cell(ranking::cell(analysis, arm, workload, *metric, *best), *metric, group, cached))
                }
                td.word { @match group {
                    Group::Durable => "yes",
                    Group::Unchecked => "no: flushes not counted",
                    Group::Cached => "no: page cache",
                    Group::Lies => "no: does not flush",
                } }
            } } }
        } } }
    }
}

/// `cached`: so little of what was asked for reached the device that it was a cache.
fn heat_cell(cell: Option<Cell>, metric: Metric, group: Group, cached: Option<f64>) -> Markup {
    let Some(cell) = cell else { return html! { td.n data-v="" { "–" } } };
    let value = format::value(cell.median, metric.unit());
    let Some(share) = cell.share else {
        let why = if cell.median.at_least {
            "a bound"
        } else {
            "no backend is ranked to compare it with"
        };
        return html! { td.n data-v=(cell.median.value) title=(why) { (value) } };
    };
    // Eleven steps from a tenth of the best to the best.
    let step = (share.clamp(0.1, 1.0).log10() * 10.0 + 10.0).round() as u32;
    let ranked = group == Group::Durable && cached.is_none();
    let class = if ranked { format!("n heat{step}") } else { "n apart".into() };
    let why = cached.map_or_else(String::new, |share| {
        format!("; a cache: the device saw {} % of the bytes", format::digits(share * 100.0))
    });
    html! { td class=(class) data-v=(format!("{share:.4}")) title=(format!("{value}{why}")) { (format::digits(share)) } }
}

/// What the flushes showed.
pub fn durability(analysis: &Analysis) -> Markup {
    let (lies, honest): (Vec<_>, Vec<_>) =
        analysis.durability.iter().partition(|check| !check.durable);
    html! {
        @if !analysis.durability.is_empty() {
            h2 { @if lies.is_empty() { "Does each fsync reach the disk" } @else { "Hosts lie" } }
            p { "Each backend got 4 KiB writes with an fsync behind each; the flushes that reached the layer below were counted." }
            @if lies.is_empty() {
                p { "All of them pass the flushes on." }
            } @else {
                div.card { div.scroll { table.sort {
                    thead { tr { th { "stage" } th { "does not pass flushes on" } th.n { "flushes per fsync" } th { "counted" } th { "what that means" } } }
                    tbody { @for check in &lies { tr {
                        td { (check.stage.name()) } td.name { (check.arm) } td.n { (format::digits(check.flushes)) }
                        td.prose { (check.note) }
                        td.prose { "an fsync that has ended may still be lost in a power cut; not ranked with the others" }
                    } } }
                } } }
            }
            @if !honest.is_empty() {
                p.soft { "Passed on: " (honest.iter().map(|check| format!("{} {} ({})", check.stage, check.arm, format::digits(check.flushes))).collect::<Vec<_>>().join(", ")) "." }
            }
        }
    }
}
