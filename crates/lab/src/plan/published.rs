//! The plan `published`.

use std::collections::BTreeMap;

use super::PlanFile;

/// The first domain of Xen on its own volume, and a PV guest on the same.
const NATIVE: &str = "native";
const PV: &str = "phy-lvm";
/// Shows in every load whether it could show a difference.
const SLOW: &str = "slow";
const TAP_SLOW: &str = "tap-slow";

/// The published comparisons, anew: hypervisors' disks, file against LVM, loop against tap, a fresh snapshot, two guests,
/// cached copies, archiving. Twelve rounds: the fewest for an answer.
pub fn plan() -> PlanFile {
    let list = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let names = |names: &[&str]| Some(list(names));
    // Each question on the backends that it is about. What cached copies and a tree of files show is the guest's kernel: a
    // few disks below it will do.
    let few = ["virtio-raw", "ringtap-vhost", "loop", SLOW, NATIVE, PV, "tap-raw", TAP_SLOW];
    let disks = ["virtio-raw", "ide", "qsd-vhost", "ringtap-vhost", "loop", "lvm", SLOW];
    // The host's caches on, off and unsafe; the disk's own, which the guest has turned off.
    let caches = ["ide-writeback", "ide-unsafe", "virtio-default", "virtio-unsafe"];
    let off = ["ide-cache-off", "virtio-cache-off"];
    // Xen's: paravirtual with and without a page cache, an HVM guest's emulated disk and its PV driver.
    let xen = [PV, "file", "hvm-ide", "hvm-ide-cache-off", "hvm-pv", "tap-raw", TAP_SLOW];
    let dd = [&disks[..], &caches, &off, &xen].concat();
    let snapshots = ["lvm", "lvm-snapshot", "ringtap-overlay"];
    let bonnie =
        [&disks[..], &["lvm-snapshot", "ringtap-overlay", NATIVE, PV, "tap-raw", TAP_SLOW]]
            .concat();
    let two = ["ringtap-vhost", "loop", "lvm", SLOW];
    // Small writes to a fresh snapshot: what is copied beside them is what it costs.
    let fresh = [
        "virtio-raw",
        "virtio-overlay",
        "ringtap-overlay",
        "lvm",
        "lvm-snapshot",
        "ringtap-vhost",
        SLOW,
    ];
    // Two loads on one device of this machine; in two virtual PCs it is bonnie++, as it was published.
    let pairs = [
        "two/native",
        "two/loop",
        "two/ringtap-nbd",
        "two/qemu-nbd",
        "two/ringtap-vhost",
        "two/lvm",
        "two/slow",
    ];
    let only = |workload: &str, backends: &[&str]| (workload.to_owned(), list(backends));
    PlanFile {
        stages: names(&["vm", "two", "two-vms", "xen"]),
        backends: names(&[
            "virtio-raw",
            "virtio-overlay",
            "ide",
            "ide-writeback",
            "ide-unsafe",
            "virtio-default",
            "virtio-unsafe",
            "ide-cache-off",
            "virtio-cache-off",
            "qsd-vhost",
            "ringtap-vhost",
            SLOW,
            "ringtap-overlay",
            "loop",
            "lvm",
            "lvm-snapshot",
            "native",
            "ringtap-nbd",
            "qemu-nbd",
            NATIVE,
            PV,
            "file",
            "tap-raw",
            "hvm-ide",
            "hvm-ide-cache-off",
            "hvm-pv",
            TAP_SLOW,
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
            "two-bonnie",
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
            only("two-bonnie", &two),
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
