//! Finding the disks to serve: those below backend/vbd whose script is `block-ringtap`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Release};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::device::{self, Bell};
use super::xenstore::{Store, StoreError};
use super::{Disks, Error, Options};
use crate::Stop;

/// The name of the hotplug script by which a disk is Ringtap's.
const SCRIPT: &str = "block-ringtap";
const BACKENDS: &str = "backend/vbd";
const STACK: usize = 256 << 10;

/// A disk's domain and its number.
type Key = (u16, u32);

struct Running {
    bell: Arc<Bell>,
    thread: JoinHandle<()>,
}

/// Serves every disk that the toolstack leaves to Ringtap.
pub struct Server {
    options: Options,
    disks: Arc<dyn Disks>,
    devices: Mutex<HashMap<Key, Running>>,
}

impl Server {
    /// A server on this host, which must be a Xen one.
    pub fn new(mut options: Options, disks: Arc<dyn Disks>) -> Result<Server, Error> {
        Store::open().map_err(Error::Missing)?;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        options.queues = options.queues.clamp(1, u16::try_from(cpus).unwrap_or(u16::MAX));
        Ok(Server { options, disks, devices: Mutex::default() })
    }

    /// Serve until `stop` is raised. Guests stay connected then, and wait for the next server.
    pub fn serve(&self, stop: &Stop) -> Result<(), Error> {
        let outcome = self.watch(stop);
        let devices = std::mem::take(&mut *self.lock());
        for (_, device) in devices {
            // A panic has ended the process already.
            let _ = device.thread.join();
        }
        outcome
    }

    /// Look again how large the images are, and tell the guests.
    pub fn resized(&self) {
        for device in self.lock().values() {
            device.bell.reload.store(true, Release);
            device.bell.ring();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Running>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, stop: &Stop) -> Result<(), Error> {
        let mut store = Store::open().map_err(Error::Missing)?;
        store.watch(BACKENDS)?;
        let ended = Arc::new(Bell::new()?);
        loop {
            let mut all = false;
            while let Some(path) = store.event()? {
                match key(&path) {
                    Some(key) => self.consider(&mut store, key, &ended, stop)?,
                    None => all = true,
                }
            }
            if all {
                self.look_everywhere(&mut store, &ended, stop)?;
            }
            if store.has_event() {
                continue;
            }
            let mut fds = [
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(&ended.file, PollFlags::IN),
                PollFd::new(&store, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(StoreError::wait(error.into()).into()),
            }
            if !fds[0].revents().is_empty() {
                return Ok(());
            }
            if !fds[1].revents().is_empty() {
                // One that ended may have been made anew meanwhile.
                let _ = rustix::io::read(&ended.file, &mut [0; 8]);
                self.look_everywhere(&mut store, &ended, stop)?;
            }
        }
    }

    fn look_everywhere(
        &self,
        store: &mut Store,
        ended: &Arc<Bell>,
        stop: &Stop,
    ) -> Result<(), Error> {
        for domain in store.list(BACKENDS)? {
            for number in store.list(&format!("{BACKENDS}/{domain}"))? {
                if let Some(key) = key(&format!("{BACKENDS}/{domain}/{number}")) {
                    self.consider(store, key, ended, stop)?;
                }
            }
        }
        Ok(())
    }

    /// Serve the disk, if it is ours and nobody does.
    fn consider(
        &self,
        store: &mut Store,
        key: Key,
        ended: &Arc<Bell>,
        stop: &Stop,
    ) -> Result<(), Error> {
        let mut devices = self.lock();
        match devices.get(&key) {
            Some(running) if !running.thread.is_finished() => return Ok(()),
            Some(_) => drop(devices.remove(&key)),
            None => {}
        }
        let (domain, number) = key;
        let script = store.read(&format!("{BACKENDS}/{domain}/{number}/script"))?;
        let script = script.unwrap_or_default();
        if script.rsplit('/').next() != Some(SCRIPT) {
            return Ok(());
        }
        let bell = Arc::new(Bell::new()?);
        let (theirs, ended, stop) = (bell.clone(), ended.clone(), stop.clone());
        let (options, disks) = (self.options.clone(), self.disks.clone());
        let thread = std::thread::Builder::new()
            .name(format!("xen{domain}-{number}"))
            .stack_size(STACK)
            .spawn(move || {
                device::run(domain, number, &options, &*disks, &theirs, &stop);
                ended.ring();
            })
            .map_err(|source| Error::Process { tried: "start a thread", source })?;
        devices.insert(key, Running { bell, thread });
        Ok(())
    }
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
        Ok(Bell { file: eventfd(0, flags).map_err(failed)?, reload: AtomicBool::new(false) })
    }

    fn ring(&self) {
        // It fails only where the count is full, and then it is heard already.
        let _ = rustix::io::write(&self.file, &1u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_belong_to_disks() {
        assert_eq!(key("backend/vbd/7/51712"), Some((7, 51712)));
        assert_eq!(key("backend/vbd/7/51712/state"), Some((7, 51712)));
        for none in ["backend/vbd", "backend/vbd/7", "backend/vbd/x/1", "backend/vbd3/7/1"] {
            assert_eq!(key(none), None, "{none}");
        }
    }
}
