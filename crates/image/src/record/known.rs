//! A file as it is written down, so that it is known again.

use std::fs;
use std::path::{Path, PathBuf};

use ringtap_stores::is_store;
use serde::{Deserialize, Serialize};

use super::identity::identity;
use crate::Place;
use crate::names::is_own;

/// A file, by its path when that was written and by its [`identity()`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Known {
    pub(super) path: PathBuf,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) identity: Option<String>,
}

/// A file that an image may name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Allowed {
    /// Whether it is for data: to be written to.
    #[serde(default)]
    pub(super) data: bool,
    pub(super) file: Known,
    /// The format that the image was given for what lies below it. Older records do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) format: Option<String>,
}

impl Known {
    /// The file at the path, which may be one of /proc; none where none is.
    pub(super) fn of(path: &Path) -> Option<Known> {
        if is_store(path) {
            return Some(Known { identity: None, path: path.to_owned() });
        }
        let whole = fs::canonicalize(path).ok()?;
        Some(Known { identity: identity(path), path: whole })
    }

    /// Whether what is held is that file.
    pub(super) fn is(&self, place: &Place) -> bool {
        self.identity.is_some() && identity(&place.at()) == self.identity
    }

    /// Where it was.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Allowed {
    /// Where it was.
    pub(crate) fn path(&self) -> &Path {
        &self.file.path
    }

    /// What lies at `path` now, held, if it is that file: itself, or another in its place that nobody
    /// else could have put there.
    pub(crate) fn find(&self, path: &Path) -> Option<Place> {
        let place = Place::hold(path).ok()?;
        if is_store(path) {
            return (path == self.path()).then_some(place);
        }
        let replaced = || path == self.path() && is_own(&place);
        (self.file.is(&place) || replaced()).then_some(place)
    }
}
