//! From a run's folder to what may be said about it. A pure function: the same folder gives the same analysis.

use std::collections::{BTreeMap, BTreeSet};

use super::analysis::{Analysis, Curve, Failure, Load};
use super::svg::Point;
use super::{columns, comparisons, contention, durability, findings, ledger, series, steady};
use crate::run::folder::{Arm, Record};
use crate::sample::{Sample, Stage};
use crate::stats::{self, interval};
use crate::workload;

impl Analysis {
    /// Analyses a run.
    pub fn new(run: Record, samples: &[Sample]) -> Analysis {
        let series = series::all(&run, samples);
        let gaps = gaps(&run, samples);
        let missing: BTreeSet<u32> = gaps.values().flatten().copied().collect();
        let mut analysis = Analysis {
            complete_rounds: complete_rounds(&run, samples),
            missing: missing.into_iter().collect(),
            cut: gaps.into_keys().collect(),
            floors: Vec::new(),
            rows: Vec::new(),
            failures: failures(samples),
            notes: notes(samples),
            durability: durability::checks(&series, samples),
            ledger: ledger::rows(&run, samples),
            curves: curves(&run, samples),
            findings: Vec::new(),
            columns: Vec::new(),
            contention: contention::rows(&run, samples),
            steadiness: steady::rows(&series, samples),
            blocks: blocks(samples),
            samples: samples.to_vec(),
            series,
            run,
        };
        (analysis.rows, analysis.floors) = comparisons::rows(&analysis);
        analysis.findings = findings::findings(&analysis);
        analysis.columns = columns::columns(&analysis);
        analysis
    }
}

/// The block of each round in which something booted: its first round. Rounds that share a boot are one block; where each arm
/// of a round has a boot of its own, the round is what they have in common.
fn blocks(samples: &[Sample]) -> BTreeMap<(Stage, u32), u32> {
    // A lab of before gave Xen's boots no number; it boots once for all rounds.
    let boot = |sample: &Sample| sample.boot.or(sample.stage.boots_once().then_some(0));
    let mut boots: BTreeMap<(Stage, u32), BTreeSet<u32>> = BTreeMap::new();
    for sample in samples {
        if let Some(boot) = boot(sample) {
            boots.entry((sample.stage, sample.round)).or_default().insert(boot);
        }
    }
    let mut blocks: Vec<(Stage, BTreeSet<u32>, BTreeSet<u32>)> = Vec::new();
    for ((stage, round), boots) in boots {
        let shared =
            |block: &(Stage, _, BTreeSet<u32>)| block.0 == stage && !block.2.is_disjoint(&boots);
        let (same, mut others): (Vec<_>, Vec<_>) = blocks.into_iter().partition(shared);
        let mut block = (stage, BTreeSet::from([round]), boots);
        for (_, rounds, boots) in same {
            block.1.extend(rounds);
            block.2.extend(boots);
        }
        others.push(block);
        blocks = others;
    }
    let of = |(stage, rounds, _): (Stage, BTreeSet<u32>, _)| {
        let first = rounds.first().copied().unwrap_or_default();
        rounds.into_iter().map(move |round| ((stage, round), first))
    };
    blocks.into_iter().flat_map(of).collect()
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

/// The rounds that loads lack of which others are there.
fn gaps(run: &Record, samples: &[Sample]) -> BTreeMap<Load, Vec<u32>> {
    let mut seen: BTreeMap<Load, BTreeSet<u32>> = BTreeMap::new();
    for sample in samples.iter().filter(|one| in_rounds(one.stage, &one.workload)) {
        let load = (sample.stage, sample.arm.clone(), sample.workload.clone());
        seen.entry(load).or_default().insert(sample.round);
    }
    let lacks = |seen: &BTreeSet<u32>| -> Vec<u32> {
        (0..run.plan.rounds).filter(|round| !seen.contains(round)).collect()
    };
    seen.into_iter()
        .map(|(load, seen)| (load, lacks(&seen)))
        .filter(|(_, lacks)| !lacks.is_empty())
        .collect()
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
