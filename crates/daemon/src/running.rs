//! The disks that are served and their servers: those there are from the start, and those that come later.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use ringtap_export::{Stop, fuse, nbd, ublk, vhost_user};
use ringtap_io::Panic;
use ringtap_vbd::{Listening, Vbd};

use crate::events::{Event, spawn};
use crate::facts::DiskFacts;
use crate::opened::{Identity, identity};
use crate::plan::{self, NbdGroup, Plan};
use crate::socket::SocketFile;
use crate::{Address, Config, Disk, Error, TlsMode};

/// A disk being served.
pub(crate) struct Served {
    pub(crate) vbd: ringtap_vbd::Disk,
    /// Has a panic that stops it told of.
    _listening: Listening,
    pub(crate) vhost_user: Vec<Arc<vhost_user::Server>>,
    pub(crate) fuse: Vec<Arc<fuse::Server>>,
    pub(crate) ublk: Option<Arc<ublk::Server>>,
    pub(crate) facts: DiskFacts,
    /// Which file the image was, as it was opened.
    pub(crate) file: Option<Identity>,
}

/// An NBD server, and the word to stop for it.
struct NbdServer {
    /// Places of its disks in the configuration.
    disks: Vec<usize>,
    addresses: Vec<Address>,
    /// Where it is found, and whether by TLS alone.
    places: Vec<(Address, bool)>,
    server: Arc<nbd::Server>,
    stop: Stop,
}

/// All that is served.
pub(crate) struct Running {
    /// The configuration of the disks that are served.
    pub(crate) config: Config,
    /// In the order of the configuration.
    pub(crate) disks: Vec<Served>,
    pub(crate) credentials: Option<nbd::Credentials>,
    nbd: Vec<NbdServer>,
    nbd_budget: Arc<nbd::Budget>,
    /// Removed when this drops.
    files: Vec<SocketFile>,
    stop: Stop,
    stop_devices: Stop,
    threads: Vec<JoinHandle<()>>,
    devices: Vec<JoinHandle<()>>,
    events: Sender<Event>,
}

fn new_stop() -> Result<Stop, Error> {
    Stop::new().map_err(|source| Error::Process { tried: "make an eventfd", source })
}

impl Running {
    /// The disks of the configuration, with nothing that serves them yet.
    pub(crate) fn new(
        config: Config,
        vbds: Vec<Vbd>,
        credentials: Option<nbd::Credentials>,
        events: Sender<Event>,
    ) -> Result<Running, Error> {
        let mut running = Running {
            disks: vec![],
            credentials,
            nbd: vec![],
            nbd_budget: nbd::Budget::new(config.nbd_limits.memory_of_all),
            files: vec![],
            stop: new_stop()?,
            stop_devices: new_stop()?,
            threads: vec![],
            devices: vec![],
            events,
            config,
        };
        running.disks = running
            .config
            .disks
            .iter()
            .zip(vbds)
            .map(|(disk, vbd)| running.served(disk, vbd))
            .collect();
        Ok(running)
    }

    fn served(&self, disk: &Disk, vbd: Vbd) -> Served {
        Served {
            facts: DiskFacts::new(disk, &vbd),
            file: identity(&disk.path),
            _listening: tell_of_failure(&vbd, &self.events),
            vbd: vbd.disk().clone(),
            vhost_user: vec![],
            fuse: vec![],
            ublk: None,
        }
    }

    /// One disk more, with nothing that serves it yet.
    pub(crate) fn add(&mut self, disk: Disk, vbd: Vbd) {
        self.disks.push(self.served(&disk, vbd));
        self.config.disks.push(disk);
    }

    /// Take back the disk that was added last and could not be served.
    pub(crate) fn take_back(&mut self) -> Option<Served> {
        self.config.disks.pop();
        self.disks.pop()
    }

    /// NBD addresses at which there is a server.
    pub(crate) fn bound(&self) -> Vec<Address> {
        self.nbd.iter().flat_map(|server| &server.addresses).cloned().collect()
    }

    /// Stop NBD servers of which no disk is left.
    pub(crate) fn close_failed(&self) {
        let none_left =
            |one: &&NbdServer| one.disks.iter().all(|disk| is_failed(&self.disks[*disk]));
        self.nbd.iter().filter(none_left).for_each(|one| one.stop.raise());
    }

    /// Stop the servers, those of block devices only where these are not to wait for the next process; once this
    /// returns each request taken has ended.
    pub(crate) fn stop(&mut self, devices: bool) {
        self.stop.raise();
        self.nbd.iter().for_each(|one| one.stop.raise());
        if devices {
            self.stop_devices.raise();
            self.threads.append(&mut self.devices);
        }
        for thread in self.threads.drain(..) {
            // One that panicked has said so to its disk.
            let _ = thread.join();
        }
    }

    /// Offer the disks from the place `first` on at the NBD addresses at which there is a server already.
    fn join_servers(&mut self, first: usize) {
        for (place, disk) in self.config.disks.iter().enumerate().skip(first) {
            for one in &mut self.nbd {
                if !disk.nbd.iter().any(|address| one.addresses.contains(address)) {
                    continue;
                }
                one.disks.push(place);
                one.server.add(export(disk, &self.disks[place]));
                for (address, tls) in &one.places {
                    self.disks[place].facts.add_nbd(address, *tls);
                }
            }
        }
    }

    /// Make the block devices of this host that disks from the place `first` on are, and start a thread for each.
    pub(crate) fn start_devices(&mut self, first: usize) -> Result<(), Error> {
        let mut devices = vec![];
        let disks = self.config.disks.iter().zip(&mut self.disks);
        for (place, (disk, served)) in disks.enumerate().skip(first) {
            let Some(id) = disk.ublk else { continue };
            let span = served.vbd.span().clone();
            let _disk = span.enter();
            let options = ublk::Options { queues: disk.queues };
            let device = ublk::Device::open(&disk.path, id, &served.vbd, &options)?;
            let server = Arc::new(ublk::Server::start(device, served.vbd.clone())?);
            served.facts.set_ublk(server.path().display().to_string());
            served.ublk = Some(server.clone());
            devices.push((place, served.vbd.clone(), server));
        }
        let start = |(place, vbd, server): (usize, ringtap_vbd::Disk, Arc<ublk::Server>)| {
            let (stop, events) = (self.stop_devices.clone(), self.events.clone());
            spawn(&vbd.thread_name("ublk"), move || {
                let _disk = vbd.span().enter();
                let result = server.serve(&stop).map_err(Into::into);
                let server = format!("ublk {}", server.path().display());
                let _ = events.send(Event::Ended { server, disks: vec![place], result });
            })
        };
        for device in devices {
            self.devices.push(start(device)?);
        }
        Ok(())
    }

    /// Start a thread for each server of the plan, which is of the disks from the place `first` on.
    pub(crate) fn start(&mut self, plan: Plan, first: usize) -> Result<(), Error> {
        self.join_servers(first);
        let Plan { nbd, vhost_user, fuse, files } = plan;
        self.files.extend(files);
        let (config, disks) = (&self.config, &mut self.disks);
        let (threads, credentials) = (&mut self.threads, self.credentials.as_ref());
        for mut group in nbd {
            let places = group.listeners.iter().map(plan::place);
            let places: Vec<(Address, bool)> =
                places.zip(group.tls.iter().map(|tls| *tls == TlsMode::Require)).collect();
            for (place, tls) in &places {
                for disk in &group.disks {
                    disks[*disk].facts.add_nbd(place, *tls);
                }
            }
            let listeners = std::mem::take(&mut group.listeners);
            let tls = group.tls.iter().map(|mode| mode.with(credentials)).collect();
            let exports =
                group.disks.iter().map(|disk| export(&config.disks[*disk], &disks[*disk]));
            let server = nbd::Server::new(listeners, exports.collect())
                .with_limits(config.nbd_limits)
                .with_budget(self.nbd_budget.clone())
                .with_tls(tls);
            let (server, stop) = (Arc::new(server), new_stop()?);
            let first = places.first().map(|(place, _)| place.to_string());
            let name = format!("NBD {}", first.unwrap_or_default());
            let (theirs, their_stop, events) = (server.clone(), stop.clone(), self.events.clone());
            let lone = match group.disks[..] {
                [disk] => Some(disks[disk].vbd.clone()),
                _ => None,
            };
            let of = group.disks.clone();
            let thread = lone.as_ref().map_or("nbd".to_owned(), |vbd| vbd.thread_name("nbd"));
            threads.push(spawn(&thread, move || {
                let _disk = lone.as_ref().map(|vbd| vbd.span().enter());
                let served = Panic::catch(|| theirs.serve(&their_stop));
                let result = match served {
                    Ok(end) => end.map_err(Into::into),
                    // Without their listener none of them can be had.
                    Err(panic) => {
                        let exports = theirs.exports();
                        exports.iter().for_each(|one| one.vbd.health().fail(panic.clone()));
                        Err(panic.into())
                    }
                };
                let _ = events.send(Event::Ended { server: name, disks: of, result });
            })?);
            let NbdGroup { disks, addresses, .. } = group;
            self.nbd.push(NbdServer { disks, addresses, places, server, stop });
        }
        for socket in vhost_user {
            let (disk, served) = (&config.disks[socket.disk], &mut disks[socket.disk]);
            let path = plan::unix_path(&socket.listener).display().to_string();
            served.facts.add_vhost_user(path.clone());
            let options = vhost_user::Options { queues: disk.queues, serial: disk.serial.clone() };
            let server =
                Arc::new(vhost_user::Server::new(socket.listener, served.vbd.clone(), options));
            served.vhost_user.push(server.clone());
            let (stop, events) = (self.stop.clone(), self.events.clone());
            let vbd = served.vbd.clone();
            threads.push(spawn(&vbd.thread_name("vu"), move || {
                let _disk = vbd.span().enter();
                let result = server.serve(&stop).map_err(Into::into);
                let (server, disks) = (format!("vhost-user {path}"), vec![socket.disk]);
                let _ = events.send(Event::Ended { server, disks, result });
            })?);
        }
        for file in fuse {
            let served = &mut disks[file.disk];
            let server = Arc::new(fuse::Server::new(file.mount, served.vbd.clone(), file.options));
            let path = server.path().display().to_string();
            served.facts.add_fuse(path.clone());
            served.fuse.push(server.clone());
            let (stop, events) = (self.stop.clone(), self.events.clone());
            let vbd = served.vbd.clone();
            threads.push(spawn(&vbd.thread_name("fuse"), move || {
                let _disk = vbd.span().enter();
                let result = server.serve(&stop).map_err(Into::into);
                let (server, disks) = (format!("FUSE {path}"), vec![file.disk]);
                let _ = events.send(Event::Ended { server, disks, result });
            })?);
        }
        Ok(())
    }
}

fn export(disk: &Disk, served: &Served) -> nbd::NamedExport {
    nbd::NamedExport {
        name: disk.name.clone(),
        description: disk.path.display().to_string(),
        vbd: served.vbd.clone(),
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

pub(crate) fn is_failed(disk: &Served) -> bool {
    disk.vbd.health().failure().is_some()
}
