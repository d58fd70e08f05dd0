//! When an image's file was last written to, and when it came to be, as the kernel tells.

use std::fs;
use std::path::Path;

use ringtap_io::Wall;
use rustix::fd::AsFd;
use rustix::fs::{AtFlags, CWD, StatxFlags, fstat, fstatfs, statx};

pub(crate) const SECOND: Wall = 1_000_000_000;

/// It keeps times in steps of two seconds, and not that of the last change of a file's facts.
const FAT: u64 = 0x4d44;

/// File systems whose time stamps are of this machine's clock: ext2 to ext4, xfs, btrfs, tmpfs, f2fs, zfs,
/// bcachefs, overlayfs, ramfs.
const OWN_CLOCK: [u64; 9] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0xf2f5_2010,
    0x2fc1_2fc1,
    0xca45_1a4e,
    0x794c_7630,
    0x8584_58f6,
];

/// What is known of an image's file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// When it was last written to, where it keeps that.
    pub(crate) modified: Option<Wall>,
    /// The step in which it is kept.
    pub(crate) step: Wall,
    /// Whether that is of this machine's clock.
    pub(crate) own_clock: bool,
    /// Bytes that were written to the block device it is, as the kernel counts.
    pub(crate) written: Option<u64>,
    /// Whether those are the bytes that its writers wrote: none was kept in the page cache.
    pub(crate) direct: bool,
    /// When it came to be, if that is known.
    pub(crate) born: Wall,
}

impl Facts {
    /// Of what a simulation provides, which says when that was last written to.
    pub(crate) fn simulated(modified: Option<Wall>) -> Facts {
        let step = modified.map_or(0, step_of);
        Facts { modified, step, own_clock: true, ..Facts::default() }
    }

    /// Of an open file, or of a device. `direct`: it is written to past the page cache.
    pub(crate) fn of(file: impl AsFd, is_device: bool, direct: bool) -> Facts {
        let file = file.as_fd();
        let Ok(facts) = fstat(file) else { return Facts::default() };
        if is_device {
            let (major, minor) =
                (rustix::fs::major(facts.st_rdev), rustix::fs::minor(facts.st_rdev));
            let written = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat"));
            let written = written.ok().and_then(|text| sectors_written(&text));
            return Facts {
                written: written.map(|sectors| sectors.wrapping_mul(512)),
                direct,
                ..Facts::default()
            };
        }
        let kind = fstatfs(file).map_or(0, |facts| facts.f_type as u64);
        let born = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok();
        let born = born.filter(|facts| facts.stx_mask & StatxFlags::BTIME.bits() != 0);
        Facts {
            modified: Some(nanos(facts.st_mtime, facts.st_mtime_nsec)),
            step: match kind {
                FAT => 2 * SECOND,
                // Whoever copies a file may give it whole seconds, but not the time of that change.
                _ => step_of(nanos(facts.st_ctime, facts.st_ctime_nsec)),
            },
            own_clock: OWN_CLOCK.contains(&kind),
            born: born.map_or(0, |facts| {
                nanos(facts.stx_btime.tv_sec, u64::from(facts.stx_btime.tv_nsec))
            }),
            ..Facts::default()
        }
    }
}

/// When the file at a path came to be, if that is known.
pub(crate) fn born_at(path: &Path) -> Option<Wall> {
    let facts = statx(CWD, path, AtFlags::empty(), StatxFlags::BTIME).ok()?;
    let is_known = facts.stx_mask & StatxFlags::BTIME.bits() != 0;
    is_known.then(|| nanos(facts.stx_btime.tv_sec, u64::from(facts.stx_btime.tv_nsec)))
}

fn nanos(seconds: i64, nanos: u64) -> Wall {
    (seconds as u64).wrapping_mul(1_000_000_000).wrapping_add(nanos)
}

/// Of /sys/dev/block/*/stat (source: Documentation/block/stat.rst of Linux).
fn sectors_written(text: &str) -> Option<u64> {
    text.split_ascii_whitespace().nth(6)?.parse().ok()
}

/// The step in which a file system keeps times that has kept this one: a power of ten, to a second.
fn step_of(time: Wall) -> Wall {
    let mut step = 1;
    while step < SECOND && time % (step * 10) == 0 {
        step *= 10;
    }
    if step == 1 { 0 } else { step }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_step_of_a_time() {
        assert_eq!(step_of(1_790_000_000 * SECOND + 123_456_789), 0);
        assert_eq!(step_of(1_000), 1_000);
        assert_eq!(step_of(1_790_000_000 * SECOND), SECOND);
    }

    #[test]
    fn the_kernels_line() {
        let line = "    8213     1000  2001  55  4407  3127  765432  1 0 0 0 0 0 0 0\n";
        assert_eq!(sectors_written(line), Some(765_432));
        assert_eq!(sectors_written("1 2"), None);
    }
}
