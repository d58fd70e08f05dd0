//! The end of the page: what failed, the conditions as one footnote, and folded what few readers want.

use maud::{Markup, html};

use super::names;
use super::view::word;
use crate::report::analysis::Analysis;
use crate::report::row::Row;
use crate::report::series::Series;
use crate::report::{format, ledger, published, steady, words};
use crate::sample::{Layer, Sample, Stall, Unit};
use crate::stats::Method;
use crate::stats::steady::RANGE;

/// What failed, with the programs' own words.
pub fn troubles(analysis: &Analysis) -> Markup {
    html! {
        @if !analysis.failures.is_empty() || !analysis.run.troubles.is_empty() {
            h2 { "What failed" }
            ul {
                @for failure in &analysis.failures {
                    li {
                        b { (names::named(&failure.arm)) } " (" (failure.stage.name()) " " (failure.arm) "): " (failure.workloads.join(", ")) ", " (failure.samples) " samples"
                        pre { (failure.error) }
                    }
                }
                @for trouble in &analysis.run.troubles { li { pre { (trouble) } } }
            }
        }
    }
}

/// Under which conditions, once.
pub fn conditions(analysis: &Analysis) -> Markup {
    let run = &analysis.run;
    html! {
        footer.small id="conditions" {
            p {
                b { "Conditions. " }
                (run.host.cpu) ", " (run.host.cpus) " CPUs, " (run.host.kernel) "; disks of " (run.plan.size >> 20) " MiB on " (run.host.file_system)
                "; " (run.plan.rounds) " rounds, each way once in each, in a balanced order. "
                @for (stage, _) in analysis.stages() { (names::stage(stage)) ": " (words::stage(analysis, stage)) ". " }
                (words::preconditioned(analysis))
            }
        }
    }
}

/// All that is folded.
pub fn all(analysis: &Analysis) -> Markup {
    html! {
        div.folds {
            (comparisons(analysis))
            (bonnie(analysis))
            (steadiness(analysis))
            (flushes(analysis))
            (stalls(analysis))
            (ledger(analysis))
            (rounds(analysis))
            (skipped(analysis))
            (before())
            (method(analysis))
            (machine(analysis))
        }
    }
}

/// Every comparison that has a verdict or might have had one.
fn comparisons(analysis: &Analysis) -> Markup {
    let rows: Vec<&Row> = analysis.rows.iter().filter(|row| row.headline).collect();
    html! {
        @if !rows.is_empty() { details {
            summary { "Every comparison: " (rows.len()) " with their intervals; report.json has those of other metrics, too" }
            div.scroll { table.sort {
                thead { tr {
                    th { "stage" } th { "load" } th { "metric" } th { "pair" } th.n { "times as good" } th.n { "95 %" } th { "answer" }
                    th.n { "rounds" } th.n { "medians, bootstrap 95 %" } th { "95 % by" } th.n { "p, equal" } th.n { "p, beyond the margin" }
                } }
                tbody { @for row in rows { tr {
                    @let word = word(row);
                    td { (row.stage.name()) } td.name { (row.workload) } td.name { (row.metric.title()) } td.name { (row.arm) "/" (row.against) }
                    td.n data-v=(row.ratio.map_or_else(String::new, |r| r.to_string())) { (format::ratio(row)) } td.n { (format::decision(row)) }
                    td class=(word.class) { (word.text) }
                    td.n { (row.rounds) } td.n { (format::interval(row.bootstrap)) }
                    td { @match row.interval.map(|i| i.method) { Some(Method::SignedRank) => "ranks", Some(Method::Sign) => "signs", None => "" } }
                    td.n { (probability(row.p)) } td.n { (probability(row.same_p)) }
                } } }
            } }
        } }
    }
}

/// A p-value as it is printed.
pub fn probability(p: Option<f64>) -> String {
    p.map_or_else(String::new, |p| if p < 0.001 { "<0.001".into() } else { format!("{p:.3}") })
}

/// bonnie++'s columns, bounds too.
fn bonnie(analysis: &Analysis) -> Markup {
    html! {
        @if !analysis.columns.is_empty() { details {
            summary { "bonnie++ column by column, bounds too: Ringtap beside the best of all, cached ones too" }
            div.scroll { table.sort {
                thead { tr {
                    th { "stage" } th { "column" } th { "best" } th.n { "its median" } th.n { "Ringtap" } th.n { "by the best" } th.n { "95 %" } th { "that means" }
                } }
                tbody { @for column in &analysis.columns { tr {
                    @let unit = column.metric.unit();
                    td { (column.stage.name()) } td.name title=(column.workload) { (column.metric.title()) }
                    @match &column.best {
                        Some((name, value)) => { td.name { (names::named(name)) } td.n data-v=(value.value) { (format::value(*value, unit)) } }
                        None => { td {} td.n data-v="" { "–" } }
                    }
                    td.n data-v=(column.ours.map_or_else(String::new, |v| v.value.to_string())) { (column.ours.map_or_else(|| "–".into(), |v| format::value(v, unit))) }
                    td.n { (column.ratio.map_or_else(|| "–".into(), |r| format::digits(r.0))) }
                    td.n { (format::interval(column.ratio.and_then(|r| r.1))) }
                    td.prose { (column.words) }
                } } }
            } }
        } }
    }
}

/// Whether writes settled; the series that did not, round by round.
fn steadiness(analysis: &Analysis) -> Markup {
    let sentences = steady::sentences(&analysis.steadiness);
    html! {
        @if !sentences.is_empty() { details {
            summary { "Were the writes steady?" }
            @for sentence in sentences { p { (sentence) } }
        } }
    }
}

/// What the flushes showed.
fn flushes(analysis: &Analysis) -> Markup {
    html! {
        @if !analysis.durability.is_empty() { details {
            summary { "Does each fsync reach the disk: flushes counted below each way" }
            p { "Each way got 4 KiB writes with an fsync behind each; the flushes that reached the layer below were counted. Where they do not, an fsync that has ended may still be lost in a power cut." }
            div.scroll { table.sort {
                thead { tr { th { "stage" } th { "way" } th.n { "flushes per fsync" } th { "" } th { "counted" } } }
                tbody { @for check in &analysis.durability { tr {
                    td { (check.stage.name()) } td.name { (names::named(&check.arm)) } td.n { (format::digits(check.flushes)) }
                    @if check.durable { td.good { "passed on" } } @else { td.bad { "not passed on" } }
                    td.prose { (check.note) }
                } } }
            } }
        } }
    }
}

/// Times without an answer, and the layer that each was about.
fn stalls(analysis: &Analysis) -> Markup {
    let rows = || {
        let all = analysis.samples.iter();
        all.flat_map(|sample| sample.stalls.iter().map(move |stall| (sample, stall)))
    };
    let rows: Vec<(&Sample, &Stall)> = rows().collect();
    html! {
        @if !rows.is_empty() { details {
            summary { "Stalls: over 100 ms without an answer, " (rows.len()) " times" }
            p { "Shares are seconds a second: more than 100 % is several threads at once. The layer is the one with half of it; waiting is being ready without a processor." }
            div.scroll { table.sort {
                thead { tr {
                    th { "stage" } th { "way" } th { "load" } th.n { "round" } th.n { "at" } th.n { "lasted" } th { "what stood still" }
                    th.n { "device" } th.n { "server ran" } th.n { "server waited" } th.n { "client ran" } th.n { "client waited" }
                } }
                tbody { @for (sample, stall) in rows { tr {
                    td { (sample.stage.name()) } td.name { (names::named(&sample.arm)) } td.name { (sample.workload) } td.n data-v=(sample.round) { (sample.round + 1) }
                    td.n data-v=(stall.at) { (format::digits(stall.at)) " s" }
                    td.n data-v=(stall.seconds) { (format::number(stall.seconds * 1e9, Unit::Nanoseconds)) }
                    td.prose { (words::still(stall.layer)) }
                    @for share in [stall.device, stall.server, stall.server_waits, stall.client, stall.client_waits] {
                        td.n data-v=(share.unwrap_or(-1.0)) { (percent(share)) }
                    }
                } } }
            } }
        } }
    }
}

/// Bytes at each layer, and what was used up.
fn ledger(analysis: &Analysis) -> Markup {
    let rows: Vec<_> = analysis.ledger.iter().filter(|row| !row.arm.contains('#')).collect();
    html! {
        @if !rows.is_empty() { details {
            summary { "Ledger: MiB read and written at each layer, and what was used up; the device's traffic holds that of other programs, too" }
            div.scroll { table.sort {
                thead { tr {
                    th { "stage" } th { "load" } th { "way" } th.n { "asked" } th.n { "guest's disk" } th.n { "server" } th.n { "device" }
                    th.n { "device by asked" } th.n { "busy" } th.n { "steal" } th { "used up" }
                } }
                tbody { @for row in rows {
                    @let reach = ledger::reaches_disk(&row.ledger);
                    tr {
                        td { (row.stage.name()) } td.name { (row.workload) } td.name { (row.arm) }
                        td.n data-v=(row.ledger.program.unwrap_or(-1.0)) { (row.ledger.program.map_or_else(|| "–".into(), mebibytes)) }
                        td.n { (layer(row.ledger.disk)) }
                        td.n { (row.ledger.server.map_or_else(|| "–".into(), |m| format!("{}+{}", mebibytes(m.read), mebibytes(m.written)))) }
                        td.n { (layer(row.ledger.device)) }
                        td.n data-v=(reach.unwrap_or(-1.0)) { (reach.map_or_else(|| "–".into(), format::digits)) }
                        td.n data-v=(row.ledger.device_busy.unwrap_or(-1.0)) { (percent(row.ledger.device_busy)) }
                        td.n data-v=(row.ledger.steal.unwrap_or(-1.0)) { (percent(row.ledger.steal)) }
                        td.prose { (row.limiter) }
                    }
                } }
            } }
        } }
    }
}

fn mebibytes(count: f64) -> String {
    format::digits(count / (1 << 20) as f64)
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "–".into(), |share| format!("{:.0}%", share * 100.0))
}

fn layer(layer: Option<Layer>) -> String {
    layer.map_or_else(|| "–".into(), |l| format!("{}+{}", mebibytes(l.read), mebibytes(l.written)))
}

/// Every round of what was read off each load.
fn rounds(analysis: &Analysis) -> Markup {
    let read = |series: &&Series| {
        let known = crate::workload::find(&series.workload);
        known.is_some_and(|workload| workload.headline().contains(&series.metric))
    };
    let rows: Vec<&Series> = analysis.series.iter().filter(read).collect();
    let moved: Vec<&Sample> =
        analysis.samples.iter().filter(|s| s.movement.is_some_and(|moved| moved > RANGE)).collect();
    html! {
        details.raw {
            summary { "Raw samples: every round of " (rows.len()) " series; samples.csv and samples.jsonl have every number" }
            div.scroll { table.sort {
                thead { tr { th { "stage" } th { "load" } th { "metric" } th { "way" } th { "rounds, in their order" } } }
                tbody { @for series in rows { tr {
                    td { (series.stage.name()) } td.name { (series.workload) } td.name { (series.metric.title()) } td.name { (series.arm) }
                    td.small.prose { (values(series)) }
                } } }
            } }
            @if !analysis.notes.is_empty() { ul {
                @for (stage, workload, note) in &analysis.notes { li.small { (stage.name()) " " (workload) ": " (note) } }
            } }
            @if !moved.is_empty() { ul {
                @for sample in moved { li.small { (sample.workload) ", " (sample.arm) ", round " (sample.round + 1) ": not steady: its rate moved by " (percent(sample.movement)) " within the run" } }
            } }
        }
    }
}

fn values(series: &Series) -> String {
    let mut values = series.values.clone();
    values.sort_by_key(|(round, _)| *round);
    let unit = series.metric.unit();
    values
        .iter()
        .map(|(_, v)| format::value(*v, unit).replace(' ', "\u{202f}"))
        .collect::<Vec<_>>()
        .join(", ")
}

/// What was not run, and what would help.
fn skipped(analysis: &Analysis) -> Markup {
    let skipped = words::skipped(&analysis.run.skipped);
    html! {
        @if !skipped.is_empty() { details {
            summary { "What cannot run here, and what would help" }
            div.scroll { table {
                thead { tr { th { "what" } th { "why" } th { "what would help" } } }
                tbody { @for (what, missing) in skipped { tr { td.prose { (what) } td.prose { (missing.reason) } td.prose { (missing.remedy) } } } }
            } }
        } }
    }
}

/// What others have published.
fn before() -> Markup {
    // The data is part of the program, and a test reads it.
    let all = published::all().unwrap_or_default();
    html! {
        details {
            summary { "Published before: " (all.len()) " comparisons of other people; other machines, other versions: not to be compared number by number" }
            @for one in &all {
                h3 { (one.title) }
                p.soft.small { (one.setup) ". Runs: " (one.runs) "." }
                p { (one.said) }
                @if !one.rows.is_empty() { div.scroll { table {
                    thead { tr { @for head in &one.columns { th { (head) } } } }
                    tbody { @for row in &one.rows { tr { @for cell in row { td.name { (cell) } } } } }
                } } }
            }
        }
    }
}

fn method(analysis: &Analysis) -> Markup {
    let plan = &analysis.run.plan;
    html! {
        details {
            summary { "How it was measured" }
            ul {
                li { "Rounds are blocks: every way once in each, in a balanced order from seed " (plan.seed) ". Comparisons pair the two values of a round." }
                li { "Times as good: the centre of the deciding interval, turned so that above 1 is better. That interval is exact: Hodges–Lehmann by signed ranks, or by signs where the log ratios are skewed. Under six rounds it is the quotient of the medians, of which the bootstrap, by whole rounds, is the interval everywhere." }
                li { "The first way of a stage runs twice under two names (A/A): no claim is smaller than what those two differ by, and where they differ by more than chance the load has no answer. Where Ringtap with 20 % more time in the server is not told from Ringtap as it is, the load is blind: nothing is called no different there; what is seen to differ still does." }
                li { "The comparisons of a question were named before the run and are one family: differences by Westfall and Young's step-down over whole boots (or rounds), no difference by two one-sided tests with Holm's correction, each wrong in at most 5 % of runs. All other rows are exploratory." }
                li { "≥ marks a bound: bonnie++ prints +++++ where a phase took under half a second. Bounds enter no mean." }
                li { "Percentiles are shown only where at least 100 I/Os of a run lie beyond them; runs are combined by the median." }
                li { "CPU of the server is user and system time of its processes, io_uring workers included. Loop devices are served by kernel threads. In a guest the client is the whole guest, seen from outside. Of two loads at once it is the cost of both by the I/Os of both." }
                li { "fio uses io_uring and O_DIRECT on files and devices and its nbd engine on exports; vhost-user servers are driven on the host by ringtap-lab load, another client: compare them with each other first." }
                li { "Where the device saw less than half of the bytes asked for, a cache was measured, and the number is not ranked." }
                li { "Writes are steady from the first five rounds in a row that lie within 20 % of their mean and along a line that moves by at most 10 % of it." }
                li { "Everything here is made of run.json and samples.jsonl; " code { "ringtap report FOLDER" } " makes it again." }
            }
        }
    }
}

fn machine(analysis: &Analysis) -> Markup {
    let run = &analysis.run;
    let plan = &run.plan;
    let virtual_machine = if run.host.virtual_machine { " (virtual machine)" } else { "" };
    let mut rows: Vec<(&str, String)> = vec![
        ("began, ended", format!("{} – {}", run.began, run.ended.as_deref().unwrap_or("?"))),
        ("fio", format!("{} s measured, {} s ramp", plan.seconds, plan.ramp)),
        ("system", run.host.system.clone()),
        ("CPU", format!("{} × {}{virtual_machine}", run.host.cpus, run.host.cpu)),
        ("memory", format!("{} MiB", run.host.memory >> 20)),
        ("disks", format!("{} ({})", run.host.mount, run.host.file_system)),
        ("load at the start", format!("{:.2}", run.host.load)),
    ];
    let more = run.host.state.iter().chain(&run.host.versions);
    rows.extend(more.map(|(name, value)| (name.as_str(), value.clone())));
    html! {
        details {
            summary { "The machine, and the command line of each way" }
            div.scroll { table { tbody {
                @for (name, value) in rows { tr { th { (name) } td.prose { (value) } } }
            } } }
            div.scroll { table {
                thead { tr { th { "way" } th { "what" } } }
                tbody { @for arm in run.arms.iter().filter(|arm| arm.name == arm.backend) { tr {
                    td.name { (arm.stage.name()) " " (arm.name) }
                    td.prose {
                        (arm.title)
                        @if let Some(remark) = &arm.remark { p.soft.small { (remark) } }
                        @if let Some(command) = &arm.command { pre { (command) } }
                    }
                } } }
            } }
        }
    }
}
