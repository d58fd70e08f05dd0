//! What is measured of the builds: each suite has lines, which are named as they are asked for and told.

use super::{Builds, Missing, Point, renamed};
use crate::arms::Arm;
use crate::client::Client;
use crate::copies::{self, Case, Sources, Way};
use crate::experiment::{Experiment, Results, Sample, order};
use crate::formats::{Formats, Scenario};
use crate::image::{Fs, Images};
use crate::lines::{self, Line};
use crate::options::Options;
use crate::{devices, idle, interrupt, nbd, vhost_user};
use anyhow::{Context, Result};
use clap::ValueEnum;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Bytes of a guest's disk: one for each build, in memory.
const GUEST_DISK: u64 = 64 << 20;
/// Bytes of a disk that nobody uses.
const IDLE_DISK: u64 = 64 << 20;
/// An idle server is watched for so many times as long as a load takes.
const IDLE_TIMES: f64 = 10.0;
/// Added to the CPU milliseconds per minute of an idle server: one or two wake-ups while it is watched are no more than a part of
/// it, and one that uses none at all can be divided by.
const IDLE_CPU: f64 = 10.0;
/// The guest's kernel for ublk, at least.
const UBLK_KERNEL: [u64; 2] = [6, 5];

/// Lines that are measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// A raw image over vhost-user.
    VhostUser,
    /// The same over NBD.
    Nbd,
    /// A full qcow2 over vhost-user.
    Allocated,
    /// An empty one.
    Fresh,
    /// A fresh overlay.
    Overlay,
    /// Copies from format to format.
    Convert,
    /// A raw image by ublk, in a guest.
    Ublk,
    /// Resident memory of a server of a full qcow2 under load.
    Memory,
    /// CPU and resident memory of a server of a disk that nobody uses.
    Idle,
}

impl Suite {
    /// What its lines begin with.
    pub fn name(self) -> &'static str {
        match self {
            Suite::VhostUser => "vhost-user",
            Suite::Nbd => "nbd",
            Suite::Allocated => "allocated",
            Suite::Fresh => "fresh",
            Suite::Overlay => "overlay",
            Suite::Convert => "convert",
            Suite::Ublk => "ublk",
            Suite::Memory => "memory",
            Suite::Idle => "idle",
        }
    }

    /// What lies under the servers, of what was asked for; none where that is always the same.
    pub fn places(self, fs: &[Fs]) -> Vec<Option<Fs>> {
        match self {
            Suite::Ublk | Suite::Idle => vec![None],
            _ => {
                let all = fs.iter().copied();
                // A no-op device has no format, and nothing to be copied.
                let any = matches!(self, Suite::VhostUser | Suite::Nbd);
                all.filter(|fs| any || *fs != Fs::Null).map(Some).collect()
            }
        }
    }

    fn workloads(self) -> Vec<Line> {
        match self {
            Suite::Fresh => lines::first_writes(),
            Suite::Overlay => lines::overlay(),
            Suite::Memory => lines::random_reads(),
            Suite::Ublk => lines::usual().into_iter().filter(Line::small).collect(),
            _ => lines::usual(),
        }
    }

    /// The names of its lines.
    pub fn lines(self, place: Option<Fs>) -> Vec<String> {
        let whole = |name: &str| self.line(place, name);
        match (self, place) {
            (Suite::Convert, Some(fs)) => {
                Case::all(fs).iter().map(|case| whole(&case.name)).collect()
            }
            (Suite::Idle, _) => ["cpu", "memory"].map(whole).into(),
            _ => self.workloads().iter().map(|line| whole(&line.name)).collect(),
        }
    }

    fn line(self, place: Option<Fs>, name: &str) -> String {
        match place {
            Some(fs) => format!("{} {} {name}", self.name(), fs.name()),
            None => format!("{} {name}", self.name()),
        }
    }
}

/// The builds, and how they are measured.
pub struct Guard<'a> {
    /// The links.
    pub builds: &'a Builds,
    /// The command line.
    pub options: &'a Options,
    /// Only lines whose name contains one of these.
    pub wanted: &'a [String],
}

/// What a suite gave.
type Found = (Vec<Point>, Vec<Missing>);

impl Guard<'_> {
    /// The lines of a suite that are wanted.
    pub fn lines(&self, suite: Suite, place: Option<Fs>) -> Vec<String> {
        let all = suite.lines(place).into_iter();
        let only = |name: &str| Options::wanted(&self.options.only, name);
        all.filter(|name| Options::wanted(self.wanted, name) && only(name)).collect()
    }

    /// Measures them.
    pub fn measure(&self, suite: Suite, place: Option<Fs>) -> Result<Found> {
        let names = self.lines(suite, place);
        let mut workloads = suite.workloads();
        workloads.retain(|line| names.contains(&suite.line(place, &line.name)));
        match (suite, place) {
            (Suite::Convert, Some(fs)) => self.copies(suite, fs, &names),
            (Suite::Ublk, _) => self.devices(suite, &workloads),
            (_, Some(fs)) => self.served(suite, fs, &workloads),
            (_, None) => self.idle(suite, &names),
        }
    }

    /// Servers on a socket of this host.
    fn served(&self, suite: Suite, fs: Fs, workloads: &[Line]) -> Result<Found> {
        let run = folder()?;
        let options = self.options;
        let with_cached = suite == Suite::Nbd;
        let images = Images::write(fs, &options.disk(), options.size, with_cached)?;
        let mut arms = Vec::new();
        for (name, program) in self.builds.named() {
            let options = Options { ringtap: Some(program.to_owned()), ..options.clone() };
            let made = made(suite, fs, &options, &images, run.path())?;
            let ours = if suite == Suite::Nbd { nbd::DIRECT } else { vhost_user::RINGTAP };
            arms.extend(renamed(made, ours, &name));
        }
        let client = if suite == Suite::Nbd { Client::FioNbd } else { Client::Blkio };
        let experiment = Experiment {
            arms: &arms,
            lines: workloads,
            client: &client,
            rounds: options.rounds,
            seconds: options.seconds,
            pin: options.pin,
            run: run.path(),
        };
        let rate = |sample: &Sample| match suite {
            Suite::Memory => sample.server_memory.map(|bytes| 1.0 / bytes.max(1) as f64),
            _ => Some(sample.measured.iops),
        };
        found(suite, Some(fs), experiment.run(), rate)
    }

    /// Copies by each build.
    fn copies(&self, suite: Suite, fs: Fs, names: &[String]) -> Result<Found> {
        let disk = self.options.disk();
        let parent = if fs == Fs::Tmpfs { Path::new("/dev/shm") } else { &disk };
        let dir = tempfile::Builder::new().prefix("ringtap-guard-").tempdir_in(parent);
        let dir = dir.with_context(|| format!("cannot make a folder in {}", parent.display()))?;
        let sources = Sources::write(dir.path(), self.options.size)?;
        let ways: Vec<Way> =
            self.builds.named().map(|(name, path)| Way::Build(name, path.into())).collect();
        let (mut points, mut missing) = Found::default();
        for case in Case::all(fs) {
            let line = suite.line(Some(fs), &case.name);
            if !names.contains(&line) {
                continue;
            }
            let section = copies::measure(case, &ways, &sources, self.options.rounds)?;
            missing.extend(section.missing().map(|(arm, reason)| Missing {
                line: line.clone(),
                arm: arm.into(),
                reason: reason.into(),
            }));
            points.extend(section.samples.iter().map(|sample| Point {
                round: sample.round,
                line: line.clone(),
                arm: sample.way.clone(),
                rate: 1.0 / sample.seconds,
                cpu: Some(sample.cpu_seconds),
            }));
        }
        Ok((points, missing))
    }

    /// Block devices of one guest.
    fn devices(&self, suite: Suite, workloads: &[Line]) -> Result<Found> {
        let dir = in_memory()?;
        let plan = devices::Plan {
            kernel: &UBLK_KERNEL,
            size: GUEST_DISK,
            dir: dir.path(),
            lines: workloads,
            rounds: self.options.rounds,
            seconds: self.options.seconds,
        };
        let host = devices::Host::of_builds(&plan, self.builds.named())?;
        let results = host.measure(&plan, |_, _, _| {});
        found(suite, None, results, |sample| Some(sample.measured.iops))
    }

    /// Servers of an idle disk.
    fn idle(&self, suite: Suite, names: &[String]) -> Result<Found> {
        let run = folder()?;
        let images = Images::write(Fs::Tmpfs, run.path(), IDLE_DISK, false)?;
        let links: Vec<(String, PathBuf)> =
            self.builds.named().map(|(name, path)| (name, path.into())).collect();
        let (mut points, mut missing) = Found::default();
        for round in 0..self.options.rounds {
            for (arm, program) in order(links.len(), round).map(|index| &links[index]) {
                if missing.iter().any(|missing: &Missing| missing.arm == *arm) {
                    continue;
                }
                let sockets = ["vhost", "nbd"].map(|name| run.path().join(name));
                let launch =
                    idle::ringtap(Some(program), images.direct(), &sockets[0], &sockets[1]);
                for socket in &sockets {
                    // A server that died left its socket behind.
                    let _ = std::fs::remove_file(socket);
                }
                let seconds = IDLE_TIMES * self.options.seconds;
                let watched =
                    idle::watch(arm, &launch, &sockets[0], &sockets[1], seconds, run.path());
                interrupt::check()?;
                let seen = match watched {
                    Ok(seen) => seen,
                    Err(error) => {
                        missing.extend(names.iter().map(|line| Missing {
                            line: line.clone(),
                            arm: arm.clone(),
                            reason: crate::experiment::reason(&error),
                        }));
                        continue;
                    }
                };
                let costs =
                    [("cpu", seen.cpu_ms_per_minute + IDLE_CPU), ("memory", seen.rss as f64)];
                for (name, cost) in costs {
                    let (line, arm) = (suite.line(None, name), arm.clone());
                    if names.contains(&line) {
                        points.push(Point { round, line, arm, rate: 1.0 / cost, cpu: None });
                    }
                }
            }
        }
        Ok((points, missing))
    }
}

/// What the samples say, each by its rate.
fn found(
    suite: Suite,
    place: Option<Fs>,
    results: Results,
    rate: impl Fn(&Sample) -> Option<f64>,
) -> Result<Found> {
    interrupt::check()?;
    let point = |sample: &Sample| {
        Some(Point {
            round: sample.round,
            line: suite.line(place, &sample.line),
            arm: sample.arm.clone(),
            rate: rate(sample)?,
            cpu: sample.server_cpu_per_request,
        })
    };
    let missing = results.failures.into_iter().map(|failure| Missing {
        line: suite.line(place, &failure.line),
        arm: failure.arm,
        reason: failure.reason,
    });
    Ok((results.samples.iter().filter_map(point).collect(), missing.collect()))
}

fn made(suite: Suite, fs: Fs, options: &Options, images: &Images, run: &Path) -> Result<Vec<Arm>> {
    let of = |scenario| Formats { fs, options, images, run }.arms(scenario);
    match suite {
        Suite::Nbd => nbd::arms(fs, options, images, run),
        Suite::Allocated | Suite::Memory => of(Scenario::Allocated),
        Suite::Fresh => of(Scenario::Fresh),
        Suite::Overlay => of(Scenario::Overlay),
        _ => vhost_user::arms(fs, options, images, None, run),
    }
}

/// For sockets and logs.
fn folder() -> Result<TempDir> {
    let made = tempfile::Builder::new().prefix("ringtap-guard-").tempdir();
    made.context("cannot make a folder for sockets and logs")
}

/// For the disks of guests.
fn in_memory() -> Result<TempDir> {
    let made = tempfile::Builder::new().prefix("ringtap-guard-").tempdir_in("/dev/shm");
    made.context("cannot make a folder in /dev/shm for the guests' disks")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn names(wanted: &[&str], only: &[&str], fs: &[Fs]) -> Vec<String> {
        let builds = Builds { old: vec![], new: vec![] };
        let mut options = Cli::parse_from(["guard"]).options;
        options.only = only.iter().map(|text| (*text).into()).collect();
        let wanted: Vec<String> = wanted.iter().map(|text| (*text).into()).collect();
        let guard = Guard { builds: &builds, options: &options, wanted: &wanted };
        let of = |suite: &Suite| -> Vec<String> {
            let places = suite.places(fs).into_iter();
            places.flat_map(|place| guard.lines(*suite, place)).collect()
        };
        Suite::value_variants().iter().flat_map(of).collect()
    }

    #[test]
    fn lines_are_found_by_any_part_of_their_names() {
        let all = names(&[], &[], &[Fs::Tmpfs, Fs::Null]);
        let mut once = all.clone();
        once.sort();
        once.dedup();
        assert_eq!(once.len(), all.len(), "{all:?}");
        for suite in Suite::value_variants() {
            assert!(all.iter().any(|name| name.starts_with(suite.name())), "{suite:?}");
        }
        let null = all.iter().filter(|name| name.contains(" null "));
        assert_eq!(null.count(), 2 * lines::usual().len());
        assert_eq!(
            names(&["memory"], &[], &[Fs::Tmpfs]),
            ["memory tmpfs randread-4k-d32", "idle memory"]
        );
        assert_eq!(
            names(&["idle", "ublk"], &["randwrite-4k-d32"], &[Fs::Tmpfs]),
            ["ublk randwrite-4k-d32"]
        );
        assert!(names(&["no such"], &[], &[Fs::Tmpfs]).is_empty());
    }

    #[test]
    fn the_script_names_every_suite_and_a_commit_to_compare_with() {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/guard-b.sh");
        let said = std::process::Command::new(script).arg("--help").output().unwrap();
        let said = String::from_utf8(said.stdout).unwrap();
        for suite in Suite::value_variants() {
            assert!(said.contains(suite.name()), "{suite:?}: {said}");
        }
        let record = include_str!("../../guard-b.before");
        let named: Vec<&str> = record.lines().filter(|line| !line.starts_with('#')).collect();
        let hex = |text: &str| text.len() == 40 && text.chars().all(|c| c.is_ascii_hexdigit());
        assert!(named.len() == 1 && hex(named[0]), "{named:?}");
    }

    /// A program that is none stands for an old build without what is asked for.
    #[test]
    fn copies_of_builds_are_measured_and_what_cannot_copy_is_named() {
        let path = |name: &str| vec![PathBuf::from(name)];
        let builds = Builds { old: path("/nonexistent/ringtap"), new: path("qemu-img") };
        let mut options = Cli::parse_from(["guard"]).options;
        (options.rounds, options.size) = (1, 8 << 20);
        let wanted = ["convert tmpfs raw-qcow2".to_owned()];
        let guard = Guard { builds: &builds, options: &options, wanted: &wanted };
        let (points, missing) = guard.measure(Suite::Convert, Some(Fs::Tmpfs)).unwrap();
        let lines: Vec<&str> = points.iter().map(|point| point.line.as_str()).collect();
        assert_eq!(lines, guard.lines(Suite::Convert, Some(Fs::Tmpfs)));
        assert_eq!(missing.len(), lines.len());
        assert!(points.iter().all(|point| point.arm == "new 1" && point.rate > 0.0));
        assert!(missing.iter().all(|missing| missing.arm == "old 1"), "{missing:?}");
    }
}
