//! Disks that are not served, and are tried again.

use std::sync::Arc;

use ringtap_image::{Format, Place};
use ringtap_vbd::Vbd;

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

/// What came of trying one.
pub(crate) struct Tried {
    pub(crate) by: Arc<()>,
    pub(crate) disk: Disk,
    pub(crate) opened: Result<(Vbd, Option<(Place, Format)>), Error>,
}
