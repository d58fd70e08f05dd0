//! Two loads at once on this machine: a backend is started twice, on two disks of the same device. One fio drives both; it
//! lets its jobs go together, and both last equally long: all of their time is common. vhost-user disks are driven by two
//! `ringtap-lab load`, of which only common time counts.

use std::cell::Cell;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ringtap_guest::fio::Report;

use super::host::SERVING;
use super::kind::{Prepared, Stage, Words, of_itself};
use super::{boot, guest};
use crate::backend::volume::BESIDE;
use crate::backend::{Access, Context, Entry, Image, Reach, Served, volume};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::process::{self, Server};
use crate::run::mark::Mark;
use crate::run::meter::{Meter, Who};
use crate::run::runner::{Place, Runner};
use crate::run::running::Running;
use crate::run::scratch::{settle, wait_unlocked};
use crate::sample::Stage as Name;
use crate::stop::Stop;
use crate::workload::job::{Job, escape};
use crate::workload::two::{self, Load, Shape};
use crate::workload::{Measured, Settings, Workload, load};

/// Two of `ringtap-lab load` wake a moment after each other; each has load before its measured time for at least so long.
const RAMP: Duration = Duration::from_millis(100);
/// How long two of them may take to reach their disks, before they begin together.
const NOTICE: Duration = Duration::from_millis(300);

/// Bytes that the stage's disks take.
pub fn room(size: u64, arms: &[Running]) -> u64 {
    let any = |of: fn(&Running) -> bool| arms.iter().any(of);
    let overlays = any(|arm| matches!(arm.entry.backend.image(), Image::Overlay(_)));
    let snapshots = any(|arm| arm.entry.backend.inner().is_snapshot());
    2 * size
        + if overlays { 2 * (size + boot::OVERHEAD) } else { 0 }
        + if snapshots { 2 * (size + BESIDE) } else { 0 }
}

/// The stages of this file.
pub const STAGES: &[&dyn Stage] = &[&TwoLoads];

/// The stage `two`.
pub struct TwoLoads;

impl Stage for TwoLoads {
    fn name(&self) -> Name {
        Name::Two
    }
    fn words(&self) -> Words {
        Words {
            heading: "Two loads at once on the host",
            what: "two loads at once, each on a disk of its own, both on one device of this machine",
            behind: " (host)",
            page_cache: "this machine's",
            place: 6,
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
        of_itself(entry, workload, env).or_else(|| {
            let by_load = matches!(entry.backend.reach(), Reach::VhostUser | Reach::Native);
            by_load.then(|| env.lab_load()).flatten()
        })
    }
    fn room(&self, plan: &Plan, arms: &[Running]) -> u64 {
        room(plan.size, arms)
    }
    fn prepare(&self, runner: &mut Runner<'_>, _: &[Running]) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(Two::prepare(runner)?))
    }
    fn seconds(&self, workload: &dyn Workload, settings: &Settings) -> f64 {
        let together = if workload.shape().is_some() { 1.5 } else { 0.0 };
        workload.seconds(settings) + together
    }
    fn booting(&self, arms: usize) -> f64 {
        SERVING * arms as f64
    }
    /// Before each of the two alone, and before both: two servers, or two tables of device-mapper.
    fn renewing(&self, arm: &Running) -> f64 {
        let writing = 3.0 * arm.rounds().filter(|load| load.writes()).count() as f64;
        match arm.entry.backend.image() {
            Image::Overlay(_) => 0.5 * writing,
            _ if arm.entry.backend.inner().is_snapshot() => 0.2 * writing,
            _ => 0.0,
        }
    }
    /// Each load has one thread.
    fn client(&self, _: Option<f64>, all: Option<f64>) -> (&'static str, Option<f64>) {
        ("the clients", all.map(|all| all / 2.0))
    }
    fn of_one(&self) -> Option<Name> {
        Some(Name::Host)
    }
}

/// The stage, prepared.
#[derive(Debug)]
pub struct Two {
    disks: [PathBuf; 2],
}

impl Two {
    /// Writes both disks.
    pub fn prepare(runner: &mut Runner<'_>) -> Result<Two> {
        Ok(Two { disks: [runner.disk("two-a.raw")?, runner.disk("two-b.raw")?] })
    }
}

impl Prepared for Two {
    /// A block for each arm.
    fn round(&mut self, runner: &mut Runner<'_>, round: u32, order: &[&Running]) -> Result<()> {
        for (position, arm) in (0..).zip(order) {
            let place = |workload| Place { stage: Name::Two, arm, workload, round, position };
            self.disks.iter().try_for_each(|disk| runner.keep_written(disk))?;
            let mut pair = match Pair::start(runner, arm, &self.disks) {
                Ok(pair) => pair,
                Err(Error::Interrupted) => return Err(Error::Interrupted),
                Err(error) => {
                    for workload in arm.rounds() {
                        runner.fail(place(workload), &error)?;
                    }
                    continue;
                }
            };
            let command = pair.served.first().and_then(|one| one.server.as_ref());
            if let Some(command) = command.map(|server| server.command_line.clone()) {
                runner.remember_command(Name::Two, &arm.name, &command)?;
            }
            let settings = runner.plan.settings(round);
            for workload in arm.rounds() {
                let Some(shape) = workload.shape() else { continue };
                runner.sample(place(workload), None, None, |mark| {
                    pair.check()?;
                    measure(shape, round, &mut pair, &settings, mark)
                })?;
            }
            for one in pair.served {
                if let Err(error) = one.end() {
                    runner.trouble(Name::Two, &arm.name, &error);
                }
            }
            self.disks.iter().try_for_each(|disk| settle(disk))?;
        }
        Ok(())
    }
}

/// Where one of the two servers is started.
struct Seat {
    nth: u32,
    disk: PathBuf,
    sockets: PathBuf,
    log: PathBuf,
}

/// A backend, started on both disks.
struct Pair<'a> {
    arm: &'a Running,
    env: &'a Env,
    stop: &'a Stop,
    seats: Vec<Seat>,
    served: Vec<Served>,
}

impl<'a> Pair<'a> {
    fn start(runner: &Runner<'a>, arm: &'a Running, disks: &[PathBuf; 2]) -> Result<Pair<'a>> {
        let mut seats = Vec::new();
        for (nth, disk) in (1..).zip(disks) {
            seats.push(Seat {
                nth,
                disk: disk.clone(),
                sockets: runner.socket_folder(Name::Two, arm, nth)?,
                log: runner.folder.log(Name::Two, &arm.name),
            });
        }
        let (env, stop) = (runner.env, runner.stop);
        let mut pair = Pair { arm, env, stop, seats, served: Vec::new() };
        pair.serve()?;
        Ok(pair)
    }

    fn serve(&mut self) -> Result<()> {
        for seat in &self.seats {
            let disk = guest::fresh(self.env, self.stop, self.arm, &seat.disk, seat.nth)?;
            wait_unlocked(&disk)?;
            self.served.push(self.arm.entry.backend.start(&Context {
                env: self.env,
                disk: &disk,
                sockets: &seat.sockets,
                log: seat.log.clone(),
                stop: self.stop,
            })?);
        }
        Ok(())
    }

    /// Whose CPU time is that of the path, but for the tools that load: these tell their own.
    fn who(&self) -> Who {
        let servers = self.served.iter().filter_map(|one| one.server.as_ref());
        Who { servers: servers.map(Server::pid).collect(), ..Who::default() }
    }

    /// Whether both servers are alive.
    fn check(&mut self) -> Result<()> {
        let mut servers = self.served.iter_mut().filter_map(|one| one.server.as_mut());
        servers.try_for_each(Server::check)
    }

    /// Brings to the device what a page cache holds of the disks.
    fn settle(&self) -> Result<()> {
        for (seat, served) in self.seats.iter().zip(&self.served) {
            // A loop device's own cache is above that of its file.
            if let Access::Block(device) = &served.access {
                settle(device)?;
            }
            settle(&seat.disk)?;
        }
        Ok(())
    }

    /// Brings overlays and snapshots back to their first moment, before a load that writes to them.
    fn refresh(&mut self) -> Result<()> {
        if matches!(self.arm.entry.backend.image(), Image::Overlay(_)) {
            self.served.drain(..).try_for_each(Served::end)?;
            return self.serve();
        }
        let mut volumes = self.served.iter().filter_map(|one| one.volume.as_ref());
        volumes.try_for_each(volume::Mapped::refresh)
    }
}

fn measure(
    shape: Shape,
    round: u32,
    pair: &mut Pair<'_>,
    settings: &Settings,
    mark: &Mark<'_>,
) -> Result<Measured> {
    let depths = shape.depths();
    // Of the last run, from before it starts until it has ended.
    let cost = Cell::new(None);
    let mut run = |which: &[usize], settings: &Settings| -> Result<Vec<Load>> {
        if shape.write {
            pair.refresh()?;
        }
        let jobs: Vec<(&Access, u32)> = which
            .iter()
            .filter_map(|at| Some((&pair.served.get(*at)?.access, [depths.0, depths.1][*at])))
            .collect();
        let by_load = |(access, _): &(&Access, u32)| {
            matches!(access, Access::VhostUser { .. } | Access::Native(_))
        };
        let who = pair.who();
        let (before, began) = (Meter::read(&who, mark.device()), Instant::now());
        let (loads, ramp) = if jobs.iter().all(by_load) {
            let ramp = settings.ramp.max(RAMP);
            (by_clients(shape, &jobs, settings, ramp, pair.env, pair.stop)?, ramp)
        } else {
            (by_fio(shape, &jobs, settings, pair.stop)?, settings.ramp)
        };
        let seconds = began.elapsed().as_secs_f64();
        let spent = Meter::read(&who, mark.device()).since(&before, seconds);
        cost.set(Some((spent, ramp)));
        // What a page cache still holds of one run is not written back at the cost of the next.
        pair.settle()?;
        if loads.len() == which.len() {
            return Ok(loads);
        }
        let found = format!("{} loads of {}", loads.len(), which.len());
        Err(Error::Output { what: "what two loads measured", found })
    };
    let ([first, second], (both, cost)) = two::in_turn(round, |which| {
        let loads = two::long_enough(settings, |settings| run(which, settings))?;
        Ok((loads, cost.take()))
    })?;
    match (&first.0[..], &second.0[..], &both[..]) {
        (&[first], &[second], &[a, b]) => {
            let mut measured = two::measured([first, second], [a, b], shape);
            if let Some((spent, ramp)) = cost {
                two::count(&mut measured, &[a, b], ramp.as_secs_f64());
                mark.account(spent);
            }
            Ok(measured)
        }
        _ => Err(Error::Output { what: "fio's JSON", found: "not two loads".into() }),
    }
}

fn by_fio(
    shape: Shape,
    jobs: &[(&Access, u32)],
    settings: &Settings,
    stop: &Stop,
) -> Result<Vec<Load>> {
    let limit = Duration::from_secs(60) + 2 * (settings.run + settings.ramp);
    let mut command = Command::new("fio");
    for (at, (access, depth)) in jobs.iter().enumerate() {
        // What stands behind --name is that job's, so each has all of it.
        command.arg(format!("--name=load{at}"));
        command.args(two::common_args(shape, settings, settings.ramp.as_secs_f64()));
        command.args(job(access, *depth)?);
    }
    let text = process::run(command, limit, stop)?.stdout;
    Report::parse(&text)?.jobs()?.iter().map(|job| two::load(job, shape.write)).collect()
}

/// One of `ringtap-lab load` for each disk, all at once.
fn by_clients(
    shape: Shape,
    jobs: &[(&Access, u32)],
    settings: &Settings,
    ramp: Duration,
    env: &Env,
    stop: &Stop,
) -> Result<Vec<Load>> {
    let settings = Settings { ramp, ..settings.clone() };
    let limit = Duration::from_secs(60) + 2 * (settings.run + settings.ramp);
    let notice = if jobs.len() > 1 { NOTICE } else { Duration::ZERO };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let begin = (now + notice).as_millis().to_string();
    let run = |access: &Access, depth: u32| {
        let job = Job { random: true, write: shape.write, block: 4096, depth, synced: false };
        let mut command = Command::new(&env.lab);
        match access {
            Access::VhostUser { socket } => command.args(load::args(job, socket, &settings)),
            Access::Native(file) => command.args(load::native_args(job, file, &settings)),
            other => return Err(Error::Plan(format!("ringtap-lab load does not reach {other:?}"))),
        };
        command.args(["--begin-at", &begin]);
        load::timed(&process::run(command, limit, stop)?.stdout)
    };
    let done: Vec<Result<load::Timed>> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            jobs.iter().map(|(access, depth)| scope.spawn(|| run(access, *depth))).collect();
        let lost = |_| Err(Error::Plan("a thread of the lab's panicked".into()));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(lost)).collect()
    });
    let done: Vec<load::Timed> = done.into_iter().collect::<Result<_>>()?;
    load::check_common(&done)?;
    Ok(done.iter().map(|one| one.load).collect())
}

fn job(access: &Access, depth: u32) -> Result<Vec<String>> {
    let mut args = match access {
        Access::File(path) | Access::Block(path) => vec![
            format!("--filename={}", escape(&path.display().to_string())),
            "--ioengine=io_uring".into(),
        ],
        Access::Nbd { uri, .. } => vec!["--ioengine=nbd".into(), format!("--uri={uri}")],
        other => return Err(Error::Plan(format!("fio on the host does not reach {other:?}"))),
    };
    args.push(format!("--iodepth={depth}"));
    Ok(args)
}
