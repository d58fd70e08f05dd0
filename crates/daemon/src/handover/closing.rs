//! Images that are closed for another process, several at once, for so long and no longer: one on storage that has fallen
//! silent would have all disks stand still for good.

use std::collections::VecDeque;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ringtap_io::keeping_a_reactor;

use super::come::lock;
use super::waited_for::Closing;
use crate::at_once::AT_ONCE;
use crate::ids::DiskId;
use crate::residence::Residence;
use crate::threads::spawn;
use crate::{Disk, Error};

/// How long it is tried to open images again that somebody else has meanwhile, and how often.
const COMES_BACK: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(100);

pub(super) fn failed(why: impl Into<String>) -> Error {
    Error::Upgrade(why.into())
}

/// A disk that is to stand still with its image closed.
#[derive(Clone)]
pub(super) struct Going {
    pub(super) id: DiskId,
    pub(super) residence: Arc<Residence>,
    pub(super) disk: Disk,
}

impl Going {
    /// Close its image. One that nobody waits for any more is opened again before a request of the disk goes on.
    fn close(&self, closing: &Closing) -> Result<(), Error> {
        let end = self.residence.hand_over(&self.disk, closing);
        if closing.is_waited_for() || closing.is_closed() {
            return end;
        }
        let mut end = Some(end);
        bring_back(|| end.take().unwrap_or(Ok(())).and_then(|()| self.residence.take_over()));
        tracing::info!("{} goes on", self.disk.path.display());
        self.residence.goes_on();
        Ok(())
    }
}

/// Open again what somebody else may have meanwhile, for so long.
pub(super) fn bring_back(mut open: impl FnMut() -> Result<(), Error>) {
    let began = Instant::now();
    while let Err(error) = open() {
        tracing::error!("a disk is not there again yet: {error}");
        if began.elapsed() > COMES_BACK {
            break;
        }
        std::thread::sleep(LOOK);
    }
}

/// Close the images of all, within so long. Where that fails, those that are being closed still come with the failure: they are
/// let be, and go on by themselves.
pub(super) fn close(all: &[Going], limit: Duration) -> Result<(), (Error, Vec<DiskId>)> {
    let until = Instant::now() + limit;
    let queue: VecDeque<(usize, Going, Closing)> =
        all.iter().enumerate().map(|(at, going)| (at, going.clone(), Closing::default())).collect();
    let mut begun: Vec<Option<Closing>> = queue.iter().map(|one| Some(one.2.clone())).collect();
    let queue = Arc::new(Mutex::new(queue));
    let (tell, told) = channel();
    for number in 0..all.len().min(AT_ONCE) {
        let (queue, tell) = (queue.clone(), tell.clone());
        let close_some = move || {
            keeping_a_reactor(|| {
                loop {
                    let next = lock(&queue).pop_front();
                    let Some((at, going, closing)) = next else { return };
                    // Nobody listens any more where another took too long.
                    let _ = tell.send((at, going.close(&closing)));
                }
            });
        };
        match spawn("close", close_some) {
            Ok(_) => {}
            Err(error) if number == 0 => return Err((error, vec![])),
            // Those that there are close all.
            Err(_) => break,
        }
    }
    drop(tell);
    let mut end = Ok(());
    while begun.iter().any(Option::is_some) {
        let left = until.saturating_duration_since(Instant::now());
        let Ok((at, closed)) = told.recv_timeout(left) else { break };
        end = end.and(closed);
        begun[at] = None;
    }
    for (at, ..) in lock(&queue).drain(..) {
        begun[at] = None;
    }
    let late =
        begun.iter().zip(all).filter(|(closing, _)| closing.as_ref().is_some_and(Closing::give_up));
    let late: Vec<&Going> = late.map(|(_, going)| going).collect();
    let Some(first) = late.first() else { return end.map_err(|error| (error, vec![])) };
    let name = first.disk.node_name.as_deref().unwrap_or_default();
    let why = format!(
        "the image of the disk {name} is not closed after {} s, and its requests wait until it is: see to its storage",
        limit.as_secs()
    );
    Err((failed(why), late.into_iter().map(|going| going.id).collect()))
}
