//! Disks that are not served, and are tried again.

use std::sync::Arc;

use crate::{Disk, Error};

/// A disk that could not be opened.
pub(crate) struct LeftOut {
    pub(crate) disk: Disk,
    /// What its threads would be called.
    pub(crate) label: String,
    /// Why, when it was tried last.
    pub(crate) error: Error,
    /// Who tries it now.
    pub(crate) opening: Option<Arc<()>>,
}
