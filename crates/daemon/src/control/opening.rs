//! Images and files that are opened as a client wants them.

use std::fs;
use std::path::{Path, PathBuf};

use ringtap_image::qcow2::Crypt;
use ringtap_image::{CacheMode, Format, Image, Place, record};
use ringtap_vbd::Vbd;

use super::outgoing::Reply;
use super::refs::Backing;
use super::refusal::Refusal;
use super::shape::Done;
use super::withdraw::withdraw;
use crate::Disk;
use crate::being_opened::BeingOpened;
use crate::graph::{FileNode, Ties};
use crate::identity::{Identity, identity};
use crate::ids::DiskId;
use crate::ledger::{self, Line};
use crate::opened::{At, Wrap, device_at, record_formats};
use crate::running::{Running, Then};
use crate::snapshot::header;

/// The driver of a device of this host.
pub(super) const DEVICE: &str = "host_device";

/// A disk that is to be.
pub(super) struct Wish {
    pub(super) disk: Disk,
    pub(super) ties: Ties,
    /// Its file, where that is held already.
    pub(super) place: Option<Place>,
    /// What its file is, where it is named with it.
    pub(super) named_with_it: Option<&'static str>,
    /// Whether its file is said to be a device.
    pub(super) is_device: bool,
    /// The image that its own is opened upon.
    upon: Option<Box<dyn Image>>,
}

/// A file that is to have a name.
pub(super) struct FileWish {
    pub(super) path: PathBuf,
    pub(super) read_only: bool,
    pub(super) cache: Option<CacheMode>,
    pub(super) keeps_space: bool,
    pub(super) driver: &'static str,
}

/// An error where what is said to be a device is a file.
fn is_no_file(path: &Path) -> Result<(), Refusal> {
    match fs::metadata(path) {
        Ok(facts) if facts.is_file() => Err(Refusal::new(format!(
            "'host_device' driver requires '{}' to be either a character or block device",
            path.display()
        ))),
        // What else is wrong is found where it is opened.
        _ => Ok(()),
    }
}

/// An error where a secret is said, and there is nothing that it opens: who said it would have the data lie there in the clear.
fn is_for_a_secret(disk: &Disk, place: Option<&Place>) -> Result<(), Refusal> {
    if disk.options.format != Some(Format::Qcow2) || disk.options.secret.is_none() {
        return Ok(());
    }
    let held = place.map(Place::at);
    let header = header(held.as_deref().unwrap_or(&disk.path))?;
    let alone = header.backing_file.is_none() || disk.options.layers == Some(1);
    match header.crypt == Crypt::None && alone {
        true => Err(Refusal::new(format!(
            "No encryption in image header of {}, but options specified format 'luks'",
            disk.path.display()
        ))),
        false => Ok(()),
    }
}

/// A disk that was opened, and which file it is.
pub(super) type Found = (Vbd, Option<Identity>);

impl Wish {
    pub(super) fn of(disk: Disk) -> Box<Wish> {
        let (ties, place, named_with_it, is_device, upon) = Default::default();
        Box::new(Wish { disk, ties, place, named_with_it, is_device, upon })
    }

    /// What is to lie below it.
    pub(super) fn lies_upon<D>(
        &mut self,
        backing: Option<Backing<D>>,
        running: &Running,
    ) -> Result<(), Refusal> {
        let name = match backing {
            None => return Ok(()),
            Some(Backing::Nothing) => {
                self.disk.options.layers = Some(1);
                self.ties.alone = true;
                return Ok(());
            }
            Some(Backing::Of(_)) => {
                return Err(Refusal::new(
                    "'backing' is described by blockdev-add alone: say the name of the node that lies below",
                ));
            }
            Some(Backing::Node(name)) => name,
        };
        let id = running.named_node(&name)?;
        let Some(served) = running.disks.get(&id) else {
            return Err(Refusal::new("the disk is gone"));
        };
        if running.pending.is_changing(id) {
            return Err(Refusal::new(format!("Node '{name}' is being changed")));
        }
        if !self.disk.options.read_only && record::is_unsealed(&served.disk.path) {
            return Err(Refusal::new(format!(
                "a killed server may not have made '{name}' stable: add the image above without 'backing'"
            )));
        }
        let image = served.vbd.image();
        self.upon = Some(image.map_err(|error| Refusal::new(format!("Node '{name}': {error}")))?);
        self.ties.upon = Some(id);
        Ok(())
    }

    /// Open an image that nobody has in this process: its lock would name this very process.
    pub(super) fn open(
        &mut self,
        wrap: &Wrap,
        images: &[(Identity, bool, String)],
    ) -> Result<Found, Refusal> {
        let disk = &self.disk;
        let _now = BeingOpened::begin(&disk.path);
        if self.is_device {
            is_no_file(&disk.path)?;
        }
        let file = identity(&disk.path);
        let clash = images
            .iter()
            .find(|(other, reads, _)| file == Some(*other) && !(*reads && disk.options.read_only));
        if let Some((_, _, node)) = clash {
            return Err(Refusal::new(format!(
                "{} is the image of the node '{node}' already: export that once more, or open both read-only",
                disk.path.display()
            )));
        }
        if self.place.is_none() && self.named_with_it.is_some() {
            self.place = Place::hold(&disk.path).ok();
        }
        is_for_a_secret(disk, self.place.as_ref())?;
        let at = At { place: self.place.clone(), upon: self.upon.take() };
        let label = disk.node_name.as_deref().unwrap_or_default();
        let (vbd, named) = device_at(disk, label, wrap, at)?;
        record_formats(named.as_slice());
        Ok((vbd, file))
    }
}

impl Running {
    /// A disk has been opened.
    pub(super) fn has_come(
        &mut self,
        wish: Wish,
        vbd: Vbd,
        file: Option<Identity>,
    ) -> Result<(), Refusal> {
        let Wish { disk, ties, place, named_with_it, .. } = wish;
        let name = disk.node_name.clone().unwrap_or_default();
        let (path, read_only) = (disk.path.clone(), disk.options.read_only);
        let (keeps_space, cache) = (disk.keeps_space, Some(disk.options.cache));
        let id = self.add_known(disk, vbd, file)?;
        if let (Some(driver), Some(place), Some(name)) = (named_with_it, place, &ties.in_file) {
            let node =
                FileNode { path, place, read_only, cache, keeps_space, driver, implicit: true };
            self.graph.files.insert(name.clone(), node);
        }
        forget_jobs(self, id);
        if let Some(served) = self.disks.get_mut(&id) {
            served.ties = ties;
            tracing::info!("the disk {name} has come: {}", served.facts.line());
        }
        Ok(())
    }

    /// Open it; `then` is done once it is there, or it is known why it will not be.
    pub(super) fn open_wish(
        &mut self,
        mut wish: Box<Wish>,
        then: impl FnOnce(&mut Running, Result<(), Refusal>) + Send + 'static,
    ) {
        let (wrap, images) = (self.wrap.clone(), self.images());
        let file = wish.named_with_it.and(wish.ties.in_file.clone());
        let names: Vec<String> = wish.disk.node_name.clone().into_iter().chain(file).collect();
        let (taken, group) = (names.clone(), wish.disk.group.clone());
        self.pending.nodes.extend(names.clone());
        self.pending.groups.extend(group.clone());
        let begun = self.in_time("open", move || -> Then {
            let opened = wish.open(&wrap, &images);
            Box::new(move |running| {
                names.iter().for_each(|name| _ = running.pending.nodes.remove(name));
                wish.disk.group.iter().for_each(|group| running.pending.lets_go_of(group));
                let end = opened.and_then(|(vbd, file)| running.has_come(*wish, vbd, file));
                then(running, end);
            })
        });
        if let Err(error) = begun {
            taken.iter().for_each(|name| _ = self.pending.nodes.remove(name));
            group.iter().for_each(|group| self.pending.lets_go_of(group));
            tracing::error!("cannot open an image: {error}");
        }
    }

    pub(super) fn open_file(&mut self, name: String, wish: FileWish, reply: Reply<Done>) {
        let taken = name.clone();
        self.pending.nodes.insert(name.clone());
        let begun = self.in_time("open", move || -> Then {
            let _now = BeingOpened::begin(&wish.path);
            let fits = if wish.driver == DEVICE { is_no_file(&wish.path) } else { Ok(()) };
            let held = Place::hold(&wish.path);
            Box::new(move |running| {
                running.pending.nodes.remove(&name);
                let FileWish { path, read_only, cache, keeps_space, driver } = wish;
                let failed = |error| {
                    let path = path.display();
                    Refusal::new(format!("Could not open '{path}': {error}"))
                };
                reply.give(fits.and(held.map_err(failed)).map(|place| {
                    let path = path.clone();
                    let node = FileNode {
                        path,
                        place,
                        read_only,
                        cache,
                        keeps_space,
                        driver,
                        implicit: false,
                    };
                    running.graph.files.insert(name, node);
                    Done {}
                }));
            })
        });
        if let Err(error) = begun {
            self.pending.nodes.remove(&taken);
            tracing::error!("cannot open {taken}: {error}");
        }
    }
}

/// A disk that a client has had opened: whatever job it had before is not gone on with, now or later.
fn forget_jobs(running: &Running, id: DiskId) {
    let Some(served) = running.disks.get(&id) else { return };
    let _disk = served.vbd.span().enter();
    let of = (served.disk.clone(), served.vbd.clone());
    for (line, _written) in ledger::left(&[ledger::whole(&served.disk.path)]) {
        let Line { id, command, arguments, .. } = line;
        let more = withdraw(&of, ledger::checkpoint(&command, &arguments));
        tracing::warn!(
            "the job {id} ({command}) ended with a server before this one: begin it again{more}"
        );
    }
}
