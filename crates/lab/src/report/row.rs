//! A comparison of two arms as a report shows it, and the controls of its load.

use serde::Serialize;

use crate::sample::{Metric, Stage, Value};
use crate::stats;
use crate::stats::decision::{Decision, Sensitivity};

/// One comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Against which arm.
    pub against: String,
    /// In which workload.
    pub workload: String,
    /// By which metric.
    pub metric: Metric,
    /// Whether the metric is what the workload is run for.
    pub headline: bool,
    /// The question that it was named for before the run; none where it is exploratory.
    pub question: Option<String>,
    /// Rounds that have both.
    pub rounds: usize,
    /// Boots that they lie in; where nothing is booted, the rounds.
    pub blocks: usize,
    /// The arm's median over those rounds.
    pub ours: Option<Value>,
    /// The other's over the same.
    pub theirs: Option<Value>,
    /// Times as good: above 1 is better whichever way the metric points. The centre of `interval`; without one the quotient
    /// of the medians.
    pub ratio: Option<f64>,
    /// `">="` or `"<="` where the ratio is a bound.
    pub bound: Option<&'static str>,
    /// 95 % joint-round bootstrap interval of the quotient of the medians.
    pub bootstrap: Option<(f64, f64)>,
    /// Exact 95 % interval over the blocks.
    pub interval: Option<stats::Interval>,
    /// p-value of "equal", adjusted for the question.
    pub p: Option<f64>,
    /// p-value of "further apart than the margin", adjusted for the question.
    pub same_p: Option<f64>,
    /// The answer.
    #[serde(flatten)]
    pub decision: Decision,
}

/// What the A/A twin and the known-slow arm of a load showed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Floor {
    /// Where.
    pub stage: Stage,
    /// In which workload.
    pub workload: String,
    /// By which metric.
    pub metric: Metric,
    /// No claim is smaller: the end of the twin's 95 % interval that is further from 1, as a share.
    pub floor: f64,
    /// Whether the twin's 99 % interval holds 1, as it must; where it does not, the load has no answers.
    pub holds: bool,
    /// The twin's interval.
    pub twin: (f64, f64),
    /// Whether the arm that is known to be slower was seen to be.
    pub sensitivity: Sensitivity,
    /// What that arm reached of the one as it is, with its interval.
    pub slow: Option<(f64, (f64, f64))>,
}
