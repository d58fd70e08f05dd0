//! bonnie++: the real program, on a file system.

pub mod csv;

use super::Measured;
use crate::error::Result;
use crate::sample::{Metric, Metrics};

/// How bonnie++ is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// MiB of its data files.
    pub size_mib: u64,
    /// Thousands of small files (bonnie++'s unit is 1024).
    pub files: u64,
    /// Data past the page cache (`-D`).
    pub direct: bool,
}

/// The shape that a disk of `disk` bytes carries: two thirds of it for data (`direct`: past the cache, where less
/// suffices, a third), and few enough small files to fit beside it.
pub fn shape(disk: u64, direct: bool) -> Shape {
    let share = if direct { disk / 3 } else { disk / 3 * 2 };
    let size_mib = (share >> 20).max(2);
    Shape { size_mib, files: if size_mib >= 128 { 4 } else { 1 }, direct }
}

/// bonnie++'s arguments on directory `dir`.
///
/// `-f` leaves out the per-character tests, which take minutes. `-r` tells bonnie++ a memory size of half the data, so
/// that it accepts them; the true size beside the machine's memory is in the note.
pub fn args(dir: &str, shape: Shape) -> Vec<String> {
    let Shape { size_mib, files, direct } = shape;
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
    .chain(["-u", "root", "-f", "-q", "-m", "lab"].map(str::to_owned))
    .chain(direct.then(|| "-D".to_owned()))
    .collect()
}

/// Reads bonnie++'s stdout (`-q`: nothing but the CSV line).
pub fn parse(stdout: &str, shape: Shape, memory: u64) -> Result<Measured> {
    let row = csv::Row::find(stdout)?;
    let mut metrics = Metrics::new();
    for (metric, phase) in &row.phases {
        if let Some(rate) = phase.rate {
            metrics.insert(*metric, rate);
        }
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
    let note = format!(
        "bonnie++ {version}: {size_mib} MiB of data{cached}; {files}×1024 files; no per-character tests (-f)"
    );
    Ok(Measured { metrics, note: Some(note), ..Measured::default() })
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
