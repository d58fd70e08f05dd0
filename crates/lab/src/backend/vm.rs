//! Disks that QEMU itself serves to its guest.

use ringtap_guest::{Aio, Cache, Drive};

use super::loopdev::Loop;
use super::{
    Access, Backend, Context, Entry, File, Image, Maker, Reach, Served, WriteCache, loopdev,
};
use crate::env::{Env, Missing};
use crate::error::Result;
use crate::sample::Stage;

/// The device that the guest sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attach {
    /// An IDE disk of a PIIX controller: every register access leaves the guest.
    Ide,
    /// A SATA disk of an AHCI controller.
    Ahci,
    /// virtio-blk.
    Virtio,
    /// An NVMe controller.
    Nvme,
}

/// How QEMU opens an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// As it does unless told otherwise: through the page cache of the host, by a pool of threads.
    Default,
    /// cache=none, aio=native.
    Direct,
    /// cache=none, aio=io_uring, and a thread of its own.
    Best,
    /// Through the page cache, and flushes are ignored.
    Unsafe,
    /// By default, and the guest has turned its disk's write cache off.
    CacheOff,
}

impl How {
    fn drive(self, drive: Drive) -> Drive {
        match self {
            How::Default | How::CacheOff => drive.cache(Cache::Writeback).aio(Aio::Threads),
            How::Direct => drive.cache(Cache::None).aio(Aio::Native),
            How::Unsafe => drive.cache(Cache::Unsafe).aio(Aio::Threads),
            How::Best => drive.cache(Cache::None).aio(Aio::IoUring).io_thread(),
        }
    }
}

/// QEMU opens the image itself.
#[derive(Debug)]
pub struct InQemu {
    /// What the guest sees.
    pub attach: Attach,
    /// What the image is.
    pub image: Image,
    /// How it is opened.
    pub how: How,
}

impl Backend for InQemu {
    fn reach(&self) -> Reach {
        Reach::Inside
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.program("qemu-system-x86_64", "qemu-system-x86").or_else(|| self.image.missing(env))
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let drive = self.how.drive(Drive::raw(context.disk).format(self.image.format()));
        Ok(Served::reached(Access::Qemu { attach: self.attach, drive }))
    }

    fn cached(&self) -> bool {
        matches!(self.how, How::Default | How::CacheOff | How::Unsafe)
    }

    fn guest_sets_cache(&self) -> Option<WriteCache> {
        (self.how == How::CacheOff).then_some(WriteCache::Off)
    }

    fn image(&self) -> Image {
        self.image
    }

    fn remark(&self) -> Option<&'static str> {
        Some("served by QEMU's own threads: its CPU is the guest's")
    }
}

/// QEMU opens a loop device of the host that lies on the image, cache=none, aio=native.
#[derive(Debug)]
pub struct OnLoop(pub Loop);

impl Backend for OnLoop {
    fn reach(&self) -> Reach {
        Reach::Inside
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.program("qemu-system-x86_64", "qemu-system-x86").or_else(|| self.0.missing(env))
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let served = self.0.start(context)?;
        let Access::Block(device) = &served.access else { return Ok(served) };
        let drive = How::Direct.drive(Drive::raw(device));
        Ok(Served { access: Access::Qemu { attach: Attach::Virtio, drive }, ..served })
    }

    fn cached(&self) -> bool {
        self.0.cached()
    }

    fn remark(&self) -> Option<&'static str> {
        self.0.remark()
    }
}

const fn direct(attach: Attach, image: Image) -> InQemu {
    InQemu { attach, image, how: How::Direct }
}

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
pub(super) const VIRTIO: InQemu = direct(Attach::Virtio, Image::Raw);
const VIRTIO_DEFAULT: InQemu =
    InQemu { attach: Attach::Virtio, image: Image::Raw, how: How::Default };
const VIRTIO_BEST: InQemu = InQemu { attach: Attach::Virtio, image: Image::Raw, how: How::Best };
const ON_LOOP: OnLoop = OnLoop(loopdev::THROUGH_CACHE);
const ON_LOOP_DIRECT: OnLoop = OnLoop(loopdev::DIRECT);
const VIRTIO_QCOW2: InQemu = direct(Attach::Virtio, Image::Qcow2);
const VIRTIO_OVERLAY: InQemu = direct(Attach::Virtio, Image::Overlay(Maker::QemuImg));
const VIRTIO_OVERLAY_SUBCLUSTERS: InQemu =
    direct(Attach::Virtio, Image::Overlay(Maker::QemuImgSubclusters));

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::named(
            Stage::Vm,
            10,
            "virtio-default",
            "virtio-blk in QEMU, raw, as QEMU does by default: cache=writeback, aio=threads",
            &VIRTIO_DEFAULT,
        ),
        Entry::named(
            Stage::Vm,
            20,
            "virtio-best",
            "virtio-blk in QEMU, raw, cache=none, aio=io_uring, iothread",
            &VIRTIO_BEST,
        ),
        Entry::usual(
            Stage::Vm,
            30,
            "virtio-raw",
            "virtio-blk in QEMU, raw, cache=none, aio=native",
            &VIRTIO,
        ),
        Entry::usual(
            Stage::Vm,
            40,
            "virtio-qcow2",
            "virtio-blk in QEMU, qcow2, cache=none, aio=native",
            &VIRTIO_QCOW2,
        ),
        Entry::usual(
            Stage::Vm,
            50,
            "virtio-overlay",
            "virtio-blk in QEMU, a qcow2 overlay made anew for each load that writes, by `qemu-img create` (without subclusters)",
            &VIRTIO_OVERLAY,
        ),
        Entry::named(
            Stage::Vm,
            60,
            "virtio-overlay-subclusters",
            "the same, made with extended_l2=on: with subclusters",
            &VIRTIO_OVERLAY_SUBCLUSTERS,
        ),
        Entry::usual(
            Stage::Vm,
            70,
            "ide",
            "IDE emulation (PIIX) in QEMU, raw, cache=none, aio=native",
            &IDE,
        ),
        Entry::named(
            Stage::Vm,
            80,
            "ide-writeback",
            "the same, cache=writeback, aio=threads",
            &IDE_WRITEBACK,
        ),
        Entry::named(
            Stage::Vm,
            90,
            "ide-unsafe",
            "the same, cache=unsafe: flushes are ignored",
            &IDE_UNSAFE,
        ),
        Entry::named(
            Stage::Vm,
            100,
            "ide-cache-off",
            "ide-writeback, the guest has turned the disk's write cache off",
            &IDE_CACHE_OFF,
        ),
        Entry::named(
            Stage::Vm,
            110,
            "virtio-cache-off",
            "virtio-default, the guest has turned the disk's write cache off",
            &VIRTIO_CACHE_OFF,
        ),
        Entry::named(
            Stage::Vm,
            120,
            "virtio-unsafe",
            "virtio-blk in QEMU, raw, cache=unsafe: flushes are ignored",
            &VIRTIO_UNSAFE,
        ),
        Entry::usual(
            Stage::Vm,
            130,
            "ahci",
            "SATA emulation (AHCI) in QEMU, raw, cache=none, aio=native",
            &AHCI,
        ),
        Entry::usual(
            Stage::Vm,
            140,
            "nvme",
            "NVMe emulation in QEMU, raw, cache=none, aio=native",
            &NVME,
        ),
        Entry::named(
            Stage::Vm,
            240,
            "host-loop",
            "virtio-blk in QEMU on a loop device of the host, through the host's page cache",
            &ON_LOOP,
        ),
        Entry::named(Stage::Vm, 250, "host-loop-direct", "the same, direct-io=on", &ON_LOOP_DIRECT),
        Entry::usual(
            Stage::TwoVms,
            10,
            "virtio-raw",
            "virtio-blk in QEMU, raw, cache=none, aio=native",
            &VIRTIO,
        ),
        Entry::named(
            Stage::TwoVms,
            20,
            "ide",
            "IDE emulation (PIIX) in QEMU, raw, cache=none, aio=native",
            &IDE,
        ),
    ],
    labels: &[
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
    ],
    peers: &[],
};
