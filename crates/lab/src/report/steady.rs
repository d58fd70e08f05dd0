//! Which rates of writing were steady: over the rounds by SNIA's rule, and within a run.

use serde::Serialize;

use super::series::Series;
use crate::sample::{Metric, Sample, Stage};
use crate::stats::steady::{self, DRIFT, RANGE, WINDOW};
use crate::workload;

/// A series of writes that has rounds enough to be judged.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Steadiness {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Which workload.
    pub workload: String,
    /// What was measured.
    pub metric: Metric,
    /// The first round (from 0) of five in a row that are steady; none where there are no such five.
    pub from: Option<usize>,
    /// Runs whose rate moved by more than a fifth of its mean from one half second to another.
    pub restless: usize,
    /// Runs that were long enough to tell.
    pub long: usize,
}

/// All series that are judged: of workloads that write at one rate for all of their time. (A snapshot's first writes are what is
/// measured there.)
pub fn rows(series: &[Series], samples: &[Sample]) -> Vec<Steadiness> {
    let judged = |one: &&Series| {
        let of = workload::find(&one.workload).filter(|w| w.writes_steadily());
        of.is_some_and(|w| w.headline().first() == Some(&one.metric))
    };
    series
        .iter()
        .filter(judged)
        .filter_map(|one| {
            let mut values: Vec<_> = one.values.iter().filter(|(_, v)| !v.at_least).collect();
            values.sort_by_key(|(round, _)| *round);
            let plain: Vec<f64> = values.iter().map(|(_, value)| value.value).collect();
            let movements: Vec<f64> = samples
                .iter()
                .filter(|s| s.stage == one.stage && s.arm == one.arm && s.workload == one.workload)
                .filter_map(|s| s.movement)
                .collect();
            Some(Steadiness {
                stage: one.stage,
                arm: one.arm.clone(),
                workload: one.workload.clone(),
                metric: one.metric,
                from: steady::first_steady(&plain)?.map(|at| values[at].0 as usize),
                restless: movements.iter().filter(|movement| **movement > RANGE).count(),
                long: movements.len(),
            })
        })
        .collect()
}

/// What the rule says of a run, in sentences; none where nothing was judged.
pub fn sentences(all: &[Steadiness]) -> Vec<String> {
    if all.is_empty() {
        return Vec::new();
    }
    let steady = all.iter().filter(|one| one.from.is_some()).count();
    let mut list = vec![format!(
        "{steady} of {} series of writes came to a steady rate: {WINDOW} rounds in a row that lie within {:.0} % of their mean \
         and along a line that moves by at most {:.0} % of it (SNIA's rule). {}",
        all.len(),
        RANGE * 100.0,
        DRIFT * 100.0,
        if steady == all.len() {
            "None is marked."
        } else {
            "The others are marked \u{201c}not steady\u{201d}: their median stands for rounds that moved, and only what is paired by \
             round holds for them."
        }
    )];
    let (long, restless) =
        all.iter().fold((0, 0), |sum, one| (sum.0 + one.long, sum.1 + one.restless));
    if long > 0 {
        list.push(format!(
            "Within {restless} of {long} runs the rate moved by more than {:.0} % of its mean from one half second to another.",
            RANGE * 100.0
        ));
    }
    list
}

/// Whether the series of an arm in a workload was judged and not found steady.
pub fn is_unsteady(
    all: &[Steadiness],
    stage: Stage,
    arm: &str,
    workload: &str,
    metric: Metric,
) -> bool {
    let of = |one: &&Steadiness| {
        one.stage == stage && one.arm == arm && one.workload == workload && one.metric == metric
    };
    all.iter().find(of).is_some_and(|one| one.from.is_none())
}
