//! Chunks on their way: each is asked for once, whoever waits for it, and again where that fails.
//!
//! What guests wait for fails when the operator's patience is at its end. What nobody waits for yet (of a boot list, ahead
//! of who reads, to fill the cache) is tried until the server is there again, and says nothing of whether guests' reads fail.

use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, LazyLock, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tracing::{debug, error, info, warn};

use crate::cache::{Cache, SOON};
use crate::session::Read;
use crate::source::Failure;
use crate::{CHUNK, Object, WIDE};

/// Between two attempts: at first, and at most.
pub(crate) const PAUSE: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(5);
/// What the last attempt has, which begins when a guest's patience is at its end.
const LAST: Duration = Duration::from_secs(1);

/// A chunk's bytes, or a positive errno.
type Outcome = Result<Bytes, i32>;

/// Since when a guest waits.
type Wanted = Option<Instant>;

/// A chunk of zeros.
static ZEROS: LazyLock<Bytes> = LazyLock::new(|| vec![0; CHUNK as usize].into());

/// One that is on its way.
#[derive(Clone)]
pub(crate) struct Flight {
    outcome: watch::Receiver<Option<Outcome>>,
    wanted: Arc<watch::Sender<Wanted>>,
}

impl Flight {
    pub(crate) async fn end(mut self) -> Outcome {
        match self.outcome.wait_for(|outcome| outcome.is_some()).await {
            Ok(outcome) => outcome.clone().unwrap_or(Err(libc::EIO)),
            // Its task has panicked.
            Err(_) => Err(libc::EIO),
        }
    }

    /// A guest waits for it, from now on if none did.
    fn want(&self) {
        self.wanted.send_if_modified(|since| {
            let first = since.is_none();
            since.get_or_insert_with(Instant::now);
            first
        });
    }
}

impl Object {
    /// The bytes of a range, where all are here.
    pub(crate) fn at_hand(&self, offset: u64, len: u64) -> Option<Vec<Bytes>> {
        let pieces = self.numbers(offset, len).map(|number| {
            let bytes = self.in_memory(number)?;
            Some(piece(&bytes, number, offset, len))
        });
        pieces.collect()
    }

    /// The bytes of one that needs neither a server nor a disk.
    fn in_memory(&self, number: u32) -> Option<Bytes> {
        match self.index.as_ref().is_some_and(|index| index.is_zero(number)) {
            true => Some(ZEROS.slice(..self.len_of(number))),
            false => self.memory.get(number),
        }
    }

    fn len_of(&self, number: u32) -> usize {
        CHUNK.min(self.size - u64::from(number) * CHUNK) as usize
    }

    /// Those that a range lies in.
    pub(crate) fn numbers(&self, offset: u64, len: u64) -> Range<u32> {
        (offset / CHUNK) as u32..(offset + len).div_ceil(CHUNK) as u32
    }

    /// Bring what is to be read.
    pub(crate) fn read(self: &Arc<Self>, read: Arc<Read>) {
        let (object, numbers) = (self.clone(), self.numbers(read.offset, read.len));
        // All are asked for before anything else is.
        let flights: Vec<Flight> =
            numbers.clone().map(|number| self.fly(number, true, ())).collect();
        self.runtime.spawn(async move {
            let end = object.ahead.read(numbers.clone());
            object.fetch_ahead(end);
            let mut pieces = vec![];
            for (flight, number) in flights.into_iter().zip(numbers) {
                match flight.end().await {
                    Ok(bytes) => pieces.push(piece(&bytes, number, read.offset, read.len)),
                    Err(errno) => return read.end(Err(errno)),
                }
            }
            read.end(Ok(pieces));
        });
    }

    /// Fetch those of a boot list, in their order, and then, where that is wanted, all others.
    pub(crate) fn fetch_first(self: &Arc<Self>, list: Vec<u32>, all: bool) {
        if list.is_empty() && !all {
            return;
        }
        let object = self.clone();
        self.runtime.spawn(async move {
            object.fetch_list(list).await;
            if all {
                object.fetch_all().await;
            }
        });
    }

    async fn fetch_list(self: &Arc<Self>, list: Vec<u32>) {
        let begun = Instant::now();
        let mut fetched = 0;
        for number in list {
            if self.is_here(number) {
                continue;
            }
            let Ok(permit) = self.wide.clone().acquire_owned().await else { return };
            if self.is_over() {
                return;
            }
            self.fetch(number, permit);
            fetched += 1;
        }
        let all = self.wide.acquire_many(WIDE as u32).await;
        debug!("{}: {fetched} chunks of the boot list in {:?}", self.uri, begun.elapsed());
        drop(all);
    }

    /// The rest of the object, in its order, and half as wide, so that guests wait less.
    async fn fetch_all(self: &Arc<Self>) {
        let behind = Arc::new(Semaphore::new(WIDE / 2));
        for number in 0..self.count() {
            if self.is_here(number) {
                continue;
            }
            let Ok(permit) = behind.clone().acquire_owned().await else { return };
            // What cannot be kept is not to be fetched for nothing.
            if self.is_over() || self.cache.as_ref().is_none_or(Cache::is_full) {
                return;
            }
            self.fetch(number, permit);
        }
        let _ends = behind.acquire_many(WIDE as u32 / 2).await;
        if (0..self.count()).all(|number| self.is_here(number)) {
            info!("{}: all of it is in the cache", self.uri);
        }
    }

    fn is_here(&self, number: u32) -> bool {
        match &self.cache {
            Some(cache) => cache.has(number) || cache.look_again(number),
            None => self.in_memory(number).is_some(),
        }
    }

    /// Bring what nobody waits for, as long as that takes: so long is the permit held, so that nothing else is asked of a
    /// server that is away.
    pub(crate) fn fetch(self: &Arc<Self>, number: u32, permit: OwnedSemaphorePermit) {
        let (object, permit) = (self.clone(), Arc::new(permit));
        let mut flight = self.fly(number, false, permit.clone());
        self.runtime.spawn(async move {
            while flight.end().await.is_err() {
                // A guest has come to wait for it, and given up. What fails for good is not tried again, and what comes
                // behind it waits as long.
                let away = object.given_up.load(SeqCst);
                object.pause(LONGEST).await;
                if !away || object.is_over() {
                    break;
                }
                flight = object.fly(number, false, permit.clone());
            }
        });
    }

    /// Whether nothing will come any more.
    fn is_over(&self) -> bool {
        self.closed.load(SeqCst) || self.replaced.load(SeqCst)
    }

    /// Wait for that long, or until it is closed.
    async fn pause(&self, time: Duration) {
        let closing = self.closing.notified();
        // Whoever closes it from now on tells us.
        if self.closed.load(SeqCst) {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(time) => {}
            () = closing => {}
        }
    }

    /// Fetch those, as far as that does not make many requests at a time.
    fn fetch_ahead(self: &Arc<Self>, numbers: Range<u32>) {
        for number in numbers.start..numbers.end.min(self.count()) {
            let Ok(permit) = self.wide.clone().try_acquire_owned() else { return };
            if !self.is_here(number) {
                self.fetch(number, permit);
            }
        }
    }

    fn count(&self) -> u32 {
        self.size.div_ceil(CHUNK) as u32
    }

    /// The flight of a chunk, begun where there is none: whether a guest waits for it. `held` is let go of at its end.
    pub(crate) fn fly(
        self: &Arc<Self>,
        number: u32,
        guest: bool,
        held: impl Send + 'static,
    ) -> Flight {
        let mut flights = self.flights();
        let on_its_way = |flight: &&Flight| flight.outcome.has_changed().is_ok();
        if let Some(flight) = flights.get(&number).filter(on_its_way) {
            if guest {
                flight.want();
            }
            return flight.clone();
        }
        let (tell, outcome) = watch::channel(None);
        let (wanted, hear) = watch::channel(guest.then(Instant::now));
        let flight = Flight { outcome, wanted: Arc::new(wanted) };
        if let Some(bytes) = self.in_memory(number) {
            tell.send_replace(Some(Ok(bytes)));
            return flight;
        }
        flights.insert(number, flight.clone());
        drop(flights);
        let object = self.clone();
        self.runtime.spawn(async move {
            let kept = object.kept(number).await;
            let outcome = match &kept {
                Some(bytes) => Ok(bytes.clone()),
                None => object.bring(number, hear).await,
            };
            if let Ok(bytes) = &outcome {
                object.memory.put(number, bytes.clone());
            }
            // Whoever comes now finds it there.
            object.flights().remove(&number);
            tell.send_replace(Some(outcome.clone()));
            if let Ok(bytes) = outcome {
                object.keep(number, bytes, kept.is_some()).await;
            }
            drop(held);
        });
        flight
    }

    /// The bytes of a chunk that the local cache has.
    async fn kept(self: &Arc<Self>, number: u32) -> Option<Bytes> {
        let cache = self.cache.as_ref()?;
        if !cache.has(number) && !cache.look_again(number) {
            return None;
        }
        let object = self.clone();
        let len = self.len_of(number);
        let read = move || {
            let cache = object.cache.as_ref()?;
            let failed = |error: &std::io::Error| {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                cache.lose(number..number + 1, errno);
            };
            cache.read(number, len).inspect_err(failed).ok()
        };
        let bytes = self.runtime.spawn_blocking(read).await.ok()??;
        Some(bytes.into())
    }

    /// Have the local cache keep a chunk, where there is one and it does not have it.
    async fn keep(self: &Arc<Self>, number: u32, bytes: Bytes, kept: bool) {
        if self.cache.is_none() {
            return;
        }
        let object = self.clone();
        let store = move || {
            let Some(cache) = &object.cache else { return };
            if kept || cache.store(number, &bytes) {
                object.memory.forget(number);
            }
        };
        let _ = self.runtime.spawn_blocking(store).await;
        if !kept && !self.settles.swap(true, SeqCst) {
            let object = self.clone();
            self.runtime.spawn(async move {
                tokio::time::sleep(SOON).await;
                object.settles.store(false, SeqCst);
                let settle = move || object.cache.as_ref().map(Cache::settle);
                let _ = tokio::task::spawn_blocking(settle).await;
            });
        }
    }

    /// The local cache's disk has failed at those.
    pub(crate) fn cannot_read_here(self: &Arc<Self>, numbers: Range<u32>, errno: i32) {
        let Some(cache) = &self.cache else { return };
        cache.lose(numbers, errno);
        let object = self.clone();
        self.runtime.spawn_blocking(move || object.cache.as_ref().map(Cache::settle));
    }

    fn flights(&self) -> MutexGuard<'_, std::collections::HashMap<u32, Flight>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A chunk's bytes from the server, tried again for as long as the operator said, or until a guest wants them.
    async fn bring(&self, number: u32, mut wanted: watch::Receiver<Wanted>) -> Outcome {
        let start = u64::from(number) * CHUNK;
        let mut pause = PAUSE;
        loop {
            if self.is_over() {
                return Err(libc::EIO);
            }
            let failure = match self.attempt(number, &mut wanted).await {
                Ok(bytes) => return self.arrived(number, bytes),
                Err(failure) => failure,
            };
            let why = failure.text();
            let after = match failure {
                Failure::Passing { after, .. } => after,
                Failure::Denied(_) | Failure::Untrusted(_) => None,
                Failure::Replaced | Failure::Missing | Failure::Lasting(_) => {
                    let replaced = failure == Failure::Replaced;
                    if !replaced || !self.replaced.swap(true, SeqCst) {
                        error!("{}: cannot read at {start}: {why}", self.uri);
                    }
                    return Err(libc::EIO);
                }
            };
            let since = *wanted.borrow_and_update();
            let given_up = self.given_up.load(SeqCst);
            let patience = self.uri.reconnect.filter(|_| !given_up).unwrap_or_default();
            let left = match since {
                Some(since) => patience.saturating_sub(since.elapsed()),
                None => Duration::MAX,
            };
            if left.is_zero() {
                if !self.given_up.swap(true, SeqCst) {
                    error!("{}: {why}: reads fail until the server answers again", self.uri);
                }
                return Err(libc::EIO);
            }
            match (pause, since) {
                (PAUSE, Some(_)) => {
                    warn!("{}: {why}: tried again for {} s", self.uri, patience.as_secs());
                }
                (PAUSE, None) => info!("{}: {why}: fetched once the server answers", self.uri),
                _ => debug!("{}: {why}", self.uri),
            }
            // Not all at once: they failed at once. A server may say that it is not to be waited for at all.
            let spread = pause.mul_f64(0.5 + f64::from(number % 16) / 32.0);
            let wait = after.map_or(spread, |it| it.max(spread)).min(left);
            pause = (pause * 2).min(LONGEST);
            tokio::select! {
                () = self.pause(wait) => {}
                // Now a guest waits for it: at once, and then as often as for any other.
                Ok(()) = wanted.changed() => pause = PAUSE,
            }
        }
    }

    /// One request for a chunk: none takes longer than a guest that wants it is to wait.
    async fn attempt(
        &self,
        number: u32,
        wanted: &mut watch::Receiver<Wanted>,
    ) -> Result<Vec<u8>, Failure> {
        let start = u64::from(number) * CHUNK;
        let range = start..start + self.len_of(number) as u64;
        let mut get = std::pin::pin!(self.source.get(range, self.etag.as_deref()));
        // Where it is tried once that takes as long as it takes.
        let patience = self.uri.reconnect.filter(|it| !it.is_zero());
        loop {
            let since = *wanted.borrow_and_update();
            let left = match (since, patience) {
                (Some(since), Some(patience)) => patience.saturating_sub(since.elapsed()).max(LAST),
                _ => Duration::MAX,
            };
            tokio::select! {
                end = &mut get => return end,
                () = tokio::time::sleep(left) => {
                    let why = "the answer takes longer than reads are to wait".to_owned();
                    return Err(Failure::passing(why));
                }
                Ok(()) = wanted.changed() => {}
            }
        }
    }

    fn arrived(&self, number: u32, bytes: Vec<u8>) -> Outcome {
        if self.given_up.swap(false, SeqCst) {
            info!("{}: the server answers again", self.uri);
        }
        if self.index.as_ref().is_some_and(|index| !index.matches(number, &bytes)) {
            let start = u64::from(number) * CHUNK;
            error!("{}: the {} bytes at {start} are not those of its index", self.uri, bytes.len());
            return Err(libc::EIO);
        }
        Ok(bytes.into())
    }
}

/// What of a chunk is in the range.
fn piece(bytes: &Bytes, number: u32, offset: u64, len: u64) -> Bytes {
    let start = u64::from(number) * CHUNK;
    let from = offset.saturating_sub(start).min(bytes.len() as u64) as usize;
    let to = (offset + len).saturating_sub(start).min(bytes.len() as u64) as usize;
    bytes.slice(from..to)
}
