//! Reading an image as it was when an internal snapshot of it was taken.

use ringtap_io::Io;

use super::snapshot::list_snapshots;
use super::{Header, Snapshot, SnapshotName, ToolError};
use crate::{Container, OpenError};

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
