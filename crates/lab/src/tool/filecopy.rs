//! UnixBench's file copy by its published method: one file is written, read, and copied to another through a small
//! buffer for a given time, each file rewound at its end. The score is bytes copied a second.
//!
//! Nothing is synced within the clock, so it measures the page cache; the durable variant brings each pass over the
//! file to the disk (`fdatasync`) before the next, within the clock.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

/// A test: bytes of the buffer, KiB of the file, and UnixBench's baseline in KiB/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Bytes of one read and one write.
    pub buffer: usize,
    /// KiB of the file.
    pub blocks: u64,
    /// What index 10 stands for, in KiB/s.
    pub baseline: f64,
}

/// The three tests, as UnixBench names them: 256/500, 1024/2000, 4096/8000.
pub const SHAPES: [Shape; 3] = [
    Shape { buffer: 256, blocks: 500, baseline: 1655.0 },
    Shape { buffer: 1024, blocks: 2000, baseline: 3960.0 },
    Shape { buffer: 4096, blocks: 8000, baseline: 5800.0 },
];

/// The write test and the read test before each copy last so long at most.
const WARM: Duration = Duration::from_secs(2);

/// One test's rates in KiB/s.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Bytes of the buffer.
    pub buffer: usize,
    /// Writing the file.
    pub write: f64,
    /// Reading it.
    pub read: f64,
    /// Copying it: the score.
    pub copy: f64,
    /// Seconds that the copy really took.
    pub seconds: f64,
    /// Passes over the whole file within the copy.
    pub passes: u64,
    /// Bytes read and written in all three.
    pub asked: u64,
}

/// The index of a set of scores: ten times the geometric mean of score by baseline.
pub fn index(outcomes: &[Outcome]) -> Option<f64> {
    let logs: Vec<f64> = outcomes
        .iter()
        .filter_map(|outcome| {
            let shape = SHAPES.iter().find(|shape| shape.buffer == outcome.buffer)?;
            (outcome.copy > 0.0).then(|| (outcome.copy / shape.baseline).ln())
        })
        .collect();
    (logs.len() == SHAPES.len())
        .then(|| 10.0 * (logs.iter().sum::<f64>() / logs.len() as f64).exp())
}

/// Runs the three tests in `dir`, each copy for `time`. The two files are removed again.
pub fn run(dir: &Path, time: Duration, durable: bool) -> anyhow::Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    for shape in SHAPES {
        let from = tempfile::NamedTempFile::new_in(dir)
            .with_context(|| format!("cannot make a file in {}", dir.display()))?;
        let to = tempfile::NamedTempFile::new_in(dir)
            .with_context(|| format!("cannot make a file in {}", dir.display()))?;
        let outcome = copy(from.as_file(), to.as_file(), shape, time, durable);
        outcomes.push(outcome.with_context(|| format!("cannot copy in {}", dir.display()))?);
    }
    Ok(outcomes)
}

fn copy(
    mut from: &File,
    mut to: &File,
    shape: Shape,
    time: Duration,
    durable: bool,
) -> io::Result<Outcome> {
    let size = shape.blocks * 1024;
    let mut buffer: Vec<u8> = (0..shape.buffer).map(|i| i as u8).collect();
    let warm = time.min(WARM);

    rustix::fs::sync();
    let clock = Instant::now();
    let (mut written, mut at) = (0u64, 0u64);
    while clock.elapsed() < warm || written < size {
        from.write_all(&buffer)?;
        written += buffer.len() as u64;
        at += buffer.len() as u64;
        if at >= size {
            from.rewind()?;
            at = 0;
        }
    }
    let write = rate(written, clock.elapsed());

    from.rewind()?;
    rustix::fs::sync();
    let clock = Instant::now();
    let mut taken = 0u64;
    while clock.elapsed() < warm {
        match from.read(&mut buffer)? {
            0 => from.rewind()?,
            count => taken += count as u64,
        }
    }
    let read = rate(taken, clock.elapsed());

    from.rewind()?;
    rustix::fs::sync();
    let clock = Instant::now();
    let (mut copied, mut passes) = (0u64, 0u64);
    while clock.elapsed() < time {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            if durable {
                to.sync_data()?;
            }
            passes += 1;
            from.rewind()?;
            to.rewind()?;
            continue;
        }
        to.write_all(&buffer[..count])?;
        copied += count as u64;
    }
    if durable {
        // What was copied counts once it is on the disk.
        to.sync_data()?;
    }
    let elapsed = clock.elapsed();
    Ok(Outcome {
        buffer: shape.buffer,
        write,
        read,
        copy: rate(copied, elapsed),
        seconds: elapsed.as_secs_f64(),
        passes,
        asked: written + taken + 2 * copied,
    })
}

fn rate(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / 1024.0 / time.as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_of_the_baselines_is_ten_and_of_published_scores_as_published() {
        let of = |copies: [f64; 3]| -> Vec<Outcome> {
            SHAPES
                .iter()
                .zip(copies)
                .map(|(shape, copy)| Outcome {
                    buffer: shape.buffer,
                    write: 0.0,
                    read: 0.0,
                    copy,
                    seconds: 1.0,
                    passes: 0,
                    asked: 0,
                })
                .collect()
        };
        assert!((index(&of([1655.0, 3960.0, 5800.0])).unwrap() - 10.0).abs() < 1e-9);
        // Native of the published pair: 925.1, 1336.1 and 2083.2 alone.
        let native = index(&of([153_098.5, 529_094.5, 1_208_281.0])).unwrap();
        assert!((native - (925.1f64 * 1336.1 * 2083.2).cbrt()).abs() < 0.5, "{native}");
        assert_eq!(index(&of([0.0, 1.0, 1.0])), None);
    }

    #[test]
    fn copies_are_whole_and_leave_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let from = tempfile::NamedTempFile::new_in(dir.path()).unwrap();
        let to = tempfile::NamedTempFile::new_in(dir.path()).unwrap();
        let shape = Shape { buffer: 4096, blocks: 64, baseline: 1.0 };
        let outcome =
            copy(from.as_file(), to.as_file(), shape, Duration::from_millis(50), true).unwrap();
        assert!(outcome.passes > 0 && outcome.copy > 0.0, "{outcome:?}");
        // Each pass reads and writes the whole file, and it was written and read before.
        assert!(outcome.asked > (2 * outcome.passes + 2) * (64 << 10), "{outcome:?}");
        assert_eq!(std::fs::metadata(from.path()).unwrap().len(), 64 << 10);
        assert_eq!(std::fs::read(from.path()).unwrap(), std::fs::read(to.path()).unwrap());
        drop((from, to));
        run(dir.path(), Duration::from_millis(10), false).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
