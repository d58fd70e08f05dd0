//! What the kernel of a guest puts on top of a disk that it sees.

use super::{
    Backend, Context, Entry, File, Image, Inner, Peers, Reach, Served, WriteCache, qemu, ubd, vm,
};
use crate::env::{Env, Missing};
use crate::error::Result;
use crate::sample::Stage;

/// A base disk with something of the guest's own kernel on top.
pub struct Inside {
    /// The disk below.
    pub base: &'static dyn Backend,
    /// What lies on it.
    pub inner: Inner,
    /// For the report.
    pub remark: &'static str,
}

impl Backend for Inside {
    fn reach(&self) -> Reach {
        self.base.reach()
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        self.base.missing(env).or_else(|| match self.inner {
            Inner::Linear | Inner::Snapshot { .. } | Inner::Thin => {
                env.program("dmsetup", "dmsetup")
            }
            Inner::None | Inner::Loop { .. } => None,
        })
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        self.base.start(context)
    }

    fn image(&self) -> Image {
        self.base.image()
    }

    fn inner(&self) -> Inner {
        self.inner
    }

    fn remark(&self) -> Option<&'static str> {
        Some(self.remark)
    }

    fn guest_sets_cache(&self) -> Option<WriteCache> {
        self.base.guest_sets_cache()
    }

    fn cached(&self) -> bool {
        self.base.cached() || self.inner == Inner::Loop { direct: false }
    }
}

const fn inside(base: &'static dyn Backend, inner: Inner) -> Inside {
    let remark = match inner {
        Inner::Loop { .. } => {
            "served by kernel threads of the guest on top of its disk: their CPU is the guest's"
        }
        _ => "served by the guest's device-mapper on top of its disk: its CPU is the guest's",
    };
    Inside { base, inner, remark }
}

const LOOP_ON_UBD: Inside = inside(&ubd::Ubd, Inner::Loop { direct: false });
const QSD_LVM: Inside = inside(&qemu::QSD, Inner::Linear);
const QSD_SNAPSHOT: Inside = inside(&qemu::QSD, Inner::ORIGIN);
const QSD_SNAPSHOT_64K: Inside = inside(&qemu::QSD, Inner::Snapshot { chunk: 128, itself: false });
const QSD_SNAPSHOT_ITSELF: Inside = inside(&qemu::QSD, Inner::Snapshot { chunk: 8, itself: true });
const QSD_THIN: Inside = inside(&qemu::QSD, Inner::Thin);
const VM_LOOP: Inside = inside(&vm::VIRTIO, Inner::Loop { direct: false });
const VM_LOOP_DIRECT: Inside = inside(&vm::VIRTIO, Inner::Loop { direct: true });
const VM_LVM: Inside = inside(&vm::VIRTIO, Inner::Linear);
const VM_SNAPSHOT: Inside = inside(&vm::VIRTIO, Inner::ORIGIN);
const VM_SNAPSHOT_64K: Inside = inside(&vm::VIRTIO, Inner::Snapshot { chunk: 128, itself: false });
const VM_SNAPSHOT_ITSELF: Inside = inside(&vm::VIRTIO, Inner::Snapshot { chunk: 8, itself: true });
const VM_THIN: Inside = inside(&vm::VIRTIO, Inner::Thin);

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::usual(
            Stage::Guest,
            20,
            "loop",
            "loop device inside the guest, on a ubd disk",
            &LOOP_ON_UBD,
        ),
        Entry::named(
            Stage::Guest,
            120,
            "lvm",
            "dm-linear in the guest (an LVM linear volume), on a disk of qsd-vhost",
            &QSD_LVM,
        ),
        Entry::named(
            Stage::Guest,
            130,
            "lvm-snapshot",
            "origin of a classic snapshot taken before each workload, on the same",
            &QSD_SNAPSHOT,
        ),
        Entry::named(
            Stage::Guest,
            140,
            "lvm-snapshot-64k",
            "the same with chunks of 64 KiB instead of 4",
            &QSD_SNAPSHOT_64K,
        ),
        Entry::named(
            Stage::Guest,
            150,
            "lvm-snapshot-itself",
            "a classic snapshot taken before each workload, written to itself, on the same",
            &QSD_SNAPSHOT_ITSELF,
        ),
        Entry::named(
            Stage::Guest,
            160,
            "lvm-thin",
            "dm-thin volume, provisioned, on the same",
            &QSD_THIN,
        ),
        Entry::usual(
            Stage::Vm,
            260,
            "loop",
            "loop device in the guest on a file on ext4 on virtio-raw",
            &VM_LOOP,
        ),
        Entry::usual(Stage::Vm, 270, "loop-direct", "the same, direct-io=on", &VM_LOOP_DIRECT),
        Entry::usual(
            Stage::Vm,
            280,
            "lvm",
            "dm-linear in the guest (an LVM linear volume) on virtio-raw",
            &VM_LVM,
        ),
        Entry::usual(
            Stage::Vm,
            290,
            "lvm-snapshot",
            "origin of a classic snapshot taken before each workload, on virtio-raw",
            &VM_SNAPSHOT,
        ),
        Entry::named(
            Stage::Vm,
            300,
            "lvm-snapshot-64k",
            "the same with chunks of 64 KiB instead of 4",
            &VM_SNAPSHOT_64K,
        ),
        Entry::named(
            Stage::Vm,
            310,
            "lvm-snapshot-itself",
            "a classic snapshot taken before each workload, written to itself, on virtio-raw",
            &VM_SNAPSHOT_ITSELF,
        ),
        Entry::usual(
            Stage::Vm,
            320,
            "lvm-thin",
            "dm-thin volume, provisioned, on virtio-raw",
            &VM_THIN,
        ),
        Entry::usual(
            Stage::TwoGuests,
            40,
            "loop",
            "loop device inside the guest, on a ubd disk",
            &LOOP_ON_UBD,
        ),
        Entry::named(
            Stage::TwoGuests,
            50,
            "lvm",
            "dm-linear in the guest (an LVM linear volume), on a disk of qsd-vhost",
            &QSD_LVM,
        ),
        Entry::usual(
            Stage::TwoVms,
            60,
            "loop",
            "loop device in the guest on a file on ext4 on virtio-raw",
            &VM_LOOP,
        ),
        Entry::named(Stage::TwoVms, 70, "loop-direct", "the same, direct-io=on", &VM_LOOP_DIRECT),
        Entry::usual(
            Stage::TwoVms,
            80,
            "lvm",
            "dm-linear in the guest (an LVM linear volume) on virtio-raw",
            &VM_LVM,
        ),
    ],
    labels: &[
        ("lvm-snapshot-64k", "the same, 64 KiB chunks"),
        ("lvm-snapshot-itself", "LVM snapshot, written itself"),
    ],
    peers: &[
        Peers { place: 100, stage: Stage::Vm, arm: "lvm-snapshot", against: &["lvm"] },
        Peers { place: 110, stage: Stage::Vm, arm: "loop", against: &["lvm"] },
    ],
};
