//! Where a load runs. One file each says all that plans, runs and reports ask of it; [`of`] has them by their names.

mod boot;
pub mod durable;
pub mod guest;
mod here;
pub mod host;
mod inside;
mod start;
pub mod two;
mod two_bonnie;
pub mod two_guests;
pub mod xen;

use crate::backend::{Entry, Inner};
use crate::env::{Env, Missing};
use crate::error::Result;
use crate::plan::Plan;
use crate::run::{Runner, Running};
use crate::sample::Stage as Name;
use crate::workload::{Settings, Workload};

/// Under TCG a guest's programs take so many times as long.
pub const TRANSLATED: f64 = 1.7;

/// The stage of that name.
pub fn of(name: Name) -> &'static dyn Stage {
    match name {
        Name::Host => &host::OnHost,
        Name::Guest => &guest::InGuest { pc: false },
        Name::Vm => &guest::InGuest { pc: true },
        Name::Two => &two::TwoLoads,
        Name::TwoGuests => &two_guests::InTwo { pc: false },
        Name::TwoVms => &two_guests::InTwo { pc: true },
        Name::Xen => &xen::InXen,
        Name::Remote => &host::Elsewhere,
    }
}

/// How a reader knows a stage.
#[derive(Clone, Copy, Debug)]
pub struct Words {
    /// Its heading.
    pub heading: &'static str,
    /// What it is, where a run has not said it.
    pub what: &'static str,
    /// Behind a load's name; nothing where it is what most ask for.
    pub behind: &'static str,
    /// Whose page cache a disk goes through that goes through one.
    pub page_cache: &'static str,
    /// Its place among stages, the one first that a reader wants first.
    pub place: u8,
}

/// A kind of place where loads run.
pub trait Stage: Sync {
    /// The name in plans and samples.
    fn name(&self) -> Name;
    /// How a reader knows it.
    fn words(&self) -> Words;
    /// Why a backend cannot run here.
    fn missing(&self, entry: &Entry, env: &Env) -> Option<Missing>;
    /// Why a workload cannot run with a backend here.
    fn missing_workload(
        &self,
        entry: &Entry,
        workload: &dyn Workload,
        env: &Env,
    ) -> Option<Missing>;
    /// Bytes on the disks' file system that it needs, with these arms.
    fn room(&self, plan: &Plan, arms: &[Running]) -> u64;
    /// Makes what all rounds use.
    fn prepare(&self, runner: &mut Runner<'_>, arms: &[Running]) -> Result<Box<dyn Prepared>>;
    /// Seconds that a workload takes here.
    fn seconds(&self, workload: &dyn Workload, settings: &Settings) -> f64;
    /// Seconds in which a round's servers, and its guests, are started.
    fn booting(&self, arms: usize) -> f64;
    /// Seconds of each round in which an arm's overlays and snapshots are made anew for what writes to them.
    fn renewing(&self, arm: &Running) -> f64;
    /// What of the client is used up first, and how much of it was used: by `thread`, the share of its busiest thread, or by
    /// `all`, that of all its threads.
    fn client(&self, thread: Option<f64>, all: Option<f64>) -> (&'static str, Option<f64>);
    /// Seconds before the first round, its disks aside.
    fn beforehand(&self) -> f64 {
        0.0
    }
    /// Whether its flushes are counted before all rounds, on disks of their own.
    fn counts_beforehand(&self) -> bool {
        true
    }
    /// Whether arms are prepared even where nothing but their flushes is to be counted.
    fn counts_in_rounds(&self) -> bool {
        !self.counts_beforehand()
    }
    /// The stage of one load that uses the same servers, where this is one of two.
    fn of_one(&self) -> Option<Name> {
        None
    }
}

/// A stage that is ready for its rounds.
pub trait Prepared {
    /// One round of these arms.
    fn round(&mut self, runner: &mut Runner<'_>, round: u32, order: &[&Running]) -> Result<()>;
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

/// What a workload lacks of itself, on every stage but Xen's.
fn of_itself(entry: &Entry, workload: &dyn Workload, env: &Env) -> Option<Missing> {
    workload.missing(env).or_else(|| workload.of_snapshots().then(|| snapshot(entry)).flatten())
}

fn snapshot(entry: &Entry) -> Option<Missing> {
    let fresh = entry.backend.inner().is_snapshot()
        || matches!(entry.backend.image(), crate::backend::Image::Overlay(_));
    (!fresh).then(|| {
        Missing::new("it is no snapshot", "lvm-snapshot, virtio-overlay and ringtap-overlay are")
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::workload;

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
        let mut headings = BTreeSet::new();
        let mut places = BTreeSet::new();
        for name in Name::ALL {
            let stage = of(name);
            assert_eq!(stage.name(), name);
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
