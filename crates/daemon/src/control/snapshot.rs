//! Snapshots: overlays take the places of images, of one disk or of several at one moment.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ringtap_image::Format;
use ringtap_vbd::Vbd;

use super::command::Command;
use super::outgoing::{Reply, Told};
use super::refusal::Refusal;
use super::shape::{Done, answer, arguments, words};
use crate::end;
use crate::graph::Ties;
use crate::identity::{Identity, identity};
use crate::ids::DiskId;
use crate::layers::recount_layers;
use crate::node::is_name;
use crate::opened::{Wrap, device};
use crate::running::{Running, Served, Then};
use crate::snapshot::{Taken, Wanted, take};
use crate::threads::contained;
use crate::{Disk, Error};

/// How long requests in flight may take before nothing is changed.
const LIMIT: Duration = Duration::from_secs(10);

words! {
    /// What an overlay can be.
    enum OverlayFormat { "qcow2" Qcow2 }
}

words! {
    /// Whether the overlay is made, or is there already.
    enum NewImageMode { "existing" Existing, "absolute-paths" AbsolutePaths }
}

arguments! {
    /// `blockdev-snapshot-sync`
    struct SnapshotSync {
        "device" device: Option<String>,
        "node-name" node_name: Option<String>,
        "snapshot-file" file: String,
        /// What the disk is called from then on.
        "snapshot-node-name" new_name: Option<String>,
        "format" _format: Option<OverlayFormat>,
        "mode" mode: Option<NewImageMode>,
    }
}

arguments! {
    /// `blockdev-snapshot`
    struct Snapshot {
        /// The disk.
        "node" node: String,
        /// The node of the overlay that it goes on in, opened with nothing below.
        "overlay" overlay: String,
    }
}

answer! {
    /// `__ringtap_SNAPSHOT`: an overlay has taken an image's place.
    struct SnapshotTaken {
        "node-name" node_name: String,
        "file" file: String,
        "backing-file" backing: String,
        /// How long the disk's requests waited, in nanoseconds: the slowest of those in flight included.
        "pause-ns" pause: u64,
        /// Of that, until the slowest of those in flight had ended.
        "drain-ns" drain: u64,
    }
}

impl Told for SnapshotTaken {
    const NAME: &'static str = "__ringtap_SNAPSHOT";
}

/// One of the disks, and what it is called afterwards.
struct One {
    id: DiskId,
    overlay: PathBuf,
    name: String,
    /// The disk that the overlay is by itself, until it is this one's.
    node: Option<DiskId>,
}

/// A snapshot, in either of the ways to ask for one.
pub(super) enum Asked {
    /// `blockdev-snapshot-sync`
    Sync(SnapshotSync),
    /// `blockdev-snapshot`
    Node(Snapshot),
}

impl Asked {
    fn prepare(self, running: &Running) -> Result<(One, Wanted), Refusal> {
        match self {
            Asked::Sync(of) => of.prepare(running),
            Asked::Node(of) => of.prepare(running),
        }
    }
}

impl Snapshot {
    fn prepare(self, running: &Running) -> Result<(One, Wanted), Refusal> {
        let (id, node) = (running.named_node(&self.node)?, running.named_node(&self.overlay)?);
        let (Some(served), Some(overlay)) = (running.disks.get(&id), running.disks.get(&node))
        else {
            return Err(Refusal::new("the disk is gone"));
        };
        running.may_change(id)?;
        if id == node || running.is_shown(node) || running.may_change(node).is_err() {
            return Err(Refusal::new("The overlay is already in use"));
        }
        let image = overlay.vbd.image().map_err(|error| Refusal::new(error.to_string()))?;
        if image.info().format != Format::Qcow2.name() {
            return Err(Refusal::new("The overlay does not support backing images"));
        }
        if image.below().is_some() || !overlay.ties.alone {
            return Err(Refusal::new("The overlay already has a backing image"));
        }
        let path = overlay.disk.path.clone();
        let wanted = Wanted {
            disk: served.disk.clone(),
            vbd: served.vbd.clone(),
            overlay: path.clone(),
            exists: true,
        };
        Ok((One { id, overlay: path, name: self.overlay, node: Some(node) }, wanted))
    }
}

impl Running {
    /// An error where a disk's image cannot become another now.
    pub(super) fn may_change(&self, id: DiskId) -> Result<(), Refusal> {
        self.may_be_opened_anew(id)?;
        let node = self.disks.get(&id).map(Served::node).unwrap_or_default();
        if let Some(user) = self.user_of_disk(id) {
            return Err(Refusal::new(format!(
                "Node '{node}' is busy: node is used as backing hd of '{user}'"
            )));
        }
        Ok(())
    }

    /// The same of one that others may lie upon.
    pub(super) fn may_be_opened_anew(&self, id: DiskId) -> Result<(), Refusal> {
        let node = self.disks.get(&id).map(Served::node).unwrap_or_default();
        if self.pending.away.contains(&id) {
            return Err(Refusal::new(format!(
                "Node '{node}' is inactive: its guest is elsewhere, and so is its image"
            )));
        }
        if self.pending.is_changing(id) || self.pending.bitmaps_changing.contains(&id) {
            return Err(Refusal::new(format!("Node '{node}' is being changed")));
        }
        Ok(())
    }
}

impl SnapshotSync {
    fn prepare(self, running: &Running) -> Result<(One, Wanted), Refusal> {
        let id = running.one_of(self.device.as_deref(), self.node_name.as_deref())?;
        let Some(served) = running.disks.get(&id) else {
            return Err(Refusal::new("the disk is gone"));
        };
        let name = self.new_name.unwrap_or_else(|| served.node().to_owned());
        if name != served.node() {
            if !is_name(&name) {
                return Err(Refusal::new(
                    "Invalid node-name: it must begin with a letter, and have at most 31",
                ));
            }
            if running.is_taken(&name) {
                return Err(duplicate(&name));
            }
        }
        running.may_change(id)?;
        let overlay = match Path::new(&self.file) {
            path if path.is_absolute() => path.to_owned(),
            path => std::env::current_dir()
                .map_err(|error| Refusal::new(format!("no folder for '{}': {error}", self.file)))?
                .join(path),
        };
        let wanted = Wanted {
            disk: served.disk.clone(),
            vbd: served.vbd.clone(),
            overlay: overlay.clone(),
            exists: self.mode == Some(NewImageMode::Existing),
        };
        Ok((One { id, overlay, name, node: None }, wanted))
    }
}

fn duplicate(name: &str) -> Refusal {
    Refusal::new(format!("Duplicate nodes with node-name='{name}'"))
}

/// An overlay that was a disk by itself.
struct Overlay {
    disk: Disk,
    ties: Ties,
    /// It is that again.
    opened: Option<Result<(Vbd, Option<Identity>), Error>>,
}

impl Overlay {
    fn close(served: Served) -> Overlay {
        if let Err(error) = end::close(&served) {
            tracing::error!("the overlay {} is closed all the same: {error}", served.node());
        }
        Overlay { disk: served.disk, ties: served.ties, opened: None }
    }

    /// Nothing came of it.
    fn open(self, wrap: &Wrap) -> Overlay {
        let label = self.disk.node_name.as_deref().unwrap_or_default();
        let file = identity(&self.disk.path);
        let opened = device(&self.disk, label, wrap).map(|(vbd, _)| (vbd, file));
        Overlay { opened: Some(opened), ..self }
    }

    fn come_back(self, running: &mut Running) {
        let Overlay { disk, ties, opened } = self;
        match opened {
            None => {}
            Some(Ok((vbd, file))) => match running.add_again(disk, vbd, file) {
                Ok(id) => {
                    if let Some(served) = running.disks.get_mut(&id) {
                        served.ties = ties;
                    }
                }
                Err(error) => tracing::error!("an overlay is not there again: {error}"),
            },
            Some(Err(error)) => tracing::error!("an overlay is not opened again: {error}"),
        }
    }
}

impl Running {
    /// Have overlays take the places of images, all at one moment.
    pub(super) fn snapshot(&mut self, all: Vec<Asked>, reply: Reply<Done>) {
        let mut ready: Vec<(One, Wanted)> = vec![];
        for one in all {
            let next = one.prepare(self).and_then(|(one, wanted)| {
                let again =
                    |(other, _): &(One, Wanted)| other.id == one.id || other.overlay == one.overlay;
                let name = |(other, _): &(One, Wanted)| other.name == one.name;
                match (ready.iter().any(again), ready.iter().any(name)) {
                    (true, _) => Err(Refusal::new("a disk or a file is named twice")),
                    (_, true) => Err(duplicate(&one.name)),
                    (false, false) => Ok((one, wanted)),
                }
            });
            match next {
                Ok(one) => ready.push(one),
                Err(refusal) => return reply.give(Err(refusal)),
            }
        }
        let (ones, mut wanted): (Vec<One>, Vec<(DiskId, Wanted)>) = ready
            .into_iter()
            .map(|(one, wanted)| {
                let id = one.id;
                (one, (id, wanted))
            })
            .unzip();
        // Disks stand still in one order, whoever wants them to: nobody waits with one for another, which waits for his.
        wanted.sort_by_key(|(id, _)| *id);
        let wanted: Vec<Wanted> = wanted.into_iter().map(|(_, wanted)| wanted).collect();
        let ids: Vec<DiskId> = ones.iter().map(|one| one.id).collect();
        self.pending.changing.extend(&ids);
        // One that is added now would be of the image that is left.
        self.pending.bitmaps_changing.extend(&ids);
        self.pending.snapshots.extend(&ids);
        // Overlays that are open are opened again, each upon the image it takes the place of.
        let nodes = ones.iter().filter_map(|one| Some((one.node?, self.take_back(one.node?)?)));
        let nodes: Vec<(DiskId, Served)> = nodes.collect();
        // What they are called is nobody else's meanwhile.
        let is_new = |one: &&One| self.disks.get(&one.id).is_some_and(|of| of.node() != one.name);
        let names: Vec<String> = ones.iter().filter(is_new).map(|one| one.name.clone()).collect();
        self.pending.nodes.extend(names.clone());
        let (wrap, taken) = (self.wrap.clone(), names.clone());
        let stays = self.in_time_with("snapshot", nodes, move |nodes| -> Then {
            let panicked = || {
                Err(Error::Job(
                    "a panic has ended the snapshot, which is an error of Ringtap itself".into(),
                ))
            };
            let nodes = nodes.into_iter().map(|(_, served)| Overlay::close(served));
            let nodes: Vec<Overlay> = nodes.collect();
            let end = contained(|| take(&wanted, LIMIT)).unwrap_or_else(panicked);
            let nodes: Vec<Overlay> = match end.is_ok() {
                true => nodes,
                false => nodes.into_iter().map(|node| node.open(&wrap)).collect(),
            };
            Box::new(move |running| {
                names.iter().for_each(|name| _ = running.pending.nodes.remove(name));
                for one in &ones {
                    running.pending.changing.remove(&one.id);
                    running.pending.bitmaps_changing.remove(&one.id);
                    running.pending.snapshots.remove(&one.id);
                }
                let mut nodes = nodes.into_iter();
                reply.give(end.map_err(Refusal::from).map(|taken| {
                    for one in ones {
                        let ties = one.node.and_then(|_| nodes.next()).map(|node| node.ties);
                        running.goes_on(one, taken, ties);
                    }
                    Done {}
                }));
                nodes.for_each(|node| node.come_back(running));
            })
        });
        if let Some(nodes) = stays {
            ids.iter().for_each(|id| {
                self.pending.changing.remove(id);
                self.pending.bitmaps_changing.remove(id);
                self.pending.snapshots.remove(id);
            });
            taken.iter().for_each(|name| _ = self.pending.nodes.remove(name));
            nodes.into_iter().for_each(|(id, served)| self.put_back(id, served));
        }
    }

    /// The disk is found in the overlay from now on.
    fn goes_on(&mut self, one: One, taken: Taken, ties: Option<Ties>) {
        let former = self.as_lower(one.id);
        let named = self.disks.get(&one.id).is_some_and(|served| {
            served.ties.by_image && served.node() != one.name || ties.is_some()
        });
        if let Some((name, lower)) = former.filter(|_| named) {
            self.keep_name(name, lower);
        }
        let Some(served) = self.disks.get_mut(&one.id) else { return };
        let backing = std::mem::replace(&mut served.disk.path, one.overlay.clone());
        served.disk.options.format = Some(Format::Qcow2);
        served.disk.options.force_format = false;
        served.disk.node_name = Some(one.name.clone());
        // A file's name stays with the image below, which has one itself or is not named any more.
        served.ties = Ties { upon: served.ties.upon, ..ties.unwrap_or_default() };
        served.ties.alone = false;
        served.file = identity(&one.overlay);
        recount_layers(served);
        served.facts.goes_on(&served.disk, &served.vbd);
        let (file, backing) = (one.overlay.display().to_string(), backing.display().to_string());
        let Taken { pause, drain } = taken;
        served.vbd.span().in_scope(|| {
            tracing::info!("a snapshot: it goes on in {file}, requests waited for {pause:.1?}");
        });
        let [pause, drain] =
            [pause, drain].map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        self.told.tell(SnapshotTaken { node_name: one.name, file, backing, pause, drain });
    }
}

impl Command for SnapshotSync {
    const NAME: &'static str = "blockdev-snapshot-sync";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        running.snapshot(vec![Asked::Sync(self)], reply);
    }
}

impl Command for Snapshot {
    const NAME: &'static str = "blockdev-snapshot";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        running.snapshot(vec![Asked::Node(self)], reply);
    }
}
