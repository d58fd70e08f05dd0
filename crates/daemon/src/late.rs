//! Disks that could not be opened at the start, tried again: each by a thread of its own, for storage may be slow or silent, and
//! those that are served do not wait for that.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use ringtap_image::is_store;
use ringtap_io::Panic;
use ringtap_vbd::{Vbd, disk_span};

use crate::being_opened::BeingOpened;
use crate::end;
use crate::handed::Handed;
use crate::ids::DiskId;
use crate::left_out::{LeftOut, Tried};
use crate::opened::{close_unused, device, record_formats};
use crate::plan::Plan;
use crate::running::{Event, Running, Served};
use crate::successor;
use crate::threads::spawn;
use crate::{Address, Disk, Error, sandbox};

/// The most that are opened at once.
const MOST: usize = 32;

impl Tried {
    /// It is not wanted any more. Nothing was written to it; what lies on a server nobody waits for.
    pub(crate) fn close(self) {
        if let Some((vbd, _)) = self.opened.ok().filter(|_| !is_store(&self.disk.path)) {
            close_unused(&self.disk.path, vbd);
        }
    }
}

/// Begin to open those of the disks left out that nobody opens yet.
pub(crate) fn try_again(running: &mut Running) {
    let idle = running.left_out.iter_mut().filter(|left| left.opening.is_none());
    let queue: VecDeque<(Arc<()>, Disk, String)> = idle
        .map(|left| {
            let by = left.opening.insert(Arc::new(())).clone();
            (by, left.disk.clone(), left.label.clone())
        })
        .collect();
    let (threads, queue) = (queue.len().min(MOST), Arc::new(Mutex::new(queue)));
    for _ in 0..threads {
        let (events, wrap, theirs) = (running.events.clone(), running.wrap.clone(), queue.clone());
        let begun = spawn("open", move || {
            while let Some((by, mut disk, label)) = next(&theirs) {
                let _disk = disk_span(&disk.path.display().to_string()).entered();
                let open = || {
                    let _now = BeingOpened::begin(&disk.path);
                    successor::follow(&mut disk)?;
                    device(&disk, &label, &wrap)
                };
                let opened = Panic::catch(open)
                    .unwrap_or_else(|panic| Err(Error::panicked([&*disk.path], &panic)));
                // Where nobody attends any more the image is as a killed server leaves it.
                let _ = events.send(Event::Tried(Box::new(Tried { by, disk, opened })));
            }
        });
        match begun {
            Ok(thread) => running.pending.threads.push(("open".into(), thread)),
            Err(error) => tracing::error!("{error}: disks are opened later"),
        }
    }
    // Nobody opens them, where there is no thread at all.
    if Arc::strong_count(&queue) == 1 {
        while let Some((by, ..)) = next(&queue) {
            let left = running.left_out.iter_mut().find(|left| is_by(left, &by));
            left.into_iter().for_each(|left| left.opening = None);
        }
    }
}

fn next<T>(queue: &Mutex<VecDeque<T>>) -> Option<T> {
    queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
}

fn is_by(left: &LeftOut, by: &Arc<()>) -> bool {
    left.opening.as_ref().is_some_and(|one| Arc::ptr_eq(one, by))
}

/// Serve a disk that has been opened now, where it can be; which it is.
pub(crate) fn tried(running: &mut Running, tried: Tried) -> Option<DiskId> {
    let Some(at) = running.left_out.iter().position(|left| is_by(left, &tried.by)) else {
        tried.close();
        return None;
    };
    let LeftOut { label, .. } = running.left_out.remove(at);
    let Tried { disk, opened, .. } = tried;
    let _disk = disk_span(&disk.path.display().to_string()).entered();
    let others: Vec<Disk> = running.left_out.iter().map(|left| left.disk.clone()).collect();
    let served = opened.and_then(|(vbd, named)| {
        let id = serve(running, &disk, vbd, &others.iter().collect::<Vec<_>>())?;
        record_formats(named.as_slice());
        Ok(id)
    });
    served
        .inspect_err(|error| {
            tracing::error!("still not served: {}", sandbox::hinted(error.to_string()));
        })
        .map_err(|error| {
            running.left_out.insert(at, LeftOut { disk, label, error, opening: None });
        })
        .ok()
}

fn serve(running: &mut Running, disk: &Disk, vbd: Vbd, later: &[&Disk]) -> Result<DiskId, Error> {
    let id = running.add(disk.clone(), vbd)?;
    let (bound, wanted) = (running.bound(), [(id, disk)]);
    let plan = not_handed(disk, &bound)
        .and_then(|()| running.disks.get(&id).map_or(Ok(()), Served::hides_none))
        .and_then(|()| Plan::of(&running.config, &wanted, &bound, later, &mut Handed::default()))
        .and_then(|plan| running.start_devices(&[id]).map(|()| plan));
    let plan = plan.inspect_err(|_| {
        if let Some(served) = running.take_back(id) {
            close(running, served);
        }
    })?;
    // What has been started by then stays: it is of no other disk.
    if let Err(error) = running.start(plan, &[id]) {
        tracing::error!("not served everywhere: {error}");
    }
    running.pending.nodes.remove(disk.node_name.as_deref().unwrap_or_default());
    if let Some(served) = running.disks.get(&id) {
        tracing::info!("served from now on: {}", served.facts.line());
    }
    Ok(id)
}

/// What systemd handed over for a disk that was left out is closed.
fn not_handed(disk: &Disk, bound: &[Address]) -> Result<(), Error> {
    let mut all = disk.nbd.iter().chain(&disk.vhost_user);
    match all.find(|one| matches!(one, Address::Systemd(_)) && !bound.contains(one)) {
        None => Ok(()),
        Some(address) => Err(Error::Handed(format!(
            "its socket {address} was closed when the image could not be opened: start the server again"
        ))),
    }
}

/// Nobody has used it, and nobody waits for its storage.
fn close(running: &mut Running, served: Served) {
    let closes = spawn("close", move || {
        if let Err(error) = end::close(&served) {
            tracing::warn!("cannot close it again: {error}");
        }
    });
    match closes {
        Ok(thread) => running.pending.threads.push(("close".into(), thread)),
        Err(error) => tracing::warn!("cannot close it again: {error}"),
    }
}
