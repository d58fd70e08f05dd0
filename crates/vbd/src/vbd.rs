//! The one door to the device.

use std::cell::{Ref, RefCell};
use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::pin::pin;
use std::sync::Arc;

use ringtap_image::qcow2::ToolError;
use ringtap_image::{CacheMode, Error, Image, Info, OnlineCheck, Status};
use ringtap_io::Io;

use crate::disk::Disk;
use crate::gate::Writers;
use crate::health::Health;
use crate::level::{Level, Pass};
use crate::limits::Lines;
use crate::placement::Placement;
use crate::stats::QueueStats;
use crate::{Kind, Request};

/// A virtual block device, as one queue thread uses it. [`Disk::fork`] makes another of the same
/// device for another thread.
pub struct Vbd {
    disk: Disk,
    level: RefCell<Level>,
    writers: Arc<Writers>,
    health: Arc<Health>,
    lines: Box<Lines>,
    pub(crate) stats: Arc<QueueStats>,
}

impl Deref for Vbd {
    type Target = Disk;

    fn deref(&self) -> &Disk {
        &self.disk
    }
}

impl From<Vbd> for Disk {
    fn from(vbd: Vbd) -> Disk {
        vbd.disk
    }
}

impl Disk {
    /// The disk for a queue thread. A panic on the way stops the device, and goes on to the caller.
    pub fn fork(&self) -> Vbd {
        Vbd::of(self.clone())
    }
}

impl Vbd {
    /// A device on an image.
    pub fn new(image: Box<dyn Image>, cache: CacheMode) -> Vbd {
        let info = image.info().clone();
        Vbd::of(Disk::showing(image, cache, info))
    }

    /// A device that shows its guest sectors of so many bytes, whatever size suits the image.
    pub fn with_logical_block_size(image: Box<dyn Image>, cache: CacheMode, bytes: u32) -> Vbd {
        let own = image.info();
        let physical_block_size = own.physical_block_size.max(bytes);
        let info = Info { logical_block_size: bytes, physical_block_size, ..own.clone() };
        Vbd::of(Disk::showing(image, cache, info))
    }

    pub(crate) fn of(disk: Disk) -> Vbd {
        let level = RefCell::new(disk.level());
        let (writers, stats) = (disk.shared.medium.gate.add_writers(), disk.shared.add_stats());
        let health = disk.shared.health.clone();
        Vbd { disk, level, writers, health, lines: Box::default(), stats }
    }

    /// The same with a name for the log, and a shorter one for its threads. Before it is forked.
    pub fn named(mut self, name: &str, label: &str) -> Vbd {
        self.disk.set_name(name, label);
        self
    }

    /// The same with each answer held back for so many percent of the time that it took: a device that is known to be slower.
    /// Before it is forked.
    pub fn held_back(mut self, percent: u32) -> Vbd {
        self.disk.set_hold(percent);
        self
    }

    /// The same with its threads placed so. Before it is forked.
    pub fn placed(mut self, placement: Placement) -> Vbd {
        self.disk.set_placement(placement);
        self
    }

    /// The device as all its queues share it.
    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Count CPU time of the calling thread as this device's, up to now.
    pub fn account_cpu_time(&self) {
        self.stats.set_cpu_time();
    }

    /// The image, by this thread's handle; a new one where it has been replaced.
    #[inline]
    fn level(&self) -> Ref<'_, Level> {
        let level = self.level.borrow();
        match level.number == self.disk.shared.door.image() {
            true => level,
            false => {
                drop(level);
                self.another()
            }
        }
    }

    #[cold]
    fn another(&self) -> Ref<'_, Level> {
        // Nobody replaces an image that a request here is using.
        if let Ok(mut level) = self.level.try_borrow_mut() {
            *level = self.disk.level();
        }
        self.level.borrow()
    }

    /// Let go of an image that another has taken the place of, and of what a filter wrote to that has gone, though no request comes
    /// by this queue: their files would stay open. A task beside others of its thread ([`Io::spawn_beside`]); it ends only where the disk is stopped.
    pub async fn keep_up(&self, io: &Io) {
        let door = &self.disk.shared.door;
        let mut seen = (self.level().number, door.former_filters());
        loop {
            let opens = door.opens();
            let now = (self.level().number, door.former_filters());
            if now != seen {
                seen = now;
                io.forget_images();
            }
            // A door that is closed for good wakes who listens, and lets nobody in.
            let opened = async {
                opens.await;
                Ok::<(), Error>(())
            };
            if self.health.contain_all(opened).await.is_err() {
                return;
            }
        }
    }

    #[inline]
    fn pass<'a>(&'a self, level: &'a Level) -> Pass<'a> {
        let read_only = self.disk.is_read_only();
        Pass::new(level, &self.disk.shared.medium, &self.writers, &self.stats, read_only)
    }

    /// Serve one request to its end. A panic on the way stops the device, and the request fails.
    #[inline]
    pub async fn serve(&self, io: &Io, request: Request) -> Result<(), Error> {
        let began = io.now();
        let place = self.stats.in_flight.begin(&request, began);
        let mut work = pin!(self.attempt(io, &request));
        let end = poll_fn(|context| self.health.contain_poll(|| work.as_mut().poll(context))).await;
        let shared = &self.disk.shared;
        if shared.hold.holds() {
            shared.hold.back(io, io.now().saturating_sub(began)).await;
        }
        let now = io.now();
        self.stats.in_flight.end(place, now);
        self.stats.record(&request, now.saturating_sub(began), end.is_ok());
        if let Err(error) = end {
            // What was not begun is no failure of the disk's.
            if !(self.lines.are_lost() && error == Error::Os(libc::ESHUTDOWN)) {
                shared.failures.tell(&request, error);
            }
        }
        end
    }

    // As `within`, spelled out: each future around another costs instructions of every request.
    #[inline]
    #[expect(clippy::await_holding_refcell_ref, reason = "it is replaced with nobody in flight")]
    async fn attempt(&self, io: &Io, request: &Request) -> Result<(), Error> {
        loop {
            let level = self.level();
            let in_flight = level.in_flight.enter();
            if self.disk.shared.door.lets_in(level.number) {
                let pass = self.pass(&level);
                // Reads and writes as `Pass::carry_out`, spelled out as well.
                let Request { kind, offset, len, mem, .. } = *request;
                let end = match (kind, pass.checked(request)) {
                    (Kind::Read, Ok(_)) => pass.read(io, offset, mem).await,
                    (Kind::Write, Ok(range)) if !pass.read_only => {
                        let _changing = pass.note(offset, len);
                        if let Some(keep) = pass.medium.bitmaps.note(offset, len) {
                            Box::pin(keep.log(io, range)).await;
                        }
                        pass.write(io, offset, mem, pass.durable(request)).await
                    }
                    (_, Ok(_)) => pass.carry_out_boxed(io, request).await,
                    (_, Err(error)) => Err(error),
                };
                if end != Err(Error::Full) {
                    return end;
                }
                drop(in_flight);
                drop(level);
                return self.attempt_in_freed_room(io, request).await;
            }
            drop(in_flight);
            drop(level);
            if self.disk.shared.door.leads_on() {
                return Box::pin(self.attempt_led(io, request)).await;
            }
            self.disk.shared.door.open().await;
        }
    }

    /// As [`Vbd::attempt`], past the limits, the share, the pause and the filters that there are.
    #[cold]
    async fn attempt_led(&self, io: &Io, request: &Request) -> Result<(), Error> {
        let limited = self.disk.shared.door.is_limited();
        if limited {
            self.lines.pass(io, &self.disk.shared.throttle, request).await;
        }
        let began = io.now();
        let end = self.unpaused(io, request).await;
        // What was refused has asked nothing of the device.
        if limited && end.is_ok() {
            self.lines.served(request, io.now().saturating_sub(began));
        }
        if end == Err(Error::Full) { self.attempt_in_freed_room(io, request).await } else { end }
    }

    /// Begin again a request that found no room: this very request held up what waits for those in flight.
    #[cold]
    async fn attempt_in_freed_room(&self, io: &Io, request: &Request) -> Result<(), Error> {
        let full = &self.disk.shared.full;
        let mut tries = full.tries();
        let mut end = self.attempt_rested(io, request).await;
        while end == Err(Error::Full) && full.wait(tries, &self.disk.given_up).await {
            tries = full.tries();
            end = self.unpaused(io, request).await;
            if end == Err(Error::Full) {
                end = self.attempt_rested(io, request).await;
            }
        }
        end
    }

    async fn attempt_rested(&self, io: &Io, request: &Request) -> Result<(), Error> {
        self.rest(io).await?;
        self.unpaused(io, request).await
    }

    /// Carry out a request as soon as there is no pause, past the filters that there are.
    async fn unpaused(&self, io: &Io, request: &Request) -> Result<(), Error> {
        let door = &self.disk.shared.door;
        loop {
            door.unpaused().await;
            if self.lines.are_lost() {
                return Err(Error::Os(libc::ESHUTDOWN));
            }
            let end = self.within(async |pass| {
                // Who pauses the disk waits for those that were here before.
                if door.is_paused() { None } else { Some(self.filtered(io, pass, request).await) }
            });
            if let Some(end) = end.await {
                return end;
            }
        }
    }

    /// Carry out a request, past the filters that there are.
    async fn filtered(&self, io: &Io, pass: Pass<'_>, request: &Request) -> Result<(), Error> {
        if !pass.may_change(request) {
            return pass.carry_out(io, request).await;
        }
        let (filters, offset) = (&self.disk.shared.filters, request.offset);
        filters.before_write(io, pass, offset..offset + request.len).await?;
        match filters.also() {
            Some(filter) => filter.also_write(io, pass, request).await,
            None => pass.carry_out(io, request).await,
        }
    }

    /// Wait until what was freed lately may be used again.
    #[expect(clippy::await_holding_refcell_ref, reason = "it is replaced with nobody waiting")]
    pub(crate) async fn rest(&self, io: &Io) -> Result<(), Error> {
        loop {
            let level = self.level();
            if level.image.epochs().is_none() {
                return Err(Error::Full);
            }
            let in_flight = level.in_flight.enter();
            if self.disk.shared.door.admits(level.number) {
                let _waiting = self.disk.shared.door.wait_outside();
                drop(in_flight);
                return level.rest(io).await;
            }
            drop(in_flight);
            drop(level);
            self.disk.shared.door.open().await;
        }
    }

    /// Do something with the image that is not replaced meanwhile.
    #[inline]
    #[expect(clippy::await_holding_refcell_ref, reason = "it is replaced with nobody in flight")]
    pub(crate) async fn within<T>(&self, work: impl AsyncFnOnce(Pass<'_>) -> T) -> T {
        loop {
            let level = self.level();
            let in_flight = level.in_flight.enter();
            if self.disk.shared.door.admits(level.number) {
                return work(self.pass(&level)).await;
            }
            drop(in_flight);
            drop(level);
            self.disk.shared.door.open().await;
        }
    }

    /// As [`Vbd::within`], of who has shut the door.
    #[expect(clippy::await_holding_refcell_ref, reason = "it is replaced with nobody in flight")]
    pub(crate) async fn within_still<T>(&self, work: impl AsyncFnOnce(Pass<'_>) -> T) -> T {
        let level = self.level();
        let _in_flight = level.in_flight.enter();
        work(self.pass(&level)).await
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
        // A filter looks at the bytes.
        if write && self.disk.shared.door.is_filtered() {
            return false;
        }
        let level = self.level();
        let pass = self.pass(&level);
        self.health.contain(|| pass.moves_untouched(write, offset, len)).unwrap_or(false)
    }

    /// Whether a read can be answered with the page cache's own pages, which the client looks at later:
    /// as [`Vbd::moves_untouched`], of an image whose clusters never come to hold something else. Not while limits count
    /// requests, for it takes two.
    pub fn lends_pages(&self, offset: u64, len: u64) -> bool {
        let stays =
            self.level().image.epochs().is_none() && !self.disk.shared.medium.cache().direct();
        stays && !self.may_be_held() && self.moves_untouched(Kind::Read, offset, len)
    }

    /// Whether requests may be held: by limits, which count them, or by a pause.
    pub fn may_be_held(&self) -> bool {
        self.disk.shared.door.is_limited() || self.disk.shared.door.is_paused()
    }

    /// While what this gives lives, limits do not hold the requests of this queue, though they count: the queue is about to end,
    /// or to stand still.
    pub fn hurry(&self) -> impl Sized + '_ {
        self.lines.hurry(&self.disk.shared.throttle)
    }

    /// The same where its user ends it, who may do so over and over: what is asked of the disk later waits for what has gone before its
    /// time. A queue that has begun while the disk still pays for that is held, but each request goes a second before its time.
    pub fn leave(&self) -> impl Sized + '_ {
        self.lines.leave(&self.disk.shared.throttle)
    }

    /// Carry out none of this queue's requests that limits, a pause or a full disk hold: who asked them is gone without an answer,
    /// and may come back on another queue and write what is newer.
    pub fn lose(&self) {
        self.lines.lose(&self.disk.shared.throttle);
    }

    /// Whether [`Vbd::lose`] was called.
    pub fn is_lost(&self) -> bool {
        self.lines.are_lost()
    }

    /// Make every write acknowledged before stable.
    pub async fn flush(&self, io: &Io) -> Result<(), Error> {
        self.health.contain_all(self.within(async |pass| pass.flush(io).await)).await
    }

    /// Begin to look whether the image contradicts itself, as [`Image::online_check`] says. The disk is not used for the rest of it.
    pub async fn online_check(&self, io: &Io) -> Result<Option<Box<dyn OnlineCheck>>, ToolError> {
        let begun = self.within(async |pass| Ok(pass.image.online_check(io).await));
        self.health.contain_all(begun).await.unwrap_or_else(|source| {
            let image = crate::disk::lock(&self.disk.shared.current).image.place();
            let path = image.map(|place| place.path().to_owned()).unwrap_or_default();
            Err(ToolError::Io { what: "look at the tables of", path, offset: 0, source })
        })
    }

    /// Write clusters compressed, as [`Image::compress`] says.
    pub async fn compress(&self, io: &Io, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let end = offset.checked_add(bytes.len() as u64).ok_or(Error::Range)?;
        if end > self.size() {
            return Err(Error::Range);
        }
        let work = self.within(async |pass| {
            if self.shared.door.is_filtered() {
                self.shared.filters.before_write(io, pass, offset..end).await?;
            }
            pass.compress(io, offset, bytes).await
        });
        self.health.contain_all(work).await
    }

    /// What the range from `offset` holds, for block status.
    pub async fn status(&self, io: &Io, offset: u64, len: u64) -> Result<Status, Error> {
        let end = offset.checked_add(len).ok_or(Error::Range)?;
        if len == 0 || end > self.size() {
            return Err(Error::Range);
        }
        let work = self.within(async |pass| pass.image.status(io, offset, len).await);
        self.health.contain_all(work).await
    }
}
