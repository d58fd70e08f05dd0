//! The stages `host` and `remote`: this machine as it is, on disks that are here or elsewhere. All arms use one file, or one image of
//! one cluster, one after the other: the same blocks of the same device. Each block starts its server fresh and stops it, so that no arm lives on what it learned in an earlier round,
//! and begins with the file synced and out of the page cache.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::backend::ceph::{Cluster, FOLDER, IMAGE};
use crate::backend::{Access, Entry, Reach, kernelnbd, volume};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::process;
use crate::run::scratch::settle;
use crate::run::{Mark, Place, Runner, Running};
use crate::sample::Stage;
use crate::stage::start;
use crate::stop::Stop;
use crate::workload::fio::Target;
use crate::workload::{
    Kind, Measured, Settings, Workload, archive, bonnie, dd, filecopy, fio, fiofile, load, rated,
    snapshot,
};

/// Why a workload cannot run on a backend.
pub fn missing(entry: &Entry, workload: &Workload, env: &Env) -> Option<Missing> {
    let reach = entry.backend.reach();
    match (workload.kind, reach) {
        (Kind::Start, Reach::Origin) => env.program("fio", "fio").or_else(|| fio_engine("nbd")),
        (Kind::Start, _) => Some(Missing::new(
            "it is no image behind HTTP",
            "http-download, http-lazy, http-boot-list and http-fill are",
        )),
        (_, Reach::Origin) => Some(Missing::new(
            "an image behind HTTP is only started from here",
            "the workload start does that",
        )),
        (Kind::Durability, _) => None,
        (Kind::Fio(_), Reach::Rbd) => env.program("fio", "fio").or_else(|| fio_engine("rbd")),
        (Kind::Fio(_), Reach::VhostUser | Reach::Native) => env.lab_load(),
        (_, Reach::Native) => Some(Missing::new(
            "ringtap-lab load speaks no such workload",
            "the row native runs it on the same file",
        )),
        (Kind::Fio(_) | Kind::FioFile(_) | Kind::Rated(_), Reach::Nbd) => {
            env.program("fio", "fio").or_else(|| fio_engine("nbd"))
        }
        (_, Reach::Nbd) => Some(Missing::new(
            if kernelnbd::is_there() {
                "a file or block device is needed, and an export is none"
            } else {
                "a file or block device is needed, and this kernel has no NBD client to make one of an export"
            },
            "ringtap-nbd-kernel and qemu-nbd-kernel run it on this kernel's NBD client, ringtap-fuse on a loop device, and \
             guest-nbd (stage vm) on the guest's NBD client",
        )),
        (_, Reach::VhostUser) => Some(Missing::new(
            "a file or block device is needed, and a vhost-user disk is one only inside a guest",
            "the guest stage runs it there",
        )),
        (Kind::Fio(_) | Kind::FioFile(_) | Kind::Rated(_), _) => {
            env.program("fio", "fio").or_else(|| fio_engine("io_uring"))
        }
        (Kind::DdThroughput(_) | Kind::DdLatency(_), _) => env.program("dd", "coreutils"),
        (Kind::Bonnie(_) | Kind::BonnieRuns | Kind::FileCopy { .. } | Kind::Archive, _) => {
            let bonnie = matches!(workload.kind, Kind::Bonnie(_) | Kind::BonnieRuns);
            bonnie
                .then(|| env.program("bonnie++", "bonnie++"))
                .flatten()
                .or_else(|| match reach {
                    Reach::Block => env
                        .program("mkfs.ext4", "e2fsprogs")
                        .or_else(|| env.root("making and mounting a file system")),
                    _ => None,
                })
                .or_else(|| match workload.kind {
                    Kind::Archive => env.root("dropping this machine's caches"),
                    _ => None,
                })
        }
        // Who is a snapshot is asked before.
        (Kind::SnapshotLife, _) => None,
        (Kind::Two(_) | Kind::TwoBonnie, _) => {
            Some(Missing::new("the host stage does not run it", "the stage two does"))
        }
    }
}

fn fio_engine(engine: &str) -> Option<Missing> {
    let known = process::run_short("fio", ["--enghelp"], &Stop::default())
        .is_ok_and(|output| output.stdout.lines().any(|line| line.trim() == engine));
    (!known).then(|| {
        Missing::new(
            format!("this fio has no {engine} engine"),
            format!("Debian's fio has it; else build fio with {engine}"),
        )
    })
}

/// The stage, prepared.
#[derive(Debug)]
pub struct Host {
    stage: Stage,
    disk: PathBuf,
    /// For the arms whose disk lies in one.
    _cluster: Option<Cluster>,
}

impl Host {
    /// Writes the disk, and starts a cluster where arms want one.
    pub fn prepare(runner: &mut Runner<'_>, stage: Stage, arms: &[Running]) -> Result<Host> {
        let disk = runner.disk(&format!("{stage}.raw"))?;
        let mut cluster = None;
        if let Some(arm) = arms.iter().find(|arm| arm.entry.backend.in_ceph()) {
            runner.progress.say(&format!("{stage}  starting a cluster"));
            let folder = runner.scratch.socket_folder(FOLDER)?;
            match Cluster::start(folder, runner.plan.size, runner.stop) {
                Ok(started) => cluster = Some(started),
                Err(Error::Interrupted) => return Err(Error::Interrupted),
                // Its arms fail, and say so.
                Err(error) => runner.trouble(stage, &arm.name, &error),
            }
        }
        let host = Host { stage, disk, _cluster: cluster };
        host.find_capacity(runner, arms)?;
        Ok(host)
    }

    /// What the slowest backend carries, for the rated loads. One that fails here fails in its rounds again, and says so.
    fn find_capacity(&self, runner: &mut Runner<'_>, arms: &[Running]) -> Result<()> {
        let (stop, settings) = (runner.stop, rated::capacity_settings(&runner.plan.settings(0)));
        for arm in arms.iter().filter(|arm| arm.is_rated() && arm.name == arm.entry.name) {
            runner.progress.say(&format!("{}  {}  what it carries", self.stage, arm.name));
            let served = match runner.start(self.stage, arm, &self.disk) {
                Err(Error::Interrupted) => return Err(Error::Interrupted),
                Err(_) => continue,
                Ok(served) => served,
            };
            let target = match &served.access {
                Access::Nbd { uri, .. } => Target::Nbd(uri.clone()),
                Access::File(path) | Access::Block(path) => {
                    Target::Path(path.display().to_string())
                }
                _ => continue,
            };
            let limit = Duration::from_secs(60);
            if let Ok(measured) = run_fio(rated::JOB, &target, &settings, limit, stop) {
                runner.remember_capacity(self.stage, &measured);
            }
            stop.check()?;
            if let Err(error) = served.end() {
                runner.trouble(self.stage, &arm.name, &error);
            }
            settle(&self.disk)?;
        }
        Ok(())
    }

    /// One round: a block for each arm.
    pub fn round(&self, runner: &mut Runner<'_>, round: u32, order: &[&Running]) -> Result<()> {
        for (position, arm) in (0..).zip(order) {
            let place = |workload| Place { stage: self.stage, arm, workload, round, position };
            runner.keep_written(&self.disk)?;
            let mut served = match runner.start(self.stage, arm, &self.disk) {
                Ok(served) => served,
                Err(Error::Interrupted) => return Err(Error::Interrupted),
                Err(error) => {
                    for workload in arm.rounds() {
                        runner.fail(place(workload), &error)?;
                    }
                    continue;
                }
            };
            if let Some(server) = &served.server {
                let command = server.command_line.clone();
                runner.remember_command(self.stage, &arm.name, &command)?;
            }
            let settings = runner.settings(self.stage, round);
            for workload in arm.rounds() {
                let access = served.access.clone();
                let (env, stop, scratch) =
                    (runner.env, runner.stop, runner.scratch.disks().to_owned());
                // A server that died before its turn would only show as a refused connection.
                let alive = served.server.as_mut().map_or(Ok(()), crate::process::Server::check);
                let ready = alive
                    .and_then(|()| served.volume.as_ref().map_or(Ok(()), volume::Mapped::refresh));
                runner.sample(place(workload), served.server.as_ref(), None, |mark| {
                    ready?;
                    measure(workload, &access, &settings, env, &scratch, mark, stop)
                })?;
            }
            if let Err(error) = served.end() {
                runner.trouble(self.stage, &arm.name, &error);
            }
            settle(&self.disk)?;
        }
        Ok(())
    }
}

/// Runs one workload on a disk of the host.
fn measure(
    workload: &Workload,
    access: &Access,
    settings: &Settings,
    env: &Env,
    scratch: &Path,
    mark: &Mark<'_>,
    stop: &Stop,
) -> Result<Measured> {
    let limit = Duration::from_secs(60) + 2 * (settings.run + settings.ramp);
    let path = match access {
        Access::File(path) | Access::Block(path) => path.display().to_string(),
        _ => String::new(),
    };
    let target = match access {
        Access::Nbd { uri, .. } => Target::Nbd(uri.clone()),
        Access::Rbd { conf } => Target::Rbd { conf: conf.clone(), image: IMAGE },
        _ => Target::Path(path.clone()),
    };
    match (workload.kind, access) {
        (_, Access::Ubd(_) | Access::Qemu { .. } | Access::QemuOwn(_)) => {
            Err(Error::Plan("a disk of a guest's is not one of the host's".into()))
        }
        (Kind::Start, Access::Origin { url, start, sockets }) => {
            start::run(&start::Source { url, start: *start, sockets, scratch }, settings, env, stop)
        }
        (Kind::Start, _) | (_, Access::Origin { .. }) => {
            Err(Error::Plan(format!("{} is no start from an image behind HTTP", workload.name)))
        }
        (Kind::Fio(job), Access::VhostUser { socket }) => {
            run_load(load::args(job, socket, settings), env, limit, stop)
        }
        (Kind::Fio(job), Access::Native(file)) => {
            run_load(load::native_args(job, file, settings), env, limit, stop)
        }
        (Kind::Fio(job), _) => run_fio(job, &target, settings, limit, stop),
        (Kind::FioFile(job), _) => {
            let text = fiofile::rewrite(&fiofile::check(Path::new(job))?, &target, settings);
            let file = scratch.join("job.fio");
            std::fs::write(&file, text).map_err(Error::file("write", &file))?;
            let mut command = Command::new("fio");
            command.arg("--output-format=json").arg(&file);
            fiofile::parse(&process::run(command, Duration::from_secs(3600), stop)?.stdout)
        }
        (Kind::Rated(percent), _) => {
            let log = scratch.join("rated").display().to_string();
            let mut command = Command::new("fio");
            command.args(rated::args(&target, &log, percent, settings));
            let json = process::run(command, limit, stop)?.stdout;
            let file = std::path::PathBuf::from(rated::log_file(&log));
            let text = std::fs::read_to_string(&file).map_err(Error::file("read", &file))?;
            rated::parse(&json, &text, percent, settings, 0.0)
        }
        (Kind::DdThroughput(flag), _) => {
            let (block, count, note) =
                dd::throughput_shape(settings.size, crate::host::memory() / 4);
            let said = run_dd(dd::throughput_args(&path, block, count, flag), limit, stop)?;
            dd::throughput(&said, block * count, note)
        }
        (Kind::DdLatency(flag), _) => {
            dd::latency(&run_dd(dd::latency_args(&path, flag), limit, stop)?)
        }
        (
            Kind::Bonnie(_) | Kind::BonnieRuns | Kind::FileCopy { .. } | Kind::Archive,
            Access::Block(device),
        ) => {
            let mounted = Mounted::make(device, scratch, stop)?;
            mark.begin();
            let (place, own) = (mounted.path(), Some(&mounted));
            let measured = on_file_system(workload, place, own, settings, env, mark, stop)?;
            mounted.unmount()?;
            Ok(measured)
        }
        (Kind::Bonnie(_) | Kind::BonnieRuns | Kind::FileCopy { .. } | Kind::Archive, _) => {
            let dir = tempfile::Builder::new()
                .prefix("files-")
                .tempdir_in(scratch)
                .map_err(Error::file("make a folder in", scratch))?;
            on_file_system(workload, dir.path(), None, settings, env, mark, stop)
        }
        (Kind::SnapshotLife, _) => {
            let mut command = Command::new("sh");
            command.args(["-c", &snapshot::script(&path, settings.size)]);
            let output = process::run(command, Duration::from_secs(900), stop)?;
            snapshot::parse(&output.stdout, settings.size)
        }
        (Kind::Durability | Kind::Two(_) | Kind::TwoBonnie, _) => {
            Err(Error::Plan(format!("{} is none of the host's own workloads", workload.name)))
        }
    }
}

/// Runs a workload on a file system; `mounted` is what lies on a device of its own.
fn on_file_system(
    workload: &Workload,
    dir: &Path,
    mounted: Option<&Mounted>,
    settings: &Settings,
    env: &Env,
    mark: &Mark<'_>,
    stop: &Stop,
) -> Result<Measured> {
    let place = dir.display().to_string();
    let tool = |words: Vec<String>| {
        let mut command = Command::new(&env.lab);
        command.args(words);
        process::run(command, Duration::from_secs(900), stop)
    };
    match workload.kind {
        Kind::FileCopy { durable } => {
            filecopy::parse(&tool(filecopy::args(&place, durable, settings))?.stdout, durable)
        }
        Kind::Archive => {
            let tree = archive::tree(settings.size);
            let below = format!("{place}/tree");
            tool(archive::tree_args(&below, tree))?;
            // What is on a device of its own leaves the cache with its file system; the rest by the kernel's switch.
            if let Some(mounted) = mounted {
                mounted.again(stop)?;
            }
            rustix::fs::sync();
            let caches = Path::new("/proc/sys/vm/drop_caches");
            std::fs::write(caches, "3").map_err(Error::file("write 3 to", caches))?;
            let mut command = Command::new("sh");
            command.args(["-c", &archive::command(&below)]);
            mark.begin();
            let clock = std::time::Instant::now();
            let output = process::run(command, Duration::from_secs(900), stop)?;
            archive::parse(&output.stderr, clock.elapsed().as_secs_f64(), tree)
        }
        Kind::Bonnie(mode) => {
            let shape = bonnie::shape(settings.size, mode);
            bonnie::parse(&run_bonnie(dir, shape, stop)?, shape, crate::host::memory())
        }
        Kind::BonnieRuns => {
            let shape = bonnie::shape(settings.size, bonnie::Mode::Direct);
            bonnie::runs::until_settled(|| run_bonnie(dir, shape, stop))
        }
        _ => Err(Error::Plan(format!("{} needs no file system", workload.name))),
    }
}

fn run_load(args: Vec<String>, env: &Env, limit: Duration, stop: &Stop) -> Result<Measured> {
    let mut command = Command::new(&env.lab);
    command.args(args);
    load::parse(&process::run(command, limit, stop)?.stdout)
}

fn run_fio(
    job: fio::Job,
    target: &Target,
    settings: &Settings,
    limit: Duration,
    stop: &Stop,
) -> Result<Measured> {
    let mut command = Command::new("fio");
    command.args(fio::args(job, target, settings)).args(fio::clock());
    if let Target::Rbd { conf, .. } = target {
        command.env("CEPH_CONF", conf);
    }
    fio::parse(&process::run(command, limit, stop)?.stdout, job, settings)
}

fn run_dd(args: Vec<String>, limit: Duration, stop: &Stop) -> Result<String> {
    let mut command = Command::new("dd");
    command.args(args);
    Ok(process::run(command, limit, stop)?.stderr)
}

fn run_bonnie(dir: &Path, shape: bonnie::Shape, stop: &Stop) -> Result<String> {
    let mut command = Command::new(process::find("bonnie++").unwrap_or_else(|| "bonnie++".into()));
    command.args(bonnie::args(&dir.display().to_string(), shape));
    Ok(process::run(command, Duration::from_secs(900), stop)?.stdout)
}

/// An ext4 on a block device, mounted; unmounted when it is dropped.
#[derive(Debug)]
pub struct Mounted {
    device: PathBuf,
    at: Option<tempfile::TempDir>,
}

impl Mounted {
    /// Makes the file system without discarding (the disk stays written) and without work left for later.
    pub fn make(device: &Path, scratch: &Path, stop: &Stop) -> Result<Mounted> {
        let mut command =
            Command::new(process::find("mkfs.ext4").unwrap_or_else(|| "mkfs.ext4".into()));
        command
            .args(["-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"])
            .arg(device);
        process::run(command, Duration::from_secs(120), stop)?;
        let at = tempfile::Builder::new()
            .prefix("mount-")
            .tempdir_in(scratch)
            .map_err(Error::file("make a folder in", scratch))?;
        process::run_short(
            "mount",
            ["-t".as_ref(), "ext4".as_ref(), device.as_os_str(), at.path().as_os_str()],
            stop,
        )?;
        Ok(Mounted { device: device.to_owned(), at: Some(at) })
    }

    /// Unmounts and mounts again: nothing of it is in the page cache any more.
    fn again(&self, stop: &Stop) -> Result<()> {
        if let Some(at) = &self.at {
            unmount(at)?;
            let device = self.device.as_os_str();
            process::run_short(
                "mount",
                ["-t".as_ref(), "ext4".as_ref(), device, at.path().as_os_str()],
                stop,
            )?;
        }
        Ok(())
    }

    /// Where.
    pub fn path(&self) -> &Path {
        self.at.as_ref().map_or(Path::new("/nonexistent"), tempfile::TempDir::path)
    }

    /// Unmounts it and says when that fails.
    pub fn unmount(mut self) -> Result<()> {
        self.at.take().map_or(Ok(()), |at| unmount(&at))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(at) = self.at.take() {
            if unmount(&at).is_err() {
                // Removing the folder now would remove what is mounted there.
                let _ = at.keep();
            }
        }
    }
}

/// Unmounts, with a few tries: a program that was just killed may hold a file for a moment.
fn unmount(at: &tempfile::TempDir) -> Result<()> {
    let mut last = Ok(());
    for _ in 0..20 {
        match process::run_short("umount", [at.path()], &Stop::default()) {
            Ok(_) => return Ok(()),
            Err(error) => last = Err(error),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    last
}
