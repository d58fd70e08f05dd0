//! What is measured: the same workloads on every arm. One file each knows how a tool is called, how it is read and which workloads are
//! made of it, so that one more touches that file alone.

pub mod fiofile;
pub mod job;
pub mod load;
pub mod machine;

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::sample::{Metric, Metrics, Stage};
use job::Job;
use machine::Machine;

/// The files with workloads, in the order in which those run on an arm: reads before what rewrites the disk's content.
macro_rules! files {
    ($($file:ident)*) => {
        $(pub mod $file;)*
        const FILES: &[&[&dyn Workload]] = &[$($file::WORKLOADS),*];
    };
}

files! { fio rated dd bonnie filecopy archive snapshot start durability two_bonnie two }

/// All workloads, in the order in which they run on an arm.
pub fn all() -> impl Iterator<Item = &'static dyn Workload> {
    FILES.iter().copied().flatten().copied()
}

/// How a workload stands in lists, plans and reports.
#[derive(Clone, Copy, Debug)]
pub struct Listed {
    /// The name in plans and flags.
    pub name: &'static str,
    /// What it is, for a reader.
    pub title: &'static str,
    /// A name that stands for it and others like it.
    pub group: Option<&'static str>,
    /// The metrics that get a verdict.
    pub headline: &'static [Metric],
    /// Part of `--quick`.
    pub quick: bool,
}

/// How a workload gets at the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// By fio, or by what does the same over vhost-user.
    Job,
    /// By fio alone.
    Fio,
    /// By dd.
    Dd,
    /// By a script of the shell's.
    Script,
    /// By the files on it.
    Files,
    /// By fio, in two loads at once.
    Two,
    /// By files, in two guests at once.
    TwoFiles,
    /// By fio, and below it flushes are counted.
    Flushes,
    /// By what a start reads of an image that is elsewhere.
    Start,
}

/// Something that is measured.
pub trait Workload: Sync {
    /// How it is listed.
    fn listed(&self) -> &Listed;
    /// How it gets at the disk.
    fn client(&self) -> Client;
    /// Seconds that it is expected to take, on this machine.
    fn seconds(&self, settings: &Settings) -> f64;
    /// Runs it. What counts flushes or is two loads at once, stages run.
    fn run(&self, _: &dyn Machine) -> Result<Measured> {
        Err(Error::Plan(format!("the stage does not run {} on one disk", self.name())))
    }
    /// What it lacks on every stage but Xen's.
    fn missing(&self, _: &Env) -> Option<Missing> {
        None
    }
    /// Whether it changes the disk.
    fn writes(&self) -> bool {
        true
    }
    /// What fio does for it.
    fn job(&self) -> Option<Job> {
        None
    }
    /// What fio does in two loads at once.
    fn shape(&self) -> Option<two::Shape> {
        None
    }
    /// Whether it goes by a schedule, whose rate depends on what all backends carry.
    fn is_rated(&self) -> bool {
        false
    }
    /// Whether caches are dropped in it, which takes root on this machine.
    fn drops_caches(&self) -> bool {
        false
    }
    /// Whether it is run over and over, until nothing changes any more.
    fn is_repeated(&self) -> bool {
        false
    }
    /// Whether it only runs on snapshots.
    fn of_snapshots(&self) -> bool {
        false
    }
    /// Whether it has bonnie++'s columns.
    fn has_columns(&self) -> bool {
        false
    }
    /// Whether it writes at one rate for all of its time.
    fn writes_steadily(&self) -> bool {
        false
    }
    /// Whether what it reads is in a cache by its nature, and what it wrote was brought to the disk within its clock.
    fn reads_from_cache(&self) -> bool {
        false
    }

    /// The name in plans and flags.
    fn name(&self) -> &'static str {
        self.listed().name
    }
    /// What it is, for a reader.
    fn title(&self) -> &'static str {
        self.listed().title
    }
    /// The metrics that get a verdict.
    fn headline(&self) -> &'static [Metric] {
        self.listed().headline
    }
    /// Whether it is two loads at once.
    fn is_pair(&self) -> bool {
        matches!(self.client(), Client::Two | Client::TwoFiles)
    }
    /// Whether it needs a file system on the disk.
    fn on_file_system(&self) -> bool {
        matches!(self.client(), Client::Files | Client::TwoFiles)
    }
    /// Whether it is the check of what a flush does, which is made once and before all rounds.
    fn is_check(&self) -> bool {
        self.client() == Client::Flushes
    }
    /// Whether it runs on a stage: where there are two, only two at once, and whether what they write is durable.
    fn runs_on(&self, stage: Stage) -> bool {
        match (self.client(), stage) {
            (Client::Flushes, _) => true,
            (client, Stage::Remote) => matches!(client, Client::Job | Client::Start),
            (Client::Start, _) => false,
            (Client::TwoFiles, _) if stage.is_of_host() => false,
            _ => stage.runs_pairs(self.is_pair()),
        }
    }
}

impl std::fmt::Debug for dyn Workload + '_ {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Names that stand for several workloads, with those.
pub fn groups() -> Vec<(&'static str, Vec<&'static str>)> {
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for workload in all() {
        let Some(name) = workload.listed().group else { continue };
        match groups.iter_mut().find(|(group, _)| *group == name) {
            Some((_, members)) => members.push(workload.name()),
            None => groups.push((name, vec![workload.name()])),
        }
    }
    groups
}

/// What stands before the path of a job file in a workload's name.
pub const JOB_FILE: &str = "job:";

/// A workload that runs a fio job file; the file is checked.
pub fn job_file(path: &Path) -> Result<&'static dyn Workload> {
    fiofile::check(path)?;
    Ok(intern(&format!("{JOB_FILE}{}", path.display())))
}

/// Workloads made of job files. A handful in the life of a program; they are kept for good.
static JOB_FILES: Mutex<Vec<&'static dyn Workload>> = Mutex::new(Vec::new());

fn intern(name: &str) -> &'static dyn Workload {
    let mut known = JOB_FILES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(workload) = known.iter().find(|workload| workload.name() == name) {
        return *workload;
    }
    let name: &'static str = Box::leak(name.to_owned().into_boxed_str());
    let path = name.strip_prefix(JOB_FILE).unwrap_or(name);
    let workload: &'static dyn Workload = Box::leak(Box::new(fiofile::JobFile::new(name, path)));
    known.push(workload);
    workload
}

/// The workload of that name.
pub fn find(name: &str) -> Option<&'static dyn Workload> {
    let of_file = || name.starts_with(JOB_FILE).then(|| intern(name));
    all().find(|workload| workload.name() == name).or_else(of_file)
}

/// How long, how large, in which order of blocks: the same for all arms of a round.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Bytes of the disk.
    pub size: u64,
    /// How long fio measures.
    pub run: Duration,
    /// How long fio runs before it measures.
    pub ramp: Duration,
    /// Seed of the random blocks.
    pub seed: u64,
    /// Random writes of 4 KiB a second that the slowest backend of the stage carries, where a rated load asks for it.
    pub capacity: Option<f64>,
}

impl Settings {
    /// Seconds that fio takes, its ramp included.
    pub fn whole(&self) -> f64 {
        (self.run + self.ramp).as_secs_f64()
    }

    /// GiB of the disk; what is larger than one makes nothing longer.
    pub fn gib(&self) -> f64 {
        self.size.min(1 << 30) as f64 / (1u64 << 30) as f64
    }
}

/// What one run measured.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// The numbers.
    pub metrics: Metrics,
    /// What a reader must know.
    pub note: Option<String>,
    /// I/Os from start to end, the ramp included, for the cost of the server.
    pub ios: Option<f64>,
    /// Bytes moved, where the cost is by bytes.
    pub bytes: Option<f64>,
    /// Bytes that the program asked for in all, for the ledger.
    pub asked: Option<f64>,
    /// What the block device that the program's disk is saw meanwhile, for the ledger.
    pub disk: Option<crate::sample::Layer>,
    /// How far the rate moved, see [`crate::sample::Sample::movement`].
    pub movement: Option<f64>,
    /// Times without an answer: from, to, in milliseconds since 1970 of this machine's clock.
    pub gaps: Vec<(f64, f64)>,
    /// A curve, see [`crate::sample::Sample::curve`].
    pub curve: Vec<(f64, f64)>,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Everything that lists, plans and reports ask of a workload comes from its own file: one more needs no other.
    #[test]
    fn every_workload_says_all_that_is_asked_of_it() {
        let settings = Settings {
            size: 64 << 20,
            run: Duration::from_secs(1),
            ramp: Duration::ZERO,
            seed: 1,
            capacity: None,
        };
        let mut names = BTreeSet::new();
        for workload in all() {
            let name = workload.name();
            assert!(names.insert(name), "{name} is there twice");
            assert!(std::ptr::addr_eq(find(name).unwrap(), workload), "{name} is found");
            assert!(workload.title().len() > 10, "{name} has no title");
            assert!(
                workload.is_check() || !workload.headline().is_empty(),
                "{name} has no verdict"
            );
            assert!(workload.seconds(&settings) > 0.0, "{name} takes no time");
            assert!(
                Stage::ALL.into_iter().any(|stage| workload.runs_on(stage)),
                "{name} never runs"
            );
            assert_eq!(workload.client() == Client::Job, workload.job().is_some(), "{name}");
            assert_eq!(workload.client() == Client::Two, workload.shape().is_some(), "{name}");
            assert_eq!(format!("{workload:?}"), name);
            if let Some(group) = workload.listed().group {
                let groups = groups();
                let members =
                    groups.iter().find(|(of, _)| *of == group).map(|(_, members)| members);
                assert!(members.unwrap().contains(&name) && find(group).is_none(), "{group}");
            }
        }
        assert!(FILES.iter().all(|of_file| !of_file.is_empty()));
        assert_eq!(all().filter(|workload| workload.is_check()).count(), 1);
    }
}
