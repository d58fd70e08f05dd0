//! Ringtap, as `ringtap serve`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ringtap_stores::percent;

use super::loopdev::LoopDevice;
use super::{Access, Backend, Context, Entry, File, Image, Maker, Mount, Peers, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::process::Server;
use crate::run::scratch;
use crate::sample::Stage;

/// How long a server may take until it answers.
pub(crate) const READY: Duration = Duration::from_secs(10);

/// Over NBD, on a UNIX socket.
#[derive(Debug)]
pub struct Nbd {
    /// What the disk's file is.
    pub image: Image,
}

impl Backend for Nbd {
    fn reach(&self) -> Reach {
        Reach::Nbd
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.ringtap_serve().or_else(|| self.image.missing(env))
    }

    fn image(&self) -> Image {
        self.image
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let socket = context.sockets.join("ringtap.nbd");
        let mut command = serve(context, self.image);
        command.arg("--nbd").arg(format!("unix:{}", socket.display()));
        let mut server = Server::start(command, &context.log)?;
        server.wait_for_socket(&socket, READY, context.stop)?;
        Ok(Served::by(server, nbd_access(&socket)))
    }
}

/// Over vhost-user.
#[derive(Debug)]
pub struct VhostUser {
    /// What the disk's file is.
    pub image: Image,
}

impl Backend for VhostUser {
    fn reach(&self) -> Reach {
        Reach::VhostUser
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        let missing = env.ringtap_serve().or_else(|| env.ringtap_format(self.image.format()));
        missing.or_else(|| self.image.missing(env))
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        by_vhost_user(serve(context, self.image), context)
    }

    fn image(&self) -> Image {
        self.image
    }
}

/// Percent of its service time for which the known-slow arm holds back each answer.
pub(super) const SLOWER: u32 = 20;

/// Over vhost-user on a raw disk, each answer held back: known to be slower.
#[derive(Debug)]
pub struct Slow;

impl Backend for Slow {
    fn reach(&self) -> Reach {
        Reach::VhostUser
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.ringtap_serve()
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let mut command = serve(context, Image::Raw);
        command.arg("--hold").arg(SLOWER.to_string());
        by_vhost_user(command, context)
    }

    fn slow_of(&self) -> Option<&'static str> {
        Some("ringtap-vhost")
    }
}

/// Serves a store by its name over vhost-user; with `hold` each answer is held back by so many percent of its time.
pub(super) fn serve_store(context: &Context<'_>, name: &str, hold: Option<u32>) -> Result<Served> {
    let mut command = Command::new(&context.env.ringtap);
    command.args(["serve", name, "-f", "raw"]);
    if let Some(percent) = hold {
        command.arg("--hold").arg(percent.to_string());
    }
    by_vhost_user(command, context)
}

fn by_vhost_user(mut command: Command, context: &Context<'_>) -> Result<Served> {
    let socket = context.sockets.join("ringtap.vhost");
    command.arg("--vhost-user").arg(&socket);
    let mut server = Server::start(command, &context.log)?;
    server.wait_for_socket_file(&socket, READY, context.stop)?;
    Ok(Served::by(server, Access::VhostUser { socket }))
}

/// As a file by FUSE, with a loop device on top: a block device of this machine without a driver of its own.
#[derive(Debug)]
pub struct FuseLoop;

impl Backend for FuseLoop {
    fn reach(&self) -> Reach {
        Reach::Block
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        let fuse = (!Path::new("/dev/fuse").exists())
            .then(|| Missing::new("this kernel has no FUSE", "modprobe fuse"));
        fuse.or_else(|| env.program("fusermount3", "fuse3"))
            .or_else(|| env.loop_devices())
            .or_else(|| env.ringtap_serve())
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let file = context.sockets.join("ringtap.fuse");
        let mut command = serve(context, Image::Raw);
        command.arg("--fuse").arg(&file);
        // Dropped after the server, should this fail.
        let mount = Mount::expected(&file);
        let mut server = Server::start(command, &context.log)?;
        server.wait_until(&file, READY, context.stop, || mount.there())?;
        let device = LoopDevice::attach(&file, true)?;
        // Should the lab be killed, the server unmounts, and the device no longer says what it lies on.
        let note = file.with_extension(scratch::LOOP_NOTE);
        std::fs::write(&note, device.path().as_os_str().as_encoded_bytes())
            .map_err(Error::file("write", &note))?;
        let access = Access::Block(device.path().to_owned());
        Ok(Served {
            above: vec![Box::new(device)],
            behind: vec![Box::new(mount)],
            ..Served::by(server, access)
        })
    }

    fn remark(&self) -> Option<&'static str> {
        Some("two more kernel layers, loop and FUSE, above the server: machine CPU has them")
    }
}

fn serve(context: &Context<'_>, image: Image) -> Command {
    let mut command = Command::new(&context.env.ringtap);
    command.arg("serve").arg(context.disk).args(["-f", image.format(), "--cache", "none"]);
    if image == Image::Luks {
        let secret = context.disk.with_file_name(super::SECRET);
        command.arg("--secret").arg(format!("file:{}", secret.display()));
    }
    command
}

pub(crate) fn nbd_access(socket: &Path) -> Access {
    let path = percent::encoded(socket.as_os_str().as_encoded_bytes());
    Access::Nbd { uri: format!("nbd+unix:///?socket={path}"), socket: socket.to_owned() }
}

const VHOST_USER: VhostUser = VhostUser { image: Image::Raw };
const QCOW2: VhostUser = VhostUser { image: Image::Qcow2 };
const LUKS: VhostUser = VhostUser { image: Image::Luks };
const OVERLAY: VhostUser = VhostUser { image: Image::Overlay(Maker::Ringtap) };
const OVERLAY_PLAIN: VhostUser = VhostUser { image: Image::Overlay(Maker::QemuImg) };
pub(super) const NBD: Nbd = Nbd { image: Image::Raw };
const NBD_OVERLAY: Nbd = Nbd { image: Image::Overlay(Maker::Ringtap) };
const SLOW: &str =
    "ringtap-vhost with each answer held back by 20 % of its time: known to be slower";
const RINGTAP_ON_OVERLAY: &str = "ringtap serve --vhost-user, a qcow2 overlay made anew for each load that writes, by `ringtap create -b` (with subclusters)";

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::usual(Stage::Host, 40, "ringtap-nbd", "ringtap serve --nbd, cache=none", &NBD),
        Entry::usual(
            Stage::Host,
            60,
            "ringtap-fuse",
            "ringtap serve --fuse, cache=none, with a direct-io loop device on top",
            &FuseLoop,
        ),
        Entry::usual(
            Stage::Host,
            140,
            "ringtap-vhost",
            "ringtap serve --vhost-user, cache=none",
            &VHOST_USER,
        ),
        Entry::usual(Stage::Host, 170, "slow", SLOW, &Slow),
        Entry::usual(
            Stage::Guest,
            30,
            "ringtap-vhost",
            "ringtap serve --vhost-user, cache=none",
            &VHOST_USER,
        ),
        Entry::named(Stage::Guest, 40, "ringtap-qcow2", "the same, qcow2", &QCOW2),
        Entry::named(Stage::Guest, 50, "ringtap-overlay", RINGTAP_ON_OVERLAY, &OVERLAY),
        Entry::named(Stage::Guest, 60, "ringtap-luks", "the same, LUKS1 with aes-256-xts", &LUKS),
        Entry::usual(Stage::Guest, 90, "slow", SLOW, &Slow),
        Entry::usual(
            Stage::Vm,
            150,
            "ringtap-vhost",
            "ringtap serve --vhost-user, raw, cache=none",
            &VHOST_USER,
        ),
        Entry::usual(Stage::Vm, 160, "ringtap-qcow2", "the same, qcow2", &QCOW2),
        Entry::usual(Stage::Vm, 170, "ringtap-overlay", RINGTAP_ON_OVERLAY, &OVERLAY),
        Entry::named(
            Stage::Vm,
            180,
            "ringtap-overlay-plain",
            "the same, made by `qemu-img create` (without subclusters)",
            &OVERLAY_PLAIN,
        ),
        Entry::usual(Stage::Vm, 190, "ringtap-luks", "the same, LUKS1 with aes-256-xts", &LUKS),
        Entry::usual(Stage::Vm, 230, "slow", SLOW, &Slow),
        Entry::usual(
            Stage::Vm,
            330,
            "guest-nbd",
            "ringtap serve --nbd under the guest's own client",
            &NBD,
        ),
        Entry::usual(Stage::Two, 40, "ringtap-nbd", "ringtap serve --nbd, cache=none", &NBD),
        Entry::named(
            Stage::Two,
            50,
            "ringtap-fuse",
            "ringtap serve --fuse, cache=none, with a direct-io loop device on top",
            &FuseLoop,
        ),
        Entry::usual(
            Stage::Two,
            110,
            "ringtap-overlay",
            "ringtap serve --nbd, a qcow2 overlay made anew for each load that writes, by `ringtap create -b` (with subclusters)",
            &NBD_OVERLAY,
        ),
        Entry::usual(
            Stage::Two,
            140,
            "ringtap-vhost",
            "ringtap serve --vhost-user, cache=none",
            &VHOST_USER,
        ),
        Entry::usual(Stage::Two, 160, "slow", SLOW, &Slow),
        Entry::usual(
            Stage::TwoGuests,
            20,
            "ringtap-vhost",
            "ringtap serve --vhost-user, cache=none",
            &VHOST_USER,
        ),
        Entry::usual(Stage::TwoGuests, 60, "slow", SLOW, &Slow),
        Entry::usual(
            Stage::TwoVms,
            30,
            "ringtap-vhost",
            "ringtap serve --vhost-user, raw, cache=none",
            &VHOST_USER,
        ),
        Entry::named(Stage::TwoVms, 40, "ringtap-qcow2", "the same, qcow2", &QCOW2),
        Entry::usual(Stage::TwoVms, 90, "slow", SLOW, &Slow),
    ],
    labels: &[
        ("ringtap-nbd", "Ringtap, NBD"),
        ("ringtap-fuse", "Ringtap, FUSE"),
        ("ringtap-vhost", "Ringtap, raw"),
        ("slow", "Ringtap, slowed on purpose"),
        ("ringtap-qcow2", "Ringtap, qcow2"),
        ("ringtap-overlay", "Ringtap, fresh overlay"),
        ("ringtap-overlay-plain", "Ringtap, overlay by qemu-img"),
        ("ringtap-luks", "Ringtap, LUKS"),
        ("guest-nbd", "Ringtap, NBD, guest's client"),
    ],
    peers: &[
        Peers {
            place: 10,
            stage: Stage::Host,
            arm: "ringtap-nbd",
            against: &["qemu-nbd", "qemu-nbd-threads", "qemu-nbd-native"],
        },
        Peers {
            place: 20,
            stage: Stage::Host,
            arm: "ringtap-vhost",
            against: &["native-load", "qsd-vhost", "qsd-vhost-threads", "qsd-vhost-native"],
        },
        Peers {
            place: 30,
            stage: Stage::Guest,
            arm: "ringtap-vhost",
            against: &["qsd-vhost", "qsd-vhost-threads", "qsd-vhost-native", "loop", "lvm"],
        },
        Peers {
            place: 40,
            stage: Stage::Guest,
            arm: "ringtap-overlay",
            against: &["lvm-snapshot"],
        },
        Peers {
            place: 50,
            stage: Stage::Vm,
            arm: "ringtap-vhost",
            against: &[
                "virtio-raw",
                "qsd-vhost",
                "ide",
                "ahci",
                "nvme",
                "loop",
                "loop-direct",
                "lvm",
            ],
        },
        Peers { place: 60, stage: Stage::Vm, arm: "ringtap-qcow2", against: &["virtio-qcow2"] },
        Peers {
            place: 70,
            stage: Stage::Vm,
            arm: "ringtap-overlay",
            against: &["virtio-overlay", "virtio-overlay-subclusters", "lvm-snapshot", "lvm-thin"],
        },
        Peers {
            place: 80,
            stage: Stage::Vm,
            arm: "ringtap-overlay-plain",
            against: &["virtio-overlay", "ringtap-overlay"],
        },
        Peers { place: 90, stage: Stage::Vm, arm: "ringtap-luks", against: &["ringtap-vhost"] },
        Peers { place: 140, stage: Stage::Host, arm: "ringtap-fuse", against: &["loop-direct"] },
        Peers { place: 150, stage: Stage::Two, arm: "ringtap-nbd", against: &["qemu-nbd", "loop"] },
        Peers {
            place: 160,
            stage: Stage::Two,
            arm: "ringtap-vhost",
            against: &["native-load", "qsd-vhost"],
        },
        Peers {
            place: 170,
            stage: Stage::Two,
            arm: "ringtap-overlay",
            against: &["lvm-snapshot", "ringtap-nbd"],
        },
        Peers {
            place: 200,
            stage: Stage::TwoGuests,
            arm: "ringtap-vhost",
            against: &["qsd-vhost", "loop", "lvm"],
        },
        Peers {
            place: 210,
            stage: Stage::TwoVms,
            arm: "ringtap-vhost",
            against: &["virtio-raw", "qsd-vhost", "loop", "lvm"],
        },
    ],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_paths_survive_in_a_uri() {
        let access = nbd_access(std::path::Path::new("/tmp/a b#2/x.sock"));
        let Access::Nbd { uri, .. } = access else { panic!("{access:?}") };
        assert_eq!(uri, "nbd+unix:///?socket=/tmp/a%20b%232/x.sock");
    }
}
