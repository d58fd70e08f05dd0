//! `blockdev-reopen`: an image opened otherwise than it was, while it is served.

use std::path::PathBuf;

use ringtap_image::{CacheMode, OpenOptions, Place, is_store};

use super::command::Command;
use super::job_words::JobType;
use super::nodes::{Add, Asked};
use super::opening::Wish;
use super::outgoing::Reply;
use super::refs::{Backing, NodeOr};
use super::refusal::Refusal;
use super::reopen_backing::Below;
use super::shape::{Done, arguments};
use crate::Disk;
use crate::graph::Ties;
use crate::identity::identity;
use crate::ids::DiskId;
use crate::layers::recount_layers;
use crate::otherwise::{self, Otherwise};
use crate::running::{Export, Running, Served, Then};
use crate::upon::{Upon, opened_anew};

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
        match self.wanted(running) {
            Err(refusal) => reply.give(Err(refusal)),
            Ok(None) => reply.give(Ok(Done {})),
            Ok(Some(wanted)) => running.reopen(wanted, reply),
        }
    }
}

/// What a disk is to be from now on.
struct Wanted {
    id: DiskId,
    disk: Disk,
    ties: Ties,
    place: Option<Place>,
    below: Below,
    /// Whether what its image names lies below it, and is looked for again.
    anew_below: bool,
}

/// A disk whose guests were told that there is no cache goes on so.
fn cache(was: CacheMode, wanted: CacheMode) -> Result<CacheMode, Refusal> {
    match (was.writethrough(), wanted) {
        (false, _) => Ok(wanted),
        (true, CacheMode::None | CacheMode::DirectSync) => Ok(CacheMode::DirectSync),
        (true, CacheMode::Writeback | CacheMode::Writethrough) => Ok(CacheMode::Writethrough),
        (true, CacheMode::Unsafe) => Err(Refusal::new(
            "Cannot change the option 'cache.no-flush': its guests were told that it has no cache, and flush nothing",
        )),
    }
}

/// The disk as that one was, but for what is said.
fn otherwise(served: &Served, wish: &Wish) -> Result<Disk, Refusal> {
    let (is, wanted) = (&served.disk, &wish.disk);
    let (old, new) = (&is.options, &wanted.options);
    let or = |new: &Vec<PathBuf>, old: &Vec<PathBuf>| {
        if new.is_empty() { old.clone() } else { new.clone() }
    };
    let options = OpenOptions {
        read_only: new.read_only,
        cache: cache(old.cache, new.cache)?,
        secret: new.secret.clone().or_else(|| old.secret.clone()),
        restart_log: new.restart_log.or(old.restart_log),
        force_format: new.force_format,
        allow_backing: or(&new.allow_backing, &old.allow_backing),
        data_files: or(&new.data_files, &old.data_files),
        allow_discards: new.allow_discards,
        ..old.clone()
    };
    let mut disk = Disk { options, keeps_space: wanted.keeps_space, ..is.clone() };
    if wanted.keeping.secret.is_some() {
        disk.keeping.secret.clone_from(&wanted.keeping.secret);
    }
    Ok(disk)
}

impl Reopen {
    /// What a disk is to be; none where there is no more to do.
    fn wanted(mut self, running: &mut Running) -> Result<Option<Wanted>, Refusal> {
        let refuse = |text: String| Err(Refusal::new(text));
        let (Some(mut options), true) = (self.options.pop(), self.options.is_empty()) else {
            return refuse("'options' takes one node at a time".into());
        };
        let name = options.node_name.clone().unwrap_or_default();
        let said = options.backing_said();
        let Some(id) = running.node(&name) else {
            return match running.is_named(&name) {
                true => running.reopen_named(&name, &options, said).map(|_| None),
                false => refuse(format!("Failed to find node with node-name='{name}'")),
            };
        };
        options.lies_in_some_file(running)?;
        let Asked::Disk(wish) = options.asked(running)? else {
            return refuse("Cannot change the option 'driver'".into());
        };
        let Some(served) = running.disks.get(&id) else { return refuse("it is gone".into()) };
        let (old, new) = (&served.disk.options, &wish.disk.options);
        if old.format != new.format {
            return refuse("Cannot change the option 'driver'".into());
        }
        let place = running.other_file(served, &wish)?;
        let moves = place.is_some();
        let same = [
            ("l2-cache-size", old.table_memory == new.table_memory),
            ("__ringtap_bitmaps", old.bitmaps == new.bitmaps),
            ("active", !wish.disk.incoming),
            (
                "__ringtap_on-error",
                wish.disk.on_error.is_none_or(|wanted| served.disk.on_error == Some(wanted)),
            ),
        ];
        if let Some((option, _)) = same.iter().find(|(_, same)| !same) {
            return refuse(format!("Cannot change the option '{option}'"));
        }
        let below = running.wanted_below(id, said)?;
        let (mut disk, mut ties) = (otherwise(served, &wish)?, served.ties.clone());
        if moves {
            disk.path.clone_from(&wish.disk.path);
            ties.in_file.clone_from(&wish.ties.in_file);
        }
        match below {
            Below::Stays => {}
            Below::Nothing => (ties.upon, ties.alone) = (None, true),
            Below::Is(wanted) => (ties.upon, ties.alone) = (Some(wanted), false),
        }
        match below {
            Below::Stays => {}
            Below::Nothing => disk.options.layers = Some(1),
            Below::Is(_) => disk.options.layers = None,
        }
        let goes_on = matches!(below, Below::Stays) && !moves;
        let may_differ = |of: &Disk| (of.options.read_only, of.options.cache);
        if goes_on && may_differ(&served.disk) == may_differ(&disk) {
            running.now_keeps_space(id, disk.keeps_space);
            return Ok(None);
        }
        running.may_be_otherwise(id, &disk, &below, moves)?;
        // Images that a killed server may not have made stable are seen to as it is opened by what it names.
        let becomes_written = old.read_only && !disk.options.read_only;
        let by_name = ties.upon.is_none() && !ties.alone;
        let anew_below = by_name && (becomes_written || moves);
        Ok(Some(Wanted { id, disk, ties, place, below, anew_below }))
    }
}

impl Add {
    /// An error, in QEMU's words, where the file that it names is not there.
    fn lies_in_some_file(&self, running: &Running) -> Result<(), Refusal> {
        match self.file() {
            Some(NodeOr::Node(name)) if !running.is_taken(name) => {
                Err(Refusal::new(format!("Cannot find device='' nor node-name='{name}'")))
            }
            _ => Ok(()),
        }
    }

    /// What lies below it, as far as that is said.
    fn backing_said(&mut self) -> Option<Backing<Add>> {
        self.backing().and_then(Option::take)
    }
}

impl Running {
    /// The file that a disk is to lie in from now on, where that is another.
    fn other_file(&self, served: &Served, wish: &Wish) -> Result<Option<Place>, Refusal> {
        let same_name = served.ties.in_file == wish.ties.in_file;
        match &wish.place {
            // By its name.
            Some(_) if same_name => Ok(None),
            Some(place) => Ok(Some(place.clone())),
            None => {
                let (same_path, now) =
                    (served.disk.path == wish.disk.path, identity(&wish.disk.path));
                let is_there = now == served.file;
                let by_name = served.ties.in_file.as_ref();
                let by_name = by_name.and_then(|name| self.graph.files.get(name));
                if by_name.is_some_and(|file| !file.implicit) {
                    return Err(Refusal::new("Cannot change the option 'file.driver'"));
                }
                if !same_path && (now.is_none() || !is_there) {
                    let option = if served.disk.is_null() { "size" } else { "filename" };
                    return Err(Refusal::new(format!("Cannot change the option '{option}'")));
                }
                if !same_name {
                    return Err(Refusal::new("Cannot change the option 'file'"));
                }
                if !is_there {
                    return Err(Refusal::new(format!(
                        "Node '{}' stays as it is: another file, or none, is at {} by now, and its own would be lost",
                        served.node(),
                        wish.disk.path.display()
                    )));
                }
                Ok(None)
            }
        }
    }

    /// An error where that cannot become of a disk.
    fn may_be_otherwise(
        &self,
        id: DiskId,
        disk: &Disk,
        below: &Below,
        moves: bool,
    ) -> Result<(), Refusal> {
        let refuse = |text: String| Err(Refusal::new(text));
        let Some(served) = self.disks.get(&id) else { return refuse("it is gone".into()) };
        let (name, read_only) = (served.node(), disk.options.read_only);
        if !matches!(below, Below::Stays) {
            self.is_not_frozen(id)?;
        }
        let streams = self
            .at_work()
            .any(|(_, entry)| entry.kind == JobType::Stream && entry.disks.contains(&id));
        let is_target = self.pending.targets.contains(&id);
        if read_only && (self.is_written(id) || is_target || streams) {
            return refuse(format!(
                "Read-only block node '{name}' cannot support read-write users"
            ));
        }
        for one in self.lying_upon(id).into_iter().chain([id]) {
            self.may_be_opened_anew(one).map_err(|busy| {
                let who = self.who_changes(one);
                who.map_or(busy, |who| Refusal::new(format!("Node '{name}' is busy: {who}")))
            })?;
        }
        let is_used = self.is_shown(id) || !self.lying_upon(id).is_empty();
        let goes_on = matches!(below, Below::Stays) && !moves;
        let same = goes_on && read_only == served.disk.options.read_only;
        if is_store(&served.disk.path) && is_used && !same {
            return refuse(format!(
                "Node '{name}' is on a server, which may have room for one connection: while it is in use only 'cache' and \
                 'discard' change"
            ));
        }
        let from_start = |one: &Export| one.disk == id && !self.was_added(one.server);
        let shown = self.exports.iter().find(|one| from_start(one));
        if let Some(export) = shown.filter(|_| served.vbd.is_read_only() && !read_only) {
            return refuse(format!(
                "Node '{name}' is read-only in the export '{}', which is not said by itself: its clients could write once another \
                 server has it; block-export-del it first",
                export.id
            ));
        }
        if let Below::Is(wanted) = below {
            self.may_lie_upon(id, *wanted, read_only)?;
        }
        let file = identity(&disk.path);
        let has_it = |one: &Served| {
            one.file == file && file.is_some() && !(one.disk.options.read_only && read_only)
        };
        let other = self.disks.iter().find(|(other, one)| **other != id && has_it(one));
        if let Some((_, other)) = other {
            return refuse(format!(
                "{} is the image of the node '{}' already: export that once more, or open both read-only",
                disk.path.display(),
                other.node()
            ));
        }
        if moves && !served.vbd.dirty_bitmaps().is_empty() {
            return refuse(format!(
                "Node '{name}' has bitmaps, which do not know what another file holds: remove those first"
            ));
        }
        Ok(())
    }

    fn now_keeps_space(&mut self, id: DiskId, keeps: bool) {
        let Some(served) = self.disks.get_mut(&id) else { return };
        served.disk.keeps_space = keeps;
        served.vbd.keep_space(keeps);
        let file = served.ties.in_file.clone();
        let file = file.and_then(|name| self.graph.files.get_mut(&name));
        file.into_iter().filter(|file| file.implicit).for_each(|file| file.keeps_space = keeps);
    }

    fn reopen(&mut self, wanted: Wanted, reply: Reply<Done>) {
        let id = wanted.id;
        let users = self.lying_upon(id);
        let of = |user: &DiskId| {
            let Served { disk, vbd, .. } = self.disks.get(user)?;
            let beside = self.beside(*user, &[]);
            Some(Upon { disk: disk.clone(), vbd: vbd.clone(), beside })
        };
        let upon: Vec<Upon> = users.iter().filter_map(of).collect();
        let opened = match self.opened_by(&wanted) {
            Ok(opened) => opened,
            Err(refusal) => return reply.give(Err(refusal)),
        };
        let Some(former) = self.disks.get(&id).map(|served| served.file) else { return };
        let below = match wanted.below {
            Below::Is(below) => Some(below),
            _ => None,
        };
        let all: Vec<DiskId> = users.into_iter().chain([id]).chain(below).collect();
        self.pending.changing.extend(&all);
        self.pending.reopened.insert(id);
        let held = all.clone();
        let begun = self.in_time("reopen", move || -> Then {
            let vbd = opened.vbd.clone();
            let change = move || {
                let end = opened.open();
                let image = vbd.image().ok();
                (end, former.zip(image))
            };
            let end = opened_anew(upon, change);
            Box::new(move |running| {
                all.iter().for_each(|one| _ = running.pending.changing.remove(one));
                running.pending.reopened.remove(&id);
                let end = end.and_then(|(end, upon)| {
                    if end.is_ok() {
                        running.is_otherwise(wanted);
                    }
                    end.and(upon)
                });
                running.close_unused(Box::new(move |_| {
                    reply.give(end.map(|()| Done {}).map_err(Refusal::from));
                }));
            })
        });
        if let Err(error) = begun {
            tracing::error!("{error}: nothing is opened otherwise");
            held.iter().for_each(|one| _ = self.pending.changing.remove(one));
            self.pending.reopened.remove(&id);
        }
    }

    /// What opens it.
    fn opened_by(&self, wanted: &Wanted) -> Result<Otherwise, Refusal> {
        let gone = || Refusal::new("the disk is gone");
        let served = self.disks.get(&wanted.id).ok_or_else(gone)?;
        let below = match wanted.below {
            Below::Stays if !wanted.anew_below => otherwise::Below::Stays,
            Below::Stays | Below::Nothing => otherwise::Below::AsOpened,
            Below::Is(id) => {
                let below = self.disks.get(&id).ok_or_else(gone)?;
                let image = below.vbd.image();
                let failed = |error| Refusal::new(format!("Node '{}': {error}", below.node()));
                otherwise::Below::Is(image.map_err(failed)?)
            }
        };
        Ok(Otherwise {
            was: served.disk.clone(),
            disk: wanted.disk.clone(),
            vbd: served.vbd.clone(),
            place: wanted.place.clone(),
            below,
            away: None,
            held: self.beside(wanted.id, &[]).held,
            wrap: self.wrap.clone(),
        })
    }

    /// It is that from now on.
    fn is_otherwise(&mut self, wanted: Wanted) {
        let Wanted { id, disk, ties, .. } = wanted;
        let Some(served) = self.disks.get_mut(&id) else { return };
        let before = std::mem::replace(&mut served.ties, ties);
        let (path, options) = (disk.path, disk.options);
        (served.disk.path, served.disk.options) = (path, options);
        served.disk.keeping.secret = disk.keeping.secret;
        served.file = identity(&served.disk.path);
        recount_layers(served);
        served.facts.goes_on(&served.disk, &served.vbd);
        let (read_only, cache) = (served.disk.options.read_only, served.disk.options.cache);
        served.vbd.span().in_scope(|| tracing::info!("opened otherwise: {}", served.facts.line()));
        let now = served.ties.in_file.clone();
        if before.in_file != now {
            self.forget_file(before.in_file.as_deref());
        }
        let file = now.and_then(|name| self.graph.files.get_mut(&name));
        for file in file.into_iter().filter(|file| file.implicit) {
            (file.read_only, file.cache) = (read_only, Some(cache));
        }
        self.now_keeps_space(id, disk.keeps_space);
    }
}
