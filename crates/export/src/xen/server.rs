//! Finding the disks to serve: those below backend/vbd whose script is `block-ringtap`.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use ringtap_io::Panic;
use ringtap_vbd::disk_span;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::connect::RECORDS;
use super::device::{self, Bell};
use super::record;
use super::xenstore::{Store, StoreError};
use super::{Disks, Error, Options};
use crate::Stop;

/// The name of the hotplug script by which a disk is Ringtap's.
const SCRIPT: &str = "block-ringtap";
const BACKENDS: &str = "backend/vbd";
const STACK: usize = 256 << 10;
/// Before a disk is tried again whose thread failed.
const PAUSE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A disk's domain and its number.
type Key = (u16, u32);

/// How xenstored is reached.
type Reach = Arc<dyn Fn() -> io::Result<Store> + Send + Sync>;

struct Running {
    bell: Arc<Bell>,
    thread: JoinHandle<()>,
}

/// Serves every disk that the toolstack leaves to Ringtap.
pub struct Server {
    /// Where what is in flight is noted.
    records: PathBuf,
    reach: Reach,
    options: Options,
    disks: Arc<dyn Disks>,
    devices: Mutex<HashMap<Key, Running>>,
}

impl Server {
    /// A server on this host, which must be a Xen one.
    pub fn new(mut options: Options, disks: Arc<dyn Disks>) -> Result<Server, Error> {
        let reach: Reach = Arc::new(Store::open);
        reach().map_err(Error::Missing)?;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        options.queues = options.queues.clamp(1, u16::try_from(cpus).unwrap_or(u16::MAX));
        Ok(Server { records: RECORDS.into(), reach, options, disks, devices: Mutex::default() })
    }

    /// Serve until `stop` is raised. Guests stay connected then, and wait for the next server.
    pub fn serve(&self, stop: &Stop) -> Result<(), Error> {
        let outcome = self.watch(stop);
        // Where watching failed nobody else has raised it: the server is to end, so that another begins.
        stop.raise();
        let devices = std::mem::take(&mut *self.lock());
        for (_, device) in devices {
            // One that panicked has said so.
            let _ = device.thread.join();
        }
        outcome
    }

    /// Tell the guests whose disks have another size.
    pub fn resized(&self) {
        for device in self.lock().values() {
            device.bell.resized.store(true, Release);
            device.bell.ring();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Running>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, stop: &Stop) -> Result<(), Error> {
        let mut store = (self.reach)().map_err(Error::Missing)?;
        forget_gone(&mut store, &self.records);
        store.watch(BACKENDS)?;
        let ended = Arc::new(Bell::new()?);
        // Whether a disk could not be begun with.
        let mut again = false;
        loop {
            let mut all = false;
            while let Some(path) = store.event()? {
                match key(&path) {
                    Some(key) => again |= !self.consider(&mut store, key, &ended, stop)?,
                    None => all = true,
                }
            }
            if all {
                again = !self.look_everywhere(&mut store, &ended, stop)?;
            }
            if store.has_event() {
                continue;
            }
            let mut fds = [
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(&ended.file, PollFlags::IN),
                PollFd::new(&store, PollFlags::IN),
            ];
            match poll(&mut fds, again.then_some(&PAUSE)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(StoreError::wait(error.into()).into()),
            }
            if !fds[0].revents().is_empty() {
                return Ok(());
            }
            if again || !fds[1].revents().is_empty() {
                // Domains' numbers do not come again: nothing is to be kept of each.
                self.lock().retain(|_, running| !running.bell.ended.load(Acquire));
                // One that ended may have been made anew meanwhile.
                let _ = rustix::io::read(&ended.file, &mut [0; 8]);
                again = !self.look_everywhere(&mut store, &ended, stop)?;
            }
        }
    }

    /// Whether all that are ours are served.
    fn look_everywhere(
        &self,
        store: &mut Store,
        ended: &Arc<Bell>,
        stop: &Stop,
    ) -> Result<bool, StoreError> {
        let mut served = true;
        for domain in store.list(BACKENDS)? {
            for number in store.list(&format!("{BACKENDS}/{domain}"))? {
                if let Some(key) = key(&format!("{BACKENDS}/{domain}/{number}")) {
                    served &= self.consider(store, key, ended, stop)?;
                }
            }
        }
        Ok(served)
    }

    /// Serve the disk, if it is ours and nobody does; false where that is to be tried again. What is wrong
    /// with one is no reason to give up the others.
    fn consider(
        &self,
        store: &mut Store,
        key: Key,
        ended: &Arc<Bell>,
        stop: &Stop,
    ) -> Result<bool, StoreError> {
        let mut devices = self.lock();
        match devices.get(&key) {
            Some(running) if !running.bell.ended.load(Acquire) => return Ok(true),
            Some(_) => drop(devices.remove(&key)),
            None => {}
        }
        let (domain, number) = key;
        let script = match store.read(&format!("{BACKENDS}/{domain}/{number}/script")) {
            Err(error @ StoreError::Refused { .. }) => {
                tracing::error!("xen{domain}-{number}: {error}");
                return Ok(true);
            }
            script => script?.unwrap_or_default(),
        };
        if script.rsplit('/').next() != Some(SCRIPT) {
            return Ok(true);
        }
        // One without is not whole yet, or not any more.
        if store.read(&format!("{BACKENDS}/{domain}/{number}/frontend"))?.is_none() {
            return Ok(true);
        }
        match self.start(key, ended, stop) {
            Ok(running) => drop(devices.insert(key, running)),
            Err(error) => {
                tracing::error!("xen{domain}-{number}: {error}");
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn start(&self, key: Key, ended: &Arc<Bell>, stop: &Stop) -> Result<Running, Error> {
        let (domain, number) = key;
        let bell = Arc::new(Bell::new()?);
        let (theirs, ended, stop) = (bell.clone(), ended.clone(), stop.clone());
        let (reach, options, disks) =
            (self.reach.clone(), self.options.clone(), self.disks.clone());
        let thread = std::thread::Builder::new()
            .name(format!("xen{domain}-{number}"))
            .stack_size(STACK)
            .spawn(move || {
                let name = format!("xen{domain}-{number}");
                let span = disk_span(&name);
                let _disk = span.enter();
                let store = reach().map_err(StoreError::open);
                let served = store.and_then(|store| {
                    Panic::catch(|| device::run(store, key, &options, &*disks, &theirs, &stop))
                        .unwrap_or_else(|panic| Err(StoreError::wait(io::Error::other(panic))))
                });
                if let Err(error) = served {
                    tracing::error!("{name}: {error}");
                    let _ = poll(&mut [PollFd::new(&stop, PollFlags::IN)], Some(&PAUSE));
                }
                // Before it rings, for whoever hears that looks at it once.
                theirs.ended.store(true, Release);
                ended.ring();
            })
            .map_err(|source| Error::Process { tried: "start a thread", source })?;
        Ok(Running { bell, thread })
    }
}

/// Forget what a server has noted of disks that were taken away while none ran.
fn forget_gone(store: &mut Store, records: &Path) {
    record::forget(records, |disk| {
        let key = disk.strip_prefix("xen").and_then(|key| key.split_once('-'));
        let Some((domain, number)) = key else { return false };
        let frontend = store.read(&format!("{BACKENDS}/{domain}/{number}/frontend"));
        matches!(frontend, Ok(None))
    });
}

/// The disk that a node below backend/vbd belongs to.
fn key(path: &str) -> Option<Key> {
    let mut parts = path.strip_prefix(BACKENDS)?.strip_prefix('/')?.split('/');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

impl Bell {
    fn new() -> Result<Bell, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let failed = |error: rustix::io::Errno| Error::Process {
            tried: "make an eventfd",
            source: error.into(),
        };
        let file = eventfd(0, flags).map_err(failed)?;
        Ok(Bell { file, resized: AtomicBool::new(false), ended: AtomicBool::new(false) })
    }

    pub(crate) fn ring(&self) {
        // It fails only where the count is full, and then it is heard already.
        let _ = rustix::io::write(&self.file, &1u64.to_ne_bytes());
    }
}
