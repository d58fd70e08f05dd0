//! How a device comes to be served, step by step, and how it is served no more: by nobody, or by another process.

use std::io;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use ringtap_io::OpenFile;
use ringtap_vbd::Disk;
use rustix::event::{EventfdFlags, eventfd};

use super::device::Device;
use super::leave::Leave;
use super::wire::State;
use super::{Error, thread};

/// A device and the threads of its queues.
pub(crate) struct Running {
    pub(crate) device: Device,
    /// The device was deleted.
    pub(crate) ended: bool,
    /// It waits for the next server, which may be this one again.
    pub(crate) let_go: bool,
    /// Signalled when a thread has ended.
    pub(crate) over: Arc<OpenFile>,
    threads: Vec<JoinHandle<io::Result<()>>>,
    leave: Arc<Leave>,
    prepared: Option<Prepared>,
}

/// Threads that have all they need, but for the device's file.
struct Prepared {
    give: Vec<mpsc::Sender<Arc<OpenFile>>>,
    fetching: mpsc::Receiver<Option<i32>>,
}

fn event() -> io::Result<Arc<OpenFile>> {
    Ok(Arc::new(OpenFile::new(eventfd(0, EventfdFlags::CLOEXEC)?)))
}

fn gone() -> io::Error {
    io::Error::other("its thread ended")
}

pub(crate) fn join(thread: JoinHandle<io::Result<()>>) -> io::Result<()> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the queue thread panicked")))
}

impl Running {
    pub(crate) fn new(device: Device) -> io::Result<Running> {
        let (threads, leave) = (vec![], Arc::default());
        let (ended, let_go, over) = (false, false, event()?);
        Ok(Running { device, ended, let_go, over, threads, leave, prepared: None })
    }

    fn failed(&self, tried: &'static str, source: io::Error) -> Error {
        Error::Os { tried, path: self.device.path(), source }
    }

    /// Start a thread for each queue, which has its memory when this returns.
    pub(crate) fn prepare(&mut self, vbd: &Disk) -> Result<(), Error> {
        let (path, info) = (self.device.path(), self.device.info);
        let (prepared, ready) = mpsc::channel();
        let (fetching, heard) = mpsc::channel();
        let mut waiting = vec![];
        for index in 0..info.queues {
            let (give, device) = mpsc::channel();
            let (prepared, fetching) = (prepared.clone(), fetching.clone());
            let start = thread::Start { prepared, device, fetching, leave: self.leave.clone() };
            let vbd = vbd.fork();
            vbd.serves("ublk", path.display().to_string(), index);
            let thread = thread::start(index, info, vbd, start, self.over.clone());
            let thread = thread.map_err(|source| self.failed("start a thread for", source))?;
            self.threads.push(thread);
            waiting.push(give);
        }
        drop((prepared, fetching));
        for _ in &waiting {
            let end = ready.recv().unwrap_or_else(|_| Err(gone()));
            end.map_err(|source| self.failed("prepare to serve", source))?;
        }
        self.prepared = Some(Prepared { give: waiting, fetching: heard });
        Ok(())
    }

    /// Have the device, taken over where another has left it, and every slot ask for a request.
    pub(crate) fn claim(&mut self) -> Result<(), Error> {
        let Some(Prepared { give, fetching }) = self.prepared.take() else {
            return Err(self.failed("serve", gone()));
        };
        let file = Arc::new(OpenFile::new(self.device.claim()?));
        for give in &give {
            // One that has ended since says nothing below.
            let _ = give.send(file.clone());
        }
        drop(file);
        for _ in &give {
            match fetching.recv() {
                Ok(None) => {}
                Ok(Some(errno)) => {
                    let error = io::Error::from_raw_os_error(errno);
                    return Err(self.failed("fetch requests of", error));
                }
                Err(_) => return Err(self.failed("serve", gone())),
            }
        }
        Ok(())
    }

    /// Have the block device there, and requests come.
    pub(crate) fn begin(&mut self) -> Result<(), Error> {
        let (target, taken_over) = (self.device.target(), self.device.taken_over.is_some());
        let control = &mut self.device.control;
        match taken_over {
            true => control.end_recovery(target).map_err(|e| self.failed("take over", e)),
            false => control.start(target).map_err(|e| self.failed("start", e)),
        }
    }

    /// One of the steps has failed. A device that was taken over goes on waiting: its users have not lost anything yet.
    pub(crate) fn give_up(&mut self) {
        self.prepared = None;
        if self.device.fresh {
            self.end();
        }
    }

    /// Have the threads serve what they have taken and end, so that the device is left to the next server: its other
    /// requests wait, and so do those that come. Those threads.
    pub(crate) fn leave(&mut self) -> Vec<JoinHandle<io::Result<()>>> {
        self.leave.ask();
        std::mem::take(&mut self.threads)
    }

    /// They have ended, in these ways.
    pub(crate) fn has_left(&mut self, ends: Vec<io::Result<()>>) -> Result<(), Error> {
        let state = self.device.wait_until_left();
        self.let_go = true;
        for end in ends {
            end.map_err(|source| self.failed("serve", source))?;
        }
        match state {
            Some(State::Waiting) => Ok(()),
            // Who takes it over waits for that, too.
            Some(State::Live) => {
                let path = self.device.path();
                tracing::warn!(
                    "{}: the driver has not seen yet that it is let go of",
                    path.display()
                );
                Ok(())
            }
            Some(State::Dead) | None => Err(Error::Stopped { path: self.device.path() }),
        }
    }

    /// Serve again what was let go of: nobody else does.
    pub(crate) fn come_back(&mut self, vbd: &Disk) -> Result<(), Error> {
        let over = event().map_err(|error| self.failed("make an eventfd for", error))?;
        (self.over, self.leave) = (over, Arc::default());
        self.device.take_back(vbd.size());
        self.prepare(vbd)?;
        self.claim()?;
        self.begin()?;
        self.let_go = false;
        Ok(())
    }

    /// How a thread failed of those that have ended first, if one did: its end may end others.
    pub(crate) fn failure(&mut self) -> Option<io::Error> {
        loop {
            // It says that it has ended a moment before it does.
            let (ended, others): (Vec<_>, Vec<_>) =
                self.threads.drain(..).partition(JoinHandle::is_finished);
            self.threads = others;
            if !ended.is_empty() {
                return ended.into_iter().find_map(|thread| join(thread).err());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stop the device, wait for its threads, delete it. How the threads ended.
    pub(crate) fn end(&mut self) -> Vec<io::Result<()>> {
        self.ended = true;
        let path = self.device.path();
        let device = &mut self.device;
        let target = device.target();
        if let Err(error) = device.control.stop(target) {
            tracing::error!("cannot stop {}: {error}", path.display());
        }
        let ends = self.threads.drain(..).map(join).collect();
        if let Err(error) = device.delete() {
            tracing::error!("cannot delete {}: {error}", path.display());
        }
        ends
    }
}
