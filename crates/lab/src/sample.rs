//! A sample: what one workload measured on one arm in one round. One JSON line in `samples.jsonl`.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Where the load runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// This machine as it is.
    Host,
    /// A small guest that the lab boots.
    Guest,
}

impl Stage {
    /// All stages, in the order of the report.
    pub const ALL: [Stage; 2] = [Stage::Host, Stage::Guest];

    /// The name in plans and flags.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Host => "host",
            Stage::Guest => "guest",
        }
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
    /// CPU seconds of the server per GiB.
    ServerCpuGib: "server CPU", CpuPerGib, Lower;
    /// CPU seconds of the load generator per GiB.
    ClientCpuGib: "client CPU", CpuPerGib, Lower;
    /// CPU seconds of the whole machine per GiB.
    MachineCpuGib: "machine CPU", CpuPerGib, Lower;
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
    /// When it began, milliseconds since 1970 UTC.
    pub began_ms: u64,
    /// How long it took, with start-up of the tool, in seconds.
    pub seconds: f64,
    /// What was measured; empty when it failed.
    #[serde(default)]
    pub metrics: Metrics,
    /// What a reader must know about this run ("256 MiB instead of 1 GiB").
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Why there is no number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The name of the A/A twin of an arm.
pub fn twin(arm: &str) -> String {
    format!("{arm}#2")
}
