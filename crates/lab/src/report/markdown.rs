//! `report.md`: the page in Markdown, for a terminal or a repository: the answer, the claims, ways against loads, and what
//! failed. Numbers that few readers want are in `report.html`, `report.json` and `samples.csv`.

use std::fmt::Write;

use super::analysis::Analysis;
use super::page::view::{self, Cell, Per, View};
use super::page::{self, names};
use super::{contention, format, latency, steady, words};
use crate::sample::Unit;

/// The whole text.
pub fn render(analysis: &Analysis) -> String {
    let views = view::views(analysis);
    let mut text = format!("# {}\n\n{}\n\n", page::answer(analysis), page::limits(analysis));
    let _ = writeln!(text, "{}.\n", words::state_in_words(analysis));
    if let Some(words) = words::unsteady(analysis) {
        let _ = writeln!(text, "**{words}**\n");
    }
    claims(&mut text, analysis);
    for view in &views {
        stage(&mut text, analysis, view);
    }
    flushes(&mut text, analysis);
    stalls(&mut text, analysis);
    conditions(&mut text, analysis);
    failed(&mut text, analysis);
    skipped(&mut text, analysis);
    text
}

/// What was published beside what is found here.
fn claims(text: &mut String, analysis: &Analysis) {
    if page::published(analysis).next().is_some() {
        *text += "## Published claims, asked again\n\n| pair, times as good | load | published | here [95 %] | that is |\n|---|---|---|---|---|\n";
    }
    for answer in page::published(analysis) {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} |",
            page::pair(answer),
            page::what(answer),
            answer.published.as_deref().unwrap_or_default(),
            page::here(answer),
            page::outcome(answer).1
        );
    }
    for finding in &analysis.findings {
        let _ = writeln!(
            text,
            "\n**{}.** Published: {}. Here: {}",
            finding.question, finding.published, finding.sum
        );
    }
    if !analysis.findings.is_empty() {
        text.push('\n');
    }
}

/// A stage: ratios and medians of all ways, then what its loads have beside those.
fn stage(text: &mut String, analysis: &Analysis, view: &View<'_>) {
    let _ = writeln!(text, "## {}\n", names::stage(view.stage));
    let heads: Vec<&str> = view.loads.iter().map(|load| load.title.as_str()).collect();
    let rule = "---|".repeat(heads.len());
    if view.compared > 0 {
        let of = &heads[..view.compared];
        let _ = writeln!(
            text,
            "Times as good as {}, with 95 % intervals and answers:\n\n| way | {} |\n|---|{}",
            view.against,
            of.join(" | "),
            "---|".repeat(of.len())
        );
        for way in view.ways.iter().filter(|way| way.label != view.against) {
            let cells = way.cells[..view.compared].iter().map(ratio);
            let cells: Vec<String> = cells.collect();
            if cells.iter().any(|cell| !cell.is_empty()) {
                let _ = writeln!(text, "| {} | {} |", way.label, cells.join(" | "));
            }
        }
        for load in view.loads.iter().filter(|load| load.failed || load.blind) {
            let why = if load.failed { "**the control failed**" } else { "**blind here**" };
            let _ = writeln!(text, "\n{}: {why}.", load.title);
        }
    }
    let _ = writeln!(text, "\nMedians:\n\n| way | {} | CPU |\n|---|{rule}---|", heads.join(" | "));
    for way in &view.ways {
        let cells = way.cells.iter().zip(&view.loads).map(|(cell, load)| match cell {
            None => String::new(),
            Some(cell) => {
                let value = |median| format::value(median, load.metric.unit());
                let median = cell.median.map_or_else(|| "failed: see below".into(), value);
                if cell.unsteady { format!("{median}, not steady") } else { median }
            }
        });
        let cost = match (&way.cost, view.cost) {
            (Some(cost), Some((_, Per::Io))) => format!("{} µs", format::digits(cost.sum())),
            (Some(cost), Some((_, Per::Gib))) => format!("{} s", format::digits(cost.sum())),
            _ => String::new(),
        };
        let cells: Vec<String> = cells.collect();
        let _ = writeln!(text, "| {} | {} | {cost} |", way.label, cells.join(" | "));
    }
    if let Some((workload, per)) = view.cost {
        let per = if per == Per::Io { "I/O" } else { "GiB" };
        let _ =
            writeln!(text, "\nCPU: of all parts for an {per} in {}.", names::workload(workload));
    }
    text.push('\n');
    let mut told: Vec<&str> = Vec::new();
    for load in &view.loads {
        if !told.contains(&load.workload.name()) {
            told.push(load.workload.name());
            let more = latency::markdown(analysis, view.stage, load.workload)
                + &contention::markdown(&analysis.contention, view.stage, load.workload);
            if !more.is_empty() {
                let _ = writeln!(text, "### {}\n\n{more}", names::workload(load.workload));
            }
        }
    }
}

fn ratio(cell: &Option<Cell>) -> String {
    let Some(cell) = cell else { return String::new() };
    let Some(ratio) = cell.ratio else { return cell.word.text.clone() };
    let mut text = format!("{}{}", cell.bound, format::digits(ratio));
    if cell.interval.is_some() {
        text += &format!(" [{}]", format::interval(cell.interval));
    }
    if cell.from_cache.is_some() {
        text += ", from a cache";
    }
    if cell.word.text.is_empty() { text } else { format!("{text} {}", cell.word.text) }
}

fn flushes(text: &mut String, analysis: &Analysis) {
    if analysis.durability.is_empty() {
        return;
    }
    *text += "## Flushes that reach the disk\n\n";
    for (durable, words) in [(false, "**Not passed on**"), (true, "Passed on")] {
        let of = analysis.durability.iter().filter(|check| check.durable == durable);
        let list: Vec<String> = of
            .map(|check| {
                let name = names::named(&check.arm);
                format!("{name} ({}, {} per fsync)", check.stage, format::digits(check.flushes))
            })
            .collect();
        if !list.is_empty() {
            let _ = writeln!(text, "- {words}: {}.", list.join("; "));
        }
    }
    text.push('\n');
}

fn conditions(text: &mut String, analysis: &Analysis) {
    let run = &analysis.run;
    let _ = write!(
        text,
        "## Conditions\n\n{} · {}, {} CPUs · {} · disks of {} MiB on {} · seed {}.",
        run.began,
        run.host.cpu,
        run.host.cpus,
        run.host.kernel,
        run.plan.size >> 20,
        run.host.file_system,
        run.plan.seed
    );
    for (stage, _) in analysis.stages() {
        let _ = write!(text, " {}: {}.", names::stage(stage), words::stage(analysis, stage));
    }
    let _ = writeln!(text, "\n\n{}\n", words::preconditioned(analysis));
    let sentences = steady::sentences(&analysis.steadiness);
    if !sentences.is_empty() {
        let _ = writeln!(text, "{}\n", sentences.join("\n\n"));
    }
}

/// One line of Markdown: a program's words would be Markdown's.
fn line(error: &str) -> String {
    error.split_whitespace().collect::<Vec<_>>().join(" ").replace('`', "'")
}

fn failed(text: &mut String, analysis: &Analysis) {
    let troubles = &analysis.run.troubles;
    if analysis.failures.is_empty() && troubles.is_empty() {
        return;
    }
    *text += "## What failed\n\n";
    for failure in &analysis.failures {
        let workloads = failure.workloads.join(", ");
        let _ = writeln!(
            text,
            "- {} {}, {workloads} ({} samples): `{}`",
            failure.stage,
            failure.arm,
            failure.samples,
            line(&failure.error)
        );
    }
    troubles.iter().for_each(|trouble| *text += &format!("- `{}`\n", line(trouble)));
    text.push('\n');
}

fn stalls(text: &mut String, analysis: &Analysis) {
    let mut stalled = analysis.samples.iter().filter(|sample| !sample.stalls.is_empty()).peekable();
    if stalled.peek().is_none() {
        return;
    }
    *text += "## Stalls: over 100 ms without an answer\n\n| stage | way | load | round | at | lasted | what stood still |\n|---|---|---|---|---|---|---|\n";
    for (sample, stall) in stalled.flat_map(|sample| sample.stalls.iter().map(move |s| (sample, s)))
    {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} s | {} | {} |",
            sample.stage,
            names::named(&sample.arm),
            sample.workload,
            sample.round + 1,
            format::digits(stall.at),
            format::number(stall.seconds * 1e9, Unit::Nanoseconds),
            words::still(stall.layer)
        );
    }
    text.push('\n');
}

fn skipped(text: &mut String, analysis: &Analysis) {
    let skipped = words::skipped(&analysis.run.skipped);
    if !skipped.is_empty() {
        *text += "## Not run here\n\n";
        for (what, missing) in skipped {
            let _ = writeln!(
                text,
                "- {what}: {}. What would help: {}.",
                missing.reason, missing.remedy
            );
        }
    }
}
