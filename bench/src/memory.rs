//! Resident memory of a server, as the kernel counts it.

use anyhow::{Context, Result};
use std::fs;

/// Resident and proportional set size in bytes, now.
pub fn resident(pid: u32) -> Result<(u64, u64)> {
    let path = format!("/proc/{pid}/smaps_rollup");
    Ok((field(&path, "Rss:")?, field(&path, "Pss:")?))
}

/// The most bytes that were resident at a time since the process began.
pub fn most_resident(pid: u32) -> Result<u64> {
    field(&format!("/proc/{pid}/status"), "VmHWM:")
}

/// A field in KiB of one of the kernel's files.
fn field(path: &str, name: &str) -> Result<u64> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib << 10).with_context(|| format!("{path} lacks {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_was_given_back_counts_in_the_most_alone() {
        let own = std::process::id();
        let before = resident(own).unwrap().0;
        let taken = vec![1u8; 64 << 20];
        let with = resident(own).unwrap().0;
        drop(std::hint::black_box(taken));
        assert!(with >= before + (32 << 20), "{before} and {with}");
        // The kernel counts pages in batches; other tests take and give back at the same time.
        assert!(most_resident(own).unwrap() + (16 << 20) >= with);
        assert!(most_resident(u32::MAX >> 1).is_err());
    }
}
