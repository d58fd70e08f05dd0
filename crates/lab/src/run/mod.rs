//! A run: rounds of blocks, one block for each arm, in balanced order.
//!
//! This file, `expect` and `within` lie above the stages and ask them. Stages take their samples by [`runner`], which lies
//! below them.

mod expect;
pub mod folder;
pub mod mark;
pub mod meter;
pub mod order;
pub mod progress;
pub mod rest;
pub mod runner;
pub mod running;
pub mod scratch;
pub mod slices;
pub mod track;
pub mod watch;
mod within;

use std::cell::{Cell, RefCell};
use std::path::Path;

use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::host::Host;
use crate::plan::Plan;
use crate::sample::{Stage, twin};
use crate::stage::{self, durable};
use crate::stop::Stop;
use expect::{expected, in_words};
use folder::{Arm, Folder, Record, Skip, State};
use progress::Progress;
use runner::Runner;
use running::Running;
use scratch::Scratch;
use slices::Slices;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// How far it came.
    pub state: State,
    /// Samples with numbers.
    pub samples: usize,
    /// Samples and servers that failed.
    pub failures: usize,
}

/// Runs `plan` and leaves its folder at `out`. Whatever happens, what was measured until then is in the folder, and
/// everything that was started or made is gone again.
pub fn run(plan: &Plan, env: &Env, out: &Path, stop: &Stop) -> Result<Ended> {
    let (mut arms, mut skipped) = matrix(plan, env);
    rest::narrow(plan, &mut arms);
    let all = arms.clone();
    let left_out = within::fit(plan, &mut arms);
    skipped.extend(within::skips(&all, &left_out, plan.within.unwrap_or_default()));
    // First what may be refused: a folder made in vain would be taken for a run.
    let disks: u64 = arms.iter().map(|(stage, arms)| stage::room(*stage, plan, arms)).sum();
    let checks = arms.iter().map(|(stage, arms)| stage::room_of_check(*stage, arms));
    let room = checks.max().unwrap_or(0).max(disks);
    let scratch = Scratch::create(&plan.dir, room)?;
    let mut folder = Folder::create(out)?;
    let record = Record {
        schema: folder::SCHEMA,
        lab: env!("CARGO_PKG_VERSION").into(),
        began: jiff::Zoned::now().strftime("%Y-%m-%dT%H:%M:%S%:z").to_string(),
        ended: None,
        state: State::Running,
        troubles: Vec::new(),
        plan: plan.clone(),
        host: Host::gather(&plan.dir, &env.ringtap),
        guest: None,
        stages: Vec::new(),
        written: None,
        arms: arms
            .iter()
            .flat_map(|(stage, arms)| arms.iter().map(|arm| describe(*stage, arm)))
            .collect(),
        skipped,
    };
    folder.write_record(&record)?;
    let seconds = expected(plan, &arms);
    let progress = Progress::new(seconds, expect::samples(plan, &arms));
    progress.note(&in_words(plan, &arms, seconds));
    if !left_out.is_empty() {
        progress.note(&within::in_words(&left_out));
    }
    let mut runner = Runner {
        plan,
        env,
        stop,
        folder,
        record,
        scratch,
        progress,
        arms,
        samples: 0,
        failures: 0,
        device: meter::device_below(&plan.dir),
        seconds: expect::seconds,
        written: Cell::default(),
        allocated: RefCell::default(),
        capacity: Vec::new(),
        slices: Slices::default(),
        said: Vec::new(),
        boot: None,
        boots: 0,
        guests: Vec::new(),
    };
    let result = rounds(&mut runner).map_err(|error| runner.full(&error).unwrap_or(error));
    // The disks go first: the rest may need their room.
    let Runner {
        mut record, mut folder, scratch, mut progress, samples, failures, written, ..
    } = runner;
    drop(scratch);
    record.written = Some(written.get());
    record.ended = Some(jiff::Zoned::now().strftime("%Y-%m-%dT%H:%M:%S%:z").to_string());
    record.state = match &result {
        Ok(()) => State::Complete,
        Err(Error::Interrupted) => State::Interrupted,
        Err(_) => State::Failed,
    };
    match &result {
        Ok(()) => progress.finish(),
        // The state says it.
        Err(Error::Interrupted) => {}
        Err(error) => {
            progress.note(&error.to_string());
            record.troubles.push(error.to_string());
        }
    }
    folder.write_record(&record)?;
    Ok(Ended { state: record.state, samples, failures })
}

/// Which arms run with which workloads, and what is left out with its reason.
pub fn matrix(plan: &Plan, env: &Env) -> (Vec<(Stage, Vec<Running>)>, Vec<Skip>) {
    let mut stages = Vec::new();
    let mut skipped = Vec::new();
    for &stage in &plan.stages {
        let mut arms: Vec<Running> = Vec::new();
        for entry in plan.entries(stage) {
            let skip = |workload: Option<&str>, missing| Skip {
                stage,
                backend: entry.name.into(),
                workload: workload.map(Into::into),
                missing,
            };
            let missing = entry.backend.missing(env).or_else(|| stage::missing(stage, entry, env));
            if let Some(missing) = missing {
                skipped.push(skip(None, missing));
                continue;
            }
            let mut workloads = Vec::new();
            for workload in plan.workloads() {
                if !workload.runs_on(stage) {
                    continue;
                }
                if !plan.runs(stage, workload.name(), entry.name) {
                    let some = plan.only.get(workload.name()).map(|some| some.join(", "));
                    let reason = format!("the plan runs it on {} only", some.unwrap_or_default());
                    let remedy =
                        format!("--workloads {}, or a plan without `only`", workload.name());
                    skipped.push(skip(Some(workload.name()), Missing::new(reason, remedy)));
                    continue;
                }
                let refused = entry.backend.refuses(workload);
                match refused.or_else(|| stage::missing_workload(stage, entry, workload, env)) {
                    Some(missing) => skipped.push(skip(Some(workload.name()), missing)),
                    None => workloads.push(workload),
                }
            }
            if !workloads.is_empty() {
                arms.push(Running { name: entry.name.into(), entry, workloads });
            }
        }
        // Where the plan has loads on some arms only, the first may lack most of them.
        if !plan.only.is_empty() {
            order::first_of_most(&mut arms);
        }
        if let Some(reference) = arms.first() {
            let again = Running { name: twin(&reference.name), ..reference.clone() };
            arms.insert(1, again);
        }
        stages.push((stage, arms));
    }
    (stages, skipped)
}

fn describe(stage: Stage, arm: &Running) -> Arm {
    let again =
        if arm.name == arm.entry.name { "" } else { ", a second time under another name (A/A)" };
    Arm {
        stage,
        name: arm.name.clone(),
        backend: arm.entry.name.into(),
        title: format!("{}{again}", arm.entry.title),
        cached: arm.entry.backend.cached(),
        remark: arm.entry.backend.remark().map(Into::into),
        command: None,
    }
}

/// All rounds of all stages, after the durability checks.
fn rounds(runner: &mut Runner<'_>) -> Result<()> {
    let stages: Vec<(Stage, Vec<Running>)> = runner.arms.clone();
    let rounds = runner.plan.rounds as usize;
    let orders: Vec<Vec<Vec<usize>>> = stages
        .iter()
        .map(|(_, arms)| order::balanced(arms.len(), rounds, runner.plan.seed))
        .collect();
    for (stage, arms) in &stages {
        if stage::of(*stage).counts_beforehand() {
            durable::pass(runner, *stage, arms)?;
        }
    }
    let mut running = Vec::new();
    for (stage, arms) in &stages {
        let counts =
            |arm: &Running| stage::of(*stage).counts_in_rounds() && !arm.workloads.is_empty();
        if !arms.iter().any(|arm| arm.rounds().next().is_some() || counts(arm)) {
            running.push(None);
            continue;
        }
        running.push(Some(stage::of(*stage).prepare(runner, arms)?));
    }
    for round in 0..runner.plan.rounds {
        for (((stage, arms), orders), prepared) in stages.iter().zip(&orders).zip(&mut running) {
            if stage.boots_each_round() {
                runner.boot = Some(runner.next_boot());
            }
            let order: Vec<&Running> = orders[round as usize].iter().map(|&at| &arms[at]).collect();
            if let Some(prepared) = prepared {
                prepared.round(runner, round, &order)?;
            }
            runner.boot = None;
        }
    }
    Ok(())
}
