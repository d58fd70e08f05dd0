//! Requests that wait for the cluster: told of where they wait for long, and ended where their client was shut out, for librbd
//! then carries some of them out never (Ceph 16).

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, Thread};
use std::time::Duration;

use crate::ffi::Request;
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
        images.iter().for_each(|image| image.waits.look(image));
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

/// Those of one thread, by the keys of their operations; what has ended is in the way of nothing.
pub(crate) type InFlight = Mutex<Vec<Option<Arc<Request>>>>;

/// What is known of those of an image.
#[derive(Default)]
pub(crate) struct Waits {
    threads: Mutex<Vec<Weak<InFlight>>>,
    /// Another client has had this one shut out.
    pub(crate) shut_out: Arc<AtomicBool>,
    asked: AtomicBool,
    /// The log has told of one.
    told: AtomicBool,
}

impl Waits {
    /// The list of one thread more.
    pub(crate) fn know(&self) -> Arc<InFlight> {
        let list = Arc::new(InFlight::default());
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| thread.strong_count() > 0);
        threads.push(Arc::downgrade(&list));
        list
    }

    pub(crate) fn is_shut_out(&self) -> bool {
        self.shut_out.load(SeqCst)
    }

    fn all(&self) -> Vec<Arc<Request>> {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let lists = threads.iter().filter_map(Weak::upgrade);
        lists
            .flat_map(|list| {
                let list = list.lock().unwrap_or_else(PoisonError::into_inner);
                list.iter().flatten().cloned().collect::<Vec<_>>()
            })
            .collect()
    }

    /// Whether any has not ended, or is not known to have.
    fn are_there(&self) -> bool {
        self.told.load(SeqCst) || self.all().iter().any(|request| request.age().is_some())
    }

    /// Look at their ages.
    fn look(&self, image: &Arc<Rbd>) {
        let all = self.all();
        if self.is_shut_out() {
            // What they write is a copy of librbd's own: nobody needs their end.
            all.iter().for_each(|request| request.give_up(libc::ESHUTDOWN));
            return;
        }
        let oldest = all.iter().filter_map(|request| request.age()).max().unwrap_or_default();
        if oldest >= LONG && !self.told.swap(true, SeqCst) {
            tracing::warn!(
                "{}: a request waits for the cluster, for {} s by now (ceph health detail)",
                image.name(),
                oldest.as_secs()
            );
        }
        if oldest < OLD && self.told.swap(false, SeqCst) {
            tracing::info!("{}: the cluster answers again", image.name());
        }
        if oldest >= OLD && !self.asked.swap(true, SeqCst) {
            let asking = image.clone();
            // It waits as they do where the cluster stands still.
            let begun = thread::Builder::new().name("rbd asks".into()).spawn(move || {
                if asking.is_answered() == Err(libc::ESHUTDOWN) {
                    asking.waits.tell_of_shut_out(asking.name());
                }
                asking.waits.asked.store(false, SeqCst);
            });
            if begun.is_err() {
                self.asked.store(false, SeqCst);
            }
        }
    }

    fn tell_of_shut_out(&self, name: &str) {
        if !self.shut_out.swap(true, SeqCst) {
            tracing::error!(
                "{name}: another client has had this one shut out of the cluster: requests fail"
            );
        }
    }
}
