//! The table on the terminal.

use std::fmt::Write;

use comfy_table::{
    Attribute, Cell, CellAlignment, Color, ContentArrangement, Table, TableComponent, presets,
};

use super::analysis::{Analysis, reference};
use super::words::state_in_words;
use super::{format, steady, words};
use crate::sample::{Metric, Stage};
use crate::stats::{Decision, FEWEST_ROUNDS};
use crate::workload::Workload;

/// The whole table as text; `colour` for a terminal that shows it.
pub fn render(analysis: &Analysis, colour: bool, width: Option<u16>) -> String {
    let mut text = String::new();
    let run = &analysis.run;
    let _ = writeln!(
        text,
        "{} · {} · disks on {}",
        run.host.cpu, run.host.kernel, run.host.file_system
    );
    let _ = writeln!(text, "{}", state_in_words(analysis));
    for finding in &analysis.findings {
        let _ = writeln!(text, "\n{}: {}", finding.question, finding.sum);
    }
    for (stage, arms) in analysis.stages() {
        let reference = reference(run, stage).unwrap_or_default();
        for (workload, metric) in analysis.headlines(stage) {
            let _ = writeln!(text, "\n{}", heading(analysis, stage, workload, metric));
            let mut table = table(colour, width);
            let columns = columns(analysis, stage, workload);
            let mut header = vec![
                "backend".to_owned(),
                metric.title().to_owned(),
                format!("× {reference}"),
                "95 %".into(),
            ];
            header.push("verdict".into());
            header.extend(columns.iter().map(|(title, _)| (*title).to_owned()));
            table.set_header(
                header.iter().map(|title| Cell::new(title).add_attribute(Attribute::Bold)),
            );
            for arm in &arms {
                let Some(series) = analysis.find(stage, &arm.name, workload.name(), metric) else {
                    if analysis.failure(stage, &arm.name, workload.name()).is_some() {
                        let cells = [arm.name.as_str(), "–", "", "", "failed: see below"];
                        table.add_row(cells.map(Cell::new));
                    }
                    continue;
                };
                let row = analysis.row(stage, &arm.name, reference, workload.name(), metric);
                let median = series
                    .median
                    .map_or_else(String::new, |median| format::value(median, metric.unit()));
                let moving = steady::is_unsteady(
                    &analysis.steadiness,
                    stage,
                    &arm.name,
                    workload.name(),
                    metric,
                );
                let median = if moving { format!("{median}, not steady") } else { median };
                let mut cells = vec![Cell::new(&arm.name), right(median)];
                match row {
                    Some(row) => {
                        cells.extend([right(format::ratio(row)), right(format::decision(row))]);
                        cells.push(verdict_cell(row.decision, &format::verdict(row)));
                    }
                    None if arm.name == reference => {
                        cells.extend([right("1".into()), Cell::new(""), Cell::new("reference")]);
                    }
                    None => cells.extend([right("–".into()), Cell::new(""), Cell::new("")]),
                }
                for (_, of) in &columns {
                    let value = analysis.median(stage, &arm.name, workload.name(), *of);
                    cells.push(right(
                        value.map_or_else(|| "–".into(), |value| format::value(value, of.unit())),
                    ));
                }
                table.add_row(cells);
            }
            let _ = writeln!(text, "{table}");
        }
    }
    peers(&mut text, analysis, colour, width);
    lies(&mut text, analysis);
    for sentence in steady::sentences(&analysis.steadiness) {
        let _ = writeln!(text, "\n{sentence}");
    }
    trouble(&mut text, analysis);
    text
}

fn heading(analysis: &Analysis, stage: Stage, workload: &dyn Workload, metric: Metric) -> String {
    let floor = match analysis.floor(stage, workload.name(), metric) {
        Some(floor) => {
            let doubt = if floor.holds {
                ""
            } else {
                " — the A/A control failed: no answers for this load"
            };
            format!("; A/A noise floor ±{} %{doubt}", format::digits(floor.floor * 100.0))
        }
        None => String::new(),
    };
    // Said once for a workload with several headline metrics.
    let first = workload.headline().first() == Some(&metric);
    let of_this =
        |(of, name, _): &&(Stage, String, String)| *of == stage && name == workload.name();
    let note = analysis.notes.iter().find(of_this).filter(|_| first);
    let note = note.map_or_else(String::new, |(_, _, note)| format!("\n  {note}"));
    format!("{stage}: {}, {}{floor}{note}", workload.title(), metric.title())
}

/// Latency and cost columns that some arm of this workload has.
pub fn columns(
    analysis: &Analysis,
    stage: Stage,
    workload: &dyn Workload,
) -> Vec<(&'static str, Metric)> {
    [
        ("p50", Metric::P50),
        ("p99", Metric::P99),
        ("p99.9", Metric::P999),
        ("p99 × alone", Metric::P99Factor),
        ("second keeps", Metric::SecondKeeps),
        ("second's p99", Metric::SecondP99),
        ("second's p99 × alone", Metric::SecondP99Factor),
        ("server CPU/M", Metric::ServerCpu),
        ("client CPU/M", Metric::ClientCpu),
        ("kernel CPU/M", Metric::KernelCpu),
        ("path CPU/M", Metric::PathCpu),
        ("machine CPU/M", Metric::MachineCpu),
        ("server CPU/GiB", Metric::ServerCpuGib),
        ("client CPU/GiB", Metric::ClientCpuGib),
        ("kernel CPU/GiB", Metric::KernelCpuGib),
        ("path CPU/GiB", Metric::PathCpuGib),
        ("machine CPU/GiB", Metric::MachineCpuGib),
    ]
    .into_iter()
    .filter(|(_, metric)| {
        analysis
            .series
            .iter()
            .any(|s| s.stage == stage && s.workload == workload.name() && s.metric == *metric)
    })
    .collect()
}

fn peers(text: &mut String, analysis: &Analysis, colour: bool, width: Option<u16>) {
    let rows = analysis.peer_rows();
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(text, "\nRingtap beside its peers on the same transport");
    let mut table = table(colour, width);
    let header = ["stage", "workload", "metric", "pair", "times as good", "95 %", "verdict"];
    table.set_header(header.map(|title| Cell::new(title).add_attribute(Attribute::Bold)));
    for row in rows {
        table.add_row(vec![
            Cell::new(row.stage.name()),
            Cell::new(&row.workload),
            Cell::new(row.metric.title()),
            Cell::new(format!("{} / {}", row.arm, row.against)),
            right(format::ratio(row)),
            right(format::decision(row)),
            verdict_cell(row.decision, &format::verdict(row)),
        ]);
    }
    let _ = writeln!(text, "{table}");
}

fn lies(text: &mut String, analysis: &Analysis) {
    if analysis.durability.is_empty() {
        return;
    }
    let name = |check: &super::durability::Durability| {
        format!(
            "{} {} ({} flushes per fsync)",
            check.stage,
            check.arm,
            format::digits(check.flushes)
        )
    };
    let list = |durable: bool| -> Vec<String> {
        analysis.durability.iter().filter(|check| check.durable == durable).map(name).collect()
    };
    let (lying, honest) = (list(false), list(true));
    let _ = writeln!(text, "\nFlushes that reach the disk");
    if !lying.is_empty() {
        let _ =
            writeln!(text, "  HOSTS LIE, fsync is not passed on, not ranked: {}", lying.join(", "));
    }
    if !honest.is_empty() {
        let _ = writeln!(text, "  passed on: {}", honest.join(", "));
    }
}

fn trouble(text: &mut String, analysis: &Analysis) {
    if analysis.only_points() {
        let _ = writeln!(
            text,
            "\nUnder {FEWEST_ROUNDS} rounds: points only, no intervals and no verdicts."
        );
    }
    if !analysis.failures.is_empty() || !analysis.run.troubles.is_empty() {
        let _ = writeln!(text, "\nFailed:");
    }
    for failure in &analysis.failures {
        let samples =
            if failure.samples == 1 { "1 sample" } else { &format!("{} samples", failure.samples) };
        let workloads = failure.workloads.join(", ");
        let error = short(&failure.error);
        let _ =
            writeln!(text, "  {} {}, {workloads} ({samples}): {error}", failure.stage, failure.arm);
    }
    for trouble in &analysis.run.troubles {
        let _ = writeln!(text, "  {}", short(trouble));
    }
    let skipped = words::skipped(&analysis.run.skipped);
    if !skipped.is_empty() {
        let _ = writeln!(text, "\nNot run here:");
    }
    for (what, missing) in skipped {
        let _ =
            writeln!(text, "  {what}: {}. What would help: {}.", missing.reason, missing.remedy);
    }
}

/// The first lines of an error; report.html has all of it.
fn short(error: &str) -> String {
    let mut lines = error.lines();
    let first: Vec<&str> = lines.by_ref().take(3).collect();
    let more = if lines.next().is_some() { " …" } else { "" };
    format!("{}{more}", first.join("\n    "))
}

fn table(colour: bool, width: Option<u16>) -> Table {
    let mut table = Table::new();
    // Columns by space, one line below the header.
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_style(TableComponent::HeaderLines, '─');
    if let Some(width) = width {
        table.set_width(width);
    }
    if colour {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    table
}

fn right(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

fn verdict_cell(decision: Decision, text: &str) -> Cell {
    match decision {
        Decision::Faster => Cell::new(text).fg(Color::Green),
        Decision::Slower => Cell::new(text).fg(Color::Red),
        _ => Cell::new(text),
    }
}
