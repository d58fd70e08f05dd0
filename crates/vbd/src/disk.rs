//! The device as all share it who serve it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ringtap_image::qcow2::BitmapSet;
use ringtap_image::{CacheMode, Error, Grace, Image, Info};
use ringtap_io::{Io, Panic};
use tracing::Span;

use crate::Vbd;
use crate::door::Door;
use crate::failures::{Failures, Refusal};
use crate::gate::Gate;
use crate::health::{Health, Listening};
use crate::hold::Hold;
use crate::level::Level;
use crate::name::Name;
use crate::stats::{QueueStats, Stats};

/// The image that a disk is at present; whoever serves it has a fork.
pub(crate) struct Current {
    pub(crate) image: Box<dyn Image>,
    /// Its epochs, or those of the requests to it where it has none.
    pub(crate) grace: Arc<Grace>,
}

impl Current {
    pub(crate) fn new(image: Box<dyn Image>) -> Current {
        let grace = image.grace().cloned().unwrap_or_default();
        Current { image, grace }
    }

    fn abandon(&self) {
        self.image.abandon();
        self.grace.abandon();
    }
}

pub(crate) struct Shared {
    pub(crate) info: Info,
    pub(crate) cache: CacheMode,
    pub(crate) size: AtomicU64,
    pub(crate) growing: Mutex<()>,
    /// Those who want writes to be stable when they are answered: the operator, and each [`WriteThrough`].
    writethrough: AtomicUsize,
    pub(crate) current: Arc<Mutex<Current>>,
    pub(crate) door: Arc<Door>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) health: Arc<Health>,
    /// Wakes who waits for a request that may never end, when the disk is stopped.
    _abandoned: Listening,
    pub(crate) stats: Mutex<Vec<Arc<QueueStats>>>,
    name: Name,
    pub(crate) failures: Failures,
    pub(crate) hold: Hold,
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

/// A virtual block device: its facts, and what all its queues share. Cheap to clone; a queue thread serves it
/// by a [`Vbd`] of its own, from [`Disk::fork`].
#[derive(Clone)]
pub struct Disk {
    pub(crate) shared: Arc<Shared>,
}

/// Knows a disk, and keeps nothing of it open.
#[derive(Clone)]
pub struct WeakDisk(Weak<Shared>);

impl WeakDisk {
    /// The disk, while somebody serves it.
    pub fn upgrade(&self) -> Option<Disk> {
        self.0.upgrade().map(|shared| Disk { shared })
    }
}

impl From<Vbd> for Disk {
    fn from(vbd: Vbd) -> Disk {
        vbd.disk().clone()
    }
}

impl Disk {
    pub(crate) fn showing(image: Box<dyn Image>, cache: CacheMode, info: Info) -> Disk {
        let (gate, health, door) =
            (Arc::<Gate>::default(), Arc::<Health>::default(), Arc::<Door>::default());
        let current = Arc::new(Mutex::new(Current::new(image)));
        let waited_at = (current.clone(), gate.clone(), door.clone());
        let abandoned = health.when_failed(move |_| {
            let (current, gate, door) = &waited_at;
            lock(current).abandon();
            gate.abandon();
            door.abandon();
        });
        let shared = Arc::new(Shared {
            cache,
            size: AtomicU64::new(info.size),
            info,
            growing: Mutex::default(),
            writethrough: AtomicUsize::new(cache.writethrough().into()),
            current,
            door,
            gate,
            health,
            _abandoned: abandoned,
            stats: Mutex::default(),
            name: Name::default(),
            failures: Failures::new(Span::none()),
            hold: Hold::default(),
        });
        Disk { shared }
    }

    /// Where nobody else has it yet.
    pub(crate) fn set_name(&mut self, name: &str, label: &str) {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.name = Name::new(name, label);
            shared.failures = Failures::new(shared.name.span.clone());
        }
    }

    /// Where nobody else has it yet.
    pub(crate) fn set_hold(&mut self, percent: u32) {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.hold = Hold::new(percent);
        }
    }

    /// What knows it without keeping it open.
    pub fn downgrade(&self) -> WeakDisk {
        WeakDisk(Arc::downgrade(&self.shared))
    }

    /// The disk for a queue thread. A panic on the way stops the device, and goes on to the caller.
    pub fn fork(&self) -> Vbd {
        Vbd::of(self.clone())
    }

    /// A handle of the image as it is now.
    pub(crate) fn level(&self) -> Level {
        let made = {
            let current = lock(&self.shared.current);
            let number = self.shared.door.image();
            Panic::catch(|| Level::new(number, current.image.fork(), &current.grace))
        };
        made.unwrap_or_else(|panic| {
            self.shared.health.fail(panic.clone());
            panic.pass_on()
        })
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

    /// Whether the device can still be served.
    pub fn health(&self) -> &Arc<Health> {
        &self.shared.health
    }

    /// The facts of the image, as they are shown. Its `size` is that at opening; see [`Disk::size`].
    pub fn info(&self) -> &Info {
        &self.shared.info
    }

    /// Bytes the guest sees now.
    pub fn size(&self) -> u64 {
        self.shared.size()
    }

    /// Look again how large the image is; true if that changed.
    pub fn reload_size(&self) -> Result<bool, Error> {
        // Who makes it larger meanwhile is not to be undone.
        let _alone = self.alone();
        let size = self.with_image(|image| image.current_size())??;
        Ok(self.shared.size.swap(size, Relaxed) != size)
    }

    /// Make the disk large enough for `end` bytes, where its image can grow. Others learn of that when
    /// they look.
    pub fn grow(&self, end: u64) -> Result<(), Error> {
        let end = end.checked_next_multiple_of(512).ok_or(Error::Range)?;
        let _alone = self.alone();
        if end >= self.size() {
            self.with_image(|image| image.grow(end))??;
            self.shared.size.store(end, Relaxed);
        }
        Ok(())
    }

    /// While it is held the image neither grows nor is replaced.
    pub(crate) fn alone(&self) -> MutexGuard<'_, ()> {
        self.shared.growing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Do something with the image as it is now; a panic in it stops the disk.
    pub(crate) fn with_image<T>(&self, work: impl FnOnce(&dyn Image) -> T) -> Result<T, Error> {
        // A fork, for what stops the disk looks at the present image.
        let image = self.shared.health.contain(|| lock(&self.shared.current).image.fork())?;
        self.shared.health.contain(|| work(&*image))
    }

    /// Leave the image as other programs expect it. After the last request.
    pub async fn close(&self, io: &Io) -> Result<(), Error> {
        if self.info().read_only {
            return Ok(());
        }
        let health = &self.shared.health;
        let image = health.contain(|| lock(&self.shared.current).image.fork())?;
        health.contain_all(async { image.close(io).await }).await
    }

    /// The image's dirty bitmaps.
    pub fn bitmaps(&self) -> Option<Arc<BitmapSet>> {
        lock(&self.shared.current).image.bitmaps().cloned()
    }

    /// Host caching, as the operator chose.
    pub fn cache(&self) -> CacheMode {
        self.shared.cache
    }

    /// Whether acknowledged writes may still be volatile, so that the guest has to flush.
    pub fn write_cache(&self) -> bool {
        self.shared.write_cache()
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
}

/// The image that a disk is at present.
pub(crate) fn lock(current: &Mutex<Current>) -> MutexGuard<'_, Current> {
    current.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    #[inline]
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Relaxed)
    }

    pub(crate) fn write_cache(&self) -> bool {
        self.writethrough.load(Relaxed) == 0
    }

    pub(crate) fn add_stats(&self) -> Arc<QueueStats> {
        let stats = Arc::new(QueueStats::default());
        let mut all = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        // Queues come and go with their clients; what the gone ones counted is kept in one.
        QueueStats::fold_ended(&mut all);
        all.push(stats.clone());
        stats
    }
}
