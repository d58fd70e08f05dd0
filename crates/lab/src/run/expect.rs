//! How long a plan is expected to take, from what its parts took on two busy cores of 2.5 GHz.

use super::running::Running;
use crate::plan::Plan;
use crate::sample::Stage;
use crate::stage::{self, kind::TRANSLATED};
use crate::workload::{Workload, rated};

/// Bytes a second at which disks are written, synced and converted.
const WRITING: f64 = 250e6;
/// Seconds that a workload is expected to take on a stage.
pub fn seconds(plan: &Plan, stage: Stage, workload: &dyn Workload) -> f64 {
    stage::of(stage).seconds(workload, &plan.settings(0))
}

/// Seconds in which a stage finds out, before its first round, at which rate its loads by schedule go.
fn rating(stage: Stage, arms: &[Running]) -> f64 {
    let one = rated::CAPACITY_TIME.as_secs_f64() + 0.5;
    let one = if stage.is_of_pcs() { one * TRANSLATED } else { one };
    // In a guest the twin has a disk of its own.
    let counts = |arm: &&Running| !stage.is_of_host() || arm.name == arm.entry.name;
    one * arms.iter().filter(|arm| arm.is_rated()).filter(counts).count() as f64
}

/// Seconds of all that are spent in samples, as [`seconds`] says.
pub fn samples(plan: &Plan, arms: &[(Stage, Vec<Running>)]) -> f64 {
    let of = |(stage, arms): &(Stage, Vec<Running>)| {
        let of = |workload: &dyn Workload| seconds(plan, *stage, workload);
        let loads: f64 = arms.iter().flat_map(Running::rounds).map(of).sum();
        let checks: f64 = checks(arms).map(of).sum();
        checks + loads * f64::from(plan.rounds)
    };
    arms.iter().map(of).sum()
}

/// Whose flushes are counted: those of the twin are its original's.
fn checks(arms: &[Running]) -> impl Iterator<Item = &'static dyn Workload> {
    let checked = arms.iter().filter(|arm| arm.name == arm.entry.name);
    checked.flat_map(|arm| arm.workloads.iter().copied()).filter(|workload| workload.is_check())
}

/// Seconds that a whole plan is expected to take.
pub fn expected(plan: &Plan, arms: &[(Stage, Vec<Running>)]) -> f64 {
    let rounds = f64::from(plan.rounds);
    let stages = arms.iter().filter(|(_, arms)| !arms.is_empty()).map(|(stage, arms)| {
        let of = |workload: &dyn Workload| seconds(plan, *stage, workload);
        let of_stage = stage::of(*stage);
        // In a guest of their own.
        let boots = checks(arms).next().is_some() && stage.boots_each_round();
        let loads: f64 = arms.iter().flat_map(Running::rounds).map(of).sum();
        let renewing: f64 = arms.iter().map(|arm| of_stage.renewing(arm)).sum();
        let booting = of_stage.booting(arms.len());
        let disks = stage::room(*stage, plan, arms) as f64 / WRITING;
        let ceph = arms.iter().any(|arm| arm.entry.backend.in_ceph());
        let cluster = if ceph { 4.0 + plan.size as f64 / WRITING } else { 0.0 };
        let beforehand = of_stage.beforehand() + cluster + rating(*stage, arms);
        let checks = checks(arms).map(of).sum::<f64>() + if boots { booting } else { 0.0 };
        checks + disks + beforehand + rounds * (loads + renewing + booting)
    });
    stages.sum()
}

/// The same for a reader, before it begins.
pub fn in_words(plan: &Plan, arms: &[(Stage, Vec<Running>)], seconds: f64) -> String {
    let samples: usize = arms
        .iter()
        .flat_map(|(_, arms)| arms)
        .map(|arm| arm.rounds().count() * plan.rounds as usize)
        .sum();
    let time = if seconds < 90.0 {
        format!("{seconds:.0} seconds")
    } else {
        format!("{:.0} minutes", (seconds / 60.0).ceil())
    };
    format!(
        "{samples} samples in {} rounds, about {time} on a quiet machine; Ctrl-C keeps what there is",
        plan.rounds
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::CompareArgs;
    use crate::env::Env;
    use crate::run::matrix;
    use crate::stage::xen::TURN as XEN_TURN;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: CompareArgs,
    }

    #[test]
    fn more_rounds_take_longer_and_the_words_name_both() {
        let plan = |rounds: &str| {
            let words = ["compare", "--dir", "/tmp", "--stages", "host", "--backends", "native"];
            let more = ["--workloads", "fio,dd", "--rounds", rounds];
            Plan::from_args(&Cli::parse_from(words.iter().chain(&more)).args).unwrap()
        };
        let env = Env::new("/nonexistent".into(), "/nonexistent".into());
        let (few, many) = (plan("6"), plan("60"));
        let arms = matrix(&few, &env).0;
        let (short, long) = (expected(&few, &arms), expected(&many, &arms));
        assert!(short > 60.0 && long > 9.0 * short && long < 10.0 * short, "{short} {long}");
        // Ten workloads, and the reference twice.
        let words = in_words(&few, &arms, 125.0);
        assert!(words.starts_with("120 samples in 6 rounds, about 3 minutes"), "{words}");
    }

    fn plan(stage: &str, words: &str) -> (Plan, Vec<Running>) {
        let head = ["compare", "--dir", "/tmp", "--rounds", "6", "--stages", stage];
        let words = head.into_iter().chain(words.split_whitespace());
        let plan = Plan::from_args(&Cli::parse_from(words).args).unwrap();
        let arm = |name: &str, entry: &'static crate::backend::Entry| Running {
            name: name.into(),
            entry,
            workloads: plan.workloads(),
        };
        let arms =
            plan.entries(plan.stages[0]).iter().map(|entry| arm(entry.name, entry)).collect();
        (plan, arms)
    }

    #[test]
    fn what_is_made_anew_for_writers_takes_its_time() {
        let takes = |stage: &str, backend: &str, workloads: &str| {
            let (plan, arms) =
                plan(stage, &format!("--backends {backend} --workloads {workloads}"));
            stage::of(plan.stages[0]).renewing(&arms[0])
        };
        let loads = "randread-4k-qd1,randwrite-4k-qd1,randwrite-4k-qd32,two-write";
        // The first writer finds what was attached; of two loads each comes alone and both together.
        assert_eq!(takes("xen", "tap-overlay", loads), 4.0 * XEN_TURN);
        // What reads behind a writer has a new one, and what reads behind that the same.
        assert_eq!(takes("xen", "tap-overlay", "write-1m-qd8,two-read"), XEN_TURN);
        assert_eq!(takes("xen", "tap-raw", loads), 0.0);
        assert_eq!(takes("two", "ringtap-overlay", "two-read,two-write"), 1.5);
        assert!(takes("two", "lvm-snapshot", "two-write,quiet-write") > 1.0);
        assert_eq!(takes("two", "ringtap-nbd", "two-write"), 0.0);
        for stage in ["guest", "vm"] {
            assert_eq!(takes(stage, "ringtap-overlay", "fio"), 1.5, "one for reads, three more");
            assert!(takes(stage, "lvm-snapshot", "fio") > 1.0);
        }
    }

    #[test]
    fn a_plan_with_it_takes_longer_and_so_does_one_with_rates_to_be_found_out() {
        let takes = |stage: &str, backend: &str, workloads: &str| {
            let words = format!("--backends {backend} --workloads {workloads} --size 64M");
            let (plan, arms) = plan(stage, &words);
            expected(&plan, &[(plan.stages[0], arms)])
        };
        let loads = "randwrite-4k-qd1,randwrite-4k-qd32,two-write";
        let more = takes("xen", "tap-overlay", loads) - takes("xen", "tap-raw", loads);
        assert!(more >= 6.0 * 4.0 * XEN_TURN, "{more}");
        let rated =
            takes("vm", "virtio-raw", "rated-50") - takes("vm", "virtio-raw", "write-1m-qd8");
        assert!(rated > 1.0, "{rated}");
    }
}
