//! A published finding beside what was measured here.

use serde::Serialize;

use crate::sample::{Metric, Stage};

/// A published finding and what this run says of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// The question.
    pub question: &'static str,
    /// What was published.
    pub published: &'static str,
    /// What the backends did by themselves.
    pub tables: Vec<Table>,
    /// What comparing them shows, a sentence each.
    pub lines: Vec<String>,
    /// The same as numbers, beside what was published.
    pub answers: Vec<Answer>,
    /// All in one sentence.
    pub sum: String,
    /// Under which conditions.
    pub conditions: String,
}

/// What became of a published claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The same pair differs as published, and by about as much.
    Held,
    /// It differs the same way round, and by another size.
    OtherSize,
    /// It differs the other way round.
    Reversed,
    /// It differs, and was published as equal.
    Differs,
    /// It does not differ.
    NoDifference,
    /// This load shows no difference here.
    Blind,
    /// Not decided.
    Open,
    /// There is no answer here; the row says why.
    NotComparable,
}

impl Outcome {
    /// In the words of a table.
    pub fn title(self) -> &'static str {
        match self {
            Outcome::Held => "held",
            Outcome::OtherSize => "same direction, another size",
            Outcome::Reversed => "reversed",
            Outcome::Differs => "a difference here, none published",
            Outcome::NoDifference => "no difference",
            Outcome::Blind => "blind here",
            Outcome::Open => "not decided",
            Outcome::NotComparable => "not comparable",
        }
    }
}

/// One comparison of a finding.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Beside which other; none where it is set beside itself alone.
    pub against: Option<String>,
    /// In which workload.
    pub workload: &'static str,
    /// By which metric.
    pub metric: Metric,
    /// What was published of it, as times as good; none where nothing was.
    pub published: Option<String>,
    /// Times as good here.
    pub ratio: Option<f64>,
    /// `">="` or `"<="` where the ratio is a bound.
    pub bound: Option<&'static str>,
    /// Its 95 % interval.
    pub interval: Option<(f64, f64)>,
    /// Rounds that it stands on.
    pub rounds: usize,
    /// The answer to today's comparison in words; none where there is no other arm.
    pub answer: Option<String>,
    /// What became of the claim; none where nothing was published.
    pub outcome: Option<Outcome>,
    /// Ringtap beside the same other arm, with its answer.
    pub ringtap: Option<String>,
}

/// Medians with their 95 % intervals, a row for each backend.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    /// The workload and the stage.
    pub title: String,
    /// Heads of the columns.
    pub heads: Vec<&'static str>,
    /// Rows: the backend, then its values.
    pub rows: Vec<Vec<String>>,
}
