//! What can go wrong on the data path, in a word.

use std::io;

/// Why a request failed. Small and `Copy`: each transport turns it into its own code with one `match`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// The kernel said so (a positive errno).
    Os(i32),
    /// The request reaches past the end of the disk.
    Range,
    /// The disk is read-only.
    ReadOnly,
    /// There is no room left where the image lies.
    Full,
    /// The image contradicts itself.
    Corrupt,
    /// This image or its file system cannot do that.
    Unsupported,
    /// A panic has stopped the disk.
    Stopped,
    /// What was written may be lost, and no flush could tell any more.
    Lost,
}

impl Error {
    /// From a positive errno.
    pub fn from_errno(errno: i32) -> Error {
        match errno {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Error::Full,
            libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => Error::Unsupported,
            libc::EROFS => Error::ReadOnly,
            other => Error::Os(other),
        }
    }

    /// The errno that names it best.
    pub fn errno(self) -> i32 {
        match self {
            Error::Os(errno) => errno,
            Error::Range => libc::EINVAL,
            Error::ReadOnly => libc::EROFS,
            Error::Full => libc::ENOSPC,
            Error::Corrupt | Error::Stopped | Error::Lost => libc::EIO,
            Error::Unsupported => libc::EOPNOTSUPP,
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Os(errno) => write!(f, "{}", io::Error::from_raw_os_error(*errno)),
            Error::Range => f.write_str("past the end of the disk"),
            Error::ReadOnly => f.write_str("the disk is read-only"),
            Error::Full => f.write_str("no space left where the image lies"),
            Error::Corrupt => f.write_str("the image contradicts itself"),
            Error::Unsupported => f.write_str("not supported by this image or its file system"),
            Error::Stopped => f.write_str("the disk was stopped by an error of Ringtap itself"),
            Error::Lost => f.write_str(
                "what was written may be lost, for a flush through the page cache has failed; open the image anew",
            ),
        }
    }
}

impl std::error::Error for Error {}
