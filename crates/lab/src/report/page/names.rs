//! What a reader calls the ways of serving a disk, where they are tried and what is done to them.

use crate::run::folder::Arm;
use crate::sample::{Metric, Stage};
use crate::workload::Workload;

/// Names that say more to a reader than a backend's name in a plan does.
const WAYS: &[(&str, &str)] = &[
    ("native", "the file itself"),
    ("native-load", "the file itself, by vhost-user's client"),
    ("loop", "loop device"),
    ("loop-direct", "loop device, direct I/O"),
    ("ringtap-nbd", "Ringtap, NBD"),
    ("ringtap-nbd-kernel", "Ringtap, NBD, kernel's client"),
    ("ringtap-fuse", "Ringtap, FUSE"),
    ("ringtap-vhost", "Ringtap, raw"),
    ("slow", "Ringtap, slowed on purpose"),
    ("ringtap-qcow2", "Ringtap, qcow2"),
    ("ringtap-overlay", "Ringtap, fresh overlay"),
    ("ringtap-overlay-plain", "Ringtap, overlay by qemu-img"),
    ("ringtap-luks", "Ringtap, LUKS"),
    ("ublk", "Ringtap, ublk"),
    ("guest-nbd", "Ringtap, NBD, guest's client"),
    ("qemu-nbd", "qemu-nbd"),
    ("qemu-nbd-kernel", "qemu-nbd, kernel's client"),
    ("qemu-nbd-threads", "qemu-nbd, threads"),
    ("qemu-nbd-native", "qemu-nbd, Linux AIO"),
    ("qemu-nbd-unsafe", "qemu-nbd, cache=unsafe"),
    ("qsd-vhost", "qemu-storage-daemon"),
    ("qsd-vhost-threads", "qemu-storage-daemon, threads"),
    ("qsd-vhost-native", "qemu-storage-daemon, Linux AIO"),
    ("qsd-vhost-writeback", "qemu-storage-daemon, cache turned on"),
    ("qsd-vhost-writethrough", "qemu-storage-daemon, writethrough"),
    ("ubd", "User-Mode Linux's own disk"),
    ("virtio-default", "QEMU's virtio-blk, default"),
    ("virtio-best", "QEMU's virtio-blk, at its best"),
    ("host-loop", "virtio-blk on a loop device"),
    ("host-loop-direct", "virtio-blk on a loop device, direct I/O"),
    ("virtio-raw", "virtio-blk in QEMU"),
    ("virtio-qcow2", "virtio-blk, qcow2"),
    ("virtio-overlay", "virtio-blk, fresh overlay"),
    ("virtio-overlay-subclusters", "virtio-blk, overlay with subclusters"),
    ("ide", "IDE in QEMU"),
    ("ide-writeback", "IDE in QEMU, page cache"),
    ("ide-unsafe", "IDE in QEMU, cache=unsafe"),
    ("virtio-unsafe", "virtio-blk in QEMU, cache=unsafe"),
    ("ahci", "SATA in QEMU"),
    ("nvme", "NVMe in QEMU"),
    ("lvm", "LVM volume"),
    ("lvm-snapshot", "LVM with a snapshot"),
    ("lvm-snapshot-64k", "the same, 64 KiB chunks"),
    ("lvm-snapshot-itself", "LVM snapshot, written itself"),
    ("lvm-thin", "LVM thin volume"),
    ("phy-lvm", "Xen's blkback, LVM volume"),
    ("phy-loop", "Xen's blkback, loop device"),
    ("file", "Xen's blkback, file:"),
    ("tap-lvm", "Ringtap, LVM volume"),
    ("tap-raw", "Ringtap, raw"),
    ("tap-grant-copy", "Ringtap, raw, grant copies"),
    ("tap-cached", "Ringtap, raw, page cache"),
    ("tap-qcow2", "Ringtap, qcow2"),
    ("tap-overlay", "Ringtap, fresh overlay"),
    ("tap-vhd", "Ringtap, VHD"),
    ("qsd-on-qemu-nbd", "QEMU's client on qemu-nbd"),
    ("ringtap-on-qemu-nbd", "Ringtap on qemu-nbd"),
    ("qsd-on-nbdkit", "QEMU's client on nbdkit"),
    ("ringtap-on-nbdkit", "Ringtap on nbdkit"),
    ("qsd-on-ringtap", "QEMU's client on Ringtap's server"),
    ("ringtap-on-ringtap", "Ringtap on Ringtap's server"),
    ("qsd-rbd", "QEMU on Ceph"),
    ("ringtap-rbd", "Ringtap on Ceph"),
    ("fio-rbd", "fio's own engine on Ceph"),
    ("http-download", "download, then local"),
    ("http-lazy", "Ringtap, on demand"),
    ("http-boot-list", "Ringtap, boot list"),
    ("http-fill", "Ringtap, all fetched meanwhile"),
];

/// A way of serving a disk, by its name in the run.
pub fn way(name: &str) -> &str {
    let known = WAYS.iter().find(|(of, _)| *of == name);
    known.map_or(name, |(_, label)| label)
}

/// The same of an arm: the twin says what it is.
pub fn arm(arm: &Arm) -> String {
    let label = way(&arm.backend);
    if arm.name == arm.backend { label.to_owned() } else { format!("{label}, again") }
}

/// A stage as a reader would say it.
pub fn stage(stage: Stage) -> &'static str {
    crate::stage::of(stage).words().heading
}

/// Short names of loads whose titles are long.
const LOADS: &[(&str, &str)] = &[
    ("start", "a guest's start, image behind HTTP"),
    ("randread-4k-qd1", "4 KiB random read, depth 1"),
    ("randread-4k-qd32", "4 KiB random read, depth 32"),
    ("randwrite-4k-qd1", "4 KiB random write, depth 1"),
    ("randwrite-4k-qd32", "4 KiB random write, depth 32"),
    ("write-4k-fsync", "4 KiB write with fsync"),
    ("rated-50", "4 KiB random write at 50 % of capacity"),
    ("rated-80", "4 KiB random write at 80 % of capacity"),
    ("dd-throughput", "dd, one large write, direct"),
    ("dd-throughput-dsync", "dd, one large write, durable"),
    ("dd-latency-direct", "dd, 512 B writes, direct"),
    ("dd-latency-dsync", "dd, 512 B writes, each durable"),
    ("bonnie", "bonnie++, page cache"),
    ("bonnie-direct", "bonnie++, direct"),
    ("filecopy", "UnixBench file copy, cached"),
    ("filecopy-durable", "UnixBench file copy, durable"),
    ("archive", "find | cpio, cold caches"),
    ("snapshot-life", "64 KiB writes after a snapshot"),
    ("two-read", "two 4 KiB readers, depth 32"),
    ("two-write", "two 4 KiB writers, depth 32"),
    ("quiet-read", "4 KiB read, depth 1 beside 32"),
    ("quiet-write", "4 KiB write, depth 1 beside 32"),
];

/// A workload, short.
pub fn workload(workload: &dyn Workload) -> &str {
    let known = LOADS.iter().find(|(of, _)| *of == workload.name());
    known.map_or(workload.title(), |(_, label)| label)
}

/// A workload with what is read off it, where that is not plain.
pub fn load(of: &dyn Workload, metric: Metric) -> String {
    let title = workload(of);
    match metric {
        Metric::Iops | Metric::Bandwidth | Metric::TimePerOp | Metric::Elapsed => title.to_owned(),
        Metric::Keeps if !of.name().starts_with("quiet") => format!("{title}: what one keeps"),
        metric => format!("{title}: {}", metric.title()),
    }
}

/// An arm by its name in the run.
pub fn named(name: &str) -> String {
    match name.strip_suffix("#2") {
        Some(of) => format!("{}, again", way(of)),
        None => way(name).to_owned(),
    }
}
