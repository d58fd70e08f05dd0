//! QEMU: a virtual PC, under KVM where it works, else with its processor translated (TCG).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::appliance::{Appliance, Root};
use crate::error::{Error, Result, io};
use crate::guest::{Guest, Launch, link};
use crate::kernel::Machine;
use crate::kvm::{self, NoKvm};
use crate::pc::{PACKAGE, PROGRAM, Pc};
use crate::process::{find_program, run_tool};
use crate::rundir::RunDir;
use crate::setup::{RAM, Share, root_script, share_script};
use crate::uml::letter;

/// QEMU's meanings of `cache=`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Cache {
    /// O_DIRECT, a volatile cache told to the guest.
    #[default]
    None,
    /// The host's page cache, a volatile cache told to the guest.
    Writeback,
    /// The host's page cache, every write flushed.
    Writethrough,
    /// The host's page cache, flushes ignored.
    Unsafe,
}

/// How QEMU talks to the host's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Aio {
    /// A pool of threads.
    #[default]
    Threads,
    /// Linux AIO; only with [`Cache::None`].
    Native,
    /// io_uring.
    IoUring,
}

/// An image that QEMU itself serves to its guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drive {
    pub(crate) path: PathBuf,
    format: String,
    cache: Cache,
    aio: Aio,
    io_thread: bool,
    read_only: bool,
}

impl Drive {
    /// A raw image, cache none, aio threads.
    pub fn raw(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            format: "raw".into(),
            cache: Cache::None,
            aio: Aio::Threads,
            io_thread: false,
            read_only: false,
        }
    }

    /// Another format of QEMU's, such as `qcow2`.
    #[must_use]
    pub fn format(mut self, format: impl Into<String>) -> Self {
        self.format = format.into();
        self
    }

    /// Another cache mode.
    #[must_use]
    pub fn cache(mut self, cache: Cache) -> Self {
        self.cache = cache;
        self
    }

    /// Another engine.
    #[must_use]
    pub fn aio(mut self, aio: Aio) -> Self {
        self.aio = aio;
        self
    }

    /// Served by a thread of its own, beside QEMU's main loop; of virtio-blk only.
    #[must_use]
    pub fn io_thread(mut self) -> Self {
        self.io_thread = true;
        self
    }

    /// Opened for reading alone; the guest is told.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    pub(crate) fn argument(&self, id: &str, link: &str) -> String {
        let cache = match self.cache {
            Cache::None => "none",
            Cache::Writeback => "writeback",
            Cache::Writethrough => "writethrough",
            Cache::Unsafe => "unsafe",
        };
        let aio = match self.aio {
            Aio::Threads => "threads",
            Aio::Native => "native",
            Aio::IoUring => "io_uring",
        };
        let format = &self.format;
        let read_only = if self.read_only { ",read-only=on" } else { "" };
        format!(
            "if=none,id={id},file={link},format={format},cache={cache},aio={aio},discard=unmap{read_only}"
        )
    }
}

#[derive(Debug, Clone)]
enum Disk {
    Virtio(Drive),
    Ide(Drive),
    Ahci(Drive),
    Nvme(Drive),
    VhostUser { socket: PathBuf, queues: u16 },
    Own(Vec<String>),
}

/// A QEMU guest about to be booted.
#[derive(Debug, Clone)]
pub struct Qemu {
    appliance: Appliance,
    memory: u64,
    cpus: u16,
    nodes: u16,
    disks: Vec<Disk>,
    forwards: Vec<PathBuf>,
    shares: Vec<Share>,
    timeout: Duration,
    interrupt: Arc<AtomicBool>,
    accelerator: Option<&'static str>,
}

/// A QEMU that can be started.
pub(crate) struct Prepared {
    pub(crate) command: Command,
    pub(crate) files: RunDir,
    set_up: String,
    disks: Vec<String>,
    accelerator: &'static str,
}

/// The socket of QEMU's monitor, in the guest's folder.
pub(crate) const QMP: &str = "qmp";

/// A translated processor on a busy machine stands still for seconds: that is no lockup, no stall of RCU, and no timer
/// that does not work.
const PATIENT: &str =
    "nowatchdog rcupdate.rcu_cpu_stall_suppress=1 workqueue.watchdog_thresh=0 no_timer_check";
/// The processor that is translated where there is no KVM. Without `rep movsb`, which copies fastest on a
/// real processor and byte by byte on a translated one: Linux and its C library copy by words then.
const TRANSLATED: &str = "max,-erms";
/// So many more bytes of memory than were asked for: QEMU before 9.0 looks for pages written during a migration 64 at a
/// time where memory is a multiple of 256 KiB, and then does not see those that a translated processor writes again.
const MOVABLE: u64 = 8 << 10;
/// More virtio disks than these share PCI slots: a PC has 32.
const ALONE: usize = 16;
/// The first slot that virtio disks share; those before are for all else.
const FIRST_SHARED_SLOT: usize = 8;

/// Where on the PCI bus the nth of many virtio disks is: eight in each slot. Linux finds them in this order.
fn function(n: usize) -> String {
    format!(",multifunction=on,addr={:#x}.{}", FIRST_SHARED_SLOT + n / 8, n % 8)
}

/// Where [`Qemu::forward`]ed sockets are for the guest: at this address, from this port on.
pub const FORWARD_HOST: &str = "10.0.2.100";
/// Port of the first forwarded socket.
pub const FORWARD_PORT: u16 = 10809;

impl Qemu {
    /// A guest with 1 GiB, two processors and no disks.
    pub fn new(appliance: &Appliance) -> Self {
        Self {
            appliance: appliance.clone(),
            memory: 1 << 30,
            cpus: 2,
            nodes: 1,
            disks: Vec::new(),
            forwards: Vec::new(),
            shares: Vec::new(),
            timeout: Duration::from_secs(180),
            interrupt: Arc::default(),
            accelerator: None,
        }
    }

    /// The guest's memory in bytes, shared with vhost-user servers where there are any.
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

    /// How many NUMA nodes it has, each with as many of its processors and as much of its memory.
    #[must_use]
    pub fn nodes(mut self, nodes: u16) -> Self {
        self.nodes = nodes.clamp(1, self.cpus);
        self
    }

    /// Adds an image as virtio-blk; virtio-blk and vhost-user disks are `/dev/vda`, `/dev/vdb`, …
    /// in the order in which they were added.
    #[must_use]
    pub fn virtio_blk(mut self, drive: Drive) -> Self {
        self.disks.push(Disk::Virtio(drive));
        self
    }

    /// Adds a virtio disk on a drive that these arguments of QEMU define, in which `{id}` stands for its name.
    #[must_use]
    pub fn own(mut self, words: Vec<String>) -> Self {
        self.disks.push(Disk::Own(words));
        self
    }

    /// Adds an image as an IDE disk, `/dev/sda` and so on; four at most.
    #[must_use]
    pub fn ide(mut self, drive: Drive) -> Self {
        self.disks.push(Disk::Ide(drive));
        self
    }

    /// Adds an image as a SATA disk of an AHCI controller, six at most; they are `/dev/sdX` behind the IDE disks. The
    /// appliance must load the module `ahci`.
    #[must_use]
    pub fn ahci(mut self, drive: Drive) -> Self {
        self.disks.push(Disk::Ahci(drive));
        self
    }

    /// Adds an image as an NVMe disk, `/dev/nvme0n1` and so on. The appliance must load the module `nvme`.
    #[must_use]
    pub fn nvme(mut self, drive: Drive) -> Self {
        self.disks.push(Disk::Nvme(drive));
        self
    }

    /// Adds the disk served on a vhost-user-blk socket. When the server goes, QEMU tries to
    /// connect again for as long as the guest runs.
    #[must_use]
    pub fn vhost_user(mut self, socket: impl Into<PathBuf>, queues: u16) -> Self {
        self.disks.push(Disk::VhostUser { socket: socket.into(), queues });
        self
    }

    /// Leads one connection of the guest to the nth port from [`FORWARD_PORT`] on of [`FORWARD_HOST`] to the nth of these
    /// UNIX sockets. The guest gets a network card for it, reaches nothing else by it, and sets its address itself
    /// (10.0.2.15/24 on `eth0`). The appliance must load the module `virtio_net`.
    #[must_use]
    pub fn forward(mut self, socket: impl Into<PathBuf>) -> Self {
        self.forwards.push(socket.into());
        self
    }

    /// Shows a directory of the host at `guest`, writable.
    #[must_use]
    pub fn share(mut self, host: impl Into<PathBuf>, guest: impl Into<String>) -> Self {
        self.shares.push(Share { host: host.into(), guest: guest.into() });
        self
    }

    /// `kvm` or `tcg`, whatever [`Qemu::kvm_works`] says.
    #[must_use]
    pub fn accelerator(mut self, name: &'static str) -> Self {
        self.accelerator = Some(name);
        self
    }

    /// How long the boot may take; three minutes unless told otherwise, for busy machines.
    #[must_use]
    pub fn boot_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Whether KVM really runs a kernel here: `/dev/kvm` may be there and hang. Tried once per
    /// boot of this machine, for at most six seconds; the answer is kept beside the appliance.
    pub fn kvm_works(appliance: &Appliance) -> bool {
        Qemu::kvm(appliance).is_ok()
    }

    /// The same, with the reason.
    ///
    /// # Errors
    /// Why it does not.
    pub fn kvm(appliance: &Appliance) -> std::result::Result<(), NoKvm> {
        kvm::works(appliance)
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
        let Prepared { command, files, set_up, disks, accelerator } = self.prepare()?;
        Launch {
            machine: "QEMU (qemu-system-x86_64)",
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
        .start()
    }

    /// All that its QEMU is started with.
    pub(crate) fn prepare(&self) -> Result<Prepared> {
        if self.appliance.kernel.machine != Machine::Pc {
            return Err(Error::Unusable {
                path: self.appliance.kernel.image.clone(),
                found: "a User-Mode Linux".into(),
                remedy: "build the appliance with Machine::Pc".into(),
            });
        }
        let program = find_program(PROGRAM, PACKAGE)?;
        let accelerator = self.accelerator.unwrap_or_else(|| kvm::accelerator(&self.appliance));
        let files = RunDir::new()?;
        let dir = files.path();
        let (cpus, memory) = (self.cpus, self.whole_memory());
        let pc = Pc {
            program: &program,
            dir,
            cpus,
            sockets: self.nodes,
            memory,
            accelerator,
            translated: TRANSLATED,
            virtio: "",
        };
        let mut command = pc.command();
        let kernel = link(dir, "kernel", &self.appliance.kernel.image)?;
        let initrd = link(dir, "initrd", &self.appliance.initrd)?;
        command.args(["-kernel", &kernel, "-initrd", &initrd, "-append"]);
        command.arg(format!(
            "console=ttyS0 panic=-1 quiet loglevel=5 ringtap_port=ringtap.agent {RAM} {PATIENT}"
        ));
        let disks = self.add_disks(&program, dir, &mut command)?;
        self.add_forwards(&program, dir, &mut command)?;
        let set_up = self.add_shares(dir, &mut command)?;
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", dir.join(QMP).display())]);
        Ok(Prepared { command, files, set_up, disks, accelerator })
    }

    fn whole_memory(&self) -> u64 {
        if self.nodes == 1 { self.memory + MOVABLE } else { self.memory }
    }

    /// Its memory, where it is more than one anonymous piece.
    fn add_memory(&self, shared: bool, command: &mut Command) {
        let nodes = u64::from(self.nodes);
        if nodes == 1 && !shared {
            return;
        }
        let kind = if shared { "memfd,share=on" } else { "ram" };
        let size = (self.whole_memory() >> 10) / nodes;
        let each = self.cpus / self.nodes;
        for node in 0..self.nodes {
            command.args(["-object", &format!("memory-backend-{kind},id=mem{node},size={size}K")]);
            if nodes == 1 {
                command.args(["-machine", "memory-backend=mem0"]);
                continue;
            }
            let (first, last) = (node * each, node * each + each - 1);
            let numa = format!("node,nodeid={node},cpus={first}-{last},memdev=mem{node}");
            command.args(["-numa", &numa]);
        }
    }

    fn add_disks(&self, program: &Path, dir: &Path, command: &mut Command) -> Result<Vec<String>> {
        let mut nodes = Vec::new();
        let (mut virtio, mut ide, mut ahci, mut nvme) = (0, 0usize, 0, 0);
        let ide_disks = self.disks.iter().filter(|disk| matches!(disk, Disk::Ide(_))).count();
        if self.disks.iter().any(|disk| matches!(disk, Disk::Ahci(_))) {
            command.args(["-device", "ich9-ahci,id=ahci"]);
        }
        let shared = self.disks.iter().any(|disk| matches!(disk, Disk::VhostUser { .. }));
        self.add_memory(shared, command);
        let reconnect = if shared { reconnect_option(program)? } else { "" };
        let virtio_disks = self.disks.iter().filter(|disk| is_virtio(disk));
        let crowded = virtio_disks.count() > ALONE;
        for (n, disk) in self.disks.iter().enumerate() {
            let id = format!("d{n}");
            match disk {
                Disk::Virtio(drive) | Disk::Ide(drive) | Disk::Ahci(drive) | Disk::Nvme(drive) => {
                    let link = link(dir, &id, &drive.path)?;
                    command.args(["-drive", &drive.argument(&id, &link)]);
                }
                Disk::VhostUser { socket, .. } => {
                    let link = link(dir, &id, socket)?;
                    let chardev = format!("socket,id={id},path={link},{reconnect}");
                    command.args(["-chardev", &chardev]);
                }
                Disk::Own(words) => {
                    command.args(words.iter().map(|word| word.replace("{id}", &id)));
                }
            }
            let (device, node) = match disk {
                Disk::Virtio(drive) if drive.io_thread => {
                    virtio += 1;
                    command.args(["-object", &format!("iothread,id=t{n}")]);
                    let device = format!("virtio-blk-pci,drive={id},iothread=t{n}");
                    (device, format!("vd{}", letter(virtio - 1)))
                }
                Disk::Virtio(_) | Disk::Own(_) => {
                    virtio += 1;
                    (format!("virtio-blk-pci,drive={id}"), format!("vd{}", letter(virtio - 1)))
                }
                Disk::VhostUser { queues, .. } => {
                    virtio += 1;
                    let device = format!("vhost-user-blk-pci,chardev={id},num-queues={queues}");
                    (device, format!("vd{}", letter(virtio - 1)))
                }
                Disk::Ide(_) => {
                    ide += 1;
                    let device = format!("ide-hd,drive={id}{}", ide_place(ide - 1));
                    (device, format!("sd{}", letter(ide - 1)))
                }
                Disk::Ahci(_) => {
                    ahci += 1;
                    let device = format!("ide-hd,drive={id},bus=ahci.{}", ahci - 1);
                    // The IDE driver is loaded first, and each load waits until its disks are found.
                    (device, format!("sd{}", letter(ide_disks + ahci - 1)))
                }
                Disk::Nvme(_) => {
                    nvme += 1;
                    (format!("nvme,drive={id},serial={id}"), format!("nvme{}n1", nvme - 1))
                }
            };
            let place =
                if is_virtio(disk) && crowded { function(virtio - 1) } else { String::new() };
            command.args(["-device", &(device + &place)]);
            nodes.push(format!("/dev/{node}"));
        }
        Ok(nodes)
    }

    /// QEMU connects when it starts, and a server may have lost its patience before the guest has booted: then QEMU
    /// connects again.
    fn add_forwards(&self, program: &Path, dir: &Path, command: &mut Command) -> Result<()> {
        if self.forwards.is_empty() {
            return Ok(());
        }
        let reconnect = reconnect_option(program)?;
        let mut network = "user,id=net,restrict=on".to_owned();
        for (n, socket) in self.forwards.iter().enumerate() {
            let id = format!("forward{n}");
            let link = link(dir, &id, socket)?;
            command.args(["-chardev", &format!("socket,id={id},path={link},{reconnect}")]);
            let port = usize::from(FORWARD_PORT) + n;
            network.push_str(&format!(",guestfwd=tcp:{FORWARD_HOST}:{port}-chardev:{id}"));
        }
        command.args(["-netdev", &network, "-device", "virtio-net-pci,netdev=net,romfile="]);
        Ok(())
    }

    /// Shares directories over 9p; returns the guest's set-up script.
    fn add_shares(&self, dir: &Path, command: &mut Command) -> Result<String> {
        const MOUNT: &str = "mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000";
        let mut add = |id: &str, path: &str, more: &str| {
            let model = "security_model=none,multidevs=remap";
            command.args(["-fsdev", &format!("local,id={id},path={path},{model}{more}")]);
            command.args(["-device", &format!("virtio-9p-pci,fsdev={id},mount_tag={id}")]);
        };
        if self.appliance.root == Root::Host {
            add("root", "/", ",readonly=on");
        }
        let root = format!("{MOUNT},cache=loose,ro root /lower");
        let mut script = root_script(self.appliance.root, &root);
        for (n, share) in self.shares.iter().enumerate() {
            let host = fs::canonicalize(&share.host).map_err(io("find", &share.host))?;
            let id = format!("share{n}");
            add(&id, &link(dir, &id, &host)?, "");
            script.push_str(&share_script(share, &format!("{MOUNT} {id}")));
        }
        Ok(script)
    }
}

/// Where the nth IDE disk is: QEMU by itself looks on the first of the controller's two buses alone.
fn ide_place(n: usize) -> String {
    format!(",bus=ide.{},unit={}", n / 2, n % 2)
}

fn is_virtio(disk: &Disk) -> bool {
    matches!(disk, Disk::Virtio(_) | Disk::VhostUser { .. } | Disk::Own(_))
}

/// QEMU 9.2 renamed the option, and the old name is to go.
fn reconnect_option(program: &Path) -> Result<&'static str> {
    let out = run_tool(Command::new(program).arg("--version"), Duration::from_secs(20))?;
    let text = String::from_utf8_lossy(&out);
    let version = text.split("version ").nth(1).unwrap_or("");
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    Ok(if version >= (9, 2) { "reconnect-ms=200" } else { "reconnect=1" })
}

/// What is known about the ways in which QEMU fails to start.
pub(crate) fn advise(console: &str) -> Option<String> {
    let known = [
        ("Failed to get \"write\" lock", "Another process has the image open: end it"),
        ("cannot set up guest memory", "Give the guest less memory"),
        ("No such file or directory", "Start the server before the guest, and check the paths"),
        ("Connection refused", "Start the vhost-user server before the guest"),
        ("Bus 'ide.2' not found", "An IDE controller has four disks: take fewer of them"),
        ("is not a valid device model name", "`apt-get install qemu-system-x86` brings it all"),
    ];
    known.iter().find(|(sign, _)| console.contains(sign)).map(|(_, advice)| (*advice).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_that_is_only_read_says_so() {
        let argument = |drive: Drive| drive.argument("d0", "/x");
        assert!(argument(Drive::raw("/x").read_only()).ends_with(",read-only=on"));
        assert!(!argument(Drive::raw("/x")).contains("read-only"));
    }

    #[test]
    fn four_ide_disks_are_two_on_each_bus() {
        let places: Vec<String> = (0..4).map(ide_place).collect();
        let wanted = ["0,unit=0", "0,unit=1", "1,unit=0", "1,unit=1"];
        assert_eq!(places, wanted.map(|place| format!(",bus=ide.{place}")));
        assert!(advise("qemu: Bus 'ide.2' not found").unwrap().contains("four disks"));
    }
}
