//! dd on every kind of disk with the host's caches on and off, and whether the host said that something was on the disk when
//! it was not: one table over all stages.

use super::analysis::Analysis;
use super::findings::Table;
use super::{findings, format, ranking};
use crate::run::folder::Arm;
use crate::sample::Metric;

const THROUGHPUT: &str = "dd-throughput";
const LATENCY: &str = "dd-latency-direct";

fn flushes(analysis: &Analysis, arm: &Arm) -> String {
    match ranking::check(analysis, arm) {
        Some(check) if check.durable => format::digits(check.flushes),
        Some(check) => format!("{}: it lies", format::digits(check.flushes)),
        None => "not counted".into(),
    }
}

/// A row for each arm that wrote with dd.
pub fn table(analysis: &Analysis) -> Option<Table> {
    let rows: Vec<Vec<String>> = analysis
        .run
        .arms
        .iter()
        .filter(|arm| !ranking::is_twin(arm))
        .filter_map(|arm| {
            let cell = |workload, metric| {
                findings::with_ends(analysis, arm.stage, &arm.name, workload, metric)
            };
            let throughput = cell(THROUGHPUT, Metric::Bandwidth);
            let latency = cell(LATENCY, Metric::TimePerOp);
            if throughput.is_none() && latency.is_none() {
                return None;
            }
            let or_none = |value: Option<String>| value.unwrap_or_else(|| "–".into());
            let cache = if arm.cached { "on" } else { "off" };
            Some(vec![
                format!("{} {}", arm.stage, arm.name),
                cache.into(),
                or_none(throughput),
                or_none(latency),
                flushes(analysis, arm),
            ])
        })
        .collect();
    (rows.len() > 1).then(|| Table {
        title: "dd with the host's caches on and off".into(),
        heads: vec![
            "disk",
            "host's page cache",
            "one large direct write",
            "512 bytes, direct",
            "flushes for an fsync",
        ],
        rows,
    })
}
