//! User-Mode Linux's own disk, served within the guest's process, alone and under a loop device of the guest.

use super::{Access, Backend, Context, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::Result;

/// The file as a ubd disk.
#[derive(Debug)]
pub struct Ubd;

impl Backend for Ubd {
    fn reach(&self) -> Reach {
        Reach::Inside
    }

    fn missing(&self, _: &Env) -> Option<Missing> {
        None
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        Ok(Served { access: Access::Ubd(context.disk.to_owned()), server: None, device: None })
    }

    fn remark(&self) -> Option<&'static str> {
        Some(
            "served by a thread of the guest's own process and through the host's page cache: its CPU is the guest's",
        )
    }
}

/// A loop device of the guest, on a ubd disk.
#[derive(Debug)]
pub struct LoopOnUbd;

impl Backend for LoopOnUbd {
    fn reach(&self) -> Reach {
        Reach::Inside
    }

    fn missing(&self, _: &Env) -> Option<Missing> {
        None
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        Ok(Served {
            access: Access::LoopOnUbd(context.disk.to_owned()),
            server: None,
            device: None,
        })
    }

    fn remark(&self) -> Option<&'static str> {
        Some("served by kernel threads of the guest on top of ubd: its CPU is the guest's")
    }
}
