//! What Ringtap must reach against its peers.

use crate::arms::Kind;
use crate::image::Fs;
use crate::lines::Line;
use serde::Serialize;

/// What a goal compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Requests per second; more is better.
    Rate,
    /// CPU time of the server per request; less is better.
    ServerCpu,
}

/// A bound on a ratio Ringtap / best peer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goal {
    /// The kinds of arms among which the best peer is chosen.
    pub against: Vec<Kind>,
    /// What is compared.
    pub metric: Metric,
    /// Least ratio for [`Metric::Rate`], greatest for [`Metric::ServerCpu`].
    pub bound: f64,
    /// Something to aim at rather than to reach.
    pub aim: bool,
}

impl Goal {
    fn rate(bound: f64, against: &[Kind]) -> Goal {
        Goal { against: against.into(), metric: Metric::Rate, bound, aim: false }
    }

    fn cpu(bound: f64, against: &[Kind]) -> Goal {
        Goal { against: against.into(), metric: Metric::ServerCpu, bound, aim: false }
    }

    /// True if `ratio` is good enough.
    pub fn reached(&self, ratio: f64) -> bool {
        match self.metric {
            Metric::Rate => ratio >= self.bound,
            Metric::ServerCpu => ratio <= self.bound,
        }
    }
}

/// The goals of raw images over vhost-user.
pub fn vhost_user(fs: Fs, line: &Line) -> Vec<Goal> {
    use Kind::{Direct, Native, Qemu};
    let never_below_the_best = Goal::rate(1.0, &[Qemu, Direct]);
    if fs == Fs::Null || !line.small() {
        return vec![never_below_the_best];
    }
    match (fs, line.depth) {
        (Fs::Tmpfs, 32) => vec![
            Goal::rate(2.0, &[Qemu]),
            Goal { aim: true, ..Goal::rate(0.85, &[Native]) },
            Goal::cpu(0.6, &[Qemu]),
        ],
        (Fs::Ext4, 32) => {
            vec![never_below_the_best, Goal::rate(0.95, &[Native]), Goal::cpu(0.6, &[Qemu])]
        }
        (Fs::Tmpfs, _) => vec![Goal::rate(1.3, &[Qemu])],
        _ => vec![Goal::rate(1.2, &[Qemu])],
    }
}

/// The goals of raw images over NBD: cache=none against servers with O_DIRECT, cache=writeback
/// against those on the page cache.
pub fn nbd(fs: Fs, line: &Line) -> Vec<Goal> {
    let fast = fs != Fs::Null && line.small() && line.depth == 32;
    let direct = Goal::rate(if fast { 1.5 } else { 1.0 }, &[Kind::Qemu, Kind::Direct]);
    match fs {
        Fs::Null => vec![direct],
        _ => vec![direct, Goal::rate(1.0, &[Kind::PageCache])],
    }
}

/// The goal of a block device of this host: the best of its peers.
pub fn devices(_: &Line) -> Vec<Goal> {
    vec![Goal::rate(1.0, &[Kind::Direct])]
}

/// The goals of images that have all their clusters.
pub fn allocated(fs: Fs, line: &Line) -> Vec<Goal> {
    let raw = Goal::rate(0.95, &[Kind::Raw]);
    let small = line.small() && line.depth == 32;
    let qemu = Goal::rate(if small && fs == Fs::Tmpfs { 2.0 } else { 1.0 }, &[Kind::Qemu]);
    vec![raw, qemu]
}

/// The goals of first writes to an empty image, against those to a sparse file and QEMU's.
pub fn fresh(_: Fs, line: &Line) -> Vec<Goal> {
    match line.small() {
        true => vec![Goal::rate(0.8, &[Kind::Native]), Goal::rate(3.0, &[Kind::Qemu])],
        false => vec![Goal::rate(0.9, &[Kind::Native]), Goal::rate(1.0, &[Kind::Qemu])],
    }
}

/// The goals of a snapshot just taken: writes against those to a sparse file, against QEMU's usual
/// overlay and its overlay with subclusters; reads against our own raw image.
pub fn overlay(fs: Fs, line: &Line) -> Vec<Goal> {
    if !line.writes() {
        return vec![Goal::rate(0.95, &[Kind::Raw])];
    }
    let mut goals = vec![Goal::rate(0.9, &[Kind::Native])];
    if line.small() && fs == Fs::Ext4 {
        goals.push(Goal::rate(5.0, &[Kind::Qemu]));
        goals.push(Goal::rate(2.0, &[Kind::Direct]));
    }
    goals
}

/// The goal of a fresh dynamic VHD: five times tapdisk's 7 thousand requests per second where
/// native first writes made about 60 thousand.
pub fn vhd(_: Fs, _: &Line) -> Vec<Goal> {
    vec![Goal::rate(5.0 * 7.0 / 60.0, &[Kind::Native])]
}

/// The goal of enciphered images: QEMU's CPU time per request, twice over.
pub fn luks(_: Fs, _: &Line) -> Vec<Goal> {
    vec![Goal::cpu(0.5, &[Kind::Qemu]), Goal::rate(1.0, &[Kind::Qemu])]
}

/// The goal of reads all over an image whose tables do not fit: half of what they make where they do.
pub fn wide(_: Fs, _: &Line) -> Vec<Goal> {
    vec![Goal::rate(0.5, &[Kind::Raw]), Goal::rate(1.0, &[Kind::Qemu])]
}

/// The goal of two queues, against one.
pub fn queues(_: Fs, _: &Line) -> Vec<Goal> {
    vec![Goal::rate(1.6, &[Kind::Raw])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lines::usual;

    #[test]
    fn bounds_point_the_right_way() {
        let line = &usual()[0];
        let goals = vhost_user(Fs::Tmpfs, line);
        assert_eq!(goals.len(), 3);
        assert!(goals[0].reached(2.0) && !goals[0].reached(1.99));
        assert!(goals[2].reached(0.6) && !goals[2].reached(0.61));
        assert!(!goals[0].reached(f64::NAN) && !goals[2].reached(f64::NAN));
        assert!(nbd(Fs::Ext4, line)[0].bound == 1.5 && nbd(Fs::Null, line)[0].bound == 1.0);
    }
}
