//! UnixBench's three file copies, by the lab's own tool.

use super::machine::{Machine, Tool};
use super::{Client, Listed, Measured, Settings, Workload};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::sample::Metric;
use crate::tool::filecopy::{Outcome, SHAPES, index};

/// UnixBench's own time of one copy, in seconds.
const PUBLISHED_SECONDS: f64 = 30.0;

/// Arguments behind the tool's program.
pub fn args(dir: &str, durable: bool, settings: &Settings) -> Vec<String> {
    let seconds = settings.run.as_secs_f64().to_string();
    let words = ["tool", "filecopy", "--dir", dir, "--seconds", &seconds];
    words.iter().map(|w| (*w).to_owned()).chain(durable.then(|| "--durable".to_owned())).collect()
}

/// Reads its JSON.
pub fn parse(text: &str, durable: bool) -> Result<Measured> {
    let wrong =
        |found: String| Error::Output { what: "the JSON of ringtap-lab tool filecopy", found };
    let outcomes: Vec<Outcome> =
        serde_json::from_str(text.trim()).map_err(|e| wrong(format!("{e} in {text:?}")))?;
    let index = index(&outcomes).ok_or_else(|| wrong("not all three copies are there".into()))?;
    let mut measured = Measured::default();
    for (shape, metric) in SHAPES.iter().zip([Metric::Copy256, Metric::Copy1024, Metric::Copy4096])
    {
        let copy = outcomes.iter().find(|o| o.buffer == shape.buffer).map_or(0.0, |o| o.copy);
        measured.metrics.insert(metric, (copy * 1024.0).into());
    }
    if !durable {
        measured.metrics.insert(Metric::CopyIndex, index.into());
    }
    measured.asked = Some(outcomes.iter().map(|o| o.asked as f64).sum());
    let seconds = outcomes.first().map_or(0.0, |o| o.seconds);
    let what = if durable {
        "each pass over the file is brought to the disk (fdatasync) before the next"
    } else {
        "cached copy: nothing is synced, this measures the page cache and not the disk"
    };
    measured.note =
        Some(format!("{what}; {seconds:.1} s each instead of UnixBench's {PUBLISHED_SECONDS} s"));
    Ok(measured)
}

/// The workload; each pass brought to the disk, or not.
pub struct FileCopy {
    listed: Listed,
    durable: bool,
}

const fn copy(name: &'static str, title: &'static str, durable: bool) -> FileCopy {
    let headline = &[Metric::Copy256, Metric::Copy1024, Metric::Copy4096];
    let group = Some("unixbench");
    FileCopy { listed: Listed { name, title, group, headline, quick: false }, durable }
}

/// UnixBench's.
pub const WORKLOADS: &[&dyn Workload] = &[
    &copy("filecopy", "UnixBench file copy on ext4, cached copy", false),
    &copy("filecopy-durable", "UnixBench file copy on ext4, each pass durable", true),
];

impl Workload for FileCopy {
    fn listed(&self) -> &Listed {
        &self.listed
    }
    fn client(&self) -> Client {
        Client::Files
    }
    fn seconds(&self, settings: &Settings) -> f64 {
        let seconds = settings.run.as_secs_f64();
        3.0 * (seconds + 2.0 * seconds.min(2.0))
    }
    fn missing(&self, env: &Env) -> Option<Missing> {
        env.tools()
    }
    fn run(&self, machine: &dyn Machine) -> Result<Measured> {
        machine.files(&mut |files| {
            let words = args(files.dir(), self.durable, machine.settings());
            parse(&files.run(Tool::Own, &words)?, self.durable)
        })
    }
    fn reads_from_cache(&self) -> bool {
        self.durable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_tool_prints() {
        let dir = tempfile::tempdir().unwrap();
        let time = std::time::Duration::from_millis(10);
        let outcomes = crate::tool::filecopy::run(dir.path(), time, false).unwrap();
        let text = serde_json::to_string(&outcomes).unwrap();
        let measured = parse(&text, false).unwrap();
        assert!(measured.metrics[&Metric::Copy256].value > 0.0);
        assert!(measured.metrics[&Metric::CopyIndex].value > 0.0);
        assert_eq!(measured.asked, Some(outcomes.iter().map(|o| o.asked as f64).sum()));
        assert!(measured.note.unwrap().contains("cached copy"));
        assert!(!parse(&text, true).unwrap().metrics.contains_key(&Metric::CopyIndex));
        assert!(parse("[]", false).is_err() && parse("", false).is_err());
    }
}
