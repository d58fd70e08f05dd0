//! What the disks have served, as people are told.

use std::io::Write as _;

use ringtap_vbd::{DeviceState, Stats};
use serde::Serialize;

use crate::running::Served;

/// What SIGUSR1 prints.
#[derive(Debug, Serialize)]
pub(crate) struct AllStats {
    stats: Vec<DiskStats>,
}

/// A disk as SIGUSR1 prints it.
#[derive(Debug, Serialize)]
pub(crate) struct DiskStats {
    disk: String,
    name: String,
    size: u64,
    #[serde(flatten)]
    stats: Stats,
    #[serde(flatten)]
    state: DeviceState,
}

impl DiskStats {
    pub(crate) fn of(served: &Served) -> DiskStats {
        let (path, name, vbd) = (&served.disk.path, served.disk.name.clone(), &served.vbd);
        let disk = path.display().to_string();
        DiskStats { disk, name, size: vbd.size(), stats: vbd.stats(), state: vbd.inspect() }
    }
}

impl AllStats {
    pub(crate) fn of<'a>(disks: impl Iterator<Item = &'a Served>) -> AllStats {
        AllStats { stats: disks.map(DiskStats::of).collect() }
    }

    /// Print them as one line on stderr.
    pub(crate) fn print(&self) {
        if let Ok(line) = serde_json::to_string(self) {
            // Who read it may have gone.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    }
}
