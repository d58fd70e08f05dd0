//! `report --fail-if-worse`: whether a change is bad enough to stop a build.

use serde::Serialize;

use super::analysis::Failure;
use super::change::{Change, Comparison, Only};
use super::format;
use super::limit::Limit;

/// What a limit found in a comparison of two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gate {
    /// The limit, as a share.
    pub limit: f64,
    /// How many changes were judged.
    pub judged: usize,
    /// Those worse than the limit.
    pub worse: Vec<String>,
    /// What the others are taken by where that itself is worse than the limit: then nobody knows which of the two it was.
    pub base: Vec<String>,
    /// What the earlier run had and the later one has not.
    pub lost: Vec<String>,
    /// Samples of the later run that failed.
    pub failed: Vec<String>,
    /// The later run's state, where it did not come to its end.
    pub partial: Option<String>,
    /// Changes of which nothing can be said: too few rounds, bounds, or an A/A control that failed or is missing.
    pub unsaid: usize,
}

/// Whether a change is judged. Where the others are taken by it, an arm shows the machine, and is not judged.
fn is_judged(change: &Change, all: &[Change]) -> bool {
    change.by.is_some()
        || !all.iter().any(|other| {
            other.stage == change.stage && other.by.as_deref() == Some(change.arm.as_str())
        })
}

/// Whether a change counts as worse than the limit: it is shown, and its ratio lies beyond the limit. The table's verdict is
/// not asked, for its "the same" has a margin of its own.
pub fn is_worse(change: &Change, all: &[Change], limit: Limit) -> bool {
    is_judged(change, all) && is_beyond(change, limit)
}

fn is_beyond(change: &Change, limit: Limit) -> bool {
    change.is_shown() && change.ratio.is_some_and(|ratio| ratio < 1.0 - limit.0)
}

/// What of an earlier run a later one has not.
pub fn lost(comparison: &Comparison) -> impl Iterator<Item = &Only> {
    comparison.only.iter().filter(|only| only.has == "before")
}

/// Holds a comparison against a limit.
pub fn judge(comparison: &Comparison, limit: Limit) -> Gate {
    let all = &comparison.changes;
    let judged: Vec<&Change> = all.iter().filter(|change| is_judged(change, all)).collect();
    Gate {
        limit: limit.0,
        judged: judged.len(),
        worse: judged
            .iter()
            .filter(|change| is_worse(change, all, limit))
            .map(|change| in_words(change))
            .collect(),
        base: all
            .iter()
            .filter(|change| !is_judged(change, all) && is_beyond(change, limit))
            .map(in_words)
            .collect(),
        lost: lost(comparison)
            .map(|only| {
                let workloads = only.workloads.join(", ");
                format!("{} {}, {workloads}: {}", only.stage, only.arm, only.why)
            })
            .collect(),
        failed: comparison.failed.iter().map(failure).collect(),
        partial: comparison.partial.clone(),
        unsaid: judged.iter().filter(|change| change.p.is_none()).count(),
    }
}

/// What failed, in a line.
fn failure(failure: &Failure) -> String {
    let Failure { stage, arm, workloads, samples, error } = failure;
    let error = error.lines().next().unwrap_or_default();
    format!("{stage} {arm}, {}: {samples} samples: {error}", workloads.join(", "))
}

/// A change in a line.
pub fn in_words(change: &Change) -> String {
    let unit = change.metric.unit();
    format!(
        "{} {} {}, {}: {} of before {}, {} before, {} after",
        change.stage,
        change.arm,
        change.workload,
        change.metric.title(),
        change.ratio.map_or_else(|| "–".into(), format::digits),
        format::interval(change.interval),
        format::value(change.before, unit),
        format::value(change.after, unit),
    )
}

impl Gate {
    /// Whether it can be relied on: nothing is missing or failed, and of something a verdict was possible.
    pub fn is_whole(&self) -> bool {
        self.base.is_empty()
            && self.lost.is_empty()
            && self.failed.is_empty()
            && self.partial.is_none()
            && self.unsaid < self.judged
    }

    /// What it found, a line each.
    pub fn text(&self) -> String {
        let percent = format::digits(self.limit * 100.0);
        let mut text = match self.worse.len() {
            0 => format!("none of {} judged is worse by more than {percent} %\n", self.judged),
            n => format!("{n} of {} judged are worse by more than {percent} %:\n", self.judged),
        };
        self.worse.iter().for_each(|line| text += &format!("  {line}\n"));
        if !self.base.is_empty() {
            text += "what the others are taken by is itself worse:\n";
            self.base.iter().for_each(|line| text += &format!("  {line}\n"));
        }
        if !self.lost.is_empty() {
            text += "missing in the later run:\n";
            self.lost.iter().for_each(|line| text += &format!("  {line}\n"));
        }
        if !self.failed.is_empty() {
            text += "failed in the later run:\n";
            self.failed.iter().for_each(|line| text += &format!("  {line}\n"));
        }
        if let Some(state) = &self.partial {
            text += &format!("the later run is {state}\n");
        }
        if self.unsaid > 0 {
            let unsaid = self.unsaid;
            text += &format!(
                "of {unsaid} nothing can be said: too few rounds, bounds, or an A/A control that failed or is missing\n"
            );
        }
        text
    }
}
