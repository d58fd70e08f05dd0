//! Images of Ceph: what there is of them in every program. `ringtap_rbd` opens them, where a program has it.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::{Opener, Options, Store};

/// What knows images of Ceph. Each says what was tried and found, and what to do, where it fails.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    /// Load what it needs, before a sandbox lets nothing be loaded any more.
    pub load: fn() -> Result<(), String>,
    /// Open one.
    pub open: Opener,
    /// Make one of so many bytes, where none is.
    pub make: fn(&str, u64) -> Result<(), String>,
    /// Remove one.
    pub remove: fn(&str) -> Result<(), String>,
    /// The files that opening it reads.
    pub files: fn(&str) -> Vec<PathBuf>,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();
const NONE: &str = "this ringtap was built without RBD: build it with --features rbd";

/// From now on images of Ceph are opened by that. The first who says so decides.
pub fn open_by(driver: Driver) {
    let _first = DRIVER.set(driver);
}

/// Whether a name is that of an image of Ceph.
pub fn is_rbd(name: &str) -> bool {
    name.starts_with("rbd:")
}

/// The same of a path.
pub fn is_path_of_rbd(path: &Path) -> bool {
    path.to_str().is_some_and(is_rbd)
}

fn driver() -> Result<&'static Driver, String> {
    DRIVER.get().ok_or_else(|| NONE.to_owned())
}

pub(crate) fn open(name: &str, options: &Options) -> Result<Store, String> {
    (driver()?.open)(name, options)
}

/// Load what opening takes.
pub fn load() -> Result<(), String> {
    (driver()?.load)()
}

/// Make one of so many bytes, where none is.
pub fn make(name: &str, len: u64) -> Result<(), String> {
    (driver()?.make)(name, len)
}

/// Remove one that was made.
pub fn remove(name: &str) -> Result<(), String> {
    (driver()?.remove)(name)
}

/// The files that opening it reads.
pub fn files(name: &str) -> Vec<PathBuf> {
    DRIVER.get().map_or(vec![], |driver| (driver.files)(name))
}

type Listener = Box<dyn Fn() + Send>;

static LISTENER: Mutex<Option<Listener>> = Mutex::new(None);

/// Call that from now on whenever an open image has become longer or shorter: on a thread of its own.
pub fn tell_of_resizes(listener: impl Fn() + Send + 'static) {
    *LISTENER.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(listener));
}

/// An open image has another length now.
pub fn resized() {
    if let Some(listener) = &*LISTENER.lock().unwrap_or_else(PoisonError::into_inner) {
        listener();
    }
}
