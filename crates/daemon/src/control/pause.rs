//! Disks whose requests wait because somebody wants them to.

use ringtap_io::Tasks;
use ringtap_vbd::Busy;

use super::outgoing::{Reply, Told};
use super::refusal::Refusal;
use super::shape::{Done, answer, arguments};
use super::table::Command;
use crate::Error;
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
            let vbd = running.disks.get(&id).map(|served| served.vbd.clone());
            vbd.ok_or_else(|| Refusal::new("the disk is gone"))
        });
        let vbd = match found {
            Ok(vbd) => vbd,
            Err(refusal) => return reply.give(Err(refusal)),
        };
        if vbd.pause() {
            return reply.give(Err(Refusal::new(format!("Node '{name}' is paused already"))));
        }
        let begun = running.in_time("pause", move || -> Then {
            let end = drained(&vbd);
            Box::new(move |running| {
                reply.give(match end {
                    Ok(()) => {
                        // Somebody may have had it go on meanwhile.
                        if vbd.is_paused() {
                            running.told.tell(Paused { node_name: name });
                        }
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
            tracing::error!("cannot wait for requests in flight: {error}");
        }
    }
}

impl Running {
    /// Have a disk's requests go on, if it is paused.
    pub(super) fn unpause(&self, name: &str, vbd: &ringtap_vbd::Disk) {
        if vbd.go_on() {
            self.told.tell(Resumed { node_name: name.to_owned() });
        }
    }
}
