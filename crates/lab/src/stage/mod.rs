//! Where a load runs, one file each.

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

use crate::backend::volume::BESIDE;
use crate::backend::{Entry, Inner, Reach};
use crate::env::{Env, Missing};
use crate::plan::Plan;
use crate::run::Running;
use crate::sample::Stage;
use crate::workload::Workload;

/// Bytes on the disks' file system that a stage with these arms needs.
pub fn room(stage: Stage, plan: &Plan, arms: &[Running]) -> u64 {
    if arms.is_empty() {
        return 0;
    }
    let files = arms.iter().any(|arm| arm.workloads.iter().any(|w| w.on_file_system()));
    match stage {
        Stage::Host => {
            let any = |of: fn(Inner) -> bool| arms.iter().any(|arm| of(arm.entry.backend.inner()));
            let snapshot = any(Inner::is_snapshot);
            let beside = snapshot || any(|inner| inner == Inner::Thin);
            plan.size
                + if files { plan.size } else { 0 }
                + if snapshot { plan.size } else { 0 }
                + if beside { BESIDE } else { 0 }
        }
        Stage::Guest | Stage::Vm => arms.iter().map(|arm| guest::room(plan.size, arm)).sum::<u64>(),
        Stage::Two => two::room(plan.size, arms),
        Stage::TwoGuests | Stage::TwoVms => {
            2 * arms.iter().map(|arm| guest::room(plan.size, arm)).sum::<u64>()
        }
        Stage::Xen => xen::room(plan, arms),
        // A start's download or cache beside the disk, and what a cluster's monitor keeps.
        Stage::Remote => 2 * plan.size + (256 << 20),
    }
}

/// Bytes that the durability check of a stage needs, before all others and not at the same time.
pub fn room_of_check(stage: Stage, arms: &[Running]) -> u64 {
    if stage == Stage::Xen { 0 } else { durable::room(arms) }
}

/// Why a backend cannot run on a stage.
pub fn missing(stage: Stage, entry: &Entry, env: &Env) -> Option<Missing> {
    match stage {
        Stage::Host | Stage::Two | Stage::Remote => None,
        Stage::Guest | Stage::TwoGuests => env.appliance().err(),
        Stage::Vm | Stage::TwoVms => {
            let nbd = entry.backend.reach() == Reach::Nbd;
            env.program("qemu-system-x86_64", "qemu-system-x86")
                .or_else(|| env.pc().err())
                .or_else(|| nbd.then(|| env.pc_network()).flatten())
        }
        Stage::Xen => xen::missing(env),
    }
    .or_else(|| {
        let loops = matches!(entry.backend.inner(), Inner::Loop { .. });
        loops.then(|| env.program("mkfs.ext4", "e2fsprogs")).flatten()
    })
}

/// Why a workload cannot run with a backend on a stage.
pub fn missing_workload(
    stage: Stage,
    entry: &Entry,
    workload: &dyn Workload,
    env: &Env,
) -> Option<Missing> {
    if stage == Stage::Xen {
        return xen::missing_workload(workload, env);
    }
    let of_itself = workload
        .missing(env)
        .or_else(|| workload.of_snapshots().then(|| snapshot(entry)).flatten());
    of_itself.or_else(|| match stage {
        Stage::Host | Stage::Remote => host::missing(entry, workload, env),
        Stage::Guest | Stage::Vm => guest::missing_workload(workload, env),
        Stage::Two => {
            let by_load = matches!(entry.backend.reach(), Reach::VhostUser | Reach::Native);
            by_load.then(|| env.lab_load()).flatten()
        }
        Stage::TwoGuests | Stage::TwoVms | Stage::Xen => None,
    })
}

fn snapshot(entry: &Entry) -> Option<Missing> {
    let fresh = entry.backend.inner().is_snapshot()
        || matches!(entry.backend.image(), crate::backend::Image::Overlay(_));
    (!fresh).then(|| {
        Missing::new("it is no snapshot", "lvm-snapshot, virtio-overlay and ringtap-overlay are")
    })
}
