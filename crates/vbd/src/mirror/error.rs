//! Why a mirror or a backup did not end well.

use ringtap_image::Error;
use ringtap_io::Time;

/// Why a mirror or a backup ended without a copy. The disk is as good as before.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// The target has no room for the disk, or not the size that it must have to take its place.
    #[error("the target has {target} bytes and the disk {disk}; make it {wanted}")]
    Size {
        /// Bytes of the target.
        target: u64,
        /// Bytes of the disk.
        disk: u64,
        /// What it has to be.
        wanted: &'static str,
    },
    /// The target cannot be written to.
    #[error("the target is read-only")]
    ReadOnly,
    /// Where the disk has data could not be found.
    #[error("finding out what the disk holds at {offset} failed: {error}")]
    Status {
        /// Where.
        offset: u64,
        /// Why.
        error: Error,
    },
    /// The disk could not be read.
    #[error("reading {len} bytes at {offset} of the disk failed: {error}")]
    Read {
        /// Where.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// Why.
        error: Error,
    },
    /// The disk itself could not be made stable.
    #[error("making the disk stable failed: {error}")]
    FlushDisk {
        /// Why.
        error: Error,
    },
    /// The target could not be written to.
    #[error("writing {len} bytes at {offset} of the target failed: {error}")]
    Write {
        /// Where.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// Why.
        error: Error,
    },
    /// The target could not be made stable.
    #[error("making the target stable failed: {error}")]
    Flush {
        /// Why.
        error: Error,
    },
    /// The target of a backup cannot be made stable, and what it may have lost is nowhere else.
    #[error(
        "making the target stable failed: {error}. Of what it may have lost guests have changed {bytes} bytes since: they are nowhere else"
    )]
    Gone {
        /// Why.
        error: Error,
        /// Bytes of the regions that guests have changed.
        bytes: u64,
    },
    /// What may be saved of a moment is used up.
    #[error(
        "guests have changed more than was to be saved: {left} bytes are left, and {bytes} more are needed"
    )]
    Room {
        /// Bytes that are left.
        left: u64,
        /// Bytes that are needed.
        bytes: u64,
    },
    /// The disk has grown, and the target cannot.
    #[error("the disk has grown to {size} bytes, and making the target as large failed: {error}")]
    Grow {
        /// Bytes of the disk.
        size: u64,
        /// Why.
        error: Error,
    },
    /// A guest's write has waited for the target for too long, or the target has ended no write for as long.
    #[error("the target did not take a write within {} ms", limit / 1_000_000)]
    Late {
        /// How long it might, in nanoseconds.
        limit: Time,
    },
    /// The target does not end a flush, and answers no read meanwhile.
    #[error(
        "the target has answered nothing for {} ms while it was to make stable what it was given",
        limit / 1_000_000
    )]
    Silent {
        /// How long it might, in nanoseconds.
        limit: Time,
    },
    /// The disk did not stand still in time.
    #[error("requests in flight, or another change of the disk, did not end in time")]
    Busy,
    /// A moment that is read is not kept any more.
    #[error("what the disk held then is lost: its backup was given up")]
    Lost,
    /// Another image took the disk's place meanwhile.
    #[error("another image took the place of the one that was copied")]
    Replaced,
    /// A panic has stopped the disk or the target.
    #[error("the disk or the target is stopped")]
    Stopped,
    /// There is no memory to copy with.
    #[error("no memory for {len} bytes")]
    Memory {
        /// How many.
        len: u64,
    },
    /// What was to be done while the disk stood still failed.
    #[error("{0}")]
    Hook(Box<dyn std::error::Error + Send + Sync>),
    /// [`crate::Job::cancel`] was called.
    #[error("cancelled")]
    Cancelled,
}

impl MirrorError {
    /// What failed where it may be tried again: whether it was a write, and why. Making the target stable is one of what was written.
    pub(crate) fn of_request(&self) -> Option<(bool, Error)> {
        match self {
            // That does not get better.
            MirrorError::Status { error: Error::Stopped, .. }
            | MirrorError::Read { error: Error::Stopped, .. }
            | MirrorError::Write { error: Error::Stopped, .. }
            | MirrorError::Flush { error: Error::Stopped } => None,
            MirrorError::Status { error, .. } | MirrorError::Read { error, .. } => {
                Some((false, *error))
            }
            MirrorError::Write { error, .. } | MirrorError::Flush { error } => Some((true, *error)),
            _ => None,
        }
    }
}

impl From<crate::phase::Cancelled> for MirrorError {
    fn from(_: crate::phase::Cancelled) -> MirrorError {
        MirrorError::Cancelled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_stopped_is_not_tried_again() {
        let write = |error| MirrorError::Write { offset: 0, len: 512, error };
        assert_eq!(
            write(Error::Os(libc::ENOSPC)).of_request(),
            Some((true, Error::Os(libc::ENOSPC)))
        );
        assert_eq!(write(Error::Stopped).of_request(), None);
        assert_eq!(MirrorError::Flush { error: Error::Stopped }.of_request(), None);
    }
}
