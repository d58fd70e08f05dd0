//! What others have published, asked again of this run: each claim with what was measured here, its interval and its
//! conditions, whichever way it came out.

use super::analysis::Analysis;
use super::claims::{Claim, Published, QUESTIONS, Question, Shared, Told};
use super::finding::{Answer, Finding, Outcome, Table};
use super::format::rounds;
use super::medians::with_ends;
use super::ranking::{self, Group};
use super::row::Row;
use super::series::Series;
use super::{answer, caches, format, words};
use crate::sample::{Metric, Stage};
use crate::stats::{Decision, FEWEST_ROUNDS, Why};
use crate::workload;

/// A ratio is as published where its interval meets the published range, or its centre lies within this factor of it.
const NEAR: f64 = 1.5;
/// The arms that are Ringtap's, for what Ringtap makes of a claim: the one that stands where the published arm stood.
const OURS: &str = "ringtap-vhost";

/// The published findings that this run has something to say about.
pub fn findings(analysis: &Analysis) -> Vec<Finding> {
    QUESTIONS.iter().filter_map(|question| finding(analysis, question)).collect()
}

fn finding(analysis: &Analysis, question: &Question) -> Option<Finding> {
    let (mut lines, mut tables) = (Vec::new(), Vec::new());
    let mut stages: Vec<Stage> = Vec::new();
    let mut answers: Vec<Answer> = Vec::new();
    for told in question.told {
        for &stage in told.stages {
            if let Some(table) = tell(analysis, stage, told) {
                note(&mut stages, stage);
                tables.push(table);
            }
        }
    }
    for shared in question.shared {
        let Some((line, answer)) = share(analysis, shared) else { continue };
        note(&mut stages, shared.stage);
        lines.push(line);
        answers.push(answer);
    }
    for claim in question.claims {
        for &stage in claim.stages {
            for &metric in claim.metrics {
                let Some((line, answer)) = compare(analysis, stage, claim, metric) else {
                    continue;
                };
                note(&mut stages, stage);
                lines.push(line);
                answers.push(answer);
            }
        }
    }
    if question.name == "emulation" {
        tables.extend(caches::table(analysis));
    }
    if lines.is_empty() && tables.is_empty() {
        return None;
    }
    // What nobody published can neither hold nor not.
    let outcomes: Vec<Outcome> = answers.iter().filter_map(|answer| answer.outcome).collect();
    if outcomes.is_empty() && answer::is_asked(analysis) {
        return None;
    }
    let sum = sum(analysis, &outcomes);
    let plan = &analysis.run.plan;
    let stages: Vec<String> =
        stages.iter().map(|stage| format!("{stage}: {}", words::stage(analysis, *stage))).collect();
    let conditions = format!(
        "{}, disks of {} MiB on {}; {}",
        rounds(plan.rounds as usize),
        plan.size >> 20,
        analysis.run.host.file_system,
        stages.join("; ")
    );
    let Question { question, published, .. } = *question;
    Some(Finding { question, published, tables, lines, answers, sum, conditions })
}

fn sum(analysis: &Analysis, outcomes: &[Outcome]) -> String {
    if outcomes.is_empty() {
        return "No published direction to hold against it.".into();
    }
    if analysis.only_points() {
        return format!("Under {FEWEST_ROUNDS} rounds there are points and no answer.");
    }
    let all = [
        Outcome::Held,
        Outcome::OtherSize,
        Outcome::Reversed,
        Outcome::Differs,
        Outcome::NoDifference,
        Outcome::Blind,
        Outcome::Open,
        Outcome::NotComparable,
    ];
    let parts: Vec<String> = all
        .iter()
        .map(|kind| (kind, outcomes.iter().filter(|outcome| *outcome == kind).count()))
        .filter(|(_, count)| *count > 0)
        .map(|(kind, count)| format!("{} in {count}", kind.title()))
        .collect();
    match outcomes.len() {
        1 => format!("In the one comparison: {}.", outcomes[0].title()),
        count => format!("Of {count} comparisons: {}.", parts.join(", ")),
    }
}

fn note(stages: &mut Vec<Stage>, stage: Stage) {
    if !stages.contains(&stage) {
        stages.push(stage);
    }
}

/// What each arm of a stage did by itself, with the interval of its median.
fn tell(analysis: &Analysis, stage: Stage, told: &Told) -> Option<Table> {
    let ran = |metric: &&Metric| {
        let of =
            |s: &Series| s.stage == stage && s.workload == told.workload && s.metric == **metric;
        analysis.series.iter().any(of)
    };
    let metrics: Vec<Metric> = told.metrics.iter().filter(ran).copied().collect();
    let arms = analysis.run.arms.iter().filter(|arm| arm.stage == stage && !ranking::is_twin(arm));
    let rows: Vec<Vec<String>> = arms
        .filter(|arm| {
            let has =
                |metric: &Metric| analysis.find(stage, &arm.name, told.workload, *metric).is_some();
            metrics.iter().any(has)
        })
        .map(|arm| {
            let cell =
                |metric: &Metric| with_ends(analysis, stage, &arm.name, told.workload, *metric);
            let values = metrics.iter().map(|metric| cell(metric).unwrap_or_else(|| "–".into()));
            std::iter::once(name(analysis, stage, &arm.name)).chain(values).collect()
        })
        .collect();
    let title = workload::find(told.workload).map_or(told.workload, |workload| workload.title());
    let quiet = told.workload.starts_with("quiet");
    let head = |metric: &Metric| match metric {
        Metric::Keeps if !quiet => "the first keeps of what it has alone",
        Metric::P99Factor if !quiet => "the first's p99 beside / alone",
        Metric::SecondKeeps if quiet => "the loud one keeps",
        Metric::P99Factor => "the quiet one's p99 beside / alone",
        Metric::SecondP99Factor if quiet => "the loud one's p99 beside / alone",
        metric => metric.title(),
    };
    (!rows.is_empty()).then(|| Table {
        title: format!("{stage}: {title}"),
        heads: std::iter::once("backend").chain(metrics.iter().map(head)).collect(),
        rows,
    })
}

/// What one of two equal loads keeps of what it has alone.
fn share(analysis: &Analysis, shared: &Shared) -> Option<(String, Answer)> {
    let Shared { stage, arm, workload, metric, published: (from, to) } = *shared;
    let series = analysis.find(stage, arm, workload, metric)?;
    let outcome = match analysis.beside_one(stage, arm, workload, metric)? {
        Decision::Faster => Outcome::Reversed,
        Decision::Slower => size(series.median?.value, series.interval, from, to),
        Decision::NoDifference { .. } => Outcome::NoDifference,
        other => undecided(other),
    };
    let keeps = with_ends(analysis, stage, arm, workload, metric)?;
    let titled = name(analysis, stage, arm);
    let count = rounds(series.values.len());
    let line = format!(
        "Two loads on {titled} ({stage}): {}: {keeps} of what it has alone, {count}; published: {:.0}–{:.0} %: {}.",
        if metric == Metric::Keeps { "writes, one keeps" } else { metric.title() },
        from * 100.0,
        to * 100.0,
        outcome.title()
    );
    let answer = Answer {
        stage,
        arm: arm.into(),
        against: None,
        workload,
        metric,
        published: Some(format!("{from:.2}–{to:.2}")),
        ratio: series.median.map(|median| median.value),
        bound: None,
        interval: series.interval,
        rounds: series.values.len(),
        answer: None,
        outcome: Some(outcome),
        ringtap: None,
    };
    Some((line, answer))
}

/// Whether a difference is about as large as published.
fn size(ratio: f64, ends: Option<(f64, f64)>, from: f64, to: f64) -> Outcome {
    let meets = ends.is_some_and(|(low, high)| low <= to && high >= from);
    let near = ratio >= from / NEAR && ratio <= to * NEAR;
    if meets || near { Outcome::Held } else { Outcome::OtherSize }
}

/// What became of a claim, by the answer to the same pair.
fn outcome(row: &Row, published: Published) -> Option<Outcome> {
    let worse = match published {
        Published::Nothing => return None,
        Published::Ratio(_, to) => to < 1.0,
        Published::Equal(_) => {
            return Some(match row.decision {
                Decision::Faster | Decision::Slower => Outcome::Differs,
                Decision::NoDifference { .. } => Outcome::Held,
                other => undecided(other),
            });
        }
        Published::AtMost(_) => true,
        Published::Direction { worse } => worse,
    };
    Some(match row.decision {
        Decision::Faster | Decision::Slower if (row.decision == Decision::Slower) != worse => {
            Outcome::Reversed
        }
        Decision::Faster | Decision::Slower => {
            let (ratio, ends) = (row.ratio?, row.interval.map(|i| (i.low, i.high)));
            match published {
                Published::Ratio(from, to) => size(ratio, ends, from, to),
                Published::AtMost(most) => size(ratio, ends, 0.0, most),
                Published::Direction { .. } | Published::Equal(_) | Published::Nothing => {
                    Outcome::Held
                }
            }
        }
        Decision::NoDifference { .. } => Outcome::NoDifference,
        other => undecided(other),
    })
}

/// What becomes of a claim whose pair has no answer today.
fn undecided(decision: Decision) -> Outcome {
    match decision {
        Decision::Withheld { why: Why::Blind } => Outcome::Blind,
        Decision::Open { .. } | Decision::Withheld { why: Why::TooFew } => Outcome::Open,
        _ => Outcome::NotComparable,
    }
}

/// What was published, as times as good.
fn in_words(published: Published) -> Option<String> {
    Some(match published {
        Published::Nothing => return None,
        Published::Ratio(from, to) if from == to => format::digits(from),
        Published::Ratio(from, to) => format!("{}–{}", format::digits(from), format::digits(to)),
        Published::Equal(ratio) => format::digits(ratio),
        Published::AtMost(most) => format!("≤ {}", format::digits(most)),
        Published::Direction { worse: true } => "worse, charts only".into(),
        Published::Direction { worse: false } => "better, charts only".into(),
    })
}

/// A claim in a sentence, and as numbers with what became of it.
fn compare(
    analysis: &Analysis,
    stage: Stage,
    claim: &Claim,
    metric: Metric,
) -> Option<(String, Answer)> {
    let row = analysis.answer(stage, claim.arm, claim.against, claim.workload, metric)?;
    let title = workload::find(claim.workload).map_or(claim.workload, |workload| workload.title());
    let value = |value: Option<crate::sample::Value>| {
        value.map_or_else(|| "?".into(), |value| format::value(value, metric.unit()))
    };
    let ends = match row.interval {
        Some(_) => format!("95 %: {}, {}", format::decision(&row), rounds(row.rounds)),
        None => rounds(row.rounds),
    };
    let words = format::verdict(&row);
    let (published, outcome) = (in_words(claim.published), outcome(&row, claim.published));
    let before = match (&published, outcome) {
        (Some(published), Some(outcome)) => {
            format!("; published: {published}: {}", outcome.title())
        }
        _ => String::new(),
    };
    let line = format!(
        "{title}, {} ({stage}): {} {} against {} {}: {} times as good ({ends}): {words}{before}.",
        metric.title(),
        name(analysis, stage, claim.arm),
        value(row.ours),
        name(analysis, stage, claim.against),
        value(row.theirs),
        format::ratio(&row),
    );
    let ringtap = (claim.arm != OURS && claim.against != OURS)
        .then(|| analysis.answer(stage, OURS, claim.against, claim.workload, metric))
        .flatten()
        .map(|ours| {
            let answer = format::verdict(&ours);
            format!("{} [{}], {answer}", format::ratio(&ours), format::decision(&ours))
        });
    let answer = Answer {
        stage,
        arm: claim.arm.into(),
        against: Some(claim.against.into()),
        workload: claim.workload,
        metric,
        published,
        ratio: row.ratio,
        bound: row.bound,
        interval: row.interval.map(|i| (i.low, i.high)),
        rounds: row.rounds,
        answer: Some(words),
        outcome,
        ringtap,
    };
    Some((line, answer))
}

/// An arm's name, with why it is ranked with no other.
fn name(analysis: &Analysis, stage: Stage, arm: &str) -> String {
    let known = analysis.run.arms.iter().find(|a| a.stage == stage && a.name == arm);
    match known.map(|arm| ranking::group(analysis, arm)) {
        Some(Group::Cached) => format!("{arm} (through a page cache)"),
        Some(Group::Lies) => format!("{arm} (which does not flush)"),
        _ => arm.to_owned(),
    }
}
