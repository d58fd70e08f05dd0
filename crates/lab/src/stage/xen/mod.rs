//! The stage `xen`: a nested Xen in QEMU, booted once for all rounds, whose first domain serves disks to PV guests.
//!
//! Within a round each arm's disk is attached with `xl`, loaded from the guest and detached again, so that the kernel's
//! back end and Ringtap's, which would take each other's disks, take turns. Ways that are compared serve the same file or
//! volume. Of the two guests the second is used only by loads that run in both at once.

mod machine;
mod stage;

pub use stage::{STAGES, TURN};

use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::guest::{fail_all, remember, remember_accelerator};
use super::kind::Prepared;
use super::pair::Pair;
use super::{boot, durable, inside, two_bonnie, two_guests};
use crate::backend::xen::{Image, Seat, Way};

use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::process;
use crate::run::meter::Who;
use crate::run::runner::{Place, Runner};
use crate::run::running::Running;
use crate::run::scratch::settle;
use crate::sample::{Layer, Stage as Name};
use crate::stop::Stop;
use crate::workload::job::Target;
use crate::workload::{Workload, durability};
use machine::{Disk, FIRST_MEMORY, Machine, Needs};

const STAGE: Name = Name::Xen;
const IMAGES: [Image; 4] = [Image::Raw, Image::Qcow2, Image::Overlay, Image::Vhd];
/// How long before the common start two guests are told to begin: a translated processor takes long to load fio.
const NOTICE: Duration = Duration::from_secs(5);
/// So much longer than the plan says both run, for they do not begin at the same moment.
const LONGER: Duration = Duration::from_secs(2);
/// A Xen that does not come up takes minutes to say so: after so many in a row no more are booted.
const TRIES: u32 = 3;

/// Bytes that a plan's disks take on this machine, while they are made.
fn room(plan: &Plan, arms: &[Running]) -> u64 {
    let guests = guests(arms) as u64;
    // The volumes, the images, and the file system made of them.
    guests * plan.size + images(plan.size, arms) + file_system(plan.size, arms)
}

fn guests(arms: &[Running]) -> usize {
    let both = arms.iter().flat_map(Running::rounds).any(|w| w.is_pair());
    if both { 2 } else { 1 }
}

fn ways(arms: &[Running]) -> impl Iterator<Item = Way> {
    arms.iter().filter_map(|arm| arm.entry.backend.in_xen())
}

/// The images that a plan's arms need beside the raw file.
fn made(arms: &[Running]) -> Vec<Image> {
    let wanted =
        |image: &Image| ways(arms).any(|way| matches!(way, Way::Ringtap(of, _) if of == *image));
    IMAGES.into_iter().filter(|image| image.made_by().is_some()).filter(wanted).collect()
}

fn images(size: u64, arms: &[Running]) -> u64 {
    let each = size + (made(arms).len() as u64) * (size + (8 << 20));
    guests(arms) as u64 * each
}

/// Bytes of the ext4: an overlay may grow to the size of what is below.
fn file_system(size: u64, arms: &[Running]) -> u64 {
    let overlays = ways(arms).any(Way::is_overlay);
    let overlays = if overlays { guests(arms) as u64 * (size + (8 << 20)) } else { 0 };
    images(size, arms) + overlays + boot::OVERHEAD
}

/// The stage, prepared.
pub struct Xen {
    files: PathBuf,
    volumes: PathBuf,
    guests: usize,
    /// Whether an arm has an HVM guest.
    hvm: bool,
    /// Whether a load needs a file system.
    file_systems: bool,
    machine: Option<Machine>,
    /// The number of its boot.
    boot: Option<u32>,
    /// Boots in a row that came to nothing.
    lost: u32,
}

impl Xen {
    /// Writes the disks: images on an ext4, and volumes.
    pub fn prepare(runner: &mut Runner<'_>, arms: &[Running]) -> Result<Xen> {
        let (size, guests) = (runner.plan.size, guests(arms));
        let volumes = runner.disk_of("xen-volumes.raw", guests as u64 * size)?;
        let folder = runner.scratch.disks().join("xen");
        std::fs::create_dir(&folder).map_err(Error::file("make", &folder))?;
        for number in 1..=guests {
            let raw = runner.disk_of(&format!("xen/{number}.raw"), size)?;
            for image in made(arms) {
                let name = image.path(number);
                let name = name.rsplit('/').next().unwrap_or_default();
                let mut command = Command::new("qemu-img");
                command.args(["convert", "-q", "-f", "raw"]);
                command.args(image.made_by().unwrap_or_default());
                command.arg(&raw).arg(folder.join(name));
                process::run(command, Duration::from_secs(600), runner.stop)?;
            }
        }
        let files = runner.scratch.disks().join("xen-files.ext4");
        boot::ext4(&folder, &files, file_system(size, arms), runner.stop)?;
        settle(&files)?;
        let hvm = ways(arms).any(|way| way.seat(1) == Seat::Hvm);
        let file_systems = arms.iter().flat_map(Running::rounds).any(|w| w.on_file_system());
        runner.record.stages.push((STAGE, describe(runner, hvm)?));
        runner.folder.write_record(&runner.record)?;
        Ok(Xen { files, volumes, guests, hvm, file_systems, machine: None, boot: None, lost: 0 })
    }
}

impl Prepared for Xen {
    /// A block for each arm. A machine that fails an arm is not trusted with the next.
    fn round(&mut self, runner: &mut Runner<'_>, round: u32, order: &[&Running]) -> Result<()> {
        runner.boot = self.boot;
        for (position, &arm) in (0..).zip(order) {
            let durability = durability(arm, round);
            // The twin, and every later round, where only that check was asked for.
            if durability.is_none() && arm.rounds().next().is_none() {
                continue;
            }
            let machine = match self.machine.take() {
                Some(machine) => Ok(machine),
                None if self.lost >= TRIES => Err(Error::Guest(format!(
                    "not tried: Xen did not come up {TRIES} times in a row"
                ))),
                None => self.boot(runner, round),
            };
            self.lost = if machine.is_ok() { 0 } else { self.lost + 1 };
            let failed = match machine {
                // One that did not come up is not tried again with each arm.
                Ok(machine) if hvm_is_lost(&machine, arm) => {
                    let lost = machine.guest(Seat::Hvm).err();
                    self.machine = Some(machine);
                    lost.unwrap_or_else(none)
                }
                Ok(machine) => match block(runner, &machine, &self.volumes, arm, round, position) {
                    Ok(sound) => {
                        self.machine = Some(machine).filter(|_| sound);
                        continue;
                    }
                    Err(Failed::Arm(error)) => error,
                    Err(Failed::Run(error)) => return Err(error),
                },
                Err(error) => error,
            };
            if let Error::Interrupted = failed {
                return Err(failed);
            }
            if let Some(workload) = durability {
                let place = Place { stage: STAGE, arm, workload, round, position };
                runner.fail(place, &failed)?;
            }
            fail_all(runner, STAGE, arm, round, position, &failed)?;
        }
        Ok(())
    }
}

impl Xen {
    fn boot(&mut self, runner: &mut Runner<'_>, round: u32) -> Result<Machine> {
        let rounds = runner.plan.rounds;
        runner.progress.say(&format!("round {}/{rounds}  {STAGE}  booting", round + 1));
        let needs = Needs {
            plan: runner.plan,
            disks: [&self.files, &self.volumes],
            guests: self.guests,
            hvm: self.hvm,
            file_systems: self.file_systems,
        };
        let machine = Machine::boot(runner.env, runner.stop, &needs)?;
        self.boot = Some(runner.next_boot());
        runner.boot = self.boot;
        remember_accelerator(runner, STAGE, machine.dom0())?;
        if machine.dom0().accelerator() == "tcg" {
            let claim = match machine.dom0().put_devices_first() {
                Ok(()) => {
                    "; the thread of QEMU's devices goes before those of its processors".into()
                }
                Err(error) => format!(
                    "; QEMU's devices wait for its processors, so disks answer late while a program spins: as root, with chrt, the lab has them go first ({error})"
                ),
            };
            remember(runner, STAGE, &claim)?;
        }
        Ok(machine)
    }
}

/// An arm's disks while the guests have them.
struct Disks<'a> {
    machine: &'a Machine,
    way: Way,
    /// The file of all volumes on this machine.
    file: &'a Path,
    disks: Vec<Disk>,
    /// Whether a load has written to them since they were attached.
    written: Cell<bool>,
    /// Where what their server says goes.
    log: PathBuf,
    stop: &'a Stop,
}

impl Disks<'_> {
    /// Makes an overlay anew before a load, where something has been written to it.
    fn ready(&self, writes: bool) -> Result<()> {
        if !self.way.is_overlay() {
            return Ok(());
        }
        fresh(&self.written, writes, || {
            self.keep(&self.machine.renew(self.way, &self.disks, self.stop)?)
        })
    }

    fn release(&self) -> Result<()> {
        self.keep(&self.machine.release(&self.disks, self.stop)?)
    }

    fn keep(&self, said: &str) -> Result<()> {
        if said.is_empty() {
            return Ok(());
        }
        let file = File::options().create(true).append(true).open(&self.log);
        let written = file.and_then(|mut file| file.write_all(said.as_bytes()));
        written.map_err(Error::file("write", &self.log))
    }
}

/// Has what comes next, which may write, find nothing written. Where renewing fails it is tried again.
fn fresh(written: &Cell<bool>, writes: bool, renew: impl FnOnce() -> Result<()>) -> Result<()> {
    if written.get() {
        renew()?;
    }
    written.set(writes);
    Ok(())
}

/// How often a round makes the overlay of an arm anew.
fn renewals(arm: &Running) -> usize {
    if !arm.entry.backend.in_xen().is_some_and(Way::is_overlay) {
        return 0;
    }
    let (written, mut renewed) = (Cell::new(false), 0);
    for workload in arm.rounds() {
        // Two loads come each alone, and both together.
        let runs = if workload.is_pair() { 3 } else { 1 };
        for _ in 0..runs {
            renewed += usize::from(written.replace(workload.writes()));
        }
    }
    renewed
}

/// Whether an arm needs an HVM guest that did not come up.
fn hvm_is_lost(machine: &Machine, arm: &Running) -> bool {
    let needs = arm.entry.backend.in_xen().is_some_and(|way| way.seat(1) == Seat::Hvm);
    needs && machine.guest(Seat::Hvm).is_err()
}

/// Why a block did not come to its end.
enum Failed {
    /// Its disk could not be attached: nothing was recorded.
    Arm(Error),
    /// The run cannot go on.
    Run(Error),
}

/// The check of an arm that is made once, for which its disk must be attached.
fn durability(arm: &Running, round: u32) -> Option<&'static dyn Workload> {
    let first = round == 0 && arm.name == arm.entry.name;
    arm.workloads.iter().copied().find(|w| first && w.is_check())
}

/// One arm in one round: its loads from one guest, then those from both. Whether the machine may be used again.
fn block(
    runner: &mut Runner<'_>,
    machine: &Machine,
    file: &Path,
    arm: &Running,
    round: u32,
    position: u32,
) -> Result<bool, Failed> {
    let Some(way) = arm.entry.backend.in_xen() else {
        return Err(Failed::Arm(Error::Plan(format!("{} is no disk of Xen's", arm.name))));
    };
    runner.progress.say(&format!(
        "round {}/{}  {STAGE}  {}  attaching",
        round + 1,
        runner.plan.rounds,
        arm.name
    ));
    let both = arm.rounds().any(|w| w.is_pair());
    let disks: Vec<Disk> =
        (1..=if both { 2 } else { 1 }).map(|number| Disk::new(way, number, position)).collect();
    for disk in &disks {
        machine.attach(way, disk, runner.stop).map_err(Failed::Arm)?;
    }
    let (log, stop) = (runner.folder.log(STAGE, &arm.name), runner.stop);
    let disks = Disks { machine, way, file, disks, written: Cell::new(false), log, stop };
    let command = machine::command(way);
    runner.remember_command(STAGE, &arm.name, &command).map_err(Failed::Run)?;
    if let Some(workload) = durability(arm, round) {
        let place = Place { stage: STAGE, arm, workload, round, position };
        count_flushes(runner, place, &disks).map_err(Failed::Run)?;
    }
    for workload in arm.rounds() {
        let place = Place { stage: STAGE, arm, workload, round, position };
        sample(runner, place, &disks).map_err(Failed::Run)?;
    }
    match disks.release() {
        Ok(()) => Ok(true),
        Err(error @ (Error::Interrupted | Error::File { .. })) => Err(Failed::Run(error)),
        // What was measured is measured.
        Err(error) => {
            runner.trouble(STAGE, &arm.name, &error);
            Ok(false)
        }
    }
}

/// The flushes that reach the first domain's own disks, on which all images and volumes lie, for each fsync of a guest.
fn count_flushes(runner: &mut Runner<'_>, place: Place<'_>, disks: &Disks<'_>) -> Result<()> {
    let (machine, stop) = (disks.machine, disks.stop);
    runner.sample(place, None, None, |_| {
        disks.ready(true)?;
        let [disk, ..] = &disks.disks[..] else { return Err(none()) };
        let before = machine.flushes(stop)?;
        let shell = machine.shell(disk.seat, stop)?;
        let limit = Duration::from_secs(240);
        let syncs = match disk.seat {
            Seat::Hvm => {
                let words = durability::dd_args(&disk.node());
                durability::writes_of_dd(&shell.run(&inside::line("dd", &words), limit)?.stderr)?
            }
            _ => {
                let words = durability::args(&Target::Path(disk.node()));
                durability::writes_of_fio(&shell.run(&inside::line("fio", &words), limit)?.stdout)?
            }
        };
        let below = Layer { flushes: machine.flushes(stop)? - before, ..Layer::default() };
        let mut measured = durability::measured(syncs, below);
        if let Some(note) = &mut measured.note {
            note.push_str(
                "; counted at the disks of the first domain, whose journal may add a few",
            );
        }
        durable::note_told(&mut measured, &disk.node(), &shell);
        Ok(measured)
    })
}

fn sample(runner: &mut Runner<'_>, place: Place<'_>, disks: &Disks<'_>) -> Result<()> {
    let mut settings = runner.settings(STAGE, place.round);
    let (machine, stop) = (disks.machine, disks.stop);
    let (pid, tool) = (machine.dom0().pid(), runner.env.guest_tool());
    let nodes: Vec<String> = disks.disks.iter().map(Disk::node).collect();
    // No part of what is measured.
    let workload = place.workload;
    let ready = if workload.is_pair() { Ok(()) } else { disks.ready(workload.writes()) };
    runner.sample(place, None, Some(pid), |mark| match nodes.as_slice() {
        [first, second] if workload.is_pair() => {
            settings.run += LONGER;
            let guests = [machine.guest(Seat::Guest(1))?, machine.guest(Seat::Guest(2))?];
            // Both have Xen's clock.
            let ahead = [machine.shell(Seat::Guest(1), stop)?.clock_ahead()?; 2];
            let who = Who { servers: vec![], clients: vec![pid] };
            let devices = [first.as_str(), second];
            let ready = &|| disks.ready(workload.writes());
            let pair = Pair { machines: guests, devices, who, ahead, notice: NOTICE, ready };
            match workload.shape() {
                Some(shape) => {
                    two_guests::measure(shape, place.round, &pair, &settings, stop, mark)
                }
                None => two_bonnie::measure(place.round, &pair, &settings, stop),
            }
        }
        [device, ..] => {
            ready?;
            let seat = disks.way.seat(1);
            let shell = machine.shell(seat, stop)?;
            let here = inside::Place {
                shell: &shell,
                device,
                base: device,
                disk: disks.file,
                tool: &tool,
                memory: machine.memory(seat),
                mark,
            };
            inside::measure(workload, &settings, &here)
        }
        [] => Err(none()),
    })
}

fn none() -> Error {
    Error::Plan("no disk was attached".into())
}

fn describe(runner: &Runner<'_>, hvm: bool) -> Result<String> {
    let (first, other) = runner.env.xen().map_err(|missing| Error::Guest(missing.reason))?;
    let kernel = first.kernel().image.display();
    let guest = machine::guest_memory(runner.plan, machine::size_of_file(other.initrd())?) >> 20;
    let first = FIRST_MEMORY >> 20;
    let hvm = if hvm {
        ", an HVM guest of one CPU whose devices QEMU emulates in the first domain"
    } else {
        ""
    };
    Ok(format!(
        "a nested Xen in QEMU ({kernel}), two CPUs, {first} MiB for its first domain, PV guests of one CPU and {guest} MiB{hvm}, \
         one boot for all rounds; the client's CPU is the whole machine's; a hypercall, a page mapped or a byte copied \
         costs another multiple of what it costs on a real processor, so only ratios within this run are claimed"
    ))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::stage::missing_workload;
    use super::*;
    use crate::backend;
    use crate::cli::CompareArgs;
    use crate::env::Env;
    use crate::run::matrix;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: CompareArgs,
    }

    fn plan(words: &str) -> Plan {
        let head = ["compare", "--dir", "/tmp", "--stages", "xen", "--size", "64M"];
        let args = Cli::parse_from(head.into_iter().chain(words.split_whitespace())).args;
        Plan::from_args(&args).unwrap()
    }

    fn arms(plan: &Plan) -> Vec<Running> {
        let running = |entry: &&'static crate::backend::Entry| Running {
            name: entry.name.into(),
            entry,
            workloads: plan.workloads(),
        };
        plan.entries(STAGE).iter().map(running).collect()
    }

    #[test]
    fn the_plan_has_the_rows_that_were_asked_for_and_lvm_is_the_reference() {
        let plan = plan("--workloads fio,dd-latency-direct,contention");
        let names: Vec<&str> = plan.entries(STAGE).iter().map(|entry| entry.name).collect();
        assert_eq!(names[..3], ["phy-lvm", "phy-loop", "file"]);
        for ours in ["tap-raw", "tap-qcow2", "tap-overlay", "tap-vhd"] {
            assert!(names.contains(&ours), "{ours}");
        }
        // One load and two at once, on the same stage.
        assert!(plan.workloads().iter().all(|w| w.runs_on(STAGE)));
        assert_eq!(guests(&arms(&plan)), 2);
    }

    #[test]
    fn every_row_of_the_stage_says_how_it_is_served_and_no_other_does() {
        for entry in backend::all() {
            assert_eq!(entry.backend.in_xen().is_some(), entry.stage == STAGE, "{entry:?}");
        }
    }

    #[test]
    fn there_is_room_for_what_the_rows_need_and_no_more() {
        let (size, plan_of) = (64 << 20, |words: &str| {
            let plan = plan(words);
            let arms = arms(&plan);
            (room(&plan, &arms), made(&arms))
        });
        let (raw, none) = plan_of("--backends phy-lvm,file,tap-raw --workloads fio");
        assert!(none.is_empty() && raw >= 3 * size && raw < 6 * size, "{raw}");
        let (all, images) = plan_of("--workloads two-read");
        assert_eq!(images, [Image::Qcow2, Image::Vhd]);
        assert!(all > 2 * raw, "{all}");
    }

    #[test]
    fn what_writes_to_an_overlay_finds_a_fresh_one_and_so_does_what_reads_behind_it() {
        let (written, renewed) = (Cell::new(false), Cell::new(0));
        let after = |writes, works: bool| {
            let _ = fresh(&written, writes, || {
                renewed.set(renewed.get() + 1);
                if works { Ok(()) } else { Err(none()) }
            });
            renewed.get()
        };
        let loads = [false, true, true, false, false, true];
        assert_eq!(loads.map(|writes| after(writes, true)), [0, 0, 1, 2, 2, 2]);
        assert_eq!([after(false, false), after(false, true), after(true, true)], [3, 4, 4]);
    }

    #[test]
    fn what_the_guests_cannot_run_is_a_row_with_its_reason() {
        let plan = plan("--workloads bonnie,archive,read-1m-qd8");
        for workload in plan.workloads() {
            let runs = !workload.of_snapshots();
            let missing =
                missing_workload(workload, &Env::new("/nonexistent".into(), "/nonexistent".into()));
            assert!(missing.is_none() || !runs || !missing.unwrap().remedy.contains("vm"));
        }
        // Without a ringtap its rows, and perhaps all others, are reasons.
        let (arms, skipped) =
            matrix(&plan, &Env::new("/nonexistent".into(), "/nonexistent".into()));
        let running = |name: &str| arms[0].1.iter().any(|arm| arm.name == name);
        assert!(!running("tap-raw"));
        let told =
            |skip: &&crate::run::folder::Skip| skip.backend == "tap-raw" && skip.workload.is_none();
        assert!(skipped.iter().find(told).unwrap().missing.reason.contains("xen"));
    }
}
