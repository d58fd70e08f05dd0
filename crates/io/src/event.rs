//! Tasks of any thread that wait for one another.

use std::future::Future;
use std::pin::Pin;
use std::sync::PoisonError;
use std::task::{Context, Poll, Waker};

use crate::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use crate::sync::{Mutex, MutexGuard, broken};

/// Something that happens again and again; tasks of any thread wait for the next time.
///
/// Who waits listens first, looks second whether it must wait at all, and awaits third. Where it looks under a
/// lock under which others change what it looks at, it may as well begin to listen under that lock, after it
/// has looked. Who changes something does that first, and tells second; that costs one load where nobody listens.
#[derive(Debug, Default)]
pub struct Event {
    listeners: AtomicUsize,
    list: Mutex<List>,
}

#[derive(Debug, Default)]
struct List {
    count: u64,
    closed: bool,
    waiting: Vec<Waker>,
}

impl Event {
    /// Wake every task that listens.
    #[inline]
    pub fn notify(&self) {
        if self.listeners.load(SeqCst) > 0 {
            self.wake_all();
        }
    }

    #[cold]
    fn wake_all(&self) {
        let waiting = {
            let mut list = self.list();
            list.count = list.count.wrapping_add(1);
            std::mem::take(&mut list.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Nobody will tell any more: whoever listens, now or later, looks again and again.
    pub fn close(&self) {
        self.list().closed = true;
        self.wake_all();
    }

    /// Listen from now on.
    pub fn listen(&self) -> Listener<'_> {
        self.listeners.fetch_add(1, SeqCst);
        let seen = (!broken("listened late")).then(|| self.list().count);
        Listener { event: self, seen, listed: None }
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Who listens: awaiting it ends with the next [`Event::notify`], be that before it is awaited.
#[must_use = "an event is waited for by awaiting this"]
pub struct Listener<'a> {
    event: &'a Event,
    /// What had happened before.
    seen: Option<u64>,
    listed: Option<Waker>,
}

impl Future for Listener<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let event = self.event;
        let mut list = event.list();
        let count = list.count;
        if list.closed {
            // Not at once: who holds the task is to see why.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if *self.seen.get_or_insert(count) != count {
            return Poll::Ready(());
        }
        if !self.listed.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            list.waiting.push(context.waker().clone());
            self.listed = Some(context.waker().clone());
        }
        Poll::Pending
    }
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        self.event.listeners.fetch_sub(1, SeqCst);
    }
}
