//! Memory for bits that outlives the process: files on tmpfs beside the restart logs.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringtap_io::{SharedWords, Words};

use crate::RestartLog;
use crate::restart::{make_folder, open_ours};

/// How the names of the files end.
const ENDING: &str = "bits";

/// Memory that a killed server leaves to the next one of the same image.
pub trait BitMemory: Send + Sync {
    /// The memory of a number: `count` words, of which those are as they were that were there; or as many as there are, an
    /// error where there are none.
    fn words(&self, number: u64, count: Option<usize>) -> io::Result<Words>;

    /// Give back that of a number. What is in use stays there for its user.
    fn forget(&self, number: u64);

    /// It is found by another name from now on, that of the sidecar.
    fn moved(&self, _name: &str) {}

    /// Give back all but that of these numbers.
    fn forget_but(&self, numbers: &[u64]);
}

/// Memory in the folder of restart logs.
#[derive(Debug)]
pub struct FolderMemory {
    folder: PathBuf,
    /// How the names begin of the files of this image.
    name: Mutex<String>,
}

impl FolderMemory {
    /// That of the sidecar of a name.
    pub fn of(name: &str) -> FolderMemory {
        FolderMemory { folder: RestartLog::usual_folder(), name: Mutex::new(format!("{name}-")) }
    }
}

impl FolderMemory {
    /// While it is held, the files keep their names.
    fn name(&self) -> MutexGuard<'_, String> {
        self.name.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, name: &str, number: u64) -> PathBuf {
        self.folder.join(format!("{name}{number:016x}.{ENDING}"))
    }

    /// The files whose names begin like that, and what follows.
    fn files(&self, name: &str) -> Vec<(PathBuf, String)> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let ours = entries.filter_map(|entry| {
            let of = entry.file_name();
            let rest = of.to_str()?.strip_prefix(name)?.to_owned();
            rest.ends_with(ENDING).then(|| (entry.path(), rest))
        });
        ours.collect()
    }
}

impl BitMemory for FolderMemory {
    fn words(&self, number: u64, count: Option<usize>) -> io::Result<Words> {
        make_folder(&self.folder)?;
        let name = self.name();
        let path = self.path(&name, number);
        let file = open_ours(&self.folder, &path, count.is_some())?;
        let there = usize::try_from(file.metadata()?.len() / 8).unwrap_or(0);
        Ok(Arc::new(SharedWords::map(&file, count.unwrap_or(there))?))
    }

    fn forget(&self, number: u64) {
        let name = self.name();
        let _ = fs::remove_file(self.path(&name, number));
    }

    fn forget_but(&self, numbers: &[u64]) {
        let name = self.name();
        let kept: HashSet<PathBuf> =
            numbers.iter().map(|number| self.path(&name, *number)).collect();
        for (path, _) in self.files(&name) {
            if !kept.contains(&path) {
                let _ = fs::remove_file(path);
            }
        }
    }

    fn moved(&self, name: &str) {
        let mut known = self.name();
        let begin = format!("{name}-");
        for (path, rest) in self.files(&known) {
            let _ = fs::rename(path, self.folder.join(format!("{begin}{rest}")));
        }
        *known = begin;
    }
}
