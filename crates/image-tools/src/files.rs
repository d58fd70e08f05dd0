//! Names of files, and the files themselves.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use ringtap_image::{is_store, is_understood, whole_name};

use crate::Error;

/// Whether two names lead to one file.
pub fn same_file(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| path.metadata().ok().map(|facts| (facts.dev(), facts.ino()));
    id(one).is_some() && id(one) == id(other)
}

/// A name within an image, seen from the folder of the image.
pub fn beside(image: &Path, name: &Path) -> std::path::PathBuf {
    if is_store(name) {
        return name.to_owned();
    }
    if let Some(whole) = whole_name(image, name) {
        return whole;
    }
    image.parent().unwrap_or(Path::new("")).join(name)
}

/// Whether this is no file but `null:SIZE`.
pub fn is_null(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.starts_with("null:"))
}

/// That an image which names a file so can be opened afterwards.
pub(crate) fn understood(what: &str, name: &str) -> Result<(), Error> {
    match is_understood(Path::new(name)) || is_null(Path::new(name)) {
        true => Ok(()),
        false => Err(Error::Usage(format!(
            "the {what} {name:?}: what stands before a colon is read as a protocol: write ./{name}, if it is a file"
        ))),
    }
}
