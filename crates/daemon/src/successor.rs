//! Disks that go on in another image than the one they are named by.

use std::path::{Path, PathBuf};

use ringtap_image::{OpenError, Place, record};

use crate::{Disk, Error};

/// The most images after one another.
const MOST: usize = 200;

/// Find where a disk goes on that was given by the name of an image it has left.
pub(crate) fn follow(disk: &mut Disk) -> Result<(), Error> {
    if disk.options.read_only {
        return Ok(());
    }
    let first = disk.clone();
    let mut seen: Vec<PathBuf> = vec![];
    for _ in 0..MOST {
        let Ok(place) = Place::hold(&disk.path) else { break };
        let whole = std::fs::canonicalize(place.at()).unwrap_or_else(|_| disk.path.clone());
        if let Some(at) = seen.iter().position(|one| *one == whole) {
            disk.path = settle(&seen[at..])?;
            break;
        }
        let Some(successor) = record::find_successor(&place)? else { break };
        seen.push(whole);
        disk.path = successor.path().to_owned();
        disk.options.format = None;
        disk.options.force_format = false;
    }
    let whole = std::fs::canonicalize(&first.path);
    if whole.is_ok_and(|whole| whole == disk.path) {
        *disk = first.clone();
    }
    if disk.path != first.path {
        tracing::info!(
            "the disk of {} goes on in {}: that is served",
            first.path.display(),
            disk.path.display()
        );
    }
    Ok(())
}

/// Images that lead to one another: a job was killed as it wrote down that the disk goes on in the one that what was written
/// last leads to, and before it wrote that the disk goes on from there no more. All of them are the same disk.
fn settle(around: &[PathBuf]) -> Result<PathBuf, Error> {
    let turns = around.iter().map(|image| record::turn(image));
    let last = turns.enumerate().max_by_key(|(_, turn)| *turn).map_or(0, |(at, _)| at);
    let image = &around[(last + 1) % around.len()];
    record::forget_successor(image).map_err(|source| OpenError::Os {
        what: "write down that the disk goes on in",
        path: image.clone(),
        source,
    })?;
    Ok(image.clone())
}

/// What a killed server has begun and not written down as a whole is taken back. Nobody else has the image.
pub(crate) fn take_back(image: &Path) {
    match record::take_back_unfinished(image) {
        Ok(false) => {}
        Ok(true) => tracing::info!(
            "a snapshot of several disks ended with the server before this one: {} is served as it was before",
            image.display()
        ),
        Err(error) => tracing::warn!(
            "cannot take back what a killed server wrote down of {}: {error}",
            image.display()
        ),
    }
}
