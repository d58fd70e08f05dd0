//! Servers of one kind side by side on this machine, under one client: Ringtap, its peers, and the file itself where that client can
//! open it.

use super::file::PlanFile;
use crate::sample::Stage;

/// 4 KiB at random, and 1 MiB in order.
const LOADS: &[&str] = &["fio"];
/// What waits for another machine.
const SMALL: &[&str] =
    &["randread-4k-qd1", "randread-4k-qd32", "randwrite-4k-qd1", "randwrite-4k-qd32"];

/// A plan's name, and the plan.
type Named = (&'static str, fn() -> PlanFile);

/// The plans by their names.
pub const PLANS: &[Named] = &[("nbd", nbd), ("vhost-user", vhost_user), ("remote", remote)];

/// The plan of that name.
pub fn find(name: &str) -> Option<PlanFile> {
    PLANS.iter().find(|(of, _)| *of == name).map(|(_, plan)| plan())
}

fn of(stage: Stage, backends: &[&str], workloads: &[&str]) -> PlanFile {
    let list = |list: &[&str]| Some(list.iter().map(|name| (*name).to_owned()).collect());
    PlanFile {
        stages: list(&[stage.name()]),
        backends: list(backends),
        workloads: list(workloads),
        ..PlanFile::default()
    }
}

fn nbd() -> PlanFile {
    let peers = ["qemu-nbd", "qemu-nbd-threads", "qemu-nbd-native", "nbdkit"];
    of(Stage::Host, &[&["ringtap-nbd"][..], &peers].concat(), LOADS)
}

fn vhost_user() -> PlanFile {
    let ours = ["native-load", "ringtap-vhost", "slow"];
    let peers = ["qsd-vhost", "qsd-vhost-threads", "qsd-vhost-native", "qsd-vhost-writethrough"];
    of(Stage::Host, &[&ours[..], &peers].concat(), LOADS)
}

fn remote() -> PlanFile {
    let servers = [
        "qsd-on-qemu-nbd",
        "ringtap-on-qemu-nbd",
        "slow",
        "qsd-on-nbdkit",
        "ringtap-on-nbdkit",
        "qsd-on-ringtap",
        "ringtap-on-ringtap",
    ];
    let ceph = ["qsd-rbd", "ringtap-rbd", "fio-rbd"];
    of(Stage::Remote, &[&servers[..], &ceph].concat(), SMALL)
}
