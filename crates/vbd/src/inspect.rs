//! What a device is doing, as it is told to people: its layers, its queues, who uses it.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use ringtap_image::LayerState;
use ringtap_io::Panic;
use serde::Serialize;

use crate::disk::lock;
use crate::in_flight::Pending;
use crate::limits::{Fairness, Waited};
use crate::stats::QueueStats;
use crate::told::Served;
use crate::{Disk, Vbd};

/// A device as it is at this moment, or nearly: nothing stops for whoever looks.
#[derive(Debug, Serialize)]
pub struct DeviceState {
    /// The topmost image with those below it.
    pub layers: LayerState,
    /// Who is connected, with so many queues.
    pub connections: Vec<Connection>,
    /// The queues that are served.
    pub queues: Vec<QueueState>,
    /// Whether a panic has stopped it.
    pub stopped: bool,
    /// Requests that wait for room where the image lies.
    pub waiting_for_room: usize,
    /// Whether requests wait until somebody has them go on.
    pub paused: bool,
    /// How many of them wait.
    pub held_by_pause: u32,
    /// What limits have cost its requests.
    pub limits: Waited,
    /// What it has of its device, where anybody's share of that is set.
    pub share: Option<Fairness>,
}

/// Who uses a device.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Connection {
    /// By which transport.
    pub transport: &'static str,
    /// Who.
    pub peer: String,
    /// Queues that it has running.
    pub queues: usize,
}

/// One queue.
#[derive(Debug, Serialize)]
pub struct QueueState {
    /// By which transport its requests come.
    pub transport: &'static str,
    /// From whom.
    pub peer: String,
    /// Its number, as its transport counts.
    pub queue: u16,
    /// Whether its thread spins or sleeps where it has nothing to do.
    pub poll: Poll,
    /// What it has not answered, the oldest first; of more than 256 so many.
    pub in_flight: Vec<Pending>,
    /// Requests that have ended, well or not.
    pub ended: u64,
}

/// How a queue's thread waited last.
#[derive(Debug, Serialize)]
pub struct Poll {
    /// Spinning, or asleep.
    pub state: &'static str,
    /// How long it would spin for such an event as it waited for last.
    pub window_ns: u64,
}

impl Vbd {
    /// Say whom this queue serves. Before its first request.
    pub fn serves(&self, transport: &'static str, peer: String, queue: u16) {
        let served = Served { transport, peer, queue };
        // The first word stays.
        let _ = self.stats.told.served.set(served);
    }

    /// Say how this queue's thread waits from now on.
    #[inline]
    pub fn waits(&self, spins: bool, window_ns: u64) {
        self.stats.told.poll.store(window_ns << 1 | u64::from(spins), Relaxed);
    }
}

impl Disk {
    /// For how long its oldest request has been in flight; none where limits or a pause may be why.
    pub fn oldest_request(&self) -> Option<Duration> {
        if self.shared.door.is_limited() || self.is_paused() {
            return None;
        }
        let all = self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let queues = all.iter().filter(|queue| is_there(queue));
        let ages = queues.flat_map(|queue| queue.in_flight.look()).map(|pending| pending.age_us);
        ages.max().map(Duration::from_micros)
    }

    /// The device as it is now.
    pub fn inspect(&self) -> DeviceState {
        let all = self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let queues: Vec<QueueState> =
            all.iter().filter(|queue| is_there(queue)).filter_map(state_of).collect();
        let mut connections: Vec<Connection> = vec![];
        for queue in &queues {
            let (transport, peer) = (queue.transport, &queue.peer);
            match connections.iter_mut().find(|c| c.transport == transport && c.peer == *peer) {
                // Each connection of NBD has the one queue.
                Some(known) if transport != "nbd" => known.queues += 1,
                _ => {
                    connections.push(Connection { transport, peer: peer.clone(), queues: 1 });
                }
            }
        }
        let stopped = self.health().failure().is_some();
        // A panic may have left what the image tells of half changed.
        let layers = Panic::catch(|| lock(&self.shared.current).image.fork().state())
            .unwrap_or_else(|_| LayerState::of(self.info(), None));
        DeviceState {
            layers,
            connections,
            queues,
            stopped,
            waiting_for_room: self.waiting_for_room(),
            paused: self.is_paused(),
            held_by_pause: self.held_by_pause(),
            limits: self.shared.throttle.waited(),
            share: self.shared.throttle.fairness(),
        }
    }
}

/// A queue that has ended is held by the list alone, and by a copy of that.
fn is_there(queue: &Arc<QueueStats>) -> bool {
    Arc::strong_count(queue) > 2
}

fn state_of(queue: &Arc<QueueStats>) -> Option<QueueState> {
    let Served { transport, peer, queue: number } = queue.told.served.get()?;
    let poll = queue.told.poll.load(Relaxed);
    let state = if poll & 1 != 0 { "spins" } else { "sleeps" };
    Some(QueueState {
        transport,
        peer: peer.clone(),
        queue: *number,
        poll: Poll { state, window_ns: poll >> 1 },
        in_flight: queue.in_flight.look(),
        ended: queue.ended(),
    })
}
