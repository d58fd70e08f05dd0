//! What takes time, done on other threads.

use std::sync::{Arc, Mutex, PoisonError};

use crate::Error;
use crate::running::{Event, Running, Then};
use crate::threads::{contained, spawn_working};

impl Running {
    /// Do something that takes time on another thread, and here what comes of it. The process does not end before
    /// that is done, unless storage has fallen silent (`stopping.rs`).
    pub(crate) fn in_time(
        &mut self,
        role: &str,
        work: impl FnOnce() -> Then + Send + 'static,
    ) -> Result<(), Error> {
        let events = self.events.clone();
        let thread = spawn_working(role, move || {
            let then = contained(work);
            // Somebody attends for as long as this thread is there.
            let _ = then.map(|then| events.send(Event::Do(then)));
        })?;
        self.pending.threads.retain(|(_, thread)| !thread.is_finished());
        self.pending.threads.push((role.to_owned(), thread));
        Ok(())
    }

    /// The same of something that is to stay as it is where there is no thread: then it is given back.
    pub(crate) fn in_time_with<T: Send + 'static>(
        &mut self,
        role: &str,
        what: T,
        work: impl FnOnce(T) -> Then + Send + 'static,
    ) -> Option<T> {
        let take =
            |held: &Mutex<Option<T>>| held.lock().unwrap_or_else(PoisonError::into_inner).take();
        let held = Arc::new(Mutex::new(Some(what)));
        let theirs = held.clone();
        let begun = self.in_time(role, move || match take(&theirs) {
            Some(what) => work(what),
            None => Box::new(|_| {}),
        });
        let error = begun.err()?;
        tracing::error!("{error}: nothing is done ({role})");
        take(&held)
    }
}
