//! Disks that QEMU itself serves to its guest, and what the guest puts on top of a disk.

use std::path::PathBuf;

use super::{Access, Backend, Context, Image, Inner, Reach, Served};
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

/// QEMU opens the image with cache=none, aio=native.
#[derive(Debug)]
pub struct InQemu {
    /// What the guest sees.
    pub attach: Attach,
    /// What the image is.
    pub image: Image,
}

impl Backend for InQemu {
    fn reach(&self) -> Reach {
        Reach::Inside
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.program("qemu-system-x86_64", "qemu-system-x86").or_else(|| self.image.missing(env))
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let path: PathBuf = context.disk.to_owned();
        Ok(Served::reached(Access::Qemu { attach: self.attach, path, format: self.image.format() }))
    }

    fn image(&self) -> Image {
        self.image
    }

    fn remark(&self) -> Option<&'static str> {
        Some("served by QEMU's own threads: its CPU is the guest's")
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

    fn cached(&self) -> bool {
        self.base.cached() || self.inner == Inner::Loop { direct: false }
    }
}
