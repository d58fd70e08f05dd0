//! User-Mode Linux's own disk, served within the guest's process.

use super::{Access, Backend, Context, Entry, File, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::Result;
use crate::sample::Stage;

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
        Ok(Served::reached(Access::Ubd(context.disk.to_owned())))
    }

    fn cached(&self) -> bool {
        true
    }

    fn remark(&self) -> Option<&'static str> {
        Some(
            "served by a thread of the guest's own process and through the host's page cache: its CPU is the guest's",
        )
    }
}

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::usual(Stage::Guest, 10, "ubd", "User-Mode Linux opens the file itself (ubd)", &Ubd),
        Entry::usual(
            Stage::TwoGuests,
            10,
            "ubd",
            "User-Mode Linux opens the file itself (ubd)",
            &Ubd,
        ),
    ],
    labels: &[("ubd", "User-Mode Linux's own disk")],
    peers: &[],
};
