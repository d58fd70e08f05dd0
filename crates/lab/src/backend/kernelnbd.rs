//! An NBD export as a block device of this host, by the kernel's NBD client.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::ringtap::READY;
use super::{Access, Backend, Context, Entry, File, Part, Peers, Reach, Served, qemu, ringtap};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::process;
use crate::sample::Stage;
use crate::stop::Stop;

const PAUSE: Duration = Duration::from_millis(10);

/// A server of an NBD export with the kernel's client on top.
pub struct KernelNbd(pub &'static dyn Backend);

/// Whether this kernel has an NBD client.
pub fn is_there() -> bool {
    Path::new("/sys/block/nbd0").exists()
}

impl Backend for KernelNbd {
    fn reach(&self) -> Reach {
        Reach::Block
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        let kernel = (!is_there()).then(|| {
            let remedy = "modprobe nbd; guest-nbd (stage vm) uses the guest's own";
            Missing::new("this kernel has no NBD client", remedy)
        });
        kernel
            .or_else(|| env.root("attaching an NBD device"))
            .or_else(|| env.program("nbd-client", "nbd-client"))
            .or_else(|| self.0.missing(env))
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let served = self.0.start(context)?;
        let Access::Nbd { socket, .. } = &served.access else {
            return Err(Error::Plan("the kernel's NBD client needs an NBD export".into()));
        };
        let (client, path) = NbdDevice::attach(socket, context.stop)?;
        Ok(Served { access: Access::Block(path), above: vec![Box::new(client)], ..served })
    }

    fn cached(&self) -> bool {
        self.0.cached()
    }

    fn remark(&self) -> Option<&'static str> {
        Some("the kernel's NBD client works in its own threads: kernel CPU has it")
    }
}

/// An attached NBD device; detached when it is dropped.
#[derive(Debug)]
pub struct NbdDevice {
    path: Option<PathBuf>,
}

impl NbdDevice {
    /// Attaches the export behind a socket, and says where.
    fn attach(socket: &Path, stop: &Stop) -> Result<(NbdDevice, PathBuf)> {
        let failed = |what: String| Error::Program {
            program: "nbd-client".into(),
            what,
            said: String::new(),
        };
        let name = free().ok_or_else(|| failed("finds no NBD device that is free".into()))?;
        let path = Path::new("/dev").join(&name);
        // Not interruptible: the device would stay attached.
        let words = ["-unix".as_ref(), socket.as_os_str(), path.as_os_str()];
        process::run_short("nbd-client", words, &Stop::default())?;
        let device = NbdDevice { path: Some(path.clone()) };
        let until = Instant::now() + READY;
        while size(&name) == 0 {
            stop.check()?;
            if Instant::now() > until {
                return Err(failed(format!("attached {}, which has no size", path.display())));
            }
            std::thread::sleep(PAUSE);
        }
        Ok((device, path))
    }

    /// Detaches it and says when that fails.
    pub fn detach(mut self) -> Result<()> {
        self.path.take().map_or(Ok(()), |path| detach(&path))
    }
}

impl Part for NbdDevice {
    fn end(self: Box<Self>) -> Result<()> {
        self.detach()
    }
}

impl Drop for NbdDevice {
    fn drop(&mut self) {
        if let Some(path) = self.path.take() {
            let _ = detach(&path);
        }
    }
}

fn detach(path: &Path) -> Result<()> {
    process::run_short("nbd-client", ["-d".as_ref(), path.as_os_str()], &Stop::default()).map(drop)
}

fn size(name: &str) -> u64 {
    let file = Path::new("/sys/block").join(name).join("size");
    std::fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// The first device that nobody has.
fn free() -> Option<String> {
    (0..)
        .map(|number| format!("nbd{number}"))
        .take_while(|name| Path::new("/sys/block").join(name).exists())
        .find(|name| size(name) == 0 && !Path::new("/sys/block").join(name).join("pid").exists())
}

const RINGTAP_KERNEL: &str = "ringtap serve --nbd, cache=none, under this kernel's own client";
const QEMU_KERNEL: &str = "qemu-nbd, cache=none, aio=io_uring, under this kernel's own client";

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::usual(
            Stage::Host,
            50,
            "ringtap-nbd-kernel",
            RINGTAP_KERNEL,
            &KernelNbd(&ringtap::NBD),
        ),
        Entry::usual(Stage::Host, 80, "qemu-nbd-kernel", QEMU_KERNEL, &KernelNbd(&qemu::NBD)),
        Entry::usual(
            Stage::Two,
            60,
            "ringtap-nbd-kernel",
            RINGTAP_KERNEL,
            &KernelNbd(&ringtap::NBD),
        ),
        Entry::usual(Stage::Two, 90, "qemu-nbd-kernel", QEMU_KERNEL, &KernelNbd(&qemu::NBD)),
    ],
    labels: &[
        ("ringtap-nbd-kernel", "Ringtap, NBD, kernel's client"),
        ("qemu-nbd-kernel", "qemu-nbd, kernel's client"),
    ],
    peers: &[
        Peers {
            place: 130,
            stage: Stage::Host,
            arm: "ringtap-nbd-kernel",
            against: &["qemu-nbd-kernel", "loop-direct"],
        },
        Peers {
            place: 190,
            stage: Stage::Two,
            arm: "ringtap-nbd-kernel",
            against: &["qemu-nbd-kernel", "loop-direct"],
        },
    ],
};
