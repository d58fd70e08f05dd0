//! Reading an image as it was when an internal snapshot of it was taken.

use std::convert::Infallible;
use std::str::FromStr;

use ringtap_io::Io;

use super::snapshot::list_snapshots;
use super::{Header, Snapshot, ToolError};
use crate::{Container, OpenError};

/// Which snapshot, as `qemu-img convert -l` has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotName {
    /// That of this ID or, where none has it, of this name.
    Either(String),
    /// That of which both are right, as far as they are given.
    Exact {
        /// Its ID.
        id: Option<String>,
        /// Its name.
        name: Option<String>,
    },
}

impl FromStr for SnapshotName {
    type Err = Infallible;

    /// `snapshot.id=ID,snapshot.name=NAME`, one of the two, or a name or ID by itself.
    fn from_str(text: &str) -> Result<SnapshotName, Infallible> {
        let (mut id, mut name) = (None, None);
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("snapshot.id", value)) => id = Some(value.to_owned()),
                Some(("snapshot.name", value)) => name = Some(value.to_owned()),
                _ => return Ok(SnapshotName::Either(text.to_owned())),
            }
        }
        Ok(SnapshotName::Exact { id, name })
    }
}

impl std::fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SnapshotName::Either(text) => write!(f, "{text:?}"),
            SnapshotName::Exact { id: Some(id), name: None } => write!(f, "of ID {id:?}"),
            SnapshotName::Exact { id: None, name } => write!(f, "{:?}", name.as_deref()),
            SnapshotName::Exact { id: Some(id), name: Some(name) } => {
                write!(f, "{name:?} of ID {id:?}")
            }
        }
    }
}

impl SnapshotName {
    fn find<'a>(&self, list: &'a [Snapshot]) -> Option<&'a Snapshot> {
        match self {
            SnapshotName::Either(text) => list
                .iter()
                .find(|snapshot| snapshot.id == *text)
                .or_else(|| list.iter().find(|snapshot| snapshot.name == *text)),
            SnapshotName::Exact { id, name } => list.iter().find(|snapshot| {
                id.as_ref().is_none_or(|id| snapshot.id == *id)
                    && name.as_ref().is_none_or(|name| snapshot.name == *name)
            }),
        }
    }
}

/// Let a header show the disk of a snapshot. The image must be opened read-only.
pub(super) async fn show(
    io: &Io,
    container: &Container,
    header: &mut Header,
    which: &SnapshotName,
) -> Result<(), OpenError> {
    let path = container.path().to_owned();
    if !container.traits().read_only {
        return Err(OpenError::Refused { path, why: "a snapshot can only be read" });
    }
    let list = match list_snapshots(io, container).await {
        Ok(list) => list,
        Err(ToolError::Open(error)) => return Err(error),
        Err(_) => {
            let why = "its snapshots cannot be read: look at it with check";
            return Err(OpenError::Refused { path, why });
        }
    };
    let found = which.find(&list);
    let snapshot = found.ok_or(OpenError::NoSnapshot { path, which: which.to_string() })?;
    header.l1_offset = snapshot.l1_offset;
    header.l1_size = snapshot.l1_size;
    header.size = snapshot.disk_size.unwrap_or(header.size);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_are_named_in_every_way() {
        let of = |id: &str, name: &str| Snapshot {
            id: id.to_owned(),
            name: name.to_owned(),
            ..Snapshot::default()
        };
        let list = [of("1", "2"), of("2", "a=b"), of("3", "2")];
        for (text, wanted) in [
            ("2", Some("2")),
            ("a=b", Some("2")),
            ("snapshot.name=2", Some("1")),
            ("snapshot.id=3", Some("3")),
            ("snapshot.name=2,snapshot.id=3", Some("3")),
            ("snapshot.name=2,snapshot.id=2", None),
            ("4", None),
        ] {
            let Ok(name) = text.parse::<SnapshotName>();
            let found = name.find(&list).map(|snapshot| snapshot.id.as_str());
            assert_eq!(found, wanted, "{text}");
        }
    }
}
