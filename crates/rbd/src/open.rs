//! Opening and closing an image, as a store.

use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, RwLock, mpsc};
use std::thread;
use std::time::Duration;

use ringtap_io::{Io, OpenRemote, Remote, Session};
use ringtap_stores::{Facts, Length, Options, Store};

use crate::ffi::Image;
use crate::image::{Rbd, failed};
use crate::pools::{error, pool};
use crate::roomy::with_room;
use crate::session::Near;
use crate::task::Task;
use crate::waits::Waits;
use crate::{Name, helper, lock, watch};

/// Size it had better be read and written in.
const PREFERRED: u32 = 4096;

/// How often it is looked whether that thread has ended.
const LOOK: Duration = Duration::from_millis(5);

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
    watch::watch(&rbd);
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
