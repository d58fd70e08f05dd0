//! Disks whose requests wait because somebody wants them to.

use std::sync::Arc;

use ringtap_io::{Panic, Tasks};
use ringtap_vbd::Busy;

use super::command::Command;
use super::outgoing::{Reply, Told};
use super::refusal::Refusal;
use super::shape::{Done, answer, arguments};
use crate::Error;
use crate::ids::DiskId;
use crate::running::{Running, Then};

/// How long requests in flight are waited for, in nanoseconds.
const IN_FLIGHT: u64 = 10_000_000_000;

answer! {
    /// `__ringtap_PAUSED`
    struct Paused { "node-name" node_name: String }
}

impl Told for Paused {
    const NAME: &'static str = "__ringtap_PAUSED";
}

answer! {
    /// `__ringtap_RESUMED`
    struct Resumed { "node-name" node_name: String }
}

impl Told for Resumed {
    const NAME: &'static str = "__ringtap_RESUMED";
}

arguments! {
    /// `__ringtap_pause`
    struct Pause { "node-name" node_name: String }
}

/// Wait until what was in flight has ended: none of that goes on after the reply.
fn drained(vbd: &ringtap_vbd::Disk) -> Result<(), String> {
    let mut tasks = Tasks::new(ringtap_io::reactor().map_err(|error| error.to_string())?);
    let (io, vbd) = (tasks.io().clone(), vbd.fork());
    let end = tasks.block_on(async move { vbd.quiesce(&io, IN_FLIGHT).await.map(drop) });
    let end = end.map_err(|source| Error::Process { tried: "drive the io_uring", source });
    match end.map_err(|error| error.to_string())? {
        Ok(()) => Ok(()),
        Err(Busy::Late) => Err(format!(
            "requests in flight, or another change of the disk, have not ended after {} s",
            IN_FLIGHT / 1_000_000_000
        )),
        Err(Busy::Stopped) => Err("a panic has stopped it".into()),
    }
}

impl Command for Pause {
    const NAME: &'static str = "__ringtap_pause";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        let name = self.node_name;
        let found = running.named_node(&name).and_then(|id| {
            let vbd = running.disks.get(&id).map(|served| (id, served.vbd.clone()));
            vbd.ok_or_else(|| Refusal::new("the disk is gone"))
        });
        let (id, vbd) = match found {
            Ok(found) => found,
            Err(refusal) => return reply.give(Err(refusal)),
        };
        if running.pending.targets.contains(&id) {
            let used = format!("Node '{name}' is in use: a job writes to it");
            return reply.give(Err(Refusal::new(used)));
        }
        if vbd.health().failure().is_some() {
            return reply
                .give(Err(Refusal::new(format!("Node '{name}' has been stopped by a panic"))));
        }
        if vbd.pause() {
            return reply.give(Err(Refusal::new(format!("Node '{name}' is paused already"))));
        }
        let this = Arc::new(());
        running.pending.pauses.insert(id, this.clone());
        let paused = vbd.clone();
        let begun = running.in_time("pause", move || -> Then {
            let end = Panic::catch(|| drained(&vbd)).unwrap_or_else(|_| Err("a panic".into()));
            Box::new(move |running| {
                let pauses = &mut running.pending.pauses;
                if pauses.get(&id).is_none_or(|pause| !Arc::ptr_eq(pause, &this)) {
                    // Another pause may have begun since, which is not this one's to end.
                    let resumed = format!("Node '{name}' was resumed before it was paused");
                    return reply.give(Err(Refusal::new(resumed)));
                }
                pauses.remove(&id);
                reply.give(match end {
                    Ok(()) => {
                        running.told.tell(Paused { node_name: name });
                        Ok(Done {})
                    }
                    Err(why) => {
                        vbd.go_on();
                        Err(Refusal::new(format!("Node '{name}' is not paused: {why}")))
                    }
                });
            })
        });
        if let Err(error) = begun {
            running.pending.pauses.remove(&id);
            paused.go_on();
            tracing::error!("cannot wait for requests in flight: {error}");
        }
    }
}

impl Running {
    /// Have a disk's requests go on, if it is paused.
    pub(super) fn unpause(&mut self, name: &str, id: DiskId) {
        self.pending.pauses.remove(&id);
        if self.disks.get(&id).is_some_and(|served| served.vbd.go_on()) {
            self.told.tell(Resumed { node_name: name.to_owned() });
        }
    }
}
