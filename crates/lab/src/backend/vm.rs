//! Disks that QEMU itself serves to its guest, and what the guest puts on top of a disk.

use ringtap_guest::{Aio, Cache, Drive};

use super::loopdev::Loop;
use super::{Access, Backend, Context, Image, Inner, Reach, Served, WriteCache};
use crate::env::{Env, Missing};
use crate::error::Result;

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
