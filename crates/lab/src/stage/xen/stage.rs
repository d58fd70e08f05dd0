//! What is asked of the stage `xen`.

use super::{STAGE, Xen, renewals, room};
use crate::backend::Entry;
use crate::env::{Env, Missing};
use crate::error::Result;
use crate::plan::Plan;
use crate::run::runner::Runner;
use crate::run::running::Running;
use crate::sample::Stage as Name;
use crate::stage::kind::{Prepared, Stage, TRANSLATED, Words};
use crate::workload::{Client, Settings, Workload};

/// Why nothing can run on this stage.
fn missing(env: &Env) -> Option<Missing> {
    env.program("qemu-system-x86_64", "qemu-system-x86")
        .or_else(|| env.program("mkfs.ext4", "e2fsprogs"))
        .or_else(|| env.xen().err())
}

/// Why a workload cannot run here.
pub(super) fn missing_workload(workload: &dyn Workload, env: &Env) -> Option<Missing> {
    match workload.client() {
        Client::Job | Client::Dd | Client::Flushes | Client::Two => None,
        // Those by schedule and runs one after another take too long there.
        Client::Fio if !workload.is_rated() => None,
        Client::TwoFiles => workload.missing(env),
        Client::Files if !workload.is_repeated() => {
            workload.missing(env).or_else(|| env.program("mkfs.ext4", "e2fsprogs"))
        }
        _ => Some(Missing::new("the guests of Xen do not run it", "the stage vm")),
    }
}

/// Under a nested Xen what works on a file system takes so many times as long: each system call that blocks passes two schedulers
/// that are translated.
const NESTED: f64 = 4.0;
/// Seconds in which an arm's disks are attached and detached.
pub const TURN: f64 = 8.0;

/// The stages of this file.
pub const STAGES: &[&dyn Stage] = &[&InXen];

/// The stage.
struct InXen;

impl Stage for InXen {
    fn name(&self) -> Name {
        STAGE
    }
    fn words(&self) -> Words {
        Words {
            heading: "In Xen guests",
            what: "guests of a nested Xen, booted once for all rounds",
            behind: " (Xen)",
            page_cache: "the first domain's",
            place: 1,
        }
    }
    fn missing(&self, _: &Entry, env: &Env) -> Option<Missing> {
        missing(env)
    }
    fn missing_workload(&self, _: &Entry, workload: &dyn Workload, env: &Env) -> Option<Missing> {
        missing_workload(workload, env)
    }
    fn room(&self, plan: &Plan, arms: &[Running]) -> u64 {
        room(plan, arms)
    }
    fn prepare(&self, runner: &mut Runner<'_>, arms: &[Running]) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(Xen::prepare(runner, arms)?))
    }
    fn seconds(&self, workload: &dyn Workload, settings: &Settings) -> f64 {
        let work = workload.seconds(settings);
        match workload.client() {
            Client::Two => work + 22.0,
            Client::TwoFiles => work * TRANSLATED + 12.0,
            Client::Files => work * NESTED,
            _ => work * TRANSLATED,
        }
    }
    fn booting(&self, arms: usize) -> f64 {
        TURN * arms as f64
    }
    fn renewing(&self, arm: &Running) -> f64 {
        TURN * renewals(arm) as f64
    }
    fn client(&self, thread: Option<f64>, all: Option<f64>) -> (&'static str, Option<f64>) {
        match thread {
            Some(thread) => ("one processor of the guest", Some(thread)),
            None => ("the guest's processor", all),
        }
    }
    /// It boots once.
    fn beforehand(&self) -> f64 {
        90.0
    }
    /// Its disks are attached one after the other: it counts by itself.
    fn counts_beforehand(&self) -> bool {
        false
    }
}
