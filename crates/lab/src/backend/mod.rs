//! Ways of serving a disk, one file each: how it is started and reached, and what lists, plans and pages say of it. One more is a file
//! of its own, and its name in the list here.

mod catalogue;
pub mod mapper;
pub mod own;

pub use catalogue::{Entry, File, Peers, added, all, find, known_slow, label, peers};

/// The files with backends, in any order.
macro_rules! files {
    ($($file:ident)*) => {
        $(pub mod $file;)*
        const FILES: &[&File] = &[$(&$file::FILE),*];
    };
}

files! {
    absent
    ceph
    inside
    kernelnbd
    loopdev
    native
    nbdkit
    origin
    qemu
    remote
    ringtap
    ubd
    ublk
    vm
    volume
    xen
}

use std::path::{Path, PathBuf};
use std::process::Command;

use ringtap_guest::Drive;

use crate::env::{Env, Missing};
use crate::error::Result;
use crate::host::mount_points;
use crate::process::Server;
use crate::stop::Stop;
use crate::workload::Workload;

/// How the load reaches the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// A plain file.
    File(PathBuf),
    /// The same, by the client of the vhost-user rows.
    Native(PathBuf),
    /// A block device of the host.
    Block(PathBuf),
    /// An NBD export.
    Nbd {
        /// `nbd+unix:///?socket=…`
        uri: String,
        /// The socket.
        socket: PathBuf,
    },
    /// A vhost-user-blk server that listens on a socket.
    VhostUser {
        /// The socket.
        socket: PathBuf,
    },
    /// A file that User-Mode Linux opens itself.
    Ubd(PathBuf),
    /// An image that QEMU opens itself.
    Qemu {
        /// What its guest sees.
        attach: vm::Attach,
        /// The image, and how it is opened.
        drive: Drive,
    },
    /// A disk that the user's own arguments of QEMU define, with `{id}` in the place of its name.
    QemuOwn(Vec<String>),
    /// The image of the lab's own Ceph, by its configuration.
    Rbd {
        /// The cluster's configuration.
        conf: PathBuf,
    },
    /// An image behind HTTP, of which nothing is on this machine yet.
    Origin {
        /// The image.
        url: String,
        /// How it comes.
        start: origin::Start,
        /// A folder for sockets.
        sockets: PathBuf,
    },
}

/// What a disk's file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// The disk's bytes as they are.
    Raw,
    /// qcow2, all of it written.
    Qcow2,
    /// A qcow2 overlay on a raw disk, made anew for each load that writes: a fresh snapshot.
    Overlay(Maker),
    /// A LUKS1 container, aes-256-xts, all of it written; its secret is in [`SECRET`] beside it.
    Luks,
}

/// What makes an overlay, each by its own default: that is what its users have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// `ringtap create`: with subclusters, so that a first write copies nothing.
    Ringtap,
    /// `qemu-img create`: without subclusters, so that a first write copies the rest of its cluster of 64 KiB.
    QemuImg,
    /// `qemu-img create -o extended_l2=on`: with subclusters.
    QemuImgSubclusters,
}

impl Maker {
    /// The command that makes an overlay on a raw disk.
    pub fn command(self, env: &Env, base: &Path, overlay: &Path) -> Command {
        let mut command = match self {
            Maker::Ringtap => Command::new(&env.ringtap),
            Maker::QemuImg | Maker::QemuImgSubclusters => Command::new("qemu-img"),
        };
        command.args(["create", "-q", "-f", "qcow2"]);
        if self == Maker::QemuImgSubclusters {
            command.args(["-o", "extended_l2=on"]);
        }
        command.args(["-F", "raw", "-b"]).arg(base).arg(overlay);
        command
    }
}

/// The file with the secret of the encrypted disks beside it.
pub const SECRET: &str = "luks.secret";

impl Image {
    /// QEMU's and Ringtap's word.
    pub fn format(self) -> &'static str {
        match self {
            Image::Raw => "raw",
            Image::Qcow2 | Image::Overlay(_) => "qcow2",
            Image::Luks => "luks",
        }
    }

    /// The program that makes it, where that is missing.
    fn missing(self, env: &Env) -> Option<Missing> {
        match self {
            Image::Raw => None,
            Image::Overlay(Maker::Ringtap) => env.ringtap_create(),
            Image::Qcow2 | Image::Overlay(_) | Image::Luks => env.program("qemu-img", "qemu-utils"),
        }
    }
}

/// What the guest's kernel puts on top of the disk that it sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inner {
    /// Nothing.
    None,
    /// A loop device on a file on an ext4 on the disk.
    Loop {
        /// Past the guest's page cache.
        direct: bool,
    },
    /// device-mapper's linear target: what an LVM linear volume is.
    Linear,
    /// A volume with a classic snapshot that was taken just before each workload.
    Snapshot {
        /// Sectors of 512 bytes of a chunk; LVM's default is 8.
        chunk: u64,
        /// The workloads use the snapshot itself, and not its origin.
        itself: bool,
    },
    /// A thin volume, all of it written once: chunks of 64 KiB, LVM's default.
    Thin,
}

impl Inner {
    /// The origin of a snapshot as LVM makes it unless told otherwise.
    pub const ORIGIN: Inner = Inner::Snapshot { chunk: 8, itself: false };

    /// Whether it is a snapshot or has one.
    pub fn is_snapshot(self) -> bool {
        matches!(self, Inner::Snapshot { .. })
    }

    /// Whether device-mapper makes it.
    pub fn is_volume(self) -> bool {
        !matches!(self, Inner::None | Inner::Loop { .. })
    }
}

/// How a backend's disk will be reached, known before it is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// [`Access::File`]
    File,
    /// [`Access::Native`]
    Native,
    /// [`Access::Block`]
    Block,
    /// [`Access::Nbd`]
    Nbd,
    /// [`Access::VhostUser`]
    VhostUser,
    /// A disk inside the guest's own process.
    Inside,
    /// [`Access::Rbd`]
    Rbd,
    /// [`Access::Origin`]
    Origin,
}

/// What a backend may use while it starts.
#[derive(Debug)]
pub struct Context<'a> {
    /// The machine.
    pub env: &'a Env,
    /// The disk's file.
    pub disk: &'a Path,
    /// A folder for sockets, with a short name.
    pub sockets: &'a Path,
    /// Where the server's stderr goes.
    pub log: PathBuf,
    /// The wish to end.
    pub stop: &'a Stop,
}

/// Something on top of what a server serves: it ends before the server does.
pub trait Part: std::fmt::Debug {
    /// Ends it and says when that fails. One that is dropped ends, too.
    fn end(self: Box<Self>) -> Result<()>;
}

/// A disk that is being served. Dropping it ends the serving, field by field: who uses something goes before it.
#[derive(Debug)]
pub struct Served {
    /// How the disk is reached.
    pub access: Access,
    /// The volume, where there is one: it goes before all others.
    pub volume: Option<volume::Mapped>,
    /// What lies on top of the server: a loop device, or the kernel's client of its export.
    pub above: Vec<Box<dyn Part>>,
    /// The server, where there is one.
    pub server: Option<Server>,
    /// The server below, where that one is another's client.
    pub below: Option<Server>,
    /// What a server takes away itself unless it was killed (a mount, a device), and what this program serves: dropped last.
    pub behind: Vec<Box<dyn std::fmt::Debug>>,
}

impl Served {
    fn reached(access: Access) -> Served {
        let (above, behind) = (Vec::new(), Vec::new());
        Served { access, volume: None, above, server: None, below: None, behind }
    }

    fn by(server: Server, access: Access) -> Served {
        Served { server: Some(server), ..Served::reached(access) }
    }

    /// Ends the serving and reports what went wrong with it. What is left then goes in the order of the fields.
    pub fn end(mut self) -> Result<()> {
        self.volume.take().map_or(Ok(()), volume::Mapped::remove)?;
        self.above.drain(..).try_for_each(Part::end)?;
        self.server.take().map_or(Ok(()), Server::stop)?;
        self.below.take().map_or(Ok(()), Server::stop)
    }
}

/// A file that a server mounts by FUSE; unmounted when this is dropped and the server has not done it.
#[derive(Debug)]
pub struct Mount(PathBuf);

impl Mount {
    /// A mount that a server is about to make at `path`.
    pub fn expected(path: &Path) -> Mount {
        Mount(path.to_owned())
    }

    /// Whether something is mounted there.
    pub fn there(&self) -> bool {
        mount_points().contains(&self.0)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.there() {
            let _ = crate::process::run_short("umount", [&self.0], &Stop::default());
        }
    }
}

/// A disk's write cache, as a guest may set it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteCache {
    /// Writes are kept back until a flush.
    On,
    /// None is kept back.
    Off,
}

impl WriteCache {
    /// The kernel's words.
    pub fn words(self) -> &'static str {
        match self {
            WriteCache::On => "write back",
            WriteCache::Off => "write through",
        }
    }

    /// Shell lines by which a guest's kernel sets it for a disk, of virtio or SCSI's kin, and fails where the disk does not
    /// follow.
    pub fn script(self, disk: &str) -> String {
        let (words, name) = (self.words(), disk.rsplit('/').next().unwrap_or_default());
        format!(
            "for type in /sys/block/{name}/cache_type /sys/block/{name}/device/scsi_disk/*/cache_type; do\n\
             [ ! -e $type ] || echo '{words}' >$type; done\n\
             cache=$(cat /sys/block/{name}/queue/write_cache)\n\
             [ \"$cache\" = '{words}' ] || {{ echo \"{disk} keeps its write cache at $cache\" >&2; exit 1; }}"
        )
    }
}

/// A way of serving a disk.
pub trait Backend: Sync {
    /// How its disk is reached.
    fn reach(&self) -> Reach;
    /// Why it cannot run on this machine.
    fn missing(&self, env: &Env) -> Option<Missing>;
    /// Starts it. It is ready when this returns.
    fn start(&self, context: &Context<'_>) -> Result<Served>;
    /// What the disk's file is.
    fn image(&self) -> Image {
        Image::Raw
    }
    /// What the guest puts on top of it.
    fn inner(&self) -> Inner {
        Inner::None
    }
    /// How Xen's first domain serves it to its guests; the stage `xen` attaches it then, and nothing is started before.
    fn in_xen(&self) -> Option<xen::Way> {
        None
    }
    /// Whether reads may come from, and writes end in, the page cache of the machine that serves: such a backend is
    /// never ranked with those that go to the disk.
    fn cached(&self) -> bool {
        false
    }
    /// The backend of the same stage that this one is but for 20 % more latency: it shows whether a load could show such a
    /// difference, and is never ranked.
    fn slow_of(&self) -> Option<&'static str> {
        None
    }
    /// To what the guest sets its disk's write cache, where it does not leave it as it is: on, where the server says there is
    /// none though it keeps writes back, so that a guest that believes it never flushes; off, where each write is to be on the
    /// disk when it is answered.
    fn guest_sets_cache(&self) -> Option<WriteCache> {
        None
    }
    /// Whether its disk is the user's and nothing may write to it: what opens it opens it for reading.
    fn only_read(&self) -> bool {
        false
    }
    /// Whether its disk lies in a Ceph, which the stage starts for all that do.
    fn in_ceph(&self) -> bool {
        false
    }
    /// Why a workload must not run on it.
    fn refuses(&self, _: &dyn Workload) -> Option<Missing> {
        None
    }
    /// What the CPU figures of this backend leave out, and other facts for the report.
    fn remark(&self) -> Option<&'static str> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Stage;

    #[test]
    fn an_overlay_is_made_as_its_users_make_it() {
        let env = Env::new("/opt/ringtap".into(), "/opt/ringtap-lab".into());
        let line = |maker: Maker| {
            let command = maker.command(&env, Path::new("base"), Path::new("top"));
            format!("{command:?}").replace('"', "")
        };
        assert_eq!(line(Maker::Ringtap), "/opt/ringtap create -q -f qcow2 -F raw -b base top");
        assert_eq!(line(Maker::QemuImg), "qemu-img create -q -f qcow2 -F raw -b base top");
        assert!(line(Maker::QemuImgSubclusters).contains("-o extended_l2=on"));
        let maker_of = |stage, name: &str| match find(stage, name).unwrap().backend.image() {
            Image::Overlay(maker) => maker,
            other => panic!("{name} is {other:?}"),
        };
        for stage in [Stage::Guest, Stage::Vm] {
            assert_eq!(maker_of(stage, "ringtap-overlay"), Maker::Ringtap);
        }
        assert_eq!(maker_of(Stage::Vm, "virtio-overlay"), Maker::QemuImg);
    }

    #[test]
    fn a_disk_whose_write_cache_does_not_follow_is_none() {
        // A kernel's files, and what setting a cache makes of them.
        let sys = tempfile::tempdir().unwrap();
        let set = |cache: WriteCache, types: &str, told: &str| {
            let disk = sys.path().join("block/sda");
            let _ = std::fs::remove_dir_all(&disk);
            let file = disk.join(types);
            for (file, text) in [(&file, ""), (&disk.join("queue/write_cache"), told)] {
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(file, text).unwrap();
            }
            let script = cache.script("/dev/sda").replace("/sys", sys.path().to_str().unwrap());
            let ended = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
            let said = String::from_utf8(ended.stderr).unwrap();
            (ended.status.success(), std::fs::read_to_string(file).unwrap(), said)
        };
        let (done, kernel, _) = set(WriteCache::Off, "cache_type", "write through\n");
        assert_eq!((done, kernel.trim()), (true, "write through"));
        // IDE's disks are SCSI's to the kernel.
        let scsi = "device/scsi_disk/0:0:0:0/cache_type";
        let (done, kernel, _) = set(WriteCache::On, scsi, "write back\n");
        assert_eq!((done, kernel.trim()), (true, "write back"));
        let (done, _, said) = set(WriteCache::Off, scsi, "write back\n");
        assert!(!done && said.contains("/dev/sda keeps its write cache at write back"), "{said}");
    }
}
