//! `blockdev-reopen`: an image opened otherwise than it was.

use std::sync::{Arc, Mutex, PoisonError};

use super::command::Command;
use super::nodes::{Add, Asked};
use super::opening::{Found, Wish};
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments};
use crate::identity::{Identity, identity};
use crate::ids::DiskId;
use crate::opened::Wrap;
use crate::running::{Running, Served, Then};
use crate::upon::{Upon, opened_anew};
use crate::{Disk, end};

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
            ("file", old.path == new.path || identity(&new.path) == served.file),
            ("file", served.ties.in_file == wish.ties.in_file),
            ("backing", served.ties.upon == wish.ties.upon && served.ties.alone == wish.ties.alone),
            ("l2-cache-size", old.options.table_memory == new.options.table_memory),
            ("__ringtap_bitmaps", old.options.bitmaps == new.options.bitmaps),
        ];
        if let Some((option, _)) = same.iter().find(|(_, same)| !same) {
            return refuse(format!("Cannot change the option '{option}'"));
        }
        let may_differ = |of: &Disk| (of.options.read_only, of.options.cache, of.keeps_space);
        if may_differ(old) == may_differ(new) {
            return Ok(None);
        }
        let upon = running.lying_upon(id);
        for disk in upon.iter().copied().chain([id]) {
            running.may_be_opened_anew(disk)?;
        }
        if upon.is_empty() {
            running.may_change(id)?;
        }
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

/// What came of it: the image, opened as was wanted, or, beside why it is not, as it was.
type End = (Box<Wish>, Result<Found, Refusal>, Option<Refusal>);

/// Close the image of a disk that has no exports, and open it as wanted, else as it was.
fn closed_and_opened(
    served: Served,
    mut wish: Box<Wish>,
    wrap: &Wrap,
    images: &[(Identity, bool, String)],
) -> End {
    let mut before = wish.like(served.disk.clone());
    let closed = end::close(&served).map_err(Refusal::from);
    if let Ok(image) = served.vbd.image() {
        // Those that lie upon it read by this until they stand upon what is opened now.
        image.stop_writing();
        image.let_write(true);
    }
    drop(served);
    match closed.and_then(|()| wish.open(wrap, images)) {
        Ok(opened) => (wish, Ok(opened), None),
        Err(why) => {
            let opened = before.open(wrap, images);
            (before, opened, Some(why))
        }
    }
}

impl Running {
    fn reopen(&mut self, id: DiskId, wish: Box<Wish>, reply: Reply<Done>) {
        let users = self.lying_upon(id);
        let of = |user: &DiskId| {
            let Served { disk, vbd, .. } = self.disks.get(user)?;
            let beside = self.beside(*user, &[]);
            Some(Upon { disk: disk.clone(), vbd: vbd.clone(), beside })
        };
        let upon: Vec<Upon> = users.iter().filter_map(of).collect();
        let Some(served) = self.take_back(id) else { return };
        let name = served.node().to_owned();
        let (wrap, images, taken) = (self.wrap.clone(), self.images(), name.clone());
        self.pending.nodes.insert(name.clone());
        self.pending.changing.extend(&users);
        let kept = served.disk.keeping.file.clone();
        self.pending.reopened.extend(kept.clone());
        let (files, lying) = (kept.clone(), users.clone());
        let stays = self.in_time_with("reopen", served, move |served| -> Then {
            let held = Arc::new(Mutex::new(Some(served)));
            let theirs = held.clone();
            let take = |held: &Mutex<Option<Served>>| {
                held.lock().unwrap_or_else(PoisonError::into_inner).take()
            };
            let change = move || {
                let end = take(&theirs).map(|it| closed_and_opened(it, wish, &wrap, &images));
                let opened = end.as_ref().and_then(|(_, opened, _)| opened.as_ref().ok());
                let image = opened.and_then(|(vbd, _)| vbd.disk().image().ok());
                (end, image)
            };
            let end = opened_anew(upon, change);
            Box::new(move |running| {
                running.pending.nodes.remove(&name);
                users.iter().for_each(|user| _ = running.pending.changing.remove(user));
                let (end, upon) = match end {
                    Ok((Some(end), upon)) => (end, upon.map_err(Refusal::from)),
                    Ok((None, _)) => return,
                    Err(error) => {
                        if let Some(served) = take(&held) {
                            kept.iter().for_each(|file| _ = running.pending.reopened.remove(file));
                            running.put_back(id, served);
                        }
                        return reply.give(Err(error.into()));
                    }
                };
                let (wish, opened, why) = end;
                match &opened {
                    Ok(_) => kept.iter().for_each(|file| _ = running.pending.reopened.remove(file)),
                    Err(why) => tracing::error!(
                        "{name} is gone: it can be opened neither as was wanted nor as it was: {}; what is written down \
                         of it stays",
                        why.text
                    ),
                }
                let end = opened.and_then(|(vbd, file)| running.has_come(*wish, vbd, file, true));
                running.lie_upon(&users, id, &name);
                reply.give(match why {
                    Some(why) => Err(why),
                    None => end.and(upon).map(|()| Done {}),
                });
            })
        });
        if let Some(served) = stays {
            self.pending.nodes.remove(&taken);
            lying.iter().for_each(|user| _ = self.pending.changing.remove(user));
            files.iter().for_each(|file| _ = self.pending.reopened.remove(file));
            self.put_back(id, served);
        }
    }

    /// Disks that lay upon one which was another until now.
    fn lie_upon(&mut self, users: &[DiskId], before: DiskId, name: &str) {
        let now = self.node(name);
        for user in users {
            if let Some(served) = self.disks.get_mut(user)
                && served.ties.upon == Some(before)
            {
                served.ties.upon = now;
            }
        }
    }
}
