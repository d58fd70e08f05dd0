//! Images that two files of a folder that is kept lead to, where a server was killed as a disk went on in the other's image.
//!
//! That the disk goes on there is stable before the files say so: the one of the job's target still describes it as a disk. Had
//! the server lived, that file would be gone by now.

use std::path::{Path, PathBuf};

use ringtap_image::OpenOptions;

use crate::identity::identity;
use crate::written::write;
use crate::{Disk, Error, described};

/// A disk where it goes on.
pub(crate) struct Followed {
    pub(crate) disk: Disk,
    /// What its threads are called.
    pub(crate) label: String,
    /// What it was named by.
    pub(crate) named: PathBuf,
    /// Why that cannot be told.
    pub(crate) end: Result<(), Error>,
}

impl Followed {
    fn has_moved(&self) -> bool {
        self.end.is_ok() && self.disk.path != self.named
    }

    /// Whether it is written down, and nothing but its image.
    fn is_bare(&self) -> bool {
        let Disk { keeping, nbd, vhost_user, fuse, ublk, .. } = &self.disk;
        let is_shown = !(nbd.is_empty() && vhost_user.is_empty() && fuse.is_empty());
        let is_free = keeping.exports.is_empty() && !is_shown && ublk.is_none();
        self.end.is_ok() && !self.has_moved() && keeping.file.is_some() && is_free
    }

    fn is_in(&self, other: &Disk) -> bool {
        let (own, others) = (&self.disk.path, &other.path);
        own == others || identity(own).is_some_and(|own| identity(others) == Some(own))
    }
}

/// What a disk has gone on in is that disk's alone: one that is nothing but this image, as the folder of disks describes it, is
/// no disk any more.
pub(crate) fn one_each(mut all: Vec<Followed>, folder: Option<&Path>) -> Vec<Followed> {
    let Some(folder) = folder else { return all };
    for number in (0..all.len()).rev() {
        if !all[number].is_bare() {
            continue;
        }
        let target = &all[number].disk;
        let found = all.iter().position(|one| one.has_moved() && one.is_in(target));
        let Some(mut goes_on) = found else { continue };
        let target = all.remove(number).disk;
        if number < goes_on {
            goes_on -= 1;
        }
        take_over(&mut all[goes_on].disk, &target, folder);
    }
    all
}

/// Describe a disk as it would be had the server lived: the image is opened as the target was.
fn take_over(disk: &mut Disk, target: &Disk, folder: &Path) {
    disk.options = OpenOptions { layers: disk.options.layers, ..target.options.clone() };
    disk.options.force_format = false;
    disk.keeping.secret.clone_from(&target.keeping.secret);
    let [own, removed] = [&disk.keeping.file, &target.keeping.file].map(Clone::clone);
    let name = target.node_name.as_deref().unwrap_or_default();
    let (path, gone) = (disk.path.display(), removed.as_deref().unwrap_or(folder).display());
    let text = own.map(|own| Ok((own, described::whole_file(disk)?))).transpose();
    let end = text.and_then(|written| {
        let end = write(folder, removed.as_slice(), written.as_slice());
        end.map_err(|error| error.to_string())
    });
    match end {
        Ok(()) => tracing::warn!(
            "a server before this one was killed as a disk went on in {path}, which was the disk {name}: {gone} is removed"
        ),
        Err(why) => tracing::error!(
            "a server before this one was killed as a disk went on in {path}, which is the disk {name} no more; cannot write \
             that down: {why}. Remove {gone}"
        ),
    }
}
