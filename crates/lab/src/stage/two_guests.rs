//! The stages `two-guests` (User-Mode Linux) and `two-vms` (QEMU): two guests at once, each with a disk of every arm, all
//! on the same device of this machine. Both wait for one moment and then load their disk of the arm; each logs what it
//! got in steps of 100 ms by one clock, and only the time that both logs cover counts.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ringtap_guest::Guest as Machine;
use ringtap_guest::fio::Report;

use super::boot::Attached;
use super::guest::{self, Part, remember_accelerator};
use super::inside::{Shell, fio_line};
use super::kind::{Prepared, Stage, TRANSLATED, Words, of_itself};
use super::pair::Pair;
use super::two_bonnie;
use crate::backend::Entry;
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::process;
use crate::run::mark::Mark;
use crate::run::meter::Who;
use crate::run::runner::{Place, Runner};
use crate::run::running::Running;
use crate::run::track::Track;
use crate::sample::Stage as Name;
use crate::stop::Stop;
use crate::workload::two::{self, LEAST_OVERLAP, Load, Shape};
use crate::workload::{Client, Measured, Settings, Workload};

/// How long before the common start the commands are sent.
const NOTICE: Duration = Duration::from_millis(1000);
/// A translated processor takes long to load fio.
const TRANSLATED_NOTICE: Duration = Duration::from_secs(4);
/// The two do not begin at the same moment, however they are told: so much longer each runs than the plan says.
const LONGER: Duration = Duration::from_millis(1000);
/// Where each has a processor that is translated.
const TRANSLATED_LONGER: Duration = Duration::from_millis(2000);

/// A load under way, and when it must have ended.
type Sent<'a> = (ringtap_guest::Job<'a>, Instant);

/// The stages of this file.
pub const STAGES: &[&dyn Stage] = &[&InTwo { pc: false }, &InTwo { pc: true }];

/// The stages `two-guests` and `two-vms`.
pub struct InTwo {
    /// Virtual PCs, or User-Mode Linux.
    pub pc: bool,
}

impl Stage for InTwo {
    fn name(&self) -> Name {
        if self.pc { Name::TwoVms } else { Name::TwoGuests }
    }
    fn words(&self) -> Words {
        match self.pc {
            true => Words {
                heading: "Two virtual machines at once",
                what: "two virtual PCs in QEMU at once, each with a disk of its own, both on one device",
                behind: " (two VMs)",
                page_cache: "the host's",
                place: 4,
            },
            false => Words {
                heading: "Two User-Mode Linux guests at once",
                what: "two guests of User-Mode Linux at once, each with a disk of its own, both on one device",
                behind: " (two UML guests)",
                page_cache: "the host's",
                place: 5,
            },
        }
    }
    fn missing(&self, entry: &Entry, env: &Env) -> Option<Missing> {
        guest::unbootable(self.pc, entry, env)
    }
    fn missing_workload(
        &self,
        entry: &Entry,
        workload: &dyn Workload,
        env: &Env,
    ) -> Option<Missing> {
        of_itself(entry, workload, env)
    }
    fn room(&self, plan: &Plan, arms: &[Running]) -> u64 {
        2 * arms.iter().map(|arm| guest::room(plan.size, arm)).sum::<u64>()
    }
    fn prepare(&self, runner: &mut Runner<'_>, arms: &[Running]) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(TwoGuests::prepare(runner, self.name(), arms)?))
    }
    /// The two wait for a common moment.
    fn seconds(&self, workload: &dyn Workload, settings: &Settings) -> f64 {
        let work = workload.seconds(settings);
        match (workload.client(), self.pc) {
            (Client::Two, false) => work + 6.0,
            (Client::Two, true) => work + 14.0,
            (Client::TwoFiles, false) => work + 3.0,
            (Client::TwoFiles, true) => work * TRANSLATED + 12.0,
            _ => work,
        }
    }
    fn booting(&self, arms: usize) -> f64 {
        if self.pc { 24.0 + 1.0 * arms as f64 } else { 8.0 }
    }
    fn renewing(&self, _: &Running) -> f64 {
        0.0
    }
    fn client(&self, thread: Option<f64>, all: Option<f64>) -> (&'static str, Option<f64>) {
        match (self.pc, thread) {
            (true, Some(thread)) => ("one processor of a guest", Some(thread)),
            (true, None) => ("the client", all),
            // Each has one processor.
            (false, _) => ("the guests' processors", all.map(|all| all / 2.0)),
        }
    }
    fn of_one(&self) -> Option<Name> {
        Some(if self.pc { Name::Vm } else { Name::Guest })
    }
}

/// The stage, prepared.
#[derive(Debug)]
pub struct TwoGuests {
    stage: Name,
    disks: Vec<(String, [PathBuf; 2])>,
}

impl TwoGuests {
    /// Writes two disks for each arm.
    pub fn prepare(runner: &mut Runner<'_>, stage: Name, arms: &[Running]) -> Result<TwoGuests> {
        let mut disks = Vec::new();
        for arm in arms.iter().filter(|arm| arm.rounds().next().is_some()) {
            let make = |which: &str| {
                let name = format!("{stage}-{}-{which}", arm.name.replace('#', "-"));
                guest::make_disk(runner, arm, &name, runner.plan.size)
            };
            disks.push((arm.name.clone(), [make("a")?, make("b")?]));
        }
        let one = guest::describe(runner, stage)?;
        let words = format!(
            "two guests at once, each with disks of its own, all on one device; each: {one}"
        );
        runner.record.stages.push((stage, words));
        runner.folder.write_record(&runner.record)?;
        Ok(TwoGuests { stage, disks })
    }
}

impl Prepared for TwoGuests {
    /// One round: servers, two boots, every arm, all gone again.
    fn round(&mut self, runner: &mut Runner<'_>, round: u32, order: &[&Running]) -> Result<()> {
        let stage = self.stage;
        if let Some(error) = runner.unbootable(stage) {
            return (0..).zip(order).try_for_each(|(position, arm)| {
                guest::fail_all(runner, stage, arm, round, position, &error)
            });
        }
        runner.progress.say(&format!(
            "round {}/{}  {stage}  booting",
            round + 1,
            runner.plan.rounds
        ));
        let mut sides: [Vec<Attached<'_>>; 2] = [Vec::new(), Vec::new()];
        for (position, arm) in (0..).zip(order) {
            let disks = self.disks.iter().find(|(name, _)| *name == arm.name);
            let Some((_, disks)) = disks else { continue };
            for ((side, disk), nth) in sides.iter_mut().zip(disks).zip(1..) {
                let part = Part { nth, workloads: arm.rounds().collect() };
                let started = guest::attach(runner, stage, arm, round, position, disk, part)?;
                match started {
                    Some(one) => side.push(one),
                    // Recorded already; its other half has no use.
                    None => break,
                }
            }
        }
        let [mut first, mut second] = sides;
        keep_pairs(runner, stage, &mut first, &mut second);
        let Some(one) = guest::boot_with_the_living(runner, stage, &mut first, round)? else {
            second.into_iter().for_each(|side| guest::end(runner, stage, side));
            return Ok(());
        };
        let Some(other) = guest::boot_with_the_living(runner, stage, &mut second, round)? else {
            guest::switch_off(runner, stage, one);
            first.into_iter().for_each(|side| guest::end(runner, stage, side));
            return Ok(());
        };
        remember_accelerator(runner, stage, &one)?;
        let mut settings = runner.plan.settings(round);
        let (notice, longer) = match one.accelerator() {
            "tcg" => (TRANSLATED_NOTICE, TRANSLATED_LONGER),
            _ => (NOTICE, LONGER),
        };
        settings.run += longer;
        // User-Mode Linux has this machine's clock.
        let ahead = |machine: &Machine| match stage {
            Name::TwoVms => Shell::new(machine, runner.stop).clock_ahead(),
            _ => Ok(0.0),
        };
        let clocks = ahead(&one).and_then(|first| Ok([first, ahead(&other)?]));
        if let Err(Error::Interrupted) = clocks {
            return Err(Error::Interrupted);
        }
        for a in &mut first {
            let Some(b) = second.iter_mut().find(|b| b.arm.name == a.arm.name) else { continue };
            for workload in a.arm.rounds() {
                if !workload.is_pair() {
                    continue;
                }
                let place = Place { stage, arm: a.arm, workload, round, position: a.position };
                let devices = [a.device.clone(), b.device.clone()];
                let alive: Result<()> = [&mut *a, &mut *b]
                    .into_iter()
                    .filter_map(|side| side.served.server.as_mut())
                    .try_for_each(process::Server::check);
                let servers = [&*a, &*b].into_iter().filter_map(|side| side.served.server.as_ref());
                let who = Who {
                    servers: servers.map(process::Server::pid).collect(),
                    clients: vec![one.pid(), other.pid()],
                };
                let (machines, stop) = ([&one, &other], runner.stop);
                let ahead = match &clocks {
                    Ok(ahead) => Ok(*ahead),
                    Err(error) => Err(Error::Guest(error.to_string())),
                };
                runner.sample(place, None, None, |mark| {
                    alive?;
                    let [Ok(x), Ok(y)] = devices else {
                        return Err(Error::Guest(format!(
                            "no disk in one of the guests: {devices:?}"
                        )));
                    };
                    let devices = [x.as_str(), &y];
                    let ready = &|| Ok(());
                    let pair = Pair { machines, devices, who, ahead: ahead?, notice, ready };
                    match workload.shape() {
                        Some(shape) => measure(shape, round, &pair, &settings, stop, mark),
                        None => two_bonnie::measure(round, &pair, &settings, stop),
                    }
                })?;
            }
        }
        guest::switch_off(runner, stage, one);
        guest::switch_off(runner, stage, other);
        first.into_iter().chain(second).for_each(|side| guest::end(runner, stage, side));
        Ok(())
    }
}

/// Ends what has no counterpart.
fn keep_pairs<'a>(
    runner: &mut Runner<'_>,
    stage: Name,
    first: &mut Vec<Attached<'a>>,
    second: &mut Vec<Attached<'a>>,
) {
    let names = |side: &[Attached<'_>]| -> Vec<String> {
        side.iter().map(|one| one.arm.name.clone()).collect()
    };
    let (ours, theirs) = (names(first), names(second));
    for (side, other) in [(&mut *first, &theirs), (&mut *second, &ours)] {
        let (kept, gone): (Vec<_>, Vec<_>) =
            std::mem::take(side).into_iter().partition(|one| other.contains(&one.arm.name));
        *side = kept;
        gone.into_iter().for_each(|one| guest::end(runner, stage, one));
    }
}

/// Each load alone, and both at once.
pub fn measure(
    shape: Shape,
    round: u32,
    pair: &Pair<'_>,
    settings: &Settings,
    stop: &Stop,
    mark: &Mark<'_>,
) -> Result<Measured> {
    let depths = shape.depths();
    let [one, other] = pair.machines;
    let alone = |which: usize, settings: &Settings| {
        (pair.ready)()?;
        let (machine, device, depth) =
            [(one, pair.devices[0], depths.0), (other, pair.devices[1], depths.1)][which];
        let sent = send(shape, machine, device, depth, settings, 0)?;
        Ok(vec![finish(shape, sent, stop)?.0])
    };
    // What was spent while both ran, and the I/Os of that time.
    let mut cost = None;
    let mut both = |settings: &Settings| {
        (pair.ready)()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at = (now + pair.notice).as_secs_f64() * 1e3;
        let on = |ahead: f64| (at + ahead).max(0.0) as u64;
        let [first, second] = [
            send(shape, one, pair.devices[0], depths.0, settings, on(pair.ahead[0]))?,
            send(shape, other, pair.devices[1], depths.1, settings, on(pair.ahead[1]))?,
        ];
        let track = Track::start(pair.who.clone(), mark.device());
        let (mut first, log_a) = finish(shape, first, stop)?;
        let (mut second, log_b) = finish(shape, second, stop)?;
        let readings = track.end();
        let same = |log: two::Log, ahead: f64| -> two::Log {
            log.into_iter().map(|(time, value)| (time - ahead, value)).collect()
        };
        let (log_a, log_b) = (same(log_a, pair.ahead[0]), same(log_b, pair.ahead[1]));
        let Some(common) = two::overlap(&log_a, &log_b) else {
            return Err(Error::Guest("the two loads did not run at the same time".into()));
        };
        if common.share < LEAST_OVERLAP {
            return Err(Error::Guest(format!(
                "the two loads had only {:.0} % of their time in common: longer --seconds help",
                common.share * 100.0
            )));
        }
        (first.iops, second.iops) = common.rates;
        cost = readings.within(common.span.0, common.span.1).and_then(|(spent, from, to)| {
            let rate = two::mean(&log_a, from, to)? + two::mean(&log_b, from, to)?;
            Some((spent, rate * (to - from) / 1e3))
        });
        Ok(vec![first, second])
    };
    let (alone, both) = two::in_turn(round, |which| {
        two::long_enough(settings, |settings| match which {
            &[which] => alone(which, settings),
            _ => both(settings),
        })
    })?;
    let ([&[a], &[b]], &[first, second]) = ([&alone[0][..], &alone[1]], &both[..]) else {
        return Err(Error::Output { what: "fio's JSON", found: "not two loads".into() });
    };
    let mut measured = two::measured([a, b], [first, second], shape);
    let mut note = format!(
        "two guests; only common time counts (at least {:.0} % of each), p99 is of the whole run",
        LEAST_OVERLAP * 100.0
    );
    if let Some((spent, ios)) = cost {
        (measured.ios, measured.asked) = (Some(ios), Some(ios * two::BLOCK));
        mark.account(spent);
    } else {
        note.push_str("; too busy to count what it cost");
    }
    measured.note = Some(note);
    Ok(measured)
}

/// Has a guest wait until `at` (milliseconds since 1970, of its own clock) and then run fio.
fn send<'a>(
    shape: Shape,
    machine: &'a Machine,
    device: &str,
    depth: u32,
    settings: &Settings,
    at: u64,
) -> Result<Sent<'a>> {
    let mut words = vec!["--name=load".to_owned()];
    words.extend(two::common_args(shape, settings, settings.ramp.as_secs_f64()));
    words.extend([
        format!("--filename={device}"),
        "--ioengine=io_uring".into(),
        format!("--iodepth={depth}"),
        "--write_iops_log=/tmp/two".into(),
        format!("--log_avg_msec={}", two::STEP),
        "--log_unix_epoch=1".into(),
    ]);
    // fio is started first and waits then: that takes a busy machine longer than anything else.
    if at > 0 {
        words.push("--exec_prerun=sh /tmp/wait".into());
    }
    // What a page cache still holds of one run is not written back at the cost of the next.
    let script = format!(
        "rm -f /tmp/two*\ncat >/tmp/wait <<'END'\nleft=$(({at} - $(date +%s%3N)))\n\
         [ $left -le 0 ] || sleep $((left / 1000)).$(printf %03d $((left % 1000)))\nEND\n\
         cd /tmp\n{} >/tmp/two.json || {{ cat /tmp/two.json; exit 1; }}\n\
         cat /tmp/two.json\necho ====\ncat /tmp/two_iops.1.log\nsync",
        fio_line(&words)
    );
    let job = machine.start(&script)?;
    let limit = Duration::from_secs(60) + 3 * (settings.run + settings.ramp);
    Ok((job, Instant::now() + limit))
}

fn finish(shape: Shape, (job, until): Sent<'_>, stop: &Stop) -> Result<(Load, two::Log)> {
    while !job.is_done() && Instant::now() < until {
        stop.check()?;
        std::thread::sleep(Duration::from_millis(5));
    }
    let left = until.saturating_duration_since(Instant::now()) + Duration::from_secs(1);
    let output = job.wait(left).and_then(ringtap_guest::Output::success)?;
    let wrong = || Error::Output { what: "fio's log", found: "nothing behind its JSON".into() };
    let (json, log) = output.stdout.split_once("\n====\n").ok_or_else(wrong)?;
    let load = two::load(Report::parse(json)?.first()?, shape.write)?;
    Ok((load, two::log(log)?))
}
