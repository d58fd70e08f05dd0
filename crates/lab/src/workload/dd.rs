//! dd, as the published comparisons used it: one large direct write for throughput, 1000 writes of 512 bytes for
//! latency.

use super::machine::Machine;
use super::{Client, Listed, Measured, Settings, Workload};
use crate::error::{Error, Result};
use crate::sample::Metric;

/// How each small write is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    /// O_DIRECT: past the page cache of whoever runs dd. Not durable.
    Direct,
    /// O_DSYNC: each write durable before the next.
    Dsync,
}

impl Flag {
    /// dd's word.
    pub fn name(self) -> &'static str {
        match self {
            Flag::Direct => "direct",
            Flag::Dsync => "dsync",
        }
    }
}

/// Small writes of the latency test.
pub const SMALL_COUNT: u64 = 1000;
/// Seconds after which a guest makes no more of them: a disk that is emulated on a translated processor may take a quarter
/// of a second for each.
pub const SMALL_SECONDS: u64 = 20;
/// Their size in bytes.
pub const SMALL_BYTES: u64 = 512;
const GIB: u64 = 1 << 30;

/// The throughput test: (bytes of one write, count, a note where it is not 1 GiB at once). dd holds one write in
/// memory (`memory` bytes may be used for it) and the disk may be smaller than 1 GiB.
pub fn throughput_shape(size: u64, memory: u64) -> (u64, u64, Option<String>) {
    let total = size.min(GIB);
    let mut block = total;
    while block > memory && block > 1 << 20 {
        block /= 2;
    }
    let count = total / block;
    let note = (block != GIB).then(|| {
        let writes = if count == 1 { "one write".into() } else { format!("{count} writes") };
        format!(
            "{} MiB in {writes} instead of 1 GiB in one: so much is there",
            (block * count) >> 20
        )
    });
    (block, count, note)
}

/// dd's arguments for the throughput test.
pub fn throughput_args(path: &str, block: u64, count: u64, flag: Flag) -> Vec<String> {
    args(path, block, count, flag)
}

/// dd's arguments for the latency test.
pub fn latency_args(path: &str, flag: Flag) -> Vec<String> {
    args(path, SMALL_BYTES, SMALL_COUNT, flag)
}

fn args(path: &str, block: u64, count: u64, flag: Flag) -> Vec<String> {
    vec![
        "if=/dev/zero".into(),
        format!("of={path}"),
        format!("bs={block}"),
        format!("count={count}"),
        format!("oflag={}", flag.name()),
        // A disk keeps its size.
        "conv=notrunc,nocreat".into(),
    ]
}

/// Reads the last line of dd's stderr: (bytes, seconds). The rate that dd prints has two or three digits, so it is not
/// used. coreutils under LC_ALL=C and busybox both say `N bytes (…) copied, S …s`.
pub fn parse(stderr: &str) -> Result<(f64, f64)> {
    let wrong = || Error::Output { what: "dd's last line", found: format!("{:?}", stderr.trim()) };
    let line = stderr.lines().rev().find(|line| line.contains(" copied, ")).ok_or_else(wrong)?;
    let bytes: f64 =
        line.split_whitespace().next().and_then(|word| word.parse().ok()).ok_or_else(wrong)?;
    let after = line.split(" copied, ").nth(1).ok_or_else(wrong)?;
    let seconds: f64 =
        after.split_whitespace().next().and_then(|word| word.parse().ok()).ok_or_else(wrong)?;
    if bytes <= 0.0 || seconds <= 0.0 { Err(wrong()) } else { Ok((bytes, seconds)) }
}

/// The throughput test's result.
pub fn throughput(stderr: &str, asked: u64, note: Option<String>) -> Result<Measured> {
    let (bytes, seconds) = whole(stderr, asked)?;
    let mut measured =
        Measured { note, bytes: Some(bytes), asked: Some(bytes), ..Measured::default() };
    measured.metrics.insert(Metric::Bandwidth, (bytes / seconds).into());
    Ok(measured)
}

/// The latency test's result.
pub fn latency(stderr: &str) -> Result<Measured> {
    let (bytes, seconds) = parse(stderr)?;
    let count = bytes / SMALL_BYTES as f64;
    if count > SMALL_COUNT as f64 {
        return Err(Error::Output {
            what: "dd's last line",
            found: format!("{bytes} bytes written of {}", SMALL_BYTES * SMALL_COUNT),
        });
    }
    let note = (count < SMALL_COUNT as f64)
        .then(|| format!("{count:.0} writes in {seconds:.0} s instead of {SMALL_COUNT}"));
    let mut measured =
        Measured { note, ios: Some(count), asked: Some(bytes), ..Measured::default() };
    measured.metrics.insert(Metric::TimePerOp, (seconds * 1e9 / count).into());
    Ok(measured)
}

fn whole(stderr: &str, asked: u64) -> Result<(f64, f64)> {
    let (bytes, seconds) = parse(stderr)?;
    if bytes != asked as f64 {
        return Err(Error::Output {
            what: "dd's last line",
            found: format!("{bytes} bytes written of {asked}"),
        });
    }
    Ok((bytes, seconds))
}

/// One large write, or many small ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Test {
    Throughput,
    Latency,
}

/// One of dd's two tests.
pub struct Dd {
    listed: Listed,
    test: Test,
    flag: Flag,
    seconds: f64,
}

const fn test(name: &'static str, title: &'static str, test: Test, flag: Flag) -> Dd {
    let (headline, quick): (&[Metric], bool) = match test {
        Test::Throughput => (&[Metric::Bandwidth], false),
        Test::Latency => (&[Metric::TimePerOp], matches!(flag, Flag::Direct)),
    };
    let seconds = match (test, flag) {
        (Test::Throughput, _) => 0.1,
        (Test::Latency, Flag::Direct) => 0.3,
        (Test::Latency, Flag::Dsync) => 1.5,
    };
    Dd { listed: Listed { name, title, group: Some("dd"), headline, quick }, test, flag, seconds }
}

/// dd's.
pub const WORKLOADS: &[&dyn Workload] = &[
    &test("dd-throughput", "dd, one large direct write", Test::Throughput, Flag::Direct),
    &test("dd-throughput-dsync", "dd, one large write made durable", Test::Throughput, Flag::Dsync),
    &test("dd-latency-direct", "dd, 1000 writes of 512 bytes, direct", Test::Latency, Flag::Direct),
    &test(
        "dd-latency-dsync",
        "dd, 1000 writes of 512 bytes, each made durable",
        Test::Latency,
        Flag::Dsync,
    ),
];

impl Workload for Dd {
    fn listed(&self) -> &Listed {
        &self.listed
    }
    fn client(&self) -> Client {
        Client::Dd
    }
    fn seconds(&self, settings: &Settings) -> f64 {
        match self.test {
            Test::Throughput => self.seconds + 2.0 * settings.gib(),
            Test::Latency => self.seconds,
        }
    }
    fn run(&self, machine: &dyn Machine) -> Result<Measured> {
        let (disk, size) = (machine.disk(), machine.settings().size);
        match self.test {
            Test::Throughput => {
                let (block, count, note) = throughput_shape(size, machine.memory() / 4);
                let said = machine.dd(&throughput_args(disk, block, count, self.flag), None)?;
                throughput(&said, block * count, note)
            }
            Test::Latency => {
                latency(&machine.dd(&latency_args(disk, self.flag), Some(SMALL_SECONDS))?)
            }
        }
    }
    fn writes_steadily(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REAL: &str = "256+0 records in\n256+0 records out\n268435456 bytes (268 MB, 256 MiB) copied, 0.223113 s, 1.2 GB/s\n";

    #[test]
    fn the_rate_is_computed_not_read() {
        let measured = throughput(REAL, 268_435_456, None).unwrap();
        assert!(
            (measured.metrics[&Metric::Bandwidth].value - 268_435_456.0 / 0.223113).abs() < 1.0
        );
    }

    #[test]
    fn latency_is_time_by_count() {
        let text = "1000+0 records in\n1000+0 records out\n512000 bytes (512 kB, 500 KiB) copied, 0.056 s, 9.1 MB/s";
        let measured = latency(text).unwrap();
        assert!((measured.metrics[&Metric::TimePerOp].value - 56_000.0).abs() < 1e-6);
        assert_eq!(measured.asked, Some(512_000.0), "for the ledger");
        assert_eq!(measured.note, None);
        let cut = "80+0 records in\n80+0 records out\n40960 bytes (41 kB, 40 KiB) copied, 20.0 s, 2.0 kB/s";
        let cut = latency(cut).unwrap();
        assert!((cut.metrics[&Metric::TimePerOp].value - 0.25e9).abs() < 1.0);
        assert_eq!(cut.note.as_deref(), Some("80 writes in 20 s instead of 1000"));
        let busybox = "1000+0 records in\n1000+0 records out\n512000 bytes (500.0KB) copied, 0.056000 seconds, 8.7MB/s";
        assert!(
            (latency(busybox).unwrap().metrics[&Metric::TimePerOp].value - 56_000.0).abs() < 1e-6
        );
    }

    #[test]
    fn less_than_asked_is_no_result() {
        assert!(throughput(REAL, 1 << 30, None).is_err());
        assert!(parse("dd: error writing '/dev/vda': No space left on device").is_err());
        assert!(parse("0 bytes copied, 0.0 s, 0 B/s").is_err());
        let german = "268435456 bytes (268 MB, 256 MiB) kopiert, 0,223113 s, 1,2 GB/s";
        assert!(parse(german).is_err(), "the lab asks for LC_ALL=C, and guesses no other");
    }

    #[test]
    fn smaller_is_said() {
        assert_eq!(throughput_shape(4 << 30, 8 << 30), (1 << 30, 1, None));
        let (block, count, note) = throughput_shape(256 << 20, 8 << 30);
        assert_eq!((block, count), (256 << 20, 1));
        assert!(note.unwrap().starts_with("256 MiB in one write"));
        let (block, count, note) = throughput_shape(1 << 30, 100 << 20);
        assert_eq!((block, count), (64 << 20, 16));
        assert!(note.unwrap().starts_with("1024 MiB in 16 writes"));
    }
}
