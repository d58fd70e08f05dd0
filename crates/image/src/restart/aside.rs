//! A log that makes way: its image's file is gone, and another has its inode number, and so the log's name. The image may have
//! been moved, and asks for its changes later.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::{BORN, COUNT, FIRST, MAGIC, MEMORY, NAME, NUMBER, TURN, files, give_back};
use crate::{Container, file_name};

/// How the log is called that lies in the way.
pub(super) fn name_of(file: (u64, u64), number: u64) -> String {
    let name = files::name_at(file);
    let stem = name.strip_suffix(".restart").unwrap_or(&name);
    format!("{stem}-{number:x}.restart")
}

/// Have the log at `path`, the name for the log of the image in this container, make way where it holds changes of another. False
/// where it stays: some process has it, or it cannot be renamed.
pub(super) fn make_way(folder: &Path, path: &Path, container: &Container) -> bool {
    let Ok(log) = super::open_ours(folder, path, false) else { return true };
    if beginning_of_another(&log, container).is_none() {
        return true;
    }
    if !files::hold(&log, || false) {
        tracing::warn!("{} cannot make way: some process has it open", path.display());
        return false;
    }
    // Who had it may have changed it, or renamed it.
    let is_there = log.metadata().ok().zip(fs::symlink_metadata(path).ok());
    let is_there = is_there.is_some_and(|(log, there)| log.ino() == there.ino());
    let Some(words) = beginning_of_another(&log, container).filter(|_| is_there) else {
        return true;
    };
    let aside: PathBuf = folder.join(name_of((words[3], words[4]), words[NUMBER]));
    let memory = |path: &Path| path.with_extension(MEMORY);
    if let Err(error) = fs::rename(path, &aside) {
        tracing::warn!("{} cannot make way: {error}", path.display());
        return false;
    }
    let _ = fs::rename(memory(path), memory(&aside));
    give_back(&log, &aside, &words);
    true
}

/// With what it begins, where it holds changes of another image than this.
fn beginning_of_another(log: &fs::File, container: &Container) -> Option<[u64; FIRST]> {
    let mut bytes = [0; 8 * FIRST];
    log.read_exact_at(&mut bytes, 0).ok()?;
    let word = |at: usize| u64::from_ne_bytes(crate::bytes::get(&bytes, 8 * at));
    let holds = [0, 1].iter().any(|half| word(TURN[*half]) > 0 && word(COUNT[*half]) > 0);
    if word(0) != MAGIC || word(NUMBER) == 0 || !holds {
        return None;
    }
    let own = file_name::name_of(container.open_file()?);
    let known = own[0] != 0 && word(NAME) != 0;
    let renamed = known && (NAME..).zip(own).any(|(at, own)| word(at) != own);
    let born = container.file_facts().born;
    let reborn = born != 0 && word(BORN) != 0 && born != word(BORN);
    (renamed || reborn).then(|| std::array::from_fn(word))
}
