//! What a run left out, as a run of its own: the same plan without the loads that are measured already.

use std::collections::BTreeSet;
use std::path::Path;

use super::folder::{self, State};
use super::running::Running;
use crate::cli::CompareArgs;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::sample::{Sample, Stage};
use crate::workload;

/// The plan of `run`, of which only what has no sample there is left. `--dir`, `--within` and `--boot-limit` are those of now.
pub fn plan(args: &CompareArgs, run: &Path) -> Result<Plan> {
    if let Some(known) = &args.known {
        return Err(Error::Plan(format!(
            "--rest-of has the plan of {}: leave {known:?} out",
            run.display()
        )));
    }
    let (record, samples) = folder::read(run)?;
    if record.state != State::Complete {
        return Err(Error::Plan(format!(
            "{} did not come to its end, so that its loads have fewer rounds than its plan: run the plan anew",
            run.display()
        )));
    }
    let mut plan = record.plan;
    plan.within = args.within;
    plan.boot_limit = args.boot_limit.or(plan.boot_limit);
    if let Some(dir) = &args.dir {
        plan.dir.clone_from(dir);
    }
    if !plan.dir.is_dir() {
        return Err(Error::Plan(format!(
            "{}, where {} had its disks, is gone: name another folder with --dir",
            plan.dir.display(),
            run.display()
        )));
    }
    plan.measured.extend(loads(&samples).into_iter().map(|(stage, load)| (stage, load.to_owned())));
    Ok(plan)
}

/// The loads that have samples, the durability check apart.
pub fn loads(samples: &[Sample]) -> BTreeSet<(Stage, &str)> {
    samples
        .iter()
        .filter(|sample| !is_check(sample))
        .map(|sample| (sample.stage, sample.workload.as_str()))
        .collect()
}

/// Whether it is of the durability check, which every run makes.
pub fn is_check(sample: &Sample) -> bool {
    workload::find(&sample.workload).is_some_and(|load| load.is_check())
}

/// Take out what is measured already, and the arms that have nothing else.
pub fn narrow(plan: &Plan, arms: &mut [(Stage, Vec<Running>)]) {
    if plan.measured.is_empty() {
        return;
    }
    for (stage, arms) in arms {
        let is_measured =
            |name: &str| plan.measured.iter().any(|(of, load)| of == stage && load == name);
        arms.iter_mut().for_each(|arm| arm.workloads.retain(|load| !is_measured(load.name())));
        arms.retain(|arm| arm.rounds().next().is_some());
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::env::Env;
    use crate::run::matrix;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: CompareArgs,
    }

    #[test]
    fn what_is_measured_is_not_run_again() {
        let words = ["compare", "--dir", "/tmp", "--stages", "host", "--backends", "native"];
        let words = words.iter().chain(&["--workloads", "fio,dd"]);
        let mut plan = Plan::from_args(&Cli::parse_from(words).args).expect("a plan");
        let env = Env::new("/nonexistent".into(), "/nonexistent".into());
        let all = matrix(&plan, &env).0;
        let names = |arms: &[(Stage, Vec<Running>)]| -> Vec<&str> {
            arms.iter()
                .flat_map(|(_, arms)| arms)
                .flat_map(Running::rounds)
                .map(|w| w.name())
                .collect()
        };
        assert!(names(&all).contains(&"randread-4k-qd1"));
        plan.measured =
            vec![(Stage::Host, "randread-4k-qd1".into()), (Stage::Vm, "dd-throughput".into())];
        let mut rest = all.clone();
        narrow(&plan, &mut rest);
        assert!(!names(&rest).contains(&"randread-4k-qd1"));
        assert!(names(&rest).contains(&"dd-throughput"), "it was measured on another stage");
        plan.measured =
            names(&all).into_iter().map(|name| (Stage::Host, name.to_owned())).collect();
        narrow(&plan, &mut rest);
        assert!(
            rest.iter().all(|(_, arms)| arms.is_empty()),
            "nothing but the check would be left"
        );
    }
}
