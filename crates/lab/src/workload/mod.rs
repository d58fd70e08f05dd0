//! What is measured: the same workloads on every arm. One file each knows how a tool is called and how it is read.

pub mod archive;
pub mod bonnie;
pub mod dd;
pub mod durability;
pub mod filecopy;
pub mod fio;
pub mod fiofile;
pub mod load;
pub mod rated;
pub mod snapshot;
pub mod start;
pub mod two;
pub mod two_bonnie;

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use crate::error::Result;
use crate::sample::{Metric, Metrics, Stage};

/// What a tool does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// fio (over vhost-user from the host: `ringtap-lab load`, which does the same).
    Fio(fio::Job),
    /// A job file of the user's: its path.
    FioFile(&'static str),
    /// fio on a schedule: so many percent of what the slowest backend carries.
    Rated(u32),
    /// dd with large writes.
    DdThroughput(dd::Flag),
    /// dd with 1000 writes of 512 bytes.
    DdLatency(dd::Flag),
    /// bonnie++ on a file system.
    Bonnie(bonnie::Mode),
    /// bonnie++ run after run, until what it writes has been copied.
    BonnieRuns,
    /// UnixBench's file copies on a file system.
    FileCopy {
        /// Each pass brought to the disk.
        durable: bool,
    },
    /// `find | cpio` over a tree on a file system.
    Archive,
    /// Flushes below for each fsync above.
    Durability,
    /// The life of a snapshot.
    SnapshotLife,
    /// Two loads at once.
    Two(two::Shape),
    /// bonnie++ in two guests at once.
    TwoBonnie,
    /// What a guest's start reads, from an image of which nothing is here.
    Start,
}

impl Kind {
    /// Whether it runs on a stage: where there are two, only two at once, and whether what they write is durable.
    pub fn runs_on(self, stage: Stage) -> bool {
        if stage == Stage::Remote {
            return matches!(self, Kind::Fio(_) | Kind::Start | Kind::Durability);
        }
        let anywhere = stage == Stage::Xen || self == Kind::Durability;
        let here = self != Kind::Start && (stage != Stage::Two || self != Kind::TwoBonnie);
        let anywhere = anywhere && self != Kind::Start;
        anywhere || here && self.is_pair() == stage.is_contention()
    }

    /// Whether it is two loads at once.
    pub fn is_pair(self) -> bool {
        matches!(self, Kind::Two(_) | Kind::TwoBonnie)
    }

    /// Whether it changes the disk.
    pub fn writes(self) -> bool {
        match self {
            Kind::Fio(job) => job.write,
            Kind::Two(shape) => shape.write,
            Kind::Start => false,
            _ => true,
        }
    }

    /// Whether it goes by a schedule, whose rate depends on what all backends carry.
    pub fn is_rated(self) -> bool {
        matches!(self, Kind::Rated(_))
    }

    /// Whether it needs a file system on the disk.
    pub fn on_file_system(self) -> bool {
        matches!(
            self,
            Kind::Bonnie(_)
                | Kind::BonnieRuns
                | Kind::TwoBonnie
                | Kind::FileCopy { .. }
                | Kind::Archive
        )
    }
}

/// A workload of the catalogue.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// The name in plans and flags.
    pub name: &'static str,
    /// What it is, for a reader.
    pub title: &'static str,
    /// What is run.
    pub kind: Kind,
    /// The metrics that get a verdict.
    pub headline: &'static [Metric],
    /// Part of `--quick`.
    pub quick: bool,
}

const IOPS: &[Metric] = &[Metric::Iops];
const BANDWIDTH: &[Metric] = &[Metric::Bandwidth];

const fn random(
    name: &'static str,
    title: &'static str,
    write: bool,
    depth: u32,
    quick: bool,
) -> Workload {
    let kind = Kind::Fio(fio::Job { random: true, write, block: 4096, depth, synced: false });
    Workload { name, title, kind, headline: IOPS, quick }
}

const fn sequential(name: &'static str, title: &'static str, write: bool) -> Workload {
    let kind =
        Kind::Fio(fio::Job { random: false, write, block: 1 << 20, depth: 8, synced: false });
    Workload { name, title, kind, headline: BANDWIDTH, quick: false }
}

const fn rated(name: &'static str, title: &'static str, percent: u32) -> Workload {
    let headline = &[Metric::ScheduleP99];
    Workload { name, title, kind: Kind::Rated(percent), headline, quick: false }
}

const fn two(
    name: &'static str,
    title: &'static str,
    write: bool,
    quiet: bool,
    headline: &'static [Metric],
) -> Workload {
    let kind = Kind::Two(two::Shape { write, quiet });
    Workload { name, title, kind, headline, quick: true }
}

const COPIES: &[Metric] = &[Metric::Copy256, Metric::Copy1024, Metric::Copy4096];
const EVEN: &[Metric] = &[Metric::SumIops, Metric::Jain];
const QUIET: &[Metric] = &[Metric::Keeps, Metric::P99Factor];

const fn bonnie(name: &'static str, title: &'static str, mode: bonnie::Mode) -> Workload {
    let headline = &[Metric::PutBlock, Metric::Rewrite, Metric::GetBlock, Metric::Seeks];
    Workload { name, title, kind: Kind::Bonnie(mode), headline, quick: false }
}

/// All workloads, in the order in which they run on an arm: reads before what rewrites the disk's content.
pub const CATALOGUE: &[Workload] = &[
    random("randread-4k-qd1", "random read, 4 KiB, depth 1", false, 1, false),
    random("randread-4k-qd32", "random read, 4 KiB, depth 32", false, 32, true),
    random("randwrite-4k-qd1", "random write, 4 KiB, depth 1", true, 1, false),
    random("randwrite-4k-qd32", "random write, 4 KiB, depth 32", true, 32, true),
    Workload {
        name: "write-4k-fsync",
        title: "random write, 4 KiB, each with an fsync",
        kind: Kind::Fio(fio::Job {
            random: true,
            write: true,
            block: 4096,
            depth: 1,
            synced: true,
        }),
        headline: IOPS,
        quick: false,
    },
    sequential("read-1m-qd8", "sequential read, 1 MiB, depth 8", false),
    sequential("write-1m-qd8", "sequential write, 1 MiB, depth 8", true),
    rated("rated-50", "random write, 4 KiB, by schedule at 50 % of the slowest one's capacity", 50),
    rated("rated-80", "random write, 4 KiB, by schedule at 80 % of the slowest one's capacity", 80),
    Workload {
        name: "dd-throughput",
        title: "dd, one large direct write",
        kind: Kind::DdThroughput(dd::Flag::Direct),
        headline: BANDWIDTH,
        quick: false,
    },
    Workload {
        name: "dd-throughput-dsync",
        title: "dd, one large write made durable",
        kind: Kind::DdThroughput(dd::Flag::Dsync),
        headline: BANDWIDTH,
        quick: false,
    },
    Workload {
        name: "dd-latency-direct",
        title: "dd, 1000 writes of 512 bytes, direct",
        kind: Kind::DdLatency(dd::Flag::Direct),
        headline: &[Metric::TimePerOp],
        quick: true,
    },
    Workload {
        name: "dd-latency-dsync",
        title: "dd, 1000 writes of 512 bytes, each made durable",
        kind: Kind::DdLatency(dd::Flag::Dsync),
        headline: &[Metric::TimePerOp],
        quick: false,
    },
    bonnie("bonnie", "bonnie++ on ext4, through the page cache", bonnie::Mode::Cached),
    bonnie("bonnie-direct", "bonnie++ on ext4, past the page cache", bonnie::Mode::Direct),
    bonnie("bonnie-whole", "bonnie++ on ext4, all twelve columns", bonnie::Mode::Whole),
    Workload {
        name: "bonnie-runs",
        title: "bonnie++ run after run until settled",
        kind: Kind::BonnieRuns,
        headline: &[Metric::FreshWrite, Metric::SettledWrite, Metric::GetBlock],
        quick: false,
    },
    Workload {
        name: "filecopy",
        title: "UnixBench file copy on ext4, cached copy",
        kind: Kind::FileCopy { durable: false },
        headline: COPIES,
        quick: false,
    },
    Workload {
        name: "filecopy-durable",
        title: "UnixBench file copy on ext4, each pass durable",
        kind: Kind::FileCopy { durable: true },
        headline: COPIES,
        quick: false,
    },
    Workload {
        name: "archive",
        title: "find | cpio over a tree on ext4, caches dropped",
        kind: Kind::Archive,
        headline: &[Metric::Elapsed],
        quick: false,
    },
    Workload {
        name: "snapshot-life",
        title: "writes from fresh snapshot to settled",
        kind: Kind::SnapshotLife,
        headline: &[Metric::FreshWrite, Metric::SettledWrite],
        quick: false,
    },
    Workload {
        name: "start",
        title: "what a guest's start reads, from an image of which nothing is here",
        kind: Kind::Start,
        headline: &[Metric::Elapsed],
        quick: false,
    },
    Workload {
        name: "durability",
        title: "does each fsync reach the disk",
        kind: Kind::Durability,
        headline: &[],
        quick: false,
    },
    Workload {
        name: "two-bonnie",
        title: "bonnie++ in two guests at once, on ext4, past the page cache",
        kind: Kind::TwoBonnie,
        headline: &[Metric::PutBlock, Metric::Rewrite, Metric::GetBlock, Metric::Seeks],
        quick: false,
    },
    two("two-read", "two loads, random read, 4 KiB, depth 32 each", false, false, EVEN),
    two("two-write", "two loads, random write, 4 KiB, depth 32 each", true, false, EVEN),
    two("quiet-read", "random read, 4 KiB, depth 1 beside depth 32", false, true, QUIET),
    two("quiet-write", "random write, 4 KiB, depth 1 beside depth 32", true, true, QUIET),
];

/// Names that stand for several workloads.
pub const GROUPS: &[(&str, &[&str])] = &[
    (
        "fio",
        &[
            "randread-4k-qd1",
            "randread-4k-qd32",
            "randwrite-4k-qd1",
            "randwrite-4k-qd32",
            "read-1m-qd8",
            "write-1m-qd8",
        ],
    ),
    ("dd", &["dd-throughput", "dd-throughput-dsync", "dd-latency-direct", "dd-latency-dsync"]),
    ("bonnie++", &["bonnie", "bonnie-direct", "bonnie-whole"]),
    ("rated", &["rated-50", "rated-80"]),
    ("unixbench", &["filecopy", "filecopy-durable"]),
    ("contention", &["two-read", "two-write", "quiet-read", "quiet-write"]),
];

/// What stands before the path of a job file in a workload's name.
pub const JOB_FILE: &str = "job:";

/// A workload that runs a fio job file; the file is checked.
pub fn job_file(path: &Path) -> Result<&'static Workload> {
    fiofile::check(path)?;
    Ok(intern(&format!("{JOB_FILE}{}", path.display())))
}

/// Workloads made of job files. A handful in the life of a program; they are kept for good.
static JOB_FILES: Mutex<Vec<&'static Workload>> = Mutex::new(Vec::new());

fn intern(name: &str) -> &'static Workload {
    let mut known = JOB_FILES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(workload) = known.iter().find(|workload| workload.name == name) {
        return workload;
    }
    let name: &'static str = Box::leak(name.to_owned().into_boxed_str());
    let path = name.strip_prefix(JOB_FILE).unwrap_or(name);
    let workload: &'static Workload = Box::leak(Box::new(Workload {
        name,
        title: Box::leak(format!("fio job file {path}").into_boxed_str()),
        kind: Kind::FioFile(path),
        headline: IOPS,
        quick: false,
    }));
    known.push(workload);
    workload
}

/// The workload of that name.
pub fn find(name: &str) -> Option<&'static Workload> {
    let of_file = || name.starts_with(JOB_FILE).then(|| intern(name));
    CATALOGUE.iter().find(|workload| workload.name == name).or_else(of_file)
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
