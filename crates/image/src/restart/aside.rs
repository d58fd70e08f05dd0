//! A log that makes way: its image's file is gone, and another has its inode number, and so the log's name. The image may have
//! been moved, and asks for its changes later.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::standing::Facts;
use super::{BORN, COUNT, FIRST, MAGIC, MEMORY, NAME, NUMBER, TURN, files};
use crate::{Container, reap};

/// How the log is called that lies in the way.
pub(super) fn name_of(file: (u64, u64), number: u64) -> String {
    let name = files::name_at(file);
    let stem = name.strip_suffix(".restart").unwrap_or(&name);
    format!("{stem}-{number:x}.restart")
}

/// Have the log at `path`, the name for the log of the image in this container, make way where it holds changes of another.
pub(super) fn make_way(folder: &Path, path: &Path, container: &Container) {
    let Some(aside) = wanted(folder, path, container) else { return };
    let memory = |path: &Path| path.with_extension(MEMORY);
    let end = fs::rename(path, &aside);
    let _ = fs::rename(memory(path), memory(&aside));
    match end {
        Ok(()) => tracing::debug!("{} has made way as {}", path.display(), aside.display()),
        Err(error) => tracing::warn!("{} cannot make way: {error}", path.display()),
    }
}

fn wanted(folder: &Path, path: &Path, container: &Container) -> Option<PathBuf> {
    let log = super::open_ours(folder, path, false).ok()?;
    let mut bytes = [0; 8 * FIRST];
    log.read_exact_at(&mut bytes, 0).ok()?;
    let word = |at: usize| u64::from_ne_bytes(crate::bytes::get(&bytes, 8 * at));
    let holds = [0, 1].iter().any(|half| word(TURN[*half]) > 0 && word(COUNT[*half]) > 0);
    if word(0) != MAGIC || word(NUMBER) == 0 || !holds {
        return None;
    }
    let own = reap::name_of(container.open_file()?);
    let known = own[0] != 0 && word(NAME) != 0;
    let renamed = known && (NAME..).zip(own).any(|(at, own)| word(at) != own);
    let born = Facts::of(container).born;
    let reborn = born != 0 && word(BORN) != 0 && born != word(BORN);
    if !renamed && !reborn || flock(&log, FlockOperation::NonBlockingLockExclusive).is_err() {
        return None;
    }
    Some(folder.join(name_of((word(3), word(4)), word(NUMBER))))
}
