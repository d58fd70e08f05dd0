//! What a report leaves beside `report.html`: `report.md`, `samples.csv`, `report.json`.

use std::fmt::Write;
use std::path::Path;

use super::analysis::{Analysis, reference};
use super::{contention, format, latency, ranking, state_in_words, steady, words};
use crate::error::{Error, Result};
use crate::run::folder::replace;
use crate::sample::Unit;

/// Writes all of them.
pub fn write(run: &Path, analysis: &Analysis) -> Result<()> {
    replace(&run.join("report.md"), &markdown(analysis))?;
    replace(&run.join("samples.csv"), &csv(analysis))?;
    let json = serde_json::to_string_pretty(analysis).map_err(|e| Error::Plan(e.to_string()))?;
    replace(&run.join("report.json"), &(json + "\n"))
}

/// The answers and the tables in Markdown.
pub fn markdown(analysis: &Analysis) -> String {
    let run = &analysis.run;
    let mut text = String::from("# Ways of serving a disk, side by side\n\n");
    let _ = writeln!(
        text,
        "{} · {}, {} CPUs · {} · disks on {} · {} · seed {}\n",
        run.began,
        run.host.cpu,
        run.host.cpus,
        run.host.kernel,
        run.host.file_system,
        state_in_words(analysis),
        run.plan.seed
    );
    if let Some(words) = words::unsteady(analysis) {
        let _ = writeln!(text, "**{words}**\n");
    }
    if !analysis.findings.is_empty() {
        text += "## Published findings, asked again\n\n";
    }
    for finding in &analysis.findings {
        let _ = writeln!(
            text,
            "### {}\n\nPublished: {}.\n\n**Here: {}**\n",
            finding.question, finding.published, finding.sum
        );
        finding.lines.iter().for_each(|line| text += &format!("- {line}\n"));
        for told in &finding.tables {
            let _ = writeln!(
                text,
                "\n{}; medians (95 %):\n\n| {} |",
                told.title,
                told.heads.join(" | ")
            );
            let _ = writeln!(text, "|{}", "---|".repeat(told.heads.len()));
            told.rows.iter().for_each(|row| text += &format!("| {} |\n", row.join(" | ")));
        }
        let _ = writeln!(text, "\nConditions: {}.\n", finding.conditions);
    }
    if !analysis.columns.is_empty() {
        text += "### bonnie++ column by column\n\n| stage | workload | column | best | its median | ringtap-vhost | by the best | 95 % | that means |\n|---|---|---|---|---|---|---|---|---|\n";
    }
    for column in &analysis.columns {
        let unit = column.metric.unit();
        let value = |value| format::value(value, unit);
        let (best, median) =
            column.best.clone().map_or_else(Default::default, |(n, v)| (n, value(v)));
        let _ = writeln!(
            text,
            "| {} | {} | {} | {best} | {median} | {} | {} | {} | {} |",
            column.stage,
            column.workload,
            column.metric.title(),
            column.ours.map_or_else(String::new, value),
            column.ratio.map_or_else(String::new, |r| format::digits(r.0)),
            format::interval(column.ratio.and_then(|r| r.1)),
            column.words
        );
    }
    if !analysis.columns.is_empty() {
        text.push('\n');
    }
    let answers = ranking::answers(analysis);
    for (stage, lines) in &answers {
        let _ = writeln!(
            text,
            "## {stage}: which one for which load\n\n{}.\n",
            words::stage(analysis, *stage)
        );
        for line in lines {
            let _ = writeln!(text, "- {line}");
        }
        text.push('\n');
    }
    for (stage, arms) in analysis.stages() {
        if !answers.iter().any(|(of, _)| *of == stage) {
            let _ = writeln!(text, "## {stage}\n\n{}.\n", words::stage(analysis, stage));
        }
        let name = reference(run, stage).unwrap_or_default();
        for (workload, metric) in analysis.headlines(stage) {
            let _ = writeln!(text, "### {stage}: {}, {}\n", workload.title, metric.title());
            let _ = writeln!(
                text,
                "| backend | {} | × {name} | 95 % | verdict |\n|---|---|---|---|---|",
                metric.title()
            );
            for arm in &arms {
                let Some(median) = analysis.median(stage, &arm.name, workload.name, metric) else {
                    if analysis.failure(stage, &arm.name, workload.name).is_some() {
                        let _ = writeln!(text, "| {} | – | | | failed: see below |", arm.name);
                    }
                    continue;
                };
                let row = analysis.row(stage, &arm.name, name, workload.name, metric);
                let _ = writeln!(
                    text,
                    "| {} | {}{} | {} | {} | {} |",
                    arm.name,
                    format::value(median, metric.unit()),
                    if steady::is_unsteady(analysis, stage, &arm.name, workload.name, metric) {
                        ", not steady"
                    } else {
                        ""
                    },
                    row.map_or_else(
                        || if arm.name == name { "1".into() } else { "–".into() },
                        format::ratio
                    ),
                    row.map_or_else(String::new, format::decision),
                    row.map_or_else(String::new, format::verdict),
                );
            }
            text.push('\n');
            if workload.headline.last() == Some(&metric) {
                text += &latency::markdown(analysis, stage, workload);
                text += &contention::markdown(analysis, stage, workload);
            }
        }
    }
    let sentences = steady::sentences(analysis);
    if !sentences.is_empty() {
        let _ = writeln!(text, "## Were the writes steady?\n\n{}\n", sentences.join("\n\n"));
    }
    let _ = writeln!(text, "## Disks\n\n{}\n", words::preconditioned(analysis));
    if !analysis.durability.is_empty() {
        text += "## Flushes that reach the disk\n\n| stage | backend | flushes per fsync | |\n|---|---|---|---|\n";
        for check in &analysis.durability {
            let verdict = if check.durable { "passed on" } else { "**not passed on**" };
            let _ = writeln!(
                text,
                "| {} | {} | {} | {verdict} |",
                check.stage,
                check.arm,
                format::digits(check.flushes)
            );
        }
        text.push('\n');
    }
    stalls(&mut text, analysis);
    failed(&mut text, analysis);
    let skipped = words::skipped(&run.skipped);
    if !skipped.is_empty() {
        text += "## Not run here\n\n";
        for (what, missing) in skipped {
            let _ = writeln!(
                text,
                "- {what}: {}. What would help: {}.",
                missing.reason, missing.remedy
            );
        }
    }
    text
}

fn failed(text: &mut String, analysis: &Analysis) {
    let troubles = &analysis.run.troubles;
    if analysis.failures.is_empty() && troubles.is_empty() {
        return;
    }
    *text += "## What failed\n\n";
    // One line each: a program's words would be Markdown's.
    let line =
        |error: &str| error.split_whitespace().collect::<Vec<_>>().join(" ").replace('`', "'");
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
    *text += "## Stalls: over 100 ms without an answer\n\n| stage | backend | workload | round | at | lasted | what stood still |\n|---|---|---|---|---|---|---|\n";
    for (sample, stall) in stalled.flat_map(|sample| sample.stalls.iter().map(move |s| (sample, s)))
    {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} s | {} | {} |",
            sample.stage,
            sample.arm,
            sample.workload,
            sample.round + 1,
            format::digits(stall.at),
            format::number(stall.seconds * 1e9, Unit::Nanoseconds),
            words::still(stall.layer)
        );
    }
    text.push('\n');
}

/// Every number of every sample, a line each.
pub fn csv(analysis: &Analysis) -> String {
    let mut text = String::from(
        "round,position,stage,backend,workload,began_ms,seconds,metric,unit,value,bound\n",
    );
    for sample in &analysis.samples {
        for (metric, value) in &sample.metrics {
            let name = serde_json::to_value(metric).ok();
            let name = name.as_ref().and_then(|name| name.as_str()).unwrap_or_default();
            let _ = writeln!(
                text,
                "{},{},{},{},{},{},{},{name},{:?},{},{}",
                sample.round,
                sample.position,
                sample.stage,
                quoted(&sample.arm),
                quoted(&sample.workload),
                sample.began_ms,
                sample.seconds,
                metric.unit(),
                value.value,
                if value.at_least { "at_least" } else { "" }
            );
        }
    }
    text
}

fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}
