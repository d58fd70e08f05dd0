//! Disks whose requests wait for room where their images lie, and the word that has requests go on.

use super::command::Command;
use super::outgoing::{Reply, Told};
use super::refusal::Refusal;
use super::shape::{Done, answer, arguments, words};
use crate::ids::DiskId;
use crate::running::Running;

words! {
    /// What was tried.
    enum IoOperation { "read" Read, "write" Write }
}

words! {
    /// What becomes of it.
    enum ErrorAction { "ignore" Ignore, "report" Report, "stop" Stop }
}

answer! {
    /// `BLOCK_IO_ERROR`
    struct BlockIoError {
        "device" device: String,
        "node-name" node_name: String,
        "operation" operation: IoOperation,
        "action" action: ErrorAction,
        "nospace" nospace: bool,
        "reason" reason: String,
    }
}

impl Told for BlockIoError {
    const NAME: &'static str = "BLOCK_IO_ERROR";
}

impl Running {
    /// Requests of a disk wait for room.
    pub(crate) fn has_no_room(&self, id: DiskId) {
        let Some(served) = self.disks.get(&id) else { return };
        let name = served.node().to_owned();
        self.told.tell(BlockIoError {
            device: name.clone(),
            node_name: name,
            operation: IoOperation::Write,
            action: ErrorAction::Stop,
            nospace: true,
            reason: "No space left on device".to_owned(),
        });
    }
}

arguments! {
    /// `__ringtap_resume`
    struct Resume { "node-name" node_name: String }
}

impl Command for Resume {
    const NAME: &'static str = "__ringtap_resume";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        reply.give(running.named_node(&self.node_name).and_then(|id| {
            let Some(served) = running.disks.get(&id) else {
                return Err(Refusal::new("the disk is gone"));
            };
            served.vbd.try_again();
            running.unpause(&self.node_name, id);
            Ok(Done {})
        }));
    }
}
