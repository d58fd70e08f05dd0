//! A kind of place where loads run: what plans, runs and reports ask of it.

use crate::backend::{Entry, Image};
use crate::env::{Env, Missing};
use crate::error::Result;
use crate::plan::Plan;
use crate::run::runner::Runner;
use crate::run::running::Running;
use crate::sample::Stage as Name;
use crate::workload::{Settings, Workload};

/// Under TCG a guest's programs take so many times as long.
pub const TRANSLATED: f64 = 1.7;

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

/// What a workload lacks of itself, on every stage but Xen's.
pub fn of_itself(entry: &Entry, workload: &dyn Workload, env: &Env) -> Option<Missing> {
    workload.missing(env).or_else(|| workload.of_snapshots().then(|| snapshot(entry)).flatten())
}

fn snapshot(entry: &Entry) -> Option<Missing> {
    let fresh =
        entry.backend.inner().is_snapshot() || matches!(entry.backend.image(), Image::Overlay(_));
    (!fresh).then(|| {
        Missing::new("it is no snapshot", "lvm-snapshot, virtio-overlay and ringtap-overlay are")
    })
}
