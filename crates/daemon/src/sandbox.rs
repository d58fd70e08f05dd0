//! The walls around a server: what of a configuration it must reach, and nothing else.
//!
//! The first wall is there before an image is opened: what lies in the system's own folders is behind it, for an image
//! may name files anywhere else. Where nobody may ask for more disks a second one leaves the files that are open then.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use ringtap_export::fuse;
use ringtap_image::{RestartLog, is_store, record};
use ringtap_io::Engine;
use ringtap_sandbox::{Files, Hooks, List, Needs, Walls, everywhere_but_the_systems};
use ringtap_stores::rbd;

use crate::opened::LeftOut;
use crate::{Address, Config, Disk, Error};

/// Whether a server is confined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Sandbox {
    /// It is not.
    #[default]
    Off,
    /// It is.
    On {
        /// Files and folders of disks that come later; none: anywhere but in the system's own folders.
        allow: Vec<PathBuf>,
    },
}

/// Make the broker of this process. Before there is a second thread, and before anything secret is in memory.
pub fn start_broker() -> Result<(), Error> {
    let hooks =
        Hooks { mount: fuse::mount_by, unmount: fuse::unmount_by, ring: ringtap_io::restricted };
    ringtap_sandbox::start(hooks)
        .map_err(|source| Error::Process { tried: "start the broker", source })
}

/// A server behind the first wall.
pub(crate) struct Confined {
    /// What it opens by their names after its images, where no more are to come.
    narrow: Option<Files>,
}

/// Put the first wall up. Before there is a second thread.
pub(crate) fn confine(config: &Config) -> Confined {
    let Sandbox::On { allow } = &config.sandbox else {
        return Confined { narrow: None };
    };
    let devices = config.disks.iter().any(|disk| disk.ublk.is_some());
    let named = named(config);
    let wide = if allow.is_empty() { everywhere_but_the_systems() } else { allow.clone() };
    let mut files = named.clone();
    files.folders.extend(wide.iter().cloned());
    for disk in &config.disks {
        files.extend(images(disk));
    }
    // Programs bring images along.
    files.read.push("/usr".into());
    let later = config.control.is_some();
    let ceph: Vec<&str> = config.disks.iter().flat_map(names_of_rbd).collect();
    if !ceph.is_empty() {
        // No library is loaded behind the walls.
        if let Err(why) = rbd::load() {
            tracing::warn!("{why}");
        }
        files.read.extend(ceph.iter().flat_map(|name| rbd::files(name)));
    }
    let network = !ceph.is_empty() || config.disks.iter().any(is_object);
    if network {
        // Names of hosts, and the authorities that certificates are of.
        files.read.extend(NETWORK.map(PathBuf::from));
        tracing::warn!(
            "images in object stores and of Ceph take connections of the server's own: it may make any"
        );
    }
    let rings = ringtap_io::engine().0 == Engine::IoUring;
    let given = if rings { ringtap_io::rings_to_be_given().ok() } else { None };
    let walls = Walls {
        files,
        list: list(config, if later { wide } else { vec![] }),
        // Block devices have rings whatever all else works by.
        needs: Needs { devices, rings: rings || devices, network },
    };
    let confined = ringtap_sandbox::confine(&walls);
    if let Some(given) = given.filter(|_| confined.rings) {
        given();
    }
    let lacking: Vec<_> = confined.lacking.iter().map(ToString::to_string).collect();
    if !lacking.is_empty() {
        tracing::warn!("confined, but for what cannot be had here: {}", lacking.join("; "));
    }
    if devices {
        tracing::warn!(
            "block devices of this host (--ublk) take CAP_SYS_ADMIN, a namespace of mounts and commands by rings: \
             no landlock, no restricted rings"
        );
    }
    // Images of guests that are still to come, or that lie elsewhere, are opened when they are there.
    let mut named = named;
    for disk in config.disks.iter().filter(|disk| disk.incoming) {
        named.extend(images(disk));
    }
    let narrow = (!later && !devices).then_some(named);
    Confined { narrow }
}

impl Confined {
    /// Put the second wall up, once all images are open but those that are left out.
    pub(crate) fn images_are_open(self, left_out: &[LeftOut]) {
        if let Err(error) = ringtap_sandbox::seal() {
            tracing::warn!("the broker does not answer: {error}");
        }
        let Some(mut files) = self.narrow else { return };
        left_out.iter().for_each(|left| files.extend(images(&left.disk)));
        match ringtap_sandbox::narrow(&files) {
            Ok(true) => {}
            Ok(false) => tracing::info!(
                "confined to the folders where images may lie, for threads were there before they were open"
            ),
            Err(lacking) => tracing::warn!("confined, but for what cannot be had here: {lacking}"),
        }
    }
}

/// What libraries read who connect by the names of hosts.
const NETWORK: [&str; 6] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/ssl",
    "/etc/ca-certificates",
];

/// The names of what of it lies in clusters of Ceph.
fn names_of_rbd(disk: &Disk) -> impl Iterator<Item = &str> {
    let names = [&disk.path].into_iter().chain(&disk.options.allow_backing);
    names.filter_map(|name| name.to_str()).filter(|name| rbd::is_rbd(name))
}

/// Whether it lies, or what is below it, in a store that is reached by HTTP.
fn is_object(disk: &Disk) -> bool {
    let mut names = [&disk.path].into_iter().chain(&disk.options.allow_backing);
    names.any(|name| {
        let name = name.to_string_lossy();
        ["s3://", "http://", "https://"].iter().any(|scheme| name.starts_with(scheme))
    })
}

/// The file of an image, its folder, and what it may name.
fn images(disk: &Disk) -> Files {
    let mut files = Files::default();
    let options = &disk.options;
    files.images.extend(disk.placement.cgroup.iter().map(|group| group.join("cgroup.threads")));
    for path in [&disk.path].into_iter().chain(&options.allow_backing).chain(&options.data_files) {
        if is_store(path) {
            continue;
        }
        files.images.push(path.clone());
        // A link, and the file that it leads to.
        let found = path.canonicalize().ok();
        // Nothing is made beside a device, and all others of the host lie there.
        let is_device = path.metadata().is_ok_and(|facts| facts.file_type().is_block_device());
        if is_device {
            files.images.extend(found);
            continue;
        }
        files.folders.extend([Some(path.clone()), found].into_iter().flatten().map(folder_of));
    }
    files
}

/// All else that is opened by its name.
fn named(config: &Config) -> Files {
    let mut files = Files::default();
    files.folders.extend(RestartLog::made_folder());
    files.folders.extend(record::made_folder());
    files.read.extend(config.nbd_tls.iter().map(|tls| tls.folder.clone()));
    files.read.extend(std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from));
    if let Some(folder) = &config.folder {
        files.folders.push(folder.path.clone());
        files.read.push("/etc/ringtap".into());
    }
    files.folders.extend(config.pid_file.iter().cloned().map(folder_of));
    files.places.extend(sockets(config).cloned().map(folder_of));
    let shown = config.disks.iter().flat_map(|disk| &disk.fuse);
    files.places.extend(shown.cloned().map(folder_of));
    files.images.push("/dev/fuse".into());
    // Stores have certificates.
    for store in config.disks.iter().map(|disk| &disk.path).filter(|path| is_store(path)) {
        files.read.extend(ringtap_image::certificates_of(store));
    }
    files
}

/// UNIX sockets that are listened at.
fn sockets(config: &Config) -> impl Iterator<Item = &PathBuf> {
    let unix = addresses(config).filter_map(|address| match address {
        Address::Unix(path) => Some(path),
        _ => None,
    });
    unix.chain(&config.control)
}

fn addresses(config: &Config) -> impl Iterator<Item = &Address> {
    let disks = config.disks.iter().flat_map(|disk| disk.nbd.iter().chain(&disk.vhost_user));
    disks.chain(&config.metrics)
}

fn list(config: &Config, later: Vec<PathBuf>) -> List {
    let tcp = addresses(config).filter_map(|address| match address {
        Address::Tcp { host, port } => Some((host.clone(), *port)),
        _ => None,
    });
    let mut folders = later;
    if config.control.is_some() {
        folders.extend(sockets(config).cloned().map(folder_of));
        folders.push("/run/ringtap".into());
    }
    List {
        sockets: sockets(config).cloned().collect(),
        listen: tcp.collect(),
        dial: vec![],
        any_tcp: config.control.is_some(),
        mounts: config.disks.iter().flat_map(|disk| disk.fuse.iter().cloned()).collect(),
        folders: folders.iter().filter_map(|folder| folder.canonicalize().ok()).collect(),
    }
}

fn folder_of(path: PathBuf) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new(".")).to_owned()
}
