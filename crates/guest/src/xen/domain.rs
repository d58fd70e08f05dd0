//! A domain made by `xl create`, as a guest of its own.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{LINES, Line, Lines};
use crate::channel::Channel;
use crate::error::{Error, Result, io};
use crate::guest::{Arrival, Body, Guest, quote};
use crate::setup::{RAM, packed_root_script};

const LINE: &str = include_str!("line.sh");

/// Time for a command of Xen's tools, which a busy machine needs.
const TOOL_TIME: Duration = Duration::from_secs(200);

/// A domain about to be made.
#[derive(Debug, Clone)]
pub struct Domain {
    name: String,
    memory: u64,
    cpus: u16,
    kind: &'static str,
    disks: Vec<String>,
    drives: Vec<String>,
    options: String,
    timeout: Duration,
}

/// What an HVM domain's kernel needs to be told: to leave the emulated disks and use Xen's own beside them, and not to look for
/// old devices by thousands of reads that QEMU answers one by one.
const HVM_OPTIONS: &str = "xen_emul_unplug=unnecessary pci=noearly";

/// Makes copies of kernel and initramfs, for QEMU maps them, which it cannot with a block device.
const COPY: &str = "for file in kernel initrd; do cat /boot/hvm-$file >/run/xen/hvm-$file; done\n";

impl Domain {
    /// A PV domain with 384 MiB, one processor and no disks. The name is for `xl` and should be
    /// a plain word.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            memory: 384 << 20,
            cpus: 1,
            kind: "pv",
            disks: Vec::new(),
            drives: Vec::new(),
            options: String::new(),
            timeout: Duration::from_secs(300),
        }
    }

    /// Its memory in bytes; the programs packed for it are in there.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// How many processors it has.
    #[must_use]
    pub fn cpus(mut self, cpus: u16) -> Self {
        self.cpus = cpus;
        self
    }

    /// Makes it a PVH domain, which the processor must be able to carry: `xl info` says `hvm` then. A
    /// translated one is.
    #[must_use]
    pub fn pvh(mut self) -> Self {
        self.kind = "pvh";
        self
    }

    /// Makes it an HVM domain: a PC to its kernel, whose IDE controller QEMU emulates in the first domain, with disks that are
    /// QEMU's `-drive` options without interface and place (`/dev/sda` and so on, four at most). `Xen::hvm` has its kernel, and
    /// its emulator comes with [`crate::Builder::device_model`]. Disks of [`Domain::disk`] and of `xl block-attach` are paravirtual ones.
    #[must_use]
    pub fn hvm<S: Into<String>>(mut self, drives: impl IntoIterator<Item = S>) -> Self {
        self.kind = HVM;
        self.drives = drives.into_iter().map(Into::into).collect();
        self
    }

    /// Adds a disk, in the words of xl-disk-configuration(5), such as `phy:/dev/vda,xvda,w`.
    #[must_use]
    pub fn disk(mut self, specification: impl Into<String>) -> Self {
        self.disks.push(specification.into());
        self
    }

    /// More words for its kernel's command line, such as `xen_blkfront.max_ring_page_order=2`.
    #[must_use]
    pub fn kernel_options(mut self, words: impl Into<String>) -> Self {
        self.options = words.into();
        self
    }

    /// How long it may take from `xl create` to its first command; five minutes unless told
    /// otherwise, for busy machines.
    #[must_use]
    pub fn boot_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    pub(super) fn create(&self, dom0: &Arc<Guest>, lines: &Arc<Lines>) -> Result<Guest> {
        let started = Instant::now();
        let line = lines.take().ok_or_else(|| Error::Unusable {
            path: lines.sockets.clone(),
            found: format!("already in use by {LINES} domains"),
            remedy: "drop one of them".into(),
        })?;
        let script = format!(
            "set -e\n{}cat >/run/xen/{name}.cfg <<'END OF DOMAIN'\n{}END OF DOMAIN\n\
             xl create /run/xen/{name}.cfg >/dev/null\n\
             xl domid {name}\n",
            if self.kind == HVM { COPY } else { "" },
            self.configuration(),
            name = self.name,
        );
        let said = dom0.exec(&script, TOOL_TIME)?.success()?.stdout;
        let running = Running { dom0: dom0.clone(), name: self.name.clone(), line };
        let id: u32 = said.trim().parse().map_err(|_| Error::Output {
            program: "xl domid",
            found: "no number".into(),
            output: said.clone(),
        })?;
        let socket = running.line.socket();
        let stream = UnixStream::connect(&socket).map_err(io("connect to", &socket))?;
        dom0.start(&format!("id={id} line={}\n{LINE}", running.line.name()))?;
        let channel = Channel::new(stream, dom0.interrupt().clone(), Some(format!("bye {id}")));
        let channel = channel.map_err(io("read from the guest at", &socket))?;
        let arrival = Arrival { body: Box::new(running), channel, started, timeout: self.timeout };
        arrival
            .ready("A domain of Xen", dom0.accelerator(), &packed_root_script(), vec![], |_| None)
    }

    /// An emulated PC without screen, keyboard and USB, and its disks.
    fn emulated(&self) -> String {
        let mut words: Vec<String> = Vec::new();
        for (n, drive) in self.drives.iter().enumerate() {
            words.push(format!("{:?}", "-drive"));
            words.push(format!("{:?}", format!("if=ide,index={n},media=disk,{drive}")));
        }
        format!(
            "device_model_version=\"qemu-xen\"\nvga=\"none\"\nnographic=1\nvnc=0\nsdl=0\nspice=0\nusb=0\n\
             device_model_args_hvm=[{}]\n",
            words.join(", ")
        )
    }

    fn configuration(&self) -> String {
        let disks: Vec<String> = self.disks.iter().map(|disk| format!("{disk:?}")).collect();
        let hvm = self.kind == HVM;
        let place = if hvm { "/run/xen/hvm-" } else { "/boot/" };
        let options = if hvm { HVM_OPTIONS } else { "" };
        let emulated = if hvm { self.emulated() } else { String::new() };
        format!(
            "name=\"{}\"\ntype=\"{}\"\nkernel=\"{place}kernel\"\nramdisk=\"{place}initrd\"\n\
             memory={}\nvcpus={}\nextra=\"console=hvc0 quiet loglevel=5 panic=1 ringtap_port=hvc0 {RAM} {options} {}\"\n\
             on_poweroff=\"destroy\"\non_reboot=\"destroy\"\non_crash=\"destroy\"\ndisk=[{}]\n{emulated}",
            self.name,
            self.kind,
            self.memory >> 20,
            self.cpus,
            self.options,
            disks.join(", ")
        )
    }
}

/// xl's word.
const HVM: &str = "hvm";

/// A domain that is there; destroyed when dropped.
struct Running {
    dom0: Arc<Guest>,
    name: String,
    line: Line,
}

impl Body for Running {
    fn wait(&mut self, timeout: Duration) -> Option<String> {
        let name = quote(&self.name);
        let rounds = timeout.as_millis().div_ceil(100);
        let script = format!(
            "for i in $(seq {rounds}); do xl domid {name} >/dev/null 2>&1 || exit 0; sleep 0.1; done; exit 1"
        );
        // What became of it cannot be known where the first domain is gone.
        let gone = self.dom0.exec(&script, timeout + TOOL_TIME).is_ok_and(|out| out.status == 0);
        gone.then(|| "by itself".into())
    }

    fn console(&self) -> String {
        let script = format!("tail -c 256k /var/log/xen/console/guest-{}.log", quote(&self.name));
        match self.dom0.exec(&script, TOOL_TIME) {
            Ok(output) => output.stdout,
            Err(_) => self.dom0.console(),
        }
    }

    fn pid(&self) -> u32 {
        self.dom0.pid()
    }

    fn cpu_time(&self) -> Duration {
        self.dom0.cpu_time()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended by itself is no longer known to `xl`.
        // Nobody waits for it where an interrupted machine is to go as a whole.
        let _ = self.dom0.exec(&format!("xl destroy {}", quote(&self.name)), TOOL_TIME);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hvm_domain_has_its_own_kernel_and_the_disks_that_qemu_emulates() {
        let text = Domain::new("pc").hvm(["file=/dev/x", "file=/dev/y"]).configuration();
        for line in [
            "type=\"hvm\"",
            "kernel=\"/run/xen/hvm-kernel\"",
            "disk=[]",
            "device_model_args_hvm=[\"-drive\", \"if=ide,index=0,media=disk,file=/dev/x\", \"-drive\", \"if=ide,index=1,media=disk,file=/dev/y\"]",
        ] {
            assert!(text.lines().any(|known| known == line), "{line}: {text}");
        }
        assert!(
            text.contains("ringtap_port=hvc0 rootfstype=ramfs xen_emul_unplug=unnecessary"),
            "{text}"
        );
        let pv = Domain::new("pv").disk("phy:/dev/x,xvda,w").configuration();
        assert!(pv.contains("kernel=\"/boot/kernel\"") && !pv.contains("device_model"), "{pv}");
        assert!(!pv.contains("xen_emul_unplug"), "{pv}");
    }
}
