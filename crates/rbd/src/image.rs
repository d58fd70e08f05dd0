//! Images that are open, and what is done with them.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;

use ringtap_io::Errand;
use ringtap_stores::Length;

use crate::Name;
use crate::ffi::{Extent, Free, Image, Request};
use crate::pools::{error, pool};
use crate::roomy::with_room;
use crate::task::Task;
use crate::waits::Waits;

/// How the image's thread is asked, and its end.
type Helper = (Sender<Task>, JoinHandle<()>);

/// An open image.
pub(crate) struct Rbd {
    pub(crate) read_only: bool,
    /// Changes that have begun.
    pub(crate) changes: AtomicU64,
    pub(crate) len: AtomicU64,
    /// None once it is closed. What waits for the cluster holds it, and not the lock.
    pub(crate) image: RwLock<Option<Arc<Image>>>,
    pub(crate) helper: Mutex<Option<Helper>>,
    pub(crate) waits: Waits,
    pub(crate) name: String,
}

pub(crate) fn failed(name: &Name, errno: i32) -> String {
    match (errno, &name.snapshot) {
        (libc::ENOENT, Some(snapshot)) => {
            format!("there is no image {}, or it has no snapshot {snapshot}", name.spec())
        }
        (libc::ENOENT, None) => {
            format!("there is no image {}: make one by ringtap create, or rbd create", name.spec())
        }
        (libc::EPERM | libc::EACCES, _) => format!("the cluster refuses it: {}", error(errno)),
        (errno, _) => error(errno).to_string(),
    }
}

/// Make one, where none is.
pub(crate) fn make(name: &Name, len: u64) -> Result<(), String> {
    if let Some(snapshot) = &name.snapshot {
        return Err(format!("@{snapshot} is a snapshot: leave it out"));
    }
    pool(name)?.make(&name.image, len).map_err(|errno| match errno {
        libc::EEXIST => format!(
            "there is an image {} already: remove it (rbd rm), or copy to it by ringtap convert -n",
            name.spec()
        ),
        errno => format!("cannot make it: {}", error(errno)),
    })
}

/// Remove one.
pub(crate) fn remove(name: &Name) -> Result<(), String> {
    pool(name)?.remove(&name.image).map_err(|errno| error(errno).to_string())
}

impl Rbd {
    fn image(&self) -> RwLockReadGuard<'_, Option<Arc<Image>>> {
        self.image.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, what: impl FnOnce(&Image) -> Result<T, i32>) -> Result<T, i32> {
        let image = self.image().clone();
        image.map_or(Err(libc::EBADF), |image| what(&image))
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether the cluster carries requests of this client out. Waits.
    pub(crate) fn is_answered(&self) -> Result<(), i32> {
        self.with(Image::is_answered)
    }

    pub(crate) fn len(&self) -> u64 {
        self.len.load(SeqCst)
    }

    /// A request for an operation; none where the image is closed, which its task has been told.
    pub(crate) fn request(
        &self,
        free: &Arc<Free>,
        errand: Errand,
        settles: bool,
    ) -> Option<Arc<Request>> {
        match &*self.image() {
            Some(image) => {
                Some(Request::new(image.opened(), free, &self.waits.shut_out, errand, settles))
            }
            None => {
                errand.ender.end(-libc::EBADF);
                None
            }
        }
    }

    /// Have librbd carry it out.
    pub(crate) fn begin(&self, request: &Arc<Request>) {
        match &*self.image() {
            Some(image) => image.begin(request),
            None => request.end(-libc::EBADF),
        }
    }

    /// Have the image's thread do it.
    pub(crate) fn ask(&self, task: Task) {
        let helper = self.helper.lock().unwrap_or_else(PoisonError::into_inner);
        let left = match &*helper {
            Some((tell, _)) => tell.send(task).err().map(|unsent| unsent.0),
            None => Some(task),
        };
        if let Some(Task::Do(request)) = left {
            request.end(-libc::EIO);
        }
    }

    /// Where something is in a range. Waits.
    pub(crate) fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, i32> {
        self.with(|image| image.extents(None, offset, len))
    }

    /// Make it at least so long: others may have made it longer. Waits.
    pub(crate) fn grow(&self, len: u64) -> Result<(), i32> {
        let now = self.with(Image::len)?;
        if now < len {
            return self.set_len(len);
        }
        self.len.store(now, SeqCst);
        Ok(())
    }

    /// Make it so long. Waits.
    pub(crate) fn set_len(&self, len: u64) -> Result<(), i32> {
        self.with(|image| image.resize(len))?;
        self.len.store(len, SeqCst);
        self.changes.fetch_add(1, SeqCst);
        Ok(())
    }

    /// Look how long it is, for others may have changed that.
    pub(crate) fn look(&self) {
        let Ok(len) = self.with(Image::len) else { return };
        if self.len.swap(len, SeqCst) != len {
            ringtap_stores::rbd::resized();
        }
    }
}

impl Length for Rbd {
    fn now(&self) -> u64 {
        self.len()
    }

    fn set(&self, len: u64) -> Result<(), i32> {
        with_room(|| self.set_len(len)).unwrap_or(Err(libc::EAGAIN))
    }
}
