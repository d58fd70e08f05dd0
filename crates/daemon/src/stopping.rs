//! The end of all that is served: requests end, images are closed. What waits for storage on a server that has fallen silent
//! is left, and told of: else nobody would see the end.

use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use ringtap_image::{LayerState, is_store};
use ringtap_io::{Elsewhere, Tasks};

use crate::Error;
use crate::being_opened::{BeingOpened, OPENED_WITHIN};
use crate::ids::{DiskId, ServerId};
use crate::running::{Running, Served, Serving, is_failed};
use crate::threads::spawn;
use crate::transports::Transport;

/// Storage that is asked for something and has ended nothing for so long is silent.
const SILENT: Duration = Duration::from_secs(30);
/// The threads that open images.
const OPENS: &str = "open";
/// What else is under way is waited for at least for so long.
const GRACE: Duration = Duration::from_secs(5);
/// How often it is looked whether something has ended.
const LOOK: Duration = Duration::from_millis(1);

/// Sees when storage on servers is silent.
struct Silence {
    seen: u64,
    since: Instant,
}

impl Silence {
    fn is_there(&mut self) -> bool {
        let now = Elsewhere::now();
        if now.ended != self.seen || now.begun == now.ended {
            (self.seen, self.since) = (now.ended, Instant::now());
        }
        self.since.elapsed() >= SILENT
    }
}

impl Default for Silence {
    fn default() -> Silence {
        Silence { seen: Elsewhere::now().ended, since: Instant::now() }
    }
}

/// What the end did not wait for.
#[derive(Default)]
pub(crate) struct Left {
    silence: Silence,
    disks: Vec<DiskId>,
    what: Vec<String>,
}

impl Left {
    fn disk(&mut self, id: DiskId, served: &Served, waits: &str) {
        if self.disks.contains(&id) {
            return;
        }
        self.disks.push(id);
        self.add(served.disk.path.display().to_string(), waits);
    }

    fn add(&mut self, what: String, waits: &str) {
        tracing::error!(
            "{what}: {waits}, and its storage has answered nothing for {} s: left behind",
            SILENT.as_secs()
        );
        self.what.push(what);
    }

    fn front_end(&mut self, id: DiskId, served: &Served) {
        if self.disks.contains(&id) {
            return;
        }
        self.disks.push(id);
        let path = served.disk.path.display();
        tracing::error!(
            "{path}: a message of its front-end has not been carried out for {} s: a file that came with it, as the guest's \
             memory, lies where nothing answers; left behind, as by a kill",
            SILENT.as_secs()
        );
        self.what.push(path.to_string());
    }

    /// An error where there is something. Then nobody lets go of images any more, who might wait for that.
    pub(crate) fn outcome(self, running: &mut Running) -> Result<(), Error> {
        if self.what.is_empty() {
            return Ok(());
        }
        for serving in running.servers.values().filter(|serving| !serving.has_ended()) {
            if let Transport::Fuse(server) = &*serving.transport {
                server.leave_behind();
            }
        }
        std::mem::forget(std::mem::take(&mut running.disks));
        Err(Error::Left { what: self.what, seconds: SILENT.as_secs() })
    }
}

/// Requests that a disk has in flight.
fn in_flight(served: &Served) -> usize {
    served.vbd.inspect().queues.iter().map(|queue| queue.in_flight.len()).sum()
}

/// Whether an image of it lies on a server.
fn is_elsewhere(served: &Served) -> bool {
    let state = served.vbd.inspect().layers;
    let mut layer: Option<&LayerState> = Some(&state);
    while let Some(LayerState { path, below, .. }) = layer {
        if path.as_deref().is_some_and(|path| is_store(Path::new(path))) {
            return true;
        }
        layer = below.as_deref();
    }
    false
}

impl Running {
    /// Stop the servers, those of block devices only where these are not to wait for the next process; once this
    /// returns each request taken has ended, but for those of the disks that are left.
    pub(crate) fn stop(&mut self, devices: bool, left: &mut Left) {
        // One of an ordinary user goes with its server: then in order.
        let stays = |serving: &Serving| match &*serving.transport {
            Transport::Ublk(server) => !devices && server.outlives_its_server(),
            _ => false,
        };
        let ends = self.servers.values().filter(|serving| !stays(serving));
        ends.for_each(|serving| serving.stop.raise());
        loop {
            let mut waits = vec![];
            for (id, serving) in &mut self.servers {
                match serving.has_ended() {
                    true => serving.join(),
                    false if stays(serving) => {}
                    false => waits.push(*id),
                }
            }
            if left.silence.is_there() {
                waits.iter().for_each(|server| self.leave_disks_of(*server, left));
            }
            waits.iter().for_each(|server| self.leave_disk_of_front_end(*server, left));
            let is_left = |id: &DiskId| left.disks.contains(id);
            let of_left = |server: &ServerId| {
                self.exports.iter().any(|one| one.server == *server && is_left(&one.disk))
            };
            if waits.iter().all(of_left) {
                // Other disks of the same servers are not closed under what they have in flight.
                let of = self.exports.iter().filter(|one| waits.contains(&one.server));
                for (id, served) in
                    of.filter_map(|one| Some((one.disk, self.disks.get(&one.disk)?)))
                {
                    match in_flight(served) {
                        0 => {}
                        count => left.disk(id, served, &format!("{count} requests have not ended")),
                    }
                }
                return;
            }
            sleep(LOOK);
        }
    }

    /// Storage is silent, and that server has not ended: leave those of its disks that wait, or may.
    fn leave_disks_of(&self, server: ServerId, left: &mut Left) {
        let of = self.exports.iter().filter(|one| one.server == server);
        let of = of.filter_map(|one| Some((one.disk, self.disks.get(&one.disk)?)));
        let far: Vec<(DiskId, &Served)> = of.filter(|(_, served)| is_elsewhere(served)).collect();
        let asked = far.iter().any(|(_, served)| in_flight(served) > 0);
        for (id, served) in far {
            match in_flight(served) {
                0 if asked => {}
                0 => left.disk(id, served, "what serves it has not ended"),
                count => left.disk(id, served, &format!("{count} requests have not ended")),
            }
        }
    }

    /// A front-end's file may never answer who maps it, or looks at it: leave its disk, though not what that has in flight.
    fn leave_disk_of_front_end(&self, server: ServerId, left: &mut Left) {
        let transport = self.servers.get(&server).map(|serving| &*serving.transport);
        let Some(Transport::VhostUser { server: own, .. }) = transport else { return };
        if own.handles_for().is_none_or(|so_long| so_long < SILENT) {
            return;
        }
        let of = self.exports.iter().filter(|one| one.server == server);
        for (id, served) in of.filter_map(|one| Some((one.disk, self.disks.get(&one.disk)?))) {
            if in_flight(served) == 0 {
                left.front_end(id, served);
            }
        }
    }

    /// Wait for all that is about to come or to go, but for what waits for silent storage.
    pub(crate) fn wait_for_pending(&mut self, left: &mut Left) {
        let (began, mut threads) = (Instant::now(), std::mem::take(&mut self.pending.threads));
        loop {
            // One that panicked has told of it.
            threads.retain(|(_, thread)| !thread.is_finished());
            if began.elapsed() >= OPENED_WITHIN && threads.iter().any(|(role, _)| role == OPENS) {
                // Nobody wants it any more, and an image that is not open yet is as a killed server leaves it.
                threads.retain(|(role, _)| role != OPENS);
                for path in BeingOpened::all() {
                    left.add(path.display().to_string(), "it is not opened");
                }
            }
            if threads.is_empty() {
                return;
            }
            if left.silence.is_there() && began.elapsed() >= GRACE {
                return threads.iter().for_each(|(role, _)| {
                    left.add(format!("work on a disk ({role})"), "it has not ended");
                });
            }
            sleep(LOOK);
        }
    }
}

/// Once images are closed: wait for those that looked at them, but not for one that does not see that.
pub(crate) fn wait_for_checks(checks: Vec<JoinHandle<()>>) {
    let began = Instant::now();
    while began.elapsed() < GRACE && !checks.iter().all(JoinHandle::is_finished) {
        sleep(LOOK);
    }
}

/// Make stable what every disk was given, and close it, unless it is `kept` for its block device, whose
/// threads go on, or `left`. The first failure is returned, after all were tried.
pub(crate) fn close_all(running: &Running, kept: &[DiskId], left: &mut Left) -> Result<(), Error> {
    let mut outcome = Ok(());
    let mut far = vec![];
    for (id, served) in &running.disks {
        if is_failed(served) || left.disks.contains(id) {
            continue;
        }
        let _disk = served.vbd.span().enter();
        let kept = kept.contains(id);
        if let Some(server) = running.device_of(*id).filter(|_| kept) {
            let device = server.path().display();
            match running.leaves_devices {
                true => tracing::info!("{device} is left to the next server of its image"),
                false => {
                    tracing::warn!("{device} stays: it waits for the next server of its image")
                }
            }
        }
        match is_elsewhere(served) {
            false => {
                let end = close(&served.vbd, kept).and_then(|end| flushed(served, end));
                outcome = outcome.and(end);
            }
            true => match begin_to_close(served.vbd.clone(), kept) {
                Ok(end) => far.push((*id, served, end)),
                Err(error) => outcome = outcome.and(Err(error)),
            },
        }
    }
    let mut silence = Silence::default();
    for (id, served, end) in far {
        let _disk = served.vbd.span().enter();
        let end = loop {
            match end.recv_timeout(LOOK) {
                Ok(end) => break Some(end),
                Err(RecvTimeoutError::Timeout) if !silence.is_there() => {}
                Err(RecvTimeoutError::Timeout) => {
                    left.disk(id, served, "it is not closed");
                    break None;
                }
                // Its thread has panicked, and told of it.
                Err(RecvTimeoutError::Disconnected) => break None,
            }
        };
        let end = end.map_or(Ok(()), |end| end.and_then(|end| flushed(served, end)));
        outcome = outcome.and(end);
    }
    outcome
}

type Closed = Result<Result<(), ringtap_image::Error>, Error>;

/// The same on a thread of its own, which may never end. It has let go of the disk once it tells: the process may end then, and
/// no library is to be at work on its images meanwhile.
fn begin_to_close(vbd: ringtap_vbd::Disk, kept: bool) -> Result<Receiver<Closed>, Error> {
    let (tell, end) = channel();
    spawn("close", move || {
        let disk = vbd.span().clone().entered();
        let closed = close(&vbd, kept);
        drop(vbd);
        drop(disk);
        // Nobody listens any more where storage is silent.
        let _ = tell.send(closed);
    })?;
    Ok(end)
}

fn close(vbd: &ringtap_vbd::Disk, kept: bool) -> Closed {
    let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
    let (vbd, io) = (vbd.clone(), tasks.io().clone());
    let work = async move { if kept { vbd.fork().flush(&io).await } else { vbd.close(&io).await } };
    tasks.block_on(work).map_err(|source| Error::Process { tried: "drive the io_uring", source })
}

fn flushed(served: &Served, end: Result<(), ringtap_image::Error>) -> Result<(), Error> {
    let path = &served.disk.path;
    end.map_err(|source| {
        tracing::error!("cannot flush {}: {source}", path.display());
        Error::Flush { path: path.clone(), source }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    use ringtap_image::{CacheMode, Null};
    use ringtap_vbd::sabotage::Trapped;

    use super::*;

    /// Takes its time to go.
    struct Slow(Arc<AtomicBool>);

    impl Drop for Slow {
        fn drop(&mut self) {
            sleep(Duration::from_millis(200));
            self.0.store(true, SeqCst);
        }
    }

    #[test]
    fn who_looks_at_a_closed_image_has_let_go_of_it() {
        let gone = Arc::new(AtomicBool::new(false));
        let slow = Slow(gone.clone());
        wait_for_checks(vec![std::thread::spawn(move || drop(slow))]);
        assert!(gone.load(SeqCst), "the process would end under it");
    }

    #[test]
    fn a_disk_is_let_go_of_before_its_end_is_told() {
        let gone = Arc::new(AtomicBool::new(false));
        let slow = Slow(gone.clone());
        let trap = Arc::new(move |_: &'static str, _: u64| _ = &slow);
        let image = Trapped::boxed(Box::new(Null::new(1 << 20, false)), trap);
        let vbd = ringtap_vbd::Disk::from(ringtap_vbd::Vbd::new(image, CacheMode::None));
        let end = begin_to_close(vbd, false).expect("a thread");
        end.recv().expect("an end").expect("a ring").expect("it is closed");
        assert!(gone.load(SeqCst), "its image is there yet");
    }
}
