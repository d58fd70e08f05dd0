//! Servers, each with a thread: started for disks that are running.

use std::sync::mpsc::Sender;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;

use ringtap_export::{Stop, nbd, ublk, vhost_user};
use ringtap_io::Panic;

use crate::ids::{DiskId, ServerId};
use crate::plan::{self, File, NbdGroup, Plan, VhostUser};
use crate::running::{Event, Running, Served, Serving, new_stop};
use crate::socket::SocketFile;
use crate::threads::spawn;
use crate::transports::{End, Transport};
use crate::{Address, Error, TlsMode, handover};

impl Running {
    /// Start a thread for each server of the plan, which is of these disks. They join the NBD servers that there are
    /// at their addresses.
    pub(crate) fn start(&mut self, plan: Plan, disks: &[DiskId]) -> Result<(), Error> {
        self.join_servers(disks);
        let Plan { nbd, vhost_user, fuse } = plan;
        nbd.into_iter().try_for_each(|group| self.start_nbd(group))?;
        vhost_user.into_iter().try_for_each(|socket| self.start_vhost_user(socket))?;
        fuse.into_iter().try_for_each(|file| self.start_fuse(file))
    }

    /// Offer disks at the NBD addresses at which there is a server already.
    fn join_servers(&mut self, disks: &[DiskId]) {
        let mut joined = vec![];
        for id in disks {
            let Some(served) = self.disks.get_mut(id) else { continue };
            for (server, serving) in &self.servers {
                let Transport::Nbd { addresses, places, server: theirs, .. } = &*serving.transport
                else {
                    continue;
                };
                if serving.closing || !served.disk.nbd.iter().any(|one| addresses.contains(one)) {
                    continue;
                }
                theirs.add(export(served));
                for (address, tls) in places {
                    served.facts.add_nbd(address, *tls);
                }
                joined.push((*id, *server, served.disk.name.clone()));
            }
        }
        for (disk, server, name) in joined {
            self.add_export(None, disk, server, &name);
        }
    }

    /// Make the block devices of this host that these disks are, and start a thread for each.
    pub(crate) fn start_devices(&mut self, disks: &[DiskId]) -> Result<(), Error> {
        let mut devices = vec![];
        for id in disks {
            let Some(served) = self.disks.get_mut(id) else { continue };
            let Some(number) = served.disk.ublk else { continue };
            let span = served.vbd.span().clone();
            let _disk = span.enter();
            let options = ublk::Options { queues: served.disk.queues };
            let shown = (&*served.disk.path, number);
            let server = handover::device(served.node(), shown, &served.vbd, &options)?;
            served.facts.set_ublk(server.path().display().to_string());
            devices.push((*id, server));
        }
        devices.into_iter().try_for_each(|(disk, server)| {
            let transport = Transport::Ublk(server);
            self.start_one(Lone { id: None, disk, transport, files: vec![], added: false })
        })
    }

    /// Start the thread of a server that shows one disk.
    pub(crate) fn start_one(&mut self, lone: Lone) -> Result<(), Error> {
        let Lone { id: export, disk, transport, files, added } = lone;
        let Some(vbd) = self.disks.get(&disk).map(|served| served.vbd.clone()) else {
            return Ok(());
        };
        let (id, stop, transport) = (self.next_server(), new_stop()?, Arc::new(transport));
        let thread = self.start_thread(id, &transport, &stop, Some(vbd.clone()))?;
        let serving = Serving::new(transport, stop, thread, added, files, Some(vbd));
        self.servers.insert(id, serving);
        self.add_export(export, disk, id, "");
        Ok(())
    }

    /// Start the thread of a server; of a `lone` disk it bears the name.
    pub(crate) fn start_thread(
        &self,
        id: ServerId,
        transport: &Arc<Transport>,
        stop: &Stop,
        lone: Option<ringtap_vbd::Disk>,
    ) -> Result<JoinHandle<()>, Error> {
        let (serves, theirs, events) = (transport.clone(), stop.clone(), self.events.clone());
        let (role, handing_over) = (transport.role(), self.handing_over.clone());
        let name = lone.as_ref().map_or(role.to_owned(), |vbd| vbd.thread_name(role));
        spawn(&name, move || {
            let _disk = lone.as_ref().map(|vbd| vbd.span().enter());
            let result =
                Panic::catch(|| serves.serve(&theirs)).unwrap_or_else(|panic| Err(panic.into()));
            let mut ended = handing_over.lock().unwrap_or_else(PoisonError::into_inner);
            match &mut *ended {
                // One that hands over goes on, here or elsewhere.
                Some(ended) if result.is_ok() => ended.push(id),
                _ => tell_end(&events, serves.title(), id, result),
            }
        })
    }

    /// Have a server go on that has stopped to hand over.
    pub(crate) fn start_again(&mut self, id: ServerId) -> Result<(), Error> {
        let Some(serving) = self.servers.get(&id) else { return Ok(()) };
        let (transport, stop, lone) = (serving.transport.clone(), new_stop()?, serving.of.clone());
        transport.hand_over(false);
        let thread = self.start_thread(id, &transport, &stop, lone)?;
        if let Some(serving) = self.servers.get_mut(&id) {
            (serving.stop, serving.thread) = (stop, Some(thread));
        }
        Ok(())
    }

    /// Whether that server was to hand over, and its end comes only now that nobody takes it over.
    pub(crate) fn is_held_up(&self, id: ServerId) -> bool {
        self.servers.get(&id).is_some_and(|serving| serving.held_up)
    }

    /// It has ended: it goes on with those that it left.
    pub(crate) fn goes_on_late(&mut self, id: ServerId) {
        let Some(serving) = self.servers.get_mut(&id) else { return };
        serving.join();
        serving.held_up = false;
        serving.transport.take_back();
        tracing::info!("{} goes on", serving.transport.title());
        if let Err(error) = self.start_again(id) {
            tracing::error!("an export has ended: {error}");
        }
    }

    fn start_vhost_user(&mut self, socket: VhostUser) -> Result<(), Error> {
        let VhostUser { disk, listener, file } = socket;
        let Some(served) = self.disks.get_mut(&disk) else { return Ok(()) };
        let (queues, serial) = (served.disk.queues, served.disk.serial.clone());
        let options = vhost_user::Options { queues, serial };
        let residence = served.residence.clone();
        let transport = Transport::vhost_user(listener, served.vbd.clone(), options, residence);
        transport.places("").into_iter().for_each(|path| served.facts.add_vhost_user(path));
        let files = file.into_iter().collect();
        self.start_one(Lone { id: None, disk, transport, files, added: false })
    }

    fn start_fuse(&mut self, file: File) -> Result<(), Error> {
        let File { disk, mount, options } = file;
        let Some(served) = self.disks.get_mut(&disk) else { return Ok(()) };
        let transport = Transport::fuse(mount, served.vbd.clone(), options);
        transport.places("").into_iter().for_each(|path| served.facts.add_fuse(path));
        self.start_one(Lone { id: None, disk, transport, files: vec![], added: false })
    }

    fn start_nbd(&mut self, group: NbdGroup) -> Result<(), Error> {
        let NbdGroup { disks, addresses, listeners, tls, files } = group;
        let places = listeners.iter().map(plan::place);
        let places: Vec<(Address, bool)> =
            places.zip(tls.iter().map(|tls| *tls == TlsMode::Require)).collect();
        for (place, tls) in &places {
            for id in &disks {
                if let Some(served) = self.disks.get_mut(id) {
                    served.facts.add_nbd(place, *tls);
                }
            }
        }
        let shown = || disks.iter().filter_map(|id| self.disks.get(id));
        let exports = shown().map(export).collect();
        let mut vbds: Vec<_> = shown().map(|served| served.vbd.clone()).collect();
        let lone = if vbds.len() == 1 { vbds.pop() } else { None };
        let socket = NbdSocket { addresses, places, listeners, tls, files, keeps_open: false };
        let server = self.start_nbd_server(socket, exports, lone)?;
        for id in disks {
            let name = self.disks.get(&id).map(|served| served.disk.name.clone());
            self.add_export(None, id, server, &name.unwrap_or_default());
        }
        Ok(())
    }

    /// Start the thread of an NBD server; of a `lone` disk it bears the name.
    pub(crate) fn start_nbd_server(
        &mut self,
        socket: NbdSocket,
        exports: Vec<nbd::NamedExport>,
        lone: Option<ringtap_vbd::Disk>,
    ) -> Result<ServerId, Error> {
        let NbdSocket { addresses, places, listeners, tls, files, keeps_open } = socket;
        let own = self.nbd_creds.as_ref().filter(|_| keeps_open);
        let own = own.and_then(|(_, named)| named.server.as_ref());
        let credentials = own.or(self.credentials.as_ref());
        let tls = tls.iter().map(|mode| mode.with(credentials)).collect();
        let mut limits = self.config.nbd_limits;
        if let Some(most) = self.nbd_most.filter(|_| keeps_open) {
            limits.connections = limits.connections.min(most as usize);
        }
        let server = nbd::Server::new(listeners, exports)
            .with_limits(limits)
            .with_budget(self.nbd_budget.clone())
            .with_tls(tls);
        let all: Vec<String> = places.iter().map(|(place, _)| place.to_string()).collect();
        handover::sessions(&all).into_iter().for_each(|one| server.adopt(one));
        let server = Arc::new(server);
        if let Some(waits) = &mut self.pending.nbd_waits {
            waits.push(server.have_new_ones_wait());
        }
        let transport = Transport::Nbd { addresses, places, server, keeps_open };
        let (transport, stop, id) = (Arc::new(transport), new_stop()?, self.next_server());
        let thread = self.start_thread(id, &transport, &stop, lone.clone())?;
        let serving = Serving::new(transport, stop, thread, keeps_open, files, lone);
        self.servers.insert(id, serving);
        Ok(id)
    }
}

/// A server to be, of one disk.
pub(crate) struct Lone {
    /// What its export is known by, if somebody has chosen that.
    pub(crate) id: Option<String>,
    pub(crate) disk: DiskId,
    pub(crate) transport: Transport,
    pub(crate) files: Vec<SocketFile>,
    /// Whether a client of the control socket wants it.
    pub(crate) added: bool,
}

/// Where an NBD server listens.
pub(crate) struct NbdSocket {
    pub(crate) addresses: Vec<Address>,
    pub(crate) places: Vec<(Address, bool)>,
    pub(crate) listeners: Vec<nbd::Listener>,
    pub(crate) tls: Vec<TlsMode>,
    pub(crate) files: Vec<SocketFile>,
    /// Whether it goes on where it shows nothing, and somebody asked for just that.
    pub(crate) keeps_open: bool,
}

fn tell_end(events: &Sender<Event>, server: String, of: ServerId, result: End) {
    let _ = events.send(Event::Ended { server, of: Some(of), result });
}

fn export(served: &Served) -> nbd::NamedExport {
    nbd::NamedExport {
        name: served.disk.name.clone(),
        description: served.disk.path.display().to_string(),
        vbd: served.vbd.clone(),
    }
}
