//! Does a flush of the program become a flush at the layer below? A disk of the lab's own loop device is served, the
//! program writes and syncs, and the kernel's count of flushes on that loop device is read before and after.

use std::path::Path;

use ringtap_guest::fio::Report;

use super::job::Target;
use super::{Client, Listed, Measured, Settings, Workload};
use crate::env::{Env, Missing};
use crate::error::Result;
use crate::sample::{Layer, Metric};

/// Writes, each with an fsync behind it.
pub const SYNCS: u64 = 100;
/// Fewer flushes than this for each fsync is no durability. (The last fsync may share its flush with closing.)
pub const DURABLE: f64 = 0.9;
/// Bytes of the disk.
pub const BYTES: u64 = 32 << 20;

/// fio's arguments: 4 KiB written and synced, one after the other.
pub fn args(target: &Target) -> Vec<String> {
    let mut args = vec!["--name=sync".to_owned(), "--thread".into()];
    args.extend(target.args("psync"));
    args.extend([
        "--rw=write".into(),
        "--bs=4096".into(),
        format!("--size={}", SYNCS * 4096),
        "--fsync=1".into(),
        "--end_fsync=1".into(),
        "--output-format=json".into(),
    ]);
    args
}

/// dd's arguments for the same, where there is no fio: each write is durable before the next.
pub fn dd_args(device: &str) -> Vec<String> {
    vec![
        "if=/dev/zero".into(),
        format!("of={device}"),
        "bs=4096".into(),
        format!("count={SYNCS}"),
        "oflag=direct,dsync".into(),
        "conv=notrunc,nocreat".into(),
    ]
}

/// Writes that dd says it made.
pub fn writes_of_dd(stderr: &str) -> Result<f64> {
    Ok(super::dd::parse(stderr)?.0 / 4096.0)
}

/// `ringtap-lab load`'s arguments for the same: (arguments, whether the count of writes is in its JSON).
pub fn load_args(socket: &Path, settings: &Settings) -> Vec<String> {
    let socket = socket.display().to_string();
    let seconds = settings.run.as_secs_f64().min(0.5).to_string();
    let words = ["load", "--socket", &socket, "--rw", "write", "--bs", "4k", "--depth", "1"];
    let more = ["--fsync-every", "1", "--seconds", &seconds, "--output", "json"];
    words.iter().chain(&more).map(|word| (*word).to_owned()).collect()
}

/// Writes that fio says it made.
pub fn writes_of_fio(text: &str) -> Result<f64> {
    Ok(Report::parse(text)?.first()?.done(true)?.total_ios)
}

/// Flushes by syncs.
pub fn measured(syncs: f64, below: Layer) -> Measured {
    let mut measured = Measured::default();
    measured.metrics.insert(Metric::FlushPerSync, (below.flushes / syncs).into());
    measured.note = Some(format!(
        "{} flushes reached the layer below for {} writes, each with an fsync",
        below.flushes, syncs
    ));
    measured
}

/// The workload.
pub struct Durability;

const LISTED: Listed = Listed {
    name: "durability",
    title: "does each fsync reach the disk",
    group: None,
    headline: &[],
    quick: false,
};

/// The only one.
pub const WORKLOADS: &[&dyn Workload] = &[&Durability];

impl Workload for Durability {
    fn listed(&self) -> &Listed {
        &LISTED
    }
    fn client(&self) -> Client {
        Client::Flushes
    }
    fn seconds(&self, _: &Settings) -> f64 {
        1.5
    }
    fn missing(&self, env: &Env) -> Option<Missing> {
        env.loop_devices()
            .or_else(|| env.program("mkfs.ext4", "e2fsprogs"))
            .or_else(|| env.program("fio", "fio"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_really_syncs_that_often() {
        if crate::process::find("fio").is_none() {
            eprintln!("skipped: fio is not installed");
            return;
        }
        let dir = tempfile::Builder::new().tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let file = dir.path().join("disk");
        std::fs::write(&file, vec![0; 1 << 20]).unwrap();
        let output = std::process::Command::new("fio")
            .args(args(&Target::Path(file.display().to_string())))
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(writes_of_fio(&text).unwrap(), SYNCS as f64);
        assert!(writes_of_fio("nothing").is_err() && writes_of_fio("{}").is_err());
    }
}
