//! A plan in a TOML file: what it may say, and which line an error is about.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::names::unlisted;
use crate::error::{Error, Result};

/// What a TOML plan may say. Everything may be left out; flags win over it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanFile {
    /// Stages by name.
    pub stages: Option<Vec<String>>,
    /// Backends by name.
    pub backends: Option<Vec<String>>,
    /// Workloads or groups by name.
    pub workloads: Option<Vec<String>>,
    /// Rounds.
    pub rounds: Option<u32>,
    /// Size of each disk: "1G".
    pub size: Option<String>,
    /// Seconds that fio measures.
    pub seconds: Option<f64>,
    /// Seconds that fio runs before it measures.
    pub ramp: Option<f64>,
    /// fio job files, run as workloads.
    pub fio_jobs: Option<Vec<PathBuf>>,
    /// Seed of order, blocks and bootstrap.
    pub seed: Option<u64>,
    /// Where the disks are made.
    pub dir: Option<PathBuf>,
    /// Seconds that a guest may take to boot.
    pub boot_limit: Option<f64>,
    /// Memory of a guest: "128M".
    pub memory: Option<String>,
    /// Workloads that run on some backends only: `only = { archive = ["loop", "lvm"] }`.
    pub only: Option<BTreeMap<String, Vec<String>>>,
}

/// Reads a plan; its text, too.
pub fn read(path: &Path) -> Result<(String, PlanFile)> {
    let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
    let file = toml::from_str(&text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start.min(text.len()));
        let line = text[..at].lines().count().max(1) + usize::from(text[..at].ends_with('\n'));
        let what = misspelt(error.message()).unwrap_or_else(|| error.message().to_owned());
        Error::Plan(format!("plan {} line {line}: {what}", path.display()))
    })?;
    Ok((text, file))
}

/// What serde says of a key that it does not know, with the names near it.
fn misspelt(message: &str) -> Option<String> {
    let mut names = message.strip_prefix("unknown field ")?.split('`').skip(1).step_by(2);
    let name = names.next()?;
    Some(unlisted("key", name, &names.collect::<Vec<_>>()))
}

/// An error about what a plan's file says, with the line that says it: the one with what the message quotes, else with
/// the key that it names.
pub fn placed(path: &Path, text: &str, what: &str) -> String {
    let quoted = what.split('"').nth(1).filter(|word| !word.is_empty());
    let key =
        ["boot_limit", "memory", "rounds", "seconds", "ramp", "size", "dir", "stage", "backends"];
    let key = key
        .into_iter()
        .find(|key| what.contains(key) || (*key == "size" && what.contains("a disk of")));
    let line = |sign: &str| text.lines().position(|line| line.contains(sign));
    let at = quoted
        .and_then(|word| line(&format!("\"{word}\"")).or_else(|| line(&format!("'{word}'"))))
        .or_else(|| key.and_then(|key| text.lines().position(|l| l.trim_start().starts_with(key))));
    match at {
        Some(at) => format!("plan {} line {}: {what}", path.display(), at + 1),
        None => format!("plan {}: {what}", path.display()),
    }
}
