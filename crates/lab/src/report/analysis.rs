//! What may be said about a run, all in one place for whoever shows it.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::column::Column;
use super::contention::Contention;
use super::durability::Durability;
use super::finding::Finding;
use super::ledger;
use super::row::{Floor, Row};
use super::series::Series;
use super::steady::Steadiness;
use super::svg::Point;
use crate::backend;
use crate::run::folder::{Arm, Record, State};
use crate::sample::{Better, Metric, Sample, Stage, Value};
use crate::stats::Paired;
use crate::stats::decision::{self, Control, Decision, Member, Sensitivity};
use crate::workload::{self, Workload};

/// A load of an arm of a stage.
pub(super) type Load = (Stage, String, String);

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
    /// Rounds, from 0, in which a load that others have of the same arm has neither a sample nor an error.
    pub missing: Vec<u32>,
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
    pub findings: Vec<Finding>,
    /// bonnie++'s columns, Ringtap beside the best.
    pub columns: Vec<Column>,
    /// Each of two loads at once, alone and together.
    pub contention: Vec<Contention>,
    /// Whether what writes had come to a steady rate.
    pub steadiness: Vec<Steadiness>,
    /// The loads of arms that lack rounds.
    #[serde(skip)]
    pub(super) cut: BTreeSet<Load>,
    /// The block that a round of a stage lies in, where something booted.
    #[serde(skip)]
    pub(super) blocks: BTreeMap<(Stage, u32), u32>,
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
    /// Whether there is less of the run than there is to be.
    pub fn is_partial(&self) -> bool {
        self.run.state != State::Complete || !self.missing.is_empty()
    }

    /// Whether rounds of an arm's load are missing of a run that says that it is whole.
    pub fn is_cut(&self, stage: Stage, arm: &str, workload: &str) -> bool {
        self.run.state == State::Complete
            && self.cut.contains(&(stage, arm.to_owned(), workload.to_owned()))
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
        let block = |round: u32| self.blocks.get(&(stage, round)).copied();
        let seed = self.run.plan.seed;
        Some(Paired::new(&ours.values, &theirs.values, metric.better(), seed, &block))
    }

    /// An arm's values against the constant 1, as the only comparison of a family: for what is a share already, as what one of
    /// two loads keeps.
    pub fn beside_one(
        &self,
        stage: Stage,
        arm: &str,
        workload: &str,
        metric: Metric,
    ) -> Option<Decision> {
        let ours = self.find(stage, arm, workload, metric)?;
        let ones: Vec<(u32, Value)> =
            ours.values.iter().map(|(round, _)| (*round, 1.0.into())).collect();
        let block = |round: u32| self.blocks.get(&(stage, round)).copied();
        let plan = &self.run.plan;
        let paired = Paired::new(&ours.values, &ones, Better::Higher, plan.seed, &block);
        let floor = self.floor(stage, workload, metric);
        let member = Member {
            paired: &paired,
            control: floor.map(|floor| Control { floor: floor.floor, holds: floor.holds }),
            sensitivity: floor.map_or(Sensitivity::Untried, |of| self.sensitivity(arm, of)),
            same_generator: true,
            cut: self.is_cut(stage, arm, workload),
        };
        Some(decision::family(&[member], plan.margin, plan.seed).first()?.decision)
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
            backend::peers().any(|of| {
                of.stage == row.stage
                    && of.arm == row.arm
                    && of.against.contains(&row.against.as_str())
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
