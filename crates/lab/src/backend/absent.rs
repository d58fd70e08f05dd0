//! Ways that belong into the comparison and that this lab cannot run here: each is a row with its reason.

use super::{Backend, Context, Entry, File, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::sample::Stage;

/// A way that is not run, and why.
#[derive(Debug)]
pub struct Absent {
    /// A device node without which the kernel cannot do it, and the reason then.
    pub needs: Option<(&'static str, &'static str)>,
    /// The reason where the kernel could.
    pub reason: &'static str,
    /// What would make it run, or where it runs.
    pub remedy: &'static str,
}

impl Backend for Absent {
    fn reach(&self) -> Reach {
        Reach::Block
    }

    fn missing(&self, _: &Env) -> Option<Missing> {
        let reason = match self.needs {
            Some((node, reason)) if !std::path::Path::new(node).exists() => reason,
            _ => self.reason,
        };
        Some(Missing::new(reason, self.remedy))
    }

    fn start(&self, _: &Context<'_>) -> Result<Served> {
        Err(Error::Plan(self.reason.into()))
    }
}

/// Xen's blkback.
const XEN: Absent = Absent {
    needs: None,
    reason: "a guest of QEMU's has no Xen below it",
    remedy: "the stage xen, which boots one",
};

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[Entry::usual(Stage::Vm, 340, "xen-blkback", "Xen's blkback", &XEN)],
    labels: &[("xen-blkback", "Xen's blkback")],
    peers: &[],
};
