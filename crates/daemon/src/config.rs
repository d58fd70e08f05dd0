//! What to serve, and where.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use ringtap_export::nbd::{Limits, MAX_BITMAPS};

use crate::folder::Folder;
use crate::node::is_name;
use crate::{Address, Allotment, Disk, Error, NbdTls, Sandbox, XenConfig, node};

/// The length of a virtio-blk serial number. Source: virtio 1.2, 5.2.6.
const SERIAL_LEN: usize = 20;
/// Sector sizes that every guest can use: none is larger than a page.
const SECTORS: [u32; 4] = [512, 1024, 2048, 4096];
/// The longest name of an NBD export. Source: the NBD protocol, "Values / string".
const NAME_LEN: usize = 4096;

/// How to tell that everything listens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Announce {
    /// The word `ready` on a line of stdout.
    #[default]
    Text,
    /// One line of JSON on stdout.
    Json,
}

/// Where clients control a server by QMP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlAt {
    /// They connect to this UNIX socket.
    Listen(PathBuf),
    /// The client listens at this UNIX socket, and the server connects to it.
    Dial(PathBuf),
}

impl ControlAt {
    /// The socket.
    pub fn path(&self) -> &Path {
        match self {
            ControlAt::Listen(path) | ControlAt::Dial(path) => path,
        }
    }
}

/// What one process serves.
#[derive(Clone, Debug)]
pub struct Config {
    /// The disks.
    pub disks: Vec<Disk>,
    /// Groups of disks that share limits, by their names.
    pub groups: Vec<(String, Allotment)>,
    /// A folder with more disks.
    pub folder: Option<Folder>,
    /// Whether one disk whose image cannot be opened stops all of them.
    pub strict: bool,
    /// What NBD clients may take.
    pub nbd_limits: Limits,
    /// Whether NBD sockets speak TLS.
    pub nbd_tls: Option<NbdTls>,
    /// Permissions of the UNIX sockets it makes.
    pub socket_mode: u32,
    /// A file to hold the process id while it serves.
    pub pid_file: Option<PathBuf>,
    /// Where what the disks do is told to Prometheus.
    pub metrics: Option<Address>,
    /// Where clients control the server by QMP.
    pub control: Vec<ControlAt>,
    /// How to tell that everything listens.
    pub announce: Announce,
    /// Whether the server is confined. The process that serves is, until it ends.
    pub sandbox: Sandbox,
    /// How the disks are served that Xen's toolstack names, where they are.
    pub xen: Option<XenConfig>,
}

impl Config {
    /// The same, ready to be carried out; [`Error::Usage`] where the wishes contradict each other.
    pub(crate) fn checked(mut self) -> Result<Config, Error> {
        self.name_handed_sockets()?;
        self.check()?;
        node::name_all(&mut self.disks)?;
        if let Some(tls) = &self.nbd_tls {
            tls.check()?;
            if self.control.is_empty() && self.disks.iter().all(|disk| disk.nbd.is_empty()) {
                return Err(Error::Usage("--tls-dir is for NBD: add --nbd tcp:HOST:PORT".into()));
            }
        }
        Ok(self)
    }

    /// A lone `systemd` takes whatever is handed over; where several ask, each takes the sockets
    /// that bear the name of its export.
    fn name_handed_sockets(&mut self) -> Result<(), Error> {
        let bare = |disk: &Disk| {
            let all = disk.nbd.iter().chain(&disk.vhost_user);
            all.filter(|address| **address == Address::Systemd(None)).count()
        };
        let asking: Vec<usize> = self.disks.iter().map(bare).collect();
        if asking.iter().sum::<usize>() < 2 {
            return Ok(());
        }
        for (disk, asked) in self.disks.iter_mut().zip(asking) {
            if asked > 1 || (asked == 1 && disk.name.is_empty()) {
                return Err(Error::Usage(format!(
                    "{}: which of the sockets that systemd hands over? \
                     Write systemd:NAME, with the FileDescriptorName= of its .socket unit",
                    disk.path.display()
                )));
            }
            for address in disk.nbd.iter_mut().chain(&mut disk.vhost_user) {
                if *address == Address::Systemd(None) {
                    *address = Address::Systemd(Some(disk.name.clone()));
                }
            }
        }
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let refuse = |text: String| Err(Error::Usage(text));
        let others_come = !self.control.is_empty() || self.folder.is_some() || self.xen.is_some();
        if self.disks.is_empty() && !others_come {
            return refuse("no disk to serve: name an image, or null:SIZE".into());
        }
        let mut groups = HashSet::new();
        for (name, allotment) in &self.groups {
            if !is_name(name) || !groups.insert(name) {
                return refuse(format!(
                    "--throttle-group {name}: give each a name of its own, of letters, digits, hyphens, points and underscores"
                ));
            }
            allotment
                .check()
                .map_err(|why| Error::Usage(format!("--throttle-group {name}: {why}")))?;
        }
        let mut sockets = HashSet::new();
        let mut exports = HashSet::new();
        let mut files = HashSet::new();
        let mut devices = HashSet::new();
        for disk in &self.disks {
            let shown = disk.path.display();
            if disk.is_served_nowhere() && self.control.is_empty() {
                return refuse(format!(
                    "{shown} is served nowhere: add --nbd unix:PATH, --vhost-user PATH, \
                     --fuse PATH or --ublk after it"
                ));
            }
            let others = disk.nbd.len() + disk.vhost_user.len() > 0 || disk.ublk.is_some();
            if disk.growable && (others || disk.fuse.is_empty() || disk.options.read_only) {
                return refuse(format!(
                    "{shown}: --growable is for a disk that --fuse alone serves, for writing"
                ));
            }
            let elsewhere = disk.nbd.len() + disk.fuse.len() > 0 || disk.ublk.is_some();
            if disk.incoming && (elsewhere || disk.options.read_only || disk.is_null()) {
                return refuse(format!(
                    "{shown}: --incoming is for an image that --vhost-user alone serves, for writing: its guest comes \
                     by that"
                ));
            }
            if disk.logical_block_size.is_some_and(|bytes| !SECTORS.contains(&bytes)) {
                return refuse(format!(
                    "{shown}: --logical-block-size takes 512, 1024, 2048 or 4096"
                ));
            }
            if disk.queues == 0 {
                return refuse(format!("{shown}: --queues 0: give at least 1"));
            }
            let printable = disk.serial.bytes().all(|byte| (b' '..=b'~').contains(&byte));
            if disk.serial.len() > SERIAL_LEN || !printable {
                return refuse(format!(
                    "{shown}: --serial {:?}: give at most {SERIAL_LEN} printable ASCII characters",
                    disk.serial
                ));
            }
            if disk.name.len() > NAME_LEN {
                return refuse(format!("{shown}: --name is longer than {NAME_LEN} bytes"));
            }
            for address in &disk.nbd {
                if !exports.insert((address.clone(), &disk.name)) {
                    return refuse(format!(
                        "two exports are named {:?} at {address}: give each its own --name",
                        disk.name
                    ));
                }
            }
            if let Some(Some(id)) = disk.ublk {
                if !devices.insert(id) {
                    return refuse(format!(
                        "two disks ask for /dev/ublkb{id}: give each its own number"
                    ));
                }
            }
            check_bitmaps(disk)?;
            let own = Allotment { limits: disk.limits, share: disk.share };
            own.check().map_err(|why| Error::Usage(format!("{shown}: {why}")))?;
            if let Some(group) = disk.group.as_ref().filter(|group| !groups.contains(group)) {
                return refuse(format!(
                    "{shown}: --group {group}: there is no such group: add --throttle-group {group},iops=N"
                ));
            }
            for path in &disk.fuse {
                if !files.insert(path) {
                    return refuse(format!(
                        "two disks ask for the file {}: give each its own",
                        path.display()
                    ));
                }
            }
            for address in &disk.vhost_user {
                // A vhost-user socket is one disk: there is no name to choose by.
                if !sockets.insert(address) {
                    return refuse(format!(
                        "two disks ask for the vhost-user socket {address}: give each its own"
                    ));
                }
            }
        }
        let mut nbd = self.disks.iter().flat_map(|disk| &disk.nbd);
        match nbd.find(|address| sockets.contains(address)) {
            Some(address) => refuse(format!("NBD and vhost-user cannot share {address}")),
            None => Ok(()),
        }
    }
}

/// Bitmaps are shown over NBD and nowhere else.
fn check_bitmaps(disk: &Disk) -> Result<(), Error> {
    let names = &disk.options.bitmaps;
    let twice = (1..).zip(names).find(|(next, name)| names.iter().skip(*next).any(|n| n == *name));
    let shown = disk.path.display();
    if let Some((_, name)) = twice {
        Err(Error::Usage(format!("{shown}: --bitmap {name} is given twice")))
    } else if !names.is_empty() && disk.nbd.is_empty() && disk.keeping.exports.is_empty() {
        Err(Error::Usage(format!("{shown}: --bitmap is for NBD: add --nbd unix:PATH")))
    } else if names.len() > MAX_BITMAPS {
        Err(Error::Usage(format!("{shown}: at most {MAX_BITMAPS} bitmaps can be shown")))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ringtap_image::OpenOptions;

    use super::*;
    use crate::TlsMode;

    fn disk(nbd: &[&str], vhost_user: &[&str]) -> Disk {
        Disk {
            nbd: nbd.iter().map(|text| Address::nbd(text).expect("an address")).collect(),
            vhost_user: vhost_user
                .iter()
                .map(|text| Address::vhost_user(text).expect("an address"))
                .collect(),
            ..Disk::new("null:1M", OpenOptions::default())
        }
    }

    fn check(disks: Vec<Disk>) -> Result<(), String> {
        config(disks).checked().map(drop).map_err(|error| error.to_string())
    }

    fn config(disks: Vec<Disk>) -> Config {
        Config {
            disks,
            groups: vec![],
            metrics: None,
            folder: None,
            strict: false,
            nbd_limits: Limits::default(),
            nbd_tls: None,
            socket_mode: 0o600,
            pid_file: None,
            control: vec![],
            announce: Announce::Text,
            sandbox: Default::default(),
            xen: None,
        }
    }

    fn named(name: &str, disk: Disk) -> Disk {
        Disk { name: name.into(), ..disk }
    }

    #[test]
    fn contradictions_are_told() {
        assert!(check(vec![disk(&["unix:a"], &["b"])]).is_ok());
        let both = vec![disk(&["unix:a"], &[]), named("b", disk(&["unix:a"], &[]))];
        assert!(check(both).is_ok());
        let showing = |bitmaps: &[&str], nbd: &[&str]| {
            let bitmaps = bitmaps.iter().map(|name| (*name).to_owned()).collect();
            Disk { options: OpenOptions { bitmaps, ..Default::default() }, ..disk(nbd, &["b"]) }
        };
        assert!(check(vec![showing(&["x", "y"], &["unix:a"])]).is_ok());
        for (wrong, said) in [
            (vec![], "no disk"),
            (vec![disk(&[], &[])], "served nowhere"),
            (vec![showing(&["x"], &[])], "--bitmap is for NBD"),
            (vec![showing(&["x", "y", "x"], &["unix:a"])], "--bitmap x is given twice"),
            (vec![showing(&["x"; 64], &["unix:a"])], "twice"),
            (vec![disk(&["unix:a"], &[]), disk(&["unix:a"], &[])], "its own --name"),
            (vec![disk(&[], &["a"]), disk(&[], &["a"])], "vhost-user socket unix:a"),
            (vec![disk(&["unix:a"], &["a"])], "cannot share"),
            (vec![Disk { ublk: Some(Some(1)), ..disk(&[], &[]) }; 2], "/dev/ublkb1"),
            (vec![Disk { fuse: vec!["a".into(), "a".into()], ..disk(&[], &[]) }], "the file a"),
            (vec![Disk { group: Some("g".into()), ..disk(&["unix:a"], &[]) }], "no such group"),
            (vec![Disk { queues: 0, ..disk(&["unix:a"], &[]) }], "at least 1"),
            (vec![Disk { logical_block_size: Some(768), ..disk(&[], &["a"]) }], "2048 or 4096"),
            (vec![Disk { serial: "ä".into(), ..disk(&["unix:a"], &[]) }], "printable"),
            (vec![Disk { serial: "x".repeat(21), ..disk(&["unix:a"], &[]) }], "at most 20"),
        ] {
            let message = check(wrong).expect_err(said);
            assert!(message.contains(said), "{message}");
        }
    }

    #[test]
    fn tls_holds_for_the_sockets_it_was_said_of() {
        let address = |text: &str| Address::nbd(text).expect("an address");
        let of = vec![(address("unix:a"), TlsMode::Off), (address("systemd"), TlsMode::On)];
        let mut tls = NbdTls { folder: "x".into(), verify_peer: true, mode: TlsMode::Require, of };
        for (text, mode) in
            [("unix:a", TlsMode::Off), ("systemd:name", TlsMode::On), ("tcp:h:1", TlsMode::Require)]
        {
            assert_eq!(tls.mode_of(&address(text)), mode, "{text}");
        }
        let with = |tls: &NbdTls, disk| {
            let config = Config { nbd_tls: Some(tls.clone()), ..config(vec![disk]) };
            config.checked().map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(with(&tls, disk(&["unix:a"], &[])), Ok(()));
        assert!(with(&tls, disk(&[], &["a"])).expect_err("no NBD").contains("--nbd"));
        tls.of.push((address("unix:a"), TlsMode::On));
        assert!(with(&tls, disk(&["unix:a"], &[])).expect_err("two words").contains("unix:a"));
    }

    #[test]
    fn handed_sockets_are_named_where_several_ask() {
        assert!(check(vec![disk(&["systemd"], &[])]).is_ok());
        assert!(check(vec![disk(&["systemd:a"], &["systemd"])]).is_ok());
        let pair = vec![named("a", disk(&["systemd"], &[])), named("b", disk(&[], &["systemd"]))];
        assert!(check(pair.clone()).is_ok());
        let mut config = config(pair);
        config.name_handed_sockets().expect("names");
        assert_eq!(config.disks[0].nbd, [Address::Systemd(Some("a".into()))]);
        assert_eq!(config.disks[1].vhost_user, [Address::Systemd(Some("b".into()))]);
        for wrong in [
            vec![named("a", disk(&["systemd"], &["systemd"]))],
            vec![disk(&["systemd"], &[]), named("b", disk(&["systemd"], &[]))],
        ] {
            let message = check(wrong).expect_err("which one?");
            assert!(message.contains("systemd:NAME"), "{message}");
        }
    }
}
