//! A disk as it is to be: its image, how that is opened, and the places it is served at.

use std::path::PathBuf;

use ringtap_image::OpenOptions;
use ringtap_vbd::{Limits as DiskLimits, Processors, Share, ThrottleGroup};

use crate::{Address, Keeping};

/// Queues offered, and threads that a file or a device has, where nothing is said. One that no guest uses costs nothing, and QEMU
/// refuses a server that offers fewer than its guest has CPUs.
pub const QUEUES: u16 = 16;

/// What becomes of requests that find no room where the image lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnError {
    /// They fail.
    Report,
    /// They wait until they are told to be tried again.
    Hold,
}

/// One disk and the places it is served at.
#[derive(Clone, Debug)]
pub struct Disk {
    /// The image's path, or `null:SIZE`.
    pub path: PathBuf,
    /// How to open it.
    pub options: OpenOptions,
    /// The name of its NBD export; empty is the default export.
    pub name: String,
    /// Where NBD clients find it.
    pub nbd: Vec<Address>,
    /// Where vhost-user clients find it.
    pub vhost_user: Vec<Address>,
    /// Where it is shown as a file by FUSE: regular files to mount over, or paths where none is yet.
    pub fuse: Vec<PathBuf>,
    /// Whether writes past the end of that file make the image larger.
    pub growable: bool,
    /// Whether its image is opened, and locked, only once its guest begins here: until then another server has it.
    pub incoming: bool,
    /// Whether it is a block device of this host by ublk, and if so of which number, if it matters.
    pub ublk: Option<Option<u32>>,
    /// The most virtqueues a vhost-user client may use, and threads that serve a file or a device.
    pub queues: u16,
    /// The sector size that vhost-user guests and the host's block devices see; none: as suits the
    /// image.
    pub logical_block_size: Option<u32>,
    /// What becomes of requests that find no room where the image lies; where nothing is said they wait if a control socket is
    /// there by which they can be told to go on, else they fail.
    pub on_error: Option<OnError>,
    /// Whether discards free nothing of its image.
    pub keeps_space: bool,
    /// Percent of its own time that each answer is held back, for the lab.
    pub hold: u32,
    /// Where the threads that serve it run.
    pub placement: Placed,
    /// How much it may have served in a second.
    pub limits: DiskLimits,
    /// What part of its device it is to have where others want it, too.
    pub share: Share,
    /// The group whose limits hold for it, too.
    pub group: Option<String>,
    /// What is written down of it beside all that.
    pub keeping: Keeping,
    /// The serial number vhost-user guests see; at most 20 printable ASCII characters.
    pub serial: String,
    /// What clients of the control socket know it by; none: the name of its NBD export where that will do, else
    /// `diskN`, by its place.
    pub node_name: Option<String>,
}

impl Disk {
    /// One that is served nowhere yet, and is as it is where nothing is said.
    pub fn new(path: impl Into<PathBuf>, options: OpenOptions) -> Disk {
        Disk {
            path: path.into(),
            options: OpenOptions { needs_log: true, ..options },
            name: String::new(),
            nbd: vec![],
            vhost_user: vec![],
            fuse: vec![],
            growable: false,
            incoming: false,
            ublk: None,
            queues: QUEUES,
            logical_block_size: None,
            on_error: None,
            keeps_space: false,
            hold: 0,
            placement: Placed::default(),
            limits: DiskLimits::default(),
            share: Share::default(),
            group: None,
            keeping: Keeping::default(),
            serial: String::new(),
            node_name: None,
        }
    }
}

/// Where the threads that serve a disk run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// On these processors; none: on any.
    pub processors: Option<Processors>,
    /// In this threaded control group; none: in that of the server.
    pub cgroup: Option<PathBuf>,
}

/// What the disks of a group have together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allotment {
    /// How much they may have served in a second.
    pub limits: DiskLimits,
    /// What part they have of each device that they lie on.
    pub share: Share,
}

impl Allotment {
    /// The group, with no disk yet.
    pub(crate) fn group(self) -> Result<ThrottleGroup, String> {
        self.check()?;
        let group = ThrottleGroup::new(self.limits);
        group.set_share(self.share).map(|()| group)
    }

    /// Why it makes no sense.
    pub fn check(&self) -> Result<(), String> {
        self.limits.check().and_then(|()| self.share.check())
    }
}

impl Disk {
    /// Whether there is nothing of it but its size.
    pub(crate) fn is_null(&self) -> bool {
        self.path.to_str().is_some_and(|text| text.starts_with("null:"))
    }

    pub(crate) fn is_served_nowhere(&self) -> bool {
        let sockets = self.nbd.len() + self.vhost_user.len();
        sockets + self.fuse.len() == 0 && self.ublk.is_none()
    }
}
