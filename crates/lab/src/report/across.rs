//! Runs that belong together: merged into one of more rounds or of more loads, and what makes two runs unlike.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::run::folder::{self, Arm, Record, Skip, State};
use crate::run::rest;
use crate::sample::{Sample, Stage, twin};
use crate::workload::bonnie;

/// Puts runs of the same plan on the same machine together: rounds are counted on, or, where no load was measured in both, loads
/// are set beside each other.
pub fn merge(runs: &[&Path]) -> Result<(Record, Vec<Sample>)> {
    let mut whole: Option<(Record, Vec<Sample>)> = None;
    let mut known: Vec<Record> = Vec::new();
    for path in runs {
        let (record, samples) = folder::read(path)?;
        if known.iter().any(|other| is_same(other, &record)) {
            return Err(Error::Plan(format!(
                "{} is a run that was named already: its rounds would count twice",
                path.display()
            )));
        }
        known.push(record.clone());
        let Some((sum, all)) = &mut whole else {
            whole = Some((record, samples));
            continue;
        };
        let beside = rest::loads(all).is_disjoint(&rest::loads(&samples));
        let mut unlike = if beside { plans(sum, &record) } else { sets(sum, &record) };
        unlike.extend(conditions(sum, &record));
        let versions = versions(sum, &record);
        if beside {
            // Each load was measured by one of them.
            let words = |u: &Unlike| {
                format!("{} differs between loads: {}, and {}", u.what, u.before, u.after)
            };
            sum.troubles.extend(versions.iter().map(words));
        } else {
            unlike.extend(versions);
        }
        unlike.extend(versions_of_bonnie(all, &samples));
        if let Some(Unlike { what, before, after }) = unlike.first() {
            return Err(Error::Plan(format!(
                "{} cannot be merged with {}: {what} differs ({after}, and {before}); `ringtap report --before` sets two \
                 runs side by side",
                path.display(),
                runs.first().map_or(Path::new(""), |first| first).display()
            )));
        }
        sum.ended.clone_from(&record.ended);
        if record.state != State::Complete {
            sum.state = record.state;
        }
        sum.troubles.extend(record.troubles.iter().cloned());
        if beside {
            add_loads((sum, all), (&record, samples));
        } else {
            let before = sum.plan.rounds;
            add(all, samples, before);
            sum.plan.rounds += record.plan.rounds;
        }
    }
    whole.ok_or_else(|| Error::Plan("no run was named".into()))
}

/// Behind the samples of the first run those of another, so many rounds later, each boot one of its own.
fn add(all: &mut Vec<Sample>, samples: Vec<Sample>, rounds: u32) {
    let boots = all.iter().filter_map(|sample| sample.boot).max().map_or(0, |last| last + 1);
    all.extend(samples.into_iter().map(|s| Sample {
        round: s.round + rounds,
        boot: s.boot.map(|boot| boot + boots),
        ..s
    }));
}

/// Beside the loads of the first run those of another, with their arms and guests. What either has measured is no gap any more.
fn add_loads(
    (sum, all): (&mut Record, &mut Vec<Sample>),
    (record, mut samples): (&Record, Vec<Sample>),
) {
    let checked: BTreeSet<(Stage, String)> =
        all.iter().filter(|s| rest::is_check(s)).map(|s| (s.stage, s.arm.clone())).collect();
    samples.retain(|s| !(rest::is_check(s) && checked.contains(&(s.stage, s.arm.clone()))));
    add(all, samples, 0);
    let is_measured = |skip: &Skip| {
        let load = |s: &Sample| skip.workload.as_ref().is_none_or(|load| *load == s.workload);
        all.iter().any(|s| s.stage == skip.stage && s.arm == skip.backend && load(s))
    };
    for skip in &record.skipped {
        if !sum.skipped.contains(skip) {
            sum.skipped.push(skip.clone());
        }
    }
    sum.skipped.retain(|skip| !is_measured(skip));
    for arm in &record.arms {
        if !sum.arms.iter().any(|known| known.stage == arm.stage && known.name == arm.name) {
            sum.arms.push(arm.clone());
        }
    }
    for (stage, words) in &record.stages {
        if !sum.stages.iter().any(|(known, _)| known == stage) {
            sum.stages.push((*stage, words.clone()));
        }
    }
    // The first of a stage is its reference, which is the one that has a twin.
    let known = sum.arms.clone();
    let has_twin =
        |arm: &Arm| known.iter().any(|a| a.stage == arm.stage && a.name == twin(&arm.name));
    let is_twin = |arm: &Arm| arm.name != arm.backend;
    let place = |stage: Stage| sum.plan.stages.iter().position(|of| *of == stage);
    sum.arms.sort_by_key(|arm| (place(arm.stage), !has_twin(arm), !is_twin(arm)));
}

/// Whether two records are of one run, or of copies of it.
pub fn is_same(one: &Record, two: &Record) -> bool {
    one.began == two.began && one.plan == two.plan
}

/// What two runs do not have in common.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Unlike {
    /// What it is.
    pub what: String,
    /// In the first.
    pub before: String,
    /// In the second.
    pub after: String,
}

/// What differs, if it does.
pub fn unlike(what: &str, before: String, after: String) -> Option<Unlike> {
    (before != after).then(|| Unlike { what: what.into(), before, after })
}

/// What was asked.
fn plans(one: &Record, two: &Record) -> Vec<Unlike> {
    let backends = |r: &Record| {
        let names: Vec<_> =
            r.plan.backends.iter().map(|(stage, name)| format!("{stage} {name}")).collect();
        names.join(", ")
    };
    [
        unlike(
            "the plan's workloads",
            one.plan.workloads.join(", "),
            two.plan.workloads.join(", "),
        ),
        unlike("the plan's backends", backends(one), backends(two)),
        unlike("the number of rounds", one.plan.rounds.to_string(), two.plan.rounds.to_string()),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// What was measured.
fn sets(one: &Record, two: &Record) -> Vec<Unlike> {
    let arms = |r: &Record| {
        let names: Vec<_> =
            r.arms.iter().map(|arm| format!("{} {}", arm.stage, arm.name)).collect();
        names.join(", ")
    };
    let workloads = |r: &Record| r.plan.workloads.join(", ");
    [
        unlike("the set of workloads", workloads(one), workloads(two)),
        unlike("the set of backends that ran", arms(one), arms(two)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// How and where it was measured.
pub fn conditions(one: &Record, two: &Record) -> Vec<Unlike> {
    let of = |what: &str, get: &dyn Fn(&Record) -> String| unlike(what, get(one), get(two));
    let mut list: Vec<Unlike> = [
        of("the size of the disks", &|r| format!("{} MiB", r.plan.size >> 20)),
        of("the measured time", &|r| format!("{} s after {} s", r.plan.seconds, r.plan.ramp)),
        of("the kernel", &|r| r.host.kernel.clone()),
        of("the processor", &|r| format!("{} × {}", r.host.cpus, r.host.cpu)),
        of("the memory", &|r| format!("{} MiB", r.host.memory >> 20)),
        of("the file system of the disks", &|r| r.host.file_system.clone()),
    ]
    .into_iter()
    .flatten()
    .collect();
    for stage in Stage::ALL {
        let words = |r: &Record| {
            let known = r.stages.iter().find(|(of, _)| of == &stage);
            known.map(|(_, words)| super::words::without_folders(words))
        };
        if let (Some(before), Some(after)) = (words(one), words(two)) {
            list.extend(unlike(&format!("the stage {stage}"), before, after));
        }
    }
    list.extend(in_both("", &one.host.state, &two.host.state));
    list
}

/// What measured, and what was measured.
pub fn versions(one: &Record, two: &Record) -> Vec<Unlike> {
    in_both("version of ", &one.host.versions, &two.host.versions)
}

/// What an older lab did not ask is not known to differ.
fn in_both(what: &str, one: &[(String, String)], two: &[(String, String)]) -> Vec<Unlike> {
    let pairs = one.iter().filter_map(|(name, before)| {
        let (_, after) = two.iter().find(|(of, _)| of == name)?;
        unlike(&format!("the {what}{name}"), before.clone(), after.clone())
    });
    pairs.collect()
}

/// The versions of bonnie++, where both runs have it and they differ.
pub fn versions_of_bonnie(one: &[Sample], two: &[Sample]) -> Option<Unlike> {
    let versions = |samples: &[Sample]| {
        let all: BTreeSet<&str> =
            samples.iter().filter_map(|s| bonnie::version(s.note.as_deref()?)).collect();
        all.into_iter().collect::<Vec<_>>().join(", ")
    };
    let (before, after) = (versions(one), versions(two));
    let both = !before.is_empty() && !after.is_empty();
    unlike("the version of bonnie++", before, after).filter(|_| both)
}
