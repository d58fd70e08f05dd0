//! dd on every kind of disk with the caches below it on and off, and whether somebody said that something was on the disk when
//! it was not: one table over all stages.

use super::analysis::Analysis;
use super::finding::Table;
use super::medians::with_ends;
use super::{format, ranking};
use crate::backend::{self, Inner};
use crate::run::folder::Arm;
use crate::sample::Metric;
use crate::stage::durable;

const THROUGHPUT: &str = "dd-throughput";
const LATENCY: &str = "dd-latency-direct";

fn flushes(analysis: &Analysis, arm: &Arm) -> String {
    match ranking::check(analysis, arm) {
        Some(check) if check.durable => format::digits(check.flushes),
        Some(check) => format!("{}: it lies", format::digits(check.flushes)),
        None => "not counted".into(),
    }
}

/// Whose page cache an arm's disk goes through: that of the machine that serves, of Xen's first domain, of the guest itself,
/// or of two of them.
pub fn page_cache(arm: &Arm) -> String {
    let of_guest = backend::find(arm.stage, &arm.backend).is_some_and(|entry| {
        matches!(entry.backend.inner(), Inner::Loop { direct: false }) && !entry.stage.is_of_host()
    });
    match (arm.cached, arm.stage) {
        (false, _) => "none".into(),
        (true, _) if of_guest => "the guest's".into(),
        (true, stage) => crate::stage::of(stage).words().page_cache.into(),
    }
}

/// Whether the guest was told that its disk keeps writes back.
fn write_cache(analysis: &Analysis, arm: &Arm) -> &'static str {
    match ranking::check(analysis, arm).and_then(|check| durable::told(&check.note)) {
        Some("write back") => "on",
        Some(_) => "off",
        None => "–",
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
            let cell =
                |workload, metric| with_ends(analysis, arm.stage, &arm.name, workload, metric);
            let throughput = cell(THROUGHPUT, Metric::Bandwidth);
            let latency = cell(LATENCY, Metric::TimePerOp);
            if throughput.is_none() && latency.is_none() {
                return None;
            }
            let or_none = |value: Option<String>| value.unwrap_or_else(|| "–".into());
            Some(vec![
                format!("{} {}", arm.stage, arm.name),
                page_cache(arm),
                write_cache(analysis, arm).into(),
                or_none(throughput),
                or_none(latency),
                flushes(analysis, arm),
            ])
        })
        .collect();
    (rows.len() > 1).then(|| Table {
        title: "dd with caches on and off, and who lies about it".into(),
        heads: vec![
            "disk",
            "through whose page cache",
            "the disk's write cache",
            "one large direct write",
            "512 bytes, direct",
            "flushes for an fsync",
        ],
        rows,
    })
}
