//! Which file a path leads to.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// What tells a file or a block device from all others.
pub(crate) type Identity = (bool, u64, u64);

/// Which file a path leads to now.
pub(crate) fn identity(path: &Path) -> Option<Identity> {
    let found = std::fs::metadata(path).ok()?;
    match found.file_type().is_block_device() {
        true => Some((true, found.rdev(), 0)),
        false => Some((false, found.dev(), found.ino())),
    }
}

/// Tell of a file that was opened and is not at its path any more.
pub(crate) fn tell_of_another_file(path: &Path, opened: Option<Identity>) {
    let shown = path.display();
    match (opened, identity(path)) {
        (Some(_), None) => tracing::warn!(
            "{shown}: its file was deleted or moved away; what is served is still that file, and \
             where it was deleted it is gone when this ends"
        ),
        (Some(opened), Some(now)) if opened != now => tracing::warn!(
            "{shown}: another file has taken its place; what is served is still the one that was \
             opened: start the server again to serve the new one"
        ),
        _ => {}
    }
}
