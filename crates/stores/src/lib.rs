//! Stores: bytes under a name that are on no descriptor of this machine.
//!
//! A [`Store`] is opened by its URI and lists itself as a [`ringtap_io::File`] that operations take as they
//! take that of a local file: every format, job and transport works on it unchanged. Each thread that uses it has a
//! session of its own (`ringtap_io::Session`). There are exports of NBD servers ([`nbd`]), objects of S3 and HTTP
//! servers, which are read only: `ringtap_objects` opens those, in programs that have it ([`open_objects_by`]); and images
//! of Ceph, which `ringtap_rbd` opens ([`rbd`]).
#![forbid(unsafe_code)]

pub mod nbd;
pub mod percent;
pub mod rbd;
mod relative;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use ringtap_io::{File, OpenRemote};

pub use nbd::Uri;
pub use relative::{Allows, allows_object, beside_object};

/// How a store wants to be used, found at opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Bytes.
    pub len: u64,
    /// Whether it takes no writes.
    pub read_only: bool,
    /// Offsets and lengths must be multiples of this (1: any will do).
    pub block: u32,
    /// Size it had better be read and written in.
    pub preferred: u32,
    /// Whether the disk behind it seeks.
    pub rotational: bool,
    /// Whether space can be given back.
    pub discard: bool,
    /// Whether zeros can be written without sending them.
    pub zero: bool,
    /// Whether it can be made longer and shorter.
    pub resizable: bool,
    /// Whether all that is read is compared with digests of what it is to be.
    pub verified: bool,
}

/// How to open a store.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Take no writes, though the store would.
    pub read_only: bool,
}

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot open {uri}: {why}")]
pub struct OpenError {
    /// Its name.
    pub uri: String,
    /// What was tried and found, and what to do.
    pub why: String,
}

/// An open store. Clones are the same one; with the last it closes.
#[derive(Clone)]
pub struct Store {
    remote: Arc<OpenRemote>,
    facts: Facts,
    length: Option<Arc<dyn Length>>,
    tells: Option<Arc<dyn Tells>>,
}

/// What a store keeps on this host of what it has read.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LocalCache {
    /// Where.
    pub folder: String,
    /// Why nothing more is kept there, where its disk has failed.
    pub given_up: Option<String>,
}

/// A store that tells more of itself than its facts.
pub trait Tells: Send + Sync {
    /// Its local cache, where it has one.
    fn local_cache(&self) -> Option<LocalCache> {
        None
    }

    /// What its server says that it lies in, itself first: exports of servers, each by a word that no other has.
    fn lies_in(&self) -> Vec<String> {
        vec![]
    }
}

/// How long a store is that may be made longer, by us and by others.
pub trait Length: Send + Sync {
    /// Bytes, as far as is known here.
    fn now(&self) -> u64;

    /// Make it so long; what is new reads as zeros. Waits for it. Else a positive errno.
    fn set(&self, len: u64) -> Result<(), i32>;
}

impl Store {
    /// One that is open.
    pub fn new(remote: OpenRemote, facts: Facts) -> Store {
        Store { remote: Arc::new(remote), facts, length: None, tells: None }
    }

    /// The same, which tells more of itself.
    pub fn telling(self, tells: Arc<dyn Tells>) -> Store {
        Store { tells: Some(tells), ..self }
    }

    /// What its server says that it lies in; nothing where it says nothing.
    pub fn lies_in(&self) -> Vec<String> {
        self.tells.as_ref().map_or_else(Vec::new, |tells| tells.lies_in())
    }

    /// What it keeps on this host, where it does.
    pub fn local_cache(&self) -> Option<LocalCache> {
        self.tells.as_ref()?.local_cache()
    }

    /// The same, whose length changes.
    pub fn with_length(self, length: Arc<dyn Length>) -> Store {
        Store { length: Some(length), ..self }
    }

    /// Open what a URI names. Waits for the server.
    pub fn open(uri: &str, options: &Options) -> Result<Store, OpenError> {
        if let Some(store) = left(uri).filter(|_| options.read_only) {
            return Ok(store);
        }
        // Whoever wrote a key into a name shall not find it in a log.
        let shown = match uri.split_once(":key=").filter(|_| rbd::is_rbd(uri)) {
            Some((before, _)) => format!("{before}:key=…"),
            None => uri.to_owned(),
        };
        let failed = |why: String| OpenError { uri: shown.clone(), why };
        if rbd::is_rbd(uri) {
            return rbd::open(uri, options).map_err(failed);
        }
        if is_object(uri) {
            let opener = OPENER.get().ok_or_else(|| failed(NO_OBJECTS.into()))?;
            return opener(uri, options).map_err(failed);
        }
        let uri = Uri::parse(uri).map_err(failed)?;
        nbd::open(&uri, options).map_err(|error| failed(error.to_string()))
    }

    /// Leave it, open for reading, to the next of this process who opens that name: an NBD server may let nobody in a second
    /// time, as `qemu-nbd` without `--persistent`. Others are closed.
    pub fn leave(self, uri: &str) {
        if self.facts.read_only && !rbd::is_rbd(uri) && !is_object(uri) {
            *LEFT.lock().unwrap_or_else(PoisonError::into_inner) = Some((uri.to_owned(), self));
        }
    }

    /// It, for as long as somebody else has it.
    pub fn downgrade(&self) -> WeakStore {
        let length = self.length.as_ref().map(Arc::downgrade);
        let tells = self.tells.as_ref().map(Arc::downgrade);
        WeakStore { remote: Arc::downgrade(&self.remote), facts: self.facts, length, tells }
    }

    /// The handle that operations take.
    pub fn file(&self) -> File {
        self.remote.handle()
    }

    /// How it wants to be used.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Bytes it has now, as far as is known here.
    pub fn len(&self) -> u64 {
        self.length.as_ref().map_or(self.facts.len, |length| length.now())
    }

    /// Make it so long, where its [`Facts`] say that this can be. Waits for it. Else a positive errno.
    pub fn set_len(&self, len: u64) -> Result<(), i32> {
        self.length.as_ref().map_or(Err(libc::EOPNOTSUPP), |length| length.set(len))
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What was left to the next who opens it, and its name.
static LEFT: Mutex<Option<(String, Store)>> = Mutex::new(None);

/// Close what was left and nobody has opened again: at the end of a process.
pub fn forget_left() {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner).take();
}

/// What was left by that name; nobody else gets it then.
fn left(uri: &str) -> Option<Store> {
    let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
    left.take_if(|(name, _)| name == uri).map(|(_, store)| store)
}

/// A store that may have been closed.
#[derive(Clone)]
pub struct WeakStore {
    remote: Weak<OpenRemote>,
    facts: Facts,
    length: Option<Weak<dyn Length>>,
    tells: Option<Weak<dyn Tells>>,
}

impl WeakStore {
    /// The store, where it is open.
    pub fn upgrade(&self) -> Option<Store> {
        let length = self.length.as_ref().and_then(Weak::upgrade);
        let tells = self.tells.as_ref().and_then(Weak::upgrade);
        Some(Store { remote: self.remote.upgrade()?, facts: self.facts, length, tells })
    }
}

/// Opens an object by its URI; else what was tried and found, and what to do.
pub type Opener = fn(&str, &Options) -> Result<Store, String>;

static OPENER: OnceLock<Opener> = OnceLock::new();
const NO_OBJECTS: &str = "this ringtap was built without objects: build it with --features object";

/// From now on objects are opened by that. The first who says so decides.
pub fn open_objects_by(opener: Opener) {
    let _first = OPENER.set(opener);
}

/// Files of this machine that opening and reading objects takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Beside {
    /// Files and folders that are read.
    pub read: Vec<PathBuf>,
    /// Folders in which files are made, read and written.
    pub kept: Vec<PathBuf>,
}

static BESIDE: OnceLock<fn() -> Beside> = OnceLock::new();

/// What is read and written beside objects is told by that. The first who says so decides.
pub fn objects_take(beside: fn() -> Beside) {
    let _first = BESIDE.set(beside);
}

/// What opening and reading objects takes of this machine.
pub fn beside_objects() -> Beside {
    BESIDE.get().map_or_else(Beside::default, |beside| beside())
}

/// The folder of the certificates that a store's name says, if it does.
pub fn certificates_of(name: &Path) -> Option<PathBuf> {
    Uri::parse(name.to_str()?).ok()?.certificates
}

/// Whether a folder holds certificates that exports of servers can be reached with; why not.
pub fn check_certificates(folder: &Path) -> Result<(), String> {
    nbd::check_certificates(folder).map_err(|error| error.to_string())
}

/// Whether a name is that of an object of a server.
pub fn is_path_of_object(name: &Path) -> bool {
    name.to_str().is_some_and(is_object)
}

/// Whether a name is that of a store: one with such a beginning is a path with `./` before it.
pub fn is_store(name: &Path) -> bool {
    let schemes = ["nbd://", "nbd+unix://", "nbds://", "nbds+unix://"];
    name.to_str().is_some_and(|name| {
        is_object(name)
            || rbd::is_rbd(name)
            || schemes.iter().any(|scheme| name.starts_with(scheme))
    })
}

/// Whether it is that of an object, which is read only.
pub fn is_object(name: &str) -> bool {
    ["s3://", "https://", "http://"].iter().any(|scheme| name.starts_with(scheme))
}
