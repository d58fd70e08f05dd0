//! The values of a run, by arm, workload and metric.

use serde::Serialize;

use crate::run::folder::Record;
use crate::sample::{Metric, Sample, Stage, Value};
use crate::stats::{self, interval};

/// One arm's values of one metric.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Series {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Which workload.
    pub workload: String,
    /// What was measured.
    pub metric: Metric,
    /// Values by round.
    pub values: Vec<(u32, Value)>,
    /// Their median; a bound when it hangs on bounds.
    pub median: Option<Value>,
    /// 95 % interval of the median by order statistics; from six exact values on.
    pub interval: Option<(f64, f64)>,
}

/// All of them, in the order of the report.
pub fn all(run: &Record, samples: &[Sample]) -> Vec<Series> {
    let mut list = Vec::new();
    for arm in &run.arms {
        for workload in &run.plan.workloads {
            let of: Vec<&Sample> = samples
                .iter()
                .filter(|s| {
                    s.stage == arm.stage
                        && s.arm == arm.name
                        && s.workload == *workload
                        && s.error.is_none()
                })
                .collect();
            for &metric in Metric::ALL {
                let values: Vec<(u32, Value)> = of
                    .iter()
                    .filter_map(|s| s.metrics.get(&metric).map(|value| (s.round, *value)))
                    .collect();
                if values.is_empty() {
                    continue;
                }
                let plain: Vec<Value> = values.iter().map(|v| v.1).collect();
                let exact = plain.iter().all(|v| !v.at_least && v.value > 0.0);
                let logs: Vec<f64> = plain.iter().map(|v| v.value.ln()).collect();
                list.push(Series {
                    stage: arm.stage,
                    arm: arm.name.clone(),
                    workload: workload.clone(),
                    metric,
                    median: stats::median_value(&plain),
                    interval: if exact {
                        interval::sign(&logs).map(|i| (i.low, i.high))
                    } else {
                        None
                    },
                    values,
                });
            }
        }
    }
    list
}
