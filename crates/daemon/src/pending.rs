//! What is about to come or to go, and takes time: other threads see to that, and the names are taken meanwhile.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::handover::NbdComes;
use crate::ids::DiskId;
use crate::passed::Passing;

/// Names that are taken for what is not there yet, or not any more; and the threads that see to it.
#[derive(Default)]
pub(crate) struct Pending {
    /// Of disks.
    pub(crate) nodes: HashSet<String>,
    /// Groups of disks that are being opened, one for each.
    pub(crate) groups: Vec<String>,
    pub(crate) exports: Vec<ComingExport>,
    /// Disks whose image is about to be another.
    pub(crate) changing: HashSet<DiskId>,
    /// Those of them that jobs write to.
    pub(crate) targets: HashSet<DiskId>,
    /// Those of them for whose images overlays are about to be there.
    pub(crate) snapshots: HashSet<DiskId>,
    /// Disks whose image is not here: their guests are elsewhere.
    pub(crate) away: HashSet<DiskId>,
    /// Disks whose bitmaps are being changed.
    pub(crate) bitmaps_changing: HashSet<DiskId>,
    /// Disks whose image is being opened otherwise.
    pub(crate) reopened: HashSet<DiskId>,
    /// Disks that are about to be paused, each by the pause.
    pub(crate) pauses: HashMap<DiskId, Arc<()>>,
    /// What jobs are to be called that begin once their moment has come.
    pub(crate) jobs: HashSet<String>,
    /// Bitmaps that jobs use.
    pub(crate) bitmaps: HashSet<(DiskId, String)>,
    /// Whether another process is to take over (SIGUSR2) once no image is being opened.
    pub(crate) upgrade: bool,
    /// What there is to know of jobs that have ended for another process, or that this one is to go on with.
    pub(crate) passing: HashMap<String, Passing>,
    /// Which of those is being begun.
    pub(crate) resuming: Option<String>,
    /// Whether jobs that have ended for another process are to go on here after all.
    pub(crate) resumes_jobs: bool,
    /// Whether the NBD server of the control socket is about to come.
    pub(crate) nbd: bool,
    /// The one that the server before this one had.
    pub(crate) nbd_comes: Option<NbdComes>,
    /// Its new clients wait until the exports are there that it had, while that is so.
    pub(crate) nbd_waits: Option<Vec<ringtap_export::nbd::NewOnesWait>>,
    /// Each by what it does.
    pub(crate) threads: Vec<(String, JoinHandle<()>)>,
    /// Those that look at images while they are served.
    pub(crate) checks: Vec<JoinHandle<()>>,
}

impl Pending {
    /// A disk of that group is no longer being opened.
    pub(crate) fn lets_go_of(&mut self, group: &str) {
        let found = self.groups.iter().position(|its| its == group);
        found.map(|at| self.groups.swap_remove(at));
    }

    /// Whether a disk's image cannot be had now.
    pub(crate) fn is_changing(&self, disk: DiskId) -> bool {
        self.changing.contains(&disk) || self.away.contains(&disk)
    }
}

/// An export that is about to be there.
pub(crate) struct ComingExport {
    pub(crate) id: String,
    pub(crate) disk: DiskId,
    pub(crate) writable: bool,
    /// Whether its clients make the disk larger.
    pub(crate) grows: bool,
}
