//! Xen on a virtual PC: its first domain is a guest as any other, and makes more of them.

pub(crate) mod packages;
pub(crate) mod vmlinux;

mod domain;

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::appliance::Appliance;
use crate::error::{Error, Result};
use crate::guest::{Guest, Launch, link};
use crate::kernel::Machine;
use crate::kvm;
use crate::pc::{PACKAGE, PROGRAM, Pc};
use crate::process::find_program;
use crate::qemu::{Drive, advise};
use crate::rundir::RunDir;
use crate::setup::packed_root_script;
use crate::uml::letter;

pub use domain::Domain;

const DOM0: &str = include_str!("dom0.sh");

/// Domains at a time, beside the first.
const LINES: usize = 4;

/// What Xen itself takes of the machine's memory, with room to spare.
const XEN_MEMORY: u64 = 192 << 20;

/// The first domain sees the machine's memory in another order than the devices do; a virtio
/// device must be told to ask for their addresses.
const VIRTIO: &str = "disable-legacy=on,iommu_platform=on";

/// A Xen about to be booted, whose first domain is a PV one.
#[derive(Debug, Clone)]
pub struct Xen {
    first: Appliance,
    other: Appliance,
    hvm: Option<Appliance>,
    memory: u64,
    domains_memory: u64,
    cpus: u16,
    disks: Vec<Drive>,
    timeout: Duration,
    interrupt: Arc<AtomicBool>,
}

/// A running Xen: its first domain, and what it takes to make others.
pub struct Host {
    dom0: Arc<Guest>,
    lines: Arc<Lines>,
}

/// The byte streams from this machine to domains, one for each.
pub(crate) struct Lines {
    sockets: PathBuf,
    free: Mutex<Vec<usize>>,
}

impl Xen {
    /// With 1 GiB and two processors for the first domain, 1 GiB for all others together, which
    /// boot the kernel and initramfs of `other`, and no disks.
    pub fn new(first: &Appliance, other: &Appliance) -> Self {
        Self {
            first: first.clone(),
            other: other.clone(),
            hvm: None,
            memory: 1 << 30,
            domains_memory: 1 << 30,
            cpus: 2,
            disks: Vec::new(),
            timeout: Duration::from_secs(400),
            interrupt: Arc::default(),
        }
    }

    /// What HVM domains boot, an appliance of [`Machine::Hvm`]; the first domain must have a device model.
    #[must_use]
    pub fn hvm(mut self, appliance: &Appliance) -> Self {
        self.hvm = Some(appliance.clone());
        self
    }

    /// The first domain's memory in bytes.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// The memory of all other domains together, in bytes.
    #[must_use]
    pub fn domains_memory(mut self, bytes: u64) -> Self {
        self.domains_memory = bytes;
        self
    }

    /// How many processors the machine has, and the first domain with it.
    #[must_use]
    pub fn cpus(mut self, cpus: u16) -> Self {
        self.cpus = cpus;
        self
    }

    /// Gives the first domain a disk: `/dev/vda`, `/dev/vdb`, … in this order.
    #[must_use]
    pub fn disk(mut self, drive: Drive) -> Self {
        self.disks.push(drive);
        self
    }

    /// How long the boot may take; 400 seconds unless told otherwise, for busy machines.
    #[must_use]
    pub fn boot_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Ends the boot, and whatever waits for the guest later, with [`Error::Interrupted`] once the
    /// flag is true. Then all that is left to do is to drop the [`Host`]; its domains go with it.
    #[must_use]
    pub fn interrupt(mut self, flag: Arc<AtomicBool>) -> Self {
        self.interrupt = flag;
        self
    }

    /// Boots Xen, its first domain and Xen's daemons there.
    ///
    /// # Errors
    /// [`Error::Boot`] with the console's last lines when it does not come up.
    pub fn boot(self) -> Result<Host> {
        let hypervisor = self.first.hypervisor.as_ref().filter(|_| {
            self.first.kernel.machine == Machine::Xen
                && self.other.kernel.machine == Machine::Domain
        });
        let hypervisor = hypervisor.ok_or_else(|| Error::Unusable {
            path: self.first.initrd.clone(),
            found: "an appliance for another machine, or the second one is".into(),
            remedy: "build them with Machine::Xen and Machine::Domain".into(),
        })?;
        let program = find_program(PROGRAM, PACKAGE)?;
        let accelerator = kvm::accelerator(&self.first);
        let files = RunDir::new()?;
        let dir = files.path().to_owned();
        let pc = Pc {
            program: &program,
            dir: &dir,
            cpus: self.cpus,
            sockets: 1,
            memory: self.memory + self.domains_memory + XEN_MEMORY,
            accelerator,
            // With SMAP, which `max` has, TCG has a PV kernel fault at its first instructions. Domains
            // that are no PV ones need SVM with nested pages.
            // With RDRAND a kernel has its random numbers before its second processor starts. One that
            // collects them rewrites its code while both run, and under TCG a processor may then meet a
            // breakpoint that nobody knows any more, and panic.
            translated: "qemu64,+rdrand,+svm,+npt",
            virtio: &format!(",{VIRTIO}"),
        };
        let mut command = pc.command();
        let (own, cpus) = (self.memory >> 20, self.cpus);
        command.args(["-kernel", &link(&dir, "xen", &hypervisor.image)?, "-append"]);
        command.arg(format!(
            "com1=115200,8n1 console=com1 loglvl=warning guest_loglvl=error \
             dom0_mem={own}M,max:{own}M dom0_max_vcpus={cpus}"
        ));
        let kernel = link(&dir, "kernel", &self.first.kernel.image)?;
        let initrd = link(&dir, "initrd", &self.first.initrd)?;
        let options = "console=hvc0 panic=-1 quiet loglevel=5 ringtap_port=ringtap.agent";
        command.args(["-initrd", &format!("{kernel} {options},{initrd}")]);
        for n in 0..LINES {
            let path = dir.join(line_name(n)).display().to_string();
            command
                .args(["-chardev", &format!("socket,id=line{n},path={path},server=on,wait=off")]);
            let port = format!("virtserialport,chardev=line{n},name=ringtap.{}", line_name(n));
            command.args(["-device", &port]);
        }
        let mut disks = Vec::new();
        for (n, drive) in self.disks.iter().enumerate() {
            let id = format!("d{n}");
            command.args(["-drive", &drive.argument(&id, &link(&dir, &id, &drive.path)?)]);
            command.args(["-device", &format!("virtio-blk-pci,drive={id},{VIRTIO}")]);
            disks.push(format!("/dev/vd{}", letter(n)));
        }
        let mut set_up = packed_root_script();
        set_up.push_str("mkdir -p /root/boot\n");
        let mut boot = vec![("kernel", &self.other.kernel.image), ("initrd", &self.other.initrd)];
        if let Some(hvm) = &self.hvm {
            boot.extend([("hvm-kernel", &hvm.kernel.image), ("hvm-initrd", &hvm.initrd)]);
        }
        for (name, path) in boot {
            let id = format!("domain-{name}");
            let path = link(&dir, &id, path)?;
            let drive = format!("if=none,id={id},file={path},format=raw,readonly=on");
            command.args(["-drive", &drive]);
            command.args(["-device", &format!("virtio-blk-pci,drive={id},{VIRTIO}")]);
            let node = format!("/dev/vd{}", letter(disks.len()));
            set_up.push_str(&format!("ln -s {node} /root/boot/{name}\n"));
            disks.push(node);
        }
        set_up.push_str(DOM0);
        let guest = Launch {
            machine: "Xen in QEMU (qemu-system-x86_64)",
            accelerator,
            command,
            files,
            set_up,
            disks,
            timeout: self.timeout,
            interrupt: self.interrupt,
            advise,
            one_processor: false,
        }
        .start()?;
        let lines = Lines { sockets: dir, free: Mutex::new((0..LINES).rev().collect()) };
        Ok(Host { dom0: Arc::new(guest), lines: Arc::new(lines) })
    }
}

impl Host {
    /// The first domain; its disks are those of [`Xen::disk`], and behind them those that other domains boot from.
    pub fn dom0(&self) -> &Guest {
        &self.dom0
    }

    /// Has `xl create` make a domain, and waits until it takes commands. Dropping it destroys it.
    ///
    /// # Errors
    /// [`Error::Failed`] with what `xl` said, [`Error::Boot`] when the domain does not come up.
    pub fn create(&self, domain: &Domain) -> Result<Guest> {
        domain.create(&self.dom0, &self.lines)
    }
}

fn line_name(number: usize) -> String {
    format!("line{number}")
}

impl Lines {
    fn take(self: &Arc<Self>) -> Option<Line> {
        let number = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(Line { all: self.clone(), number })
    }
}

/// One of the lines; given back when dropped.
pub(crate) struct Line {
    all: Arc<Lines>,
    number: usize,
}

impl Line {
    fn name(&self) -> String {
        line_name(self.number)
    }

    fn socket(&self) -> PathBuf {
        self.all.sockets.join(self.name())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.all.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.number);
    }
}
