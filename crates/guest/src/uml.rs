//! User-Mode Linux: a Linux kernel that is an ordinary process of this host.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::appliance::{Appliance, Root};
use crate::error::{Error, Result, io};
use crate::guest::{Guest, Launch, link, quote};
use crate::kernel::Machine;
use crate::rundir::RunDir;
use crate::setup::{Share, root_script, share_script};

/// Preloaded so that processors with AMX do not kill every process; see `shim/xstate.rs`.
const XSTATE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/xstate"));

/// A User-Mode Linux guest about to be booted.
#[derive(Debug, Clone)]
pub struct Uml {
    appliance: Appliance,
    memory: u64,
    ubd: Vec<(PathBuf, String)>,
    vhost_user: Vec<PathBuf>,
    shares: Vec<Share>,
    timeout: Duration,
    interrupt: Arc<AtomicBool>,
    memory_dir: Option<PathBuf>,
}

impl Uml {
    /// A guest with 512 MiB and no disks.
    pub fn new(appliance: &Appliance) -> Self {
        Self {
            appliance: appliance.clone(),
            memory: 512 << 20,
            ubd: Vec::new(),
            vhost_user: Vec::new(),
            shares: Vec::new(),
            timeout: Duration::from_secs(60),
            interrupt: Arc::default(),
            memory_dir: None,
        }
    }

    /// The guest's memory in bytes; only what it touches is taken from the host.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Adds a raw file as the next of `/dev/ubda`, `/dev/ubdb`, …, served by the User-Mode Linux
    /// process itself through the host's page cache.
    #[must_use]
    pub fn ubd(self, path: impl Into<PathBuf>) -> Self {
        self.ubd_with(path, "d")
    }

    /// As [`Uml::ubd`] with flags of its own: `r` read-only, `s` every write synchronous, `t` no
    /// discard, `c` shared with other guests; `d` (plain data, never a copy-on-write file) is to
    /// be among them.
    #[must_use]
    pub fn ubd_with(mut self, path: impl Into<PathBuf>, flags: &str) -> Self {
        self.ubd.push((path.into(), flags.to_owned()));
        self
    }

    /// Adds the disk served on a vhost-user-blk socket as the next of `/dev/vda`, `/dev/vdb`, ….
    /// The server must be listening by the time of [`Uml::boot`].
    #[must_use]
    pub fn vhost_user(mut self, socket: impl Into<PathBuf>) -> Self {
        self.vhost_user.push(socket.into());
        self
    }

    /// Shows a directory of the host at `guest`, writable.
    #[must_use]
    pub fn share(mut self, host: impl Into<PathBuf>, guest: impl Into<String>) -> Self {
        self.shares.push(Share { host: host.into(), guest: guest.into() });
        self
    }

    /// Where the (at once unlinked) file that is the guest's memory lies; a tmpfs that is not
    /// mounted noexec. `/dev/shm` unless told otherwise.
    #[must_use]
    pub fn memory_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.memory_dir = Some(dir.into());
        self
    }

    /// How long the boot may take; a minute unless told otherwise, and it takes some two seconds.
    #[must_use]
    pub fn boot_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Ends the boot, and whatever waits for the guest later, with [`Error::Interrupted`] once the
    /// flag is true. Then all that is left to do is to drop the guest.
    #[must_use]
    pub fn interrupt(mut self, flag: Arc<AtomicBool>) -> Self {
        self.interrupt = flag;
        self
    }

    /// Boots the guest.
    ///
    /// # Errors
    /// [`Error::Boot`] with the console's last lines when it does not come up or a disk is not
    /// there.
    pub fn boot(self) -> Result<Guest> {
        if self.appliance.kernel.machine != Machine::Uml {
            return Err(Error::Unusable {
                path: self.appliance.kernel.image.clone(),
                found: "a kernel for a virtual PC".into(),
                remedy: "build the appliance with Machine::Uml".into(),
            });
        }
        let files = RunDir::new()?;
        let dir = files.path();
        let shim = write_shim(dir)?;
        let mut command = Command::new(&self.appliance.kernel.image);
        command.env_clear().env("PATH", "/usr/bin:/bin").env("LD_PRELOAD", shim);
        command.env("TMPDIR", self.memory_dir.as_deref().unwrap_or(Path::new("/dev/shm")));
        command.current_dir(dir);
        command.arg(format!("mem={}K", self.memory >> 10));
        command.arg(format!("initrd={}", link(dir, "initrd", &self.appliance.initrd)?));
        command.arg(format!("uml_dir={}", dir.display())).arg("umid=guest");
        // The agent's stream is stdin, the console goes to stdout.
        command.args(["con0=null,fd:1", "con1=fd:0,fd:0", "con=null", "ssl=null"]);
        command.args(["ringtap_port=tty1", "panic=-1", "noreboot", "quiet", "loglevel=5"]);
        let mut disks = Vec::new();
        for (n, (path, flags)) in self.ubd.iter().enumerate() {
            let link = link(dir, &format!("ubd{n}"), path)?;
            command.arg(format!("ubd{n}{flags}={link}"));
            disks.push(format!("/dev/ubd{}", letter(n)));
        }
        for (n, socket) in self.vhost_user.iter().enumerate() {
            let link = link(dir, &format!("vhost{n}"), socket)?;
            command.arg(format!("virtio_uml.device={link}:2"));
            disks.push(format!("/dev/vd{}", letter(n)));
        }
        let mut set_up = match self.appliance.root {
            Root::Host => root_script(Root::Host, "mount -t hostfs -o ro,/ none /lower"),
            Root::Packed => root_script(Root::Packed, ""),
        };
        for share in &self.shares {
            let host = fs::canonicalize(&share.host).map_err(io("find", &share.host))?;
            let host = quote(&host.to_string_lossy());
            set_up.push_str(&share_script(share, &format!("mount -t hostfs -o {host} none")));
        }
        Launch {
            machine: "User-Mode Linux (linux.uml)",
            accelerator: "uml",
            command,
            files,
            set_up,
            disks,
            timeout: self.timeout,
            interrupt: self.interrupt,
            advise,
            one_processor: true,
        }
        .start()
    }
}

/// The letter of the nth disk; past the 26th there is none a test could want.
pub(crate) fn letter(n: usize) -> String {
    let last = char::from(b'a' + (n % 26) as u8);
    match n / 26 {
        0 => last.to_string(),
        more => letter(more - 1) + &last.to_string(),
    }
}

fn write_shim(dir: &Path) -> Result<PathBuf> {
    let path = dir.join("xstate.so");
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o755)
        .open(&path)
        .map_err(io("make", &path))?;
    file.write_all(XSTATE).map_err(io("write", &path))?;
    Ok(path)
}

/// What is known about the ways in which User-Mode Linux fails to start.
fn advise(console: &str) -> Option<String> {
    let known = [
        (
            "set fp regs failed",
            "This processor has more vector state than this User-Mode Linux knows, and the library \
             that helps it was not loaded: is the temporary directory mounted noexec? Set TMPDIR",
        ),
        (
            "PROT_EXEC mmap",
            "The guest's memory must lie on a tmpfs not mounted noexec: give another memory_dir, \
             or `mount -o remount,exec /dev/shm`",
        ),
        (
            "check_ptrace",
            "Processes may not trace others here: in a container, add CAP_SYS_PTRACE or allow \
             ptrace in its seccomp profile",
        ),
        (
            "No space left on device",
            "The tmpfs that holds the guest's memory is full: free some of /dev/shm",
        ),
        (
            "virtio-uml: probe of",
            "No vhost-user server answered on the socket: start it before the guest",
        ),
    ];
    known.iter().find(|(sign, _)| console.contains(sign)).map(|(_, advice)| (*advice).into())
}
