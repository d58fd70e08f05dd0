//! Where a load runs. One file each says all that plans, runs and reports ask of it; [`of`] has them by their names, which are
//! listed with [`Name`].

mod boot;
pub mod durable;
mod here;
mod inside;
pub mod kind;
mod pair;
mod start;
mod two_bonnie;

use crate::backend::{Entry, Inner};
use crate::env::{Env, Missing};
use crate::plan::Plan;
use crate::run::running::Running;
use crate::sample::Stage as Name;
use crate::workload::Workload;
use kind::Stage;

/// The files with stages.
macro_rules! files {
    ($($file:ident)*) => {
        $(pub mod $file;)*
        const FILES: &[&[&dyn Stage]] = &[$($file::STAGES),*];
    };
}

files! { guest host two two_guests xen }

/// The stage of that name.
pub fn of(name: Name) -> &'static dyn Stage {
    let mut all = FILES.iter().copied().flatten().copied();
    all.find(|stage| stage.name() == name).unwrap_or_else(|| unreachable!("no file has {name}"))
}

/// Bytes on the disks' file system that a stage with these arms needs.
pub fn room(stage: Name, plan: &Plan, arms: &[Running]) -> u64 {
    if arms.is_empty() { 0 } else { of(stage).room(plan, arms) }
}

/// Bytes that the durability check of a stage needs, before all others and not at the same time.
pub fn room_of_check(stage: Name, arms: &[Running]) -> u64 {
    if of(stage).counts_beforehand() { durable::room(arms) } else { 0 }
}

/// Why a backend cannot run on a stage.
pub fn missing(stage: Name, entry: &Entry, env: &Env) -> Option<Missing> {
    of(stage).missing(entry, env).or_else(|| {
        let loops = matches!(entry.backend.inner(), Inner::Loop { .. });
        loops.then(|| env.program("mkfs.ext4", "e2fsprogs")).flatten()
    })
}

/// Why a workload cannot run with a backend on a stage.
pub fn missing_workload(
    stage: Name,
    entry: &Entry,
    workload: &dyn Workload,
    env: &Env,
) -> Option<Missing> {
    of(stage).missing_workload(entry, workload, env)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::workload::{self, Settings};

    /// Everything that plans, runs and reports ask of a stage comes from its own file.
    #[test]
    fn every_stage_says_all_that_is_asked_of_it() {
        let settings = Settings {
            size: 64 << 20,
            run: std::time::Duration::from_secs(1),
            ramp: std::time::Duration::ZERO,
            seed: 1,
            capacity: None,
        };
        assert_eq!(FILES.iter().map(|file| file.len()).sum::<usize>(), Name::ALL.len());
        let mut headings = BTreeSet::new();
        let mut places = BTreeSet::new();
        for name in Name::ALL {
            let stage = of(name);
            assert_eq!(stage.name(), name);
            assert_eq!(serde_json::to_value(name).unwrap(), name.name());
            let words = stage.words();
            assert!(headings.insert(words.heading), "{name}: {}", words.heading);
            assert!(places.insert(words.place), "{name} has the place of another");
            assert!(!words.what.is_empty() && !words.page_cache.is_empty(), "{name}");
            assert!(stage.booting(2) > 0.0, "{name}");
            let (who, share) = stage.client(None, Some(0.5));
            assert!(!who.is_empty() && share.is_some(), "{name}");
            let runs: Vec<_> = workload::all().filter(|load| load.runs_on(name)).collect();
            assert!(runs.iter().all(|load| stage.seconds(*load, &settings) > 0.0), "{name}");
            // Two at once are checked where one is.
            assert_eq!(stage.of_one().is_some(), name.is_contention(), "{name}");
            assert!(stage.of_one().is_none_or(|one| !one.is_contention()), "{name}");
        }
    }
}
