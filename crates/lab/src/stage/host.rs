//! The stages `host` and `remote`: this machine as it is, on disks that are here or elsewhere. All arms use one file, or one image of
//! one cluster, one after the other: the same blocks of the same device. Each block starts its server fresh and stops it, so that no arm lives on what it learned in an earlier round,
//! and begins with the file synced and out of the page cache.

use std::path::PathBuf;
use std::time::Duration;

use super::here::{self, Disk, Here};
use super::kind::{Prepared, Stage, Words, of_itself};
use crate::backend::ceph::{Cluster, FOLDER};
use crate::backend::volume::BESIDE;
use crate::backend::{Access, Entry, Inner, Reach, added, kernelnbd, volume};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::process;
use crate::run::runner::{Place, Runner};
use crate::run::running::Running;
use crate::run::scratch::settle;
use crate::sample::Stage as Name;
use crate::stop::Stop;
use crate::workload::job::Target;
use crate::workload::{Client, Settings, Workload, rated};

/// Seconds in which a server starts and ends.
pub const SERVING: f64 = 0.2;

/// Why a workload cannot run on a backend.
fn missing(entry: &Entry, workload: &dyn Workload, env: &Env) -> Option<Missing> {
    let reach = entry.backend.reach();
    let fio = |engine| env.program("fio", "fio").or_else(|| fio_engine(engine));
    match (workload.client(), reach) {
        (Client::Start, Reach::Origin) => fio("nbd"),
        (Client::Start, _) => Some(Missing::new(
            "it is no image behind HTTP",
            "http-download, http-lazy, http-boot-list and http-fill are",
        )),
        (_, Reach::Origin) => Some(Missing::new(
            "an image behind HTTP is only started from here",
            "the workload start does that",
        )),
        (Client::Flushes, _) => None,
        (Client::Job, Reach::Rbd) => fio("rbd"),
        (Client::Job, Reach::VhostUser | Reach::Native) => env.lab_load(),
        (_, Reach::Native) => Some(Missing::new(
            "ringtap-lab load speaks no such workload",
            "the row native runs it on the same file",
        )),
        (Client::Job | Client::Fio, Reach::Nbd) => fio("nbd"),
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
        (Client::Job | Client::Fio, _) => fio("io_uring"),
        (Client::Dd, _) => env.program("dd", "coreutils"),
        (Client::Files, Reach::Block) => env
            .program("mkfs.ext4", "e2fsprogs")
            .or_else(|| env.root("making and mounting a file system"))
            .or_else(|| cold(workload, env)),
        (Client::Files, _) => cold(workload, env),
        // Who is a snapshot is asked before.
        (Client::Script, _) => None,
        (Client::Two | Client::TwoFiles, _) => {
            Some(Missing::new("the host stage does not run it", "the stage two does"))
        }
    }
}

/// Files of a load lie beside the lab's own file: what is a file elsewhere would get the numbers of that file system.
fn of_no_file_system(entry: &Entry, workload: &dyn Workload) -> Option<Missing> {
    let is_own = added(entry.stage, entry.name).is_some();
    (is_own && entry.backend.reach() == Reach::File && workload.on_file_system()).then(|| {
        Missing::new(
            "an image is no file system here: its files would lie in --dir, and that would be measured",
            "--overwrite and the stage vm, where the guest makes a file system on it, or `losetup -f --show --direct-io=on IMAGE` and \
             --device with --overwrite",
        )
    })
}

/// Why its files cannot be dropped from caches, where that is a part of it.
fn cold(workload: &dyn Workload, env: &Env) -> Option<Missing> {
    workload.drops_caches().then(|| env.root("dropping this machine's caches")).flatten()
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

/// The stages of this file.
pub const STAGES: &[&dyn Stage] = &[&OnHost, &Elsewhere];

/// The stage `host`.
pub struct OnHost;

/// The stage `remote`.
pub struct Elsewhere;

impl Stage for OnHost {
    fn name(&self) -> Name {
        Name::Host
    }
    fn words(&self) -> Words {
        Words {
            heading: "On the host",
            what: "this machine as it is",
            behind: " (host)",
            page_cache: "this machine's",
            place: 3,
        }
    }
    fn missing(&self, _: &Entry, _: &Env) -> Option<Missing> {
        None
    }
    fn missing_workload(
        &self,
        entry: &Entry,
        workload: &dyn Workload,
        env: &Env,
    ) -> Option<Missing> {
        of_itself(entry, workload, env)
            .or_else(|| of_no_file_system(entry, workload))
            .or_else(|| missing(entry, workload, env))
    }
    fn room(&self, plan: &Plan, arms: &[Running]) -> u64 {
        let any = |of: fn(Inner) -> bool| arms.iter().any(|arm| of(arm.entry.backend.inner()));
        let files = arms.iter().any(|arm| arm.workloads.iter().any(|w| w.on_file_system()));
        let snapshot = any(Inner::is_snapshot);
        let beside = snapshot || any(|inner| inner == Inner::Thin);
        plan.size
            + if files { plan.size } else { 0 }
            + if snapshot { plan.size } else { 0 }
            + if beside { BESIDE } else { 0 }
    }
    fn prepare(&self, runner: &mut Runner<'_>, arms: &[Running]) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(Host::prepare(runner, self.name(), arms)?))
    }
    fn seconds(&self, workload: &dyn Workload, settings: &Settings) -> f64 {
        workload.seconds(settings)
    }
    fn booting(&self, arms: usize) -> f64 {
        SERVING * arms as f64
    }
    fn renewing(&self, arm: &Running) -> f64 {
        let snapshot = arm.entry.backend.inner().is_snapshot();
        if snapshot { 0.2 * arm.rounds().count() as f64 } else { 0.0 }
    }
    fn client(&self, _: Option<f64>, all: Option<f64>) -> (&'static str, Option<f64>) {
        ("the client", all)
    }
}

impl Stage for Elsewhere {
    fn name(&self) -> Name {
        Name::Remote
    }
    fn words(&self) -> Words {
        Words {
            heading: "On disks that are elsewhere",
            what: "this machine, on disks that are elsewhere: on NBD servers and in a Ceph of one, both on this machine, and behind \
                   HTTP, where each request takes 20 ms and all together get 100 MB/s",
            behind: " (disk elsewhere)",
            page_cache: "this machine's",
            place: 7,
        }
    }
    fn missing(&self, _: &Entry, _: &Env) -> Option<Missing> {
        None
    }
    fn missing_workload(
        &self,
        entry: &Entry,
        workload: &dyn Workload,
        env: &Env,
    ) -> Option<Missing> {
        OnHost.missing_workload(entry, workload, env)
    }
    /// A start's download or cache beside the disk, and what a cluster's monitor keeps.
    fn room(&self, plan: &Plan, _: &[Running]) -> u64 {
        2 * plan.size + (256 << 20)
    }
    fn prepare(&self, runner: &mut Runner<'_>, arms: &[Running]) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(Host::prepare(runner, self.name(), arms)?))
    }
    fn seconds(&self, workload: &dyn Workload, settings: &Settings) -> f64 {
        workload.seconds(settings)
    }
    fn booting(&self, arms: usize) -> f64 {
        SERVING * arms as f64
    }
    fn renewing(&self, _: &Running) -> f64 {
        0.0
    }
    fn client(&self, _: Option<f64>, all: Option<f64>) -> (&'static str, Option<f64>) {
        ("the client", all)
    }
}

/// The stage, prepared.
#[derive(Debug)]
pub struct Host {
    stage: Name,
    disk: PathBuf,
    /// For the arms whose disk lies in one.
    _cluster: Option<Cluster>,
}

impl Host {
    /// Writes the disk, and starts a cluster where arms want one.
    pub fn prepare(runner: &mut Runner<'_>, stage: Name, arms: &[Running]) -> Result<Host> {
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
            if let Ok(measured) = here::run_fio(rated::JOB, &target, &settings, limit, stop) {
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
}

impl Prepared for Host {
    /// A block for each arm.
    fn round(&mut self, runner: &mut Runner<'_>, round: u32, order: &[&Running]) -> Result<()> {
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
                    let all = Disk { access: &access, env, scratch: &scratch, mark, stop };
                    workload.run(&Here::new(&all, &settings)?)
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
