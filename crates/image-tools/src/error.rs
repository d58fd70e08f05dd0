//! Why a tool did not do what it was asked to.

use std::io;
use std::path::PathBuf;

use ringtap_image::qcow2::ToolError;
use ringtap_image::{Format, OpenError, SecretError, UnknownFormat, luks};
use ringtap_vbd::{CompareError, CopyError};

/// Why a tool did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What was asked for contradicts itself, or cannot be had; the message says what can.
    #[error("{0}")]
    Usage(String),
    /// Images of that format are not of the kind that was asked for.
    #[error("{}: {format} images {what}", path.display())]
    Format {
        /// The image.
        path: PathBuf,
        /// What it is.
        format: Format,
        /// What they cannot do, and what to do.
        what: String,
    },
    /// The format of an image that is to be written is neither named nor recorded.
    #[error(
        "the format of {} is not known: name it with -f{} (it is not guessed where an image is written, for a guest may \
         have put any signature there)",
        path.display(),
        looks_like.map(|name| format!("; it looks like {name}")).unwrap_or_default()
    )]
    FormatUnknown {
        /// The image.
        path: PathBuf,
        /// The format whose signature it bears.
        looks_like: Option<&'static str>,
    },
    /// It bears the signature of a format that is not read here.
    #[error(
        "{} bears the signature of {signature}, which is not read here; add -f raw to take it for a raw disk all the same",
        path.display()
    )]
    FormatUnread {
        /// The image.
        path: PathBuf,
        /// That format.
        signature: &'static str,
    },
    /// An image says of another that it is of a format that there is not.
    #[error(transparent)]
    FormatName(#[from] UnknownFormat),
    /// An image could not be opened, or is not to be.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// What an image holds could not be read or written.
    #[error(transparent)]
    Image(#[from] ringtap_image::Error),
    /// A tool of qcow2 images could not do its work.
    #[error(transparent)]
    Qcow2(#[from] ToolError),
    /// A LUKS header could not be read.
    #[error(transparent)]
    Luks(#[from] luks::Error),
    /// There is no secret.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The system refused.
    #[error("{what}")]
    Os {
        /// What was tried, and on what.
        what: String,
        /// What it said.
        source: io::Error,
    },
    /// A disk cannot have that size: it would be below nothing, or past all bounds.
    #[error("there is no such size of this disk")]
    Size,
    /// A disk would become smaller.
    #[error(
        "{} would become smaller, from {old} to {new} bytes, and lose what lies past that: add --shrink if its guest has made room",
        path.display()
    )]
    Shrinks {
        /// Its image.
        path: PathBuf,
        /// Bytes of it now.
        old: u64,
        /// Bytes that it would have.
        new: u64,
    },
    /// It is its own backing file, by way of others.
    #[error("{} is its own backing file, by way of others", path.display())]
    Circle {
        /// The image.
        path: PathBuf,
    },
    /// A disk's content could not be copied.
    #[error(transparent)]
    Copy(CopyError),
    /// Disks could not be compared.
    #[error(transparent)]
    Compare(#[from] CompareError),
    /// What was found in an image, or in a cluster of Ceph, does not allow it; the message says what, and what to do.
    #[error("{0}")]
    Refused(String),
    /// [`crate::Progress::stop`] was called before the end.
    #[error("stopped before the end")]
    Stopped,
    /// What was being done, and why it failed.
    #[error("{what}")]
    While {
        /// What was being done, or what that leaves.
        what: String,
        /// Why it failed.
        source: Box<Error>,
    },
}

impl From<CopyError> for Error {
    fn from(error: CopyError) -> Error {
        match error {
            CopyError::Stopped => Error::Stopped,
            other => Error::Copy(other),
        }
    }
}

impl Error {
    /// The error itself, without what was being done.
    pub fn cause(&self) -> &Error {
        match self {
            Error::While { source, .. } => source.cause(),
            own => own,
        }
    }

    /// The same, to be changed.
    pub fn cause_mut(&mut self) -> &mut Error {
        match self {
            Error::While { source, .. } => source.cause_mut(),
            own => own,
        }
    }

    /// What was being done, from the whole to its part.
    pub fn doing(&self) -> Vec<&str> {
        let mut doing = vec![];
        let mut error = self;
        while let Error::While { what, source } = error {
            doing.push(what.as_str());
            error = source;
        }
        doing
    }

    /// Whether something else is to be asked for, and no image is to blame.
    pub fn is_usage(&self) -> bool {
        matches!(
            self.cause(),
            Error::Usage(_)
                | Error::Format { .. }
                | Error::FormatUnknown { .. }
                | Error::Size
                | Error::Shrinks { .. }
                | Error::Open(OpenError::NullSize { .. })
        )
    }

    /// Whether it was the caller who ended it.
    pub fn is_stopped(&self) -> bool {
        matches!(self.cause(), Error::Stopped)
    }

    pub(crate) fn usage(why: impl Into<String>) -> Error {
        Error::Usage(why.into())
    }
}

/// Says what was being done when something failed.
pub(crate) trait Doing<T> {
    /// Put that around the error.
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T, E: Into<Error>> Doing<T> for Result<T, E> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|error| Error::While { what: what(), source: Box::new(error.into()) })
    }
}

/// Says what the system was asked for when it refused.
pub(crate) trait Tried<T> {
    /// Make an error of it.
    fn tried(self, what: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T> Tried<T> for io::Result<T> {
    fn tried(self, what: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Os { what: what(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_being_done_stands_around_the_cause() {
        let end: Result<(), Error> =
            Err(Error::from(CopyError::Stopped)).doing(|| "copying".into());
        let error = end.doing(|| "a.qcow2 is not whole".into()).expect_err("stopped");
        assert!(error.is_stopped() && !error.is_usage());
        assert_eq!(error.doing(), ["a.qcow2 is not whole", "copying"]);
        assert_eq!(error.cause().to_string(), "stopped before the end");
    }
}
