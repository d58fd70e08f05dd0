//! Ways that belong into the comparison and that this lab cannot run yet: each is a row with its reason.

use std::path::Path;

use super::{Backend, Context, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};

/// An LVM linear volume.
#[derive(Debug)]
pub struct Lvm;

impl Backend for Lvm {
    fn reach(&self) -> Reach {
        Reach::Block
    }

    fn missing(&self, _: &Env) -> Option<Missing> {
        Some(if Path::new("/dev/mapper/control").exists() {
            Missing::new(
                "this version of the lab does not build LVM volumes",
                "planned; compare loop-direct meanwhile",
            )
        } else {
            Missing::new(
                "this kernel has no device-mapper",
                "a kernel with dm_mod, and a lab that builds LVM volumes (planned)",
            )
        })
    }

    fn start(&self, _: &Context<'_>) -> Result<Served> {
        Err(Error::Plan("LVM volumes are not built by this version of the lab".into()))
    }
}

/// Ringtap as a ublk server.
#[derive(Debug)]
pub struct Ublk;

impl Backend for Ublk {
    fn reach(&self) -> Reach {
        Reach::Block
    }

    fn missing(&self, _: &Env) -> Option<Missing> {
        Some(if Path::new("/dev/ublk-control").exists() {
            Missing::new(
                "this version of Ringtap has no ublk export",
                "planned; compare ringtap-vhost meanwhile",
            )
        } else {
            Missing::new(
                "this kernel has no ublk driver",
                "a kernel with ublk_drv (Linux 6.0), and Ringtap's ublk export (planned)",
            )
        })
    }

    fn start(&self, _: &Context<'_>) -> Result<Served> {
        Err(Error::Plan("Ringtap has no ublk export yet".into()))
    }
}
