//! Two guests of User-Mode Linux at once, each with a disk of every arm, all on the same device of this machine. Both
//! wait for one moment and then load their disk of the arm; each logs what it got in steps of 100 ms by this machine's
//! clock, and only the time that both logs cover counts.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ringtap_guest::Guest as Machine;

use super::boot::Attached;
use super::guest::{self, Part};
use super::inside::line;
use crate::error::{Error, Result};
use crate::process;
use crate::run::{Place, Runner, Running};
use crate::sample::Stage;
use crate::stop::Stop;
use crate::workload::two::{self, LEAST_OVERLAP, Load, Shape};
use crate::workload::{Kind, Measured, Settings};

const STAGE: Stage = Stage::TwoGuests;
/// How long before the common start the commands are sent.
const NOTICE: Duration = Duration::from_millis(1000);
/// The two do not begin at the same moment, however they are told: so much longer each runs than the plan says.
const LONGER: Duration = Duration::from_millis(1000);

/// A load under way, and when it must have ended.
type Sent<'a> = (ringtap_guest::Job<'a>, Instant);

/// The stage, prepared.
#[derive(Debug)]
pub struct TwoGuests {
    disks: Vec<(String, [PathBuf; 2])>,
}

impl TwoGuests {
    /// Writes two disks for each arm.
    pub fn prepare(runner: &mut Runner<'_>, arms: &[Running]) -> Result<TwoGuests> {
        let mut disks = Vec::new();
        for arm in arms {
            let make = |which: &str| {
                let name = format!("{STAGE}-{}-{which}", arm.name.replace('#', "-"));
                guest::make_disk(runner, arm, &name, runner.plan.size)
            };
            disks.push((arm.name.clone(), [make("a")?, make("b")?]));
        }
        Ok(TwoGuests { disks })
    }

    /// One round: servers, two boots, every arm, all gone again.
    pub fn round(&mut self, runner: &mut Runner<'_>, round: u32, order: &[&Running]) -> Result<()> {
        runner.progress.say(&format!(
            "round {}/{}  {STAGE}  booting",
            round + 1,
            runner.plan.rounds
        ));
        let mut sides: [Vec<Attached<'_>>; 2] = [Vec::new(), Vec::new()];
        for (position, arm) in (0..).zip(order) {
            let disks = self.disks.iter().find(|(name, _)| *name == arm.name);
            let Some((_, disks)) = disks else { continue };
            for ((side, disk), nth) in sides.iter_mut().zip(disks).zip(1..) {
                let part = Part { nth, workloads: arm.rounds().collect() };
                let started = guest::attach(runner, STAGE, arm, round, position, disk, part)?;
                match started {
                    Some(one) => side.push(one),
                    // Recorded already; its other half has no use.
                    None => break,
                }
            }
        }
        let [mut first, mut second] = sides;
        keep_pairs(runner, &mut first, &mut second);
        let Some(one) = guest::boot_with_the_living(runner, STAGE, &mut first, round)? else {
            second.into_iter().for_each(|side| guest::end(runner, STAGE, side));
            return Ok(());
        };
        let Some(other) = guest::boot_with_the_living(runner, STAGE, &mut second, round)? else {
            guest::switch_off(runner, STAGE, one);
            first.into_iter().for_each(|side| guest::end(runner, STAGE, side));
            return Ok(());
        };
        let mut settings = runner.plan.settings(round);
        settings.run += LONGER;
        for a in &mut first {
            let Some(b) = second.iter_mut().find(|b| b.arm.name == a.arm.name) else { continue };
            for workload in a.arm.rounds() {
                let Kind::Two(shape) = workload.kind else { continue };
                let place =
                    Place { stage: STAGE, arm: a.arm, workload, round, position: a.position };
                let devices = [a.device.clone(), b.device.clone()];
                let alive: Result<()> = [&mut *a, &mut *b]
                    .into_iter()
                    .filter_map(|side| side.served.server.as_mut())
                    .try_for_each(process::Server::check);
                let (machines, stop) = ([&one, &other], runner.stop);
                runner.sample(place, None, None, |_| {
                    alive?;
                    let [Ok(x), Ok(y)] = devices else {
                        return Err(Error::Guest(format!(
                            "no disk in one of the guests: {devices:?}"
                        )));
                    };
                    measure(shape, &machines, [&x, &y], &settings, stop, || {
                        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                        Ok(now + NOTICE)
                    })
                })?;
            }
        }
        guest::switch_off(runner, STAGE, one);
        guest::switch_off(runner, STAGE, other);
        first.into_iter().chain(second).for_each(|side| guest::end(runner, STAGE, side));
        Ok(())
    }
}

/// Ends what has no counterpart.
fn keep_pairs<'a>(
    runner: &mut Runner<'_>,
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
        gone.into_iter().for_each(|one| guest::end(runner, STAGE, one));
    }
}

/// One load alone, then both at once. `start` tells when the two shall begin, by the clock that the guests share.
pub fn measure(
    shape: Shape,
    machines: &[&Machine; 2],
    devices: [&str; 2],
    settings: &Settings,
    stop: &Stop,
    start: impl FnOnce() -> Result<Duration>,
) -> Result<Measured> {
    let depths = shape.depths();
    let [one, other] = machines;
    let (alone, _) = finish(shape, send(shape, one, devices[0], depths.0, settings, 0)?, stop)?;
    let at = start_together(shape, [one, other], devices, depths, settings, start()?)?;
    let [first, second] = at;
    let (mut first, log_a) = finish(shape, first, stop)?;
    let (mut second, log_b) = finish(shape, second, stop)?;
    let Some((a, b, common)) = two::overlap(&log_a, &log_b) else {
        return Err(Error::Guest("the two loads did not run at the same time".into()));
    };
    if common < LEAST_OVERLAP {
        return Err(Error::Guest(format!(
            "the two loads had only {:.0} % of their time in common: longer --seconds help",
            common * 100.0
        )));
    }
    (first.iops, second.iops) = (a, b);
    let mut measured = two::measured(alone, first, second, shape);
    measured.note = Some(format!(
        "two guests; only common time counts (at least {:.0} % of each), p99 is of the whole run",
        LEAST_OVERLAP * 100.0
    ));
    Ok(measured)
}

fn start_together<'a>(
    shape: Shape,
    machines: [&'a Machine; 2],
    devices: [&str; 2],
    depths: (u32, u32),
    settings: &Settings,
    at: Duration,
) -> Result<[Sent<'a>; 2]> {
    let at = u64::try_from(at.as_millis()).unwrap_or(0);
    Ok([
        send(shape, machines[0], devices[0], depths.0, settings, at)?,
        send(shape, machines[1], devices[1], depths.1, settings, at)?,
    ])
}

/// Has a guest wait until `at` (milliseconds since 1970, of the clock that both share) and then run fio.
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
    // fio is loaded first and waits then: loading it takes a busy machine longer than anything else.
    if at > 0 {
        words.push("--exec_prerun=sh /tmp/wait".into());
    }
    let script = format!(
        "rm -f /tmp/two*\ncat >/tmp/wait <<'END'\nleft=$(({at} - $(date +%s%3N)))\n\
         [ $left -le 0 ] || sleep $((left / 1000)).$(printf %03d $((left % 1000)))\nEND\n\
         cd /tmp\n{} >/tmp/two.json || {{ cat /tmp/two.json; exit 1; }}\n\
         cat /tmp/two.json\necho ====\ncat /tmp/two_iops.1.log",
        line("fio", &words)
    );
    let job = machine.start(&script).map_err(|error| Error::Guest(error.to_string()))?;
    let limit = Duration::from_secs(60) + 3 * (settings.run + settings.ramp);
    Ok((job, Instant::now() + limit))
}

fn finish(shape: Shape, (job, until): Sent<'_>, stop: &Stop) -> Result<(Load, two::Log)> {
    while !job.is_done() && Instant::now() < until {
        stop.check()?;
        std::thread::sleep(Duration::from_millis(5));
    }
    let left = until.saturating_duration_since(Instant::now()) + Duration::from_secs(1);
    let output = job
        .wait(left)
        .and_then(ringtap_guest::Output::success)
        .map_err(|error| Error::Guest(error.to_string()))?;
    let wrong = || Error::Output { what: "fio's log", found: "nothing behind its JSON".into() };
    let (json, log) = output.stdout.split_once("\n====\n").ok_or_else(wrong)?;
    let jobs = two::jobs(json)?;
    let load = two::load(jobs.first().ok_or_else(wrong)?, shape.write)?;
    Ok((load, two::log(log)?))
}
