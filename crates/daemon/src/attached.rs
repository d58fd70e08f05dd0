//! Disks that Xen's toolstack names, on their way to those that are served and from them.

use std::sync::mpsc::Sender;

use ringtap_image::{Format, Place};
use ringtap_vbd::Vbd;

use crate::Disk;
use crate::ids::{DiskId, ServerId};

/// A disk that the toolstack wants served, opened.
pub(crate) struct Attached {
    pub(crate) disk: Disk,
    pub(crate) vbd: Vbd,
    pub(crate) named: Option<(Place, Format)>,
    pub(crate) server: ServerId,
    pub(crate) tell: Sender<Result<ringtap_vbd::Disk, String>>,
}

/// A disk that its guest has given back: closed once nothing is at work on it.
pub(crate) struct Leaving {
    pub(crate) disk: DiskId,
    /// Dropped then.
    pub(crate) tell: Sender<()>,
}
