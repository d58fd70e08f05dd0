//! `report.html`: one file that opens without a network. Nothing is loaded; its one script sorts tables.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::analysis::{Analysis, Row, reference};
use super::{
    answer, contention, facts, format, latency, published, state_in_words, steady, svg, table,
    words,
};
use crate::run::folder::{Arm, State};
use crate::sample::{Better, Metric, Stage, Unit};
use crate::stats::{Decision, FEWEST_ROUNDS, Method};
use crate::workload::Workload;

const STYLE: &str = include_str!("report.css");
const SCRIPT: &str = include_str!("report.js");
/// Sentences shown before the rest is folded.
const FIRST_CLAIMS: usize = 8;

/// The page.
pub fn render(analysis: &Analysis) -> String {
    let run = &analysis.run;
    let state = state_in_words(analysis);
    page(
        &format!("Ringtap compare, {}", run.began),
        html! {
            h1 { "Ways of serving a disk, side by side" }
            p.soft { (run.began) " · " (run.host.cpu) ", " (run.host.cpus) " CPUs · " (run.host.kernel) " · disks on " (run.host.file_system) }
            @if run.state == State::Complete { p.soft { (state) } } @else { p.banner { (state) } }
            @if let Some(words) = words::unsteady(analysis) { p.banner { (words) } }
            (answer::findings(analysis))
            (answer::answers(analysis))
            (answer::heat(analysis))
            (answer::durability(analysis))
            (claims(analysis))
            @for (stage, arms) in analysis.stages() { (stage_section(analysis, stage, &arms)) }
            (peers(analysis))
            (troubles(analysis))
            (steady::section(analysis))
            (facts::stalls(analysis))
            (facts::ledger(analysis))
            (all_comparisons(analysis))
            (facts::samples(analysis))
            (published_before())
            (method(analysis))
            (machine(analysis))
        },
    )
}

/// A page that needs nothing else.
pub(super) fn page(title: &str, body: Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main { (body) }
                script { (PreEscaped(SCRIPT)) }
            }
        }
    };
    page.into_string()
}

fn claims(analysis: &Analysis) -> Markup {
    let claims = words::claims(analysis);
    html! {
        h2 { "What this run supports" }
        @if analysis.only_points() {
            p { "Nothing yet: under " (FEWEST_ROUNDS) " rounds there are points, no intervals and no verdicts." }
        } @else if claims.is_empty() {
            p { "No difference and no equality could be shown. More rounds narrow the intervals." }
        }
        ul { @for claim in claims.iter().take(FIRST_CLAIMS) { li { (claim) } } }
        @if claims.len() > FIRST_CLAIMS {
            details {
                summary { (claims.len() - FIRST_CLAIMS) " more" }
                ul { @for claim in &claims[FIRST_CLAIMS..] { li { (claim) } } }
            }
        }
    }
}

fn stage_section(analysis: &Analysis, stage: Stage, arms: &[&Arm]) -> Markup {
    let what = words::stage(analysis, stage);
    html! {
        h2 { "Stage: " (stage.name()) }
        p.soft { (what) }
        @for (workload, metric) in analysis.headlines(stage) {
            (workload_card(analysis, stage, arms, workload, metric))
            @if workload.headline.last() == Some(&metric) { (contention::card(analysis, stage, workload)) }
        }
        (curves(analysis, stage))
    }
}

/// The life of the stage's snapshots.
fn curves(analysis: &Analysis, stage: Stage) -> Markup {
    let curves: Vec<svg::Curve<'_>> = analysis
        .curves
        .iter()
        .filter(|curve| curve.stage == stage && !curve.arm.contains('#'))
        .map(|curve| svg::Curve { label: &curve.arm, points: &curve.points })
        .collect();
    html! {
        @if !curves.is_empty() {
            section.card {
                h3 { "The life of a snapshot: write rate by the share of chunks that are copied" }
                figure {
                    figcaption { "median of the rounds with its 95 % interval; the last point is the second pass, with nothing left to copy" }
                    (svg::curves("snapshot life", "share of the chunks that are copied", "writes, bytes a second", &curves))
                }
            }
        }
    }
}

fn workload_card(
    analysis: &Analysis,
    stage: Stage,
    arms: &[&Arm],
    workload: &Workload,
    metric: Metric,
) -> Markup {
    let reference = reference(&analysis.run, stage).unwrap_or_default();
    let bars: Vec<svg::Bar<'_>> = arms
        .iter()
        .filter_map(|arm| {
            let series = analysis.find(stage, &arm.name, workload.name, metric)?;
            Some(svg::Bar {
                label: &arm.name,
                class: class(&arm.backend, reference),
                median: series.median?,
                interval: series.interval,
                rounds: series.values.iter().map(|(_, value)| value.value).collect(),
            })
        })
        .collect();
    // Latency and cost belong to the run, not to each of its headline metrics.
    let first = workload.headline.first() == Some(&metric);
    let latency =
        if first { latency::figures(analysis, stage, arms, workload) } else { Vec::new() };
    let (cost, per) = if first { cost(analysis, stage, arms, workload) } else { (Vec::new(), "") };
    let notes: Vec<&str> = analysis
        .notes
        .iter()
        .filter(|(of, name, _)| *of == stage && name == workload.name)
        .map(|(_, _, note)| note.as_str())
        .collect();
    let less = if metric.better() == Better::Lower { ", less is better" } else { "" };
    html! {
        section.card {
            h3 { (workload.title) ": " (metric.title()) }
            p.soft.small {
                @if let Some(floor) = analysis.floor(stage, workload.name, metric) {
                    "A/A noise floor ±" (format::digits(floor.floor * 100.0)) " %"
                    @if !floor.holds { ". The twin differs from itself: the machine was unsteady, doubt small differences" }
                    ". "
                }
                @for note in notes { (note) ". " }
            }
            div.charts {
                figure {
                    figcaption { "median of the rounds" (less) "; dots: rounds; whisker: 95 % interval" }
                    (svg::bars(workload.title, &axis(metric), metric.unit(), &bars))
                }
                @if !cost.is_empty() {
                    figure {
                        figcaption {
                            "CPU time, less is better: "
                            span.key.server {} " server " span.key.client {} " client or guest " span.key.kernel {} " kernel threads"
                        }
                        (svg::cost("CPU time", &format!("CPU seconds for a {per}"), &cost))
                    }
                }
                // Two belong beside each other.
                @if let [one] = &latency[..] { (one) }
            }
            @if latency.len() > 1 { div.charts { @for figure in &latency { (figure) } } }
            div.scroll { (workload_table(analysis, stage, arms, workload, metric, reference)) }
        }
    }
}

/// What a metric's axis measures.
fn axis(metric: Metric) -> String {
    let of = match metric.unit() {
        Unit::CpuPerMillion => " (CPU seconds for a million I/Os)",
        Unit::CpuPerGib => " (CPU seconds for a GiB)",
        _ => "",
    };
    format!("{}{of}", metric.title())
}

fn workload_table(
    analysis: &Analysis,
    stage: Stage,
    arms: &[&Arm],
    workload: &Workload,
    metric: Metric,
    reference: &str,
) -> Markup {
    let columns = table::columns(analysis, stage, workload);
    html! {
        table.sort {
            thead { tr {
                th { "backend" }
                th.n { (metric.title()) }
                th.n { "× " (reference) }
                th.n title="the interval that decides" { "95 %" }
                th { "verdict" }
                @for (title, of) in &columns { th.n title=(axis(*of)) { (title) } }
                th.n { "rounds" }
            } }
            tbody {
                @for arm in arms {
                    @if let Some(series) = analysis.find(stage, &arm.name, workload.name, metric) {
                        tr {
                            td.name title=(arm.title) { (arm.name) }
                            td.n data-v=(series.median.map_or(0.0, |median| median.value)) {
                                @if let Some(median) = series.median { (format::value(median, metric.unit())) }
                                @if steady::is_unsteady(analysis, stage, &arm.name, workload.name, metric) { ", not steady" }
                            }
                            @match analysis.row(stage, &arm.name, reference, workload.name, metric) {
                                Some(row) => {
                                    td.n { (format::ratio(row)) }
                                    td.n { (format::decision(row)) }
                                    (verdict(row))
                                }
                                None if arm.name == reference => { td.n { "1" } td.n {} td.word.soft { "reference" } }
                                None => { td.n { "–" } td.n {} td.word {} }
                            }
                            @for (_, of) in &columns {
                                td.n {
                                    @match analysis.median(stage, &arm.name, workload.name, *of) {
                                        Some(value) => (format::value(value, of.unit())),
                                        None => "–",
                                    }
                                }
                            }
                            td.n { (series.values.len()) }
                        }
                    } @else if analysis.failure(stage, &arm.name, workload.name).is_some() {
                        tr {
                            td.name title=(arm.title) { (arm.name) }
                            td.n data-v="" { "–" } td.n {} td.n {} td.word.slower { "failed: see below" }
                            @for _ in &columns { td.n {} }
                            td.n { "0" }
                        }
                    }
                }
            }
        }
    }
}

fn verdict(row: &Row) -> Markup {
    let class = match row.decision {
        Decision::Faster => "word faster",
        Decision::Slower => "word slower",
        _ => "word",
    };
    html! { td class=(class) { (format::verdict(row)) } }
}

/// The colour of a backend: the stage's reference, Ringtap, or another.
pub(super) fn class(backend: &str, reference: &str) -> &'static str {
    if backend == reference {
        "ref"
    } else if backend.starts_with("ringtap") {
        "ours"
    } else {
        "peer"
    }
}

fn cost<'a>(
    analysis: &Analysis,
    stage: Stage,
    arms: &[&'a Arm],
    workload: &Workload,
) -> (Vec<svg::Cost<'a>>, &'static str) {
    let of = |server: Metric, client: Metric, kernel: Metric| -> Vec<svg::Cost<'a>> {
        arms.iter()
            .map(|arm| {
                let value = |metric| {
                    analysis
                        .median(stage, &arm.name, workload.name, metric)
                        .map(|value| value.value)
                };
                let parts = [
                    ("server", value(server)),
                    ("client", value(client)),
                    ("kernel", value(kernel)),
                ];
                let parts =
                    parts.into_iter().filter_map(|(class, value)| Some((class, value?))).collect();
                svg::Cost { label: &arm.name, parts }
            })
            .filter(|arm| !arm.parts.is_empty())
            .collect()
    };
    let by_io = of(Metric::ServerCpu, Metric::ClientCpu, Metric::KernelCpu);
    if by_io.is_empty() {
        (of(Metric::ServerCpuGib, Metric::ClientCpuGib, Metric::KernelCpuGib), "GiB")
    } else {
        (by_io, "million I/Os")
    }
}

fn peers(analysis: &Analysis) -> Markup {
    let rows = analysis.peer_rows();
    html! {
        @if !rows.is_empty() {
            h2 { "Ringtap beside its peers on the same wire" }
            div.card { div.scroll { (comparison_table(&rows, false)) } }
        }
    }
}

/// `whole`: with the bootstrap, the method and the p-values.
fn comparison_table(rows: &[&Row], whole: bool) -> Markup {
    html! {
        table.sort {
            thead { tr {
                th { "stage" } th { "workload" } th { "metric" } th { "pair" }
                th.n { "times as good" } th.n { "95 %" } th { "verdict" } th.n { "rounds" }
                @if whole {
                    th.n { "bootstrap 95 %" } th { "95 % by" } th.n { "p, equal" } th.n { "p, further than the margin" }
                }
            } }
            tbody { @for row in rows { tr {
                td { (row.stage.name()) } td.name { (row.workload) } td.name { (row.metric.title()) }
                td.name { (row.arm) " / " (row.against) }
                td.n { (format::ratio(row)) } td.n { (format::decision(row)) }
                (verdict(row)) td.n { (row.rounds) }
                @if whole {
                    td.n { (format::interval(row.bootstrap)) }
                    td.name { @match row.interval.map(|i| i.method) {
                        Some(Method::SignedRank) => "signed ranks", Some(Method::Sign) => "signs", None => "" } }
                    td.n { (probability(row.p)) } td.n { (probability(row.same_p)) }
                }
            } } }
        }
    }
}

pub(super) fn probability(p: Option<f64>) -> String {
    p.map_or_else(String::new, |p| if p < 0.001 { "< 0.001".into() } else { format!("{p:.3}") })
}

fn troubles(analysis: &Analysis) -> Markup {
    let skipped = words::skipped(&analysis.run.skipped);
    html! {
        @if !analysis.failures.is_empty() || !analysis.run.troubles.is_empty() {
            h2 { "What failed" }
            ul {
                @for failure in &analysis.failures {
                    li {
                        b { (failure.stage.name()) " " (failure.arm) } ": " (failure.workloads.join(", ")) " (" (failure.samples) " samples)"
                        pre { (failure.error) }
                    }
                }
                @for trouble in &analysis.run.troubles { li { pre { (trouble) } } }
            }
        }
        @if !skipped.is_empty() {
            h2 { "What cannot run here" }
            div.card { div.scroll { table {
                thead { tr { th { "what" } th { "why" } th { "what would help" } } }
                tbody { @for (what, missing) in skipped { tr { td.prose { (what) } td.prose { (missing.reason) } td.prose { (missing.remedy) } } } }
            } } }
        }
    }
}

fn all_comparisons(analysis: &Analysis) -> Markup {
    let rows: Vec<&Row> = analysis.rows.iter().collect();
    html! {
        @if !rows.is_empty() {
            h2 { "Every comparison" }
            details.raw {
                summary { (rows.len()) " rows; metrics that are no headline have intervals of their own and no verdict" }
                div.scroll { (comparison_table(&rows, true)) }
            }
        }
    }
}

fn published_before() -> Markup {
    // The data is part of the program, and a test reads it.
    let all = published::all().unwrap_or_default();
    html! {
        h2 { "Published before" }
        details {
            summary { (all.len()) " comparisons of other people, without intervals; other machines, other versions: not to be compared number by number" }
            @for one in &all {
                div.card {
                    h3 { (one.title) }
                    p.soft.small { (one.setup) ". Runs: " (one.runs) "." }
                    p { (one.said) }
                    @if !one.rows.is_empty() {
                        div.scroll { table {
                            thead { tr { @for head in &one.columns { th { (head) } } } }
                            tbody { @for row in &one.rows { tr { @for cell in row { td.name { (cell) } } } } }
                        } }
                    }
                }
            }
        }
    }
}

fn method(analysis: &Analysis) -> Markup {
    let plan = &analysis.run.plan;
    html! {
        h2 { "How it was measured" }
        ul {
            li { "Rounds are blocks: every backend once in each, in a balanced order from seed " (plan.seed) ". Comparisons pair the two values of a round." }
            li { "Times as good: the ratio of medians, turned so that above 1 is better. Its bootstrap resamples whole rounds (10,000 times). The deciding interval is exact: Hodges–Lehmann by signed ranks, or by signs where the log ratios are skewed." }
            li { "The first backend of a stage runs twice under two names. Half the width of that interval is the noise floor; no claim is smaller. Equivalent means: the whole interval within the larger of 3 % and the floor, at most 10 %." }
            li { "The comparisons of a question were named before the run and are one family: differences by Westfall and Young's step-down over whole boots (or rounds), no difference by two one-sided tests with Holm's correction, each wrong in at most 5 % of runs. All other rows are exploratory." }
            li { "≥ marks a bound: bonnie++ prints +++++ where a phase took under half a second. Bounds enter no mean." }
            li { "Percentiles are shown only where at least 100 I/Os of a run lie beyond them; runs are combined by the median." }
            li { "Server CPU is user and system time of the server's processes, its io_uring workers included. Loop devices are served by kernel threads, which only the machine's CPU time has; that also has whatever else ran; the kernel counts it by ticks and without what a hypervisor stole, the others by clock. In the guest stage the client is the whole guest, seen from outside. Of two loads at once it is the cost of both, by the I/Os of both, over the time that both ran." }
            li { "fio uses io_uring and O_DIRECT on files and devices and its nbd engine on exports; vhost-user servers are driven by ringtap load, another client: compare them with each other first." }
            li { "A number is called disk speed by the ledger alone: where the device saw less than half of the bytes asked for, it is a cache's and not ranked." }
            li { "While a load by schedule runs, the lab looks every 10 ms who works and who waits; a gap over 100 ms is put down to the layer that took half of it." }
            li { (words::preconditioned(analysis)) " Writes are steady from the first five rounds in a row that lie within 20 % of their mean and along a line that moves by at most 10 % of it; where there are none the series is marked, and its rounds are shown." }
            li { "Writes are not flushed, except in the dsync test. dd's 1 GiB write includes the time to read 1 GiB of zeros." }
            li { "Everything here is made of run.json and samples.jsonl; " code { "ringtap report FOLDER" } " makes it again, with every interval and verdict." }
        }
    }
}

fn machine(analysis: &Analysis) -> Markup {
    let run = &analysis.run;
    let plan = &run.plan;
    let seconds = format!("{} s measured, {} s ramp", plan.seconds, plan.ramp);
    let mut rows: Vec<(&str, String)> = vec![
        ("began, ended", format!("{} – {}", run.began, run.ended.as_deref().unwrap_or("?"))),
        (
            "plan",
            format!(
                "{} rounds, disks of {} MiB, fio {seconds}, seed {}",
                plan.rounds,
                plan.size >> 20,
                plan.seed
            ),
        ),
        ("system", run.host.system.clone()),
        ("kernel", run.host.kernel.clone()),
        (
            "CPU",
            format!(
                "{} × {}{}",
                run.host.cpus,
                run.host.cpu,
                if run.host.virtual_machine { " (virtual machine)" } else { "" }
            ),
        ),
        ("memory", format!("{} MiB", run.host.memory >> 20)),
        ("disks", format!("{} ({})", run.host.mount, run.host.file_system)),
        ("load at the start", format!("{:.2}", run.host.load)),
    ];
    let more = run.host.state.iter().chain(&run.host.versions);
    rows.extend(more.map(|(name, value)| (name.as_str(), value.clone())));
    html! {
        h2 { "The machine and the backends" }
        div.card { div.scroll { table { tbody {
            @for (name, value) in rows { tr { th { (name) } td { (value) } } }
        } } } }
        div.card { div.scroll { table {
            thead { tr { th { "arm" } th { "what" } } }
            tbody { @for arm in &run.arms { tr {
                td.name { (arm.stage.name()) " " (arm.name) }
                td.prose {
                    (arm.title)
                    @if let Some(remark) = &arm.remark { p.soft.small { (remark) } }
                    @if let Some(command) = &arm.command { pre { (command) } }
                }
            } } }
        } } }
    }
}
