//! What clients want to happen at one moment to one disk or several: `transaction`, and the commands that are one action.

use std::collections::BTreeMap;

use ringtap_vbd::BitmapChange;

use super::backups::{Asked, BlockdevBackup};
use super::bitmaps::{
    Action, AddBitmap, ClearBitmap, DisableBitmap, EnableBitmap, Known, MergeBitmaps, RemoveBitmap,
};
use super::command::Command;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments, choice, words};
use super::snapshot::{Asked as AskedSnapshot, Snapshot, SnapshotSync};
use crate::Error;
use crate::backup::Save;
use crate::ids::DiskId;
use crate::moment::{Begun, Part, at_one_moment};
use crate::running::{Running, Then};
use crate::threads::contained;

/// Actions wrap what their commands take.
macro_rules! actions {
    ($($Name:ident of $Command:ident),* $(,)?) => {
        $(
            arguments! {
                /// An action of a transaction.
                struct $Name { "data" data: $Command }
            }
        )*
    };
}

actions! {
    SnapshotAction of Snapshot, SnapshotSyncAction of SnapshotSync, BackupAction of BlockdevBackup, AddBitmapAction of AddBitmap,
    RemoveBitmapAction of RemoveBitmap, ClearBitmapAction of ClearBitmap, EnableBitmapAction of EnableBitmap,
    DisableBitmapAction of DisableBitmap, MergeBitmapsAction of MergeBitmaps,
}

arguments! {
    /// `abort`: nothing of the transaction is to be.
    struct Abort {}
}

arguments! {
    /// An action of a transaction.
    struct AbortAction { "data" _data: Abort }
}

choice! {
    /// What is done at one moment with the rest.
    struct TransactionAction {}
    "type" enum TransactionActionType {
        "blockdev-snapshot" Snapshot(SnapshotAction),
        "blockdev-snapshot-sync" SnapshotSync(SnapshotSyncAction),
        "blockdev-backup" Backup(BackupAction),
        "block-dirty-bitmap-add" AddBitmap(AddBitmapAction),
        "block-dirty-bitmap-remove" RemoveBitmap(RemoveBitmapAction),
        "block-dirty-bitmap-clear" ClearBitmap(ClearBitmapAction),
        "block-dirty-bitmap-enable" EnableBitmap(EnableBitmapAction),
        "block-dirty-bitmap-disable" DisableBitmap(DisableBitmapAction),
        "block-dirty-bitmap-merge" MergeBitmaps(MergeBitmapsAction),
        "abort" Abort(AbortAction),
    }
}

words! {
    /// How the jobs of a transaction end: each for itself.
    enum CompletionMode { "individual" Individual }
}

arguments! {
    /// What holds for a transaction as a whole.
    struct TransactionProperties { "completion-mode" _mode: Option<CompletionMode> }
}

arguments! {
    /// `transaction`
    struct Transaction {
        "actions" actions: Vec<TransactionAction>,
        "properties" _properties: Option<TransactionProperties>,
    }
}

/// What is to happen.
#[derive(Default)]
pub(super) struct Moments {
    disks: BTreeMap<DiskId, OfDisk>,
}

#[derive(Default)]
struct OfDisk {
    known: Vec<Known>,
    changes: Vec<BitmapChange>,
    backups: Vec<Asked>,
}

impl Moments {
    fn of_disk(&mut self, running: &Running, id: DiskId) -> Result<&mut OfDisk, Refusal> {
        let served = running.disks.get(&id).ok_or_else(|| Refusal::new("the disk is gone"))?;
        if running.pending.away.contains(&id) {
            return Err(Refusal::new(format!(
                "Node '{}' is inactive: its guest is elsewhere, whose writes its bitmaps would not have",
                served.node()
            )));
        }
        if running.pending.snapshots.contains(&id) {
            return Err(Refusal::new(format!("Node '{}' is being changed", served.node())));
        }
        if running.pending.bitmaps_changing.contains(&id) {
            return Err(Refusal::new(format!(
                "the bitmaps of '{}' are being changed",
                served.node()
            )));
        }
        Ok(self.disks.entry(id).or_insert_with(|| OfDisk {
            known: served.vbd.dirty_bitmaps().into_iter().map(Known::from).collect(),
            ..OfDisk::default()
        }))
    }

    /// Something is done to a bitmap.
    pub(super) fn bitmap(
        &mut self,
        running: &Running,
        node: &str,
        action: Action,
    ) -> Result<(), Refusal> {
        if running.node(node).is_none() && !running.is_named(node) {
            return Err(Refusal::new(format!(
                "Cannot find device='{node}' nor node-name='{node}'"
            )));
        }
        let id = running.named_node(node)?;
        let of = self.of_disk(running, id)?;
        let change = action.change(running, id, &mut of.known)?;
        of.changes.push(change);
        Ok(())
    }

    /// A backup begins.
    pub(super) fn backup(
        &mut self,
        running: &Running,
        backup: BlockdevBackup,
    ) -> Result<(), Refusal> {
        let id = running.one_of(Some(backup.device()), None)?;
        let before: Vec<(String, Option<DiskId>)> = self
            .disks
            .values()
            .flat_map(|of| &of.backups)
            .map(|asked| (asked.new.id.clone(), asked.new.other))
            .collect();
        let of = self.of_disk(running, id)?;
        let asked = backup.ask(running, id, &of.known, false)?;
        let twice = |(id, target): &(String, Option<DiskId>)| {
            *id == asked.new.id || *target == asked.new.other
        };
        if before.iter().any(twice) || !of.backups.is_empty() {
            return Err(Refusal::new("a job or a disk is named twice"));
        }
        of.backups.push(asked);
        Ok(())
    }

    fn one(&mut self, running: &Running, action: TransactionActionType) -> Result<(), Refusal> {
        use TransactionActionType as Type;
        let (node, action) = match action {
            Type::Snapshot(_) | Type::SnapshotSync(_) => return Err(mixed()),
            Type::Backup(of) => return self.backup(running, of.data),
            Type::Abort(_) => {
                return Err(Refusal::new("Transaction aborted using Abort action"));
            }
            Type::AddBitmap(of) => of.data.action(),
            Type::RemoveBitmap(of) => of.data.action(),
            Type::ClearBitmap(of) => of.data.action(),
            Type::EnableBitmap(of) => of.data.action(),
            Type::DisableBitmap(of) => of.data.action(),
            Type::MergeBitmaps(of) => of.data.action(),
        };
        self.bitmap(running, &node, action)
    }

    /// Have it happen.
    pub(super) fn begin(self, running: &mut Running, reply: Reply<Done>) {
        let (mut parts, mut asked, mut ids) = (vec![], vec![], vec![]);
        for (id, of) in self.disks {
            let Some(served) = running.disks.get(&id) else { continue };
            let adds = |change: &BitmapChange| {
                matches!(change, BitmapChange::Add { persistent: true, .. })
            };
            let (wanted, own): (Vec<_>, Vec<_>) = of.backups.into_iter().map(Asked::split).unzip();
            parts.push(Part {
                disk: served.disk.clone(),
                vbd: served.vbd.clone(),
                keeps: of.changes.iter().any(adds),
                changes: of.changes,
                backups: wanted,
            });
            asked.push(own);
            ids.push(id);
        }
        let jobs = asked.iter().flatten();
        let taken = Taken {
            changing: jobs.clone().flat_map(|one| one.disks()).collect(),
            targets: jobs.clone().filter_map(|one| one.new.other).collect(),
            jobs: jobs.map(|one| one.new.id.clone()).collect(),
            bitmaps_changing: ids,
        };
        taken.take(running);
        let until_then = taken.clone();
        let begun = running.in_time("moment", move || -> Then {
            let panicked = || {
                Err(Error::Job("a panic has ended it, which is an error of Ringtap itself".into()))
            };
            let end = contained(|| at_one_moment(parts)).unwrap_or_else(panicked);
            Box::new(move |running| {
                until_then.give_back(running);
                let end = end.map_err(Refusal::from).and_then(|begun| {
                    let jobs = begun.into_iter().flatten().zip(asked.into_iter().flatten());
                    let mut end = Ok(());
                    for (begun, own) in jobs {
                        match end {
                            Ok(()) => end = running.begin_backup(begun, own),
                            Err(_) => drop(begun),
                        }
                    }
                    end
                });
                reply.give(end.map(|()| Done {}));
            })
        });
        if let Err(error) = begun {
            taken.give_back(running);
            tracing::error!("cannot change bitmaps, or begin a backup: {error}");
        }
    }
}

/// What nobody else may have until the moment has come.
#[derive(Clone)]
struct Taken {
    bitmaps_changing: Vec<DiskId>,
    changing: Vec<DiskId>,
    targets: Vec<DiskId>,
    /// What is made stable must not fail for a name that is in use by then.
    jobs: Vec<String>,
}

impl Taken {
    fn take(&self, running: &mut Running) {
        running.pending.bitmaps_changing.extend(&self.bitmaps_changing);
        running.pending.changing.extend(&self.changing);
        running.pending.targets.extend(&self.targets);
        running.pending.jobs.extend(self.jobs.iter().cloned());
    }

    fn give_back(&self, running: &mut Running) {
        let pending = &mut running.pending;
        self.bitmaps_changing.iter().for_each(|id| _ = pending.bitmaps_changing.remove(id));
        self.changing.iter().for_each(|id| _ = pending.changing.remove(id));
        self.targets.iter().for_each(|id| _ = pending.targets.remove(id));
        self.jobs.iter().for_each(|id| _ = pending.jobs.remove(id));
    }
}

impl Running {
    /// The job of a backup whose moment has come.
    pub(super) fn begin_backup(
        &mut self,
        begun: Begun,
        own: super::backups::Own,
    ) -> Result<(), Refusal> {
        let target = own.new.other;
        let found = own.new.disk.and_then(|id| Some((id, self.disks.get(&id)?)));
        let found = found.ok_or_else(|| Refusal::new("the disk is gone"));
        let checked = found.and_then(|found| self.check_job_id(&own.new.id).map(|()| found));
        let (id, served) = checked?;
        let bitmap = begun.moment.successor().map(|one| (id, one.name().to_owned()));
        let (disk, checkpoint) = (served.disk.clone(), own.checkpoint);
        let save = Save { disk, clears_always: own.clears_always, checkpoint, begun };
        if let Some(served) = target.and_then(|target| self.disks.get_mut(&target)) {
            served.moment = save.begun.shown.clone();
        }
        self.pending.bitmaps.extend(bitmap.clone());
        // Another job may go on with the moment, which is shown until then. Of one that has broken the target has some and lacks the
        // rest: it is not shown as if it were a disk.
        let free = move |running: &mut Running, is_kept: bool| {
            bitmap.iter().for_each(|bitmap| _ = running.pending.bitmaps.remove(bitmap));
            let shows = target.filter(|_| !is_kept);
            if let Some(served) = shows.and_then(|target| running.disks.get_mut(&target)) {
                served.moment = None;
            }
        };
        let after = free.clone();
        let (events, work) = (self.events.clone(), move |job: &ringtap_vbd::Job| {
            let end = save.run(job);
            end.map(|()| Box::new(|_: &mut Running| {}) as Then)
        });
        let begun = self.begin_job(own.new, move |job| {
            let end = work(job);
            let broken = end.is_err() && !job.is_cancelled();
            let is_kept = broken || job.has_left_a_moment();
            // However it has ended, and before anybody is told.
            let after = move |running: &mut Running| after(running, is_kept);
            let _ = events.send(crate::running::Event::Do(Box::new(after)));
            end
        });
        if begun.is_err() {
            free(self, false);
        }
        begun.map_err(Refusal::from)
    }
}

impl Command for Transaction {
    const NAME: &'static str = "transaction";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        let mut snapshots = vec![];
        let mut moments = Moments::default();
        let all = self.actions.len();
        for action in self.actions {
            let one = match action.of {
                TransactionActionType::Snapshot(one) => {
                    snapshots.push(AskedSnapshot::Node(one.data));
                    Ok(())
                }
                TransactionActionType::SnapshotSync(one) => {
                    snapshots.push(AskedSnapshot::Sync(one.data));
                    Ok(())
                }
                other => moments.one(running, other),
            };
            if let Err(refusal) = one {
                return reply.give(Err(refusal));
            }
        }
        match snapshots.len() {
            0 => moments.begin(running, reply),
            some if some == all => running.snapshot(snapshots, reply),
            _ => reply.give(Err(mixed())),
        }
    }
}

fn mixed() -> Refusal {
    Refusal::new("snapshots are in a transaction with others of their kind alone")
}

impl Command for BlockdevBackup {
    const NAME: &'static str = Self::COMMAND;
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        if let Some(moment) = running.moment_left(self.id()) {
            return reply.give(self.go_on(running, moment));
        }
        let mut moments = Moments::default();
        match moments.backup(running, self) {
            Ok(()) => moments.begin(running, reply),
            Err(refusal) => reply.give(Err(refusal)),
        }
    }
}

/// Commands that do one thing to a bitmap of a node.
macro_rules! one_action {
    ($($Name:ident $name:literal),* $(,)?) => {
        $(
            impl Command for $Name {
                const NAME: &'static str = $name;
                type Answer = Done;

                fn run(self, running: &mut Running, reply: Reply<Done>) {
                    let (node, action) = self.action();
                    let mut moments = Moments::default();
                    match moments.bitmap(running, &node, action) {
                        Ok(()) => moments.begin(running, reply),
                        Err(refusal) => reply.give(Err(refusal)),
                    }
                }
            }
        )*
    };
}

one_action! {
    AddBitmap "block-dirty-bitmap-add", RemoveBitmap "block-dirty-bitmap-remove", ClearBitmap "block-dirty-bitmap-clear",
    EnableBitmap "block-dirty-bitmap-enable", DisableBitmap "block-dirty-bitmap-disable", MergeBitmaps "block-dirty-bitmap-merge",
}
