//! Disks and names that go.

use super::command::Command;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments};
use crate::ids::DiskId;
use crate::running::{Running, Served, Then};
use crate::{Error, end};

/// What is done once a disk is closed, well or not.
type Closed = Box<dyn FnOnce(&mut Running, Result<(), Error>) + Send>;

arguments! {
    /// `blockdev-del`
    struct Delete { "node-name" node_name: String }
}

impl Command for Delete {
    const NAME: &'static str = "blockdev-del";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        let name = self.node_name;
        let refuse = |text: String| Err(Refusal::new(text));
        if running.graph.kept.contains_key(&name) {
            return running.forget_moment(name, reply);
        }
        if running.is_named(&name) {
            return reply.give(running.forget_name(&name));
        }
        let Some(id) = running.node(&name) else {
            return reply.give(refuse(format!("Failed to find node with node-name='{name}'")));
        };
        if let Some(user) = running.who_holds(id) {
            return reply.give(refuse(format!("Node '{name}' is in use: {user}")));
        }
        if let Some(user) = running.user_of_disk(id) {
            let why = format!("Node '{name}' is busy: node is used as backing hd of '{user}'");
            return reply.give(refuse(why));
        }
        let closed = |running: &mut Running, closed: Result<(), Error>| {
            let told = move |_: &mut Running| {
                reply.give(closed.map(|()| Done {}).map_err(Refusal::from));
            };
            running.close_unused(Box::new(told));
        };
        running.close_node(id, Box::new(closed));
    }
}

impl Running {
    /// Close a disk that nobody uses.
    fn close_node(&mut self, id: DiskId, then: Closed) {
        let Some(served) = self.take_back(id) else { return };
        let (name, in_file) = (served.node().to_owned(), served.ties.in_file.clone());
        let taken = name.clone();
        self.pending.nodes.insert(name.clone());
        let stays = self.in_time_with("close", served, move |served| -> Then {
            let closed = end::close(&served);
            if let Err(error) = &closed {
                tracing::error!("the disk {name} is closed all the same: {error}");
            }
            // Its lock and its restart log go with it, before anybody is told.
            drop(served);
            Box::new(move |running| {
                tracing::info!("the disk {name} has gone");
                running.pending.nodes.remove(&name);
                running.forget_file(in_file.as_deref());
                then(running, closed);
            })
        });
        if let Some(served) = stays {
            self.pending.nodes.remove(&taken);
            self.put_back(id, served);
        }
    }

    /// Close those that were described within others, and that nothing lies upon any more.
    pub(super) fn close_unused(&mut self, then: Then) {
        let is_unused = |(id, served): &(&DiskId, &Served)| {
            let (id, pending) = (**id, &self.pending);
            let changes = pending.is_changing(id) || pending.bitmaps_changing.contains(&id);
            let is_used = self.is_shown(id) || self.user_of_disk(id).is_some();
            served.ties.within && !is_used && !changes
        };
        let Some(id) = self.disks.iter().find(is_unused).map(|(id, _)| *id) else {
            return then(self);
        };
        // What that failed with is in the log.
        self.close_node(id, Box::new(move |running, _| running.close_unused(then)));
    }

    /// Forget the name of a file, or of an image that lies below no disk.
    fn forget_name(&mut self, name: &str) -> Result<Done, Refusal> {
        if let Some(user) = self.user_of(name).filter(|_| self.graph.files.contains_key(name)) {
            return Err(Refusal::new(format!("Node '{name}' is in use: '{user}' lies in it")));
        }
        if let Some(lower) = self.graph.lower.get(name) {
            if let Some(served) = self.upon(lower) {
                let user = served.node();
                return Err(Refusal::new(format!(
                    "Node '{name}' is busy: node is used as backing hd of '{user}'"
                )));
            }
        }
        self.graph.files.remove(name);
        if let Some(lower) = self.graph.lower.remove(name) {
            self.forget_file(lower.in_file.as_deref());
        }
        Ok(Done {})
    }
}
