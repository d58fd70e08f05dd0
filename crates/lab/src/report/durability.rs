//! Who passes flushes on.

use serde::Serialize;

use super::series::Series;
use crate::sample::{Metric, Sample, Stage};
use crate::stats::median;
use crate::workload::durability::DURABLE;

/// What the durability check of an arm showed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Durability {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Flushes that reached the layer below for each fsync.
    pub flushes: f64,
    /// Whether that is enough.
    pub durable: bool,
    /// What was counted, and what the guest was told of its disk's cache.
    pub note: String,
}

/// The checks of all arms that were checked.
pub fn checks(series: &[Series], samples: &[Sample]) -> Vec<Durability> {
    series
        .iter()
        .filter(|s| s.metric == Metric::FlushPerSync)
        .filter_map(|s| {
            let values: Vec<f64> = s.values.iter().map(|(_, value)| value.value).collect();
            let flushes = median(&values)?;
            let durable = flushes >= DURABLE;
            let same = |sample: &&Sample| {
                sample.stage == s.stage && sample.arm == s.arm && sample.workload == s.workload
            };
            let note = samples.iter().find(same).and_then(|sample| sample.note.clone());
            let note = note.unwrap_or_default();
            Some(Durability { stage: s.stage, arm: s.arm.clone(), flushes, durable, note })
        })
        .collect()
}
