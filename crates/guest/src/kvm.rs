//! Whether KVM really runs a kernel on this machine, and if not, why.

use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use crate::appliance::Appliance;
use crate::error::{Result, io};
use crate::guest::link;
use crate::pc::{PACKAGE, PROGRAM};
use crate::process::{Group, find_program};
use crate::rundir::RunDir;

/// Why guests do not run under KVM here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoKvm {
    /// There is no `/dev/kvm`.
    Absent,
    /// It may not be opened by this user.
    Forbidden,
    /// It cannot be opened, by this error.
    Closed(String),
    /// It is there, and no kernel came up under it.
    Hangs,
}

impl fmt::Display for NoKvm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoKvm::Absent => f.write_str("there is no /dev/kvm"),
            NoKvm::Forbidden => f.write_str("/dev/kvm may not be opened by this user"),
            NoKvm::Closed(error) => write!(f, "/dev/kvm cannot be opened ({error})"),
            NoKvm::Hangs => f.write_str("/dev/kvm is there, but no kernel ran under it when tried"),
        }
    }
}

impl NoKvm {
    /// What would help.
    pub fn remedy(&self) -> &'static str {
        match self {
            NoKvm::Forbidden => {
                "run it as root, or as a user of the group kvm (usermod -aG kvm USER)"
            }
            NoKvm::Absent | NoKvm::Closed(_) => {
                "modprobe kvm_intel or kvm_amd; if that fails, switch on virtualization in the firmware, or on a virtual \
                 machine nested virtualization on its host"
            }
            NoKvm::Hangs => "another host below this virtual machine, or a real machine",
        }
    }
}

/// Nothing where KVM really runs a kernel, else why it does not. Tried once in the life of a process.
pub(crate) fn works(appliance: &Appliance) -> std::result::Result<(), NoKvm> {
    static WORKS: OnceLock<std::result::Result<(), NoKvm>> = OnceLock::new();
    let dir = appliance.initrd.parent().unwrap_or(Path::new("/tmp"));
    let tried = || {
        open(Path::new("/dev/kvm"))?;
        let works = probe(&appliance.kernel.image, &dir.join("kvm")).unwrap_or(false);
        if works { Ok(()) } else { Err(NoKvm::Hangs) }
    };
    WORKS.get_or_init(tried).clone()
}

/// `kvm` where it really runs a kernel, else `tcg`.
pub(crate) fn accelerator(appliance: &Appliance) -> &'static str {
    if works(appliance).is_ok() { "kvm" } else { "tcg" }
}

/// Opens the device as QEMU does.
fn open(device: &Path) -> std::result::Result<(), NoKvm> {
    match fs::OpenOptions::new().read(true).write(true).open(device) {
        Ok(_) => Ok(()),
        Err(error) => Err(match error.kind() {
            ErrorKind::NotFound => NoKvm::Absent,
            ErrorKind::PermissionDenied => NoKvm::Forbidden,
            _ => NoKvm::Closed(error.to_string()),
        }),
    }
}

/// Boots the kernel alone: without a root it panics, and QEMU ends, within a second or so. Code
/// that merely starts proves nothing; on some nested hosts firmware runs and a kernel hangs.
fn probe(kernel: &Path, memo: &Path) -> Result<bool> {
    const GIVEN: Duration = Duration::from_secs(6);
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let known = fs::read_to_string(memo).unwrap_or_default();
    if let Some(answer) = known.strip_prefix(boot.trim()).filter(|_| !boot.is_empty()) {
        return Ok(answer.trim() == "works");
    }
    let dir = RunDir::new()?;
    let console = dir.path().join("console");
    let log = fs::File::create(&console).map_err(io("make", &console))?;
    let program = find_program(PROGRAM, PACKAGE)?;
    let mut command = Command::new(&program);
    command.args(["-accel", "kvm", "-cpu", "host", "-nodefaults", "-no-user-config", "-m", "256M"]);
    command.args(["-display", "none", "-monitor", "none", "-no-reboot", "-serial", "stdio"]);
    command.args(["-kernel", &link(dir.path(), "kernel", kernel)?]);
    command.args(["-append", "console=ttyS0 panic=-1"]);
    command.stdin(Stdio::null()).stdout(log).stderr(Stdio::null());
    let mut group = Group::spawn(&mut command).map_err(io("start", &program))?;
    let ended = group.wait(GIVEN).is_some();
    group.kill();
    let text = fs::read(&console).map_err(io("read", &console))?;
    let works = ended && String::from_utf8_lossy(&text).contains("Linux version");
    let answer = format!("{} {}\n", boot.trim(), if works { "works" } else { "hangs" });
    fs::write(memo, answer).map_err(io("write", memo))?;
    Ok(works)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn why_a_device_cannot_be_opened_is_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(open(&dir.path().join("kvm")), Err(NoKvm::Absent));
        // A socket cannot be opened, as a device without a driver cannot.
        let socket = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let Err(closed) = open(&socket) else { panic!("opened") };
        assert!(matches!(&closed, NoKvm::Closed(error) if error.contains("No such device")));
        assert!(closed.remedy().contains("modprobe kvm_intel"));
        assert_eq!(open(Path::new("/dev/null")), Ok(()));
        assert!(NoKvm::Forbidden.remedy().contains("group kvm"));
    }
}
