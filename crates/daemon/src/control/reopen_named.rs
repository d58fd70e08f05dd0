//! `blockdev-reopen` of names that are no disks': of files that images lie in, and of images that lie below a disk.
//!
//! An image below is written to by the jobs that do so alone, which open it for that; what is said of writing and caching
//! changes nothing there.

use super::nodes::{Add, Discard, Driver, FileDriver, FileRef, PlainOptions, cache_of};
use super::opening::DEVICE;
use super::query::driver;
use super::refs::{Backing, NodeOr};
use super::refusal::Refusal;
use super::shape::Done;
use crate::graph::{FileNode, Lower};
use crate::identity::identity;
use crate::layers::chain;
use crate::running::Running;

fn cannot_change(option: &str) -> Refusal {
    Refusal::new(format!("Cannot change the option '{option}'"))
}

impl Add {
    /// The file that an image of it lies in.
    pub(super) fn file(&self) -> Option<&NodeOr<FileRef>> {
        match &self.of {
            Driver::Raw(PlainOptions { file, .. })
            | Driver::Vpc(PlainOptions { file, .. })
            | Driver::Vhdx(PlainOptions { file, .. })
            | Driver::Vmdk(PlainOptions { file, .. }) => Some(file),
            Driver::Qcow2(of) => Some(&of.file),
            Driver::Luks(of) => Some(&of.file),
            Driver::Throttle(of) => of.file.file(),
            _ => None,
        }
    }
}

/// An error where it is not that image.
fn fits(lower: &Lower, options: &Add) -> Result<(), Refusal> {
    let format = match &options.of {
        Driver::Raw(_) => "raw",
        Driver::Vpc(_) => "vpc",
        Driver::Vhdx(_) => "vhdx",
        Driver::Vmdk(_) => "vmdk",
        Driver::Qcow2(_) => "qcow2",
        Driver::Luks(_) => "luks",
        _ => return Err(cannot_change("driver")),
    };
    let Some(file) = options.file() else { return Err(cannot_change("driver")) };
    if format != driver(&lower.format) {
        return Err(cannot_change("driver"));
    }
    let same = match file {
        NodeOr::Node(name) => lower.in_file.as_ref() == Some(name),
        NodeOr::Of(FileRef { of: FileDriver::File(of) | FileDriver::Device(of), .. }) => {
            lower.path.as_os_str() == &*of.filename
        }
        NodeOr::Of(_) => false,
    };
    if same { Ok(()) } else { Err(cannot_change("file")) }
}

/// What a file is to be from now on.
fn changed(file: &FileNode, options: &Add) -> Result<FileNode, Refusal> {
    let (driver, of) = match &options.of {
        Driver::File(of) => ("file", of),
        Driver::Device(of) => (DEVICE, of),
        _ => return Err(cannot_change("driver")),
    };
    if driver != file.driver {
        return Err(cannot_change("driver"));
    }
    if file.path.as_os_str() != &*of.filename {
        return Err(cannot_change("filename"));
    }
    Ok(FileNode {
        read_only: options.read_only.unwrap_or(false),
        cache: cache_of(options.cache.as_ref())?,
        keeps_space: options.discard == Some(Discard::Ignore),
        ..file.clone()
    })
}

impl Running {
    /// An error where something else is to lie below an image than what does.
    fn lies_so(
        &self,
        name: &str,
        lower: &Lower,
        said: Option<Backing<Add>>,
    ) -> Result<(), Refusal> {
        let all = self.upon(lower).map(chain).unwrap_or_default();
        let at = all.iter().position(|file| Some(*file) == lower.file);
        let below = at.and_then(|at| all.get(at + 1));
        let same = match said {
            None => true,
            Some(Backing::Nothing) => below.is_none(),
            Some(Backing::Of(_)) => return Err(cannot_change("backing.driver")),
            Some(Backing::Node(wanted)) => {
                let file = identity(&self.path_of_node(&wanted)?);
                let above = all.get(..at.map_or(0, |at| at + 1)).unwrap_or_default();
                if wanted == name || file.is_some_and(|file| above.contains(&file)) {
                    return Err(Refusal::new(format!(
                        "Making '{wanted}' a backing child of '{name}' would create a cycle"
                    )));
                }
                file.is_some() && below == file.as_ref()
            }
        };
        if same { Ok(()) } else { Err(cannot_change("backing")) }
    }

    /// Take what is said of a name that is no disk's.
    pub(super) fn reopen_named(
        &mut self,
        name: &str,
        options: &Add,
        backing: Option<Backing<Add>>,
    ) -> Result<Done, Refusal> {
        if let Some(lower) = self.graph.lower.get(name) {
            fits(lower, options)?;
            return self.lies_so(name, lower, backing).map(|()| Done {});
        }
        let Some(file) = self.graph.files.get(name) else {
            return Err(Refusal::new(format!(
                "Node '{name}' keeps a moment: it stays as it is, take it away and add it anew"
            )));
        };
        let changed = changed(file, options)?;
        let user = self.disks.values().find(|one| one.ties.in_file.as_deref() == Some(name));
        if let Some(user) = user.filter(|one| changed.read_only && !one.disk.options.read_only) {
            return Err(Refusal::new(format!(
                "Read-only block node '{name}' cannot support read-write users: '{}' lies in it",
                user.node()
            )));
        }
        self.graph.files.insert(name.to_owned(), changed);
        Ok(Done {})
    }
}
