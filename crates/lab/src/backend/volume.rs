//! LVM's kinds of volumes on this machine's own device-mapper, on a direct-io loop device on the disk's file.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::loopdev::LoopDevice;
use super::mapper::Parts;
use super::{Access, Backend, Context, Entry, File, Inner, Peers, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::process;
use crate::sample::Stage;
use crate::stop::Stop;

/// Bytes beside a thin volume for its metadata, and beside a snapshot for its table.
pub const BESIDE: u64 = 64 << 20;
/// In the names of all volumes of labs, with the lab's process id behind it.
const MARK: &str = "-ringtap-lab-";
/// A thin volume is written once while it is made.
const LIMIT: Duration = Duration::from_secs(600);

/// A volume of that kind.
#[derive(Debug)]
pub struct Volume(pub Inner);

impl Backend for Volume {
    fn reach(&self) -> Reach {
        Reach::Block
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.loop_devices()
            .or_else(|| env.program("dmsetup", "dmsetup"))
            .or_else(|| env.device_mapper())
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let mapped = Mapped::make(self.0, context.disk)?;
        context.stop.check()?;
        let access = Access::Block(mapped.node.clone());
        Ok(Served { volume: Some(mapped), ..Served::reached(access) })
    }

    fn inner(&self) -> Inner {
        self.0
    }

    fn remark(&self) -> Option<&'static str> {
        Some(
            "device-mapper on a direct-io loop device: no server CPU can be told apart; machine CPU has it",
        )
    }
}

/// The devices of a volume; removed when it is dropped.
#[derive(Debug)]
pub struct Mapped {
    inner: Inner,
    parts: Parts,
    node: PathBuf,
    loops: Vec<LoopDevice>,
    file: Option<PathBuf>,
}

impl Mapped {
    fn make(inner: Inner, disk: &Path) -> Result<Mapped> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let bytes = std::fs::metadata(disk).map_err(Error::file("look at", disk))?.len();
        let data = LoopDevice::attach(disk, true)?;
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let mut mapped = Mapped {
            inner,
            parts: Parts {
                name: format!("{MARK}{}-{number}", std::process::id()),
                sectors: bytes / 512,
                data: (data.path().display().to_string(), 0),
                beside: (String::new(), 0, 0),
            },
            node: PathBuf::new(),
            loops: vec![data],
            file: None,
        };
        let beside = match inner {
            // All of the origin may be copied.
            Inner::Snapshot { .. } => Some(bytes + BESIDE),
            Inner::Thin => Some(BESIDE),
            Inner::None | Inner::Loop { .. } | Inner::Linear => None,
        };
        if let Some(bytes) = beside {
            let path = disk.with_extension("beside");
            mapped.file = Some(path.clone());
            let file = std::fs::File::create(&path).map_err(Error::file("make", &path))?;
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)
                .map_err(|e| Error::file("make room in", &path)(e.into()))?;
            let device = LoopDevice::attach(&path, true)?;
            mapped.parts.beside = (device.path().display().to_string(), 0, bytes / 512);
            mapped.loops.push(device);
        }
        if let Some((script, node)) = mapped.parts.make(inner) {
            // Dropping `mapped` removes what was made of it when this fails.
            shell(&script)?;
            mapped.node = PathBuf::from(node);
        }
        mapped.refresh()?;
        Ok(mapped)
    }

    /// Takes the snapshot anew, where it is one.
    pub fn refresh(&self) -> Result<()> {
        self.parts.refresh(self.inner).map_or(Ok(()), |script| shell(&script))
    }

    /// Removes the volume and says when that fails.
    pub fn remove(mut self) -> Result<()> {
        remove(&self.parts.names())?;
        self.loops.drain(..).try_for_each(LoopDevice::detach)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _ = remove(&self.parts.names());
        self.loops.clear();
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }
}

fn shell(script: &str) -> Result<()> {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    // Not interruptible: what is made halfway would have to be found again.
    process::run(command, LIMIT, &Stop::default()).map(drop)
}

fn known() -> Vec<String> {
    let listed = process::run_short("dmsetup", ["ls"], &Stop::default());
    let text = listed.map_or_else(|_| String::new(), |output| output.stdout);
    text.lines().filter_map(|line| line.split_whitespace().next()).map(Into::into).collect()
}

/// Removes those of the devices that there are, in that order.
fn remove(names: &[String]) -> Result<()> {
    let known = known();
    for name in names.iter().filter(|name| known.contains(name)) {
        process::run_short(
            "dmsetup",
            ["remove", "--noudevsync", "--retry", name.as_str()],
            &Stop::default(),
        )?;
    }
    Ok(())
}

/// Removes the volumes of labs that lie on a loop device, users first.
pub fn remove_above(node: &Path) {
    let names = node.file_name().map(above).unwrap_or_default();
    let _ = remove(&names.into_iter().filter(|name| name.contains(MARK)).collect::<Vec<_>>());
}

/// Names of the mapped devices above a block device, users first.
fn above(device: &OsStr) -> Vec<String> {
    let block = Path::new("/sys/block").join(device);
    let holders = std::fs::read_dir(block.join("holders")).into_iter().flatten().flatten();
    holders
        .flat_map(|holder| {
            let own = Path::new("/sys/block").join(holder.file_name()).join("dm/name");
            let own = std::fs::read_to_string(own).ok().map(|name| name.trim().to_owned());
            above(&holder.file_name()).into_iter().chain(own)
        })
        .collect()
}

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::usual(
            Stage::Host,
            200,
            "lvm",
            "dm-linear (an LVM linear volume) on loop-direct",
            &Volume(Inner::Linear),
        ),
        Entry::usual(
            Stage::Host,
            210,
            "lvm-snapshot",
            "origin of a classic snapshot taken before each workload, on the same",
            &Volume(Inner::ORIGIN),
        ),
        Entry::usual(
            Stage::Host,
            220,
            "lvm-thin",
            "dm-thin volume, provisioned, on the same",
            &Volume(Inner::Thin),
        ),
        Entry::usual(
            Stage::Two,
            100,
            "lvm",
            "dm-linear (an LVM linear volume) on loop-direct",
            &Volume(Inner::Linear),
        ),
        Entry::usual(
            Stage::Two,
            120,
            "lvm-snapshot",
            "origin of a classic snapshot taken before each load that writes, on lvm",
            &Volume(Inner::ORIGIN),
        ),
    ],
    labels: &[
        ("lvm", "LVM volume"),
        ("lvm-snapshot", "LVM with a snapshot"),
        ("lvm-thin", "LVM thin volume"),
    ],
    peers: &[
        Peers { place: 120, stage: Stage::Host, arm: "lvm-snapshot", against: &["lvm"] },
        Peers { place: 180, stage: Stage::Two, arm: "lvm-snapshot", against: &["lvm"] },
    ],
};
