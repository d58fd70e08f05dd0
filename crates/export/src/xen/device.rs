//! One disk of one guest: the states of its connection, from the toolstack's first word to its last.
//!
//! Source: Xen, public/io/xenbus.h and blkif.h, "State diagrams". The device has a thread and a
//! connection to xenstored of its own, so that nobody waits for another's disk.

#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel};
use std::time::{Duration, Instant};

use ringtap_io::Panic;
use ringtap_vbd::Disk;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::connect::{ConnectError, Connection, Offer, RECORDS};
use super::nodes::{self, Nodes, Wishes};
use super::record;
use super::thread::QueueThread;
use super::xenstore::{Store, StoreError};
use super::{Disks, Options, Wanted};
use crate::Stop;

/// Whether the script `block-ringtap` may let the toolstack go on, or why not.
const STATUS: &str = "ringtap-status";

/// The kernel takes a killed server's io_uring down, and with it the event channels, in its own time.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

const INITIALISING: u32 = 1;
const INIT_WAIT: u32 = 2;
const INITIALISED: u32 = 3;
const CONNECTED: u32 = 4;
const CLOSING: u32 = 5;
const CLOSED: u32 = 6;

/// What is said to a device from outside, and by it.
pub(crate) struct Bell {
    pub(crate) file: OwnedFd,
    /// The disk's size is another.
    pub(crate) resized: AtomicBool,
    /// Said by the device: its thread serves no more.
    pub(crate) ended: AtomicBool,
}

/// A disk of a guest.
pub(crate) struct Device {
    store: Store,
    /// Its node below backend/vbd, and the frontend's.
    back: String,
    front: String,
    domain: u16,
    /// For threads, records and the log.
    name: String,
    wishes: Wishes,
    options: Options,
    vbd: Option<Disk>,
    /// What was opened, and whether for reading only: it may have been closed since.
    opened: Option<(String, bool)>,
    /// Another disk has its number.
    replaced: bool,
    threads: Vec<QueueThread>,
    /// What the threads serve.
    connection: Option<Connection>,
    retry: Option<Retry>,
}

/// A guest that a server before this one left waits for its disk: what failed is tried again.
struct Retry {
    at: Instant,
    pause: Duration,
    why: String,
}

/// How a look at xenstore ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    GoOn,
    /// The toolstack has removed the device, and perhaps made another of the same number.
    Gone,
}

/// Whether a frontend has its disk from a server. One that was asked to give it up, or asks itself, goes
/// on using it until it is [`CLOSED`]: an older Linux does while it is mounted.
fn is_in_use(state: Option<u32>, frontend: Option<u32>) -> bool {
    match state {
        Some(CONNECTED) => matches!(frontend, Some(INITIALISED | CONNECTED | CLOSING)),
        Some(CLOSING) => matches!(frontend, Some(CONNECTED | CLOSING)),
        _ => false,
    }
}

/// What the toolstack wants served, and whether for reading only.
fn image(store: &mut Store, back: &str) -> Result<(String, bool), StoreError> {
    let params = store.read(&format!("{back}/params"))?.unwrap_or_default();
    let mode = store.read(&format!("{back}/mode"))?;
    Ok((params, mode.is_some_and(|mode| !mode.starts_with('w'))))
}

/// Serve the device at `backend/vbd/DOMAIN/NUMBER` until it is removed or the stop is raised.
pub(crate) fn run(
    store: Store,
    (domain, number): (u16, u32),
    options: &Options,
    disks: &dyn Disks,
    bell: &Arc<Bell>,
    stop: &Stop,
) -> Result<(), StoreError> {
    let name = format!("xen{domain}-{number}");
    match Device::find(store, domain, number, &name, options)? {
        Some(mut device) => device.serve(disks, bell, stop),
        None => Ok(()),
    }
}

impl Device {
    fn find(
        mut store: Store,
        domain: u16,
        number: u32,
        name: &str,
        options: &Options,
    ) -> Result<Option<Device>, StoreError> {
        let back = format!("backend/vbd/{domain}/{number}");
        let Some(front) = store.read(&format!("{back}/frontend"))? else { return Ok(None) };
        let flag = |store: &mut Store, node: &str, or: u32| {
            store.number(&format!("{back}/{node}")).map(|value| value.unwrap_or(or) != 0)
        };
        let wishes = Wishes {
            cdrom: store.read(&format!("{back}/device-type"))?.as_deref() == Some("cdrom"),
            removable: flag(&mut store, "removable", 0)?,
            discard: flag(&mut store, "discard-enable", 1)?,
        };
        let (name, options) = (name.to_owned(), options.clone());
        let (vbd, opened, replaced) = (None, None, false);
        let (threads, connection, retry) = (vec![], None, None);
        Ok(Some(Device {
            store,
            back,
            front,
            domain,
            name,
            wishes,
            options,
            vbd,
            opened,
            replaced,
            threads,
            connection,
            retry,
        }))
    }

    fn serve(
        &mut self,
        disks: &dyn Disks,
        bell: &Arc<Bell>,
        stop: &Stop,
    ) -> Result<(), StoreError> {
        let outcome = Panic::catch(|| self.follow(disks, bell, stop)).unwrap_or_else(|panic| {
            self.vbd.iter().for_each(|vbd| vbd.health().fail(panic.clone()));
            Err(StoreError::wait(std::io::Error::other(panic)))
        });
        // The guest stays connected when the server stops: its requests wait for the next one.
        self.disconnect();
        self.close_image(disks);
        outcome
    }

    fn follow(
        &mut self,
        disks: &dyn Disks,
        bell: &Arc<Bell>,
        stop: &Stop,
    ) -> Result<(), StoreError> {
        // Before the first look, so that no change falls between.
        self.store.watch(&format!("{}/state", self.front))?;
        self.store.watch(&self.back.clone())?;
        self.begin(disks)?;
        let mut listening = None;
        loop {
            if let Some(vbd) = self.vbd.as_ref().filter(|_| listening.is_none()) {
                let bell = bell.clone();
                listening = Some(vbd.health().when_failed(move |_| bell.ring()));
            }
            self.end_if_failed()?;
            let look = if self.opened.is_some() { self.look(disks)? } else { self.look_for_end()? };
            if look == Look::Gone {
                self.forget();
                self.give_up_waiting();
                return Ok(());
            }
            if self.retry.as_ref().is_some_and(|retry| retry.at <= Instant::now()) {
                self.begin(disks)?;
            }
            if bell.resized.swap(false, AcqRel) {
                self.resize_to_now()?;
            }
            self.wait(bell, stop)?;
            if stop.is_raised() {
                return Ok(());
            }
        }
    }

    /// Open the image, and serve it.
    fn begin(&mut self, disks: &dyn Disks) -> Result<(), StoreError> {
        if self.opened.is_none() {
            self.open(disks)?;
        }
        if self.opened.is_some() && !self.replaced { self.offer_or_take_over() } else { Ok(()) }
    }

    /// Open the image. Whether that succeeded or not, the toolstack is told.
    fn open(&mut self, disks: &dyn Disks) -> Result<(), StoreError> {
        let (params, read_only) = image(&mut self.store, &self.back)?;
        let driver = format!("/sys/bus/xen-backend/devices/vbd-{}/driver", &self.name[3..]);
        let opened = match Path::new(&driver).exists() {
            true => Err("the kernel's xen-blkback serves it already: \
                         rmmod xen-blkback before disks are attached"
                .to_owned()),
            false => disks.open(&Wanted { name: &self.name, params: &params, read_only }),
        };
        match opened {
            Ok(vbd) => {
                tracing::info!("{}: {params}, for domain {}", self.name, self.domain);
                (self.vbd, self.opened) = (Some(vbd), Some((params, read_only)));
                self.say("ready")
            }
            Err(why) => {
                self.say(&why)?;
                let state = self.state()?;
                if self.is_awaited(state)? {
                    self.try_again(format!("cannot serve {params:?}: {why}"));
                    return Ok(());
                }
                self.retry = None;
                tracing::error!("{}: cannot serve {params:?}: {why}", self.name);
                // The toolstack runs its script only then, and hears by that what is wrong.
                match state {
                    Some(INITIALISING) => self.write_state(INIT_WAIT),
                    _ => Ok(()),
                }
            }
        }
    }

    /// Offer the disk, or take up a connection that a server before this one had.
    fn offer_or_take_over(&mut self) -> Result<(), StoreError> {
        let state = self.state()?;
        if is_in_use(state, self.frontend_state()?) {
            if self.retry.is_none() {
                tracing::info!("{}: taking over from a server that is gone", self.name);
            }
            self.connect(true)?;
            // Its size may have changed meanwhile.
            return self.resize_to_now();
        }
        self.retry = None;
        if matches!(state, None | Some(0 | INITIALISING | INIT_WAIT)) {
            self.offer()?;
        }
        Ok(())
    }

    fn offer(&mut self) -> Result<(), StoreError> {
        let Some(vbd) = &self.vbd else { return Ok(()) };
        let Options { queues, persistent } = self.options;
        let nodes = nodes::features(vbd, &self.wishes, queues, persistent);
        self.publish(nodes, Some(INIT_WAIT))
    }

    /// Write nodes, and with them the state: a new one, or what it is.
    fn publish(&mut self, nodes: Nodes, state: Option<u32>) -> Result<(), StoreError> {
        let state = state.map(|state| state.to_string());
        self.write(|was| {
            let mut nodes = nodes.clone();
            nodes.push(("state", state.clone().unwrap_or(was)));
            nodes
        })
    }

    /// For the toolstack's script.
    fn say(&mut self, status: &str) -> Result<(), StoreError> {
        self.write(|_| vec![(STATUS, status.to_owned())])
    }

    /// Write the nodes that belong to a state. Where the toolstack has removed the device, writing would make it anew; where
    /// this number is another disk's by now, that one would be offered this image.
    fn write(&mut self, nodes: impl Fn(String) -> Nodes) -> Result<(), StoreError> {
        let back = self.back.clone();
        let opened = self.opened.clone().filter(|_| self.connection.is_none());
        self.replaced |= self.store.transaction(&back, |store| {
            let Some(state) = store.read(&format!("{back}/state"))? else { return Ok(false) };
            let is_other = match &opened {
                Some(opened) => image(store, &back)? != *opened,
                None => false,
            };
            if is_other {
                return Ok(true);
            }
            for (node, value) in nodes(state) {
                store.write(&format!("{back}/{node}"), &value)?;
            }
            Ok(false)
        })?;
        Ok(())
    }

    /// See what both sides want, and do it.
    fn look(&mut self, disks: &dyn Disks) -> Result<Look, StoreError> {
        let (state, frontend) = (self.state()?, self.frontend_state()?);
        if self.is_gone(state)? {
            return Ok(Look::Gone);
        }
        let online = self.store.number(&format!("{}/online", self.back))? == Some(1);
        let connected = self.connection.is_some();
        match frontend {
            Some(INITIALISED | CONNECTED) if matches!(state, Some(INIT_WAIT | INITIALISED)) => {
                self.disconnect();
                self.connect(false)?;
            }
            // A guest that was suspended and goes on makes new rings.
            Some(INITIALISED) if connected && state == Some(CONNECTED) => {
                let now = self.wanted();
                if now.is_ok_and(|now| self.connection.as_ref() != Some(&now)) {
                    self.disconnect();
                    self.connect(false)?;
                }
            }
            Some(INITIALISING) if state == Some(CLOSED) && online && self.vbd.is_some() => {
                self.offer()?;
            }
            // Its disk may still be open there: it goes on until it says that it is closed.
            Some(CLOSING) if !matches!(state, Some(CLOSING | CLOSED)) => {
                self.write_state(CLOSING)?;
            }
            None | Some(CLOSED) => self.closed(state, online && frontend.is_some(), disks)?,
            _ if state == Some(CLOSING) && !connected && !online && self.retry.is_none() => {
                self.closed(state, false, disks)?;
            }
            _ => {}
        }
        Ok(Look::GoOn)
    }

    /// No state of a device that was begun with is the first one.
    fn is_gone(&mut self, state: Option<u32>) -> Result<bool, StoreError> {
        let other = self.replaced || state == Some(INITIALISING);
        Ok(other || self.read("frontend")?.is_none())
    }

    fn has_failed(&self) -> bool {
        self.vbd.as_ref().is_some_and(|vbd| vbd.health().failure().is_some())
    }

    /// A panic has stopped the disk: its frontend is to close it, and hears of errors until it does.
    fn end_if_failed(&mut self) -> Result<(), StoreError> {
        if self.has_failed() && matches!(self.state()?, Some(INIT_WAIT | INITIALISED | CONNECTED)) {
            self.write_state(CLOSING)?;
        }
        Ok(())
    }

    /// The frontend is done. Where the device is not to come back, the image is closed before the
    /// toolstack hears of it: somebody else may want it next.
    fn closed(
        &mut self,
        state: Option<u32>,
        comes_back: bool,
        disks: &dyn Disks,
    ) -> Result<(), StoreError> {
        if !comes_back {
            self.give_up_waiting();
        }
        self.disconnect();
        if !comes_back || self.has_failed() {
            self.close_image(disks);
            self.forget();
        }
        if !matches!(state, None | Some(CLOSED)) {
            self.write_state(CLOSED)?;
        }
        Ok(())
    }

    fn forget(&self) {
        record::forget(Path::new(RECORDS), |disk| disk == self.name);
    }

    /// Whether a guest was promised the disk by a server before this one: it has it, or boots and will come
    /// for it. A toolstack that has not been told yet is not to wait, but to hear what is wrong.
    fn is_awaited(&mut self, state: Option<u32>) -> Result<bool, StoreError> {
        if is_in_use(state, self.frontend_state()?) {
            return Ok(true);
        }
        let promised = self.read("hotplug-status")?.as_deref() == Some("connected");
        let online = self.read("online")?.as_deref() == Some("1");
        Ok(promised && online && matches!(state, Some(INIT_WAIT | INITIALISED | CLOSED)))
    }

    /// There is no image to serve: only to see the toolstack give up, and a guest that has it already.
    fn look_for_end(&mut self) -> Result<Look, StoreError> {
        let state = self.state()?;
        if self.is_gone(state)? {
            return Ok(Look::Gone);
        }
        if self.is_awaited(state)? {
            return Ok(Look::GoOn);
        }
        self.retry = None;
        if matches!(state, Some(CONNECTED | CLOSING)) {
            self.write_state(CLOSED)?;
        }
        Ok(Look::GoOn)
    }

    fn wanted(&mut self) -> Result<Connection, ConnectError> {
        let (front, domain, queues) = (self.front.clone(), self.domain, self.offered_queues()?);
        Connection::read(&mut self.store, &front, domain, queues)
    }

    /// The rings that the frontend was promised, perhaps by a server with other options.
    fn offered_queues(&mut self) -> Result<u16, StoreError> {
        let offered = self.store.number(&format!("{}/{}", self.back, nodes::MOST_QUEUES))?;
        let offered = offered.and_then(|queues| queues.try_into().ok());
        Ok(offered.unwrap_or(self.options.queues))
    }

    /// Whether pages may stay mapped. Where nobody promised it, a frontend takes each away when its
    /// request has ended.
    fn offered_persistent(&mut self) -> Result<bool, StoreError> {
        let offered = self.store.number(&format!("{}/{}", self.back, nodes::PERSISTENT))?;
        Ok(self.options.persistent && offered == Some(1))
    }

    fn connect(&mut self, take_over: bool) -> Result<(), StoreError> {
        let Some(vbd) = self.vbd.clone() else { return Ok(()) };
        let persistent = self.offered_persistent()?;
        let served = self.wanted().and_then(|wanted| {
            let discards = nodes::discards(&vbd, &self.wishes);
            let offer = Offer { persistent, discards, take_over };
            let threads = wanted.serve(&self.name, &vbd, offer)?;
            Ok((wanted, threads))
        });
        match served {
            Ok((connection, threads)) => {
                let line = connection.line(persistent);
                tracing::info!("{}: connected, {line}", self.name);
                (self.connection, self.threads) = (Some(connection), threads);
                self.retry = None;
                if take_over {
                    return Ok(());
                }
                self.publish(nodes::properties(&vbd, &self.wishes), Some(CONNECTED))
            }
            Err(error) if take_over && error.may_pass() => {
                self.try_again(format!("cannot take over: {error}"));
                Ok(())
            }
            Err(error) => {
                self.retry = None;
                tracing::error!("{}: {error}", self.name);
                match error.ends_connection() {
                    true => self.write_state(CLOSING),
                    false => Ok(()),
                }
            }
        }
    }

    /// The guest waits, which it may for long: its disk is not taken from it.
    fn try_again(&mut self, why: String) {
        let last = self.retry.take();
        let pause = last.as_ref().map_or(FIRST_PAUSE, |last| (last.pause * 2).min(LONGEST_PAUSE));
        if last.is_none_or(|last| last.why != why) {
            tracing::warn!("{}: {why}; trying again", self.name);
        }
        self.retry = Some(Retry { at: Instant::now() + pause, pause, why });
    }

    /// End the threads: what they fetched is answered.
    fn disconnect(&mut self) {
        (self.connection, self.retry) = (None, None);
        self.threads.iter().for_each(QueueThread::stop);
        self.threads.drain(..).for_each(QueueThread::join);
    }

    /// Nobody waits for what waits for room, or for the end of a pause.
    fn give_up_waiting(&self) {
        if let Some(vbd) = &self.vbd {
            vbd.give_up_waiting();
            vbd.go_on();
        }
    }

    fn close_image(&mut self, disks: &dyn Disks) {
        if self.vbd.take().is_some() {
            disks.close(&self.name);
        }
    }

    /// A frontend looks at the size again when the state is written, though it stays the same.
    fn resize_to_now(&mut self) -> Result<(), StoreError> {
        let Some(vbd) = &self.vbd else { return Ok(()) };
        let sectors = nodes::sectors(vbd);
        if self.connection.is_none() || self.read(sectors.0)?.as_ref() == Some(&sectors.1) {
            return Ok(());
        }
        // A toolstack may have begun to take it away.
        self.publish(vec![sectors], None)
    }

    fn read(&mut self, node: &str) -> Result<Option<String>, StoreError> {
        self.store.read(&format!("{}/{node}", self.back))
    }

    fn state(&mut self) -> Result<Option<u32>, StoreError> {
        self.store.number(&format!("{}/state", self.back))
    }

    fn frontend_state(&mut self) -> Result<Option<u32>, StoreError> {
        self.store.number(&format!("{}/state", self.front))
    }

    fn write_state(&mut self, state: u32) -> Result<(), StoreError> {
        self.publish(vec![], Some(state))
    }

    /// Until something has changed, or is to be tried again.
    fn wait(&mut self, bell: &Bell, stop: &Stop) -> Result<(), StoreError> {
        if !self.store.has_event() {
            let mut fds = [
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(&bell.file, PollFlags::IN),
                PollFd::new(&self.store, PollFlags::IN),
            ];
            let left = self.retry.as_ref().map(|retry| {
                let left = retry.at.saturating_duration_since(Instant::now());
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
            });
            match poll(&mut fds, left.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(StoreError::wait(error.into())),
            }
            if !fds[1].revents().is_empty() {
                // Another took the ring: then there is nothing left to take.
                let _ = rustix::io::read(&bell.file, &mut [0; 8]);
            }
        }
        while self.store.event()?.is_some() {}
        Ok(())
    }
}
