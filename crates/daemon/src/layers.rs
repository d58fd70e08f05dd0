//! Which images of disks that are served lie upon which, and what they are called.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use ringtap_image::Image;

use crate::graph::{Graph, Lower};
use crate::identity::{Identity, identity};
use crate::ids::DiskId;
use crate::running::{Running, Served};
use crate::switch::Beside;

/// The files of an image and of those below it.
pub(crate) fn chain(served: &Served) -> Vec<Identity> {
    let Ok(top) = served.vbd.image() else { return vec![] };
    let of = |image: &dyn Image| image.place().and_then(|place| identity(&place.at()));
    std::iter::successors(Some(&*top), |image| image.below()).filter_map(of).collect()
}

/// What opens the images of a disk, from the topmost on: those that were opened one upon the other share it.
fn handles(served: &Served) -> Vec<PathBuf> {
    let Ok(top) = served.vbd.image() else { return vec![] };
    let of = |image: &dyn Image| image.place().map(|place| place.at().into_owned());
    std::iter::successors(Some(&*top), |image| image.below()).filter_map(of).collect()
}

/// Of how many images a disk consists.
pub(crate) fn depth(served: &Served) -> Option<u32> {
    let top = served.vbd.image().ok()?;
    let all = std::iter::successors(Some(&*top), |image: &&dyn Image| image.below());
    u32::try_from(all.count()).ok()
}

/// A disk consists of other images than it did: where their number was said, it is what there is now, by which they are opened again.
pub(crate) fn recount_layers(served: &mut Served) {
    if let (Some(_), Some(now)) = (served.disk.options.layers, depth(served)) {
        served.disk.options.layers = Some(now);
    }
}

impl Running {
    /// Whether that is a name of this room.
    pub(crate) fn is_named(&self, name: &str) -> bool {
        let Graph { files, lower, kept } = &self.graph;
        files.contains_key(name) || lower.contains_key(name) || kept.contains_key(name)
    }

    /// The disk below which an image lies that has a name.
    pub(crate) fn upon(&self, lower: &Lower) -> Option<&Served> {
        let file = lower.file?;
        self.disks.values().find(|served| chain(served).contains(&file))
    }

    /// Who uses a file that has a name.
    pub(crate) fn user_of(&self, file: &str) -> Option<&str> {
        let of = |own: &Option<String>| own.as_deref() == Some(file);
        let disk = self.disks.values().find(|served| of(&served.ties.in_file));
        let lower = self.graph.lower.iter().find(|(_, lower)| of(&lower.in_file));
        disk.map(Served::node).or(lower.map(|(name, _)| &**name))
    }

    /// A disk that was opened upon this one's image.
    pub(crate) fn user_of_disk(&self, disk: DiskId) -> Option<&str> {
        let user = self.disks.values().find(|served| served.ties.upon == Some(disk));
        user.map(Served::node)
    }

    /// The disks that have this one's image below theirs by its own handle, the nearest first.
    pub(crate) fn lying_upon(&self, disk: DiskId) -> Vec<DiskId> {
        let own = self.disks.get(&disk).and_then(|served| handles(served).into_iter().next());
        let Some(own) = own else { return vec![] };
        let depth = |(id, served): (&DiskId, &Served)| {
            let at = handles(served).iter().position(|it| *it == own)?;
            (*id != disk).then_some((at, *id))
        };
        let mut all: Vec<(usize, DiskId)> = self.disks.iter().filter_map(depth).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, id)| id).collect()
    }

    /// The disks that this one was opened upon, from the nearest on.
    fn all_below(&self, disk: DiskId) -> impl Iterator<Item = DiskId> + '_ {
        let next = |disk: &DiskId| self.disks.get(disk)?.ties.upon;
        std::iter::successors(next(&disk), next)
    }

    /// A disk that this one was opened upon, be it by way of others, where guests may write to that.
    pub(crate) fn written_below(&self, disk: DiskId) -> Option<&str> {
        let written = self.all_below(disk).find(|below| self.is_written(*below))?;
        self.disks.get(&written).map(Served::node)
    }

    /// A disk that was opened upon this one, be it by way of others, and that clients see or a job is at work on.
    pub(crate) fn reader_of(&self, disk: DiskId) -> Option<&str> {
        let reads = |other: DiskId| self.is_shown(other) || self.pending.changing.contains(&other);
        let mut readers = self
            .disks
            .iter()
            .filter(|(id, _)| reads(**id) && self.all_below(**id).any(|below| below == disk));
        readers.next().map(|(_, served)| served.node())
    }

    /// Whether guests may write to a disk, or are about to.
    pub(crate) fn is_written(&self, disk: DiskId) -> bool {
        let coming = self.pending.exports.iter().any(|one| one.disk == disk && one.writable);
        coming || self.exports.iter().any(|export| export.disk == disk && export.writable)
    }

    /// The file of the image that has that name.
    pub(crate) fn path_of(&self, name: &str) -> Option<PathBuf> {
        let disk = self.disks.values().find(|served| served.node() == name);
        let lower = || self.graph.lower.get(name).map(|lower| lower.path.clone());
        disk.map(|served| served.disk.path.clone()).or_else(lower)
    }

    /// The disks whose images this one has below it by their own handles: it was opened upon them.
    fn upon_which(&self, disk: DiskId) -> Vec<DiskId> {
        let own = self.disks.get(&disk).map(handles).unwrap_or_default();
        let below = own.get(1..).unwrap_or_default();
        let is_below =
            |served: &Served| handles(served).first().is_some_and(|it| below.contains(it));
        let others = self.disks.iter().filter(|(id, other)| **id != disk && is_below(other));
        others.map(|(id, _)| *id).collect()
    }

    /// What an image of a disk's was opened upon, where that is another disk's image.
    pub(crate) fn upon_which_image(&self, disk: DiskId, image: &Path) -> Option<Box<dyn Image>> {
        let top = self.disks.get(&disk)?.vbd.image().ok()?;
        let file = Some(identity(image)?);
        let is_it = |one: &&dyn Image| one.place().and_then(|it| identity(&it.at())) == file;
        let all = std::iter::successors(Some(&*top), |image: &&dyn Image| image.below());
        let below = all.into_iter().find(is_it)?.below()?;
        let handle = below.place()?.at().into_owned();
        let has = |served: &Served| handles(served).first() == Some(&handle);
        self.disks.values().any(has).then(|| below.fork())
    }

    /// Each disk that has another's image below its own by that one's handle, and that disk; none where images lie between.
    pub(crate) fn lying(&self) -> BTreeMap<DiskId, Option<DiskId>> {
        let all: Vec<(DiskId, Vec<PathBuf>)> =
            self.disks.iter().map(|(id, served)| (*id, handles(served))).collect();
        let top = |(id, own): &(DiskId, Vec<PathBuf>)| Some((own.first()?.clone(), *id));
        let tops: HashMap<PathBuf, DiskId> = all.iter().filter_map(top).collect();
        let lies = |(id, own): &(DiskId, Vec<PathBuf>)| {
            let mut below = own.iter().skip(1).map(|it| tops.get(it).copied());
            let next = below.next()?;
            (next.is_some() || below.any(|it| it.is_some())).then_some((*id, next))
        };
        all.iter().filter_map(lies).collect()
    }

    /// What a job on a disk that was opened upon others has to know of those, and of all the rest.
    pub(crate) fn beside(&self, disk: DiskId, upon: &[DiskId]) -> Beside {
        let vbd = |id: &DiskId| self.disks.get(id).map(|served| served.vbd.clone());
        let rest = self.disks.iter().filter(|(id, _)| **id != disk && !upon.contains(id));
        let held = rest.flat_map(|(_, served)| handles(served)).collect();
        Beside { upon: upon.iter().filter_map(vbd).collect(), held }
    }

    /// The disk that one lies below by its name, or itself where none lies upon it; none where there are several.
    pub(crate) fn topmost(&self, disk: DiskId) -> Option<DiskId> {
        let mut users = self.disks.iter().filter(|(_, other)| other.ties.upon == Some(disk));
        match (users.next(), users.next()) {
            (None, _) => Some(disk),
            (Some((user, _)), None) => self.topmost(*user),
            (Some(_), Some(_)) => None,
        }
    }

    /// Whether an image of a disk's may be written to while those upon it hide that: the disks that this one was opened upon.
    ///
    /// # Errors
    /// Another disk that reads it, as its own image or below it, and would see that.
    pub(crate) fn may_write_below(
        &self,
        disk: DiskId,
        image: &Path,
    ) -> Result<Vec<DiskId>, String> {
        let (upon, file) = (self.upon_which(disk), identity(image));
        let reads = |served: &Served| file.is_some_and(|file| chain(served).contains(&file));
        let others = self.disks.iter().filter(|(id, other)| **id != disk && reads(other));
        for (id, other) in others {
            let (node, image) = (other.node(), image.display());
            if !upon.contains(id) {
                return Err(format!(
                    "Node '{node}' is busy: it has {image} open, too, and would read what it held before"
                ));
            }
            if self.is_shown(*id) {
                return Err(format!(
                    "Node '{node}' is busy: what its exports show of {image} would change"
                ));
            }
            if !other.vbd.is_read_only() {
                return Err(format!(
                    "Node '{node}' is open for writing, and {image} is to be written to by another: blockdev-reopen it \
                     read-only"
                ));
            }
        }
        Ok(upon)
    }

    /// The disk has been left by the image that it was called by: the image keeps its name.
    pub(crate) fn keep_name(&mut self, name: String, lower: Lower) {
        self.graph.lower.insert(name, lower);
    }

    /// What is known of a disk's topmost image, should it become another's.
    pub(crate) fn as_lower(&self, disk: DiskId) -> Option<(String, Lower)> {
        let served = self.disks.get(&disk)?;
        let lower = Lower {
            path: served.disk.path.clone(),
            file: served.file,
            format: served.vbd.image().map_or("", |image| image.info().format).to_owned(),
            size: served.vbd.size(),
            in_file: served.ties.in_file.clone(),
        };
        Some((served.node().to_owned(), lower))
    }

    /// The disk goes on in another image: where that has a name, by this, and `former` keeps the disk's.
    pub(crate) fn take_name(&mut self, disk: DiskId, former: Option<(String, Lower)>) {
        let Some(file) = self.disks.get(&disk).and_then(|served| served.file) else { return };
        let lower = self.graph.lower.iter().find(|(_, lower)| lower.file == Some(file));
        let other = self.disks.iter().find(|(id, other)| **id != disk && other.file == Some(file));
        let found = match (lower, other) {
            (Some((name, lower)), _) => Some((name.clone(), lower.in_file.clone(), None)),
            (None, Some((id, other))) => {
                Some((other.node().to_owned(), other.ties.in_file.clone(), Some(*id)))
            }
            (None, None) => None,
        };
        let Some((name, in_file, other)) = found else { return };
        self.graph.lower.remove(&name);
        drop(other.and_then(|id| self.take_back(id)));
        let upon = self.lying().remove(&disk).flatten();
        let Some(served) = self.disks.get_mut(&disk) else { return };
        served.disk.node_name = Some(name);
        served.ties.in_file = in_file;
        served.ties.upon = upon;
        if let Some((name, lower)) = former {
            self.keep_name(name, lower);
        }
    }

    /// Less lies below a disk than did.
    pub(crate) fn retie(&mut self, disk: DiskId) {
        if let Some(served) = self.disks.get_mut(&disk) {
            recount_layers(served);
        }
        let Some(served) = self.disks.get(&disk).filter(|served| served.ties.upon.is_some()) else {
            return;
        };
        let below = chain(served).get(1).copied();
        let is_it = |(id, other): &(&DiskId, &Served)| **id != disk && other.file == below;
        let upon = below.and_then(|_| self.disks.iter().find(is_it)).map(|(id, _)| *id);
        if let Some(served) = self.disks.get_mut(&disk) {
            served.ties.upon = upon;
        }
    }

    /// A disk is gone, and with it the name of its file where that was named with it.
    pub(crate) fn forget_file(&mut self, name: Option<&str>) {
        let Some(name) = name else { return };
        if self.graph.files.get(name).is_some_and(|file| file.implicit) {
            self.graph.files.remove(name);
        }
    }
}
