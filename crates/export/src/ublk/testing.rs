//! For fuzz targets.

use std::path::PathBuf;

/// What bytes found as a device's record say of its image.
pub fn image_in(record: &[u8], mark: u64) -> Option<PathBuf> {
    super::record::image_in(record, mark)
}
