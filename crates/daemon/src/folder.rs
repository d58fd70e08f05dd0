//! A folder of files, each of which describes a disk, and what was found in it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{Allotment, Disk, Error};

/// What a file describes.
#[derive(Debug, Default)]
pub struct Described {
    /// The disk.
    pub disk: Option<Disk>,
    /// Groups of disks, by name, and their limits.
    pub groups: Vec<(String, Allotment)>,
}

/// Reads a file; what is wrong is told with the file and the line.
pub type ReadFile = Arc<dyn Fn(&Path) -> Result<Described, String> + Send + Sync>;

/// A folder of files that end in `.toml`.
#[derive(Clone)]
pub struct Folder {
    /// Where it is; one that is not there is empty.
    pub path: PathBuf,
    /// Whether what changes while disks are served is written there.
    pub keep: bool,
    /// What reads one.
    pub read: ReadFile,
}

impl fmt::Debug for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Folder").field("path", &self.path).field("keep", &self.keep).finish()
    }
}

/// What was found in the folder, beside its disks.
#[derive(Default)]
pub(crate) struct Looked {
    /// Which file describes a group.
    pub(crate) groups: BTreeMap<String, PathBuf>,
    /// Files that describe nothing that can be served, and why.
    pub(crate) wrong: BTreeMap<PathBuf, String>,
}

impl Looked {
    /// A file cannot be used: where nothing may be left out that is an error.
    pub(crate) fn refuse(&mut self, strict: bool, file: &Path, what: String) -> Result<(), Error> {
        if strict {
            return Err(Error::File(what));
        }
        tracing::error!("not served: {what}");
        self.wrong.insert(file.to_owned(), what);
        Ok(())
    }

    /// An error where a file was no use when it was looked at last.
    pub(crate) fn outcome(&self) -> Result<(), Error> {
        self.wrong.values().next().map_or(Ok(()), |what| Err(Error::File(what.clone())))
    }
}
