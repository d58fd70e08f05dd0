//! Why a tool for images at rest cannot do its work.

use std::path::PathBuf;

use super::HeaderError;
use crate::{Container, Error, OpenError, limit_of_length};

/// Why a tool could not do its work. Unless it says otherwise, the image is as it was.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// The header could not be read.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A transfer failed.
    #[error("cannot {what} {} at byte {offset}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// What came of it.
        source: Error,
    },
    /// The header would be wrong.
    #[error("cannot write the header of {}: {source}", path.display())]
    Header {
        /// The image.
        path: PathBuf,
        /// What would be wrong.
        source: HeaderError,
    },
    /// What was asked for cannot be.
    #[error("{}: {why}", path.display())]
    Refused {
        /// The image.
        path: PathBuf,
        /// Why, and what to do.
        why: String,
    },
    /// The image contradicts itself.
    #[error("{} contradicts itself: {found}; look at it with check", path.display())]
    Corrupt {
        /// The image.
        path: PathBuf,
        /// What was found, with its place.
        found: String,
    },
}

/// Gives a closure that makes a [`ToolError`] of what a container said.
pub(crate) fn failed(
    container: &Container,
    what: &'static str,
    offset: u64,
) -> impl FnOnce(Error) -> ToolError {
    let path = container.path().to_owned();
    move |source| {
        let limit = limit_of_length(&path, offset).filter(|_| source == Error::Full);
        match limit.filter(|_| what == "extend") {
            Some(limit) => {
                let why = format!("cannot be {offset} bytes long: {limit}");
                ToolError::Refused { path, why }
            }
            None => ToolError::Io { what, path, offset, source },
        }
    }
}
