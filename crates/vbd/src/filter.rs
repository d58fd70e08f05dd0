//! What changes of a disk pass through on their way to the image, while a job wants them to.

use std::sync::{Arc, PoisonError};

use ringtap_image::Error;
use ringtap_io::Io;
use ringtap_io::sync::{Mutex, MutexGuard};

use crate::Request;
use crate::door::Door;
use crate::level::Pass;

/// A future of a filter.
pub(crate) type Filtered<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + 'a>>;

/// Carries out requests that change the disk in a way of its own, from beginning to end.
pub(crate) trait AlsoWrite: Send + Sync {
    /// Carry out one whose range lies in the disk, which may be written to. It marks in trackers what it has changed.
    fn also_write<'a>(
        &'a self,
        io: &'a Io,
        pass: Pass<'a>,
        request: &'a Request,
    ) -> Filtered<'a, Result<(), Error>>;
}

/// Looks at what the disk holds before a request changes it.
pub(crate) trait BeforeWrite: Send + Sync {
    /// The range is about to be changed, once this has ended; where it gives an error it is not, and the request ends so.
    fn before_write<'a>(
        &'a self,
        io: &'a Io,
        pass: Pass<'a>,
        range: std::ops::Range<u64>,
    ) -> Filtered<'a, Result<(), Error>>;
}

/// The filters of a disk. The door tells requests that there are some: none costs nothing.
#[derive(Default)]
pub(crate) struct Filters {
    all: Mutex<All>,
}

#[derive(Default)]
struct All {
    before: Vec<Arc<dyn BeforeWrite>>,
    also: Option<Arc<dyn AlsoWrite>>,
}

impl All {
    fn tell(&self, door: &Door) {
        door.filter(self.also.is_some() || !self.before.is_empty());
    }
}

impl Filters {
    fn lock(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn also(&self) -> Option<Arc<dyn AlsoWrite>> {
        self.lock().also.clone()
    }

    /// Have requests that begin from now on pass this; false where there is another.
    pub(crate) fn install_also(&self, door: &Door, filter: Arc<dyn AlsoWrite>) -> bool {
        let mut all = self.lock();
        let free = all.also.is_none();
        if free {
            all.also = Some(filter);
            all.tell(door);
        }
        free
    }

    /// Have them pass it no more.
    pub(crate) fn remove_also(&self, door: &Door) {
        let mut all = self.lock();
        all.also = None;
        all.tell(door);
        drop(all);
        door.filter_has_gone();
    }

    /// Have requests that begin from now on wait for this before they change anything.
    pub(crate) fn install_before(&self, door: &Door, filter: Arc<dyn BeforeWrite>) {
        let mut all = self.lock();
        all.before.push(filter);
        all.tell(door);
    }

    /// Have them wait for it no more.
    pub(crate) fn remove_before(&self, door: &Door, filter: &Arc<dyn BeforeWrite>) {
        let mut all = self.lock();
        let before = all.before.len();
        all.before.retain(|other| !Arc::ptr_eq(other, filter));
        let went = all.before.len() < before;
        all.tell(door);
        drop(all);
        if went {
            door.filter_has_gone();
        }
    }

    /// Wait for those that are to be waited for before a range is changed.
    pub(crate) async fn before_write(
        &self,
        io: &Io,
        pass: Pass<'_>,
        range: std::ops::Range<u64>,
    ) -> Result<(), Error> {
        let before = self.lock().before.clone();
        for filter in before {
            filter.before_write(io, pass, range.clone()).await?;
        }
        Ok(())
    }
}
