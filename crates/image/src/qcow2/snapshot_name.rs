//! Which internal snapshot is meant.

use std::convert::Infallible;
use std::str::FromStr;

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
