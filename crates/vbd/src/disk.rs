//! The device as all share it who serve it.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ringtap_image::qcow2::BitmapSet;
use ringtap_image::{CacheMode, Container, Epochs, Error, Image, Info};
use ringtap_io::{Io, Panic};
use tracing::Span;

use crate::door::Door;
use crate::failures::{Failures, Refusal};
use crate::filter::Filters;
use crate::former::Former;
use crate::full::{Full, GivenUp};
use crate::gate::Gate;
use crate::health::{Health, Listening};
use crate::hold::Hold;
use crate::level::Level;
use crate::limits::{Limits, Throttle, ThrottleGroup};
use crate::medium::Medium;
use crate::name::Name;
use crate::placement::Placement;
use crate::shares::{BackingDevice, Share};
use crate::stats::{Latencies, QueueStats, Stats};

/// The image that a disk is at present; whoever serves it has a fork.
pub(crate) struct Current {
    pub(crate) image: Box<dyn Image>,
    /// Its epochs, or those of the requests to it where it has none.
    pub(crate) epochs: Arc<Epochs>,
    /// Those below it that are not stable yet, the lowest first.
    pub(crate) formers: Vec<Former>,
}

impl Current {
    pub(crate) fn new(image: Box<dyn Image>) -> Current {
        let epochs = image.epochs().cloned().unwrap_or_default();
        Current { image, epochs, formers: vec![] }
    }

    /// Those below it that are still not stable.
    pub(crate) fn unsettled(&self) -> Vec<Former> {
        self.formers.iter().filter(|former| !former.is_settled()).cloned().collect()
    }

    /// The device that it lies on.
    fn device(&self) -> BackingDevice {
        let data = self.image.data_file().or_else(|| self.image.container());
        BackingDevice::numbered(data.and_then(Container::device))
    }

    fn abandon(&self) {
        self.formers.iter().for_each(Former::abandon);
        self.image.abandon();
        self.epochs.abandon();
    }
}

pub(crate) struct Shared {
    pub(crate) medium: Medium,
    pub(crate) growing: Mutex<()>,
    pub(crate) current: Arc<Mutex<Current>>,
    pub(crate) door: Arc<Door>,
    /// Requests that wait for room.
    pub(crate) full: Arc<Full>,
    pub(crate) health: Arc<Health>,
    /// Wakes who waits for a request that may never end, when the disk is stopped.
    _abandoned: Listening,
    pub(crate) stats: Mutex<Vec<Arc<QueueStats>>>,
    name: Name,
    pub(crate) failures: Failures,
    pub(crate) hold: Hold,
    placement: Placement,
    pub(crate) filters: Filters,
    pub(crate) throttle: Arc<Throttle>,
    /// Its size is not to change now.
    pub(crate) pinned: AtomicBool,
}

/// Says of one transport of a device whether its writes must be stable when they are answered, because who uses it
/// cannot or will not flush. As long as one wants it so they are, for all.
pub struct WriteThrough {
    shared: Arc<Shared>,
    wanted: bool,
}

impl WriteThrough {
    /// Whether it is wanted from now on.
    pub fn set(&mut self, wanted: bool) {
        match (std::mem::replace(&mut self.wanted, wanted), wanted) {
            (false, true) => _ = self.shared.medium.writethrough.fetch_add(1, Relaxed),
            (true, false) => _ = self.shared.medium.writethrough.fetch_sub(1, Relaxed),
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
/// by a [`crate::Vbd`] of its own, from [`Disk::fork`].
#[derive(Clone)]
pub struct Disk {
    pub(crate) shared: Arc<Shared>,
    /// The facts, where they are shown otherwise than they are.
    shown: Option<Arc<Info>>,
    /// Whether the requests by this and its clones wait for no room any more.
    pub(crate) given_up: Arc<GivenUp>,
}

/// Knows a disk, and keeps nothing of it open.
#[derive(Clone)]
pub struct WeakDisk(Weak<Shared>);

impl WeakDisk {
    /// The disk, while somebody serves it.
    pub fn upgrade(&self) -> Option<Disk> {
        self.0.upgrade().map(|shared| Disk { shared, shown: None, given_up: Arc::default() })
    }
}

impl Disk {
    pub(crate) fn showing(image: Box<dyn Image>, cache: CacheMode, info: Info) -> Disk {
        let (gate, health, door) =
            (Arc::<Gate>::default(), Arc::<Health>::default(), Arc::<Door>::default());
        let current = Arc::new(Mutex::new(Current::new(image)));
        let full = Arc::<Full>::default();
        let throttle = Arc::new(Throttle::new(door.clone()));
        let waited_at =
            (current.clone(), gate.clone(), door.clone(), full.clone(), throttle.clone());
        let abandoned = health.when_failed(move |_| {
            let (current, gate, door, full, throttle) = &waited_at;
            lock(current).abandon();
            gate.abandon();
            door.abandon();
            full.give_up();
            throttle.abandon();
        });
        let shared = Arc::new(Shared {
            medium: Medium::new(info, cache, gate),
            growing: Mutex::default(),
            current,
            door,
            full,
            health,
            _abandoned: abandoned,
            stats: Mutex::default(),
            name: Name::default(),
            failures: Failures::new(Span::none()),
            hold: Hold::default(),
            placement: Placement::default(),
            filters: Filters::default(),
            throttle,
            pinned: AtomicBool::new(false),
        });
        Disk { shared, shown: None, given_up: Arc::default() }
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

    /// Where nobody else has it yet.
    pub(crate) fn set_placement(&mut self, placement: Placement) {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.placement = placement;
        }
    }

    /// Have the calling thread, which serves the disk from now on, be where such are to be.
    pub fn place_thread(&self) {
        self.shared.placement.enter();
    }

    /// The same disk as some of those who use it are to see it: read-only, or with sectors of so many bytes.
    pub fn shown(&self, read_only: bool, logical_block_size: Option<u32>) -> Disk {
        let own = self.info();
        let logical = logical_block_size.unwrap_or(own.logical_block_size);
        let info = Info {
            read_only: read_only || self.is_read_only(),
            logical_block_size: logical,
            physical_block_size: own.physical_block_size.max(logical),
            ..own.clone()
        };
        Disk { shown: Some(Arc::new(info)), ..self.clone() }
    }

    /// The same for one of those who use it, whose requests can be given up without those of others ([`Disk::give_up_own`]).
    #[must_use]
    pub fn apart(&self) -> Disk {
        Disk { given_up: Arc::default(), ..self.clone() }
    }

    /// What knows it without keeping it open.
    pub fn downgrade(&self) -> WeakDisk {
        WeakDisk(Arc::downgrade(&self.shared))
    }

    /// A handle of the image as it is now.
    pub(crate) fn level(&self) -> Level {
        let made = {
            let current = lock(&self.shared.current);
            let number = self.shared.door.image();
            Panic::catch(|| {
                let image = current.image.fork();
                Level::new(number, image, current.unsettled(), &current.epochs)
            })
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

    /// The facts of the image, as they are shown. Its `size` and `read_only` are those at opening; see [`Disk::size`] and
    /// [`Disk::is_read_only`].
    #[inline]
    pub fn info(&self) -> &Info {
        self.shown.as_deref().unwrap_or(&self.shared.medium.info)
    }

    /// Whether nothing may be written by this handle now.
    #[inline]
    pub fn is_read_only(&self) -> bool {
        let is_shown_so = self.shown.as_ref().is_some_and(|info| info.read_only);
        is_shown_so || self.shared.medium.is_read_only()
    }

    /// Bytes the guest sees now.
    pub fn size(&self) -> u64 {
        self.shared.medium.size()
    }

    /// Look again how large the image is; true if that changed. EBUSY as for [`Disk::grow`].
    pub fn reload_size(&self) -> Result<bool, Error> {
        // Who makes it larger meanwhile is not to be undone.
        let _alone = self.alone();
        self.check_unpinned()?;
        let size = self.with_image(|image| image.current_size())??;
        Ok(self.shared.medium.size.swap(size, Relaxed) != size)
    }

    /// Make the disk large enough for `end` bytes, where its image can grow. Others learn of that when
    /// they look. EBUSY in the moment in which a [`crate::Mirror`] has the disk stand still to take its place.
    pub fn grow(&self, end: u64) -> Result<(), Error> {
        let end = end.checked_next_multiple_of(512).ok_or(Error::Range)?;
        let _alone = self.alone();
        self.check_unpinned()?;
        if end >= self.size() {
            self.with_image(|image| image.grow(end))??;
            self.shared.medium.size.store(end, Relaxed);
        }
        Ok(())
    }

    fn check_unpinned(&self) -> Result<(), Error> {
        let pinned = self.shared.pinned.load(Relaxed);
        if pinned { Err(Error::Os(libc::EBUSY)) } else { Ok(()) }
    }

    /// Whether the size must stay as it is from now on.
    pub(crate) fn pin_size(&self, pinned: bool) {
        let _alone = self.alone();
        self.shared.pinned.store(pinned, Relaxed);
    }

    /// Have requests that find no room where the image lies wait, until [`Disk::try_again`]; `tell` is called when the first
    /// of them does, and when one does again after that.
    pub fn wait_for_room(&self, tell: impl Fn() + Send + Sync + 'static) {
        self.shared.full.wait_for_room(tell);
    }

    /// How many requests wait for room.
    pub fn waiting_for_room(&self) -> usize {
        self.shared.full.waiting()
    }

    /// Whether the space of what is discarded, or becomes zeros, stays the image's from now on.
    pub fn keep_space(&self, keep: bool) {
        self.shared.medium.keeps_space.store(keep, Relaxed);
    }

    /// Requests that wait for room are tried again.
    pub fn try_again(&self) {
        self.shared.full.try_again();
    }

    /// Have requests wait before they begin, from now on and until [`Disk::go_on`]; gives whether they did before. Those in
    /// flight go on to their end: [`crate::Vbd::quiesce`] waits for that. Jobs and snapshots find the disk as ever.
    pub fn pause(&self) -> bool {
        self.shared.door.pause(true)
    }

    /// Have them go on; gives whether they waited.
    pub fn go_on(&self) -> bool {
        self.shared.door.pause(false)
    }

    /// Whether requests wait until [`Disk::go_on`].
    pub fn is_paused(&self) -> bool {
        self.shared.door.is_paused()
    }

    /// How many requests a pause holds.
    pub fn held_by_pause(&self) -> u32 {
        self.shared.door.held()
    }

    /// What it may have served by itself, whatever its group may.
    pub fn limits(&self) -> Limits {
        self.shared.throttle.limits()
    }

    /// Have these limits hold from now on, for requests that wait, too.
    pub fn set_limits(&self, limits: Limits) {
        self.shared.throttle.set(limits);
    }

    /// Have it share the limits of a group from now on, or of none.
    pub fn set_group(&self, group: Option<ThrottleGroup>) {
        self.shared.throttle.set_group(group);
    }

    /// What part of its device it is to have by itself.
    pub fn share(&self) -> Share {
        self.shared.throttle.share()
    }

    /// Have it have this part of its device from now on; why not, where it is more than can be had.
    pub fn set_share(&self, share: Share) -> Result<(), String> {
        self.shared.throttle.set_share(share)
    }

    /// Have it share the device that its image lies on with the other disks there, and those after it, where its image is
    /// replaced.
    pub fn share_device(&self) {
        let device = lock(&self.shared.current).device();
        self.shared.throttle.lies_on(device, true);
    }

    /// Another image has taken the former one's place.
    pub(crate) fn has_moved(&self) {
        if self.shared.throttle.follows_image() {
            self.share_device();
        }
    }

    /// Have it share this device, whatever its image lies on.
    pub fn lies_on(&self, device: BackingDevice) {
        self.shared.throttle.lies_on(device, false);
    }

    /// While what this gives lives, limits do not hold the disk's requests, though they count: one of those who serve it is
    /// about to end.
    pub fn hurry_all(&self) -> impl Sized + use<> {
        self.shared.throttle.hurry()
    }

    /// Have limits hold no request any more: the disk is about to be closed.
    pub fn lift_limits(&self) {
        self.shared.throttle.lift();
    }

    /// Requests that wait for room fail, and none waits from now on.
    pub fn give_up_waiting(&self) {
        self.shared.full.give_up();
    }

    /// The same of those that come by this handle, its clones and their forks alone.
    pub fn give_up_own(&self) {
        self.shared.full.give_up_those(&self.given_up);
    }

    /// Requests may wait for room again.
    pub fn wait_again(&self) {
        self.shared.full.wait_again();
    }

    /// The image as it is now, for what is to lie upon it. It is not to be written to.
    pub fn image(&self) -> Result<Box<dyn Image>, Error> {
        self.shared.health.contain(|| lock(&self.shared.current).image.fork())
    }

    /// While it is held the image neither grows nor is replaced.
    pub(crate) fn alone(&self) -> MutexGuard<'_, ()> {
        self.shared.growing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Do something with the image as it is now; a panic in it stops the disk.
    pub(crate) fn with_image<T>(&self, work: impl FnOnce(&dyn Image) -> T) -> Result<T, Error> {
        // A fork, for what stops the disk looks at the present image.
        let image = self.image()?;
        self.shared.health.contain(|| work(&*image))
    }

    /// Leave the image as other programs expect it. After the last request.
    pub async fn close(&self, io: &Io) -> Result<(), Error> {
        if self.shared.medium.is_read_only() {
            return Ok(());
        }
        let health = &self.shared.health;
        let (image, formers) = health.contain(|| {
            let current = lock(&self.shared.current);
            (current.image.fork(), current.unsettled())
        })?;
        let closed = async {
            for former in &formers {
                former.settle(io).await?;
            }
            image.close(io).await?;
            self.close_bitmaps(io).await
        };
        health.contain_all(closed).await
    }

    /// The image's dirty bitmaps.
    pub fn bitmaps(&self) -> Option<Arc<BitmapSet>> {
        lock(&self.shared.current).image.bitmaps().cloned()
    }

    /// Host caching, as the operator chose.
    pub fn cache(&self) -> CacheMode {
        self.shared.medium.cache()
    }

    /// Whether acknowledged writes may still be volatile, so that the guest has to flush.
    pub fn write_cache(&self) -> bool {
        self.shared.medium.write_cache()
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

    /// How long reads, writes, flushes, discards and writes of zeros took so far.
    pub fn latencies(&self) -> [Latencies; 5] {
        let all = self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner);
        Stats::latencies(all.iter().map(|queue| &**queue))
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
    pub(crate) fn add_stats(&self) -> Arc<QueueStats> {
        let stats = Arc::new(QueueStats::default());
        let mut all = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        // Queues come and go with their clients; what the gone ones counted is kept in one.
        QueueStats::fold_ended(&mut all);
        all.push(stats.clone());
        stats
    }
}
