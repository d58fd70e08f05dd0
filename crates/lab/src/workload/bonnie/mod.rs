//! bonnie++: the real program, on a file system.

pub mod csv;
pub mod runs;

use super::machine::{Machine, Tool};
use super::{Client, Listed, Measured, Settings, Workload};
use crate::env::{Env, Missing};
use crate::error::Result;
use crate::sample::{Metric, Metrics};

/// Which of its ways bonnie++ is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Through the page cache.
    Cached,
    /// Past it (`-D`).
    Direct,
    /// As it was published: through the page cache, per-character tests too, and sixteen thousand files.
    Whole,
}

/// How bonnie++ is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// MiB of its data files.
    pub size_mib: u64,
    /// Thousands of small files (bonnie++'s unit is 1024).
    pub files: u64,
    /// Data past the page cache (`-D`).
    pub direct: bool,
    /// The per-character tests, too.
    pub chars: bool,
}

/// The shape that a disk of `disk` bytes carries: two thirds of it for data (`direct`: past the cache, where less
/// suffices, a third), and few enough small files to fit beside it.
pub fn shape(disk: u64, mode: Mode) -> Shape {
    let (direct, chars) = (mode == Mode::Direct, mode == Mode::Whole);
    let share = if direct { disk / 3 } else { disk / 3 * 2 };
    let size_mib = (share >> 20).max(2);
    let files = match size_mib {
        ..128 => 1,
        _ if chars => 16,
        _ => 4,
    };
    Shape { size_mib, files, direct, chars }
}

/// bonnie++'s arguments on directory `dir`.
///
/// `-f` leaves out the per-character tests, which take long. `-r` tells bonnie++ a memory size of half the data, so
/// that it accepts them; the true size beside the machine's memory is in the note.
pub fn args(dir: &str, shape: Shape) -> Vec<String> {
    let Shape { size_mib, files, direct, chars } = shape;
    [
        "-d",
        dir,
        "-s",
        &size_mib.to_string(),
        "-r",
        &(size_mib / 2).to_string(),
        "-n",
        &files.to_string(),
    ]
    .iter()
    .map(|word| (*word).to_owned())
    .chain(["-u", "root", "-q", "-m", "lab"].map(str::to_owned))
    .chain((!chars).then(|| "-f".to_owned()))
    .chain(direct.then(|| "-D".to_owned()))
    .collect()
}

/// Reads bonnie++'s stdout (`-q`: nothing but the CSV line).
pub fn parse(stdout: &str, shape: Shape, memory: u64) -> Result<Measured> {
    let row = csv::Row::find(stdout)?;
    let mut metrics = Metrics::new();
    for ((metric, cpu), slowest) in PHASES.into_iter().zip(CPU).zip(SLOWEST) {
        let Some(phase) = row.phases.get(&metric) else { continue };
        let more = [
            (cpu, phase.cpu_percent.map(|percent| (percent / 100.0).into())),
            (slowest, phase.slowest_ns.map(Into::into)),
        ];
        let all = std::iter::once((metric, phase.rate)).chain(more);
        metrics.extend(all.filter_map(|(metric, value)| Some((metric, value?))));
    }
    let cached = match shape.direct {
        true => " past the cache (-D)",
        false if (shape.size_mib << 20) < 2 * memory => {
            ", less than twice the memory: caches take part"
        }
        false => "",
    };
    let version = &row.version;
    let Shape { size_mib, files, .. } = shape;
    let chars = if shape.chars { "" } else { "; no per-character tests (-f)" };
    let note =
        format!("bonnie++ {version}: {size_mib} MiB of data{cached}; {files}×1024 files{chars}");
    let asked = Some(row.asked()).filter(|bytes| *bytes > 0.0);
    Ok(Measured { metrics, note: Some(note), asked, ..Measured::default() })
}

/// The version that a note of [`parse`] names.
pub fn version(note: &str) -> Option<&str> {
    note.strip_prefix("bonnie++ ")?.split_once(": ").map(|(version, _)| version)
}

/// The phases of bonnie++, in its order.
pub const PHASES: [Metric; 12] = [
    Metric::PutChar,
    Metric::PutBlock,
    Metric::Rewrite,
    Metric::GetChar,
    Metric::GetBlock,
    Metric::Seeks,
    Metric::SeqCreate,
    Metric::SeqStat,
    Metric::SeqDelete,
    Metric::RandCreate,
    Metric::RandStat,
    Metric::RandDelete,
];

/// The share of a processor that each took, by bonnie++'s own account.
pub const CPU: [Metric; 12] = [
    Metric::PutCharCpu,
    Metric::PutBlockCpu,
    Metric::RewriteCpu,
    Metric::GetCharCpu,
    Metric::GetBlockCpu,
    Metric::SeeksCpu,
    Metric::SeqCreateCpu,
    Metric::SeqStatCpu,
    Metric::SeqDeleteCpu,
    Metric::RandCreateCpu,
    Metric::RandStatCpu,
    Metric::RandDeleteCpu,
];

/// The slowest operation of each.
pub const SLOWEST: [Metric; 12] = [
    Metric::PutCharSlowest,
    Metric::PutBlockSlowest,
    Metric::RewriteSlowest,
    Metric::GetCharSlowest,
    Metric::GetBlockSlowest,
    Metric::SeeksSlowest,
    Metric::SeqCreateSlowest,
    Metric::SeqStatSlowest,
    Metric::SeqDeleteSlowest,
    Metric::RandCreateSlowest,
    Metric::RandStatSlowest,
    Metric::RandDeleteSlowest,
];

/// One run of it.
pub struct Bonnie {
    listed: Listed,
    mode: Mode,
}

/// The columns that get a verdict.
pub const HEADLINE: &[Metric] =
    &[Metric::PutBlock, Metric::Rewrite, Metric::GetBlock, Metric::Seeks];

const fn once(name: &'static str, title: &'static str, mode: Mode) -> Bonnie {
    let (group, headline) = (Some("bonnie++"), HEADLINE);
    Bonnie { listed: Listed { name, title, group, headline, quick: false }, mode }
}

/// bonnie++'s, on one disk.
pub const WORKLOADS: &[&dyn Workload] = &[
    &once("bonnie", "bonnie++ on ext4, through the page cache", Mode::Cached),
    &once("bonnie-direct", "bonnie++ on ext4, past the page cache", Mode::Direct),
    &once("bonnie-whole", "bonnie++ on ext4, all twelve columns", Mode::Whole),
    &runs::Runs,
];

impl Workload for Bonnie {
    fn listed(&self) -> &Listed {
        &self.listed
    }
    fn client(&self) -> Client {
        Client::Files
    }
    fn seconds(&self, settings: &Settings) -> f64 {
        match self.mode {
            Mode::Whole => 15.0 + 60.0 * settings.gib(),
            Mode::Cached | Mode::Direct => 4.0 + 25.0 * settings.gib(),
        }
    }
    fn missing(&self, env: &Env) -> Option<Missing> {
        env.program("bonnie++", "bonnie++")
    }
    fn run(&self, machine: &dyn Machine) -> Result<Measured> {
        let shape = shape(machine.settings().size, self.mode);
        machine.files(&mut |files| {
            let said = files.run(Tool::Bonnie, &args(files.dir(), shape))?;
            parse(&said, shape, machine.memory())
        })
    }
    fn has_columns(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

    use super::*;

    /// What the kernel counted of a program that has ended and was not asked for yet.
    fn moved(pid: u32) -> f64 {
        let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
        let of = |key: &str| -> f64 {
            let line = io.lines().find_map(|line| line.strip_prefix(key)).unwrap();
            line.trim().parse().unwrap()
        };
        of("rchar:") + of("wchar:")
    }

    #[test]
    fn the_program_moves_the_bytes_that_the_ledger_says() {
        let Some(program) = crate::process::find("bonnie++") else {
            eprintln!("skipped: bonnie++ is not installed");
            return;
        };
        let dir = tempfile::Builder::new().tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let shape = Shape { size_mib: 32, files: 1, direct: false, chars: false };
        let child = Command::new(program)
            .args(args(dir.path().to_str().unwrap(), shape))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let pid = Pid::from_child(&child);
        waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
        let counted = moved(child.id());
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let row = csv::Row::find(&text).unwrap();
        let seeks = 8192.0 * 8192.0 * 1.1;
        let said = parse(&text, shape, 1 << 30).unwrap().asked.unwrap();
        assert_eq!(said, 4.0 * f64::from(32 << 20) + seeks, "{row:?}");
        assert!((0.97..1.03).contains(&(said / counted)), "{said} said, {counted} counted");
    }
}
