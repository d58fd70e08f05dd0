//! The stages `guest` (User-Mode Linux) and `vm` (QEMU): one boot for each round, with the disks of all arms attached, so
//! that what differs between the arms of a round is the way the disk is served and nothing else. Each arm has a disk file
//! of its own (all written once), because all are open at the same time.
//!
//! Servers are started fresh in each round and stopped after it. The guest's fio, dd and bonnie++ are the host's.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ringtap_guest::{Guest as Machine, Qemu};

use super::boot::{self, Attached, OVERHEAD, PC_MEMORY, UML_MEMORY, disk_bytes};
use super::inside::{self, Shell};
use super::kind::{Prepared, Stage, TRANSLATED, Words, of_itself};
use crate::backend::{Entry, Image, Inner, Reach, SECRET, own};
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
use crate::workload::{Client, Settings, Workload, fio, rated};

/// How long a guest may take to write back and switch off.
const OFF: Duration = Duration::from_secs(30);

/// Bytes that an arm's disk takes on this machine, while it is made.
pub fn room(size: u64, arm: &Running) -> u64 {
    let bytes = disk_bytes(size, arm.entry.backend.inner());
    match (arm.entry.backend.inner(), arm.entry.backend.image()) {
        // The file system with the disk file on it is made from a copy.
        (Inner::Loop { .. }, _) => 2 * bytes + OVERHEAD,
        (_, Image::Raw) => bytes,
        // Each overlay may grow to the size of what is below.
        (_, Image::Overlay(_)) => (1 + parts(arm, 0).len() as u64) * bytes + OVERHEAD,
        // Made from a copy.
        (_, Image::Qcow2 | Image::Luks) => 2 * bytes + OVERHEAD,
    }
}

/// The workloads of an arm by the disk that they share. Each that writes to an overlay has a fresh one, as a snapshot of
/// device-mapper's is taken anew before each; in the first round there is one more for finding out what the arm carries.
pub fn parts(arm: &Running, round: u32) -> Vec<Vec<&'static dyn Workload>> {
    let all = arm.rounds().collect::<Vec<_>>();
    if !is_overlay(arm) {
        return vec![all];
    }
    let (writes, reads): (Vec<_>, Vec<_>) = all.into_iter().partition(|w| w.writes());
    let reads = Some(reads).filter(|reads| !reads.is_empty());
    let spare = (round == 0 && arm.is_rated()).then(Vec::new);
    reads.into_iter().chain(writes.into_iter().map(|one| vec![one])).chain(spare).collect()
}

/// Of some arms only the flushes are counted.
fn has_rounds(arm: &Running) -> bool {
    arm.rounds().next().is_some()
}

fn is_overlay(arm: &Running) -> bool {
    matches!(arm.entry.backend.image(), Image::Overlay(_))
}

/// Why a workload cannot run in the guest.
pub fn missing_workload(workload: &dyn Workload, env: &Env) -> Option<Missing> {
    match workload.client() {
        Client::Job | Client::Fio => env.program("fio", "fio"),
        Client::Dd => env.program("dd", "coreutils"),
        Client::Files => env.program("mkfs.ext4", "e2fsprogs"),
        Client::Script | Client::Two | Client::TwoFiles | Client::Flushes | Client::Start => None,
    }
}

/// The stages of this file.
pub const STAGES: &[&dyn Stage] = &[&InGuest { pc: false }, &InGuest { pc: true }];

/// The stages `guest` and `vm`.
pub struct InGuest {
    /// A virtual PC, or User-Mode Linux.
    pub pc: bool,
}

impl Stage for InGuest {
    fn name(&self) -> Name {
        if self.pc { Name::Vm } else { Name::Guest }
    }
    fn words(&self) -> Words {
        let (heading, behind, place) = match self.pc {
            true => ("In a virtual machine", "", 0),
            false => ("In a User-Mode Linux guest", " (UML guest)", 2),
        };
        Words { heading, what: "inside a guest", behind, page_cache: "the host's", place }
    }
    fn missing(&self, entry: &Entry, env: &Env) -> Option<Missing> {
        unbootable(self.pc, entry, env)
    }
    fn missing_workload(
        &self,
        entry: &Entry,
        workload: &dyn Workload,
        env: &Env,
    ) -> Option<Missing> {
        of_itself(entry, workload, env).or_else(|| missing_workload(workload, env))
    }
    fn room(&self, plan: &Plan, arms: &[Running]) -> u64 {
        arms.iter().map(|arm| room(plan.size, arm)).sum()
    }
    fn prepare(&self, runner: &mut Runner<'_>, arms: &[Running]) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(Guest::prepare(runner, self.name(), arms)?))
    }
    fn seconds(&self, workload: &dyn Workload, settings: &Settings) -> f64 {
        let work = workload.seconds(settings);
        // fio's own time is as long on a translated processor, and its start takes little.
        let by_clock = workload.job().is_some() || workload.is_rated();
        if self.pc && !by_clock { work * TRANSLATED } else { work }
    }
    fn booting(&self, arms: usize) -> f64 {
        if self.pc { 5.0 + 0.25 * arms as f64 } else { 4.0 }
    }
    /// Each load that writes has a server and a disk of its own.
    fn renewing(&self, arm: &Running) -> f64 {
        if is_overlay(arm) {
            return 0.5 * parts(arm, 1).len().saturating_sub(1) as f64;
        }
        let snapshot = arm.entry.backend.inner().is_snapshot();
        if snapshot { 0.2 * arm.rounds().count() as f64 } else { 0.0 }
    }
    /// User-Mode Linux is one processor in several processes, taken in turn; a virtual PC has a thread for each.
    fn client(&self, thread: Option<f64>, all: Option<f64>) -> (&'static str, Option<f64>) {
        match thread.filter(|_| self.pc) {
            Some(thread) => ("one processor of the guest", Some(thread)),
            None => ("the guest's processor", all),
        }
    }
}

/// Why no guest can be booted, or none with the disk of this backend.
pub fn unbootable(pc: bool, entry: &Entry, env: &Env) -> Option<Missing> {
    if !pc {
        return env.appliance().err();
    }
    let nbd = entry.backend.reach() == Reach::Nbd;
    env.program("qemu-system-x86_64", "qemu-system-x86")
        .or_else(|| env.pc().err())
        .or_else(|| nbd.then(|| env.pc_network()).flatten())
}

/// The stage, prepared.
#[derive(Debug)]
pub struct Guest {
    stage: Name,
    disks: Vec<(String, PathBuf)>,
}

impl Guest {
    /// Builds the appliance and writes the disks.
    pub fn prepare(runner: &mut Runner<'_>, stage: Name, arms: &[Running]) -> Result<Guest> {
        let mut disks = Vec::new();
        for arm in arms.iter().filter(|arm| has_rounds(arm)) {
            let name = format!("{stage}-{}", arm.name.replace('#', "-"));
            disks.push((arm.name.clone(), make_disk(runner, arm, &name, runner.plan.size)?));
        }
        let words = describe(runner, stage)?;
        runner.record.stages.push((stage, words));
        runner.folder.write_record(&runner.record)?;
        Ok(Guest { stage, disks })
    }

    fn disk(&self, arm: &str) -> Result<&Path> {
        let disk = self.disks.iter().find(|(name, _)| name == arm);
        disk.map(|(_, path)| path.as_path())
            .ok_or_else(|| Error::Plan(format!("no disk was made for {arm}")))
    }
}

impl Prepared for Guest {
    /// Servers, one boot, every arm, all gone again.
    fn round(&mut self, runner: &mut Runner<'_>, round: u32, order: &[&Running]) -> Result<()> {
        let stage = self.stage;
        if let Some(error) = runner.unbootable(stage) {
            return (0..).zip(order).try_for_each(|(position, arm)| {
                fail_all(runner, stage, arm, round, position, &error)
            });
        }
        runner.progress.say(&format!(
            "round {}/{}  {stage}  booting",
            round + 1,
            runner.plan.rounds
        ));
        let mut attached = Vec::new();
        for (position, arm) in (0..).zip(order).filter(|(_, arm)| has_rounds(arm)) {
            let disk = self.disk(&arm.name)?.to_owned();
            for (nth, workloads) in (1..).zip(parts(arm, round)) {
                let part = Part { nth, workloads };
                attached.extend(attach(runner, stage, arm, round, position, &disk, part)?);
            }
        }
        let Some(machine) = boot_with_the_living(runner, stage, &mut attached, round)? else {
            return Ok(());
        };
        remember_accelerator(runner, stage, &machine)?;
        if round == 0 {
            find_capacity(runner, stage, &machine, &attached)?;
        }
        let settings = runner.settings(stage, round);
        let times = runner.slices.times(runner.plan, round, order);
        let tool = runner.env.guest_tool();
        let memory = memory(runner, stage);
        // Load by load: what is compared in one is measured side by side, so that a machine that is slow for a while is slow
        // for all.
        for workload in runner.plan.workloads() {
            let time = times.iter().find(|(name, _)| *name == workload.name());
            let run = time.map_or(settings.run, |(_, time)| *time);
            let settings = Settings { run, ..settings.clone() };
            let of_load = attached
                .iter_mut()
                .filter(|one| one.workloads.iter().any(|known| known.name() == workload.name()));
            for one in of_load {
                let device = match &one.device {
                    Ok(device) => device.clone(),
                    Err(error) => {
                        let place =
                            Place { stage, arm: one.arm, workload, round, position: one.position };
                        runner.fail(place, &Error::Guest(error.clone()))?;
                        continue;
                    }
                };
                let place = Place { stage, arm: one.arm, workload, round, position: one.position };
                let alive = one.served.server.as_mut().map_or(Ok(()), process::Server::check);
                let shell = Shell::new(&machine, runner.stop);
                let ready = alive.and_then(|()| one.refresh(&shell));
                if let Err(Error::Interrupted) = ready {
                    return Err(Error::Interrupted);
                }
                runner.sample(place, one.served.server.as_ref(), Some(machine.pid()), |mark| {
                    ready?;
                    let here = inside::Place {
                        shell: &shell,
                        device: &device,
                        base: &one.base,
                        disk: &one.disk,
                        tool: &tool,
                        memory,
                        mark,
                    };
                    inside::measure(workload, &settings, &here)
                })?;
            }
        }
        runner.progress.say(&format!(
            "round {}/{}  {stage}  switching off",
            round + 1,
            runner.plan.rounds
        ));
        switch_off(runner, stage, machine);
        for one in attached {
            end(runner, stage, one);
        }
        Ok(())
    }
}

/// What the slowest backend of the stage carries, for the rated loads.
fn find_capacity(
    runner: &mut Runner<'_>,
    stage: Name,
    machine: &Machine,
    attached: &[Attached<'_>],
) -> Result<()> {
    let settings = rated::capacity_settings(&runner.plan.settings(0));
    let shell = Shell::new(machine, runner.stop);
    // What this writes to an overlay would be found there by a load.
    let rated = |one: &&Attached<'_>| match is_overlay(one.arm) {
        true => one.workloads.is_empty(),
        false => one.arm.is_rated(),
    };
    for one in attached.iter().filter(rated) {
        let Ok(device) = &one.device else { continue };
        runner.progress.say(&format!("{stage}  {}  what it carries", one.arm.name));
        one.refresh(&shell)?;
        let words = fio::args(rated::JOB, &Target::Path(device.clone()), &settings);
        let output = shell.run(&inside::fio_line(&words), Duration::from_secs(120));
        // What fails here fails in its rounds again, and says so.
        let measured = output.and_then(|text| fio::parse(&text.stdout, rated::JOB, &settings));
        if let Ok(measured) = measured {
            runner.remember_capacity(stage, &measured);
        }
        runner.stop.check()?;
    }
    Ok(())
}

/// Memory of a stage's guest in bytes.
pub fn memory(runner: &Runner<'_>, stage: Name) -> u64 {
    let pc = matches!(stage, Name::Vm | Name::TwoVms);
    runner.plan.memory.unwrap_or(if pc { PC_MEMORY } else { UML_MEMORY })
}

/// Makes an arm's disk: written once, in the arm's format, with the file system that a loop device in the guest needs.
pub fn make_disk(runner: &Runner<'_>, arm: &Running, name: &str, size: u64) -> Result<PathBuf> {
    let backend = arm.entry.backend;
    let disk = runner.disk_of(&format!("{name}.raw"), disk_bytes(size, backend.inner()))?;
    if matches!(backend.inner(), Inner::Loop { .. }) {
        return boot::wrap(runner, &disk, size);
    }
    if backend.image() == Image::Qcow2 {
        let image = disk.with_extension("qcow2");
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-q", "-f", "raw", "-O", "qcow2", "-t", "none", "-T", "none"]);
        command.arg(&disk).arg(&image);
        process::run(command, Duration::from_secs(600), runner.stop)?;
        std::fs::remove_file(&disk).map_err(Error::file("remove", &disk))?;
        settle(&image)?;
        return Ok(image);
    }
    if backend.image() == Image::Luks {
        return encrypt(runner, &disk);
    }
    Ok(disk)
}

/// Makes a LUKS container of a raw disk, and removes that. Its secret is not much of one, and its key is found quickly:
/// opening is no part of what is measured.
pub fn encrypt(runner: &Runner<'_>, disk: &Path) -> Result<PathBuf> {
    let secret = disk.with_file_name(SECRET);
    std::fs::write(&secret, "the lab's own").map_err(Error::file("write", &secret))?;
    let image = disk.with_extension("luks");
    for tries in (0..60).rev() {
        let mut command = Command::new("qemu-img");
        let options = "key-secret=lab,iter-time=10";
        command.args(["convert", "-q", "-f", "raw", "-O", "luks", "-o", options]);
        command.arg("--object").arg(format!("secret,id=lab,file={}", secret.display()));
        command.arg(disk).arg(&image);
        match process::run(command, Duration::from_secs(600), runner.stop) {
            // What it measures for the key is at times less than a tick of the clock.
            Err(Error::Program { said, .. })
                if tries > 0 && said.contains("accurate CPU usage") => {}
            ended => {
                ended?;
                break;
            }
        }
    }
    std::fs::remove_file(disk).map_err(Error::file("remove", disk))?;
    settle(&image)?;
    Ok(image)
}

/// A disk of an arm that may have several.
#[derive(Debug)]
pub struct Part {
    /// Its number, from 1.
    pub nth: u32,
    /// What is run on it.
    pub workloads: Vec<&'static dyn Workload>,
}

/// Starts an arm's server on its disk (an overlay is made anew first). `None` when that failed, which is recorded.
pub fn attach<'a>(
    runner: &mut Runner<'_>,
    stage: Name,
    arm: &'a Running,
    round: u32,
    position: u32,
    disk: &Path,
    part: Part,
) -> Result<Option<Attached<'a>>> {
    runner.keep_written(disk)?;
    settle(disk)?;
    let Part { nth, workloads } = part;
    let served = fresh(runner.env, runner.stop, arm, disk, nth)
        .and_then(|disk| runner.start_nth(stage, arm, &disk, nth).map(|served| (served, disk)));
    match served {
        Ok((mut served, disk)) => {
            served.access = own::in_guest(served.access, arm.entry.backend.only_read());
            if let Some(server) = &served.server {
                let command = server.command_line.clone();
                runner.remember_command(stage, &arm.name, &command)?;
            }
            let one = Attached::new(arm, served, position, disk, runner.plan.size);
            Ok(Some(Attached { workloads, ..one }))
        }
        Err(Error::Interrupted) => Err(Error::Interrupted),
        Err(error) => {
            for workload in workloads {
                runner.fail(Place { stage, arm, workload, round, position }, &error)?;
            }
            Ok(None)
        }
    }
}

/// The file that is served: the disk, or a new overlay on it.
pub fn fresh(env: &Env, stop: &Stop, arm: &Running, disk: &Path, nth: u32) -> Result<PathBuf> {
    let Image::Overlay(maker) = arm.entry.backend.image() else { return Ok(disk.to_owned()) };
    let overlay = disk.with_extension(format!("overlay{nth}"));
    match std::fs::remove_file(&overlay) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::file("remove", &overlay)(e));
        }
        _ => {}
    }
    let command = maker.command(env, disk, &overlay);
    process::run(command, Duration::from_secs(60), stop)?;
    Ok(overlay)
}

/// Switches a guest off; a guest that does not is trouble, and gone all the same.
pub fn switch_off(runner: &mut Runner<'_>, stage: Name, machine: Machine) {
    if let Err(error) = machine.shutdown(OFF) {
        runner.trouble(stage, "guest", &Error::Guest(error.to_string()));
    }
}

/// Ends an arm's serving.
pub fn end(runner: &mut Runner<'_>, stage: Name, one: Attached<'_>) {
    let name = one.arm.name.clone();
    if let Err(error) = one.served.end() {
        runner.trouble(stage, &name, &error);
    }
}

/// Records that nothing of an arm could be measured in a round.
pub fn fail_all(
    runner: &mut Runner<'_>,
    stage: Name,
    arm: &Running,
    round: u32,
    position: u32,
    error: &Error,
) -> Result<()> {
    for workload in arm.rounds() {
        runner.fail(Place { stage, arm, workload, round, position }, error)?;
    }
    Ok(())
}

/// The same for what is run on one disk of an arm.
fn fail_attached(
    runner: &mut Runner<'_>,
    stage: Name,
    one: &Attached<'_>,
    round: u32,
    error: &Error,
) -> Result<()> {
    for &workload in &one.workloads {
        let (arm, position) = (one.arm, one.position);
        runner.fail(Place { stage, arm, workload, round, position }, error)?;
    }
    Ok(())
}

/// Boots the guest. An arm whose server dies of it fails alone: the guest is booted again without its disk. `None` when
/// no guest came up.
pub fn boot_with_the_living(
    runner: &mut Runner<'_>,
    stage: Name,
    attached: &mut Vec<Attached<'_>>,
    round: u32,
) -> Result<Option<Machine>> {
    while !attached.is_empty() {
        let error = match boot::boot(runner, stage, attached) {
            Ok(machine) => {
                runner.remember_boot(stage, Ok(()));
                return Ok(Some(machine));
            }
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(error) => error,
        };
        let before = attached.len();
        let mut living = Vec::new();
        for mut one in attached.drain(..) {
            match one.served.server.as_mut().map_or(Ok(()), process::Server::check) {
                Ok(()) => living.push(one),
                Err(error) => fail_attached(runner, stage, &one, round, &error)?,
            }
        }
        if living.len() == before {
            // The whole of it once, with its console; and to each arm what it was.
            runner.trouble(stage, "guest", &error);
            let text = error.to_string();
            let first = text.strip_prefix("guest: ").unwrap_or(&text).lines().next();
            let why = first.unwrap_or("it did not boot").to_owned();
            for one in living.drain(..) {
                fail_attached(runner, stage, &one, round, &Error::Guest(why.clone()))?;
            }
            runner.remember_boot(stage, Err(why));
        }
        *attached = living;
    }
    Ok(None)
}

/// What a guest of the stage is.
pub fn describe(runner: &Runner<'_>, stage: Name) -> Result<String> {
    let appliance = match stage {
        Name::Vm | Name::TwoVms => runner.env.pc(),
        _ => runner.env.appliance(),
    };
    let appliance = appliance.map_err(|missing| Error::Guest(missing.reason))?;
    // Said before it takes its time.
    if let Some(why) = translated(runner, stage) {
        runner.progress.note(&format!("{stage}: {why}"));
    }
    let kernel = appliance.kernel().image.display().to_string();
    let mib = memory(runner, stage) >> 20;
    let cost = "the client's CPU is the whole guest's, seen from outside";
    Ok(match stage {
        Name::Vm | Name::TwoVms => format!(
            "QEMU ({kernel}), two CPUs, {mib} MiB, one boot for each round with the disks of all arms; {cost}"
        ),
        _ => format!(
            "User-Mode Linux ({kernel}), one CPU, {mib} MiB, one boot for each round with the disks of all arms; {cost}; only ratios are claimed"
        ),
    })
}

/// Why the processor of a stage's guest is translated, and what would help.
fn translated(runner: &Runner<'_>, stage: Name) -> Option<String> {
    let pc = matches!(stage, Name::Vm | Name::TwoVms);
    let why = Qemu::kvm(&runner.env.pc().ok().filter(|_| pc)?).err()?;
    Some(format!(
        "the guest's processor is translated (TCG), for {why}. What would help: {}",
        why.remedy()
    ))
}

/// Says in the record what really ran the guest's processor, once it is known.
pub fn remember_accelerator(runner: &mut Runner<'_>, stage: Name, machine: &Machine) -> Result<()> {
    let claim = match machine.accelerator() {
        "kvm" => "; under KVM".to_owned(),
        "tcg" => {
            let why = translated(runner, stage)
                .unwrap_or_else(|| "the guest's processor is translated (TCG)".into());
            format!(
                "; under TCG: only ratios are claimed, and the guest's CPU hides much of a server's cost ({why})"
            )
        }
        _ => return Ok(()),
    };
    remember(runner, stage, &claim)
}

/// Adds to what the report says of a stage, unless it says so already.
pub fn remember(runner: &mut Runner<'_>, stage: Name, claim: &str) -> Result<()> {
    let known = |(of, words): &&mut (Name, String)| *of == stage && !words.contains(claim);
    match runner.record.stages.iter_mut().find(known) {
        Some((_, words)) => {
            words.push_str(claim);
            runner.folder.write_record(&runner.record)
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend;
    use crate::workload;

    #[test]
    fn what_writes_to_an_overlay_finds_a_fresh_one() {
        let names =
            ["randread-4k-qd1", "read-1m-qd8", "randwrite-4k-qd32", "bonnie", "snapshot-life"];
        let arm = |name: &str| {
            let entry = backend::find(Name::Vm, name).unwrap();
            let workloads = names.iter().map(|name| workload::find(name).unwrap()).collect();
            Running { name: name.into(), entry, workloads }
        };
        let of = |name: &str| parts(&arm(name), 0).iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(of("ringtap-overlay"), [2, 1, 1, 1]);
        assert_eq!(of("virtio-overlay"), [2, 1, 1, 1]);
        assert_eq!(of("ringtap-qcow2"), [5]);
        // What an arm carries is found out on none of them.
        let rated = ["rated-50", "rated-80"].map(|name| workload::find(name).unwrap());
        let rated = Running { workloads: rated.into(), ..arm("ringtap-overlay") };
        assert_eq!([0, 1].map(|round| parts(&rated, round).len()), [3, 2]);
        let (size, all) = (64 << 20, arm("ringtap-overlay"));
        assert!(
            room(size, &all) >= 5 * size,
            "the base, and four overlays that may grow to its size"
        );
    }
}
