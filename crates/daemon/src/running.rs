//! The disks that are served, their servers, and their exports: those there are from the start, and those that come
//! later and go again.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use ringtap_export::{Stop, nbd, ublk};
use ringtap_image::Secret;
use ringtap_vbd::{Listening, ThrottleGroup, Vbd, WriteThrough};

use crate::attached::{Attached, Leaving};
use crate::chain::hides_none;
use crate::control::Events;
use crate::entry::Entry;
use crate::facts::DiskFacts;
use crate::folder::Looked;
use crate::graph::{Graph, Ties};
use crate::identity::Identity;
use crate::ids::{DiskId, ServerId};
use crate::keeper::Keeper;
use crate::left_out::{LeftOut, Tried};
use crate::newcomers::Newcomers;
use crate::opened::Wrap;
use crate::pending::Pending;
use crate::residence::Residence;
use crate::socket::SocketFile;
use crate::tls::NamedCredentials;
use crate::transports::Transport;
use crate::{Address, Config, Disk, Error, OnError};

/// A disk being served.
pub(crate) struct Served {
    /// What was asked for.
    pub(crate) disk: Disk,
    pub(crate) vbd: ringtap_vbd::Disk,
    /// Has a panic that stops it told of.
    _listening: Listening,
    pub(crate) facts: DiskFacts,
    /// Which file the image was, as it was opened.
    pub(crate) file: Option<Identity>,
    /// What it shows as long as a backup keeps the moment of another disk by it.
    pub(crate) moment: Option<ringtap_vbd::Disk>,
    /// What it has to do with other names.
    pub(crate) ties: Ties,
    /// Whether its image is here, and what has it come and go.
    pub(crate) residence: Arc<Residence>,
}

impl Served {
    /// What clients of the control socket know it by.
    pub(crate) fn node(&self) -> &str {
        self.disk.node_name.as_deref().unwrap_or_default()
    }

    /// An error where a file that it is to be hides one of its own.
    pub(crate) fn hides_none(&self) -> Result<(), Error> {
        self.disk.fuse.iter().try_for_each(|path| Ok(hides_none(&self.vbd, path)?))
    }
}

/// A server, with its thread and the word to stop for it.
pub(crate) struct Serving {
    pub(crate) transport: Arc<Transport>,
    pub(crate) stop: Stop,
    pub(crate) thread: Option<JoinHandle<()>>,
    /// Whether it was told to end.
    pub(crate) closing: bool,
    /// Whether it was to hand over, and waits for requests in flight before it goes on here.
    pub(crate) held_up: bool,
    pub(crate) when_gone: Vec<Then>,
    /// Whether a client of the control socket had it started: its end is not the end of all.
    pub(crate) added: bool,
    /// What its thread enters.
    pub(crate) of: Option<ringtap_vbd::Disk>,
    /// While it ends, the disk's limits hold nothing up.
    pub(crate) haste: Option<Box<dyn Send>>,
    /// Removed when this drops.
    pub(crate) _files: Vec<SocketFile>,
}

impl Serving {
    pub(crate) fn new(
        transport: Arc<Transport>,
        stop: Stop,
        thread: JoinHandle<()>,
        added: bool,
        files: Vec<SocketFile>,
        of: Option<ringtap_vbd::Disk>,
    ) -> Serving {
        let (thread, when_gone) = (Some(thread), vec![]);
        let (closing, held_up) = (false, false);
        let (_files, haste) = (files, None);
        Serving { transport, stop, thread, closing, held_up, when_gone, added, of, haste, _files }
    }

    /// Tell it to end.
    pub(crate) fn close(&mut self) {
        self.closing = true;
        self.transport.give_up_waiting();
        self.raise();
    }

    /// Raise its word to stop, to which it comes whatever limits hold.
    pub(crate) fn raise(&mut self) {
        let hurry = |disk: &ringtap_vbd::Disk| Box::new(disk.hurry_all()) as Box<dyn Send>;
        self.haste = self.of.as_ref().map(hurry);
        self.stop.raise();
    }

    /// Whether its thread has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(|thread| thread.is_finished())
    }

    /// Wait until its thread has ended.
    pub(crate) fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so to its disk.
            let _ = thread.join();
        }
        self.haste = None;
    }
}

/// What is done once something is gone.
pub(crate) type Then = Box<dyn FnOnce(&mut Running) + Send>;

/// What is done once jobs have ended, or why they have not.
pub(crate) type JobsEnded = Box<dyn FnOnce(&mut Running, Result<(), String>)>;

/// Jobs that are to end, and what follows.
pub(crate) struct EndingJobs {
    pub(crate) jobs: HashSet<String>,
    /// Those of them that have ended, each with its disks: clients see them until all have.
    pub(crate) ended: Vec<(String, Vec<DiskId>)>,
    pub(crate) then: JobsEnded,
    /// Until it is gone somebody waits to end this.
    pub(crate) _held: mpsc::Sender<()>,
}

/// What a serving process waits for.
pub(crate) enum Event {
    Signal(i32),
    /// A server ended.
    Ended {
        server: String,
        /// Which of those that are running.
        of: Option<ServerId>,
        result: Result<(), Box<dyn std::error::Error + Send + Sync>>,
    },
    /// A panic has stopped a disk.
    Failed,
    /// A disk that was left out has been tried again.
    Tried(Box<Tried>),
    /// Xen's toolstack wants a disk served.
    Attached(Box<Attached>),
    /// Something that another thread wants to be done to what is running.
    Do(Box<dyn FnOnce(&mut Running) + Send>),
}

impl Event {
    pub(crate) fn failure(self) -> Option<Error> {
        match self {
            Event::Ended { server, result: Err(source), .. } => {
                Some(Error::Server { server, source })
            }
            _ => None,
        }
    }
}

/// A disk as one server shows it.
pub(crate) struct Export {
    pub(crate) id: String,
    pub(crate) disk: DiskId,
    pub(crate) server: ServerId,
    /// Which transport, as the control socket calls it.
    pub(crate) kind: &'static str,
    /// The name that NBD clients choose it by.
    pub(crate) name: String,
    /// Whether it is about to end.
    pub(crate) closing: bool,
    pub(crate) when_gone: Vec<Then>,
    /// Whether clients may write by it.
    pub(crate) writable: bool,
    /// Whether its writes must be stable when they are answered.
    pub(crate) write_through: Option<WriteThrough>,
}

/// All that is served.
pub(crate) struct Running {
    /// The configuration, but for its disks.
    pub(crate) config: Config,
    /// In the order in which they came.
    pub(crate) disks: BTreeMap<DiskId, Served>,
    pub(crate) servers: BTreeMap<ServerId, Serving>,
    pub(crate) exports: Vec<Export>,
    pub(crate) credentials: Option<nbd::Credentials>,
    pub(crate) nbd_budget: Arc<nbd::Budget>,
    /// Jobs, by what clients know them by.
    pub(crate) jobs: BTreeMap<String, Entry>,
    /// Whether the process ends: nothing new is begun.
    pub(crate) quit: bool,
    /// Whether block devices of this host are to wait for the next server then.
    pub(crate) leaves_devices: bool,
    /// What new disks are given to.
    pub(crate) wrap: Wrap,
    /// Secrets that clients of the control socket have named.
    pub(crate) secrets: BTreeMap<String, Secret>,
    /// Certificates that they have named.
    pub(crate) tls_creds: BTreeMap<String, NamedCredentials>,
    /// Those of the NBD server that they have started, and what they called them.
    pub(crate) nbd_creds: Option<(String, NamedCredentials)>,
    /// The most clients of it at a time, where that is said.
    pub(crate) nbd_most: Option<u32>,
    /// Groups of disks that share limits, by name.
    pub(crate) groups: BTreeMap<String, ThrottleGroup>,
    /// Names of files, and of images that are no disks.
    pub(crate) graph: Graph,
    /// Whether another process can take its place.
    pub(crate) upgradable: bool,
    /// Disks that could not be opened.
    pub(crate) left_out: Vec<LeftOut>,
    /// Sockets that listen for the process itself: of its control, and its metrics.
    pub(crate) listening: Vec<(Address, OwnedFd)>,
    /// While servers stop to hand over: those that have, of which nobody is told.
    pub(crate) handing_over: Arc<Mutex<Option<Vec<ServerId>>>>,
    /// The process that has all from now on: this one ends, and touches nothing.
    pub(crate) handed_over: Option<u32>,
    /// How long the disks stood still when they were taken over, where they were.
    pub(crate) handover_pause: Option<Duration>,
    /// Where secrets are that clients have named.
    pub(crate) secret_sources: BTreeMap<String, String>,
    /// What was found in the folder of disks.
    pub(crate) looked: Looked,
    /// Writes there what changes.
    pub(crate) keeper: Option<Keeper>,
    /// Disks that guests of Xen have given back.
    pub(crate) leaving: Vec<Leaving>,
    /// What is about to come or to go, and takes time.
    pub(crate) pending: Pending,
    /// Jobs that are to end for another process to go on with.
    pub(crate) ending_jobs: Option<EndingJobs>,
    /// Clients that are about to come, and those that have said nothing.
    pub(crate) newcomers: Newcomers,
    /// Tells clients of the control socket.
    pub(crate) told: Events,
    pub(crate) events: Sender<Event>,
    next: u64,
}

impl Running {
    /// The disks of the configuration, with nothing that serves them yet.
    pub(crate) fn new(
        mut config: Config,
        vbds: Vec<Vbd>,
        credentials: Option<nbd::Credentials>,
        events: Sender<Event>,
        wrap: Wrap,
    ) -> Result<Running, Error> {
        let disks = std::mem::take(&mut config.disks);
        let groups = std::mem::take(&mut config.groups).into_iter();
        let groups = groups.map(|(name, allotment)| Ok((name, allotment.group()?)));
        let groups = groups.collect::<Result<_, String>>().map_err(Error::Usage)?;
        let mut running = Running {
            disks: BTreeMap::new(),
            servers: BTreeMap::new(),
            exports: vec![],
            credentials,
            nbd_budget: nbd::Budget::new(config.nbd_limits.memory_of_all),
            jobs: BTreeMap::new(),
            quit: false,
            wrap,
            secrets: BTreeMap::new(),
            secret_sources: BTreeMap::new(),
            tls_creds: BTreeMap::new(),
            nbd_creds: None,
            nbd_most: None,
            looked: Looked::default(),
            keeper: None,
            upgradable: false,
            left_out: vec![],
            listening: vec![],
            handing_over: Arc::default(),
            handed_over: None,
            leaves_devices: false,
            handover_pause: None,
            groups,
            graph: Graph::default(),
            leaving: vec![],
            pending: Pending::default(),
            ending_jobs: None,
            newcomers: Newcomers::new()
                .map_err(|source| Error::Process { tried: "make an eventfd", source })?,
            told: Events::default(),
            events,
            config,
            next: 0,
        };
        for (disk, vbd) in disks.into_iter().zip(vbds) {
            running.add(disk, vbd)?;
        }
        Ok(running)
    }

    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// A disk that has its limits, with nothing that serves it yet.
    pub(crate) fn add_promised(&mut self, disk: Disk, vbd: Vbd, file: Option<Identity>) -> DiskId {
        let id = DiskId(self.next());
        let usual = if self.config.control.is_empty() { OnError::Report } else { OnError::Hold };
        if disk.on_error.unwrap_or(usual) == OnError::Hold {
            tell_of_no_room(id, &vbd, &self.events);
        }
        vbd.keep_space(disk.keeps_space);
        if disk.incoming {
            self.pending.away.insert(id);
        }
        let served = Served {
            residence: Residence::of(
                id,
                &disk,
                vbd.disk(),
                &self.wrap,
                Box::new(self.events.clone()),
            ),
            facts: DiskFacts::new(&disk, &vbd),
            file,
            _listening: tell_of_failure(&vbd, &self.events),
            vbd: vbd.disk().clone(),
            moment: None,
            ties: Ties::default(),
            disk,
        };
        self.disks.insert(id, served);
        id
    }

    /// A disk that was left out and is being opened.
    pub(crate) fn opening(&self) -> Option<&Disk> {
        let opening = self.left_out.iter().find(|left| left.opening.is_some());
        opening.map(|left| &left.disk)
    }

    /// Take away a disk that no server has.
    pub(crate) fn take_back(&mut self, id: DiskId) -> Option<Served> {
        self.disks.remove(&id)
    }

    /// It stays after all.
    pub(crate) fn put_back(&mut self, id: DiskId, served: Served) {
        self.disks.insert(id, served);
    }

    /// What the next server is known by.
    pub(crate) fn next_server(&mut self) -> ServerId {
        ServerId(self.next())
    }

    /// Note that a server shows a disk; where nobody has chosen an id, one is found.
    pub(crate) fn add_export(
        &mut self,
        id: Option<String>,
        disk: DiskId,
        server: ServerId,
        name: &str,
    ) {
        let node = self.disks.get(&disk).map(Served::node).unwrap_or_default();
        let Some(serving) = self.servers.get(&server) else { return };
        let (kind, short) = serving.transport.names();
        let free = |id: &String| !self.has_export(id);
        let found = || (0..).map(|number| format!("{node}-{short}{number}")).find(free);
        let id = id.or_else(found).unwrap_or_default();
        let (name, when_gone, write_through) = (name.to_owned(), vec![], None);
        let closing = false;
        let writable = self.disks.get(&disk).is_some_and(|of| !of.vbd.is_read_only());
        let export =
            Export { id, disk, server, kind, name, closing, when_gone, writable, write_through };
        self.exports.push(export);
    }

    /// Whether there is an export of that id, or one is about to come.
    pub(crate) fn has_export(&self, id: &str) -> bool {
        let coming = self.pending.exports.iter().any(|one| one.id == id);
        coming || self.exports.iter().any(|export| export.id == id)
    }

    /// NBD addresses at which there is a server.
    pub(crate) fn bound(&self) -> Vec<Address> {
        let of = |serving: &Serving| match &*serving.transport {
            _ if serving.closing => vec![],
            Transport::Nbd { addresses, .. } => addresses.clone(),
            _ => vec![],
        };
        self.servers.values().flat_map(of).collect()
    }

    /// The disks that a server shows.
    pub(crate) fn disks_of(&self, server: ServerId) -> impl Iterator<Item = &Served> {
        let of = self.exports.iter().filter(move |export| export.server == server);
        of.filter_map(|export| self.disks.get(&export.disk))
    }

    /// The servers that show a disk.
    pub(crate) fn transports_of(&self, disk: DiskId) -> Vec<Arc<Transport>> {
        let of = self.exports.iter().filter(|export| export.disk == disk);
        of.filter_map(|export| Some(self.servers.get(&export.server)?.transport.clone())).collect()
    }

    /// The block device that a disk is.
    pub(crate) fn device_of(&self, disk: DiskId) -> Option<Arc<ublk::Server>> {
        self.transports_of(disk).into_iter().find_map(|transport| match &*transport {
            Transport::Ublk(server) => Some(server.clone()),
            _ => None,
        })
    }

    /// Whether a panic has stopped all disks that a server shows.
    pub(crate) fn all_failed(&self, server: ServerId) -> bool {
        // Others may come to Xen's, and it shows none of its own accord.
        let is_xens = |serving: &Serving| matches!(&*serving.transport, Transport::Xen { .. });
        !self.servers.get(&server).is_some_and(is_xens) && self.disks_of(server).all(is_failed)
    }

    /// Stop NBD servers of which no disk is left.
    pub(crate) fn close_failed(&self) {
        for (id, serving) in &self.servers {
            let shows_some = self.disks_of(*id).next().is_some();
            if matches!(&*serving.transport, Transport::Nbd { .. })
                && shows_some
                && self.all_failed(*id)
            {
                serving.stop.raise();
            }
        }
    }
}

/// Have it said, and heard by who attends, when a panic stops the disk.
fn tell_of_failure(vbd: &ringtap_vbd::Disk, events: &Sender<Event>) -> Listening {
    let (span, events) = (vbd.span().clone(), events.clone());
    vbd.health().when_failed(move |panic| {
        span.in_scope(|| {
            tracing::error!(
                "stopped by a panic: {panic}. Its guests get I/O errors and its exports close; nothing more is \
                 written of what the image has in memory, and its restart log stays for the next server, \
                 which can have the image once this process has ended"
            );
        });
        let _ = events.send(Event::Failed);
    })
}

/// Have it said, and clients told, when requests wait for room.
fn tell_of_no_room(id: DiskId, vbd: &ringtap_vbd::Disk, events: &Sender<Event>) {
    // Its own threads call it: it must not keep the disk.
    let (span, events) = (vbd.span().clone(), events.clone());
    vbd.wait_for_room(move || {
        span.in_scope(|| {
            tracing::error!(
                "no space is left where the image lies: its requests wait; make room, and then have them go on by \
                 `ringtap disk resume`, or by SIGHUP"
            );
        });
        let _ = events.send(Event::Do(Box::new(move |running| running.has_no_room(id))));
    });
}

pub(crate) fn is_failed(disk: &Served) -> bool {
    disk.vbd.health().failure().is_some()
}

pub(crate) fn new_stop() -> Result<Stop, Error> {
    Stop::new().map_err(|source| Error::Process { tried: "make an eventfd", source })
}
