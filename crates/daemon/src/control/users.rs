//! Who uses a disk, for those who are told that they cannot have it.

use crate::ids::DiskId;
use crate::running::{Running, Served};

impl Running {
    /// Who shows a disk, or is about to.
    pub(super) fn who_shows(&self, disk: DiskId) -> Option<String> {
        let coming = self.pending.exports.iter().find(|one| one.disk == disk).map(|one| &one.id);
        let shown = self.exports.iter().find(|one| one.disk == disk).map(|one| &one.id);
        shown.or(coming).map(|id| format!("the export '{id}' shows it"))
    }

    /// Who changes a disk's image.
    pub(super) fn who_changes(&self, disk: DiskId) -> Option<String> {
        if !self.pending.changing.contains(&disk) {
            return None;
        }
        let mut kept = self.graph.kept.iter();
        let kept = kept.find(|(_, kept)| [kept.disk, kept.target].contains(&disk));
        let job = || self.at_work().find(|(_, entry)| entry.disks.contains(&disk));
        let by_job = || job().map(|(id, _)| format!("the job '{id}' is at work on it"));
        let by_node = kept.map(|(name, _)| format!("the node '{name}' keeps a moment with it"));
        by_node.or_else(by_job).or_else(|| Some("it is being changed".to_owned()))
    }

    /// Who keeps a disk from going.
    pub(super) fn who_holds(&self, disk: DiskId) -> Option<String> {
        let bitmaps = || {
            let changing = self.pending.bitmaps_changing.contains(&disk);
            changing.then(|| "its bitmaps are being changed".to_owned())
        };
        self.who_shows(disk).or_else(|| self.who_changes(disk)).or_else(bitmaps)
    }

    /// Who keeps a disk from being written to by a job.
    pub(super) fn who_uses(&self, disk: DiskId) -> Option<String> {
        let upon = || self.user_of_disk(disk).map(|user| format!("'{user}' lies upon it"));
        let away = || {
            let is_away = self.pending.away.contains(&disk);
            is_away.then(|| "it is inactive: its guest is elsewhere".to_owned())
        };
        let shown = self.who_shows(disk).or_else(upon);
        shown.or_else(|| self.who_changes(disk)).or_else(away)
    }

    /// Who shows a moment that a node keeps, or what takes its old content.
    pub(super) fn who_shows_moment(&self, name: &str, target: DiskId) -> Option<String> {
        let shows = |served: &&Served| served.ties.shows.as_deref() == Some(name);
        let view = self.disks.values().find(shows);
        let by_view = view.map(|served| format!("the node '{}' shows its moment", served.node()));
        let scratch = || {
            let node = self.disks.get(&target).map(Served::node).unwrap_or_default();
            self.who_shows(target).map(|user| format!("of its target '{node}', {user}"))
        };
        by_view.or_else(scratch)
    }
}
