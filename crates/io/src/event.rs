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
    /// By number, which only rises.
    waiting: Vec<(u64, Waker)>,
    next: u64,
}

impl List {
    /// Who waits by this number no more.
    fn take(&mut self, number: u64) -> Option<Waker> {
        let place = self.waiting.binary_search_by_key(&number, |(number, _)| *number).ok()?;
        Some(self.waiting.remove(place).1)
    }
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
        waiting.into_iter().for_each(|(_, waker)| waker.wake());
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
    listed: Option<(u64, Waker)>,
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
            // Whoever told has taken it off the list.
            self.listed = None;
            return Poll::Ready(());
        }
        if !self.listed.as_ref().is_some_and(|(_, waker)| waker.will_wake(context.waker())) {
            let before = self.listed.take().and_then(|(number, _)| list.take(number));
            let number = list.next;
            list.next += 1;
            list.waiting.push((number, context.waker().clone()));
            self.listed = Some((number, context.waker().clone()));
            drop(list);
            drop(before);
        }
        Poll::Pending
    }
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        self.event.listeners.fetch_sub(1, SeqCst);
        // Who listens no more is not to be woken, and its waker keeps a ring and its descriptors.
        if let Some((number, _)) = &self.listed {
            let waker = self.event.list().take(*number);
            drop(waker);
        }
    }
}
