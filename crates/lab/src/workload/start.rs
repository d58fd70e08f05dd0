//! What a guest's start reads, by fio's NBD engine: the same reads in each run, nine of ten from one tenth of the disk, a sixteenth of its
//! bytes in all.

use ringtap_guest::fio::Report;

use super::machine::Machine;
use super::{Client, Listed, Measured, Settings, Workload};
use crate::error::Result;
use crate::sample::Metric;

/// fio's arguments.
pub fn args(uri: &str, settings: &Settings) -> Vec<String> {
    let size = settings.size;
    vec![
        "--name=start".into(),
        "--thread".into(),
        "--ioengine=nbd".into(),
        format!("--uri={uri}"),
        "--rw=randread".into(),
        "--bssplit=4k/40:16k/30:64k/30".into(),
        "--iodepth=4".into(),
        "--norandommap".into(),
        // A start reads the same as the last one.
        "--randseed=1".into(),
        "--random_distribution=zoned:90/10:10/90".into(),
        format!("--size={size}"),
        format!("--io_size={}", size / 16),
        "--output-format=json".into(),
    ]
}

/// Reads fio's JSON, for whether all was read.
pub fn parse(text: &str, seconds: f64) -> Result<Measured> {
    let report = Report::parse(text)?;
    let side = report.first()?.done(false)?;
    let mut measured = Measured::default();
    measured.metrics.insert(Metric::Elapsed, (seconds * 1e9).into());
    measured.note = Some(format!(
        "{} reads of {} MiB in all, from when there is nothing on this machine",
        side.total_ios,
        side.io_bytes as u64 >> 20
    ));
    Ok(measured)
}

/// The workload.
pub struct Start;

const LISTED: Listed = Listed {
    name: "start",
    title: "what a guest's start reads, from an image of which nothing is here",
    group: None,
    headline: &[Metric::Elapsed],
    quick: false,
};

/// The only one.
pub const WORKLOADS: &[&dyn Workload] = &[&Start];

impl Workload for Start {
    fn listed(&self) -> &Listed {
        &LISTED
    }
    fn client(&self) -> Client {
        Client::Start
    }
    fn seconds(&self, settings: &Settings) -> f64 {
        1.0 + 1.3 * settings.size as f64 / 100e6
    }
    fn run(&self, machine: &dyn Machine) -> Result<Measured> {
        machine.start()
    }
    fn writes(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_that_read_nothing_is_no_result() {
        let text = |error: i32, reads: u32| {
            format!(
                r#"note {{"jobs": [{{"error": {error}, "read": {{"total_ios": {reads}, "io_bytes": 4194304}}}}]}}"#
            )
        };
        let measured = parse(&text(0, 9), 1.5).unwrap();
        assert_eq!(measured.metrics[&Metric::Elapsed].value, 1.5e9);
        assert!(measured.note.unwrap().starts_with("9 reads of 4 MiB"));
        assert!(parse(&text(0, 0), 1.0).is_err() && parse(&text(5, 9), 1.0).is_err());
        assert!(parse("fio: bad option", 1.0).is_err());
    }
}
