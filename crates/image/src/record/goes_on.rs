//! Where an image's disk goes on, as it is written down.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::identity::identity;
use super::known::Known;
use super::transaction::Part;

/// The image in which another's disk goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Successor {
    pub(super) file: Known,
    /// When the former image was last written to, in seconds and nanoseconds, once that is known for good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) written: Option<(i64, i64)>,
    /// When it had been written to last as this was written down: one that is older was put back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) at_least: Option<(i64, i64)>,
    /// Of images that lead to one another the one with the highest was written last.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) turn: u64,
    /// It holds once all parts of the transaction are written down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) part: Option<Part>,
    /// Where its file was made for that: when that had been written to last. Older records say `made` instead, of a file
    /// that may have been written to since: nothing of them is removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) made_at: Option<(i64, i64)>,
    /// Which file it was written down of, for a copy of that has the attributes as well. Older records do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) of: Option<String>,
}

impl Successor {
    /// Whether it was written down of the file at `image`, and not of one that this is a copy of.
    pub(super) fn is_of(&self, image: &Path) -> bool {
        self.of.is_none() || self.of == identity(image)
    }

    pub(super) fn holds(&self) -> bool {
        self.part.as_ref().is_none_or(Part::holds)
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}
