//! Images at rest, opened for the tools that change their tables.

use std::path::Path;

use ringtap_daemon::Error as Fault;
use ringtap_image::{CacheMode, Container, Format, OpenError, OpenOptions, probe};

use super::source::{format_of, format_to_write};

/// The format of an image that a verb looks at, or changes.
pub(crate) fn format(path: &Path, named: Option<Format>, change: bool) -> anyhow::Result<Format> {
    if change { format_to_write(path, named) } else { Ok(format_of(path, named)?.0) }
}

/// Open the file of an image, locked against everybody if it is to be changed.
pub(crate) fn container(path: &Path, change: bool, share: bool) -> Result<Container, OpenError> {
    if let (Some(verb), true) = (probe::unfinished_work(path), change) {
        return Err(OpenError::Unfinished { path: path.to_owned(), verb });
    }
    let options = OpenOptions {
        cache: CacheMode::Writeback,
        read_only: !change,
        force_share: share && !change,
        ..OpenOptions::default()
    };
    Container::open(path, &options)
}

/// That only some formats can do what was asked.
pub(crate) fn cannot(path: &Path, format: Format, what: &str) -> anyhow::Error {
    Fault::Usage(format!("{}: {format} images {what}", path.display())).into()
}
