//! What this machine offers the lab: programs, devices, rights.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use ringtap_guest::{Appliance, Machine};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::process;
use crate::stop::Stop;

/// Why something cannot run here, and what would make it run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// What is not there.
    pub reason: String,
    /// What to do about it.
    pub remedy: String,
}

impl Missing {
    /// A reason with its remedy.
    pub fn new(reason: impl Into<String>, remedy: impl Into<String>) -> Missing {
        Missing { reason: reason.into(), remedy: remedy.into() }
    }
}

/// What a guest needs to reach an NBD server.
const NETWORK: [&str; 2] = ["virtio_net", "nbd"];

/// What a domain of Xen needs for an ext4.
pub const FILE_SYSTEM: [&str; 2] = ["crc32c_generic", "ext4"];

/// The machine, as far as availability is asked.
#[derive(Debug)]
pub struct Env {
    /// The `ringtap` binary.
    pub ringtap: PathBuf,
    /// The lab's own, `ringtap-lab`: its load and its tools are verbs of it.
    pub lab: PathBuf,
    serve: OnceLock<Option<Missing>>,
    load: OnceLock<Option<Missing>>,
    formats: Mutex<HashMap<String, bool>>,
    guest: OnceLock<Result<Appliance, Missing>>,
    pc: OnceLock<Result<(Appliance, Option<Missing>), Missing>>,
    xen: OnceLock<Result<(Appliance, Appliance), Missing>>,
    hvm: OnceLock<Result<(Appliance, Appliance), Missing>>,
}

impl Env {
    /// A machine with those binaries, `ringtap` and `ringtap-lab`.
    pub fn new(ringtap: PathBuf, lab: PathBuf) -> Env {
        Env {
            ringtap,
            lab,
            serve: OnceLock::new(),
            load: OnceLock::new(),
            formats: Mutex::default(),
            guest: OnceLock::new(),
            pc: OnceLock::new(),
            xen: OnceLock::new(),
            hvm: OnceLock::new(),
        }
    }

    /// Whether a program is there; `package` is Debian's name of what brings it.
    pub fn program(&self, program: &str, package: &str) -> Option<Missing> {
        process::find(program).is_none().then(|| {
            Missing::new(
                format!("{program} is not installed"),
                format!("apt-get install {package}"),
            )
        })
    }

    /// Whether this is root, for `what`.
    pub fn root(&self, what: &str) -> Option<Missing> {
        (!rustix::process::geteuid().is_root()).then(|| {
            Missing::new(format!("{what} needs root"), "run ringtap compare as root or with sudo")
        })
    }

    /// Whether `ringtap serve` is there and answers.
    pub fn ringtap_serve(&self) -> Option<Missing> {
        self.serve.get_or_init(|| self.ringtap_verb("serve")).clone()
    }

    /// Whether `ringtap-lab load` is there and answers.
    pub fn lab_load(&self) -> Option<Missing> {
        self.load.get_or_init(|| verb(&self.lab, "load")).clone()
    }

    /// Whether `ringtap create` is there and answers.
    pub fn ringtap_create(&self) -> Option<Missing> {
        self.ringtap_verb("create")
    }

    /// Whether `ringtap xen` is there and answers.
    pub fn ringtap_xen(&self) -> Option<Missing> {
        self.ringtap_verb("xen")
    }

    fn ringtap_verb(&self, name: &str) -> Option<Missing> {
        verb(&self.ringtap, name)
    }

    /// Whether `ringtap serve` knows an image format: it refuses an unknown one as bad usage (exit code 2) before it looks
    /// for the disk.
    pub fn ringtap_format(&self, format: &str) -> Option<Missing> {
        let mut formats = self.formats.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let known = *formats.entry(format.to_owned()).or_insert_with(|| {
            let mut command = Command::new(&self.ringtap);
            command.args(["serve", "/nonexistent/disk", "-f", format]);
            command.args(["--vhost-user", "/nonexistent/socket"]);
            let answer = process::run(command, Duration::from_secs(10), &Stop::default());
            !matches!(answer, Err(Error::Program { what, .. }) if what.contains("exit status: 2"))
        });
        (!known).then(|| {
            Missing::new(
                format!("this `ringtap serve` knows no format {format}"),
                format!("a Ringtap that serves {format}"),
            )
        })
    }

    /// Whether the lab's own tools can run, which are a verb of its binary.
    pub fn tools(&self) -> Option<Missing> {
        verb(&self.lab, "tool")
    }

    /// The kernel and initramfs of a guest for User-Mode Linux, built at the first call (seconds) and kept in the cache.
    /// The guest's root is the host's, read-only below a tmpfs: its fio, dd and bonnie++ are the host's.
    pub fn appliance(&self) -> Result<Appliance, Missing> {
        let build = || {
            let builder = self.with_tool(Appliance::builder(Machine::Uml));
            built(builder.modules(["dm_mod", "dm_snapshot", "dm_thin_pool"]))
        };
        self.guest.get_or_init(build).clone()
    }

    /// The same for a virtual PC, with those of the programs that there are.
    pub fn pc(&self) -> Result<Appliance, Missing> {
        self.pc_and_network().map(|(appliance, _)| appliance)
    }

    /// Why that guest has no NBD client.
    pub fn pc_network(&self) -> Option<Missing> {
        let program = self.program("nbd-client", "nbd-client");
        program.or_else(|| self.pc_and_network().ok().and_then(|(_, missing)| missing))
    }

    fn pc_and_network(&self) -> Result<(Appliance, Option<Missing>), Missing> {
        let build = || {
            let wanted = [
                "fio",
                "dd",
                "timeout",
                "bonnie++",
                "mkfs.ext4",
                "losetup",
                "dmsetup",
                "mount",
                "umount",
                "find",
                "cpio",
                "tail",
                "sync",
                "nbd-client",
                "date",
            ];
            let programs = wanted
                .iter()
                .filter(|name| process::find(name).is_some())
                .map(|name| (*name).to_owned());
            let own = program(&self.lab);
            let modules = ["ahci", "nvme", "dm_mod", "dm_snapshot", "dm_thin_pool"];
            let builder = self.with_tool(Appliance::builder(Machine::Pc));
            let builder = builder.modules(modules).programs(programs.chain(own));
            // A kernel may have no network card's driver: then only the NBD rows are lost.
            match built(builder.clone().modules(NETWORK)) {
                Ok(appliance) => Ok((appliance, None)),
                Err(missing) => built(builder).map(|appliance| (appliance, Some(missing))),
            }
        };
        self.pc.get_or_init(build).clone()
    }

    /// The first domain of a nested Xen, and its other ones.
    pub fn xen(&self) -> Result<(Appliance, Appliance), Missing> {
        let build = || {
            let other = self.with_tool(Appliance::builder(Machine::Domain));
            let other = other.spare_modules(FILE_SYSTEM).programs(self.domain_programs());
            Ok((built(self.first_domain())?, built(other)?))
        };
        self.xen.get_or_init(build).clone()
    }

    /// The first domain with a device model, and an HVM domain: its firmware reads what it boots from QEMU a byte at a time, so
    /// that there is dd in it and no fio with its sixty libraries.
    pub fn xen_hvm(&self) -> Result<(Appliance, Appliance), Missing> {
        let build = || {
            let hvm = Appliance::builder(Machine::Hvm).programs(["dd", "timeout", "date"]);
            Ok((built(self.first_domain().device_model())?, built(hvm)?))
        };
        self.hvm.get_or_init(build).clone()
    }

    fn first_domain(&self) -> ringtap_guest::Builder {
        let first = self.with_tool(Appliance::builder(Machine::Xen));
        let first = with_program(first, &self.ringtap);
        let own = program(&self.ringtap);
        let programs = ["dmsetup".to_owned()].into_iter().chain(self.domain_programs()).chain(own);
        first
            .modules(FILE_SYSTEM)
            .modules(["dm_mod"])
            .spare_modules(["xen-blkback"])
            .programs(programs)
    }

    /// What loads in a domain of Xen run, as far as it is here.
    fn domain_programs(&self) -> Vec<String> {
        let programs = ["fio", "dd", "timeout", "date", "bonnie++", "mkfs.ext4", "find", "cpio"];
        let there = programs.iter().filter(|name| process::find(name).is_some());
        there.map(|name| (*name).to_owned()).chain(program(&self.lab)).collect()
    }

    /// Where the lab's tools are in a guest.
    pub fn guest_tool(&self) -> PathBuf {
        in_a_guest(&self.lab)
    }

    /// Where `ringtap` is in Xen's first domain.
    pub fn guest_ringtap(&self) -> PathBuf {
        in_a_guest(&self.ringtap)
    }

    fn with_tool(&self, builder: ringtap_guest::Builder) -> ringtap_guest::Builder {
        with_program(builder, &self.lab)
    }

    /// Whether this kernel has a device-mapper that answers.
    pub fn device_mapper(&self) -> Option<Missing> {
        process::run_short("dmsetup", ["version"], &Stop::default()).err().map(|_| {
            Missing::new(
                "this kernel has no device-mapper",
                "modprobe dm_mod; the stages guest and vm run it on the guest's own device-mapper",
            )
        })
    }

    /// Whether loop devices can be made.
    pub fn loop_devices(&self) -> Option<Missing> {
        if !Path::new("/dev/loop-control").exists() {
            return Some(Missing::new("this kernel has no loop devices", "modprobe loop"));
        }
        self.root("making a loop device").or_else(|| self.program("losetup", "mount"))
    }
}

/// Whether a verb of a binary answers.
fn verb(binary: &Path, name: &str) -> Option<Missing> {
    let mut command = Command::new(binary);
    command.args([name, "--help"]);
    let answer = process::run(command, Duration::from_secs(10), &Stop::default());
    answer.err().map(|error| {
        Missing::new(
            format!("{} has no working `{name}` ({error})", binary.display()),
            "ringtap and ringtap-lab of one build, in one folder",
        )
    })
}

fn program(binary: &Path) -> Option<String> {
    binary.is_file().then(|| binary.to_string_lossy().into_owned())
}

/// A binary's own path, unless a guest mounts something of its own over it.
fn in_a_guest(binary: &Path) -> PathBuf {
    let hidden = ["/tmp", "/run", "/mnt"].iter().any(|dir| binary.starts_with(dir));
    match binary.file_name().filter(|_| hidden) {
        Some(name) => Path::new("/opt").join(name),
        None => binary.to_owned(),
    }
}

fn with_program(builder: ringtap_guest::Builder, binary: &Path) -> ringtap_guest::Builder {
    let there = in_a_guest(binary);
    if there != binary && binary.is_file() { builder.file(binary, there) } else { builder }
}

fn built(builder: ringtap_guest::Builder) -> Result<Appliance, Missing> {
    builder.build(&Appliance::default_cache()).map_err(|error| match error {
        ringtap_guest::Error::Missing { what, remedy, .. } => {
            Missing::new(format!("{what} is not on this machine"), remedy)
        }
        error => Missing::new(format!("no guest can be built: {error}"), "see the message"),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_format_is_known_unless_it_is_bad_usage() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("ringtap");
        let text = "#!/bin/sh\ncase \"$4\" in raw) exit 1;; esac\necho \"invalid value '$4'\" >&2\nexit 2\n";
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let env = Env::new(script.clone(), script);
        assert_eq!(env.ringtap_format("raw"), None);
        assert!(env.ringtap_format("qcow9").unwrap().reason.contains("qcow9"));
    }
}
