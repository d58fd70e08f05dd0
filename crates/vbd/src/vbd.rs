//! The device and its one door.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use ringtap_image::qcow2::BitmapSet;
use ringtap_image::{CacheMode, Discard, Error, Extent, Image, Info, Status, UnderWay};
use ringtap_io::{Io, Mem, Panic};
use tracing::Span;

use crate::failures::{Failures, Refusal};
use crate::gate::{Gate, Writers};
use crate::health::{Health, Listening};
use crate::hold::Hold;
use crate::name::Name;
use crate::stats::{QueueStats, Stats};
use crate::transfer::Place;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Fill `mem` from the disk.
    Read,
    /// Write `mem` to the disk.
    Write,
    /// Make every write acknowledged before stable.
    Flush,
    /// The range is not needed any more.
    Discard,
    /// The range must read as zeros.
    WriteZeroes {
        /// Whether its space may be freed.
        unmap: bool,
        /// Fail with [`Error::Unsupported`] rather than write zeros.
        fast: bool,
    },
}

/// One request of a guest or client.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// What it asks for.
    pub kind: Kind,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How many bytes; for reads and writes the length of `mem`.
    pub len: u64,
    /// The guest's memory.
    pub mem: Mem,
    /// Whether what it writes must be stable when it is acknowledged.
    pub fua: bool,
}

/// After the first what was freed is not referred to any more, after the others nobody can be looking at it.
const FLUSHES_TO_REUSE: usize = 3;

pub(crate) struct Shared {
    info: Info,
    cache: CacheMode,
    size: AtomicU64,
    growing: Mutex<()>,
    /// Those who want writes to be stable when they are answered: the operator, and each [`WriteThrough`].
    writethrough: AtomicUsize,
    pub(crate) gate: Arc<Gate>,
    health: Arc<Health>,
    /// Wakes who waits for a request that may never end, when the disk is stopped.
    _abandoned: Listening,
    pub(crate) stats: Mutex<Vec<Arc<QueueStats>>>,
    name: Name,
    failures: Failures,
    hold: Hold,
}

/// Says of one wire of a device whether its writes must be stable when they are answered, because who uses it
/// cannot or will not flush. As long as one wants it so they are, for all.
pub struct WriteThrough {
    shared: Arc<Shared>,
    wanted: bool,
}

impl WriteThrough {
    /// Whether it is wanted from now on.
    pub fn set(&mut self, wanted: bool) {
        match (std::mem::replace(&mut self.wanted, wanted), wanted) {
            (false, true) => _ = self.shared.writethrough.fetch_add(1, Relaxed),
            (true, false) => _ = self.shared.writethrough.fetch_sub(1, Relaxed),
            _ => {}
        }
    }
}

impl Drop for WriteThrough {
    fn drop(&mut self) {
        self.set(false);
    }
}

/// A virtual block device, as one queue thread uses it. [`Vbd::fork`] makes another of the same
/// device for another thread.
pub struct Vbd {
    pub(crate) image: Box<dyn Image>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) writers: Arc<Writers>,
    under_way: Option<Arc<UnderWay>>,
    bitmaps: Option<Arc<BitmapSet>>,
    health: Arc<Health>,
    pub(crate) stats: Arc<QueueStats>,
}

impl Vbd {
    /// A device on an image.
    pub fn new(image: Box<dyn Image>, cache: CacheMode) -> Vbd {
        let info = image.info().clone();
        Vbd::showing(image, cache, info)
    }

    /// A device that shows its guest sectors of so many bytes, whatever size suits the image.
    pub fn with_logical_block_size(image: Box<dyn Image>, cache: CacheMode, bytes: u32) -> Vbd {
        let own = image.info();
        let physical_block_size = own.physical_block_size.max(bytes);
        let info = Info { logical_block_size: bytes, physical_block_size, ..own.clone() };
        Vbd::showing(image, cache, info)
    }

    fn showing(image: Box<dyn Image>, cache: CacheMode, info: Info) -> Vbd {
        let (gate, health) = (Arc::<Gate>::default(), Arc::<Health>::default());
        let (theirs, waited_at) = (image.fork(), gate.clone());
        let abandoned = health.when_failed(move |_| {
            theirs.abandon();
            waited_at.abandon();
        });
        let shared = Arc::new(Shared {
            cache,
            size: AtomicU64::new(info.size),
            info,
            growing: Mutex::default(),
            writethrough: AtomicUsize::new(cache.writethrough().into()),
            gate,
            health,
            _abandoned: abandoned,
            stats: Mutex::default(),
            name: Name::default(),
            failures: Failures::new(Span::none()),
            hold: Hold::default(),
        });
        Vbd::with(image, shared)
    }

    /// The same with a name for the log, and a shorter one for its threads. Before it is forked.
    pub fn named(mut self, name: &str, label: &str) -> Vbd {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.name = Name::new(name, label);
            shared.failures = Failures::new(shared.name.span.clone());
        }
        self
    }

    /// The same with each answer held back for so many percent of the time that it took: a device that is known to be slower.
    /// Before it is forked.
    pub fn held_back(mut self, percent: u32) -> Vbd {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.hold = Hold::new(percent);
        }
        self
    }

    /// What a thread that serves the device logs within, entered once.
    pub fn span(&self) -> &Span {
        &self.shared.name.span
    }

    /// The name of a thread that serves the device: 15 bytes, of the device and of what it does.
    pub fn thread_name(&self, role: &str) -> String {
        self.shared.name.of_thread(role)
    }

    /// Tell the log of a request that failed without having been served by this device.
    pub fn tell_of_failure(&self, operation: &'static str, offset: u64, length: u64, end: Error) {
        self.shared.failures.tell_of(operation, offset, length, end);
    }

    /// Tell the log of a request that was refused before it came to this device.
    #[cold]
    pub fn tell_of_refusal(&self, refusal: &Refusal) {
        self.shared.failures.tell_of_refusal(refusal);
    }

    /// The same device for another queue thread. A panic on the way stops the device, and goes on to the caller.
    pub fn fork(&self) -> Vbd {
        let image = Panic::catch(|| self.image.fork()).unwrap_or_else(|panic| {
            self.health.fail(panic.clone());
            panic.pass_on()
        });
        Vbd::with(image, self.shared.clone())
    }

    fn with(image: Box<dyn Image>, shared: Arc<Shared>) -> Vbd {
        let (writers, stats) = (shared.gate.add_writers(), shared.add_stats());
        let under_way = image.grace().map(|grace| grace.add_thread());
        let bitmaps = image.bitmaps().cloned();
        let health = shared.health.clone();
        Vbd { image, shared, writers, under_way, bitmaps, health, stats }
    }

    /// Whether the device can still be served; all its forks have one.
    pub fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// The facts of the image, as they are shown. Its `size` is that at opening; see [`Vbd::size`].
    pub fn info(&self) -> &Info {
        &self.shared.info
    }

    /// Bytes the guest sees now.
    pub fn size(&self) -> u64 {
        self.shared.size.load(Relaxed)
    }

    /// Look again how large the image is; true if that changed.
    pub fn reload_size(&self) -> Result<bool, Error> {
        // Who makes it larger meanwhile is not to be undone.
        let _alone = self.shared.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let size = self.health.contain(|| self.image.current_size())??;
        Ok(self.shared.size.swap(size, Relaxed) != size)
    }

    /// The image's dirty bitmaps.
    pub fn bitmaps(&self) -> Option<&Arc<BitmapSet>> {
        self.bitmaps.as_ref()
    }

    /// Make the disk large enough for `end` bytes, where its image can grow. Others learn of that when
    /// they look.
    pub fn grow(&self, end: u64) -> Result<(), Error> {
        let end = end.checked_next_multiple_of(512).ok_or(Error::Range)?;
        let _alone = self.shared.growing.lock().unwrap_or_else(PoisonError::into_inner);
        if end >= self.size() {
            self.health.contain(|| self.image.grow(end))??;
            self.shared.size.store(end, Relaxed);
        }
        Ok(())
    }

    /// Host caching, as the operator chose.
    pub fn cache(&self) -> CacheMode {
        self.shared.cache
    }

    /// Whether acknowledged writes may still be volatile, so that the guest has to flush.
    pub fn write_cache(&self) -> bool {
        self.shared.writethrough.load(Relaxed) == 0
    }

    /// A voice in that for one of those who serve the device; it wants nothing yet.
    pub fn write_through(&self) -> WriteThrough {
        WriteThrough { shared: self.shared.clone(), wanted: false }
    }

    /// What has been served so far, all queues together.
    pub fn stats(&self) -> Stats {
        let all = self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner);
        Stats::sum(all.iter().map(|queue| &**queue))
    }

    /// How many requests that may have changed the disk have ended. It moves before any of them is
    /// answered.
    pub fn changes(&self) -> u64 {
        let all = self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().map(|queue| queue.changes()).sum()
    }

    /// Count CPU time of the calling thread as this device's, up to now.
    pub fn account_cpu_time(&self) {
        self.stats.set_cpu_time();
    }

    /// Serve one request to its end. A panic on the way stops the device, and the request fails.
    #[inline]
    pub async fn serve(&self, io: &Io, request: Request) -> Result<(), Error> {
        let began = io.now();
        let place = self.stats.in_flight.begin(&request, began);
        let mut work = pin!(self.attempt(io, &request));
        let end = poll_fn(|context| self.health.contain_poll(|| work.as_mut().poll(context))).await;
        if self.shared.hold.holds() {
            self.shared.hold.back(io, io.now().saturating_sub(began)).await;
        }
        self.stats.in_flight.end(place);
        self.stats.record(&request, io.now().saturating_sub(began), end.is_ok());
        if let Err(error) = end {
            self.shared.failures.tell(&request, error);
        }
        end
    }

    #[inline]
    async fn attempt(&self, io: &Io, request: &Request) -> Result<(), Error> {
        let under_way = self.under_way.as_ref().map(|thread| thread.enter());
        let end = self.carry_out(io, request).await;
        if end == Err(Error::Full) && under_way.is_some() {
            drop(under_way);
            return self.carry_out_in_freed_room(io, request).await;
        }
        end
    }

    /// Begin again a request that found no room. What was freed lately rests until flushes have come, and
    /// nobody is under way who may have looked at it: this very request was.
    async fn carry_out_in_freed_room(&self, io: &Io, request: &Request) -> Result<(), Error> {
        for _ in 0..FLUSHES_TO_REUSE {
            self.image.flush(io).await.map_err(|_| Error::Full)?;
            if let Some(grace) = self.image.grace() {
                grace.over(grace.epoch()).await;
            }
        }
        let _under_way = self.under_way.as_ref().map(|thread| thread.enter());
        self.carry_out(io, request).await
    }

    #[inline]
    async fn carry_out(&self, io: &Io, request: &Request) -> Result<(), Error> {
        let Request { kind, offset, len, mem, .. } = *request;
        let end = offset.checked_add(len).ok_or(Error::Range)?;
        if end > self.size() {
            return Err(Error::Range);
        }
        match kind {
            Kind::Read => self.read(io, offset, mem).await,
            Kind::Flush => self.flush_now(io).await,
            _ if self.info().read_only => Err(Error::ReadOnly),
            Kind::Write => {
                self.note(offset, len);
                self.write(io, offset, mem, self.durable(request)).await
            }
            Kind::Discard => {
                self.note(offset, len);
                self.discard(io, offset, len, Discard::Free, self.durable(request)).await
            }
            Kind::WriteZeroes { unmap, fast } => {
                self.note(offset, len);
                self.write_zeroes(io, offset, len, unmap, fast, self.durable(request)).await
            }
        }
    }

    /// Note in bitmaps what is about to change: before anything does, for the server may be killed in
    /// the middle of it.
    #[inline]
    fn note(&self, offset: u64, len: u64) {
        if let Some(bitmaps) = &self.bitmaps {
            bitmaps.note(offset, len);
        }
    }

    /// Whether a read or write needs nobody to look at its bytes: they lie in one piece of a file as
    /// they are, and the file takes them so. Only then, and only while nothing else changes where
    /// they lie, can it be served with memory of the kernel's (`Mem::of_kernel`); otherwise that
    /// fails with [`Error::Unsupported`] and nothing has been acknowledged.
    #[inline]
    pub fn moves_untouched(&self, kind: Kind, offset: u64, len: u64) -> bool {
        let write = kind == Kind::Write;
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.size());
        if !inside || !(write || kind == Kind::Read) {
            return false;
        }
        let extent = self.health.contain(|| self.image.map(offset, len));
        let Ok(Extent::Data { file, offset, len: there, writable, cipher }) = extent else {
            return false;
        };
        let place = Place { file, offset, cipher };
        let whole = there >= len && (writable || !write);
        whole && self.direct(&place, &Mem::of_kernel(0, len as usize))
    }

    /// Whether a read can be answered with the page cache's own pages, which the client looks at later:
    /// as [`Vbd::moves_untouched`], of an image whose clusters never come to hold something else.
    pub fn lends_pages(&self, offset: u64, len: u64) -> bool {
        let stays = self.under_way.is_none() && !self.shared.cache.direct();
        stays && self.moves_untouched(Kind::Read, offset, len)
    }

    fn durable(&self, request: &Request) -> bool {
        let wanted = request.fua || !self.write_cache();
        wanted && self.shared.cache.flushes()
    }

    /// Make every write acknowledged before stable.
    pub async fn flush(&self, io: &Io) -> Result<(), Error> {
        self.health.contain_all(self.flush_now(io)).await
    }

    async fn flush_now(&self, io: &Io) -> Result<(), Error> {
        if self.shared.cache.flushes() && !self.info().read_only {
            self.image.flush(io).await?;
        }
        Ok(())
    }

    /// Write clusters compressed, as [`Image::compress`] says.
    pub async fn compress(&self, io: &Io, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let end = offset.checked_add(bytes.len() as u64).ok_or(Error::Range)?;
        if end > self.size() {
            return Err(Error::Range);
        }
        let _under_way = self.under_way.as_ref().map(|thread| thread.enter());
        self.note(offset, bytes.len() as u64);
        self.health.contain_all(async { self.image.compress(io, offset, bytes).await }).await
    }

    /// What the range from `offset` holds, for block status.
    pub async fn status(&self, io: &Io, offset: u64, len: u64) -> Result<Status, Error> {
        let end = offset.checked_add(len).ok_or(Error::Range)?;
        if len == 0 || end > self.size() {
            return Err(Error::Range);
        }
        let _under_way = self.under_way.as_ref().map(|thread| thread.enter());
        self.health.contain_all(async { self.image.status(io, offset, len).await }).await
    }

    /// Leave the image as other programs expect it. After the last request, on one queue thread.
    pub async fn close(&self, io: &Io) -> Result<(), Error> {
        if self.info().read_only {
            return Ok(());
        }
        self.health.contain_all(async { self.image.close(io).await }).await
    }
}

impl Shared {
    fn add_stats(&self) -> Arc<QueueStats> {
        let stats = Arc::new(QueueStats::default());
        let mut all = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        // Queues come and go with their clients; what the gone ones counted is kept in one.
        QueueStats::fold_ended(&mut all);
        all.push(stats.clone());
        stats
    }
}
