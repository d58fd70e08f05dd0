//! `blockdev-reopen`: an image opened otherwise than it was.

use std::mem;

use super::command::Command;
use super::nodes::{Add, Asked};
use super::opening::Wish;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments};
use crate::end;
use crate::identity::identity;
use crate::ids::DiskId;
use crate::running::{Running, Then};

arguments! {
    /// `blockdev-reopen`
    struct Reopen {
        /// All that is said of a node, as for `blockdev-add`; one at a time.
        "options" options: Vec<Add>,
    }
}

impl Command for Reopen {
    const NAME: &'static str = "blockdev-reopen";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        match self.wish(running) {
            Err(refusal) => reply.give(Err(refusal)),
            Ok(None) => reply.give(Ok(Done {})),
            Ok(Some((id, wish))) => running.reopen(id, wish, reply),
        }
    }
}

impl Reopen {
    /// The disk, and as what it is to be opened; none where it is that already.
    fn wish(mut self, running: &mut Running) -> Result<Option<(DiskId, Box<Wish>)>, Refusal> {
        let refuse = |text: String| Err(Refusal::new(text));
        let (Some(options), true) = (self.options.pop(), self.options.is_empty()) else {
            return refuse("'options' takes one node at a time".into());
        };
        let name = options.node_name.clone().unwrap_or_default();
        let Some(id) = running.node(&name) else {
            return match running.is_named(&name) {
                true => running.reopen_named(&name, &options).map(|_| None),
                false => refuse(format!("Failed to find node with node-name='{name}'")),
            };
        };
        let Some(served) = running.disks.get(&id) else { return refuse("it is gone".into()) };
        let Asked::Disk(mut wish) = options.asked(running)? else {
            return refuse("Cannot change the option 'driver'".into());
        };
        let (is, own) = (&served.disk, &mut wish.disk);
        (own.limits, own.group, own.share) = (is.limits, is.group.clone(), is.share);
        (own.keeping, own.placement) = (is.keeping.clone(), is.placement.clone());
        own.on_error = own.on_error.or(is.on_error);
        own.logical_block_size = own.logical_block_size.or(is.logical_block_size);
        wish.ties.within = served.ties.within;
        let (old, new) = (&served.disk, &wish.disk);
        let same = [
            ("driver", old.options.format == new.options.format),
            ("discard", old.keeps_space == new.keeps_space),
            ("file", old.path == new.path || identity(&new.path) == served.file),
            ("file", served.ties.in_file == wish.ties.in_file),
            ("backing", served.ties.upon == wish.ties.upon && served.ties.alone == wish.ties.alone),
            ("l2-cache-size", old.options.table_memory == new.options.table_memory),
            ("__ringtap_bitmaps", old.options.bitmaps == new.options.bitmaps),
        ];
        if let Some((option, _)) = same.iter().find(|(_, same)| !same) {
            return refuse(format!("Cannot change the option '{option}'"));
        }
        if (old.options.read_only, old.options.cache) == (new.options.read_only, new.options.cache)
        {
            return Ok(None);
        }
        running.may_change(id)?;
        if wish.place.is_none() && identity(&new.path) != served.file {
            let path = new.path.display();
            return refuse(format!(
                "Node '{name}' stays as it is: another file, or none, is at {path} by now, and its own would be lost"
            ));
        }
        if served.vbd.dirty_bitmaps().iter().any(|one| !one.persistent) {
            return refuse(format!("Node '{name}' has bitmaps in memory, which would be lost"));
        }
        if new.options.read_only && running.is_written(id) {
            return refuse(format!(
                "Read-only block node '{name}' cannot support read-write users"
            ));
        }
        if running.is_shown(id) {
            return refuse(format!(
                "Node '{name}' is in use: 'read-only' and 'cache' change where it has no export"
            ));
        }
        Ok(Some((id, wish)))
    }
}

impl Running {
    fn reopen(&mut self, id: DiskId, mut wish: Box<Wish>, reply: Reply<Done>) {
        let Some(served) = self.take_back(id) else { return };
        let name = served.node().to_owned();
        let (wrap, images, taken) = (self.wrap.clone(), self.images(), name.clone());
        self.pending.nodes.insert(name.clone());
        let kept = served.disk.keeping.file.clone();
        self.pending.reopened.extend(kept.clone());
        let files = kept.clone();
        let mut before = wish.like(served.disk.clone());
        let stays = self.in_time_with("reopen", served, move |served| -> Then {
            let closed = end::close(&served).map_err(Refusal::from);
            drop(served);
            let opened = closed.and_then(|()| wish.open(&wrap, &images));
            let (opened, why) = match opened {
                Ok(opened) => (Ok(opened), None),
                Err(why) => {
                    mem::swap(&mut wish, &mut before);
                    (wish.open(&wrap, &images), Some(why))
                }
            };
            Box::new(move |running| {
                running.pending.nodes.remove(&name);
                match &opened {
                    Ok(_) => kept.iter().for_each(|file| _ = running.pending.reopened.remove(file)),
                    Err(why) => tracing::error!(
                        "{name} is gone: it can be opened neither as was wanted nor as it was: {}; what is written down \
                         of it stays",
                        why.text
                    ),
                }
                let end = opened.and_then(|(vbd, file)| running.has_come(*wish, vbd, file, true));
                reply.give(match why {
                    Some(why) => Err(why),
                    None => end.map(|()| Done {}),
                });
            })
        });
        if let Some(served) = stays {
            self.pending.nodes.remove(&taken);
            files.iter().for_each(|file| _ = self.pending.reopened.remove(file));
            self.put_back(id, served);
        }
    }
}
