//! A sample: what one workload measured on one arm in one round. One JSON line in `samples.jsonl`.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// What a stage's loads run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum In {
    /// This machine itself.
    Host,
    /// Guests of User-Mode Linux that boot in each round.
    Uml,
    /// Virtual PCs that boot in each round.
    Pc,
    /// Guests of a Xen that boots once.
    Xen,
}

/// How many loads a stage runs at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loads {
    One,
    Two,
    Either,
}

macro_rules! stages {
    ($($(#[$doc:meta])* $stage:ident: $name:literal, $place:ident, $loads:ident;)*) => {
        /// Where the load runs.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum Stage { $($(#[$doc])* $stage,)* }

        impl Stage {
            /// All stages, in the order of the report.
            pub const ALL: [Stage; [$(Stage::$stage),*].len()] = [$(Stage::$stage),*];

            /// The name in plans, flags and samples.
            pub fn name(self) -> &'static str {
                match self { $(Stage::$stage => $name,)* }
            }

            fn place(self) -> In {
                match self { $(Stage::$stage => In::$place,)* }
            }

            fn loads(self) -> Loads {
                match self { $(Stage::$stage => Loads::$loads,)* }
            }
        }
    };
}

stages! {
    /// This machine as it is.
    Host: "host", Host, One;
    /// A small guest that the lab boots in User-Mode Linux.
    Guest: "guest", Uml, One;
    /// A virtual PC that the lab boots in QEMU, under KVM where that works, else with its processor translated (TCG).
    Vm: "vm", Pc, One;
    /// Two loads at once, each on a disk of its own, both disks on the same device of this machine.
    Two: "two", Host, Two;
    /// Two guests of User-Mode Linux at once, each with a disk of its own, both on the same device.
    TwoGuests: "two-guests", Uml, Two;
    /// Two virtual PCs in QEMU at once, each with a disk of its own, both on the same device.
    TwoVms: "two-vms", Pc, Two;
    /// Guests of a Xen that the lab boots in QEMU: one load, or one in each of two guests.
    Xen: "xen", Xen, Either;
    /// This machine, on disks that are elsewhere: behind NBD, in a Ceph, behind HTTP.
    Remote: "remote", Host, One;
}

impl Stage {
    /// The stages of a run that names none.
    pub const USUAL: [Stage; 2] = [Stage::Host, Stage::Guest];

    /// Whether nothing but two loads at once is run.
    pub fn is_contention(self) -> bool {
        self.loads() == Loads::Two
    }

    /// Whether it runs two loads at once, or one at a time.
    pub fn runs_pairs(self, pairs: bool) -> bool {
        match self.loads() {
            Loads::Either => true,
            loads => (loads == Loads::Two) == pairs,
        }
    }

    /// Whether its load runs on this machine itself, and in no guest.
    pub fn is_of_host(self) -> bool {
        self.place() == In::Host
    }

    /// Whether its guests are virtual PCs, booted by themselves.
    pub fn is_of_pcs(self) -> bool {
        self.place() == In::Pc
    }

    /// Whether a round is a boot of its own, of a guest or of two.
    pub fn boots_each_round(self) -> bool {
        matches!(self.place(), In::Uml | In::Pc)
    }

    /// Whether all rounds are in one boot.
    pub fn boots_once(self) -> bool {
        self.place() == In::Xen
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Which way a metric is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// More is better: a rate.
    Higher,
    /// Less is better: a latency, a cost.
    Lower,
}

/// How a metric's numbers are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Operations a second.
    PerSecond,
    /// Bytes a second.
    BytesPerSecond,
    /// Nanoseconds.
    Nanoseconds,
    /// CPU seconds for a million I/Os.
    CpuPerMillion,
    /// CPU seconds for a GiB.
    CpuPerGib,
    /// A share of a whole: 1 is all of it.
    Share,
    /// A plain factor or index.
    Factor,
}

macro_rules! metrics {
    ($($(#[$doc:meta])* $name:ident: $title:literal, $unit:ident, $better:ident;)*) => {
        /// What was measured. Units are in [`Metric::unit`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Metric { $($(#[$doc])* $name,)* }

        impl Metric {
            /// All metrics, in the order of the report.
            pub const ALL: &[Metric] = &[$(Metric::$name,)*];

            /// What a reader calls it.
            pub fn title(self) -> &'static str {
                match self { $(Metric::$name => $title,)* }
            }

            /// How its numbers are printed.
            pub fn unit(self) -> Unit {
                match self { $(Metric::$name => Unit::$unit,)* }
            }

            /// Which way it is better.
            pub fn better(self) -> Better {
                match self { $(Metric::$name => Better::$better,)* }
            }
        }
    };
}

metrics! {
    /// I/O operations a second.
    Iops: "IOPS", PerSecond, Higher;
    /// Bytes moved a second.
    Bandwidth: "bandwidth", BytesPerSecond, Higher;
    /// Mean time of one operation (dd's latency test).
    TimePerOp: "time per write", Nanoseconds, Lower;
    /// Median latency.
    P50: "p50", Nanoseconds, Lower;
    /// 90th percentile of latency.
    P90: "p90", Nanoseconds, Lower;
    /// 99th percentile of latency.
    P99: "p99", Nanoseconds, Lower;
    /// 99.9th percentile of latency.
    P999: "p99.9", Nanoseconds, Lower;
    /// CPU seconds of the server per million I/Os.
    ServerCpu: "server CPU", CpuPerMillion, Lower;
    /// CPU seconds of the load generator per million I/Os.
    ClientCpu: "client CPU", CpuPerMillion, Lower;
    /// CPU seconds of the whole machine per million I/Os: kernel threads, and everything else that ran.
    MachineCpu: "machine CPU", CpuPerMillion, Lower;
    /// CPU seconds of the machine's kernel threads per million I/Os: loop devices, journals, io_uring's pollers.
    KernelCpu: "kernel threads' CPU", CpuPerMillion, Lower;
    /// CPU seconds of client or guest, server and kernel threads together per million I/Os.
    PathCpu: "whole path's CPU", CpuPerMillion, Lower;
    /// CPU seconds that the machine's own hypervisor took away per million I/Os.
    StealCpu: "stolen CPU", CpuPerMillion, Lower;
    /// CPU seconds of the server per GiB.
    ServerCpuGib: "server CPU", CpuPerGib, Lower;
    /// CPU seconds of the load generator per GiB.
    ClientCpuGib: "client CPU", CpuPerGib, Lower;
    /// CPU seconds of the whole machine per GiB.
    MachineCpuGib: "machine CPU", CpuPerGib, Lower;
    /// CPU seconds of the machine's kernel threads per GiB.
    KernelCpuGib: "kernel threads' CPU", CpuPerGib, Lower;
    /// CPU seconds of client or guest, server and kernel threads together per GiB.
    PathCpuGib: "whole path's CPU", CpuPerGib, Lower;
    /// CPU seconds that the machine's own hypervisor took away per GiB.
    StealCpuGib: "stolen CPU", CpuPerGib, Lower;
    /// bonnie++: characters (bytes, since 1.92) written one at a time.
    PutChar: "per-char write", BytesPerSecond, Higher;
    /// bonnie++: block writes.
    PutBlock: "block write", BytesPerSecond, Higher;
    /// bonnie++: read, change, write back.
    Rewrite: "rewrite", BytesPerSecond, Higher;
    /// bonnie++: characters read one at a time.
    GetChar: "per-char read", BytesPerSecond, Higher;
    /// bonnie++: block reads.
    GetBlock: "block read", BytesPerSecond, Higher;
    /// bonnie++: random seeks.
    Seeks: "seeks", PerSecond, Higher;
    /// bonnie++: files created in order.
    SeqCreate: "sequential create", PerSecond, Higher;
    /// bonnie++: files found in order.
    SeqStat: "sequential stat", PerSecond, Higher;
    /// bonnie++: files deleted in order.
    SeqDelete: "sequential delete", PerSecond, Higher;
    /// bonnie++: files created at random.
    RandCreate: "random create", PerSecond, Higher;
    /// bonnie++: files found at random.
    RandStat: "random stat", PerSecond, Higher;
    /// bonnie++: files deleted at random.
    RandDelete: "random delete", PerSecond, Higher;
    /// bonnie++'s own share of a processor in that phase: no kernel thread, no server is in it.
    PutCharCpu: "per-char write, %CP", Share, Lower;
    /// bonnie++'s own share of a processor in that phase: no kernel thread, no server is in it.
    PutBlockCpu: "block write, %CP", Share, Lower;
    /// bonnie++'s own share of a processor in that phase: no kernel thread, no server is in it.
    RewriteCpu: "rewrite, %CP", Share, Lower;
    /// bonnie++'s own share of a processor in that phase: no kernel thread, no server is in it.
    GetCharCpu: "per-char read, %CP", Share, Lower;
    /// bonnie++'s own share of a processor in that phase: no kernel thread, no server is in it.
    GetBlockCpu: "block read, %CP", Share, Lower;
    /// bonnie++'s own share of a processor in that phase: no kernel thread, no server is in it.
    SeeksCpu: "seeks, %CP", Share, Lower;
    /// bonnie++'s own share of a processor in that phase: no kernel thread, no server is in it.
    SeqCreateCpu: "sequential create, %CP", Share, Lower;
    /// bonnie++'s own share of a processor in that phase: no kernel thread, no server is in it.
    SeqStatCpu: "sequential stat, %CP", Share, Lower;
    /// bonnie++'s own share of a processor in that phase: no kernel thread, no server is in it.
    SeqDeleteCpu: "sequential delete, %CP", Share, Lower;
    /// bonnie++'s own share of a processor in that phase: no kernel thread, no server is in it.
    RandCreateCpu: "random create, %CP", Share, Lower;
    /// bonnie++'s own share of a processor in that phase: no kernel thread, no server is in it.
    RandStatCpu: "random stat, %CP", Share, Lower;
    /// bonnie++'s own share of a processor in that phase: no kernel thread, no server is in it.
    RandDeleteCpu: "random delete, %CP", Share, Lower;
    /// bonnie++: the slowest single operation of that phase, from 1.96 on.
    PutCharSlowest: "per-char write, slowest", Nanoseconds, Lower;
    /// bonnie++: the slowest single operation of that phase, from 1.96 on.
    PutBlockSlowest: "block write, slowest", Nanoseconds, Lower;
    /// bonnie++: the slowest single operation of that phase, from 1.96 on.
    RewriteSlowest: "rewrite, slowest", Nanoseconds, Lower;
    /// bonnie++: the slowest single operation of that phase, from 1.96 on.
    GetCharSlowest: "per-char read, slowest", Nanoseconds, Lower;
    /// bonnie++: the slowest single operation of that phase, from 1.96 on.
    GetBlockSlowest: "block read, slowest", Nanoseconds, Lower;
    /// bonnie++: the slowest single operation of that phase, from 1.96 on.
    SeeksSlowest: "seeks, slowest", Nanoseconds, Lower;
    /// bonnie++: the slowest single operation of that phase, from 1.96 on.
    SeqCreateSlowest: "sequential create, slowest", Nanoseconds, Lower;
    /// bonnie++: the slowest single operation of that phase, from 1.96 on.
    SeqStatSlowest: "sequential stat, slowest", Nanoseconds, Lower;
    /// bonnie++: the slowest single operation of that phase, from 1.96 on.
    SeqDeleteSlowest: "sequential delete, slowest", Nanoseconds, Lower;
    /// bonnie++: the slowest single operation of that phase, from 1.96 on.
    RandCreateSlowest: "random create, slowest", Nanoseconds, Lower;
    /// bonnie++: the slowest single operation of that phase, from 1.96 on.
    RandStatSlowest: "random stat, slowest", Nanoseconds, Lower;
    /// bonnie++: the slowest single operation of that phase, from 1.96 on.
    RandDeleteSlowest: "random delete, slowest", Nanoseconds, Lower;
    /// File copy with a buffer of 256 bytes.
    Copy256: "copy, 256 B", BytesPerSecond, Higher;
    /// File copy with a buffer of 1024 bytes.
    Copy1024: "copy, 1024 B", BytesPerSecond, Higher;
    /// File copy with a buffer of 4096 bytes.
    Copy4096: "copy, 4096 B", BytesPerSecond, Higher;
    /// UnixBench's index of the three copies: ten times the geometric mean of rate by baseline.
    CopyIndex: "UnixBench index", Factor, Higher;
    /// Time of the whole job.
    Elapsed: "time", Nanoseconds, Lower;
    /// Files handled a second.
    Files: "files", PerSecond, Higher;
    /// Flushes that reached the layer below for each fsync of the program: 1 and more is durable.
    FlushPerSync: "flushes per fsync", Factor, Higher;
    /// Writes right after a snapshot was taken.
    FreshWrite: "writes, fresh snapshot", BytesPerSecond, Higher;
    /// Writes once everything that is written has been copied.
    SettledWrite: "writes, settled", BytesPerSecond, Higher;
    /// Cost of the first write of a chunk beside that of a later one.
    FirstWriteCost: "a first write costs", Factor, Lower;
    /// I/Os a second of two loads together.
    SumIops: "IOPS of both", PerSecond, Higher;
    /// Jain's index of the two shares: 1 is even, 0.5 is all for one.
    Jain: "Jain index", Factor, Higher;
    /// The first load's part of what both got.
    FirstShare: "share of the first", Share, Higher;
    /// What the quiet load keeps of the rate that it has alone.
    Keeps: "the quiet one keeps", Share, Higher;
    /// p99 of the first (or quiet) load beside the other, by its p99 alone.
    P99Factor: "p99 beside / alone", Factor, Lower;
    /// The rate that the first (or quiet) load has alone.
    AloneIops: "IOPS alone", PerSecond, Higher;
    /// What the second (or loud) load keeps of the rate that it has alone.
    SecondKeeps: "the second keeps", Share, Higher;
    /// p99 of the second (or loud) load beside the other.
    SecondP99: "p99 of the second", Nanoseconds, Lower;
    /// The same by its p99 alone.
    SecondP99Factor: "the second's p99 beside / alone", Factor, Lower;
    /// Median against the schedule on which requests should have been sent (open loop).
    ScheduleP50: "p50 from schedule", Nanoseconds, Lower;
    /// p90 against that schedule.
    ScheduleP90: "p90 from schedule", Nanoseconds, Lower;
    /// p99 against the schedule on which requests should have been sent (open loop).
    ScheduleP99: "p99 from schedule", Nanoseconds, Lower;
    /// p99.9 against that schedule.
    ScheduleP999: "p99.9 from schedule", Nanoseconds, Lower;
    /// The longest time in which not one request was answered.
    LongestGap: "longest gap", Nanoseconds, Lower;
    /// bonnie++ in two guests, block write: what the first has alone.
    FirstPutAlone: "block write, the first alone", BytesPerSecond, Higher;
    /// bonnie++ in two guests, block write: what the first has beside the other.
    FirstPut: "block write, the first beside the other", BytesPerSecond, Higher;
    /// bonnie++ in two guests, block write: what the first keeps of what it has alone.
    FirstPutKeeps: "block write, the first keeps", Share, Higher;
    /// bonnie++ in two guests, block write: what the second has alone.
    SecondPutAlone: "block write, the second alone", BytesPerSecond, Higher;
    /// bonnie++ in two guests, block write: what the second has beside the other.
    SecondPut: "block write, the second beside the other", BytesPerSecond, Higher;
    /// bonnie++ in two guests, block write: what the second keeps of what it has alone.
    SecondPutKeeps: "block write, the second keeps", Share, Higher;
    /// bonnie++ in two guests, rewrite: what the first has alone.
    FirstRewriteAlone: "rewrite, the first alone", BytesPerSecond, Higher;
    /// bonnie++ in two guests, rewrite: what the first has beside the other.
    FirstRewrite: "rewrite, the first beside the other", BytesPerSecond, Higher;
    /// bonnie++ in two guests, rewrite: what the first keeps of what it has alone.
    FirstRewriteKeeps: "rewrite, the first keeps", Share, Higher;
    /// bonnie++ in two guests, rewrite: what the second has alone.
    SecondRewriteAlone: "rewrite, the second alone", BytesPerSecond, Higher;
    /// bonnie++ in two guests, rewrite: what the second has beside the other.
    SecondRewrite: "rewrite, the second beside the other", BytesPerSecond, Higher;
    /// bonnie++ in two guests, rewrite: what the second keeps of what it has alone.
    SecondRewriteKeeps: "rewrite, the second keeps", Share, Higher;
    /// bonnie++ in two guests, block read: what the first has alone.
    FirstGetAlone: "block read, the first alone", BytesPerSecond, Higher;
    /// bonnie++ in two guests, block read: what the first has beside the other.
    FirstGet: "block read, the first beside the other", BytesPerSecond, Higher;
    /// bonnie++ in two guests, block read: what the first keeps of what it has alone.
    FirstGetKeeps: "block read, the first keeps", Share, Higher;
    /// bonnie++ in two guests, block read: what the second has alone.
    SecondGetAlone: "block read, the second alone", BytesPerSecond, Higher;
    /// bonnie++ in two guests, block read: what the second has beside the other.
    SecondGet: "block read, the second beside the other", BytesPerSecond, Higher;
    /// bonnie++ in two guests, block read: what the second keeps of what it has alone.
    SecondGetKeeps: "block read, the second keeps", Share, Higher;
    /// bonnie++ in two guests, seeks: what the first has alone.
    FirstSeeksAlone: "seeks, the first alone", PerSecond, Higher;
    /// bonnie++ in two guests, seeks: what the first has beside the other.
    FirstSeeks: "seeks, the first beside the other", PerSecond, Higher;
    /// bonnie++ in two guests, seeks: what the first keeps of what it has alone.
    FirstSeeksKeeps: "seeks, the first keeps", Share, Higher;
    /// bonnie++ in two guests, seeks: what the second has alone.
    SecondSeeksAlone: "seeks, the second alone", PerSecond, Higher;
    /// bonnie++ in two guests, seeks: what the second has beside the other.
    SecondSeeks: "seeks, the second beside the other", PerSecond, Higher;
    /// bonnie++ in two guests, seeks: what the second keeps of what it has alone.
    SecondSeeksKeeps: "seeks, the second keeps", Share, Higher;
}

/// A number, or a bound where the tool refused to print the number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// The number, or the bound.
    pub value: f64,
    /// The true number is at least `value` (bonnie++'s `+++++`). Such a value never enters a mean.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_least: bool,
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Value { value, at_least: false }
    }
}

/// The metrics of one run of a workload.
pub type Metrics = BTreeMap<Metric, Value>;

/// One workload on one arm in one round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Where the load ran.
    pub stage: Stage,
    /// The arm: the backend's name, or with `#2` behind it for the A/A twin.
    pub arm: String,
    /// The workload's name.
    pub workload: String,
    /// The round, from 0.
    pub round: u32,
    /// The place of the arm within its round, from 0.
    pub position: u32,
    /// The boot of the guest that it ran in, counted over the run, where there is one. Rounds of one boot are alike.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<u32>,
    /// When it began, milliseconds since 1970 UTC.
    pub began_ms: u64,
    /// How long it took, with start-up of the tool, in seconds.
    pub seconds: f64,
    /// What was measured; empty when it failed.
    #[serde(default)]
    pub metrics: Metrics,
    /// Bytes and flushes at each layer while it ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ledger: Option<Ledger>,
    /// A curve, where the workload makes one: (share of the chunks copied, bytes a second).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub curve: Vec<(f64, f64)>,
    /// Gaps of a load by schedule that are worth telling, in the order of time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stalls: Vec<Stall>,
    /// How far the rate moved within the run: the largest half second less the smallest, by their mean. Where the tool tells
    /// them, of runs of five and more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub movement: Option<f64>,
    /// What a reader must know about this run ("256 MiB instead of 1 GiB").
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Why there is no number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A time without an answer, and what each layer did in it. Shares are seconds a second: several threads at work are
/// more than 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stall {
    /// Seconds from the beginning of the sample.
    pub at: f64,
    /// How long it lasted.
    pub seconds: f64,
    /// The layer that it was about.
    pub layer: Still,
    /// The device below had requests in flight.
    pub device: Option<f64>,
    /// The server was on a processor.
    pub server: Option<f64>,
    /// The server was ready and had none.
    pub server_waits: Option<f64>,
    /// The client (in a guest: all of it) was on a processor.
    pub client: Option<f64>,
    /// The client was ready and had none.
    pub client_waits: Option<f64>,
}

/// What stood still, or held up the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Still {
    /// Nobody looked.
    #[default]
    Unseen,
    /// The hypervisor below this machine took its processors.
    Hypervisor,
    /// Tasks waited for memory.
    Memory,
    /// The device had requests all the time.
    Device,
    /// The server was ready and had no processor.
    ServerWaits,
    /// The server was at work.
    Server,
    /// The client or guest was ready and had no processor.
    ClientWaits,
    /// The client or guest was at work.
    Client,
    /// All slept: a timer, a lock, or a program that was stopped.
    Nobody,
}

/// Bytes that passed each layer, and flushes, while a workload ran. A layer that cannot be seen is `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    /// What the program asked for, by its own account: read and written together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<f64>,
    /// The block device that the program's disk is: in the guest, or a loop device of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<Layer>,
    /// What the process that serves the disk (its server, else the guest's own) had fetched from and sent to storage, by
    /// the kernel's account.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<Moved>,
    /// The device of this machine that holds the disk's file. Other programs' traffic is in it, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<Layer>,
    /// Share of the time in which that device had requests in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_busy: Option<f64>,
    /// CPU seconds of the busiest single thread of the server a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_thread: Option<f64>,
    /// CPU seconds of the client (in a guest: all of it) a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_cpu: Option<f64>,
    /// CPU seconds of the busiest single thread of the client a second: of a virtual PC that is a processor of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_thread: Option<f64>,
    /// CPU seconds of the whole machine a second, by its number of processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<f64>,
    /// Share of the machine's time that its hypervisor took away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steal: Option<f64>,
    /// Share of the time in which some task waited for memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<f64>,
}

/// Bytes that a process moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    /// Bytes read.
    pub read: f64,
    /// Bytes written.
    pub written: f64,
}

/// Traffic of one block device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    /// Bytes read.
    pub read: f64,
    /// Bytes written.
    pub written: f64,
    /// Flushes.
    pub flushes: f64,
}

/// The name of the A/A twin of an arm.
pub fn twin(arm: &str) -> String {
    format!("{arm}#2")
}
