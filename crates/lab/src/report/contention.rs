//! Two loads at once: each one's latency alone against together, and its share of what both get.

use serde::Serialize;

use super::format;
use crate::run::folder::Record;
use crate::sample::{Metric, Sample, Stage, Unit};
use crate::stats::{interval, median};
use crate::workload::{self, Workload, two::Shape};

/// One of two loads on an arm; medians of the rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Contention {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Which workload.
    pub workload: String,
    /// Which of the two.
    pub load: &'static str,
    /// Its p99 alone, in nanoseconds, where it has I/Os enough for one.
    pub alone: Option<f64>,
    /// Its p99 beside the other.
    pub together: Option<f64>,
    /// 95 % interval of `together`, from six rounds on.
    pub interval: Option<(f64, f64)>,
    /// The one by the other, the median of the rounds.
    pub times: Option<f64>,
    /// Its part of the I/Os that both get.
    pub share: Option<f64>,
    /// What it keeps of the rate that it has alone.
    pub keeps: Option<f64>,
}

/// Where a load's numbers are in a sample.
struct Place {
    name: fn(Shape) -> &'static str,
    together: Metric,
    times: Metric,
    keeps: Metric,
    share: fn(f64) -> f64,
}

const PLACES: [Place; 2] = [
    Place {
        name: |shape| if shape.quiet { "quiet" } else { "first" },
        together: Metric::P99,
        times: Metric::P99Factor,
        keeps: Metric::Keeps,
        share: |first| first,
    },
    Place {
        name: |shape| if shape.quiet { "loud" } else { "second" },
        together: Metric::SecondP99,
        times: Metric::SecondP99Factor,
        keeps: Metric::SecondKeeps,
        share: |first| 1.0 - first,
    },
];

/// All loads of all arms, in the order of the report.
pub fn rows(run: &Record, samples: &[Sample]) -> Vec<Contention> {
    let mut list = Vec::new();
    for arm in &run.arms {
        for workload in run.plan.workloads.iter().filter_map(|name| workload::find(name)) {
            let Some(shape) = workload.shape() else { continue };
            let of = samples.iter().filter(|s| {
                s.stage == arm.stage && s.arm == arm.name && s.workload == workload.name()
            });
            let of: Vec<&Sample> = of.filter(|sample| sample.error.is_none()).collect();
            if of.is_empty() {
                continue;
            }
            for place in PLACES {
                let all = |value: &dyn Fn(&Sample) -> Option<f64>| -> Vec<f64> {
                    of.iter().filter_map(|sample| value(sample)).collect()
                };
                let get = |sample: &Sample, metric| sample.metrics.get(&metric).map(|v| v.value);
                let together = all(&|sample| get(sample, place.together));
                let logs: Vec<f64> = together.iter().map(|value| value.ln()).collect();
                list.push(Contention {
                    stage: arm.stage,
                    arm: arm.name.clone(),
                    workload: workload.name().into(),
                    load: (place.name)(shape),
                    alone: median(&all(&|sample| {
                        Some(get(sample, place.together)? / get(sample, place.times)?)
                    })),
                    together: median(&together),
                    interval: interval::sign(&logs).map(|i| (i.low, i.high)),
                    times: median(&all(&|sample| get(sample, place.times))),
                    share: median(&all(&|sample| get(sample, Metric::FirstShare))).map(place.share),
                    keeps: median(&all(&|sample| get(sample, place.keeps))),
                });
            }
        }
    }
    list
}

/// A workload of a stage, for `report.md`.
pub fn markdown(all: &[Contention], stage: Stage, workload: &dyn Workload) -> String {
    let time = |value: Option<f64>| {
        value.map_or_else(|| "–".into(), |v| format::number(v, Unit::Nanoseconds))
    };
    let part =
        |value: Option<f64>| value.map_or_else(|| "–".into(), |v| format::number(v, Unit::Share));
    let lines: String = all
        .iter()
        .filter(|row| row.stage == stage && row.workload == workload.name())
        .map(|row| {
            format!(
                "| {} | {} | {} | {} | {} | {} | {} |\n",
                row.arm,
                row.load,
                time(row.alone),
                time(row.together),
                row.times.map_or_else(|| "–".into(), format::digits),
                part(row.share),
                part(row.keeps)
            )
        })
        .collect();
    if lines.is_empty() {
        return lines;
    }
    format!(
        "Each load's p99, alone and together; medians of the rounds:\n\n\
         | backend | load | p99 alone | p99 together | times as long | share of both | keeps of its rate alone |\n\
         |---|---|---|---|---|---|---|\n{lines}\n"
    )
}
