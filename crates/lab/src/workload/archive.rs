//! Archiving, as it was published: `find TREE | cpio -o > /dev/null` over a tree of 24,000 files and 320 MB that is not
//! in any cache. cpio and not tar: a tar that writes to /dev/null reads nothing.

use super::dd::throughput_shape;
use super::machine::{Machine, Tool};
use super::{Client, Listed, Measured, Settings, Workload};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::sample::Metric;

/// The tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tree {
    /// Files.
    pub files: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// The published tree.
pub const PUBLISHED: Tree = Tree { files: 24_000, bytes: 320 << 20 };

/// The tree that fits a disk: the published one from 768 MiB on, else the same with fewer files, half of what would fit:
/// making it takes longer than what is measured.
pub fn tree(disk: u64) -> Tree {
    let (whole, _, _) = throughput_shape(disk, u64::MAX);
    let room = 768 << 20;
    if whole >= room {
        return PUBLISHED;
    }
    let part = |all: u64| (u128::from(all) * u128::from(whole) / u128::from(2 * room)) as u64;
    Tree { files: part(PUBLISHED.files).max(100), bytes: part(PUBLISHED.bytes) }
}

/// Arguments behind the tool's program that make the tree below `dir`.
pub fn tree_args(dir: &str, tree: Tree) -> Vec<String> {
    // The tree is part of the workload: the same in every run.
    let words = ["tool", "tree", "--dir", dir, "--seed", "1"].map(str::to_owned);
    let numbers =
        ["--files".into(), tree.files.to_string(), "--bytes".into(), tree.bytes.to_string()];
    words.into_iter().chain(numbers).collect()
}

/// The shell's command that archives `dir`; the number of bytes that cpio wrote goes to stderr, in blocks of 512.
pub fn command(dir: &str) -> String {
    let dir = dir.replace('\'', r"'\''");
    format!("cd '{dir}' && find . | cpio -o -H newc >/dev/null")
}

/// Reads cpio's last words (`662314 blocks`) and the time it took.
pub fn parse(stderr: &str, seconds: f64, tree: Tree) -> Result<Measured> {
    let wrong = |found: String| Error::Output { what: "cpio's count of blocks", found };
    let blocks: u64 = stderr
        .lines()
        .rev()
        .find_map(|line| line.trim().strip_suffix(" blocks").or(line.trim().strip_suffix(" block")))
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| wrong(format!("{:?}", stderr.trim())))?;
    if blocks * 512 < tree.bytes {
        return Err(wrong(format!(
            "{} bytes archived of a tree of {}: files are missing",
            blocks * 512,
            tree.bytes
        )));
    }
    let bytes = Some(tree.bytes as f64);
    let mut measured = Measured { bytes, asked: bytes, ..Measured::default() };
    measured.metrics.insert(Metric::Elapsed, (seconds * 1e9).into());
    measured.metrics.insert(Metric::Bandwidth, (tree.bytes as f64 / seconds).into());
    measured.metrics.insert(Metric::Files, (tree.files as f64 / seconds).into());
    let less = if tree == PUBLISHED { "" } else { " instead of 24000 and 320: the disk is small" };
    measured.note = Some(format!(
        "find | cpio -o -H newc > /dev/null over {} files, {} MiB{less}; caches dropped before",
        tree.files,
        tree.bytes >> 20
    ));
    Ok(measured)
}

/// The workload.
pub struct Archive;

const LISTED: Listed = Listed {
    name: "archive",
    title: "find | cpio over a tree on ext4, caches dropped",
    group: None,
    headline: &[Metric::Elapsed],
    quick: false,
};

/// The only one.
pub const WORKLOADS: &[&dyn Workload] = &[&Archive];

impl Workload for Archive {
    fn listed(&self) -> &Listed {
        &LISTED
    }
    fn client(&self) -> Client {
        Client::Files
    }
    fn seconds(&self, settings: &Settings) -> f64 {
        2.0 + 20.0 * settings.gib()
    }
    fn missing(&self, env: &Env) -> Option<Missing> {
        env.tools()
            .or_else(|| env.program("cpio", "cpio"))
            .or_else(|| env.program("find", "findutils"))
    }
    fn run(&self, machine: &dyn Machine) -> Result<Measured> {
        let tree = tree(machine.settings().size);
        machine.files(&mut |files| {
            let dir = format!("{}/tree", files.dir());
            files.run(Tool::Own, &tree_args(&dir, tree))?;
            files.cold()?;
            let (said, seconds) = files.timed(&command(&dir))?;
            parse(&said, seconds, tree)
        })
    }
    fn drops_caches(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cpio_really_prints() {
        let dir = tempfile::Builder::new().prefix("a reader's ").tempdir().unwrap();
        let tree = Tree { files: 60, bytes: 300_000 };
        crate::tool::tree::make(dir.path(), tree.files, tree.bytes, 1).unwrap();
        if crate::process::find("cpio").is_none() {
            eprintln!("skipped: cpio is not installed");
            return;
        }
        let output = std::process::Command::new("sh")
            .args(["-c", &command(dir.path().to_str().unwrap())])
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let measured = parse(&said, 0.5, tree).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(measured.metrics[&Metric::Files].value, 120.0);
        assert_eq!(measured.asked, Some(300_000.0), "for the ledger");
        assert!(parse(&said, 0.5, Tree { bytes: 1 << 30, ..tree }).is_err(), "files are missing");
        assert!(parse("cpio: ./x: Cannot open\n", 0.5, tree).is_err());
    }

    #[test]
    fn a_small_disk_has_a_small_tree() {
        assert_eq!(tree(1 << 30), PUBLISHED);
        let small = tree(128 << 20);
        assert!(small.bytes < 32 << 20 && small.files == 2000, "{small:?}");
    }
}
