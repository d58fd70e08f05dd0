//! How to open an image.

use std::path::PathBuf;

use crate::{CacheMode, Format, RestartChoice, Secret, qcow2};

/// How to open an image.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// The format; where it is not named, that written down when Ringtap made the image.
    pub format: Option<Format>,
    /// Write to the image as that format though it is known to be another.
    pub force_format: bool,
    /// Host caching.
    pub cache: CacheMode,
    /// Refuse writes.
    pub read_only: bool,
    /// Take no lock, and look at the image though others may write to it. Read-only.
    pub force_share: bool,
    /// With that: look in the restart log all the same where nobody writes to the image, and say so where somebody does.
    pub heed_log: bool,
    /// Files that images may name as what lies below them or as a part of them, and folders with such.
    pub allow_backing: Vec<PathBuf>,
    /// Files that images may name as their external data files.
    pub data_files: Vec<PathBuf>,
    /// Open no more than so many images of a chain, and let nothing lie below the last of them.
    pub layers: Option<u32>,
    /// Show a qcow2 image as it was at this snapshot of it. Read-only.
    pub snapshot: Option<qcow2::SnapshotName>,
    /// The most bytes of an image's tables to keep in memory.
    pub table_memory: Option<u64>,
    /// What opens an encrypted image.
    pub secret: Option<Secret>,
    /// Names of the image's dirty bitmaps to show.
    pub bitmaps: Vec<String>,
    /// Pass the guest's discards on through encryption, which shows which parts are in use.
    pub allow_discards: bool,
    /// Keep no restart log: who writes this image begins anew after a kill.
    pub no_restart_log: bool,
    /// Do not open the image for writing where no restart log can be kept of what a flush has yet to make stable, unless each
    /// write makes it so, or [`RestartChoice::Optional`] was chosen. As servers do.
    pub needs_log: bool,
    /// What becomes of a restart log of which it cannot be told whether it belongs to the image.
    pub restart_log: Option<RestartChoice>,
    /// Write to the image though its disk goes on in another.
    pub succeeded: bool,
    /// Nobody will look at the image's data: what is encrypted stays locked.
    pub tables_only: bool,
}

impl OpenOptions {
    pub(crate) fn needs_log(&self) -> bool {
        self.needs_log
            && !self.cache.writethrough()
            && self.restart_log != Some(RestartChoice::Optional)
    }
}
