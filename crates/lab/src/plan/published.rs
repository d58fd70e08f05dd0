//! The plan `published`.

use std::collections::BTreeMap;

use super::PlanFile;

/// The published comparisons, anew: hypervisors' disks, file against LVM, loop against tap, a fresh snapshot, two guests,
/// cached copies, archiving. Twelve rounds: the fewest for an answer.
pub fn plan() -> PlanFile {
    let list = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let names = |names: &[&str]| Some(list(names));
    // Each question on the backends that it is about. What cached copies and a tree of files show is the guest's kernel: a
    // few disks below it will do.
    let few = ["virtio-raw", "ringtap-vhost", "loop"];
    let disks = ["virtio-raw", "ide", "qsd-vhost", "ringtap-vhost", "loop", "lvm", "xen-blkback"];
    // The host's caches on, off and unsafe.
    let caches = ["ide-writeback", "ide-unsafe", "virtio-default", "virtio-unsafe"];
    let dd = [&disks[..], &caches].concat();
    let snapshots = ["lvm", "lvm-snapshot", "ringtap-overlay"];
    let bonnie = [&disks[..], &["lvm-snapshot", "ringtap-overlay"]].concat();
    // Small writes to a fresh snapshot: what is copied beside them is what it costs.
    let fresh = ["virtio-raw", "virtio-overlay", "ringtap-overlay", "lvm", "lvm-snapshot"];
    let pairs = ["native", "loop", "ringtap-nbd", "qemu-nbd", "ringtap-vhost", "lvm"];
    let only = |workload: &str, backends: &[&str]| (workload.to_owned(), list(backends));
    PlanFile {
        stages: names(&["vm", "two", "two-guests"]),
        backends: names(&[
            "virtio-raw",
            "virtio-overlay",
            "ide",
            "ide-writeback",
            "ide-unsafe",
            "virtio-default",
            "virtio-unsafe",
            "qsd-vhost",
            "ringtap-vhost",
            "ringtap-overlay",
            "loop",
            "lvm",
            "lvm-snapshot",
            "native",
            "ringtap-nbd",
            "qemu-nbd",
            "xen-blkback",
        ]),
        workloads: names(&[
            "randwrite-4k-qd32",
            "read-1m-qd8",
            "bonnie-direct",
            "bonnie-runs",
            "dd-throughput",
            "dd-latency-direct",
            "dd-latency-dsync",
            "filecopy",
            "archive",
            "snapshot-life",
            "durability",
            "two-write",
            "quiet-read",
        ]),
        only: Some(BTreeMap::from([
            only("bonnie-direct", &bonnie),
            only("bonnie-runs", &snapshots),
            only("randwrite-4k-qd32", &fresh),
            only("read-1m-qd8", &disks),
            only("dd-throughput", &dd),
            only("dd-latency-direct", &dd),
            only("dd-latency-dsync", &disks),
            only("filecopy", &few),
            only("archive", &few),
            only("two-write", &pairs),
            only("quiet-read", &pairs),
        ])),
        rounds: Some(12),
        size: Some("96M".into()),
        seconds: Some(0.4),
        ramp: Some(0.1),
        ..PlanFile::default()
    }
}
