//! Requests that wait for the cluster: told of where they wait for long, and ended where their client was shut out, for librbd
//! then carries some of them out never (Ceph 16).

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::ffi::Request;

/// Those of one thread, by the keys of their operations; what has ended is in the way of nothing.
pub(crate) type InFlight = Mutex<Vec<Option<Arc<Request>>>>;

/// What is known of those of an image.
#[derive(Default)]
pub(crate) struct Waits {
    threads: Mutex<Vec<Weak<InFlight>>>,
    /// Another client has had this one shut out.
    pub(crate) shut_out: Arc<AtomicBool>,
    pub(crate) asked: AtomicBool,
    /// The log has told of one.
    pub(crate) told: AtomicBool,
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

    pub(crate) fn all(&self) -> Vec<Arc<Request>> {
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
    pub(crate) fn are_there(&self) -> bool {
        self.told.load(SeqCst) || self.all().iter().any(|request| request.age().is_some())
    }

    pub(crate) fn tell_of_shut_out(&self, name: &str) {
        if !self.shut_out.swap(true, SeqCst) {
            tracing::error!(
                "{name}: another client has had this one shut out of the cluster: requests fail"
            );
        }
    }
}
