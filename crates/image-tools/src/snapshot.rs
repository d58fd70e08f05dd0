//! The snapshots inside an image.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use ringtap_image::qcow2::{self, Snapshot};
use ringtap_image::{Container, Format, on_a_ring};

use crate::opening::{self, cannot};
use crate::{Error, Writing, rbd};

/// What is done with them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// One of this name is taken.
    Create(String),
    /// The disk is as it was at one, by its name or id; what it holds now is lost.
    Apply(String),
    /// One is deleted, by its name or id.
    Delete(String),
}

/// The image.
#[derive(Clone, Debug)]
pub struct Of<'a> {
    /// Its path; an image of Ceph, whose snapshots the cluster keeps, may be in use.
    pub path: &'a Path,
    /// The format, if that is named.
    pub format: Option<Format>,
}

impl Of<'_> {
    fn name_in_ceph(&self) -> Option<&str> {
        rbd::name(self.path).filter(|_| self.format != Some(Format::Qcow2))
    }
}

/// The snapshots of an image, the oldest first; none where its format has none. With `share` it may be in use.
///
/// # Errors
///
/// The image cannot be opened, or they cannot be read.
pub fn list(of: &Of<'_>, share: bool) -> Result<Vec<Snapshot>, Error> {
    if let Some(name) = of.name_in_ceph() {
        let list = rbd::snapshots::list(name).map_err(|why| refused(name, why))?;
        return Ok(list.into_iter().map(of_ceph).collect());
    }
    if opening::format(of.path, of.format, false)? != Format::Qcow2 {
        return Ok(vec![]);
    }
    let container = opening::container(of.path, share)?;
    Ok(on_a_ring(of.path, |io| async move { qcow2::list_snapshots(&io, &container).await })??)
}

/// Take, apply or delete one. `data_files` is what the image may name for its data.
///
/// # Errors
///
/// Its format has none, there is none of that name, or one too many; it cannot be read or written.
pub fn change(
    of: &Of<'_>,
    change: Change,
    force_format: bool,
    data_files: &[PathBuf],
) -> Result<(), Error> {
    if let Some(name) = of.name_in_ceph() {
        return match &change {
            Change::Create(snapshot) => rbd::snapshots::create(name, snapshot),
            Change::Apply(snapshot) => rbd::snapshots::apply(name, snapshot),
            Change::Delete(snapshot) => rbd::snapshots::delete(name, snapshot),
        }
        .map_err(|why| refused(name, why));
    }
    match opening::format(of.path, of.format, true)? {
        Format::Qcow2 => {}
        other => return Err(cannot(of.path, other, "have no snapshots")),
    }
    let writing = Writing::new(Format::Qcow2, force_format, data_files);
    let container = writing.settled(of.path)?;
    let changed = container.clone();
    on_a_ring(of.path, |io| async move { apply(&io, &container, change).await })??;
    changed.confirm_format(Format::Qcow2);
    Ok(())
}

async fn apply(
    io: &ringtap_io::Io,
    container: &Container,
    change: Change,
) -> Result<(), qcow2::ToolError> {
    match change {
        Change::Create(name) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let taken = (now.as_secs() as u32, now.subsec_nanos());
            qcow2::create_snapshot(io, container, &name, taken).await.map(drop)
        }
        Change::Apply(name) => qcow2::apply_snapshot(io, container, &name).await.map(drop),
        Change::Delete(name) => qcow2::delete_snapshot(io, container, &name).await.map(drop),
    }
}

fn refused(name: &str, why: String) -> Error {
    Error::Refused(format!("{name}: {why}"))
}

fn of_ceph(it: rbd::snapshots::Snapshot) -> Snapshot {
    Snapshot {
        id: it.id.to_string(),
        name: it.name,
        taken: (it.taken as u32, 0),
        disk_size: Some(it.size),
        ..Snapshot::default()
    }
}
