//! Where a workload runs, as it sees it: this machine or a guest, and the disk that is measured. Stages say how the programs are run there.

use super::job::{Job, Target};
use super::{Measured, Settings};
use crate::error::{Error, Result};

/// A machine with the disk that is measured.
pub trait Machine {
    /// What all arms of the round share.
    fn settings(&self) -> &Settings;
    /// Bytes of its memory.
    fn memory(&self) -> u64;
    /// The disk, as a file or block device there.
    fn disk(&self) -> &str;
    /// The disk, as fio is told of it.
    fn target(&self) -> Target;
    /// Runs one of fio's jobs, or the same by `ringtap-lab load` where the disk is reached by that.
    fn job(&self, job: Job) -> Result<Measured>;
    /// Runs fio on a job file of that text, and returns its JSON.
    fn job_file(&self, text: &str) -> Result<String>;
    /// Runs fio with the words that belong to a log of that name.
    fn logged(&self, words: &dyn Fn(&str) -> Vec<String>) -> Result<Logged>;
    /// Runs dd, in a guest for so many seconds at most, and returns what it says on stderr.
    fn dd(&self, words: &[String], most: Option<u64>) -> Result<String>;
    /// Runs a script of the shell's and returns what it prints.
    fn script(&self, script: &str) -> Result<String>;
    /// Does work on a new file system on the disk. From then on costs count.
    fn files(&self, work: &mut dyn FnMut(&dyn Files) -> Result<Measured>) -> Result<Measured>;
    /// Starts from the image that the disk is.
    fn start(&self) -> Result<Measured> {
        Err(Error::Plan("only an image behind HTTP is started from".into()))
    }
}

/// What fio has said and logged.
pub struct Logged {
    /// Its JSON.
    pub json: String,
    /// Its log, by the machine's clock.
    pub log: String,
    /// By how many milliseconds that clock is ahead of this machine's.
    pub ahead_ms: f64,
}

/// A program that works on files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// bonnie++.
    Bonnie,
    /// This binary.
    Own,
}

/// A file system on the disk.
pub trait Files {
    /// Where it is mounted.
    fn dir(&self) -> &str;
    /// Runs a program and returns what it prints.
    fn run(&self, tool: Tool, words: &[String]) -> Result<String>;
    /// Has the blocks of what was removed given out again.
    fn settle(&self) -> Result<()>;
    /// Drops all of it from caches. From then on costs count.
    fn cold(&self) -> Result<()>;
    /// Runs a command of the shell's; what it says on stderr, and the seconds that it took.
    fn timed(&self, command: &str) -> Result<(String, f64)>;
}
