//! From a run's folder to what may be said about it. A pure function: the same folder gives the same analysis.

use std::collections::BTreeMap;

use serde::Serialize;

pub use super::comparisons::{Floor, Row};
use super::ranking::{self, Durability};
use super::svg::Point;
use super::{columns, comparisons, contention, findings, ledger, steady};
use crate::backend;
use crate::run::folder::{Arm, Record};
use crate::sample::{Metric, Sample, Stage, Value};
use crate::stats::{self, Paired, interval};
use crate::workload::{self, Workload};

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

/// Samples of an arm that failed with the same error.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failure {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Which workloads.
    pub workloads: Vec<String>,
    /// How many samples.
    pub samples: usize,
    /// The error.
    pub error: String,
}

/// All that a report shows.
#[derive(Clone, Debug, Serialize)]
pub struct Analysis {
    /// The run.
    pub run: Record,
    /// Rounds of which every arm has a sample or an error.
    pub complete_rounds: u32,
    /// All series.
    pub series: Vec<Series>,
    /// All comparisons: those of the plan's questions, with the stage's reference, and of Ringtap with its peers.
    pub rows: Vec<Row>,
    /// Noise floors.
    pub floors: Vec<Floor>,
    /// What failed.
    pub failures: Vec<Failure>,
    /// Notes of samples, by stage and workload, each once.
    pub notes: Vec<(Stage, String, String)>,
    /// Who passes flushes on.
    pub durability: Vec<Durability>,
    /// Bytes at each layer.
    pub ledger: Vec<ledger::Row>,
    /// Curves: the median over the rounds at each point.
    pub curves: Vec<Curve>,
    /// What others have published, asked again.
    pub findings: Vec<findings::Finding>,
    /// bonnie++'s columns, Ringtap beside the best.
    pub columns: Vec<columns::Column>,
    /// Each of two loads at once, alone and together.
    pub contention: Vec<contention::Contention>,
    /// Whether what writes had come to a steady rate.
    pub steadiness: Vec<steady::Steadiness>,
    /// The boot that a round of a stage lay in, where all of it lay in one.
    #[serde(skip)]
    boots: BTreeMap<(Stage, u32), u32>,
    /// All samples, in the order in which they were taken. `samples.jsonl` has them as well.
    #[serde(skip)]
    pub samples: Vec<Sample>,
}

/// A snapshot's life: write rate by the share of the chunks that are copied.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curve {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Which workload.
    pub workload: String,
    /// Points.
    pub points: Vec<Point>,
}

impl Analysis {
    /// Analyses a run.
    pub fn new(run: Record, samples: &[Sample]) -> Analysis {
        let series = all_series(&run, samples);
        let mut analysis = Analysis {
            complete_rounds: complete_rounds(&run, samples),
            floors: Vec::new(),
            rows: Vec::new(),
            failures: failures(samples),
            notes: notes(samples),
            durability: ranking::durability(&series, samples),
            ledger: ledger::rows(&run, samples),
            curves: curves(&run, samples),
            findings: Vec::new(),
            columns: Vec::new(),
            contention: contention::rows(&run, samples),
            steadiness: steady::rows(&series, samples),
            boots: boots(samples),
            samples: samples.to_vec(),
            series,
            run,
        };
        (analysis.rows, analysis.floors) = comparisons::rows(&analysis);
        analysis.findings = findings::findings(&analysis);
        analysis.columns = columns::columns(&analysis);
        analysis
    }

    /// An arm beside another, by the rounds that both have; `None` where one has none.
    pub fn paired(
        &self,
        stage: Stage,
        arm: &str,
        against: &str,
        workload: &str,
        metric: Metric,
    ) -> Option<Paired> {
        let ours = self.find(stage, arm, workload, metric)?;
        let theirs = self.find(stage, against, workload, metric)?;
        let boot = |round: u32| self.boots.get(&(stage, round)).copied();
        let seed = self.run.plan.seed;
        Some(Paired::new(&ours.values, &theirs.values, metric.better(), seed, &boot))
    }

    /// A series.
    pub fn find(&self, stage: Stage, arm: &str, workload: &str, metric: Metric) -> Option<&Series> {
        self.series.iter().find(|s| {
            s.stage == stage && s.arm == arm && s.workload == workload && s.metric == metric
        })
    }

    /// A median.
    pub fn median(&self, stage: Stage, arm: &str, workload: &str, metric: Metric) -> Option<Value> {
        self.find(stage, arm, workload, metric)?.median
    }

    /// A noise floor.
    pub fn floor(&self, stage: Stage, workload: &str, metric: Metric) -> Option<&Floor> {
        self.floors
            .iter()
            .find(|f| f.stage == stage && f.workload == workload && f.metric == metric)
    }

    /// The comparison of `arm` with `against`.
    pub fn row(
        &self,
        stage: Stage,
        arm: &str,
        against: &str,
        workload: &str,
        metric: Metric,
    ) -> Option<&Row> {
        self.rows.iter().find(|r| {
            r.stage == stage
                && r.arm == arm
                && r.against == against
                && r.workload == workload
                && r.metric == metric
        })
    }

    /// The comparison of `arm` with `against`, whichever way round its row stands; exploratory where it has none.
    pub fn answer(
        &self,
        stage: Stage,
        arm: &str,
        against: &str,
        workload: &str,
        metric: Metric,
    ) -> Option<Row> {
        comparisons::answer(self, (stage, arm, against), workload::find(workload)?, metric)
    }

    /// How an arm failed in a workload.
    pub fn failure(&self, stage: Stage, arm: &str, workload: &str) -> Option<&Failure> {
        self.failures.iter().find(|failure| {
            failure.stage == stage
                && failure.arm == arm
                && failure.workloads.iter().any(|of| of == workload)
        })
    }

    /// The stages that have arms, each with its arms.
    pub fn stages(&self) -> Vec<(Stage, Vec<&Arm>)> {
        Stage::ALL
            .iter()
            .map(|&stage| {
                (stage, self.run.arms.iter().filter(|arm| arm.stage == stage).collect::<Vec<_>>())
            })
            .filter(|(_, arms)| !arms.is_empty())
            .collect()
    }

    /// What a stage's workloads show: a workload and a headline metric that some arm has.
    pub fn headlines(&self, stage: Stage) -> Vec<(&'static dyn Workload, Metric)> {
        workloads(&self.run)
            .into_iter()
            .flat_map(|workload| workload.headline().iter().map(move |metric| (workload, *metric)))
            .filter(|(workload, metric)| {
                self.series.iter().any(|s| {
                    s.stage == stage && s.workload == workload.name() && s.metric == *metric
                })
            })
            .collect()
    }

    /// A stage's workloads that have a cost of the whole path, with the metric that says it.
    pub fn costs(&self, stage: Stage) -> Vec<(&'static dyn Workload, Metric)> {
        let has = |workload: &dyn Workload, metric: Metric| {
            self.series
                .iter()
                .any(|s| s.stage == stage && s.workload == workload.name() && s.metric == metric)
        };
        workloads(&self.run)
            .into_iter()
            .filter_map(|workload| {
                let metrics = [Metric::PathCpu, Metric::PathCpuGib];
                Some((workload, metrics.into_iter().find(|metric| has(workload, *metric))?))
            })
            .collect()
    }

    /// Whether there are no intervals at all: too few rounds.
    pub fn only_points(&self) -> bool {
        self.rows.iter().all(|row| row.interval.is_none())
    }

    /// Comparisons of Ringtap with its peers on the same wire that have a headline.
    pub fn peer_rows(&self) -> Vec<&Row> {
        let peers = |row: &&Row| {
            backend::PEERS.iter().any(|(stage, ours, theirs)| {
                *stage == row.stage && *ours == row.arm && theirs.contains(&row.against.as_str())
            })
        };
        self.rows.iter().filter(|row| row.headline).filter(peers).collect()
    }
}

/// The stage's reference.
pub fn reference(run: &Record, stage: Stage) -> Option<&str> {
    run.arms.iter().find(|arm| arm.stage == stage).map(|arm| arm.name.as_str())
}

/// The workloads of a run.
pub(super) fn workloads(run: &Record) -> Vec<&'static dyn Workload> {
    run.plan.workloads.iter().filter_map(|name| workload::find(name)).collect()
}

fn all_series(run: &Record, samples: &[Sample]) -> Vec<Series> {
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

/// Where each arm of a round has a boot of its own, the round is what they have in common.
fn boots(samples: &[Sample]) -> BTreeMap<(Stage, u32), u32> {
    let mut boots: BTreeMap<(Stage, u32), Vec<u32>> = BTreeMap::new();
    for sample in samples {
        if let Some(boot) = sample.boot {
            let of = boots.entry((sample.stage, sample.round)).or_default();
            if !of.contains(&boot) {
                of.push(boot);
            }
        }
    }
    boots
        .into_iter()
        .filter_map(|(of, boots)| Some((of, *boots.first()?)).filter(|_| boots.len() == 1))
        .collect()
}

fn complete_rounds(run: &Record, samples: &[Sample]) -> u32 {
    let skipped = |arm: &Arm, workload: &str| {
        run.skipped.iter().any(|skip| {
            skip.stage == arm.stage
                && skip.backend == arm.backend
                && skip.workload.as_deref().is_none_or(|w| w == workload)
        })
    };
    (0..run.plan.rounds)
        .filter(|round| {
            run.arms.iter().all(|arm| {
                run.plan.workloads.iter().all(|workload| {
                    skipped(arm, workload)
                        || !in_rounds(arm.stage, workload)
                        || samples.iter().any(|s| {
                            s.round == *round
                                && s.stage == arm.stage
                                && s.arm == arm.name
                                && s.workload == *workload
                        })
                })
            })
        })
        .count() as u32
}

fn failures(samples: &[Sample]) -> Vec<Failure> {
    let mut list: Vec<Failure> = Vec::new();
    for sample in samples {
        let Some(error) = &sample.error else { continue };
        let same =
            |f: &&mut Failure| f.stage == sample.stage && f.arm == sample.arm && f.error == *error;
        match list.iter_mut().find(same) {
            Some(known) => {
                known.samples += 1;
                if !known.workloads.contains(&sample.workload) {
                    known.workloads.push(sample.workload.clone());
                }
            }
            None => list.push(Failure {
                stage: sample.stage,
                arm: sample.arm.clone(),
                workloads: vec![sample.workload.clone()],
                samples: 1,
                error: error.clone(),
            }),
        }
    }
    list
}

fn notes(samples: &[Sample]) -> Vec<(Stage, String, String)> {
    let mut list = Vec::new();
    for sample in samples {
        if let Some(note) = &sample.note {
            let note = (sample.stage, sample.workload.clone(), note.clone());
            if !list.contains(&note) {
                list.push(note);
            }
        }
    }
    list
}

/// Whether a workload runs in each round of a stage.
fn in_rounds(stage: Stage, workload: &str) -> bool {
    workload::find(workload).is_some_and(|w| w.runs_on(stage) && !w.is_check())
}

fn curves(run: &Record, samples: &[Sample]) -> Vec<Curve> {
    let mut list = Vec::new();
    for arm in &run.arms {
        for workload in &run.plan.workloads {
            let of: Vec<&Sample> = samples
                .iter()
                .filter(|s| s.stage == arm.stage && s.arm == arm.name && s.workload == *workload)
                .filter(|s| !s.curve.is_empty())
                .collect();
            let Some(first) = of.first() else { continue };
            let points = first
                .curve
                .iter()
                .enumerate()
                .filter_map(|(at, (share, _))| {
                    let values: Vec<f64> =
                        of.iter().filter_map(|s| s.curve.get(at).map(|point| point.1)).collect();
                    let logs: Vec<f64> = values.iter().map(|value| value.ln()).collect();
                    let interval = interval::sign(&logs).map(|i| (i.low, i.high));
                    Some(Point { share: *share, rate: stats::median(&values)?, interval })
                })
                .collect();
            list.push(Curve {
                stage: arm.stage,
                arm: arm.name.clone(),
                workload: workload.clone(),
                points,
            });
        }
    }
    list
}
