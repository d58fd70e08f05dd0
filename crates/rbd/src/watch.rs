//! The thread that looks at requests that wait for the cluster.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, Thread};
use std::time::Duration;

use crate::image::Rbd;

/// How often it is looked.
const TICK: Duration = Duration::from_secs(2);
/// From what age on the cluster is asked whether it carries out requests of this client.
const OLD: Duration = Duration::from_secs(4);
/// From what age on the log tells of it.
const LONG: Duration = Duration::from_secs(10);

/// Images that are open, and the thread that looks at their requests.
static WATCHED: Mutex<(Vec<Weak<Rbd>>, Option<Thread>)> = Mutex::new((Vec::new(), None));
/// Whether that thread rests, for nothing waits for a cluster.
static RESTS: AtomicBool = AtomicBool::new(false);

/// Have the requests of an image looked at while it lives: by a thread of this process that waits for no cluster.
pub(crate) fn watch(image: &Arc<Rbd>) {
    let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    watched.0.push(Arc::downgrade(image));
    if watched.1.is_none() {
        let begun = thread::Builder::new().name("rbd waits".into()).spawn(look_at_all);
        watched.1 = begun.ok().map(|begun| begun.thread().clone());
    }
}

/// A request has begun, and is where it is looked for.
pub(crate) fn there_is_one() {
    if RESTS.load(SeqCst) && RESTS.swap(false, SeqCst) {
        let watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
        watched.1.as_ref().inspect(|thread| thread.unpark());
    }
}

fn look_at_all() {
    loop {
        thread::sleep(TICK);
        let Some(images) = watched() else { return };
        let waits = || images.iter().any(|image| image.waits.are_there());
        images.iter().for_each(look);
        // What begins from here on sees that this rests, or is seen.
        RESTS.store(!waits(), SeqCst);
        if RESTS.load(SeqCst) && waits() {
            RESTS.store(false, SeqCst);
        }
        drop(images);
        while RESTS.load(SeqCst) {
            thread::park();
        }
    }
}

/// Those that are open; none where there is nothing to be looked at any more.
fn watched() -> Option<Vec<Arc<Rbd>>> {
    let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    watched.0.retain(|image| image.strong_count() > 0);
    if watched.0.is_empty() {
        watched.1 = None;
        return None;
    }
    Some(watched.0.iter().filter_map(Weak::upgrade).collect())
}

/// Look at the ages of those of an image.
fn look(image: &Arc<Rbd>) {
    let waits = &image.waits;
    let all = waits.all();
    if waits.is_shut_out() {
        // What they write is a copy of librbd's own: nobody needs their end.
        all.iter().for_each(|request| request.give_up(libc::ESHUTDOWN));
        return;
    }
    let oldest = all.iter().filter_map(|request| request.age()).max().unwrap_or_default();
    if oldest >= LONG && !waits.told.swap(true, SeqCst) {
        tracing::warn!(
            "{}: a request waits for the cluster, for {} s by now (ceph health detail)",
            image.name(),
            oldest.as_secs()
        );
    }
    if oldest < OLD && waits.told.swap(false, SeqCst) {
        tracing::info!("{}: the cluster answers again", image.name());
    }
    if oldest >= OLD && !waits.asked.swap(true, SeqCst) {
        let asking = image.clone();
        // It waits as they do where the cluster stands still.
        let begun = thread::Builder::new().name("rbd asks".into()).spawn(move || {
            if asking.is_answered() == Err(libc::ESHUTDOWN) {
                asking.waits.tell_of_shut_out(asking.name());
            }
            asking.waits.asked.store(false, SeqCst);
        });
        if begun.is_err() {
            waits.asked.store(false, SeqCst);
        }
    }
}
