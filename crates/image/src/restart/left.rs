//! What a killed server left, and what is told of it.

use super::{Record, RestartLog, Standing};
use crate::{Container, OpenOptions};

/// What a server before us left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// Its changes, oldest first.
    pub records: Vec<Record>,
}

impl Left {
    /// How many changes, in words.
    pub fn told(&self) -> String {
        match self.records.len() {
            1 => "a change".to_owned(),
            count => format!("{count} changes"),
        }
    }
}

/// What a killed server left behind for an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftBehind {
    /// Changes of its tables.
    pub changes: usize,
    /// Whether they belong to the image as it is; none where they are not to be found.
    pub standing: Option<Standing>,
}

impl LeftBehind {
    pub(crate) fn missing() -> LeftBehind {
        LeftBehind { changes: 0, standing: None }
    }

    /// What it is, in words.
    pub fn told(&self) -> String {
        let (count, are, they) = match self.changes {
            1 => ("a change".to_owned(), "is", "it is"),
            count => (format!("{count} changes"), "are", "they are"),
        };
        match &self.standing {
            None => "a killed process left changes that are not to be found here".to_owned(),
            Some(Standing::Same) => format!("a killed process left {count}"),
            Some(Standing::Other(why)) => {
                format!("a killed process left {count} that {are} not the image's: {why}")
            }
            Some(Standing::Unknown(why)) => format!(
                "a killed process left {count} of which it cannot be told whether {they} the image's: {why}"
            ),
        }
    }
}

impl RestartLog {
    /// Whether the log of an image that is only read is looked in: one that another process writes goes on changing.
    pub(crate) fn is_heeded(container: &Container, options: &OpenOptions, capacity: u64) -> bool {
        if !options.force_share || !options.heed_log {
            return !options.force_share;
        }
        let Some((who, _)) = container.writer() else { return true };
        let log = RestartLog::to_read(container, capacity).ok().flatten();
        if log.is_some_and(|log| log.holds_changes()) {
            tracing::warn!(
                "{}: {who} writes to it: what that has not written down yet is not in what is read",
                container.path().display()
            );
        }
        false
    }
}
