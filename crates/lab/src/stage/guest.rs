//! The guest stage: one boot of User-Mode Linux for each round, with the disks of all arms attached, so that what
//! differs between the arms of a round is the way the disk is served and nothing else. Each arm has a disk file of its
//! own (all of one size, all written once), because all are open at the same time.
//!
//! Servers are started fresh in each round and stopped after it. The guest's fio, dd and bonnie++ are the host's.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use ringtap_guest::{Guest as Machine, Uml};

use crate::backend::{Access, Served};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::process;
use crate::run::scratch::settle;
use crate::run::{Place, Runner, Running};
use crate::sample::Stage;
use crate::workload::fio::Target;
use crate::workload::{Kind, Measured, Settings, Workload, bonnie, dd, fio};

/// The guest's memory in bytes.
const MEMORY: u64 = 512 << 20;
/// What an ext4 needs beside the disk file that lies on it.
const OVERHEAD: u64 = 96 << 20;
/// How long a guest may take to write back and switch off.
const OFF: Duration = Duration::from_secs(20);

/// Bytes on the disks' file system that the stage needs: a disk for each arm.
pub fn room(plan: &Plan, arms: &[(Stage, Vec<Running>)]) -> u64 {
    let arms = arms.iter().filter(|(stage, _)| *stage == Stage::Guest).flat_map(|(_, arms)| arms);
    // The file system with the disk file on it is made from a copy.
    arms.map(|arm| if on_file_system(arm) { 2 * plan.size + OVERHEAD } else { plan.size }).sum()
}

/// Why no guest can be booted here.
pub fn missing(env: &Env) -> Option<Missing> {
    env.appliance().err()
}

/// Why a workload cannot run in the guest.
pub fn missing_workload(workload: &Workload, env: &Env) -> Option<Missing> {
    match workload.kind {
        Kind::Fio(_) => env.program("fio", "fio"),
        Kind::DdThroughput | Kind::DdLatency(_) => env.program("dd", "coreutils"),
        Kind::Bonnie { .. } => {
            env.program("bonnie++", "bonnie++").or_else(|| env.program("mkfs.ext4", "e2fsprogs"))
        }
    }
}

/// The stage, prepared.
#[derive(Debug)]
pub struct Guest {
    disks: Vec<(String, PathBuf)>,
}

/// An arm in a booted guest.
struct Attached<'a> {
    arm: &'a Running,
    served: Served,
    position: u32,
    /// Its block device in the guest.
    device: Result<String, String>,
}

impl Guest {
    /// Builds the appliance and writes the disks.
    pub fn prepare(runner: &mut Runner<'_>, arms: &[Running]) -> Result<Guest> {
        let mut disks = Vec::new();
        for arm in arms {
            let name = format!("guest-{}.raw", arm.name.replace('#', "-"));
            let disk = runner.disk(&name)?;
            let disk = if on_file_system(arm) { wrap(runner, &disk)? } else { disk };
            disks.push((arm.name.clone(), disk));
        }
        let kernel = runner
            .env
            .appliance()
            .map_err(|missing| Error::Guest(missing.reason))?
            .kernel()
            .image
            .clone();
        runner.record.guest = Some(format!(
            "User-Mode Linux ({}), one CPU, {} MiB, one boot for each round with the disks of all arms; the client's CPU \
             is the whole guest's, seen from outside",
            kernel.display(),
            MEMORY >> 20
        ));
        runner.folder.write_record(&runner.record)?;
        Ok(Guest { disks })
    }

    /// One round: servers, one boot, every arm, all gone again.
    pub fn round(&mut self, runner: &mut Runner<'_>, round: u32, order: &[&Running]) -> Result<()> {
        runner.progress.say(&format!("round {}/{}  guest  booting", round + 1, runner.plan.rounds));
        let mut attached = Vec::new();
        for (position, arm) in (0..).zip(order) {
            let disk = self.disk(&arm.name)?;
            settle(disk)?;
            match runner.start(Stage::Guest, arm, disk) {
                Ok(served) => {
                    let device = Err("the guest did not boot".into());
                    attached.push(Attached { arm, served, position, device });
                }
                Err(Error::Interrupted) => return Err(Error::Interrupted),
                Err(error) => fail_all(runner, arm, round, position, &error)?,
            }
        }
        for one in &attached {
            if let Some(server) = &one.served.server {
                let command = server.command_line.clone();
                runner.remember_command(Stage::Guest, &one.arm.name, &command)?;
            }
        }
        let Some(machine) = boot_with_the_living(runner, &mut attached, round)? else {
            return Ok(());
        };
        let settings = runner.plan.settings(round);
        for one in &mut attached {
            let device = match &one.device {
                Ok(device) => device.clone(),
                Err(error) => {
                    fail_all(runner, one.arm, round, one.position, &Error::Guest(error.clone()))?;
                    continue;
                }
            };
            for workload in &one.arm.workloads {
                let place = Place {
                    stage: Stage::Guest,
                    arm: one.arm,
                    workload,
                    round,
                    position: one.position,
                };
                let alive = one.served.server.as_mut().map_or(Ok(()), process::Server::check);
                let shell = Shell { machine: &machine, stop: runner.stop };
                runner.sample(place, one.served.server.as_ref(), Some(machine.pid()), || {
                    alive?;
                    measure(workload, &device, &settings, &shell)
                })?;
            }
        }
        runner.progress.say(&format!(
            "round {}/{}  guest  switching off",
            round + 1,
            runner.plan.rounds
        ));
        if let Err(error) = machine.shutdown(OFF) {
            runner.trouble(Stage::Guest, "guest", &Error::Guest(error.to_string()));
        }
        for one in attached {
            let name = one.arm.name.clone();
            if let Err(error) = one.served.end() {
                runner.trouble(Stage::Guest, &name, &error);
            }
        }
        Ok(())
    }

    fn disk(&self, arm: &str) -> Result<&Path> {
        let disk = self.disks.iter().find(|(name, _)| name == arm);
        disk.map(|(_, path)| path.as_path())
            .ok_or_else(|| Error::Plan(format!("no disk was made for {arm}")))
    }
}

fn on_file_system(arm: &Running) -> bool {
    arm.entry.name == "loop"
}

/// Makes an ext4 image that holds `disk` as `/disk`, without root and without a mount, and removes the original.
fn wrap(runner: &Runner<'_>, disk: &Path) -> Result<PathBuf> {
    let folder = disk.with_extension("d");
    std::fs::create_dir(&folder).map_err(Error::file("make", &folder))?;
    std::fs::rename(disk, folder.join("disk")).map_err(Error::file("move", disk))?;
    let image = disk.with_extension("ext4");
    let mut command =
        Command::new(process::find("mkfs.ext4").unwrap_or_else(|| "mkfs.ext4".into()));
    command.args([
        "-q",
        "-F",
        "-m",
        "0",
        "-E",
        "lazy_itable_init=0,lazy_journal_init=0,nodiscard",
        "-d",
    ]);
    command.arg(&folder).arg(&image).arg(format!("{}M", (runner.plan.size + OVERHEAD) >> 20));
    process::run(command, Duration::from_secs(300), runner.stop)?;
    std::fs::remove_dir_all(&folder).map_err(Error::file("remove", &folder))?;
    settle(&image)?;
    Ok(image)
}

fn fail_all(
    runner: &mut Runner<'_>,
    arm: &Running,
    round: u32,
    position: u32,
    error: &Error,
) -> Result<()> {
    for workload in &arm.workloads {
        runner.fail(Place { stage: Stage::Guest, arm, workload, round, position }, error)?;
    }
    Ok(())
}

/// Boots the guest. An arm whose server dies of it fails alone: the guest is booted again without its disk. `None` when
/// no guest came up.
fn boot_with_the_living(
    runner: &mut Runner<'_>,
    attached: &mut Vec<Attached<'_>>,
    round: u32,
) -> Result<Option<Machine>> {
    while !attached.is_empty() {
        let error = match boot(runner, attached) {
            Ok(machine) => return Ok(Some(machine)),
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(error) => error,
        };
        let before = attached.len();
        let mut living = Vec::new();
        for mut one in attached.drain(..) {
            match one.served.server.as_mut().map_or(Ok(()), process::Server::check) {
                Ok(()) => living.push(one),
                Err(error) => fail_all(runner, one.arm, round, one.position, &error)?,
            }
        }
        if living.len() == before {
            for one in living.drain(..) {
                fail_all(runner, one.arm, round, one.position, &error)?;
            }
        }
        *attached = living;
    }
    Ok(None)
}

/// Boots the guest with all disks and finds each arm's device.
fn boot(runner: &Runner<'_>, attached: &mut [Attached<'_>]) -> Result<Machine> {
    let appliance = runner.env.appliance().map_err(|missing| Error::Guest(missing.reason))?;
    let mut uml = Uml::new(&appliance).memory(MEMORY);
    let (mut ubds, mut vhosts) = (0, 0);
    for one in attached.iter_mut() {
        match &one.served.access {
            Access::Ubd(path) | Access::LoopOnUbd(path) => {
                uml = uml.ubd(path);
                one.device = device("/dev/ubd", &mut ubds);
            }
            Access::VhostUser { socket } => {
                uml = uml.vhost_user(socket);
                one.device = device("/dev/vd", &mut vhosts);
            }
            other => one.device = Err(format!("{other:?} cannot be attached to a guest")),
        }
    }
    runner.stop.check()?;
    let machine = uml.boot().map_err(|error| Error::Guest(error.to_string()))?;
    let shell = Shell { machine: &machine, stop: runner.stop };
    // The first program of a kind is read from the host's disk: not at the cost of the first arm.
    shell.run("fio --version; dd --version; true", Duration::from_secs(30))?;
    for one in attached.iter_mut() {
        if let (Access::LoopOnUbd(_), Ok(disk)) = (&one.served.access, &one.device) {
            let script = format!(
                "mkdir -p /mnt/{0} && mount {disk} /mnt/{0} && losetup -f --show /mnt/{0}/disk",
                one.position
            );
            one.device = match shell.run(&script, Duration::from_secs(30)) {
                Ok(output) => Ok(output.stdout.trim().to_owned()),
                Err(Error::Interrupted) => return Err(Error::Interrupted),
                Err(error) => Err(error.to_string()),
            };
        }
    }
    Ok(machine)
}

/// The kernel names disks by letters in the order in which they are attached.
fn device(prefix: &str, count: &mut u8) -> Result<String, String> {
    let letter = char::from(b'a' + *count);
    *count += 1;
    if letter.is_ascii_lowercase() {
        Ok(format!("{prefix}{letter}"))
    } else {
        Err("more than 26 disks".into())
    }
}

/// Runs scripts in the guest and looks out for the wish to end.
struct Shell<'a> {
    machine: &'a Machine,
    stop: &'a crate::stop::Stop,
}

impl Shell<'_> {
    fn run(&self, script: &str, limit: Duration) -> Result<process::Output> {
        let lost = |error: ringtap_guest::Error| Error::Guest(error.to_string());
        let job = self.machine.start(script).map_err(lost)?;
        let until = Instant::now() + limit;
        while !job.is_done() && Instant::now() < until {
            self.stop.check()?;
            std::thread::sleep(Duration::from_millis(5));
        }
        // What a job printed comes a moment after its end.
        let left = until.saturating_duration_since(Instant::now()) + Duration::from_secs(1);
        let output = job.wait(left).and_then(ringtap_guest::Output::success).map_err(lost)?;
        Ok(process::Output { stdout: output.stdout, stderr: output.stderr })
    }
}

/// Runs one workload on a block device of the guest.
fn measure(
    workload: &Workload,
    device: &str,
    settings: &Settings,
    shell: &Shell<'_>,
) -> Result<Measured> {
    let limit = Duration::from_secs(90) + 3 * (settings.run + settings.ramp);
    match workload.kind {
        Kind::Fio(job) => {
            let words = fio::args(job, &Target::Path(device.into()), settings);
            let output = shell.run(&script("fio", &words), limit)?;
            fio::parse(&output.stdout, job, settings)
        }
        Kind::DdThroughput => {
            let (block, count, note) = dd::throughput_shape(settings.size, MEMORY / 4);
            let output = shell
                .run(&script("LC_ALL=C dd", &dd::throughput_args(device, block, count)), limit)?;
            dd::throughput(&output.stderr, block * count, note)
        }
        Kind::DdLatency(flag) => {
            let output =
                shell.run(&script("LC_ALL=C dd", &dd::latency_args(device, flag)), limit)?;
            dd::latency(&output.stderr)
        }
        Kind::Bonnie { direct } => {
            let shape = bonnie::shape(settings.size, direct);
            let run = script("bonnie++", &bonnie::args("/mnt/bonnie", shape));
            let script = format!(
                "set -e\nmkfs.ext4 -q -F -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 {device}\n\
                 mkdir -p /mnt/bonnie\nmount -t ext4 {device} /mnt/bonnie\nchmod 777 /mnt/bonnie\n\
                 status=0\n{run} || status=$?\numount /mnt/bonnie\nexit $status\n"
            );
            let output = shell.run(&script, Duration::from_secs(900))?;
            bonnie::parse(&output.stdout, shape, MEMORY)
        }
    }
}

/// A command line for the guest's shell.
fn script(program: &str, words: &[String]) -> String {
    let quoted = words.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''")));
    std::iter::once(program.to_owned()).chain(quoted).collect::<Vec<_>>().join(" ")
}
