//! What this machine offers the lab: programs, devices, rights.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use ringtap_guest::{Appliance, Machine};
use serde::{Deserialize, Serialize};

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

/// The machine, as far as availability is asked.
#[derive(Debug)]
pub struct Env {
    /// The `ringtap` binary.
    pub ringtap: PathBuf,
    serve: OnceLock<Option<Missing>>,
    load: OnceLock<Option<Missing>>,
    formats: OnceLock<String>,
    guest: OnceLock<Result<Appliance, Missing>>,
    pc: OnceLock<Result<Appliance, Missing>>,
}

impl Env {
    /// A machine with that `ringtap` binary.
    pub fn new(ringtap: PathBuf) -> Env {
        Env {
            ringtap,
            serve: OnceLock::new(),
            load: OnceLock::new(),
            formats: OnceLock::new(),
            guest: OnceLock::new(),
            pc: OnceLock::new(),
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

    /// Whether `ringtap load` is there and answers.
    pub fn ringtap_load(&self) -> Option<Missing> {
        self.load.get_or_init(|| self.ringtap_verb("load")).clone()
    }

    fn ringtap_verb(&self, verb: &str) -> Option<Missing> {
        let mut command = Command::new(&self.ringtap);
        command.args([verb, "--help"]);
        let answer = process::run(command, Duration::from_secs(10), &Stop::default());
        answer.err().map(|error| {
            Missing::new(
                format!("{} has no working `{verb}` ({error})", self.ringtap.display()),
                "cargo build --release, then run the compare verb of that ringtap binary",
            )
        })
    }

    /// Whether `ringtap serve` knows an image format.
    pub fn ringtap_format(&self, format: &str) -> Option<Missing> {
        let help = self.formats.get_or_init(|| {
            let mut command = Command::new(&self.ringtap);
            command.args(["serve", "--help"]);
            let answer = process::run(command, Duration::from_secs(10), &Stop::default());
            answer.map(|output| output.stdout).unwrap_or_default()
        });
        (!knows_format(help, format)).then(|| {
            Missing::new(
                format!("this `ringtap serve` knows no format {format}"),
                format!("a Ringtap that serves {format}"),
            )
        })
    }

    /// Whether the lab's own tools can run, which are a verb of the binary.
    pub fn tools(&self) -> Option<Missing> {
        self.ringtap_verb("lab-tool")
    }

    /// The kernel and initramfs of a guest for User-Mode Linux, built at the first call (seconds) and kept in the cache.
    /// The guest's root is the host's, read-only below a tmpfs: its fio, dd and bonnie++ are the host's.
    pub fn appliance(&self) -> Result<Appliance, Missing> {
        let build = || {
            let builder = Appliance::builder(Machine::Uml);
            built(builder.modules(["dm_mod", "dm_snapshot", "dm_thin_pool"]))
        };
        self.guest.get_or_init(build).clone()
    }

    /// The same for a virtual PC, with those of the programs that there are.
    pub fn pc(&self) -> Result<Appliance, Missing> {
        let build = || {
            let wanted = [
                "fio",
                "dd",
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
            ];
            let own = self.ringtap.to_string_lossy().into_owned();
            let programs = wanted
                .iter()
                .filter(|name| process::find(name).is_some())
                .map(|name| (*name).to_owned());
            let own = self.ringtap.is_file().then_some(own);
            let modules = ["ahci", "nvme", "dm_mod", "dm_snapshot", "dm_thin_pool"];
            built(Appliance::builder(Machine::Pc).modules(modules).programs(programs.chain(own)))
        };
        self.pc.get_or_init(build).clone()
    }

    /// Whether loop devices can be made.
    pub fn loop_devices(&self) -> Option<Missing> {
        if !Path::new("/dev/loop-control").exists() {
            return Some(Missing::new("this kernel has no loop devices", "modprobe loop"));
        }
        self.root("making a loop device").or_else(|| self.program("losetup", "mount"))
    }
}

/// Whether clap's help lists a value of `--format`.
fn knows_format(help: &str, format: &str) -> bool {
    let Some(from) = help.find("--format") else { return false };
    let section: Vec<&str> = help[from..]
        .lines()
        .enumerate()
        .take_while(|(at, line)| {
            *at == 0 || !line.trim_start().starts_with('-') || line.trim_start().starts_with("- ")
        })
        .map(|(_, line)| line)
        .collect();
    section.join(" ").split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == format)
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
    use super::*;

    #[test]
    fn formats_are_read_from_the_help() {
        let short = "  -f, --format <FORMAT>\n          Format of the image [possible values: raw, qcow2]\n      --cache <MODE>\n    vhd";
        assert!(
            knows_format(short, "raw")
                && knows_format(short, "qcow2")
                && !knows_format(short, "vhd")
        );
        let long = "  -f, --format <FORMAT>\n          Format\n\n          Possible values:\n          - raw: The disk's bytes\n          - qcow2: QEMU's\n\n      --cache <MODE>\n          luks";
        assert!(knows_format(long, "qcow2") && !knows_format(long, "luks"));
        assert!(!knows_format("", "raw"));
    }
}
