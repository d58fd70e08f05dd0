//! A guest of the lab with the disks of some arms: booted, and what each arm puts on top of its disk made.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ringtap_guest::{FORWARD_HOST, FORWARD_PORT, Guest as Machine, Qemu, Uml, standby};

use super::inside::Shell;
use crate::backend::mapper::Parts;
use crate::backend::vm::Attach;
use crate::backend::volume::BESIDE;
use crate::backend::{Access, Inner, Served};
use crate::error::{Error, Result};
use crate::process;
use crate::run::runner::Runner;
use crate::run::running::Running;
use crate::sample::Stage;
use crate::stop::Stop;
use crate::workload::Workload;

/// Memory of a guest of User-Mode Linux in bytes.
pub const UML_MEMORY: u64 = 512 << 20;
/// Memory of a virtual PC, its initramfs included.
pub const PC_MEMORY: u64 = 1 << 30;
/// Queues of a vhost-user disk in a virtual PC.
const QUEUES: u16 = 1;
/// What an ext4 needs beside the disk file that lies on it.
pub const OVERHEAD: u64 = 96 << 20;
/// An arm in a guest.
pub struct Attached<'a> {
    /// The arm.
    pub arm: &'a Running,
    /// Its server.
    pub served: Served,
    /// What is run on this disk of it.
    pub workloads: Vec<&'static dyn Workload>,
    /// Its place in the round.
    pub position: u32,
    /// Its disk's file.
    pub disk: PathBuf,
    /// Bytes of the disk that the workloads see.
    pub size: u64,
    /// The block device in the guest that the disk is.
    pub base: String,
    /// The block device in the guest that the workloads use, or why there is none.
    pub device: Result<String, String>,
}

impl<'a> Attached<'a> {
    /// An arm whose guest is not booted yet.
    pub fn new(arm: &'a Running, served: Served, position: u32, disk: PathBuf, size: u64) -> Self {
        let device = Err("the guest did not boot".into());
        let (workloads, base) = (arm.rounds().collect(), String::new());
        Attached { arm, served, workloads, position, disk, size, base, device }
    }

    /// Brings a snapshot back to its first moment.
    pub fn refresh(&self, shell: &Shell<'_>) -> Result<()> {
        let script = self.parts().refresh(self.arm.entry.backend.inner());
        match script.filter(|_| self.device.is_ok()) {
            Some(script) => shell.run(&script, Duration::from_secs(60)).map(drop),
            None => Ok(()),
        }
    }

    /// Where the parts of a volume lie on its disk: the metadata of a thin one before its content, a snapshot's copies
    /// behind.
    fn parts(&self) -> Parts {
        let (sectors, base) = (self.size / 512, &self.base);
        let thin = self.arm.entry.backend.inner() == Inner::Thin;
        let (data, beside, left) = if thin {
            (BESIDE / 512, 0, BESIDE / 512)
        } else {
            (0, sectors, disk_bytes(self.size, Inner::ORIGIN) / 512 - sectors)
        };
        Parts {
            name: self.position.to_string(),
            sectors,
            data: (base.clone(), data),
            beside: (base.clone(), beside, left),
        }
    }
}

/// Bytes that the disk of a volume of `size` bytes must have for what lies on it.
pub fn disk_bytes(size: u64, inner: Inner) -> u64 {
    match inner {
        Inner::None | Inner::Loop { .. } | Inner::Linear => size,
        // All of the origin may be copied.
        Inner::Snapshot { .. } => 2 * size + BESIDE,
        Inner::Thin => size + BESIDE,
    }
}

/// Boots a guest with the disks of `attached` and finds or makes each arm's device.
pub fn boot(runner: &Runner<'_>, stage: Stage, attached: &mut [Attached<'_>]) -> Result<Machine> {
    runner.stop.check()?;
    let pc = stage.is_of_pcs();
    let machine = if pc { qemu(runner, attached)? } else { uml(runner, attached)? };
    let kinds = attached_kinds(attached);
    let disks = order(&machine, kinds);
    let shell = Shell::new(&machine, runner.stop);
    let mut clients = 0;
    for (one, disk) in attached.iter_mut().zip(disks) {
        let disk = match &one.served.access {
            Access::Nbd { .. } if pc => {
                clients += 1;
                match nbd_client(&shell, clients - 1) {
                    Ok(device) => Some(device),
                    Err(Error::Interrupted) => return Err(Error::Interrupted),
                    Err(error) => {
                        one.device = Err(error.to_string());
                        continue;
                    }
                }
            }
            _ => disk,
        };
        match disk {
            Some(disk) => {
                one.base.clone_from(&disk);
                one.device = Ok(disk);
            }
            None => one.device = Err("this way of reaching a disk is none of a guest's".into()),
        }
    }
    // The first program of a kind is read from the host's disk: not at the cost of the first arm. fio stays loaded; where
    // it cannot, each call loads it.
    let load = format!("dd --version; ( {} ) || fio --version; true", standby::start("fio"));
    shell.run(&load, Duration::from_secs(60))?;
    for one in attached.iter_mut() {
        if one.device.is_ok() {
            let cached = set_cache(one, &shell);
            one.device = match cached.and_then(|()| inner(one, &shell)) {
                Ok(device) => Ok(device),
                Err(Error::Interrupted) => return Err(Error::Interrupted),
                Err(error) => Err(error.to_string()),
            };
        }
    }
    Ok(machine)
}

fn uml(runner: &Runner<'_>, attached: &[Attached<'_>]) -> Result<Machine> {
    let appliance = runner.env.appliance().map_err(|missing| Error::Guest(missing.reason))?;
    let mut uml = Uml::new(&appliance)
        .memory(runner.plan.memory.unwrap_or(UML_MEMORY))
        .interrupt(runner.stop.flag());
    for one in attached {
        match &one.served.access {
            Access::Ubd(path) => uml = uml.ubd(path),
            Access::VhostUser { socket } => uml = uml.vhost_user(socket),
            _ => {}
        }
    }
    if let Some(limit) = runner.plan.boot_limit {
        uml = uml.boot_timeout(Duration::from_secs_f64(limit));
    }
    Ok(uml.boot()?)
}

fn qemu(runner: &Runner<'_>, attached: &[Attached<'_>]) -> Result<Machine> {
    let appliance = runner.env.pc().map_err(|missing| Error::Guest(missing.reason))?;
    let mut qemu = Qemu::new(&appliance)
        .memory(runner.plan.memory.unwrap_or(PC_MEMORY))
        .interrupt(runner.stop.flag());
    for one in attached {
        match &one.served.access {
            Access::VhostUser { socket } => qemu = qemu.vhost_user(socket, QUEUES),
            Access::Nbd { socket, .. } => qemu = qemu.forward(socket),
            Access::QemuOwn(words) => qemu = qemu.own(words.clone()),
            Access::Qemu { attach, drive } => {
                let drive = drive.clone();
                qemu = match attach {
                    Attach::Ide => qemu.ide(drive),
                    Attach::Ahci => qemu.ahci(drive),
                    Attach::Virtio => qemu.virtio_blk(drive),
                    Attach::Nvme => qemu.nvme(drive),
                };
            }
            _ => {}
        }
    }
    if let Some(limit) = runner.plan.boot_limit {
        qemu = qemu.boot_timeout(Duration::from_secs_f64(limit));
    }
    Ok(qemu.boot()?)
}

/// Has the guest's kernel attach the nth NBD export, over the guest's network card and QEMU's TCP.
fn nbd_client(shell: &Shell<'_>, nth: u16) -> Result<String> {
    let (port, device) = (FORWARD_PORT + nth, format!("/dev/nbd{nth}"));
    let script = format!(
        "set -e\n[ {nth} -gt 0 ] || {{ ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; }}\n\
         nbd-client {FORWARD_HOST} {port} {device} >&2\n\
         n=0; while [ \"$(cat /sys/block/nbd{nth}/size)\" = 0 ]; do\n\
         n=$((n + 1)); [ $n -lt 100 ] || {{ echo '{device} did not come up' >&2; exit 1; }}; sleep 0.1; done"
    );
    shell.run(&script, Duration::from_secs(120))?;
    Ok(device)
}

/// Whether each arm's disk was attached: those that were are in the guest's list, in their order.
fn attached_kinds(attached: &[Attached<'_>]) -> Vec<(bool, bool)> {
    attached
        .iter()
        .map(|one| match &one.served.access {
            Access::Ubd(_) => (true, true),
            Access::VhostUser { .. } | Access::Qemu { .. } | Access::QemuOwn(_) => (true, false),
            _ => (false, false),
        })
        .collect()
}

/// User-Mode Linux lists its own disks first, then those of servers; QEMU lists them as they were added.
fn order(machine: &Machine, kinds: Vec<(bool, bool)>) -> Vec<Option<String>> {
    let own = kinds.iter().filter(|kind| kind.1).count();
    let mut first = machine.disks().iter().take(own);
    let mut rest = machine.disks().iter().skip(own);
    kinds
        .into_iter()
        .map(|(there, own)| match (there, own) {
            (false, _) => None,
            (true, true) => first.next().cloned(),
            (true, false) => rest.next().cloned(),
        })
        .collect()
}

/// Has the guest set its disk's write cache, where the arm is about that.
fn set_cache(one: &Attached<'_>, shell: &Shell<'_>) -> Result<()> {
    match one.arm.entry.backend.guest_sets_cache() {
        Some(cache) => shell.run(&cache.script(&one.base), Duration::from_secs(20)).map(drop),
        None => Ok(()),
    }
}

/// Makes what an arm puts on its disk, and returns the device that the workloads use.
fn inner(one: &Attached<'_>, shell: &Shell<'_>) -> Result<String> {
    let (n, base, inner) = (one.position, &one.base, one.arm.entry.backend.inner());
    if let Inner::Loop { direct } = inner {
        let how = if direct { "on" } else { "off" };
        let script = format!(
            "mkdir -p /mnt/{n} && mount -t ext4 {base} /mnt/{n} && losetup --direct-io={how} -f --show /mnt/{n}/disk"
        );
        return Ok(shell.run(&script, Duration::from_secs(120))?.stdout.trim().to_owned());
    }
    let Some((script, node)) = one.parts().make(inner) else { return Ok(base.clone()) };
    // A thin volume is written once.
    shell.run(&script, Duration::from_secs(600))?;
    Ok(node)
}

/// Makes an ext4 image that holds `disk` as `/disk`, without root and without a mount, and removes the original.
pub fn wrap(runner: &Runner<'_>, disk: &Path, size: u64) -> Result<PathBuf> {
    let folder = disk.with_extension("d");
    std::fs::create_dir(&folder).map_err(Error::file("make", &folder))?;
    std::fs::rename(disk, folder.join("disk")).map_err(Error::file("move", disk))?;
    let image = disk.with_extension("ext4");
    ext4(&folder, &image, size + OVERHEAD, runner.stop)?;
    crate::run::scratch::settle(&image)?;
    Ok(image)
}

/// Makes an ext4 of `bytes` in `image` with the files of a folder, and removes the folder.
pub fn ext4(folder: &Path, image: &Path, bytes: u64, stop: &Stop) -> Result<()> {
    let mut command = std::process::Command::new(
        process::find("mkfs.ext4").unwrap_or_else(|| "mkfs.ext4".into()),
    );
    command.args([
        "-q",
        "-F",
        "-m",
        "0",
        "-E",
        "lazy_itable_init=0,lazy_journal_init=0,nodiscard",
        "-d",
    ]);
    command.arg(folder).arg(image).arg(format!("{}M", bytes >> 20));
    process::run(command, Duration::from_secs(300), stop)?;
    std::fs::remove_dir_all(folder).map_err(Error::file("remove", folder))
}
