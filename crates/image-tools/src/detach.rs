//! An overlay that has all of its content itself, and needs nothing below any more.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use ringtap_image::{CacheMode, Format};
use ringtap_vbd::Progress;

use crate::chain::{self, Layer};
use crate::opening::cannot;
use crate::rebase::{Rebase, rebase};
use crate::{Error, Note, Reading, Watch, Watcher, format_to_write};

/// What is detached, and how.
#[derive(Clone, Debug)]
pub struct Detach {
    /// The overlay; nobody may use it.
    pub path: PathBuf,
    /// The format, if that is named; else it is recorded.
    pub format: Option<Format>,
    /// Write to it though it is recorded as of another format.
    pub force_format: bool,
    /// How host caching is used for the overlay; `Unsafe` is as `Writeback`.
    pub cache: CacheMode,
    /// How the images are opened.
    pub reading: Reading,
}

/// What was done.
#[derive(Clone, Debug)]
pub struct Detached {
    /// The overlay's format.
    pub format: Format,
    /// What lay below it, from the top down; nothing where nothing did.
    pub below: Vec<Below>,
    /// Bytes that were read of that. Less than all where an earlier detaching was broken off.
    pub brought: u64,
}

/// One that lay below.
#[derive(Clone, Debug)]
pub struct Below {
    /// Its name, as the image above had it.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// Whether what was read of it was compared with an index; none where it is no object of a server.
    pub verified: Option<bool>,
}

/// Bring into an overlay all that it shows of what lies below, make that stable, and have it name nothing below. What was brought
/// stays in the overlay where that does not go to its end, and is not brought again.
///
/// # Errors
///
/// Its format has nothing below, snapshots inside it would lose what lies below; an image cannot be opened, read or written; or the
/// work was stopped. The overlay reads as before then, and names what it named.
pub fn detach(job: &Detach, watch: &Watcher) -> Result<Detached, Error> {
    let file = &job.path;
    let format = format_to_write(file, job.format)?;
    let mut layers = chain::layers(file, Some(format), true, &job.reading.names)?.into_iter();
    let top = layers.next();
    let below: Vec<Below> = layers.map(Below::of).collect();
    if below.is_empty() {
        return Ok(Detached { format, below, brought: 0 });
    }
    if format != Format::Qcow2 {
        let what = "cannot be without what lies below them: ringtap convert makes one that can";
        return Err(cannot(file, format, what));
    }
    if top.is_some_and(|top| !top.snapshots.is_empty()) {
        return Err(Error::Refused(format!(
            "{} holds snapshots of its own, which would lose what lies below: delete those first (ringtap snapshot -d), or \
             copy them to images of their own (ringtap convert -l)",
            file.display()
        )));
    }
    let job = Rebase {
        path: file.clone(),
        format: Some(format),
        force_format: job.force_format,
        backing: None,
        blindly: false,
        compress: false,
        // What is brought is stable before the name of what it is from goes.
        cache: match job.cache {
            CacheMode::Unsafe => CacheMode::Writeback,
            cache => cache,
        },
        reading: job.reading.clone(),
    };
    let counting = Arc::new(Counting { watch: watch.clone(), progress: Mutex::default() });
    rebase(&job, &(counting.clone() as Watcher))?;
    Ok(Detached { format, below, brought: counting.brought() })
}

impl Below {
    fn of(layer: Layer) -> Below {
        Below { path: layer.path, format: layer.format, verified: layer.verified }
    }
}

/// Passes on what it hears, and knows how much was read.
struct Counting {
    watch: Watcher,
    progress: Mutex<Arc<Progress>>,
}

impl Counting {
    fn brought(&self) -> u64 {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).read()
    }
}

impl Watch for Counting {
    fn begins(&self, total: u64, progress: &Arc<Progress>) {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner) = progress.clone();
        self.watch.begins(total, progress);
    }

    fn note(&self, note: &Note) {
        self.watch.note(note);
    }
}
