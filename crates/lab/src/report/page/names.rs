//! What a reader calls the ways of serving a disk, where they are tried and what is done to them.

use crate::backend;
use crate::run::folder::Arm;
use crate::sample::{Metric, Stage};
use crate::workload::Workload;

/// A way of serving a disk, by its name in the run.
pub fn way(name: &str) -> &str {
    backend::label(name).unwrap_or(name)
}

/// The same of an arm: the twin says what it is.
pub fn arm(arm: &Arm) -> String {
    let label = way(&arm.backend);
    if arm.name == arm.backend { label.to_owned() } else { format!("{label}, again") }
}

/// A stage as a reader would say it.
pub fn stage(stage: Stage) -> &'static str {
    crate::stage::of(stage).words().heading
}

/// Short names of loads whose titles are long.
const LOADS: &[(&str, &str)] = &[
    ("start", "a guest's start, image behind HTTP"),
    ("randread-4k-qd1", "4 KiB random read, depth 1"),
    ("randread-4k-qd32", "4 KiB random read, depth 32"),
    ("randwrite-4k-qd1", "4 KiB random write, depth 1"),
    ("randwrite-4k-qd32", "4 KiB random write, depth 32"),
    ("write-4k-fsync", "4 KiB write with fsync"),
    ("rated-50", "4 KiB random write at 50 % of capacity"),
    ("rated-80", "4 KiB random write at 80 % of capacity"),
    ("dd-throughput", "dd, one large write, direct"),
    ("dd-throughput-dsync", "dd, one large write, durable"),
    ("dd-latency-direct", "dd, 512 B writes, direct"),
    ("dd-latency-dsync", "dd, 512 B writes, each durable"),
    ("bonnie", "bonnie++, page cache"),
    ("bonnie-direct", "bonnie++, direct"),
    ("filecopy", "UnixBench file copy, cached"),
    ("filecopy-durable", "UnixBench file copy, durable"),
    ("archive", "find | cpio, cold caches"),
    ("snapshot-life", "64 KiB writes after a snapshot"),
    ("two-read", "two 4 KiB readers, depth 32"),
    ("two-write", "two 4 KiB writers, depth 32"),
    ("quiet-read", "4 KiB read, depth 1 beside 32"),
    ("quiet-write", "4 KiB write, depth 1 beside 32"),
];

/// A workload, short.
pub fn workload(workload: &dyn Workload) -> &str {
    let known = LOADS.iter().find(|(of, _)| *of == workload.name());
    known.map_or(workload.title(), |(_, label)| label)
}

/// A workload with what is read off it, where that is not plain.
pub fn load(of: &dyn Workload, metric: Metric) -> String {
    let title = workload(of);
    match metric {
        Metric::Iops | Metric::Bandwidth | Metric::TimePerOp | Metric::Elapsed => title.to_owned(),
        Metric::Keeps if !of.name().starts_with("quiet") => format!("{title}: what one keeps"),
        metric => format!("{title}: {}", metric.title()),
    }
}

/// An arm by its name in the run.
pub fn named(name: &str) -> String {
    match name.strip_suffix("#2") {
        Some(of) => format!("{}, again", way(of)),
        None => way(name).to_owned(),
    }
}

/// What a link within the page names a question's card.
pub fn anchor(question: &str) -> String {
    let letters = question.to_lowercase();
    letters
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|w| !w.is_empty())
        .collect::<Vec<_>>()
        .join("-")
}
