//! A column of bonnie++'s: Ringtap beside the best of all.

use serde::Serialize;

use crate::sample::{Metric, Stage, Value};

/// A bonnie++ column: the best backend of all, Ringtap, and why the one is not the other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Column {
    /// Where.
    pub stage: Stage,
    /// Which way bonnie++ ran.
    pub workload: &'static str,
    /// The column.
    pub metric: Metric,
    /// The best backend and its median, cached ones too.
    pub best: Option<(String, Value)>,
    /// Ringtap's median.
    pub ours: Option<Value>,
    /// Ringtap by the best, with its 95 % interval.
    pub ratio: Option<(f64, Option<(f64, f64)>)>,
    /// The answer in words.
    pub words: String,
}
