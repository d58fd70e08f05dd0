//! Ways of serving a disk set side by side, with honest statistics and a report.
//!
//! A run is a [`plan`]: stages × backends × workloads × rounds. [`run`] carries it out and leaves a folder of facts and
//! samples; [`report()`] makes tables and a page from that folder, by the statistics of [`stats`]. The lab runs programs,
//! `ringtap` among them, and shares no code with what it measures. `ringtap-lab` is its binary, and `crates/load` a client that it
//! brings along.

pub mod backend;
pub mod cli;
mod compare;
pub mod cost;
pub mod env;
pub mod error;
pub mod host;
pub mod plan;
pub mod process;
pub mod remote;
pub mod report;
pub mod run;
pub mod sample;
pub mod selftest;
pub mod stage;
pub mod stats;
pub mod stop;
pub mod tool;
pub mod workload;

pub use cli::{CompareArgs, ReportArgs};
pub use compare::{FAILED, PARTIAL, USAGE, compare, report};
pub use tool::ToolArgs;
