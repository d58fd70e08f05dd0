//! What is measured: the same workloads on every arm. One file each knows how a tool is called and how it is read.

pub mod bonnie;
pub mod dd;
pub mod fio;
pub mod load;

use std::time::Duration;

use crate::sample::{Metric, Metrics};

/// What a tool does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// fio (over vhost-user from the host: `ringtap load`, which does the same).
    Fio(fio::Job),
    /// dd with large direct writes.
    DdThroughput,
    /// dd with 1000 writes of 512 bytes.
    DdLatency(dd::Flag),
    /// bonnie++ on a file system.
    Bonnie {
        /// Past the page cache.
        direct: bool,
    },
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
    let kind = Kind::Fio(fio::Job { random: true, write, block: 4096, depth });
    Workload { name, title, kind, headline: IOPS, quick }
}

const fn sequential(name: &'static str, title: &'static str, write: bool) -> Workload {
    let kind = Kind::Fio(fio::Job { random: false, write, block: 1 << 20, depth: 8 });
    Workload { name, title, kind, headline: BANDWIDTH, quick: false }
}

const fn bonnie(name: &'static str, title: &'static str, direct: bool) -> Workload {
    let headline = &[Metric::PutBlock, Metric::Rewrite, Metric::GetBlock, Metric::Seeks];
    Workload { name, title, kind: Kind::Bonnie { direct }, headline, quick: false }
}

/// All workloads, in the order in which they run on an arm: reads before what rewrites the disk's content.
pub const CATALOGUE: &[Workload] = &[
    random("randread-4k-qd1", "random read, 4 KiB, depth 1", false, 1, false),
    random("randread-4k-qd32", "random read, 4 KiB, depth 32", false, 32, true),
    random("randwrite-4k-qd1", "random write, 4 KiB, depth 1", true, 1, false),
    random("randwrite-4k-qd32", "random write, 4 KiB, depth 32", true, 32, true),
    sequential("read-1m-qd8", "sequential read, 1 MiB, depth 8", false),
    sequential("write-1m-qd8", "sequential write, 1 MiB, depth 8", true),
    Workload {
        name: "dd-throughput",
        title: "dd, one large direct write",
        kind: Kind::DdThroughput,
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
    bonnie("bonnie", "bonnie++ on ext4, through the page cache", false),
    bonnie("bonnie-direct", "bonnie++ on ext4, past the page cache", true),
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
    ("dd", &["dd-throughput", "dd-latency-direct", "dd-latency-dsync"]),
];

/// The workload of that name.
pub fn find(name: &str) -> Option<&'static Workload> {
    CATALOGUE.iter().find(|workload| workload.name == name)
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
}
