//! All backends by stage, what a reader calls them and what they are compared with: one more of a program that is known touches this
//! file alone, and one of another program has a file of its own beside.

use super::ceph::Rbd;
use super::origin::{Http, Start};
use super::qemu::WriteCache as DaemonCache;
use super::remote::{Client, OverNbd};
use super::vm::{Attach, How, InQemu, Inside, OnLoop};
use super::xen::{Image as XenImage, Mode, Node, Vbd, Way};
use super::{
    Backend, Entry, Image, Inner, Maker, WriteCache, absent, kernelnbd, loopdev, native, nbdkit,
    qemu, ringtap, ubd, ublk, volume,
};
use crate::sample::Stage;

/// All backends, in the order of the report. The first of a stage is what the others are measured against, and runs
/// twice (the A/A twin).
pub const CATALOGUE: &[Entry] = &[
    host("native", "the file itself, O_DIRECT", true, &native::Native),
    host("loop", "loop device on the file, through the page cache", true, &LOOP),
    host("loop-direct", "loop device on the file, direct-io=on", true, &LOOP_DIRECT),
    host("ringtap-nbd", "ringtap serve --nbd, cache=none", true, &RINGTAP_NBD),
    host("ringtap-nbd-kernel", RINGTAP_KERNEL, true, &kernelnbd::KernelNbd(&RINGTAP_NBD)),
    host(
        "ringtap-fuse",
        "ringtap serve --fuse, cache=none, with a direct-io loop device on top",
        true,
        &ringtap::FuseLoop,
    ),
    host("qemu-nbd", "qemu-nbd, cache=none, aio=io_uring", true, &QEMU_NBD),
    host("qemu-nbd-kernel", QEMU_KERNEL, true, &kernelnbd::KernelNbd(&QEMU_NBD)),
    host("qemu-nbd-threads", "qemu-nbd, cache=none, aio=threads", false, &qemu::Nbd::by("threads")),
    host("qemu-nbd-native", "qemu-nbd, cache=none, aio=native", false, &qemu::Nbd::by("native")),
    host("qemu-nbd-unsafe", "qemu-nbd, cache=unsafe: it ignores flushes", false, &UNSAFE),
    host("nbdkit", "nbdkit file, through the page cache", false, &nbdkit::Nbdkit),
    host(
        "native-load",
        "the file itself, O_DIRECT, by the client of the vhost rows",
        true,
        &BY_LOAD,
    ),
    host("ringtap-vhost", "ringtap serve --vhost-user, cache=none", true, &RINGTAP),
    host("qsd-vhost", QSD_URING, true, &QSD),
    host("qsd-vhost-writethrough", QSD_WRITETHROUGH, false, &QSD_THROUGH),
    host("slow", SLOW, true, &ringtap::Slow),
    host("qsd-vhost-threads", QSD_THREADS, false, &QSD_BY_THREADS),
    host("qsd-vhost-native", QSD_NATIVE, false, &QSD_BY_NATIVE),
    host(
        "lvm",
        "dm-linear (an LVM linear volume) on loop-direct",
        true,
        &volume::Volume(Inner::Linear),
    ),
    host(
        "lvm-snapshot",
        "origin of a classic snapshot taken before each workload, on the same",
        true,
        &volume::Volume(Inner::ORIGIN),
    ),
    host(
        "lvm-thin",
        "dm-thin volume, provisioned, on the same",
        true,
        &volume::Volume(Inner::Thin),
    ),
    host("ublk", "ringtap serve --ublk, cache=none", true, &ublk::Ublk),
    guest("ubd", "User-Mode Linux opens the file itself (ubd)", true, &ubd::Ubd),
    guest("loop", "loop device inside the guest, on a ubd disk", true, &LOOP_ON_UBD),
    guest("ringtap-vhost", "ringtap serve --vhost-user, cache=none", true, &RINGTAP),
    guest("ringtap-qcow2", "the same, qcow2", false, &RINGTAP_QCOW2),
    guest("ringtap-overlay", RINGTAP_ON_OVERLAY, false, &RINGTAP_OVERLAY),
    guest("ringtap-luks", "the same, LUKS1 with aes-256-xts", false, &RINGTAP_LUKS),
    guest("qsd-vhost", QSD_URING, true, &QSD),
    guest("qsd-vhost-writethrough", QSD_WRITETHROUGH, false, &QSD_THROUGH),
    guest("slow", SLOW, true, &ringtap::Slow),
    guest("qsd-vhost-threads", QSD_THREADS, false, &QSD_BY_THREADS),
    guest("qsd-vhost-native", QSD_NATIVE, false, &QSD_BY_NATIVE),
    guest(
        "lvm",
        "dm-linear in the guest (an LVM linear volume), on a disk of qsd-vhost",
        false,
        &QSD_LVM,
    ),
    guest(
        "lvm-snapshot",
        "origin of a classic snapshot taken before each workload, on the same",
        false,
        &QSD_SNAPSHOT,
    ),
    guest(
        "lvm-snapshot-64k",
        "the same with chunks of 64 KiB instead of 4",
        false,
        &QSD_SNAPSHOT_64K,
    ),
    guest(
        "lvm-snapshot-itself",
        "a classic snapshot taken before each workload, written to itself, on the same",
        false,
        &QSD_SNAPSHOT_ITSELF,
    ),
    guest("lvm-thin", "dm-thin volume, provisioned, on the same", false, &QSD_THIN),
    vm(
        "virtio-default",
        "virtio-blk in QEMU, raw, as QEMU does by default: cache=writeback, aio=threads",
        false,
        &VIRTIO_DEFAULT,
    ),
    vm(
        "virtio-best",
        "virtio-blk in QEMU, raw, cache=none, aio=io_uring, iothread",
        false,
        &VIRTIO_BEST,
    ),
    vm("virtio-raw", "virtio-blk in QEMU, raw, cache=none, aio=native", true, &VIRTIO),
    vm("virtio-qcow2", "virtio-blk in QEMU, qcow2, cache=none, aio=native", true, &VIRTIO_QCOW2),
    vm(
        "virtio-overlay",
        "virtio-blk in QEMU, a qcow2 overlay made anew for each load that writes, by `qemu-img create` (without subclusters)",
        true,
        &VIRTIO_OVERLAY,
    ),
    vm(
        "virtio-overlay-subclusters",
        "the same, made with extended_l2=on: with subclusters",
        false,
        &VIRTIO_OVERLAY_SUBCLUSTERS,
    ),
    vm("ide", "IDE emulation (PIIX) in QEMU, raw, cache=none, aio=native", true, &IDE),
    vm("ide-writeback", "the same, cache=writeback, aio=threads", false, &IDE_WRITEBACK),
    vm("ide-unsafe", "the same, cache=unsafe: flushes are ignored", false, &IDE_UNSAFE),
    vm("ide-cache-off", IDE_OFF, false, &IDE_CACHE_OFF),
    vm("virtio-cache-off", VIRTIO_OFF, false, &VIRTIO_CACHE_OFF),
    vm(
        "virtio-unsafe",
        "virtio-blk in QEMU, raw, cache=unsafe: flushes are ignored",
        false,
        &VIRTIO_UNSAFE,
    ),
    vm("ahci", "SATA emulation (AHCI) in QEMU, raw, cache=none, aio=native", true, &AHCI),
    vm("nvme", "NVMe emulation in QEMU, raw, cache=none, aio=native", true, &NVME),
    vm("ringtap-vhost", "ringtap serve --vhost-user, raw, cache=none", true, &RINGTAP),
    vm("ringtap-qcow2", "the same, qcow2", true, &RINGTAP_QCOW2),
    vm("ringtap-overlay", RINGTAP_ON_OVERLAY, true, &RINGTAP_OVERLAY),
    vm(
        "ringtap-overlay-plain",
        "the same, made by `qemu-img create` (without subclusters)",
        false,
        &RINGTAP_OVERLAY_PLAIN,
    ),
    vm("ringtap-luks", "the same, LUKS1 with aes-256-xts", true, &RINGTAP_LUKS),
    vm("qsd-vhost", QSD_URING, true, &QSD),
    vm("qsd-vhost-writeback", QSD_BACK, false, &QSD_TURNED_ON),
    vm("qsd-vhost-writethrough", QSD_WRITETHROUGH, false, &QSD_THROUGH),
    vm("slow", SLOW, true, &ringtap::Slow),
    vm(
        "host-loop",
        "virtio-blk in QEMU on a loop device of the host, through the host's page cache",
        false,
        &ON_LOOP,
    ),
    vm("host-loop-direct", "the same, direct-io=on", false, &ON_LOOP_DIRECT),
    vm("loop", "loop device in the guest on a file on ext4 on virtio-raw", true, &VM_LOOP),
    vm("loop-direct", "the same, direct-io=on", true, &VM_LOOP_DIRECT),
    vm("lvm", "dm-linear in the guest (an LVM linear volume) on virtio-raw", true, &VM_LVM),
    vm(
        "lvm-snapshot",
        "origin of a classic snapshot taken before each workload, on virtio-raw",
        true,
        &VM_SNAPSHOT,
    ),
    vm("lvm-snapshot-64k", "the same with chunks of 64 KiB instead of 4", false, &VM_SNAPSHOT_64K),
    vm(
        "lvm-snapshot-itself",
        "a classic snapshot taken before each workload, written to itself, on virtio-raw",
        false,
        &VM_SNAPSHOT_ITSELF,
    ),
    vm("lvm-thin", "dm-thin volume, provisioned, on virtio-raw", true, &VM_THIN),
    vm("guest-nbd", "ringtap serve --nbd under the guest's own client", true, &RINGTAP_NBD),
    vm("xen-blkback", "Xen's blkback", true, &absent::XEN),
    two("native", "the file itself, O_DIRECT", true, &native::Native),
    two("loop", "loop device on the file, through the page cache", true, &LOOP),
    two("loop-direct", "loop device on the file, direct-io=on", true, &LOOP_DIRECT),
    two("ringtap-nbd", "ringtap serve --nbd, cache=none", true, &RINGTAP_NBD),
    two(
        "ringtap-fuse",
        "ringtap serve --fuse, cache=none, with a direct-io loop device on top",
        false,
        &ringtap::FuseLoop,
    ),
    two("ringtap-nbd-kernel", RINGTAP_KERNEL, true, &kernelnbd::KernelNbd(&RINGTAP_NBD)),
    two("ublk", "ringtap serve --ublk, cache=none", true, &ublk::Ublk),
    two("qemu-nbd", "qemu-nbd, cache=none, aio=io_uring", true, &QEMU_NBD),
    two("qemu-nbd-kernel", QEMU_KERNEL, true, &kernelnbd::KernelNbd(&QEMU_NBD)),
    two(
        "lvm",
        "dm-linear (an LVM linear volume) on loop-direct",
        true,
        &volume::Volume(Inner::Linear),
    ),
    two("ringtap-overlay", TWO_OVERLAYS, true, &RINGTAP_NBD_OVERLAY),
    two(
        "lvm-snapshot",
        "origin of a classic snapshot taken before each load that writes, on lvm",
        true,
        &volume::Volume(Inner::ORIGIN),
    ),
    two(
        "native-load",
        "the file itself, O_DIRECT, by the client of the vhost rows",
        true,
        &BY_LOAD,
    ),
    two("ringtap-vhost", "ringtap serve --vhost-user, cache=none", true, &RINGTAP),
    two("qsd-vhost", QSD_URING, true, &QSD),
    two("slow", SLOW, true, &ringtap::Slow),
    guests("ubd", "User-Mode Linux opens the file itself (ubd)", true, &ubd::Ubd),
    guests("ringtap-vhost", "ringtap serve --vhost-user, cache=none", true, &RINGTAP),
    guests("qsd-vhost", QSD_URING, true, &QSD),
    guests("loop", "loop device inside the guest, on a ubd disk", true, &LOOP_ON_UBD),
    guests(
        "lvm",
        "dm-linear in the guest (an LVM linear volume), on a disk of qsd-vhost",
        false,
        &QSD_LVM,
    ),
    guests("slow", SLOW, true, &ringtap::Slow),
    vms("virtio-raw", "virtio-blk in QEMU, raw, cache=none, aio=native", true, &VIRTIO),
    vms("ide", "IDE emulation (PIIX) in QEMU, raw, cache=none, aio=native", false, &IDE),
    vms("ringtap-vhost", "ringtap serve --vhost-user, raw, cache=none", true, &RINGTAP),
    vms("ringtap-qcow2", "the same, qcow2", false, &RINGTAP_QCOW2),
    vms("qsd-vhost", QSD_URING, true, &QSD),
    vms("loop", "loop device in the guest on a file on ext4 on virtio-raw", true, &VM_LOOP),
    vms("loop-direct", "the same, direct-io=on", false, &VM_LOOP_DIRECT),
    vms("lvm", "dm-linear in the guest (an LVM linear volume) on virtio-raw", true, &VM_LVM),
    vms("slow", SLOW, true, &ringtap::Slow),
    xen("phy-lvm", "phy: on an LVM volume (dm-linear), by xen-blkback", true, &XEN_LVM),
    xen("phy-loop", "phy: on a loop device with direct-io=on, by xen-blkback", true, &XEN_LOOP),
    xen("file", "file:, on a loop device as xl makes it, by xen-blkback", true, &XEN_FILE),
    xen("tap-lvm", "ringtap xen on the LVM volume, cache=none", true, &TAP_LVM),
    xen("tap-raw", "ringtap xen on the raw file, cache=none", true, &TAP_RAW),
    xen("tap-grant-copy", "the same, without persistent grants", false, &TAP_GRANT_COPY),
    xen("tap-cached", "the same, cache=writeback: what file: becomes", true, &TAP_CACHED),
    xen("tap-qcow2", "ringtap xen, qcow2, cache=none", true, &TAP_QCOW2),
    xen(
        "tap-overlay",
        "ringtap xen, a qcow2 overlay made anew for each load that writes, by `ringtap create -b` (with subclusters)",
        true,
        &TAP_OVERLAY,
    ),
    xen("tap-vhd", "ringtap xen, a dynamic VHD, cache=none", true, &TAP_VHD),
    xen("native", XEN_NATIVE, true, &Vbd(Way::Native)),
    xen("hvm-ide", HVM_IDE, false, &Vbd(Way::Emulated(WriteCache::On))),
    xen("hvm-ide-cache-off", HVM_IDE_OFF, false, &Vbd(Way::Emulated(WriteCache::Off))),
    xen("hvm-pv", HVM_PV, false, &Vbd(Way::InHvm)),
    xen("tap-slow", XEN_SLOWER, true, &TAP_SLOW),
    remote("qsd-on-qemu-nbd", "qemu-storage-daemon's NBD client on qemu-nbd", &QSD_ON_QEMU),
    remote("ringtap-on-qemu-nbd", "ringtap serve nbd+unix: on qemu-nbd", &RINGTAP_ON_QEMU),
    remote("qsd-on-nbdkit", "qemu-storage-daemon's NBD client on nbdkit file", &QSD_ON_NBDKIT),
    remote("ringtap-on-nbdkit", "ringtap serve nbd+unix: on nbdkit file", &RINGTAP_ON_NBDKIT),
    remote(
        "qsd-on-ringtap",
        "qemu-storage-daemon's NBD client on ringtap serve --nbd",
        &QSD_ON_OWN,
    ),
    remote("ringtap-on-ringtap", "ringtap serve nbd+unix: on ringtap serve --nbd", &RINGTAP_ON_OWN),
    remote("slow", REMOTE_SLOWER, &SLOW_ON_QEMU),
    remote("qsd-rbd", "qemu-storage-daemon's rbd driver, cache off", &Rbd(Some(Client::Qemu))),
    remote("ringtap-rbd", "ringtap serve rbd:", &Rbd(Some(Client::Ringtap))),
    remote("fio-rbd", "fio's rbd engine, cache off, which has no guest to serve", &Rbd(None)),
    remote("http-download", "the image downloaded whole, then served", &Http(Start::Download)),
    remote("http-lazy", "ringtap serve http:, what is read is fetched then", &Http(Start::Lazy)),
    remote("http-boot-list", "the same, with the list of an earlier start", &Http(Start::BootList)),
    remote("http-fill", "the same, all of it fetched meanwhile", &Http(Start::Fill)),
];

const BY_LOAD: native::ByLoad = native::ByLoad;
const LOOP: loopdev::Loop = loopdev::Loop { direct: false };
const LOOP_DIRECT: loopdev::Loop = loopdev::Loop { direct: true };
const RINGTAP: ringtap::VhostUser = ringtap::VhostUser { image: Image::Raw };
const RINGTAP_QCOW2: ringtap::VhostUser = ringtap::VhostUser { image: Image::Qcow2 };
const RINGTAP_LUKS: ringtap::VhostUser = ringtap::VhostUser { image: Image::Luks };
const RINGTAP_OVERLAY: ringtap::VhostUser =
    ringtap::VhostUser { image: Image::Overlay(Maker::Ringtap) };
const RINGTAP_OVERLAY_PLAIN: ringtap::VhostUser =
    ringtap::VhostUser { image: Image::Overlay(Maker::QemuImg) };
const RINGTAP_NBD: ringtap::Nbd = ringtap::Nbd { image: Image::Raw };
const RINGTAP_NBD_OVERLAY: ringtap::Nbd = ringtap::Nbd { image: Image::Overlay(Maker::Ringtap) };
const QEMU_NBD: qemu::Nbd = qemu::Nbd::by("io_uring");
const UNSAFE: qemu::Nbd = qemu::Nbd { aio: "threads", cache: "unsafe" };
const QSD: qemu::VhostUser = qemu::VhostUser::by("io_uring");
const QSD_BY_THREADS: qemu::VhostUser = qemu::VhostUser::by("threads");
const QSD_BY_NATIVE: qemu::VhostUser = qemu::VhostUser::by("native");
const QSD_THROUGH: qemu::VhostUser =
    qemu::VhostUser { aio: "io_uring", cache: DaemonCache::Through };
const QSD_TURNED_ON: qemu::VhostUser =
    qemu::VhostUser { aio: "io_uring", cache: DaemonCache::TurnedOn };
const IDE: InQemu = direct(Attach::Ide, Image::Raw);
const IDE_WRITEBACK: InQemu = InQemu { attach: Attach::Ide, image: Image::Raw, how: How::Default };
const IDE_UNSAFE: InQemu = InQemu { attach: Attach::Ide, image: Image::Raw, how: How::Unsafe };
const IDE_CACHE_OFF: InQemu = InQemu { attach: Attach::Ide, image: Image::Raw, how: How::CacheOff };
const VIRTIO_CACHE_OFF: InQemu =
    InQemu { attach: Attach::Virtio, image: Image::Raw, how: How::CacheOff };
const VIRTIO_UNSAFE: InQemu =
    InQemu { attach: Attach::Virtio, image: Image::Raw, how: How::Unsafe };
const AHCI: InQemu = direct(Attach::Ahci, Image::Raw);
const NVME: InQemu = direct(Attach::Nvme, Image::Raw);
const VIRTIO: InQemu = direct(Attach::Virtio, Image::Raw);
const VIRTIO_DEFAULT: InQemu =
    InQemu { attach: Attach::Virtio, image: Image::Raw, how: How::Default };
const VIRTIO_BEST: InQemu = InQemu { attach: Attach::Virtio, image: Image::Raw, how: How::Best };
const ON_LOOP: OnLoop = OnLoop(LOOP);
const ON_LOOP_DIRECT: OnLoop = OnLoop(LOOP_DIRECT);
const VIRTIO_QCOW2: InQemu = direct(Attach::Virtio, Image::Qcow2);
const VIRTIO_OVERLAY: InQemu = direct(Attach::Virtio, Image::Overlay(Maker::QemuImg));
const VIRTIO_OVERLAY_SUBCLUSTERS: InQemu =
    direct(Attach::Virtio, Image::Overlay(Maker::QemuImgSubclusters));
const LOOP_ON_UBD: Inside = inside(&ubd::Ubd, Inner::Loop { direct: false });
const QSD_LVM: Inside = inside(&QSD, Inner::Linear);
const QSD_SNAPSHOT: Inside = inside(&QSD, Inner::ORIGIN);
const QSD_SNAPSHOT_64K: Inside = inside(&QSD, Inner::Snapshot { chunk: 128, itself: false });
const QSD_SNAPSHOT_ITSELF: Inside = inside(&QSD, Inner::Snapshot { chunk: 8, itself: true });
const QSD_THIN: Inside = inside(&QSD, Inner::Thin);
const VM_LOOP: Inside = inside(&VIRTIO, Inner::Loop { direct: false });
const VM_LOOP_DIRECT: Inside = inside(&VIRTIO, Inner::Loop { direct: true });
const VM_LVM: Inside = inside(&VIRTIO, Inner::Linear);
const VM_SNAPSHOT: Inside = inside(&VIRTIO, Inner::ORIGIN);
const VM_SNAPSHOT_64K: Inside = inside(&VIRTIO, Inner::Snapshot { chunk: 128, itself: false });
const VM_SNAPSHOT_ITSELF: Inside = inside(&VIRTIO, Inner::Snapshot { chunk: 8, itself: true });
const VM_THIN: Inside = inside(&VIRTIO, Inner::Thin);
const XEN_LVM: Vbd = Vbd(Way::Blkback(Node::Volume));
const XEN_LOOP: Vbd = Vbd(Way::Blkback(Node::Loop { direct: true }));
const XEN_FILE: Vbd = Vbd(Way::Blkback(Node::Loop { direct: false }));
const TAP_LVM: Vbd = Vbd(Way::Ringtap(XenImage::Volume, Mode::Usual));
const TAP_RAW: Vbd = Vbd(Way::Ringtap(XenImage::Raw, Mode::Usual));
const TAP_GRANT_COPY: Vbd = Vbd(Way::Ringtap(XenImage::Raw, Mode::GrantCopy));
const TAP_CACHED: Vbd = Vbd(Way::Ringtap(XenImage::Raw, Mode::Cached));
const TAP_QCOW2: Vbd = Vbd(Way::Ringtap(XenImage::Qcow2, Mode::Usual));
const TAP_OVERLAY: Vbd = Vbd(Way::Ringtap(XenImage::Overlay, Mode::Usual));
const TAP_SLOW: Vbd = Vbd(Way::Ringtap(XenImage::Raw, Mode::Slow));
const TAP_VHD: Vbd = Vbd(Way::Ringtap(XenImage::Vhd, Mode::Usual));

const QSD_ON_QEMU: OverNbd = OverNbd { server: &QEMU_NBD, client: Client::Qemu };
const RINGTAP_ON_QEMU: OverNbd = OverNbd { server: &QEMU_NBD, client: Client::Ringtap };
const SLOW_ON_QEMU: OverNbd = OverNbd { server: &QEMU_NBD, client: Client::Slow };
const QSD_ON_NBDKIT: OverNbd = OverNbd { server: &nbdkit::Nbdkit, client: Client::Qemu };
const RINGTAP_ON_NBDKIT: OverNbd = OverNbd { server: &nbdkit::Nbdkit, client: Client::Ringtap };
const QSD_ON_OWN: OverNbd = OverNbd { server: &RINGTAP_NBD, client: Client::Qemu };
const RINGTAP_ON_OWN: OverNbd = OverNbd { server: &RINGTAP_NBD, client: Client::Ringtap };

const RINGTAP_ON_OVERLAY: &str = "ringtap serve --vhost-user, a qcow2 overlay made anew for each load that writes, by `ringtap create -b` (with subclusters)";
const TWO_OVERLAYS: &str = "ringtap serve --nbd, a qcow2 overlay made anew for each load that writes, by `ringtap create -b` (with subclusters)";
const RINGTAP_KERNEL: &str = "ringtap serve --nbd, cache=none, under this kernel's own client";
const QEMU_KERNEL: &str = "qemu-nbd, cache=none, aio=io_uring, under this kernel's own client";
const SLOW: &str =
    "ringtap-vhost with each answer held back by 20 % of its time: known to be slower";
const XEN_NATIVE: &str = "natively: the first domain on the LVM volume, with one processor and as much memory as a guest has to spare";
const HVM_IDE: &str = "HVM: IDE emulated by QEMU in the first domain, cache=writeback as xl has it, on the LVM volume";
const HVM_IDE_OFF: &str = "the same, the guest has turned the disk's write cache off";
const HVM_PV: &str = "HVM with PV drivers: phy: on the LVM volume, by xen-blkback";
const XEN_SLOWER: &str =
    "tap-raw with each answer held back by 20 % of its time: known to be slower";
const REMOTE_SLOWER: &str =
    "ringtap-on-qemu-nbd with each answer held back by 20 % of its time: known to be slower";
const IDE_OFF: &str = "ide-writeback, the guest has turned the disk's write cache off";
const VIRTIO_OFF: &str = "virtio-default, the guest has turned the disk's write cache off";
const QSD_BACK: &str = "qsd-vhost, the guest has turned the write cache on, which is off at first";
const QSD_WRITETHROUGH: &str = "qsd-vhost with writethrough=on";
const QSD_URING: &str = "qemu-storage-daemon over vhost-user, cache.direct=on, aio=io_uring";
const QSD_THREADS: &str = "qemu-storage-daemon over vhost-user, cache.direct=on, aio=threads";
const QSD_NATIVE: &str = "qemu-storage-daemon over vhost-user, cache.direct=on, aio=native";

const fn direct(attach: Attach, image: Image) -> InQemu {
    InQemu { attach, image, how: How::Direct }
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

const fn entry(
    stage: Stage,
    name: &'static str,
    title: &'static str,
    usual: bool,
    backend: &'static dyn Backend,
) -> Entry {
    Entry { name, stage, title, usual, backend }
}

const fn host(n: &'static str, t: &'static str, usual: bool, b: &'static dyn Backend) -> Entry {
    entry(Stage::Host, n, t, usual, b)
}

const fn guest(n: &'static str, t: &'static str, usual: bool, b: &'static dyn Backend) -> Entry {
    entry(Stage::Guest, n, t, usual, b)
}

const fn vm(n: &'static str, t: &'static str, usual: bool, b: &'static dyn Backend) -> Entry {
    entry(Stage::Vm, n, t, usual, b)
}

const fn two(n: &'static str, t: &'static str, usual: bool, b: &'static dyn Backend) -> Entry {
    entry(Stage::Two, n, t, usual, b)
}

const fn guests(n: &'static str, t: &'static str, usual: bool, b: &'static dyn Backend) -> Entry {
    entry(Stage::TwoGuests, n, t, usual, b)
}

const fn vms(n: &'static str, t: &'static str, usual: bool, b: &'static dyn Backend) -> Entry {
    entry(Stage::TwoVms, n, t, usual, b)
}

const fn xen(n: &'static str, t: &'static str, usual: bool, b: &'static dyn Backend) -> Entry {
    entry(Stage::Xen, n, t, usual, b)
}

const fn remote(n: &'static str, t: &'static str, b: &'static dyn Backend) -> Entry {
    entry(Stage::Remote, n, t, true, b)
}

/// What a reader calls a backend of that name, on whatever stage: short, for charts.
pub const LABELS: &[(&str, &str)] = &[
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
    ("nbdkit", "nbdkit"),
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
    ("ide-cache-off", "IDE in QEMU, write cache off"),
    ("virtio-unsafe", "virtio-blk in QEMU, cache=unsafe"),
    ("virtio-cache-off", "virtio-blk in QEMU, write cache off"),
    ("ahci", "SATA in QEMU"),
    ("nvme", "NVMe in QEMU"),
    ("lvm", "LVM volume"),
    ("lvm-snapshot", "LVM with a snapshot"),
    ("lvm-snapshot-64k", "the same, 64 KiB chunks"),
    ("lvm-snapshot-itself", "LVM snapshot, written itself"),
    ("lvm-thin", "LVM thin volume"),
    ("xen-blkback", "Xen's blkback"),
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
    ("tap-slow", "Ringtap, slowed on purpose"),
    ("hvm-ide", "Xen HVM, IDE"),
    ("hvm-ide-cache-off", "Xen HVM, IDE, write cache off"),
    ("hvm-pv", "Xen HVM, PV drivers"),
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

/// Comparisons beside the one with the stage's reference: Ringtap with each peer over the same transport, and the questions
/// that the published comparisons asked.
pub const PEERS: &[(Stage, &str, &[&str])] = &[
    (Stage::Host, "ringtap-nbd", &["qemu-nbd", "qemu-nbd-threads", "qemu-nbd-native"]),
    (
        Stage::Host,
        "ringtap-vhost",
        &["native-load", "qsd-vhost", "qsd-vhost-threads", "qsd-vhost-native"],
    ),
    (
        Stage::Guest,
        "ringtap-vhost",
        &["qsd-vhost", "qsd-vhost-threads", "qsd-vhost-native", "loop", "lvm"],
    ),
    (Stage::Guest, "ringtap-overlay", &["lvm-snapshot"]),
    (
        Stage::Vm,
        "ringtap-vhost",
        &["virtio-raw", "qsd-vhost", "ide", "ahci", "nvme", "loop", "loop-direct", "lvm"],
    ),
    (Stage::Vm, "ringtap-qcow2", &["virtio-qcow2"]),
    (
        Stage::Vm,
        "ringtap-overlay",
        &["virtio-overlay", "virtio-overlay-subclusters", "lvm-snapshot", "lvm-thin"],
    ),
    (Stage::Vm, "ringtap-overlay-plain", &["virtio-overlay", "ringtap-overlay"]),
    (Stage::Vm, "ringtap-luks", &["ringtap-vhost"]),
    (Stage::Vm, "lvm-snapshot", &["lvm"]),
    (Stage::Vm, "loop", &["lvm"]),
    (Stage::Host, "lvm-snapshot", &["lvm"]),
    (Stage::Host, "ringtap-nbd-kernel", &["qemu-nbd-kernel", "loop-direct"]),
    (Stage::Host, "ringtap-fuse", &["loop-direct"]),
    (Stage::Two, "ringtap-nbd", &["qemu-nbd", "loop"]),
    (Stage::Two, "ringtap-vhost", &["native-load", "qsd-vhost"]),
    (Stage::Two, "ringtap-overlay", &["lvm-snapshot", "ringtap-nbd"]),
    (Stage::Two, "lvm-snapshot", &["lvm"]),
    (Stage::Two, "ringtap-nbd-kernel", &["qemu-nbd-kernel", "loop-direct"]),
    (Stage::TwoGuests, "ringtap-vhost", &["qsd-vhost", "loop", "lvm"]),
    (Stage::TwoVms, "ringtap-vhost", &["virtio-raw", "qsd-vhost", "loop", "lvm"]),
    (Stage::Xen, "tap-raw", &["phy-loop", "file"]),
    (Stage::Xen, "tap-lvm", &["phy-lvm"]),
    (Stage::Xen, "tap-grant-copy", &["phy-loop", "tap-raw"]),
    (Stage::Xen, "tap-cached", &["file"]),
    (Stage::Xen, "tap-qcow2", &["phy-loop"]),
    (Stage::Xen, "tap-overlay", &["phy-loop"]),
    (Stage::Xen, "tap-vhd", &["phy-loop"]),
    (Stage::Remote, "ringtap-on-qemu-nbd", &["qsd-on-qemu-nbd"]),
    (Stage::Remote, "ringtap-on-nbdkit", &["qsd-on-nbdkit"]),
    (Stage::Remote, "ringtap-on-ringtap", &["qsd-on-ringtap"]),
    (Stage::Remote, "ringtap-rbd", &["qsd-rbd"]),
    (Stage::Remote, "http-boot-list", &["http-download", "http-lazy"]),
    (Stage::Remote, "http-lazy", &["http-download"]),
    (Stage::Remote, "http-fill", &["http-download"]),
];
