//! The life of a snapshot: how fast writes are while more and more of what they touch has been copied already. A volume
//! is written in ten equal parts in order, right after its snapshot was taken (each chunk is copied once), and then the
//! same parts once more (nothing is left to copy).

use super::machine::Machine;
use super::{Client, Listed, Measured, Settings, Workload};
use crate::error::{Error, Result};
use crate::sample::Metric;

/// Parts that the volume is written in.
pub const PARTS: u64 = 10;
/// Bytes of the volume that are written, at most.
pub const MOST: u64 = 256 << 20;
/// Bytes of one write.
const WRITE: u64 = 64 << 10;

/// Bytes of one part, for a volume of `size` bytes.
pub fn part(size: u64) -> u64 {
    (size.min(MOST) / PARTS / WRITE).max(1) * WRITE
}

/// A shell script that writes all parts twice and prints dd's last line for each.
///
/// Parts are written in order; the fsync behind each is within its clock.
pub fn script(device: &str, size: u64) -> String {
    let part = part(size);
    let count = part / WRITE;
    format!(
        "set -e\nexport LC_ALL=C\nfor pass in 1 2; do\n  n=0\n  while [ $n -lt {PARTS} ]; do\n    \
         dd if=/dev/zero of={device} bs={WRITE} count={count} seek=$((n * {count})) oflag=direct conv=notrunc,nocreat,fsync 2>&1 | tail -n 1\n    \
         n=$((n + 1))\n  done\ndone\n"
    )
}

/// Reads the twenty lines.
pub fn parse(stdout: &str, size: u64) -> Result<Measured> {
    let wrong = |found: String| Error::Output { what: "the lines of the snapshot's life", found };
    let lines: Vec<&str> = stdout.lines().filter(|line| line.contains(" copied, ")).collect();
    if lines.len() as u64 != 2 * PARTS {
        return Err(wrong(format!("{} lines of {}", lines.len(), 2 * PARTS)));
    }
    let part = part(size) as f64;
    let mut times = Vec::new();
    for line in lines {
        let (bytes, seconds) = super::dd::parse(line)?;
        if bytes != part {
            return Err(wrong(format!("{bytes} bytes written of {part}")));
        }
        times.push(seconds);
    }
    let (fresh, settled) = times.split_at(PARTS as usize);
    let rate = |times: &[f64]| part * times.len() as f64 / times.iter().sum::<f64>();
    let mut measured = Measured::default();
    measured.metrics.insert(Metric::FreshWrite, rate(fresh).into());
    measured.metrics.insert(Metric::SettledWrite, rate(settled).into());
    measured.metrics.insert(Metric::FirstWriteCost, (rate(settled) / rate(fresh)).into());
    measured.curve = fresh
        .iter()
        .enumerate()
        .map(|(at, seconds)| ((at as f64 + 0.5) / PARTS as f64, part / seconds))
        .chain(std::iter::once((1.0, rate(settled))))
        .collect();
    measured.note = Some(format!(
        "{} MiB in ten parts, 64 KiB direct writes in order with an fsync behind each part, right after the snapshot and \
         once more",
        (part * PARTS as f64) as u64 >> 20
    ));
    measured.bytes = Some(2.0 * part * PARTS as f64);
    measured.asked = measured.bytes;
    Ok(measured)
}

/// The workload.
pub struct Life;

const LISTED: Listed = Listed {
    name: "snapshot-life",
    title: "writes from fresh snapshot to settled",
    group: None,
    headline: &[Metric::FreshWrite, Metric::SettledWrite],
    quick: false,
};

/// The only one.
pub const WORKLOADS: &[&dyn Workload] = &[&Life];

impl Workload for Life {
    fn listed(&self) -> &Listed {
        &LISTED
    }
    fn client(&self) -> Client {
        Client::Script
    }
    fn seconds(&self, settings: &Settings) -> f64 {
        1.0 + 10.0 * settings.gib()
    }
    fn run(&self, machine: &dyn Machine) -> Result<Measured> {
        let size = machine.settings().size;
        parse(&machine.script(&script(machine.disk(), size))?, size)
    }
    fn of_snapshots(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_really_prints_what_is_read() {
        let dir = tempfile::Builder::new().tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let disk = dir.path().join("disk");
        let size = 8 << 20;
        std::fs::write(&disk, vec![1; size as usize]).unwrap();
        let output = std::process::Command::new("sh")
            .args(["-c", &script(disk.to_str().unwrap(), size)])
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let measured = parse(&text, size).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert_eq!(measured.curve.len(), 11);
        assert!(measured.metrics[&Metric::FreshWrite].value > 0.0);
        assert_eq!(std::fs::metadata(&disk).unwrap().len(), size);
        let lines: Vec<&str> = text.lines().collect();
        assert!(parse(&lines[1..].join("\n"), size).is_err());
    }

    #[test]
    fn the_cost_of_a_first_write() {
        let line =
            |seconds: f64| format!("26214400 bytes (26 MB, 25 MiB) copied, {seconds} s, 1 MB/s\n");
        let text: String = (0..10).map(|_| line(0.5)).chain((0..10).map(|_| line(0.1))).collect();
        let measured = parse(&text, 250 << 20).unwrap();
        assert!((measured.metrics[&Metric::FirstWriteCost].value - 5.0).abs() < 1e-9);
        assert_eq!(measured.asked, Some(2.0 * 262_144_000.0), "for the ledger");
        assert_eq!(measured.curve[0].0, 0.05);
        assert!(measured.curve[10].0 == 1.0 && (measured.curve[10].1 - 262_144_000.0).abs() < 1.0);
    }
}
