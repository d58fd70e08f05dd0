//! Nodes that keep a moment of a disk and that show it: `copy-before-write` and `snapshot-access` of `blockdev-add`.
//!
//! A disk is one node here, with one door: from the time at which a copy-before-write node is added, whatever changes the
//! disk saves what it changes in the node's target first, by whichever export it comes. So the node can be exported in
//! the disk's place, as in QEMU, and need not be.

use std::time::Duration;

use ringtap_image::{CacheMode, OpenOptions, on_a_ring};
use ringtap_vbd::{Breaks, Job, OnErrors, Vbd};

use super::bitmaps::{Known, NodeBitmap, usable};
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments, words};
use crate::Disk;
use crate::graph::KeptMoment;
use crate::ids::DiskId;
use crate::moment::{Begun, Part, Wanted, at_one_moment};
use crate::running::{Running, Then};
use crate::threads::contained;

words! {
    /// What breaks where old content cannot be saved.
    enum OnCbwError { "break-guest-write" BreakGuestWrite, "break-snapshot" BreakSnapshot }
}

arguments! {
    /// What keeps the moment at which it is added.
    struct CopyBeforeWriteOptions {
        /// The disk.
        "file" file: String,
        /// What takes old content: a node that nobody shows, and as large.
        "target" target: String,
        /// Only what is marked here will be read: a bitmap of the disk. All that changes is saved, whatever it marks.
        "bitmap" bitmap: Option<NodeBitmap>,
        /// A guest's write where it is not said.
        "on-cbw-error" on_error: Option<OnCbwError>,
        /// How many seconds a guest's write may wait for the target; 0, and where it is not said: as long as it takes.
        "cbw-timeout" timeout: Option<u32>,
        /// The most bytes that the target takes.
        "__ringtap_scratch-limit" scratch_limit: Option<u64>,
    }
}

arguments! {
    /// A moment as a disk that is only read.
    struct SnapshotAccessOptions {
        /// The node that keeps it.
        "file" file: String,
    }
}

fn missing(name: &str) -> Refusal {
    Refusal::new(format!("Cannot find device='{name}' nor node-name='{name}'"))
}

impl Running {
    /// The disk of which a moment is to be kept, and what takes its old content.
    fn disks_of_moment(&self, of: &CopyBeforeWriteOptions) -> Result<(DiskId, DiskId), Refusal> {
        let (file, target) = (&of.file, &of.target);
        let disk = self.node(file).ok_or_else(|| missing(file))?;
        let to = self.node(target).ok_or_else(|| missing(target))?;
        if disk == to {
            return Err(Refusal::new("Source and target cannot be the same"));
        }
        if let Some(NodeBitmap { node, name }) = &of.bitmap {
            let found = self.disks.get(&disk).filter(|served| served.node() == node);
            let known = found.map(|served| served.vbd.dirty_bitmaps()).unwrap_or_default();
            let known: Vec<Known> = known.into_iter().map(Known::from).collect();
            usable(self, disk, &known, name)?;
        }
        if let Some(user) = self.user_of_disk(disk) {
            return Err(Refusal::new(format!(
                "Node '{file}' is busy: node is used as backing hd of '{user}'"
            )));
        }
        if self.pending.is_changing(disk) || self.pending.bitmaps_changing.contains(&disk) {
            return Err(Refusal::new(format!(
                "Node '{file}' is busy: block device is in use by another job, or is being changed"
            )));
        }
        if let Some(user) = self.who_uses(to).or_else(|| self.who_holds(to)) {
            return Err(Refusal::new(format!("Node '{target}' is in use: {user}")));
        }
        Ok((disk, to))
    }

    /// Keep what a disk holds now, as a node of that name.
    pub(super) fn keep_moment(
        &mut self,
        name: String,
        of: &CopyBeforeWriteOptions,
        reply: Reply<Done>,
    ) {
        let (disk, target) = match self.disks_of_moment(of) {
            Ok(both) => both,
            Err(refusal) => return reply.give(Err(refusal)),
        };
        let (Some(from), Some(to)) = (self.disks.get(&disk), self.disks.get(&target)) else {
            return reply.give(Err(Refusal::new("the disk is gone")));
        };
        let seconds = of.timeout.filter(|seconds| *seconds > 0);
        let limit = seconds.map(|seconds| Duration::from_secs(seconds.into()));
        let breaks = match of.on_error {
            None | Some(OnCbwError::BreakGuestWrite) => Breaks::Request,
            Some(OnCbwError::BreakSnapshot) => Breaks::Moment,
        };
        let wanted = Wanted {
            to: to.vbd.clone(),
            by: None,
            clears: false,
            held: Some(of.scratch_limit),
            scratch: None,
            zeroed: false,
            limit,
            breaks,
            on_errors: OnErrors::default(),
        };
        let (own, vbd) = (from.disk.clone(), from.vbd.clone());
        let part = Part { disk: own, vbd, changes: vec![], keeps: false, backups: vec![wanted] };
        self.pending.changing.extend([disk, target]);
        self.pending.targets.insert(target);
        self.pending.nodes.insert(name.clone());
        let taken = name.clone();
        let begun = self.in_time("moment", move || -> Then {
            let panicked = || {
                Err(crate::Error::Job(
                    "a panic has ended it, which is an error of Ringtap itself".into(),
                ))
            };
            let end = contained(|| at_one_moment(vec![part])).unwrap_or_else(panicked);
            Box::new(move |running| {
                running.pending.nodes.remove(&name);
                let end = end.map(|begun| begun.into_iter().flatten().next());
                reply.give(match end {
                    Ok(Some(begun)) => {
                        if let Some(to) = running.disks.get_mut(&target) {
                            to.moment = begun.shown.clone();
                        }
                        running.graph.kept.insert(name, KeptMoment { disk, target, begun });
                        Ok(Done {})
                    }
                    Ok(None) => Err(Refusal::new("the disk is gone")),
                    Err(error) => {
                        running.let_go_of(&[disk, target]);
                        Err(error.into())
                    }
                });
            })
        });
        if let Err(error) = begun {
            self.pending.nodes.remove(&taken);
            self.let_go_of(&[disk, target]);
            tracing::error!("cannot keep a moment: {error}");
        }
    }

    /// A moment of the first is kept in the second no more.
    fn free_of_moment(&mut self, disks: [DiskId; 2]) {
        self.let_go_of(&disks);
        if let Some(target) = self.disks.get_mut(&disks[1]) {
            target.moment = None;
        }
    }

    /// Show a moment that is kept, as a disk of that name.
    pub(super) fn show_moment(
        &mut self,
        name: String,
        of: SnapshotAccessOptions,
    ) -> Result<Done, Refusal> {
        let Some(kept) = self.graph.kept.get(&of.file) else {
            return Err(match self.is_taken(&of.file) {
                true => Refusal::new(format!(
                    "Node '{}' keeps no moment: 'file' of snapshot-access is a node of the driver 'copy-before-write'",
                    of.file
                )),
                false => missing(&of.file),
            });
        };
        let shown = kept.begun.shown.as_ref().ok_or_else(|| Refusal::new("it is gone"))?;
        let failed = |error| Refusal::new(format!("Node '{}': {error}", of.file));
        let vbd = Vbd::new(shown.image().map_err(failed)?, CacheMode::Writeback);
        let options =
            OpenOptions { read_only: true, cache: CacheMode::Writeback, ..OpenOptions::default() };
        let path = format!("snapshot-access:{}", of.file);
        let vbd = vbd.named(&path, &name);
        let disk = Disk { node_name: Some(name), ..Disk::new(path, options) };
        let id = self.add_known(disk, vbd, None)?;
        if let Some(served) = self.disks.get_mut(&id) {
            served.ties.shows = Some(of.file);
        }
        Ok(Done {})
    }

    /// Keep a moment no longer.
    pub(super) fn forget_moment(&mut self, name: String, reply: Reply<Done>) {
        let Some(kept) = self.graph.kept.get(&name) else { return };
        if let Some(user) = self.who_shows_moment(&name, kept.target) {
            return reply.give(Err(Refusal::new(format!("Node '{name}' is in use: {user}"))));
        }
        let Some(kept) = self.graph.kept.remove(&name) else { return };
        let disks = [kept.disk, kept.target];
        self.pending.nodes.insert(name.clone());
        let taken = name.clone();
        let begun = self.in_time("moment", move || -> Then {
            _ = contained(|| end(kept.begun));
            Box::new(move |running| {
                running.pending.nodes.remove(&name);
                running.free_of_moment(disks);
                reply.give(Ok(Done {}));
            })
        });
        if let Err(error) = begun {
            self.pending.nodes.remove(&taken);
            self.free_of_moment(disks);
            tracing::error!("cannot let go of a moment in order: {error}");
        }
    }
}

/// Save no more, and wait for what is on its way to the target.
fn end(begun: Begun) {
    let job = Job::new();
    job.cancel();
    let path = begun.moment.disk().info().format;
    let ended = on_a_ring(path.as_ref(), |io| async move {
        // That it was cancelled is how it ends.
        let _ = begun.moment.hold(&io, &job).await;
    });
    if let Err(error) = ended {
        tracing::warn!("a moment is not kept any more: {error}");
    }
}
