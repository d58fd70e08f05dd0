//! Requests that wait for the cluster: told of where they wait for long, and ended where their client was shut out, for librbd
//! then carries some of them out never (Ceph 16).

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use crate::ffi::Request;
use crate::image::Rbd;

/// How often it is looked.
const TICK: Duration = Duration::from_secs(2);
/// From what age on the cluster is asked whether it carries out requests of this client.
const OLD: Duration = Duration::from_secs(4);
/// From what age on the log tells of it.
const LONG: Duration = Duration::from_secs(10);

/// Images that are open, and whether a thread looks at their requests.
static WATCHED: Mutex<(Vec<Weak<Rbd>>, bool)> = Mutex::new((Vec::new(), false));

/// Have the requests of an image looked at while it lives: by a thread of this process that waits for no cluster.
pub(crate) fn watch(image: &Arc<Rbd>) {
    let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    watched.0.push(Arc::downgrade(image));
    if !watched.1 {
        let begun = thread::Builder::new().name("rbd waits".into()).spawn(look_at_all);
        watched.1 = begun.is_ok();
    }
}

fn look_at_all() {
    loop {
        thread::sleep(TICK);
        let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
        watched.0.retain(|image| image.strong_count() > 0);
        watched.1 = !watched.0.is_empty();
        if !watched.1 {
            return;
        }
        let images: Vec<_> = watched.0.iter().filter_map(Weak::upgrade).collect();
        drop(watched);
        images.iter().for_each(|image| image.waits.look(image));
    }
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
