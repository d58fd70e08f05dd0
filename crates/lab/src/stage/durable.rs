//! The durability check, once for every arm before the rounds: a small disk on an ext4 on a loop device of the lab's own
//! is served by the arm; fio writes through it with an fsync behind each write; the flushes that arrive at that loop
//! device meanwhile are counted. Nothing else uses it, so none is another's.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::boot;
use super::guest;
use super::here::Mounted;
use super::inside::{Shell, line};
use crate::backend::volume::BESIDE;
use crate::backend::{Access, Image, Inner};
use crate::error::{Error, Result};
use crate::process;
use crate::run::meter;
use crate::run::runner::{Place, Runner};
use crate::run::running::Running;
use crate::sample::Stage;
use crate::stop::Stop;
use crate::workload::job::Target;
use crate::workload::{self, Measured, Workload, durability};

/// Whether an arm is checked: the twin's flushes are its original's.
fn is_checked(arm: &Running) -> bool {
    arm.name == arm.entry.name && arm.workloads.iter().any(|w| w.is_check())
}

/// Bytes of the ext4 for those of these arms that are checked. It is gone before any other disk is made.
pub fn room(arms: &[Running]) -> u64 {
    let of = |arm: &Running| {
        let (image, inner) = (arm.entry.backend.image(), arm.entry.backend.inner());
        let beside = if inner.is_snapshot() || inner == Inner::Thin { BESIDE } else { 0 };
        let bytes = boot::disk_bytes(durability::BYTES, inner) + beside;
        match (inner, image) {
            // A copy, and a file system around it.
            (Inner::Loop { .. }, _) => 2 * bytes + boot::OVERHEAD,
            (_, Image::Raw) => bytes,
            _ => 2 * bytes,
        }
    };
    let checked: Vec<u64> = arms.iter().filter(|arm| is_checked(arm)).map(of).collect();
    if checked.is_empty() { 0 } else { (64 << 20) + checked.iter().sum::<u64>() }
}

/// A loop device with an ext4, and the statistics of it.
struct Probe {
    // Unmounted, then detached, then removed.
    mounted: Mounted,
    device: crate::backend::loopdev::LoopDevice,
    file: PathBuf,
    statistics: PathBuf,
}

impl Probe {
    fn make(runner: &Runner<'_>, bytes: u64) -> Result<Probe> {
        let file = runner.scratch.disks().join("probe.raw");
        let made = std::fs::File::create(&file).and_then(|f| f.set_len(bytes));
        made.map_err(Error::file("make", &file))?;
        let device = crate::backend::loopdev::LoopDevice::attach(&file, false)?;
        let path = device.path().to_owned();
        let name = path.file_name().unwrap_or_default().to_owned();
        let statistics = Path::new("/sys/block").join(name).join("stat");
        let mounted = Mounted::make(&path, runner.scratch.disks(), runner.stop)?;
        Ok(Probe { mounted, device, file, statistics })
    }

    fn count(&self) -> Result<f64> {
        let layer = meter::layer_of_file(&self.statistics);
        layer.map(|(layer, _)| layer.flushes).ok_or_else(|| Error::Output {
            what: "a loop device's statistics",
            found: format!("{} does not read", self.statistics.display()),
        })
    }

    fn remove(self) -> Result<()> {
        self.mounted.unmount()?;
        self.device.detach()?;
        std::fs::remove_file(&self.file).map_err(Error::file("remove", &self.file))
    }
}

/// Checks all arms of a stage that the plan wants checked.
pub fn pass(runner: &mut Runner<'_>, stage: Stage, arms: &[Running]) -> Result<()> {
    let bytes = room(arms);
    let arms: Vec<&Running> = arms.iter().filter(|arm| is_checked(arm)).collect();
    let Some(workload) = workload::find("durability").filter(|_| !arms.is_empty()) else {
        return Ok(());
    };
    runner.progress.say(&format!("{stage}  counting flushes"));
    let probe = Probe::make(runner, bytes)?;
    let result = match stage.is_of_host() {
        true => host(runner, stage, &probe, &arms, workload),
        false => inside(runner, stage, &probe, &arms, workload),
    };
    let removed = probe.remove();
    result.and(removed)
}

/// An arm's small disk on the probe.
fn disk(runner: &Runner<'_>, probe: &Probe, arm: &Running, at: usize) -> Result<PathBuf> {
    let backend = arm.entry.backend;
    let folder = probe.mounted.path();
    let path = folder.join(format!("{at}.raw"));
    let bytes = boot::disk_bytes(durability::BYTES, backend.inner());
    // Written, so that no fsync has an allocation of its own to bring to the disk.
    std::fs::write(&path, vec![0x5a; usize::try_from(bytes).unwrap_or(0)])
        .map_err(Error::file("write", &path))?;
    if matches!(backend.inner(), Inner::Loop { .. }) {
        return boot::wrap(runner, &path, durability::BYTES);
    }
    let qemu_img = |args: &[&str], from: &Path, to: &Path| {
        let mut command = Command::new("qemu-img");
        command.args(args).arg(from).arg(to);
        process::run(command, Duration::from_secs(60), runner.stop).map(drop)
    };
    let image = path.with_extension("qcow2");
    match backend.image() {
        Image::Raw => return Ok(path),
        Image::Qcow2 => qemu_img(&["convert", "-q", "-f", "raw", "-O", "qcow2"], &path, &image)?,
        Image::Luks => return guest::encrypt(runner, &path),
        Image::Overlay(maker) => {
            let command = maker.command(runner.env, &path, &image);
            process::run(command, Duration::from_secs(60), runner.stop)?;
        }
    }
    Ok(image)
}

fn place<'a>(stage: Stage, arm: &'a Running, workload: &'a dyn Workload, at: usize) -> Place<'a> {
    Place { stage, arm, workload, round: 0, position: u32::try_from(at).unwrap_or(0) }
}

fn host(
    runner: &mut Runner<'_>,
    stage: Stage,
    probe: &Probe,
    arms: &[&Running],
    workload: &dyn Workload,
) -> Result<()> {
    for (at, arm) in arms.iter().enumerate() {
        let served = disk(runner, probe, arm, at).and_then(|disk| runner.start(stage, arm, &disk));
        let served = match served {
            Ok(served) => served,
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(error) => {
                runner.fail(place(stage, arm, workload, at), &error)?;
                continue;
            }
        };
        let (access, lab) = (served.access.clone(), runner.env.lab.clone());
        let (settings, stop) = (runner.plan.settings(0), runner.stop);
        runner.sample(place(stage, arm, workload, at), None, None, |_| {
            let before = probe.count()?;
            let syncs = match &access {
                Access::VhostUser { socket } => {
                    let mut command = Command::new(&lab);
                    command.args(durability::load_args(socket, &settings));
                    let text = run(command, stop)?;
                    workload::load::parse(&text)?.ios.unwrap_or(0.0)
                }
                Access::Nbd { uri, .. } => writes(&Target::Nbd(uri.clone()), stop)?,
                Access::File(path) | Access::Block(path) | Access::Native(path) => {
                    writes(&Target::Path(path.display().to_string()), stop)?
                }
                Access::Ubd(_) | Access::Qemu { .. } | Access::QemuOwn(_) => {
                    return Err(Error::Plan("a disk of a guest's is not one of the host's".into()));
                }
                Access::Rbd { .. } | Access::Origin { .. } => {
                    return Err(Error::Plan("flushes of what is elsewhere are not counted".into()));
                }
            };
            counted(probe, before, syncs)
        })?;
        if let Err(error) = served.end() {
            runner.trouble(stage, &arm.name, &error);
        }
    }
    Ok(())
}

fn inside(
    runner: &mut Runner<'_>,
    stage: Stage,
    probe: &Probe,
    arms: &[&Running],
    workload: &dyn Workload,
) -> Result<()> {
    let mut attached = Vec::new();
    let checked: Vec<&'static dyn Workload> = workload::find(workload.name()).into_iter().collect();
    for (at, arm) in arms.iter().enumerate() {
        let started = disk(runner, probe, arm, at).and_then(|disk| {
            let served = runner.start(stage, arm, &disk)?;
            let position = u32::try_from(at).unwrap_or(0);
            let one = boot::Attached::new(arm, served, position, disk, durability::BYTES);
            Ok(boot::Attached { workloads: checked.to_vec(), ..one })
        });
        match started {
            Ok(one) => attached.push(one),
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(error) => runner.fail(place(stage, arm, workload, at), &error)?,
        }
    }
    // One whose server dies of it fails alone.
    let Some(machine) = guest::boot_with_the_living(runner, stage, &mut attached, 0)? else {
        return Ok(());
    };
    let shell = Shell::new(&machine, runner.stop);
    for one in &attached {
        let result = match &one.device {
            Ok(device) => Ok(device.clone()),
            Err(error) => Err(Error::Guest(error.clone())),
        };
        let ready = one.refresh(&shell);
        runner.sample(
            place(stage, one.arm, workload, one.position as usize),
            None,
            None,
            |_| {
                ready?;
                let before = probe.count()?;
                let words = durability::args(&Target::Path(result?));
                let output = shell.run(&line("fio", &words), Duration::from_secs(120))?;
                let mut measured =
                    counted(probe, before, durability::writes_of_fio(&output.stdout)?)?;
                note_told(&mut measured, &one.base, &shell);
                Ok(measured)
            },
        )?;
    }
    guest::switch_off(runner, stage, machine);
    for one in attached {
        guest::end(runner, stage, one);
    }
    Ok(())
}

/// Before what a guest's kernel says of a disk's write cache.
const TOLD: &str = "; the guest was told: ";

/// Notes what the guest's kernel says of a disk's write cache: one that says it has none gets no flushes, and must write
/// through.
pub fn note_told(measured: &mut Measured, disk: &str, shell: &Shell<'_>) {
    let name = disk.rsplit('/').next().unwrap_or_default();
    let script = format!("cat /sys/block/{name}/queue/write_cache");
    let told = shell.run(&script, Duration::from_secs(20)).ok();
    if let (Some(told), Some(note)) = (told, &mut measured.note) {
        note.push_str(&format!("{TOLD}{}", told.stdout.trim()));
    }
}

/// What such a note says: `write back` or `write through`.
pub fn told(note: &str) -> Option<&str> {
    note.split_once(TOLD).map(|(_, told)| told.split(';').next().unwrap_or_default().trim())
}

fn counted(probe: &Probe, before: f64, syncs: f64) -> Result<Measured> {
    if syncs <= 0.0 {
        return Err(Error::Output { what: "the number of fsyncs", found: "none".into() });
    }
    let flushes = probe.count()? - before;
    let below = crate::sample::Layer { flushes, ..Default::default() };
    Ok(durability::measured(syncs, below))
}

fn writes(target: &Target, stop: &Stop) -> Result<f64> {
    let mut command = Command::new("fio");
    command.args(durability::args(target));
    durability::writes_of_fio(&run(command, stop)?)
}

fn run(command: Command, stop: &Stop) -> Result<String> {
    Ok(process::run(command, Duration::from_secs(120), stop)?.stdout)
}
