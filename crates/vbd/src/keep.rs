//! The log of regions of a disk's bitmaps: stable before the first write to a region that is clean.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use ringtap_image::Error;
use ringtap_image::bitmap_store::{BitmapStore, How, Put, Staged, ToKeep};
use ringtap_io::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use ringtap_io::sync::{Mutex, MutexGuard, broken};
use ringtap_io::{Event, Io};

use crate::map::Map;

/// The bitmaps of a disk that outlive their server.
pub(crate) struct Keep {
    pub(crate) store: BitmapStore,
    /// Regions that are logged.
    logged: Map,
    log: Mutex<Log>,
    ended: Event,
    /// A region could not be logged: the guest goes on, and nothing that is kept is believed.
    broken: AtomicBool,
    /// How often the log was made stable.
    syncs: AtomicU64,
}

#[derive(Default)]
struct Log {
    wanted: BTreeSet<u64>,
    /// Whether somebody logs, or has a new whole begin.
    leading: bool,
}

/// While it lives, nobody else logs.
struct Leading<'a>(&'a Keep);

impl Drop for Leading<'_> {
    fn drop(&mut self) {
        self.0.lock().leading = false;
        if !broken("log left in silence") {
            self.0.ended.notify();
        }
    }
}

impl Keep {
    pub(crate) fn new(store: BitmapStore) -> Keep {
        Keep {
            logged: Map::new(store.region()),
            store,
            log: Mutex::default(),
            ended: Event::default(),
            broken: AtomicBool::new(false),
            syncs: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a range may be written to.
    pub(crate) fn has(&self, range: &Range<u64>) -> bool {
        self.logged.has_all(range) || self.is_broken()
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(SeqCst)
    }

    /// How often the log was made stable.
    pub(crate) fn syncs(&self) -> u64 {
        self.syncs.load(Relaxed)
    }

    /// Have the regions of a range logged. Those that others want meanwhile go with the next.
    pub(crate) async fn log(self: Arc<Keep>, io: &Io, range: Range<u64>) {
        loop {
            let ended = self.ended.listen();
            let leading = {
                let mut log = self.lock();
                let lacking = self.logged.lacking(&range);
                if lacking.is_empty() || self.is_broken() {
                    return;
                }
                log.wanted.extend(lacking);
                let free = !std::mem::replace(&mut log.leading, true);
                free.then(|| (Leading(&self), std::mem::take(&mut log.wanted)))
            };
            match leading {
                Some((_leading, wanted)) => self.log_all(io, wanted).await,
                None => ended.await,
            }
        }
    }

    async fn log_all(&self, io: &Io, wanted: BTreeSet<u64>) {
        let regions: Vec<u64> = wanted.into_iter().collect();
        self.syncs.fetch_add(1, Relaxed);
        let mark = || {
            let bytes = self.logged.granularity();
            for region in &regions {
                self.logged.mark(region * bytes..(region + 1) * bytes);
            }
        };
        if broken("logged before it is stable") {
            mark();
        }
        match self.store.log(io, &regions).await {
            Ok(()) => mark(),
            Err(error) => self.break_off(io, error).await,
        }
    }

    /// What is written is not so, and cannot be written otherwise.
    pub(crate) async fn give_up(&self, io: &Io, error: Error) {
        let _leading = self.lead().await;
        self.break_off(io, error).await;
    }

    async fn break_off(&self, io: &Io, error: Error) {
        self.broken.store(true, SeqCst);
        tracing::error!(
            "cannot write down what changes: {error}. The guest goes on; the disk's persistent bitmaps are lost"
        );
        if let Err(error) = self.store.break_off(io).await {
            tracing::error!(
                "nor can what is kept of them be taken back: {error}. Remove its file from the state folder before \
                 the machine is started anew"
            );
        }
    }

    async fn lead(&self) -> Leading<'_> {
        loop {
            let ended = self.ended.listen();
            if !std::mem::replace(&mut self.lock().leading, true) {
                return Leading(self);
            }
            ended.await;
        }
    }

    /// Find a place for the next whole. One at a time: [`crate::Disk::bitmaps_alone`].
    pub(crate) async fn stage(&self, io: &Io, bytes: u64, size: u64) -> Result<Staged, Error> {
        let _leading = self.lead().await;
        self.store.stage(io, bytes, size).await
    }

    /// This is the moment of the next whole: `moment` is called in it. What requests in flight write is marked by now.
    pub(crate) async fn switch<T>(&self, staged: &Staged, moment: impl FnOnce() -> T) -> T {
        let _leading = self.lead().await;
        self.store.switch(staged);
        if !broken("regions kept for the next whole") {
            self.logged.clear();
        }
        moment()
    }

    /// Write the whole. Where that fails, the one before stays.
    pub(crate) async fn commit(
        &self,
        io: &Io,
        staged: Staged,
        bitmaps: Vec<ToKeep>,
        how: How,
    ) -> Result<(), Error> {
        let put = self.put(io, staged, bitmaps, how).await?;
        self.present(io, put).await
    }

    /// Write the whole beside the one before, which stays.
    pub(crate) async fn put(
        &self,
        io: &Io,
        staged: Staged,
        bitmaps: Vec<ToKeep>,
        how: How,
    ) -> Result<Put, Error> {
        if self.is_broken() {
            return Err(Error::Os(libc::EIO));
        }
        let put = self.store.put(io, staged, bitmaps, how).await;
        if put.is_err() {
            self.forget().await;
        }
        put
    }

    /// What was put takes the place of the one before. Where that fails, neither is believed any more.
    pub(crate) async fn present(&self, io: &Io, put: Put) -> Result<(), Error> {
        // A log that breaks off takes all back: nothing is to be presented after that.
        let _leading = self.lead().await;
        if self.is_broken() {
            return Err(Error::Os(libc::EIO));
        }
        let end = self.store.present(io, put).await;
        if let Err(error) = end {
            self.break_off(io, error).await;
        }
        end
    }

    /// The next whole is not to be.
    async fn forget(&self) {
        let _leading = self.lead().await;
        self.store.forget();
    }
}
