//! Where an image is: a path, or a file that is held so that nobody can put another in its place between
//! a look at it and its opening.

use std::borrow::Cow;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags};

/// Where an image is. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Place {
    path: Arc<Path>,
    held: Held,
}

/// What keeps it there.
#[derive(Clone, Debug)]
enum Held {
    /// Nothing: it is what lies at its path.
    Nothing,
    Open(Arc<OwnedFd>),
    /// Somebody else, who has it open at this path.
    Elsewhere(Arc<Path>),
}

impl Place {
    /// What lies at the path now, held.
    pub fn hold(path: &Path) -> io::Result<Place> {
        // A server shows what it shows.
        if ringtap_stores::is_store(path) {
            return Ok(path.into());
        }
        let held = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Place::of(path, held))
    }

    /// What was opened, under the name that messages give it.
    pub(crate) fn of(path: &Path, held: OwnedFd) -> Place {
        Place { path: path.into(), held: Held::Open(Arc::new(held)) }
    }

    /// What somebody has open at a path of /proc, for as long as it is.
    pub(crate) fn at_fd(path: &Path, at: PathBuf) -> Place {
        Place { path: path.into(), held: Held::Elsewhere(at.into()) }
    }

    /// Its name, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path that leads to it and nowhere else.
    pub fn at(&self) -> Cow<'_, Path> {
        match &self.held {
            Held::Open(held) => Cow::Owned(path_of(held.as_fd())),
            Held::Elsewhere(at) => Cow::Borrowed(at),
            Held::Nothing => Cow::Borrowed(&self.path),
        }
    }
}

impl From<&Path> for Place {
    fn from(path: &Path) -> Place {
        Place { path: path.into(), held: Held::Nothing }
    }
}

impl From<&PathBuf> for Place {
    fn from(path: &PathBuf) -> Place {
        path.as_path().into()
    }
}

impl From<&Place> for Place {
    fn from(place: &Place) -> Place {
        place.clone()
    }
}

/// The path of what is open.
pub(crate) fn path_of(file: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}
