//! The walls around a server: what of a configuration it must reach, and nothing else.
//!
//! The first wall is there before an image is opened: what lies in the system's own folders is behind it, for an image
//! may name files anywhere else. Where nobody may ask for more disks a second one leaves the files that are open then.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use ringtap_export::{fuse, ublk};
use ringtap_image::{RestartLog, SecretSource, is_store, record};
use ringtap_io::Engine;
use ringtap_sandbox::{Files, Hooks, List, Needs, Walls, everywhere_but_the_systems};
use ringtap_stores::rbd;
use rustix::fs::Access;

use crate::handover::CHANNEL;
use crate::left_out::LeftOut;
use crate::{Address, Config, ControlAt, Disk, Error, Sandbox, successor};

/// What brokers do.
const HOOKS: Hooks = Hooks {
    mount: fuse::mount_by,
    unmount: fuse::unmount_by,
    ring: ringtap_io::restricted,
    device: ublk::for_server,
    let_go: ublk::let_go_of,
    channel: CHANNEL,
};

/// Make the broker of this process. Before there is a second thread, and before anything secret is in memory.
pub fn start_broker() -> Result<(), Error> {
    ringtap_sandbox::start(HOOKS)
        .map_err(|source| Error::Process { tried: "start the broker", source })
}

/// Have it in the namespace of mounts that this process has come to have for itself: so nobody else keeps the one that
/// was left, in which its devices are mounted. Before there is a second thread.
pub(crate) fn broker_comes_along() {
    if let Err(error) = ringtap_sandbox::restart(HOOKS) {
        // Whether to do without is decided where the walls are put up.
        tracing::warn!(
            "cannot start the broker again, in a namespace of mounts of its own: {error}"
        );
    }
}

/// Make the broker end with the server, which waits for that.
pub fn end_broker() {
    ringtap_sandbox::dismiss();
}

/// Whether files that this process opens are those that it was told of.
static CONFINED: AtomicBool = AtomicBool::new(false);
/// The user whom it has become.
static USER: OnceLock<u32> = OnceLock::new();
/// Whether it has what block devices of this host take.
static DEVICES: AtomicBool = AtomicBool::new(true);

/// Why no block device of this host can be made, where that is so.
pub(crate) fn makes_no_devices() -> Option<&'static str> {
    (!DEVICES.load(SeqCst)).then_some(
        "this server is confined and makes no block devices of this host: serve the disk by `ringtap serve --ublk`, or \
         start this server with --sandbox off",
    )
}

/// What may help where something failed, if it may be because the server is confined.
pub(crate) fn hint(error: &str) -> Option<String> {
    const REFUSED: [&str; 2] = ["(os error 13)", "(os error 1)"];
    let refused = CONFINED.load(SeqCst) && REFUSED.iter().any(|it| error.contains(it));
    let confined = "this server is confined (--sandbox): what it is to reach later is named by --allow when it starts";
    refused.then(|| match USER.get() {
        None => confined.to_owned(),
        Some(user) => format!(
            "this server is user {user} (--user): files, and the folders that they lie in, must be such as that user may \
             open; {confined}"
        ),
    })
}

/// An error with that hint, where it has one.
pub(crate) fn hinted(error: String) -> String {
    match hint(&error) {
        Some(hint) => format!("{error}; {hint}"),
        None => error,
    }
}

fn broker_is_gone() {
    tracing::error!(
        "ringtap-broker, which this confined server needs for sockets and rings, is gone (killed?): what is served goes on, \
         by threads that block where a queue begins; restart the server"
    );
}

/// A server behind the first wall.
#[derive(Default)]
pub(crate) struct Confined {
    /// What it opens by their names after its images, where no more are to come.
    narrow: Option<Files>,
    /// Where images may lie, which cannot be found out behind the wall.
    usual: Vec<PathBuf>,
}

/// Put the first wall up around who serves what the operator's own words say. Before there is a second thread.
pub(crate) fn confine(config: &Config) -> Result<Confined, Error> {
    let Sandbox::On { allow, must, user } = &config.sandbox else {
        return Ok(Confined::default());
    };
    let devices = of_devices(config).next().is_some();
    if let Some(user) = user {
        if devices {
            return Err(Error::Usage(NO_DEVICES_OF_USERS.to_owned()));
        }
        let kept = ringtap_image::keep_as(user);
        kept.map_err(|source| Error::User { user: user.id(), source })?;
    }
    if devices && !must {
        ringtap_sandbox::dismiss();
        tracing::info!(
            "not confined: {OF_DEVICES}, and partitions are looked for by who has it alone; --sandbox on has all walls, the \
             unit has others"
        );
        return Ok(Confined::default());
    }
    let (stores, allow): (Vec<&PathBuf>, Vec<&PathBuf>) =
        allow.iter().partition(|name| is_store(name));
    let usual = everywhere_but_the_systems().unwrap_or_else(|error| {
        if allow.is_empty() {
            tracing::warn!(
                "cannot list / to find folders where images may lie: {error}; images that are named later are not reached: name their \
                 folders by --allow, or have the profile of AppArmor allow it, as contrib/apparmor/ringtap does"
            );
        }
        vec![]
    });
    let wide: Vec<PathBuf> = match allow.is_empty() {
        true => usual.clone(),
        false => allow.into_iter().cloned().collect(),
    };
    let disks: Vec<Known> = config.disks.iter().map(|disk| Known::of(disk, &usual)).collect();
    let stores: Vec<&PathBuf> = disks.iter().flat_map(|disk| &disk.stores).chain(stores).collect();
    let (mut named, network) = (named(config), reaches_out(&stores));
    named.extend(of_stores(&stores));
    let mut files = named.clone();
    files.folders.extend(wide.iter().cloned());
    disks.iter().for_each(|disk| files.extend(disk.files.clone()));
    // Programs bring images along.
    files.read.push("/usr".into());
    let folders = files.folders.clone();
    let later = !config.control.is_empty();
    if devices {
        ringtap_export::keep_alive();
    }
    if later || devices || config.disks.iter().any(|disk| !disk.fuse.is_empty()) {
        // Threads that are still to come are that too, and could not become it themselves.
        ringtap_export::become_io_flusher();
    }
    let rings = ringtap_io::engine().0 == Engine::IoUring;
    let given =
        if rings || devices { ringtap_io::rings_to_be_given(broker_is_gone).ok() } else { None };
    let walls = Walls {
        files,
        list: list(config, if later { wide } else { vec![] }),
        // Block devices have rings whatever all else works by.
        needs: Needs { rings: rings || devices, network },
        user: user.clone(),
    };
    let confined = ringtap_sandbox::confine(&walls);
    CONFINED.store(true, SeqCst);
    if let Some(user) = user {
        confined.user.map_err(|source| Error::User { user: user.id(), source })?;
        is_user(user.id(), config)?;
    }
    // Where it may write is known once it is who it is to be.
    let program = std::env::current_exe().and_then(|program| program.canonicalize());
    let replaced = program.ok().and_then(|program| can_be_replaced(&program, &folders));
    DEVICES.store(devices, SeqCst);
    if let Some(given) = given.filter(|_| confined.rings) {
        given();
    }
    let missing = confined.lacking.iter().filter(|lacking| lacking.is_whole());
    let missing: Vec<_> = missing.map(ToString::to_string).collect();
    if *must && !missing.is_empty() {
        return Err(Error::Sandbox(missing.join("; ")));
    }
    let mut open: Vec<String> = confined.lacking.iter().map(ToString::to_string).collect();
    if devices {
        open.push("commands by rings to drivers whose descriptors it has, which block devices (--ublk) take".into());
    }
    if network {
        open.push("connections to any host, which images in object stores and of Ceph take".into());
    }
    match open.is_empty() {
        true => {}
        false if *must => tracing::warn!("{BUT_FOR}: {}", open.join("; ")),
        false => tracing::info!("{BUT_FOR}: {}", open.join("; ")),
    }
    match replaced {
        None => {}
        Some(why) if *must => tracing::warn!("{why}"),
        Some(why) => tracing::info!("{why}"),
    }
    // Images of guests that are still to come, or that lie elsewhere, are opened when they are there.
    let comes = disks.into_iter().zip(&config.disks).filter(|(_, disk)| disk.incoming);
    comes.for_each(|(known, _)| named.extend(known.files));
    Ok(Confined { narrow: (!later && confined.files).then_some(named), usual })
}

/// The server is that user from now on.
fn is_user(user: u32, config: &Config) -> Result<(), Error> {
    let _first = USER.set(user);
    tracing::info!("this server is user {user}; its broker, which makes its sockets, is not");
    let kept = config.folder.as_ref().filter(|folder| folder.keep);
    match kept.map(|folder| (&folder.path, rustix::fs::access(&*folder.path, Access::WRITE_OK))) {
        Some((path, Err(source))) => Err(Error::Usage(format!(
            "--persist: user {user} (--user) cannot write in {}: {source}; chown it to that user",
            path.display()
        ))),
        _ => Ok(()),
    }
}

const NO_DEVICES_OF_USERS: &str = "--user does not go with --ublk: block devices of this host are root's to serve; leave out \
                                   --user, and confine the server by --sandbox on";
const OF_DEVICES: &str = "block devices of this host (--ublk) take CAP_SYS_ADMIN";
const BUT_FOR: &str = "confined, but for what cannot be had here";

impl Confined {
    /// Put the second wall up, once all images are open but those that are left out.
    pub(crate) fn images_are_open(self, left_out: &[LeftOut]) {
        if let Err(error) = ringtap_sandbox::seal() {
            tracing::warn!("the broker does not answer: {error}");
        }
        let Some(mut files) = self.narrow else { return };
        for left in left_out {
            files.extend(Known::of(&left.disk, &self.usual).files);
            files.folders.extend(to_be_mounted(&left.disk.path, &self.usual));
        }
        match ringtap_sandbox::narrow(&files) {
            Ok(true) => {}
            Ok(false) => tracing::info!(
                "confined to the folders where images may lie, for threads were there before they were open"
            ),
            // Said of the first already.
            Err(lacking) if !lacking.is_whole() => {}
            Err(lacking) => tracing::warn!("{BUT_FOR}: {lacking}"),
        }
    }
}

/// Why who owns a server that writes in these folders could have an upgrade start another program, where that is so.
fn can_be_replaced(program: &Path, folders: &[PathBuf]) -> Option<String> {
    let writable = |path: &Path| rustix::fs::access(path, Access::WRITE_OK).is_ok();
    let found = folders.iter().filter_map(|folder| folder.canonicalize().ok()).find(|folder| {
        let mut within = program.ancestors().take_while(|path| path.starts_with(folder));
        within.any(writable)
    })?;
    Some(format!(
        "{} lies in {}, where this server may write: who takes the server over could put another program there, which an \
         upgrade starts; keep it where no image lies, as in /usr/bin, or name other folders by --allow",
        program.display(),
        found.display()
    ))
}

fn of_ceph<'a>(stores: &'a [&PathBuf]) -> impl Iterator<Item = &'a str> {
    stores.iter().filter_map(|name| name.to_str()).filter(|name| rbd::is_rbd(name))
}

fn is_object(store: &&PathBuf) -> bool {
    ringtap_stores::is_path_of_object(store)
}

/// Whether what speaks with these stores makes connections of its own.
fn reaches_out(stores: &[&PathBuf]) -> bool {
    stores.iter().any(is_object) || of_ceph(stores).next().is_some()
}

/// What these stores take of this host's files.
fn of_stores(stores: &[&PathBuf]) -> Files {
    let mut files = Files::default();
    files.read.extend(stores.iter().filter_map(|name| ringtap_image::certificates_of(name)));
    if of_ceph(stores).next().is_some() {
        // No library is loaded behind the walls.
        if let Err(why) = rbd::load() {
            tracing::warn!("{why}");
        }
        files.read.extend(of_ceph(stores).flat_map(rbd::files));
    }
    if stores.iter().any(is_object) {
        let beside = ringtap_stores::beside_objects();
        files.read.extend(beside.read);
        files.folders.extend(beside.kept);
    }
    if reaches_out(stores) {
        files.read.extend(NETWORK.map(PathBuf::from));
    }
    files
}

/// What libraries read who connect by the names of hosts, and the authorities that certificates are of.
const NETWORK: [&str; 6] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/ssl",
    "/etc/ca-certificates",
];

/// What a disk lies in, as far as that is known before it is opened: what the operator names, and what Ringtap has recorded
/// of that.
#[derive(Default)]
struct Known {
    files: Files,
    stores: Vec<PathBuf>,
}

impl Known {
    fn of(disk: &Disk, usual: &[PathBuf]) -> Known {
        let mut known = Known::default();
        let options = &disk.options;
        let group = disk.placement.cgroup.iter().map(|group| group.join("cgroup.threads"));
        known.files.images.extend(group);
        if disk.is_null() {
            return known;
        }
        let beside = options.allow_backing.iter().chain(&options.data_files);
        for path in [&disk.path].into_iter().chain(beside) {
            if is_store(path) {
                known.stores.push(path.clone());
                continue;
            }
            known.named(path);
            for path in record::reach(path) {
                // A record is not the operator's word: nothing of the system's is had by it.
                let found = path.canonicalize().unwrap_or_default();
                if is_store(&path) {
                    known.stores.push(path);
                } else if usual.iter().any(|folder| found.starts_with(folder)) {
                    known.files.images.push(found);
                }
            }
        }
        known
    }

    /// A file, and the folder that it is in.
    fn named(&mut self, path: &Path) {
        self.files.images.push(path.to_owned());
        // A link, and the file that it leads to.
        let found = path.canonicalize().ok();
        // Nothing is made beside a device, and all others of the host lie there.
        let is_device = path.metadata().is_ok_and(|facts| facts.file_type().is_block_device());
        match is_device {
            true => self.files.images.extend(found),
            false => {
                let both = [Some(path.to_owned()), found].into_iter().flatten();
                self.files.folders.extend(both.map(folder_of));
            }
        }
    }
}

/// Where a file that is not there may come by a file system that is still to be mounted: what is allowed of a folder is not
/// of what is mounted over it, but by the folder above.
fn to_be_mounted(path: &Path, usual: &[PathBuf]) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    if path.try_exists().unwrap_or(true) {
        return None;
    }
    let there = path.ancestors().skip(1).find_map(|folder| folder.canonicalize().ok())?;
    let above = there.parent()?;
    usual.iter().any(|folder| above.starts_with(folder)).then(|| above.to_owned())
}

/// All else that is opened by its name.
fn named(config: &Config) -> Files {
    let mut files = Files::default();
    files.folders.extend(RestartLog::made_folder());
    files.folders.extend(record::made_folder());
    files.read.extend(config.nbd_tls.iter().map(|tls| tls.folder.clone()));
    files.read.extend(std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from));
    // A server that follows this one reads secrets of disks again.
    let secrets = config.disks.iter().filter_map(|disk| disk.keeping.secret.as_ref()?.parse().ok());
    files.read.extend(secrets.filter_map(|source| match source {
        SecretSource::File(path) => Some(path),
        _ => None,
    }));
    if let Some(folder) = &config.folder {
        if folder.keep {
            // Who keeps it tells what is wrong.
            let _ = std::fs::create_dir_all(&folder.path);
        }
        files.folders.push(folder.path.clone());
        files.read.push("/etc/ringtap".into());
    }
    files.folders.extend(config.pid_file.iter().cloned().map(folder_of));
    files.places.extend(sockets(config).map(Path::to_owned).map(folder_of));
    files.places.extend(shown(config).map(folder_of));
    files.images.push("/dev/fuse".into());
    if of_devices(config).next().is_some() {
        files.folders.extend(ublk::made_folder());
    }
    files
}

/// Files that disks are mounted over: where a link leads that the operator names.
fn shown(config: &Config) -> impl Iterator<Item = PathBuf> {
    let shown = config.disks.iter().flat_map(|disk| &disk.fuse);
    shown.map(|path| fuse::resolve(path).unwrap_or_else(|_| path.clone()))
}

/// UNIX sockets that are listened at, or connected to.
fn sockets(config: &Config) -> impl Iterator<Item = &Path> {
    let unix = addresses(config).filter_map(|address| match address {
        Address::Unix(path) => Some(&**path),
        _ => None,
    });
    unix.chain(config.control.iter().map(ControlAt::path))
}

fn addresses(config: &Config) -> impl Iterator<Item = &Address> {
    let disks = config.disks.iter().flat_map(|disk| disk.nbd.iter().chain(&disk.vhost_user));
    disks.chain(&config.metrics)
}

fn of_devices(config: &Config) -> impl Iterator<Item = &Disk> {
    config.disks.iter().filter(|disk| disk.ublk.is_some())
}

/// What the image of a disk is called by the operator, and by who serves it: it may go on in another.
fn names(disk: &Disk) -> [PathBuf; 2] {
    let mut there = disk.clone();
    // Whoever opens it says what is wrong.
    let _ = successor::follow(&mut there);
    [disk.path.clone(), there.path]
}

fn list(config: &Config, later: Vec<PathBuf>) -> List {
    let tcp = addresses(config).filter_map(|address| match address {
        Address::Tcp { host, port } => Some((host.clone(), *port)),
        _ => None,
    });
    let mut folders = later;
    if !config.control.is_empty() {
        folders.extend(sockets(config).map(Path::to_owned).map(folder_of));
        folders.push("/run/ringtap".into());
    }
    List {
        sockets: sockets(config).map(Path::to_owned).collect(),
        listen: tcp.collect(),
        dial: vec![],
        any_tcp: !config.control.is_empty(),
        mounts: shown(config).collect(),
        devices: of_devices(config).flat_map(names).collect(),
        any_device: !config.control.is_empty() && of_devices(config).next().is_some(),
        folders: folders.iter().filter_map(|folder| folder.canonicalize().ok()).collect(),
    }
}

fn folder_of(path: PathBuf) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new(".")).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_among_images_is_told_of() {
        let dir = tempfile::tempdir().expect("a folder");
        let root = dir.path().canonicalize().expect("it");
        for folder in ["images", "programs"] {
            std::fs::create_dir(root.join(folder)).expect("a folder");
            std::fs::write(root.join(folder).join("ringtap"), "").expect("a file");
        }
        let folders = [root.join("none"), root.join("images")];
        let why = can_be_replaced(&root.join("images/ringtap"), &folders).expect("a reason");
        assert!(why.contains(&root.join("images").display().to_string()), "{why}");
        assert_eq!(can_be_replaced(&root.join("programs/ringtap"), &folders), None);
    }
}
