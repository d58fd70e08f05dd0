//! Images that are open, as stores.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ringtap_io::{Errand, Io, OpenRemote, Remote, Session};
use ringtap_stores::{Facts, Length, Options, Store};

use crate::ffi::{Extent, Free, Image, Request};
use crate::helper::{self, Task};
use crate::pools::{error, pool};
use crate::roomy::with_room;
use crate::session::Near;
use crate::waits::{self, Waits};
use crate::{Name, lock};

/// Size it had better be read and written in.
const PREFERRED: u32 = 4096;

/// How often it is looked whether that thread has ended.
const LOOK: Duration = Duration::from_millis(5);

/// How the image's thread is asked, and its end.
type Helper = (Sender<Task>, JoinHandle<()>);

/// An open image.
pub(crate) struct Rbd {
    pub(crate) read_only: bool,
    /// Changes that have begun.
    pub(crate) changes: AtomicU64,
    len: AtomicU64,
    /// None once it is closed. What waits for the cluster holds it, and not the lock.
    image: RwLock<Option<Arc<Image>>>,
    helper: Mutex<Option<Helper>>,
    pub(crate) waits: Waits,
    name: String,
}

/// Open one. Waits for its cluster.
pub(crate) fn open(name: &Name, options: &Options) -> Result<Store, String> {
    let read_only = options.read_only;
    if let (Some(snapshot), false) = (&name.snapshot, read_only) {
        return Err(format!("@{snapshot} is a snapshot, which is not written to: add --read-only"));
    }
    let pool = pool(name)?;
    let mut image = Image::open(pool, &name.image, name.snapshot.as_deref(), read_only)
        .map_err(|errno| failed(name, errno))?;
    if !read_only {
        lock::take(&image, name)?;
    }
    let (tell, tasks) = mpsc::channel();
    let teller = tell.clone();
    // Snapshots stay as they are.
    if name.snapshot.is_none() {
        let watch = image.watch(Box::new(move || _ = teller.send(Task::Look)));
        if let Err(errno) = watch {
            tracing::warn!("{name}: that others resize it will not be seen: {}", error(errno));
        }
    }
    let len = image.len().map_err(|errno| format!("its size: {}", error(errno)))?;
    let rbd = Arc::new(Rbd {
        read_only,
        changes: AtomicU64::new(0),
        len: AtomicU64::new(len),
        image: RwLock::new(Some(Arc::new(image))),
        helper: Mutex::new(None),
        waits: Waits::default(),
        name: name.to_string(),
    });
    let thread = helper::start(&rbd, tasks).map_err(|error| format!("a thread for it: {error}"))?;
    *rbd.helper.lock().unwrap_or_else(PoisonError::into_inner) = Some((tell, thread));
    waits::watch(&rbd);
    let facts = Facts {
        len,
        read_only,
        block: 1,
        preferred: PREFERRED,
        rotational: false,
        discard: true,
        zero: true,
        resizable: name.snapshot.is_none(),
        verified: false,
    };
    let length: Arc<dyn Length> = rbd.clone();
    Ok(Store::new(OpenRemote::new(rbd), facts).with_length(length))
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
            Some(image) => Some(Request::new(image, free, &self.waits.shut_out, errand, settles)),
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

impl Remote for Rbd {
    fn session(self: Arc<Self>, _: &Io) -> Rc<dyn Session> {
        Near::start(self)
    }

    fn close(&self) {
        let helper = self.helper.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((tell, thread)) = helper {
            let _ = tell.send(Task::End);
            // It may wait for the cluster, and for ever where that has shut this client out.
            while !thread.is_finished() && !self.waits.is_shut_out() {
                thread::sleep(LOOK);
            }
        }
        let closed = with_room(|| {
            let image = self.image.write().unwrap_or_else(PoisonError::into_inner).take();
            if self.waits.is_shut_out() {
                // What is in flight may never end, and closing would wait for it. The cluster has closed it.
                image.iter().for_each(|image| image.cluster().set_shut_out());
                std::mem::forget(image);
            } else if let Some(image) = image.filter(|_| !self.read_only) {
                lock::forget(&image);
            }
        });
        if closed.is_none() {
            tracing::warn!(
                "{}: it stays open until this process ends: no thread can be begun",
                self.name
            );
        }
    }
}
