//! Runs that belong together: merged into one of more rounds, and what makes two runs unlike.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::run::folder::{self, Record, State};
use crate::sample::{Sample, Stage};
use crate::workload::bonnie;

/// Puts runs of the same plan on the same machine together: rounds are counted on.
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
        let mut unlike = sets(sum, &record);
        unlike.extend(conditions(sum, &record));
        unlike.extend(versions_of_bonnie(all, &samples));
        if let Some(Unlike { what, before, after }) = unlike.first() {
            return Err(Error::Plan(format!(
                "{} cannot be merged with {}: {what} differs ({after}, and {before}); `ringtap report --before` sets two \
                 runs side by side",
                path.display(),
                runs.first().map_or(Path::new(""), |first| first).display()
            )));
        }
        let before = sum.plan.rounds;
        let boots = all.iter().filter_map(|sample| sample.boot).max().map_or(0, |last| last + 1);
        all.extend(samples.into_iter().map(|s| Sample {
            round: s.round + before,
            boot: s.boot.map(|boot| boot + boots),
            ..s
        }));
        sum.plan.rounds += record.plan.rounds;
        sum.ended = record.ended;
        if record.state != State::Complete {
            sum.state = record.state;
        }
        sum.troubles.extend(record.troubles);
    }
    whole.ok_or_else(|| Error::Plan("no run was named".into()))
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
    // What an older lab did not ask is not known to differ.
    let both = |what: &str, one: &[(String, String)], two: &[(String, String)]| {
        let pairs = one.iter().filter_map(|(name, before)| {
            let (_, after) = two.iter().find(|(of, _)| of == name)?;
            unlike(&format!("the {what}{name}"), before.clone(), after.clone())
        });
        pairs.collect::<Vec<_>>()
    };
    list.extend(both("", &one.host.state, &two.host.state));
    list.extend(both("version of ", &one.host.versions, &two.host.versions));
    list
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
