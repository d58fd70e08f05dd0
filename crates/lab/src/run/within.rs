//! A plan that is to fit into a time: the loads that take longest are left out.

use super::expect::{expected, seconds};
use super::folder::Skip;
use super::running::Running;
use crate::env::Missing;
use crate::plan::Plan;
use crate::sample::Stage;
use crate::workload::Workload;

/// Leave out one load of a stage after the other, that which takes longest first, until the rest is expected to take no longer
/// than the plan allows; gives what was left out. The durability check stays.
pub fn fit(plan: &Plan, arms: &mut [(Stage, Vec<Running>)]) -> Vec<(Stage, &'static dyn Workload)> {
    let mut left_out = Vec::new();
    let Some(most) = plan.within else { return left_out };
    while expected(plan, arms) > most {
        let Some((stage, load)) = longest(plan, arms) else { break };
        for (_, arms) in arms.iter_mut().filter(|(of, _)| *of == stage) {
            arms.iter_mut().for_each(|arm| arm.workloads.retain(|one| one.name() != load.name()));
            // Where nothing but its flushes would be looked at it is not there for anything.
            arms.retain(|arm| arm.rounds().next().is_some());
        }
        left_out.push((stage, load));
    }
    left_out
}

/// The load that takes longest, all its arms together.
fn longest(plan: &Plan, arms: &[(Stage, Vec<Running>)]) -> Option<(Stage, &'static dyn Workload)> {
    let mut loads: Vec<(f64, Stage, &'static dyn Workload)> = Vec::new();
    for (stage, arms) in arms {
        for load in plan.workloads().into_iter().filter(|load| !load.is_check()) {
            let runs = |arm: &&Running| arm.workloads.iter().any(|one| one.name() == load.name());
            let count = arms.iter().filter(runs).count();
            if count > 0 {
                loads.push((count as f64 * seconds(plan, *stage, load), *stage, load));
            }
        }
    }
    let last = loads.into_iter().max_by(|one, other| one.0.total_cmp(&other.0));
    last.map(|(_, stage, load)| (stage, load))
}

/// What was left out, by its arms, for the record.
pub fn skips(
    before: &[(Stage, Vec<Running>)],
    left_out: &[(Stage, &'static dyn Workload)],
    most: f64,
) -> Vec<Skip> {
    let mut skips = Vec::new();
    for (stage, arms) in before {
        for arm in arms.iter().filter(|arm| arm.name == arm.entry.name) {
            let out = left_out.iter().filter(|(of, load)| {
                of == stage && arm.workloads.iter().any(|one| one.name() == load.name())
            });
            skips.extend(out.map(|(_, load)| Skip {
                stage: *stage,
                backend: arm.entry.name.into(),
                workload: Some(load.name().into()),
                missing: Missing::new(
                    format!("it was left out to stay within {:.0} minutes", most / 60.0),
                    "a longer --within".to_owned(),
                ),
            }));
        }
    }
    skips
}

/// The same for a reader.
pub fn in_words(left_out: &[(Stage, &'static dyn Workload)]) -> String {
    let names: Vec<String> =
        left_out.iter().map(|(stage, load)| format!("{} ({stage})", load.name())).collect();
    format!("left out to stay within the time: {}", names.join(", "))
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
    fn what_takes_longest_is_left_out_and_named() {
        let plan = |within: &[&str]| {
            let words = ["compare", "--dir", "/tmp", "--stages", "host", "--backends", "native"];
            let more = ["--workloads", "fio,dd,bonnie-direct", "--rounds", "12"];
            let words = words.iter().chain(&more).chain(within);
            Plan::from_args(&Cli::parse_from(words).args).expect("a plan")
        };
        let env = Env::new("/nonexistent".into(), "/nonexistent".into());
        let whole = plan(&[]);
        let all = matrix(&whole, &env).0;
        let most = expected(&whole, &all);
        let some = plan(&["--within", "10m"]);
        assert!(most > 600.0, "{most}");
        let mut arms = all.clone();
        let out = fit(&some, &mut arms);
        assert!(expected(&some, &arms) <= 600.0);
        assert_eq!(out.first().map(|(_, load)| load.name()), Some("bonnie-direct"));
        assert!(in_words(&out).contains("bonnie-direct (host)"));
        let skipped = skips(&all, &out, 600.0);
        assert_eq!(skipped.len(), out.len(), "the twin is no backend of its own");
        // All that is left fits, and no more was left out than had to be.
        let back = out.last().expect("one").1;
        arms[0].1.iter_mut().for_each(|arm| arm.workloads.push(back));
        assert!(expected(&some, &arms) > 600.0);
        // Nothing fits into no time at all.
        let none = plan(&["--within", "1ms"]);
        let mut arms = all;
        fit(&none, &mut arms);
        assert!(arms.iter().all(|(_, arms)| arms.is_empty()));
        let wrong = ["compare", "--within", "soon"];
        assert!(Cli::try_parse_from(wrong).is_err());
    }
}
