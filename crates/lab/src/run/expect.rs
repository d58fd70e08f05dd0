//! How long a plan is expected to take, from what its parts took on two busy cores of 2.5 GHz.

use super::Running;
use crate::plan::Plan;
use crate::sample::Stage;
use crate::workload::{Kind, Workload, dd};

/// Bytes a second at which disks are written, synced and converted.
const WRITING: f64 = 250e6;
/// Under TCG a guest's programs take longer.
const TRANSLATED: f64 = 1.7;

/// Seconds that a workload is expected to take on a stage.
pub fn seconds(plan: &Plan, stage: Stage, workload: &Workload) -> f64 {
    let measured = plan.seconds + plan.ramp;
    // What a disk larger than a GiB does not make longer.
    let gib = plan.size.min(1 << 30) as f64 / (1u64 << 30) as f64;
    let work = match workload.kind {
        Kind::Fio(_) | Kind::Rated(_) => measured + 0.3,
        Kind::FioFile(_) => 10.0,
        Kind::DdThroughput(_) => 0.1 + 2.0 * gib,
        Kind::DdLatency(dd::Flag::Direct) => 0.3,
        Kind::DdLatency(dd::Flag::Dsync) => 1.5,
        Kind::Bonnie { .. } => 4.0 + 25.0 * gib,
        Kind::FileCopy { .. } => 3.0 * (plan.seconds + 2.0 * plan.seconds.min(2.0)),
        Kind::Archive => 2.0 + 20.0 * gib,
        Kind::Durability => 1.5,
        Kind::SnapshotLife => 1.0 + 10.0 * gib,
        // Each alone and both, longer where a percentile needs it; two guests wait for a common moment.
        Kind::Two(shape) => {
            let longer = if shape.quiet { 3.0 } else { 1.0 };
            let waits = match stage {
                Stage::TwoGuests => 6.0,
                Stage::TwoVms => 14.0,
                Stage::Xen => 22.0,
                _ => 1.5,
            };
            return 3.0 * measured + longer + waits;
        }
    };
    if matches!(stage, Stage::Vm | Stage::Xen) { work * TRANSLATED } else { work }
}

/// Seconds that a whole plan is expected to take.
pub fn expected(plan: &Plan, arms: &[(Stage, Vec<Running>)]) -> f64 {
    let rounds = f64::from(plan.rounds);
    let stages = arms.iter().filter(|(_, arms)| !arms.is_empty()).map(|(stage, arms)| {
        let once = |kind: Kind| kind == Kind::Durability;
        let of = |want: bool| -> f64 {
            let all = arms.iter().flat_map(|arm| &arm.workloads);
            all.filter(|w| once(w.kind) == want).map(|w| seconds(plan, *stage, w)).sum()
        };
        let booting = match stage {
            Stage::Host | Stage::Two => 0.2 * arms.len() as f64,
            Stage::Guest => 4.0,
            Stage::Vm => 12.0 + 0.5 * arms.len() as f64,
            Stage::TwoGuests => 8.0,
            Stage::TwoVms => 24.0 + 1.0 * arms.len() as f64,
            // Attached and detached for each arm.
            Stage::Xen => 8.0 * arms.len() as f64,
        };
        let disks = crate::stage::room(*stage, plan, arms) as f64 / WRITING;
        let beforehand = if *stage == Stage::Xen { 90.0 } else { 0.0 };
        of(true) + disks + beforehand + rounds * (of(false) + booting)
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
        let env = Env::new("/nonexistent".into());
        let (few, many) = (plan("6"), plan("60"));
        let arms = matrix(&few, &env).0;
        let (short, long) = (expected(&few, &arms), expected(&many, &arms));
        assert!(short > 60.0 && long > 9.0 * short && long < 10.0 * short, "{short} {long}");
        // Ten workloads, and the reference twice.
        let words = in_words(&few, &arms, 125.0);
        assert!(words.starts_with("120 samples in 6 rounds, about 3 minutes"), "{words}");
    }
}
