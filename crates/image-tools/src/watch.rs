//! How the caller hears of work that takes long, and of what is worth knowing.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use ringtap_image::{Error, Format};
use ringtap_vbd::Progress;

/// Hears of the work. Its methods are called by any thread, and are not to wait.
pub trait Watch: Send + Sync {
    /// The part that takes long begins: so many bytes of disks are to be dealt with, 0 where that cannot be told. `progress` says how many are, and takes the wish to end.
    fn begins(&self, total: u64, progress: &Arc<Progress>) {
        let _ = (total, progress);
    }

    /// Something is worth knowing.
    fn note(&self, note: &Note) {
        let _ = note;
    }
}

/// One that is shared with the threads that work.
pub type Watcher = Arc<dyn Watch>;

struct Nobody;

impl Watch for Nobody {}

/// For work that nobody watches.
pub fn unwatched() -> Watcher {
    Arc::new(Nobody)
}

/// What is worth knowing, though the work goes on.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Note {
    /// The format of an image was not named and not recorded: it is what the signature says.
    Probed {
        /// The image.
        path: PathBuf,
        /// What it is taken for.
        format: Format,
    },
    /// Bytes of a source could not be read, and are zeros in the target.
    Lost {
        /// Where, in bytes of the source.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// Why.
        error: Error,
    },
    /// An image is recorded as something else than its signature says.
    OtherSignature {
        /// The image.
        path: PathBuf,
        /// As what it is recorded.
        format: Format,
        /// The format whose signature it bears.
        looks_like: &'static str,
    },
    /// The snapshots inside an image show what lies below it where they hold nothing, and that becomes another.
    SnapshotsChange {
        /// The image.
        path: PathBuf,
        /// How many snapshots it has.
        count: usize,
    },
}

impl Note {
    /// Whether something was lost.
    pub fn is_warning(&self) -> bool {
        matches!(self, Note::Lost { .. } | Note::SnapshotsChange { .. })
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::Probed { path, format } => {
                let path = path.display();
                write!(
                    f,
                    "{path} bears the signature of {format} and is taken for it; -f says it for certain"
                )
            }
            Note::Lost { offset, len, error } => write!(
                f,
                "{len} bytes at {offset} of the source could not be read, and are zeros now: {error}"
            ),
            Note::OtherSignature { path, format, looks_like } => write!(
                f,
                "{} bears the signature of {looks_like}; as {format}, a guest sees that file's bytes as its disk",
                path.display()
            ),
            Note::SnapshotsChange { path, count } => write!(
                f,
                "snapshots inside {} ({count}) change where they show what lies below it: to keep one, copy it to an image \
                 of its own first (ringtap convert -l)",
                path.display()
            ),
        }
    }
}
