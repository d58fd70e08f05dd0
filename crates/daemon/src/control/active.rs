//! `blockdev-set-active`: images that come to this server, or leave it for another.

use super::command::Command;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments};
use crate::ids::DiskId;
use crate::running::Running;

arguments! {
    /// `blockdev-set-active`
    struct SetActive {
        /// All disks where none is said.
        "node-name" node_name: Option<String>,
        "active" active: bool,
    }
}

impl Command for SetActive {
    const NAME: &'static str = "blockdev-set-active";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        let ids: Result<Vec<DiskId>, Refusal> = match &self.node_name {
            Some(name) => running.named_node(name).map(|id| vec![id]),
            None => Ok(running.disks.keys().copied().collect()),
        };
        let ids = match ids {
            Ok(ids) => ids,
            Err(refusal) => return reply.give(Err(refusal)),
        };
        let residences: Vec<_> = ids.iter().filter_map(|id| running.residence_of(*id)).collect();
        // It may wait for the thread that serves.
        running.aside("active", reply, move || {
            for residence in residences {
                let end = if self.active { residence.arrive() } else { residence.leave(false) };
                end.map_err(Refusal::from)?;
            }
            Ok(Done {})
        });
    }
}
