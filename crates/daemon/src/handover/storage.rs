//! Whether the storage of disks answers: found out while guests go on, for once disks stand still all of them wait for the
//! slowest.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ringtap_io::Tasks;
use ringtap_vbd::Disk;

use super::come::lock;
use super::still::goes;
use crate::ids::DiskId;
use crate::running::Running;
use crate::threads::spawn;

/// Disks that are flushed at once.
const MOST: usize = 8;
/// How often it is looked at requests in flight.
const LOOK: Duration = Duration::from_millis(10);

/// Make stable what there is, so that there is little left to do while the disks stand still.
///
/// # Errors
/// Which disk's storage has not done that in time. A thread is left to wait for it.
pub(super) fn settle(running: &Running, limit: Duration) -> Result<(), String> {
    let until = Instant::now() + limit;
    let going = || running.disks.iter().filter(|(_, served)| goes(served));
    let disks: VecDeque<(DiskId, Disk)> =
        going().map(|(id, served)| (*id, served.vbd.clone())).collect();
    let mut left: HashMap<DiskId, &str> =
        going().map(|(id, served)| (*id, served.node())).collect();
    let (threads, disks) = (disks.len().min(MOST), Arc::new(Mutex::new(disks)));
    let (tell, told) = channel();
    for _ in 0..threads {
        let (disks, tell) = (disks.clone(), tell.clone());
        let flush_some = move || {
            loop {
                let next = lock(&disks).pop_front();
                let Some((id, disk)) = next else { return };
                flush(&disk);
                drop(disk);
                // Nobody listens any more where another took too long.
                let _ = tell.send(id);
            }
        };
        spawn("flush", flush_some).map_err(|error| error.to_string())?;
    }
    while !left.is_empty() {
        let Ok(id) = told.recv_timeout(until.saturating_duration_since(Instant::now())) else {
            lock(&disks).clear();
            let name = left.values().min().copied().unwrap_or_default();
            return Err(format!(
                "what was written to the disk {name} is not stable after {} s: see to its storage, or take the disk away first",
                limit.as_secs()
            ));
        };
        left.remove(&id);
    }
    Ok(())
}

fn flush(disk: &Disk) {
    let Ok(reactor) = ringtap_io::reactor() else { return };
    let mut tasks = Tasks::new(reactor);
    let (disk, io) = (disk.fork(), tasks.io().clone());
    // What fails here fails again where it counts.
    let _ = tasks.block_on(async move { disk.flush(&io).await });
}

/// Wait until requests have ended that are in flight now, while others may begin.
///
/// # Errors
/// Which disk's requests have not ended in time.
pub(super) fn answers(running: &Running, limit: Duration) -> Result<(), String> {
    let began = Instant::now();
    for served in running.disks.values() {
        while served.vbd.oldest_request().is_some_and(|age| age > began.elapsed()) {
            if began.elapsed() > limit {
                return Err(format!(
                    "requests of the disk {} have been in flight for more than {} s: see to its storage, or take the disk away first",
                    served.node(),
                    limit.as_secs()
                ));
            }
            std::thread::sleep(LOOK);
        }
    }
    Ok(())
}
