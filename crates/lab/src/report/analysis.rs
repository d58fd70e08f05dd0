//! From a run's folder to what may be said about it. A pure function: the same folder gives the same analysis.

use serde::Serialize;

use super::ranking::{self, Durability};
use super::svg::Point;
use super::{columns, contention, findings, ledger, steady};
use crate::backend;
use crate::run::folder::{Arm, Record};
use crate::sample::{Metric, Sample, Stage, Value, twin};
use crate::stats::{self, Paired, Ratio, Verdict, family, interval, verdict};
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

/// One comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Where.
    pub stage: Stage,
    /// Which arm.
    pub arm: String,
    /// Against which arm.
    pub against: String,
    /// In which workload.
    pub workload: String,
    /// By which metric.
    pub metric: Metric,
    /// Whether it gets a verdict and counts in the family of the table.
    pub headline: bool,
    /// Rounds that have both.
    pub rounds: usize,
    /// Times as good, by medians: above 1 is better whichever way the metric points.
    pub ratio: Option<f64>,
    /// `">="` or `"<="` where the ratio is a bound.
    pub bound: Option<&'static str>,
    /// 95 % joint-round bootstrap interval of `ratio`.
    pub bootstrap: Option<(f64, f64)>,
    /// The interval that decides.
    pub interval: Option<stats::Interval>,
    /// p-value adjusted for the whole table (step-down over whole-round flips).
    pub adjusted_p: Option<f64>,
    /// Holm's adjusted p-value, for comparison.
    pub holm_p: Option<f64>,
    /// The verdict; none for metrics that are not headlines.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// What an A/A twin showed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Floor {
    /// Where.
    pub stage: Stage,
    /// In which workload.
    pub workload: String,
    /// By which metric.
    pub metric: Metric,
    /// Half the width of the twin's interval, as a share.
    pub floor: f64,
    /// Whether the interval holds 1, as it must.
    pub holds: bool,
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
    /// All comparisons: with the stage's reference, and of Ringtap with its peers on the same wire.
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
            samples: samples.to_vec(),
            series,
            run,
        };
        let mut logs: Vec<Vec<(u32, f64)>> = Vec::new();
        let mut pairs: Vec<Paired> = Vec::new();
        for (stage, arm, against) in comparisons(&analysis.run) {
            for workload in workloads(&analysis.run) {
                // With one block size, bytes and I/Os a second are the same comparison.
                let twice = |metric: &Metric| {
                    *metric == Metric::Bandwidth && workload.headline == [Metric::Iops]
                        || *metric == Metric::Iops && workload.headline == [Metric::Bandwidth]
                };
                for &metric in Metric::ALL.iter().filter(|metric| !twice(metric)) {
                    let seed = analysis.run.plan.seed;
                    let Some((row, paired)) =
                        analysis.compare(stage, &arm, &against, workload, metric, seed)
                    else {
                        continue;
                    };
                    if arm == twin(&against) {
                        if let Some((floor, holds)) = verdict::noise_floor(&paired) {
                            let workload = workload.name.into();
                            analysis.floors.push(Floor { stage, workload, metric, floor, holds });
                        }
                    }
                    logs.push(if row.headline { paired.logs.clone() } else { Vec::new() });
                    analysis.rows.push(row);
                    pairs.push(paired);
                }
            }
        }
        analysis.decide(&pairs, &logs);
        analysis.findings = findings::findings(&analysis);
        analysis.columns = columns::columns(&analysis);
        analysis
    }

    fn compare(
        &self,
        stage: Stage,
        arm: &str,
        against: &str,
        workload: &Workload,
        metric: Metric,
        seed: u64,
    ) -> Option<(Row, Paired)> {
        let ours = self.find(stage, arm, workload.name, metric)?;
        let theirs = self.find(stage, against, workload.name, metric)?;
        let paired = Paired::new(&ours.values, &theirs.values, metric.better(), seed);
        let row = Row {
            stage,
            arm: arm.into(),
            against: against.into(),
            workload: workload.name.into(),
            metric,
            // A twin shows the floor; it is no claim.
            headline: workload.headline.contains(&metric) && arm != twin(against),
            rounds: paired.rounds,
            ratio: paired.ratio.map(Ratio::number),
            bound: match paired.ratio {
                Some(Ratio::AtLeast(_)) => Some(">="),
                Some(Ratio::AtMost(_)) => Some("<="),
                _ => None,
            },
            bootstrap: paired.bootstrap,
            interval: paired.interval,
            adjusted_p: None,
            holm_p: None,
            verdict: Verdict::None,
        };
        Some((row, paired))
    }

    /// Verdicts of the headline rows, guarded as one family.
    fn decide(&mut self, pairs: &[Paired], logs: &[Vec<(u32, f64)>]) {
        let members: Vec<usize> = (0..self.rows.len())
            .filter(|&at| self.rows[at].headline && self.rows[at].interval.is_some())
            .collect();
        let family: Vec<&[(u32, f64)]> = members.iter().map(|&at| logs[at].as_slice()).collect();
        let adjusted = family::step_down(&family, self.run.plan.seed);
        let plain: Vec<f64> =
            members.iter().map(|&at| self.rows[at].interval.map_or(1.0, |i| i.p)).collect();
        let holm = family::holm(&plain);
        for (place, &at) in members.iter().enumerate() {
            let row = &self.rows[at];
            let floor =
                self.floor(row.stage, &row.workload, row.metric).map_or(0.0, |floor| floor.floor);
            let verdict = verdict::decide(&pairs[at], adjusted[place], floor);
            let row = &mut self.rows[at];
            row.adjusted_p = Some(adjusted[place]);
            row.holm_p = Some(holm[place]);
            row.verdict = verdict;
        }
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
    pub fn headlines(&self, stage: Stage) -> Vec<(&'static Workload, Metric)> {
        workloads(&self.run)
            .into_iter()
            .flat_map(|workload| workload.headline.iter().map(move |metric| (workload, *metric)))
            .filter(|(workload, metric)| {
                self.series
                    .iter()
                    .any(|s| s.stage == stage && s.workload == workload.name && s.metric == *metric)
            })
            .collect()
    }

    /// A stage's workloads that have a cost of the whole path, with the metric that says it.
    pub fn costs(&self, stage: Stage) -> Vec<(&'static Workload, Metric)> {
        let has = |workload: &Workload, metric: Metric| {
            self.series
                .iter()
                .any(|s| s.stage == stage && s.workload == workload.name && s.metric == metric)
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

fn workloads(run: &Record) -> Vec<&'static Workload> {
    run.plan.workloads.iter().filter_map(|name| workload::find(name)).collect()
}

/// Every arm with its stage's reference, then Ringtap with each peer.
fn comparisons(run: &Record) -> Vec<(Stage, String, String)> {
    let mut list = Vec::new();
    for arm in &run.arms {
        match reference(run, arm.stage) {
            Some(reference) if reference != arm.name => {
                list.push((arm.stage, arm.name.clone(), reference.to_owned()))
            }
            _ => {}
        }
    }
    let has = |stage: Stage, name: &str| {
        run.arms.iter().any(|arm| arm.stage == stage && arm.name == name)
    };
    for (stage, ours, theirs) in backend::PEERS {
        for other in *theirs {
            // With the peer as reference the comparison is there already.
            if has(*stage, ours) && has(*stage, other) && reference(run, *stage) != Some(other) {
                list.push((*stage, (*ours).to_owned(), (*other).to_owned()));
            }
        }
    }
    list
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

fn complete_rounds(run: &Record, samples: &[Sample]) -> u32 {
    let skipped = |arm: &Arm, workload: &str| {
        run.skipped.iter().any(|skip| {
            skip.stage == arm.stage
                && skip.backend == arm.backend
                && skip.workload.as_deref().is_none_or(|w| w == workload)
        })
    };
    (0..run.plan.rounds)
        .take_while(|round| {
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
    workload::find(workload)
        .is_some_and(|w| w.kind.runs_on(stage) && w.kind != workload::Kind::Durability)
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
