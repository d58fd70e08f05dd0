//! Which sockets serve which disks: addresses are gathered, bound, and grouped into servers.

use ringtap_export::fuse;
use ringtap_export::nbd::Listener;
use ringtap_vbd::disk_span;

use crate::handed::{self, Handed};
use crate::handover;
use crate::ids::DiskId;
use crate::socket::{self, SocketFile};
use crate::{Address, Config, Disk, Error, TlsMode};

/// An NBD server to be: all its listeners offer the same disks.
pub(crate) struct NbdGroup {
    pub(crate) disks: Vec<DiskId>,
    /// What the configuration calls its listeners.
    pub(crate) addresses: Vec<Address>,
    pub(crate) listeners: Vec<Listener>,
    /// Whether each of them speaks TLS.
    pub(crate) tls: Vec<TlsMode>,
    /// Removed when this drops.
    pub(crate) files: Vec<SocketFile>,
}

/// A vhost-user server to be.
pub(crate) struct VhostUser {
    pub(crate) disk: DiskId,
    pub(crate) listener: std::os::unix::net::UnixListener,
    /// Removed when this drops; none where the socket was handed over.
    pub(crate) file: Option<SocketFile>,
}

/// A file to be.
pub(crate) struct File {
    pub(crate) disk: DiskId,
    pub(crate) mount: fuse::Mount,
    pub(crate) options: fuse::Options,
}

/// Every socket, bound and listening, and every file, mounted.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) nbd: Vec<NbdGroup>,
    pub(crate) vhost_user: Vec<VhostUser>,
    pub(crate) fuse: Vec<File>,
}

/// A disk to be served.
pub(crate) type Wanted<'a> = (DiskId, &'a Disk);

impl Plan {
    /// Bind what the disks name. What was handed over for disks that are `left_out` is closed.
    pub(crate) fn bind<'a>(
        config: &Config,
        disks: &[Wanted<'_>],
        left_out: impl Iterator<Item = &'a Disk>,
    ) -> Result<Plan, Error> {
        let mut handed = Handed::take()?;
        let left_out: Vec<&Disk> = left_out.collect();
        let served = |address: &Address| {
            let mut all =
                disks.iter().flat_map(|(_, disk)| disk.nbd.iter().chain(&disk.vhost_user));
            all.any(|other| other == address)
        };
        for address in left_out.iter().flat_map(|disk| disk.nbd.iter().chain(&disk.vhost_user)) {
            match address {
                Address::Systemd(Some(name)) if !served(address) => handed.close(name),
                _ => {}
            }
        }
        let plan = Plan::of(config, disks, &[], &left_out, &mut handed)?;
        for name in handed.left() {
            tracing::warn!("nobody asked for the socket {name:?} that systemd handed over");
        }
        Ok(plan)
    }

    /// Bind what the `new` disks name, but for the NBD addresses at which there is a server. A server has
    /// only addresses that all of the disks that come `later` name, or none of them does: a disk joins all of a server.
    pub(crate) fn of(
        config: &Config,
        new: &[Wanted<'_>],
        bound: &[Address],
        later: &[&Disk],
        handed: &mut Handed,
    ) -> Result<Plan, Error> {
        let mut plan = Plan::default();
        let mut wanted: Vec<(&Address, Vec<DiskId>, bool)> = vec![];
        for (id, disk) in new {
            for address in disk.nbd.iter().filter(|address| !bound.contains(address)) {
                match wanted.iter_mut().find(|(known, ..)| *known == address) {
                    Some((_, disks, _)) => disks.push(*id),
                    None => wanted.push((address, vec![*id], false)),
                }
            }
            wanted.extend(disk.vhost_user.iter().map(|address| (address, vec![*id], true)));
        }
        // Who asks by name goes before who takes the rest.
        wanted.sort_by_key(|(address, ..)| **address == Address::Systemd(None));
        let wanted_later = |address: &Address| -> Vec<bool> {
            later.iter().map(|disk| disk.nbd.contains(address)).collect()
        };
        let span = |disk: &Disk| disk_span(&disk.path.display().to_string()).entered();
        for (address, disks, vhost_user) in wanted {
            let lone = new.iter().find(|(id, _)| disks == [*id]);
            let _disk = lone.map(|(_, disk)| span(disk));
            let (listeners, mut file) = listen(address, config.socket_mode, handed)?;
            if vhost_user {
                for listener in listeners {
                    let Listener::Unix(listener) = listener else {
                        return Err(Error::Handed(format!(
                            "{address} is a TCP socket, and vhost-user hands over memory, \
                             which only a UNIX socket can"
                        )));
                    };
                    let file = file.take();
                    plan.vhost_user.push(VhostUser { disk: disks[0], listener, file });
                }
            } else {
                let mode = config.nbd_tls.as_ref().map(|tls| tls.mode_of(address));
                let tls = vec![mode.unwrap_or(TlsMode::Off); listeners.len()];
                let same = |group: &&mut NbdGroup| {
                    let first = group.addresses.first().map(wanted_later);
                    group.disks == disks && first == Some(wanted_later(address))
                };
                match plan.nbd.iter_mut().find(same) {
                    Some(group) => {
                        group.addresses.push(address.clone());
                        group.listeners.extend(listeners);
                        group.files.extend(file);
                        group.tls.extend(tls);
                    }
                    None => {
                        let addresses = vec![address.clone()];
                        let files = file.into_iter().collect();
                        plan.nbd.push(NbdGroup { disks, addresses, listeners, tls, files });
                    }
                }
            }
        }
        for (id, disk) in new {
            for path in &disk.fuse {
                let _disk = span(disk);
                let (read_only, queues) = (disk.options.read_only, disk.queues);
                let (mode, growable) = (config.socket_mode, disk.growable);
                let options = fuse::Options { read_only, growable, mode, queues };
                let resolved = fuse::resolve(path)?;
                // Nobody answers yet who asks what is mounted there.
                if plan.fuse.iter().any(|other| other.mount.path() == resolved) {
                    return Err(Error::Usage(format!(
                        "two disks ask for the file {}: give each its own",
                        resolved.display()
                    )));
                }
                let mount = handover::mount(path, &disk.path, &options, || Ok(()))?;
                plan.fuse.push(File { disk: *id, mount, options });
            }
        }
        Ok(plan)
    }
}

/// Listen there, and on what file that is.
pub(crate) fn listen(
    address: &Address,
    mode: u32,
    handed: &mut Handed,
) -> Result<(Vec<Listener>, Option<SocketFile>), Error> {
    Ok(match address {
        Address::Unix(path) => {
            let (listener, file) = socket::unix(path, mode)?;
            (vec![Listener::Unix(listener)], Some(file))
        }
        Address::Tcp { host, port } => {
            (socket::tcp(host, *port)?.into_iter().map(Listener::Tcp).collect(), None)
        }
        Address::Systemd(name) => {
            let inherited = handover::inherited(address);
            let listeners = match inherited.is_empty() {
                true => handed.give(name.as_deref())?,
                false => {
                    let given = inherited.into_iter().map(|one| handed::listener("", one));
                    given.collect::<Result<_, _>>()?
                }
            };
            listeners.iter().for_each(|one| handover::note(&place(one), address));
            (listeners, None)
        }
    })
}

/// Where a listener is found: `unix:PATH` or `tcp:HOST:PORT`.
pub(crate) fn place(listener: &Listener) -> Address {
    match listener {
        Listener::Unix(listener) => Address::Unix(socket::unix_path(listener)),
        Listener::Tcp(listener) => {
            let bound = listener.local_addr();
            let host = bound.as_ref().map_or("?".to_owned(), |bound| bound.ip().to_string());
            Address::Tcp { host, port: bound.map_or(0, |bound| bound.port()) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Announce;
    use ringtap_image::OpenOptions;

    #[test]
    fn addresses_that_offer_the_same_disks_are_one_server() {
        let dir = tempfile::tempdir().expect("a folder");
        let at = |name: &str| Address::Unix(dir.path().join(name));
        let disk = |name: &str, nbd: Vec<Address>, vhost_user: Vec<Address>| Disk {
            name: name.into(),
            nbd,
            vhost_user,
            ..Disk::new("null:1M", OpenOptions::default())
        };
        let config = Config {
            disks: vec![
                disk("a", vec![at("both"), at("alone"), at("again")], vec![at("vu")]),
                disk("b", vec![at("both"), at("again")], vec![]),
            ],
            groups: vec![],
            metrics: None,
            folder: None,
            strict: false,
            nbd_limits: Default::default(),
            nbd_tls: None,
            socket_mode: 0o600,
            pid_file: None,
            control: vec![],
            announce: Announce::Text,
            sandbox: Default::default(),
            xen: None,
        };
        let [a, b] = [DiskId::of_test(0), DiskId::of_test(1)];
        let wanted = [(a, &config.disks[0]), (b, &config.disks[1])];
        let plan = Plan::bind(&config, &wanted, std::iter::empty()).expect("sockets");
        let groups: Vec<_> =
            plan.nbd.iter().map(|group| (group.disks.clone(), group.listeners.len())).collect();
        assert_eq!(groups, [(vec![a, b], 2), (vec![a], 1)]);
        assert_eq!(plan.vhost_user.len(), 1);
        assert_eq!(place(&plan.nbd[1].listeners[0]), at("alone"));
        drop(plan);
        assert_eq!(std::fs::read_dir(dir.path()).expect("the folder").count(), 0);
        // What is served later at one of a disk's addresses is not served at its others.
        let late = disk("c", vec![at("again")], vec![]);
        let plan = Plan::bind(&config, &wanted, std::iter::once(&late)).expect("sockets");
        let groups: Vec<_> = plan.nbd.iter().map(|group| group.addresses.clone()).collect();
        assert_eq!(groups, [vec![at("both")], vec![at("alone")], vec![at("again")]]);
    }
}
