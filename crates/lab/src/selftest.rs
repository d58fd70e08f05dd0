//! `ringtap compare --self-test`: disks whose behaviour is known beforehand are measured as any other; the lab must find
//! what is known, within its own interval. And how often its verdicts are wrong, and how often they see 5 %.
//!
//! The disks are qemu-storage-daemon's: `null-co`, which does nothing, alone and behind a limit of bytes or of requests;
//! nbdkit's `null`, alone and behind its delay; and a file whose server ignores flushes. (`null-co` has a delay of its own,
//! `latency-ns`; through the NBD export of QEMU 7.2 it had no effect.)

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::backend::ringtap::{READY, nbd_access};
use crate::backend::{Access, loopdev::LoopDevice};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::process::{self, Server};
use crate::report::format;
use crate::run::{meter, order, scratch::Scratch};
use crate::sample::{Metric, Unit, Value};
use crate::stats::{FEWEST_ROUNDS, Paired, interval, median, rates, spread};
use crate::stop::Stop;
use crate::workload::job::{Job, Target};
use crate::workload::{Settings, durability, fio};

/// Bytes a second of the limited disk.
const CAP: f64 = 100e6;
/// Nanoseconds that the delayed disk adds.
const DELAY: f64 = 1e6;
/// Requests a second of the disk that the slower one is compared with.
const FULL: f64 = 4000.0;
/// The slower one's part of them.
const SLOWER: f64 = 0.95;
/// How exactly a limit is kept by its server's timers.
const EXACT: f64 = 0.01;

/// One thing that is known, and what was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// What is known.
    pub known: String,
    /// Least and most that the truth may be.
    pub truth: (f64, f64),
    /// What the lab measured.
    pub measured: f64,
    /// Its 95 % interval.
    pub interval: Option<(f64, f64)>,
    /// Whether interval and truth meet.
    pub found: bool,
    /// How the numbers are printed.
    #[serde(skip)]
    unit: Option<Unit>,
}

impl Finding {
    /// Whether the interval of a ratio that is not 1 holds 1, too: a noisy machine found it, and could have found nothing.
    fn is_vague(&self) -> bool {
        let holds = |ends: (f64, f64)| ends.0 <= 1.0 && ends.1 >= 1.0;
        self.unit.is_none() && !holds(self.truth) && self.interval.is_some_and(holds)
    }
}

/// The self-test's outcome.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Rounds.
    pub rounds: u32,
    /// What was known and found.
    pub findings: Vec<Finding>,
    /// What could not be tried, and why.
    pub skipped: Vec<String>,
    /// Standard deviation of the ratio of two equal disks, as a share.
    pub noise: f64,
    /// How often the interval of two equal disks misses 1, with that noise.
    pub false_positives: f64,
    /// How often a disk 5 % slower is told apart, by number of rounds.
    pub power: Vec<(usize, f64)>,
    /// Runs drawn of each truth.
    pub draws: u32,
    /// What the procedures say of drawn runs whose truth is known.
    pub procedures: Vec<Line>,
}

impl Outcome {
    /// Whether everything known was found.
    pub fn all_found(&self) -> bool {
        self.findings.iter().all(|finding| finding.found)
    }
}

/// A disk of the test: its name, its server with arguments, and the job.
struct Arm {
    name: &'static str,
    kit: bool,
    args: Vec<String>,
    job: Job,
    metric: Metric,
}

fn arms() -> Vec<Arm> {
    let null = "driver=null-co,size=1073741824,read-zeroes=on";
    let plain = vec!["--blockdev".to_owned(), format!("{null},node-name=disk")];
    let limited = |limit: String| {
        let mut args = vec!["--object".into(), format!("throttle-group,id=limit,{limit}")];
        args.extend(["--blockdev".into(), format!("{null},node-name=null")]);
        let filter = "driver=throttle,node-name=disk,throttle-group=limit,file=null";
        args.extend(["--blockdev".into(), filter.into()]);
        args
    };
    let small = |depth| Job { random: true, write: false, block: 4096, depth, synced: false };
    let large = Job { random: false, write: true, block: 64 << 10, depth: 8, synced: false };
    let arm = |name, args, job, metric| Arm { name, kit: false, args, job, metric };
    let kit = |name, words: &[&str]| {
        let args = words.iter().map(|word| (*word).to_owned()).collect();
        Arm { name, kit: true, args, job: small(1), metric: Metric::P50 }
    };
    let delay = format!("delay-read={}ms", DELAY / 1e6);
    vec![
        arm("null", plain.clone(), small(1), Metric::P50),
        arm("null again", plain, small(1), Metric::P50),
        kit("prompt", &["null", "size=1G"]),
        kit("delayed", &["--filter=delay", "null", "size=1G", &delay]),
        arm("capped", limited(format!("x-bps-total={CAP}")), large, Metric::Bandwidth),
        arm("full", limited(format!("x-iops-total={FULL}")), small(8), Metric::Iops),
        arm("slower", limited(format!("x-iops-total={}", FULL * SLOWER)), small(8), Metric::Iops),
    ]
}

/// Runs the test with the plan's seed and folder, and draws so many runs of each truth.
pub fn run(plan: &Plan, env: &Env, draws: u32, stop: &Stop) -> Result<Outcome> {
    for (program, package) in [("qemu-storage-daemon", "qemu-system-common"), ("fio", "fio")] {
        if let Some(missing) = env.program(program, package) {
            return Err(Error::Plan(format!("{}: {}", missing.reason, missing.remedy)));
        }
    }
    let rounds = plan.rounds.clamp(FEWEST_ROUNDS as u32, 20);
    let scratch = Scratch::create(&plan.dir, 4 * durability::BYTES)?;
    let mut skipped = Vec::new();
    let mut arms = arms();
    if let Some(missing) = env.program("nbdkit", "nbdkit") {
        arms.retain(|arm| !arm.kit);
        skipped.push(format!("1 ms more: {}; {}", missing.reason, missing.remedy));
    }
    let mut values: Vec<Vec<(u32, Value)>> = vec![Vec::new(); arms.len()];
    let orders = order::balanced(arms.len(), rounds as usize, plan.seed);
    // The limits let a first burst through: it is over before the measured time.
    let settings = Settings {
        size: 1 << 30,
        run: Duration::from_secs_f64(plan.seconds.clamp(0.3, 2.0)),
        ramp: Duration::from_millis(300),
        seed: plan.seed & 0x7fff_ffff,
        capacity: None,
    };
    for (round, order) in (0..).zip(&orders) {
        eprintln!("self-test: round {} of {rounds}", round + 1);
        for &at in order {
            let value = measure(&arms[at], &scratch, &settings, stop)?;
            values[at].push((round, value.into()));
        }
    }
    let of = |name: &str| -> &[(u32, Value)] {
        arms.iter().position(|arm| arm.name == name).map_or(&[], |at| &values[at])
    };
    let mut findings = Vec::new();

    let same =
        Paired::new(of("null"), of("null again"), Metric::P50.better(), plan.seed, &|_| None);
    findings.push(ratio("two equal disks: ratio 1", &same, (1.0, 1.0)));

    let bandwidths: Vec<f64> = of("capped").iter().map(|(_, value)| value.value.ln()).collect();
    let truth = (CAP * (1.0 - EXACT), CAP * (1.0 + EXACT));
    let known = format!("a limit of 100 MB/s (kept within {} %)", EXACT * 100.0);
    findings.push(level(&known, &bandwidths, truth, Unit::BytesPerSecond));

    let late = oversleep();
    let added: Vec<f64> = of("delayed")
        .iter()
        .zip(of("prompt"))
        .map(|((_, delayed), (_, prompt))| (delayed.value - prompt.value).max(1.0).ln())
        .collect();
    let truth = (DELAY, DELAY + 3.0 * late + 0.05 * DELAY);
    let known = format!(
        "1 ms more (timers of this machine are late by {})",
        format::number(late, Unit::Nanoseconds)
    );
    if !added.is_empty() {
        findings.push(level(&known, &added, truth, Unit::Nanoseconds));
    }

    let slower = Paired::new(of("slower"), of("full"), Metric::Iops.better(), plan.seed, &|_| None);
    let truth = (SLOWER * (1.0 - EXACT / 2.0), SLOWER * (1.0 + EXACT / 2.0));
    findings.push(ratio("a disk that is 5 % slower: ratio 0.95", &slower, truth));

    match flushes(env, &scratch, stop)? {
        Ok((honest, lying)) => {
            findings.push(flush(
                "a server that flushes: 1 and more for each fsync",
                honest,
                (durability::DURABLE, f64::MAX),
            ));
            findings.push(flush("a server that ignores flushes: none", lying, (0.0, 0.1)));
        }
        Err(why) => skipped.push(why),
    }
    let noise = spread::deviation(&same.logs);
    let shift = SLOWER.ln();
    Ok(Outcome {
        rounds,
        findings,
        skipped,
        noise,
        false_positives: rates::apart(noise, rounds as usize, 0.0, plan.seed),
        power: [6, 10, 20]
            .into_iter()
            .map(|n| (n, rates::apart(noise, n, shift, plan.seed)))
            .collect(),
        procedures: procedures(draws, plan.seed),
        draws,
    })
}

fn measure(arm: &Arm, scratch: &Scratch, settings: &Settings, stop: &Stop) -> Result<f64> {
    let socket = scratch.socket_folder("self-test")?.join("disk.nbd");
    let mut command = Command::new(if arm.kit { "nbdkit" } else { "qemu-storage-daemon" });
    if arm.kit {
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket);
    }
    command.args(&arm.args);
    if !arm.kit {
        command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}", socket.display()));
        command.args(["--export", "type=nbd,id=export,node-name=disk,name=,writable=on"]);
    }
    let mut server = Server::start(command, &scratch.disks().join("self-test.log"))?;
    server.wait_for_socket(&socket, READY, stop)?;
    let Access::Nbd { uri, .. } = nbd_access(&socket) else {
        return Err(Error::Plan("an NBD export has no address".into()));
    };
    let mut command = Command::new("fio");
    command.args(fio::args(arm.job, &Target::Nbd(uri), settings));
    let output = process::run(command, Duration::from_secs(60), stop)?;
    server.stop()?;
    let measured = fio::parse(&output.stdout, arm.job, settings)?;
    measured.metrics.get(&arm.metric).map(|value| value.value).ok_or_else(|| Error::Output {
        what: "fio's JSON",
        found: format!(
            "no {} of {}: too few I/Os; longer --seconds help",
            arm.metric.title(),
            arm.name
        ),
    })
}

/// Flushes for each fsync through an honest server and through one that ignores them; or why that cannot be tried.
fn flushes(env: &Env, scratch: &Scratch, stop: &Stop) -> Result<Result<(f64, f64), String>> {
    let missing = env.loop_devices().or_else(|| env.program("qemu-nbd", "qemu-utils"));
    if let Some(missing) = missing {
        return Ok(Err(format!("flushes: {}; {}", missing.reason, missing.remedy)));
    }
    let file = scratch.disks().join("flushes.raw");
    std::fs::write(&file, vec![0x5a; durability::BYTES as usize])
        .map_err(Error::file("write", &file))?;
    let device = LoopDevice::attach(&file, false)?;
    let name = device.path().file_name().unwrap_or_default().to_owned();
    let statistics = Path::new("/sys/block").join(name).join("stat");
    let count = || {
        meter::layer_of_file(&statistics).map(|(layer, _)| layer.flushes).ok_or_else(|| {
            Error::Output { what: "a loop device's statistics", found: "they do not read".into() }
        })
    };
    let through = |cache: &str| -> Result<f64> {
        let socket = scratch.socket_folder("self-test")?.join("disk.nbd");
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--shared=0", "--format=raw", "--cache", cache]);
        command.arg(format!("--socket={}", socket.display())).arg(device.path());
        let mut server = Server::start(command, &scratch.disks().join("self-test.log"))?;
        server.wait_for_socket(&socket, READY, stop)?;
        let Access::Nbd { uri, .. } = nbd_access(&socket) else {
            return Err(Error::Plan("an NBD export has no address".into()));
        };
        let before = count()?;
        let mut command = Command::new("fio");
        command.args(durability::args(&Target::Nbd(uri)));
        let output = process::run(command, Duration::from_secs(120), stop)?;
        let writes = durability::writes_of_fio(&output.stdout)?;
        let flushes = count()? - before;
        server.stop()?;
        Ok(flushes / writes)
    };
    let result = through("none").and_then(|honest| Ok((honest, through("unsafe")?)));
    let detached = device.detach();
    let result = result?;
    detached?;
    Ok(Ok(result))
}

fn meets(interval: (f64, f64), truth: (f64, f64)) -> bool {
    interval.0 <= truth.1 && interval.1 >= truth.0
}

fn ratio(known: &str, paired: &Paired, truth: (f64, f64)) -> Finding {
    let interval = paired.interval.map(|i| (i.low, i.high));
    Finding {
        known: known.into(),
        truth,
        measured: paired.ratio.map_or(f64::NAN, |ratio| ratio.number()),
        interval,
        found: interval.is_some_and(|interval| meets(interval, truth)),
        unit: None,
    }
}

/// A level from the logarithms of its rounds.
fn level(known: &str, logs: &[f64], truth: (f64, f64), unit: Unit) -> Finding {
    let interval = interval::sign(logs).map(|i| (i.low, i.high));
    Finding {
        known: known.into(),
        truth,
        measured: median(logs).map_or(f64::NAN, f64::exp),
        interval,
        found: interval.is_some_and(|interval| meets(interval, truth)),
        unit: Some(unit),
    }
}

fn flush(known: &str, measured: f64, truth: (f64, f64)) -> Finding {
    let found = meets((measured, measured), truth);
    Finding { known: known.into(), truth, measured, interval: None, found, unit: None }
}

/// By how many nanoseconds a sleep of 1 ms is late here: the median of some.
fn oversleep() -> f64 {
    let late: Vec<f64> = (0..40)
        .map(|_| {
            let clock = Instant::now();
            std::thread::sleep(Duration::from_millis(1));
            (clock.elapsed().as_secs_f64() * 1e9 - DELAY).max(0.0)
        })
        .collect();
    median(&late).unwrap_or(0.0)
}

/// What each procedure says of runs of one truth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// What is true.
    pub truth: rates::Truth,
    /// What is said, in the order of [`rates::Procedure::ALL`].
    pub said: Vec<rates::Said>,
}

/// Draws runs of every truth and asks every procedure.
pub fn procedures(draws: u32, seed: u64) -> Vec<Line> {
    eprintln!("self-test: drawing {draws} runs of each truth");
    let line = |truth| Line {
        truth,
        said: rates::Procedure::ALL.map(|one| rates::said(one, truth, draws, seed)).to_vec(),
    };
    rates::truths().into_iter().map(line).collect()
}

/// The table of the procedures, as docs/lab.md has it.
pub fn table(lines: &[Line]) -> String {
    use std::fmt::Write;
    let mut text = String::from(
        "| true ratio | sd | stalls | 6 rounds, as before: seen | equal | wrong | 12 rounds in 6 boots: seen | equal | wrong \
         | 12 rounds in 12 boots: seen | equal | wrong |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for line in lines {
        let truth = line.truth;
        let stalls = if truth.stalls { "8 %" } else { "none" };
        let _ = write!(text, "| {} | {} | {stalls} |", truth.ratio, truth.spread);
        for said in &line.said {
            let percent = |share: f64| format!("{:.0} %", share * 100.0);
            let (seen, same) = (percent(said.faster), percent(said.same));
            let _ = write!(text, " {seen} | {same} | {} |", percent(said.wrong));
        }
        text.push('\n');
    }
    text
}

/// The outcome for people.
pub fn text(outcome: &Outcome) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    let _ = writeln!(text, "Known beforehand, {} rounds:", outcome.rounds);
    for finding in &outcome.findings {
        let number = |value: f64| match finding.unit {
            Some(unit) => format::number(value, unit),
            None => format!("{value:.3}"),
        };
        let mark = if finding.found { "found " } else { "MISSED" };
        let interval = finding.interval.map_or_else(String::new, |(low, high)| {
            format!(", 95 %: {} to {}", number(low), number(high))
        });
        let doubt = if finding.is_vague() { "; too wide to tell it from 1" } else { "" };
        let _ = writeln!(
            text,
            "  {mark}  {}: measured {}{interval}{doubt}",
            finding.known,
            number(finding.measured)
        );
    }
    for skipped in &outcome.skipped {
        let _ = writeln!(text, "  not tried: {skipped}");
    }
    let percent = |share: f64| format!("{} %", format::digits(share * 100.0));
    let _ = writeln!(
        text,
        "Noise of a round's ratio: {}. With it, two equal disks are told apart wrongly in {} of {} runs of {} rounds, one \
         comparison at a time (5 % are allowed).",
        percent(outcome.noise),
        percent(outcome.false_positives),
        rates::DRAWS,
        outcome.rounds
    );
    let power: Vec<String> = outcome
        .power
        .iter()
        .map(|(rounds, share)| format!("{} with {rounds} rounds", percent(*share)))
        .collect();
    let _ = writeln!(text, "A disk that is 5 % slower is told apart in {}.", power.join(", "));
    let _ = writeln!(
        text,
        "Runs whose truth is known, {} of each, twelve comparisons a run: how often an arm of that ratio is called faster or no \
         different, and the share of runs in which anything false is said (5 % are allowed):\n{}",
        outcome.draws,
        table(&outcome.procedures)
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What it prints is a table of docs/lab.md: its head, and a line for each truth with as many cells.
    #[test]
    fn the_table_of_the_procedures_stands_in_the_docs() {
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/lab.md");
        let docs = std::fs::read_to_string(docs).unwrap();
        let lines: Vec<Line> =
            rates::truths().into_iter().map(|truth| Line { truth, said: vec![] }).collect();
        let table = table(&lines);
        let (head, rows) = table.split_at(table.match_indices('\n').nth(1).unwrap().0 + 1);
        let below = docs.split_once(head).expect("docs/lab.md has the head of the table").1;
        let printed: Vec<&str> = below.lines().take_while(|line| line.starts_with('|')).collect();
        assert_eq!(printed.len(), lines.len());
        let cells = head.lines().next().unwrap().matches('|').count();
        for (row, printed) in rows.lines().zip(printed) {
            assert!(printed.starts_with(row), "{printed} is no line of {row}");
            assert_eq!(printed.matches('|').count(), cells, "{printed}");
        }
    }

    #[test]
    fn a_truth_outside_the_interval_is_missed() {
        let logs: Vec<f64> =
            [99.0f64, 100.0, 101.0, 100.5, 99.5, 100.2].iter().map(|v| v.ln()).collect();
        assert!(level("x", &logs, (100.0, 100.0), Unit::PerSecond).found);
        assert!(!level("x", &logs, (120.0, 121.0), Unit::PerSecond).found);
        assert!(
            !level("x", &logs[..3], (100.0, 100.0), Unit::PerSecond).found,
            "no interval, no finding"
        );
        assert!(!flush("x", 0.5, (0.9, f64::MAX)).found);
    }

    #[test]
    fn what_a_noisy_machine_finds_is_marked() {
        let paired = |spread: f64| {
            let value = |at: f64| Value::from(0.95 * (1.0 + spread * (at - 2.5)));
            let ours: Vec<(u32, Value)> = (0..6).map(|n| (n, value(f64::from(n)))).collect();
            let theirs: Vec<(u32, Value)> = (0..6).map(|n| (n, 1.0.into())).collect();
            Paired::new(&ours, &theirs, Metric::Iops.better(), 1, &|_| None)
        };
        let (quiet, loud) =
            (ratio("x", &paired(0.001), (0.94, 0.96)), ratio("x", &paired(0.1), (0.94, 0.96)));
        assert!(quiet.found && !quiet.is_vague());
        assert!(loud.found && loud.is_vague());
    }
}
