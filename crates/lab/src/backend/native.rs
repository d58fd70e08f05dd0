//! The file itself: what everything else is measured against.

use super::{Access, Backend, Context, Entry, File, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::Result;
use crate::sample::Stage;

/// The plain file.
#[derive(Debug)]
pub struct Native;

impl Backend for Native {
    fn reach(&self) -> Reach {
        Reach::File
    }

    fn missing(&self, _: &Env) -> Option<Missing> {
        None
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        Ok(Served::reached(Access::File(context.disk.to_owned())))
    }
}

/// The plain file under `ringtap-lab load`, which drives the vhost-user rows: what is between the two is the server alone.
#[derive(Debug)]
pub struct ByLoad;

impl Backend for ByLoad {
    fn reach(&self) -> Reach {
        Reach::Native
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.lab_load()
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        Ok(Served::reached(Access::Native(context.disk.to_owned())))
    }
}

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::usual(Stage::Host, 10, "native", "the file itself, O_DIRECT", &Native),
        Entry::usual(
            Stage::Host,
            130,
            "native-load",
            "the file itself, O_DIRECT, by the client of the vhost rows",
            &ByLoad,
        ),
        Entry::usual(Stage::Two, 10, "native", "the file itself, O_DIRECT", &Native),
        Entry::usual(
            Stage::Two,
            130,
            "native-load",
            "the file itself, O_DIRECT, by the client of the vhost rows",
            &ByLoad,
        ),
    ],
    labels: &[
        ("native", "the file itself"),
        ("native-load", "the file itself, by vhost-user's client"),
    ],
    peers: &[],
};
