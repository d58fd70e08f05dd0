//! The plan of a run that names nothing: for a guest on this host, which way should a disk be served?

use std::collections::BTreeMap;

use super::question::{Pair, Question};
use super::{Plan, PlanFile};
use crate::sample::Stage;
use crate::workload;

/// Its question.
pub const QUESTION: &str = "which-way";
/// What it asks.
const ASKS: &str = "For a guest on this host, which way should I serve its disk?";

const READ: &str = "randread-4k-qd1";
const WRITE: &str = "randwrite-4k-qd32";
const SYNCED: &str = "write-4k-fsync";
const SEQUENTIAL: &str = "read-1m-qd8";

/// What most have; all loads are set beside it, and it runs twice.
const DEFAULT: &str = "virtio-default";
const BEST: &str = "virtio-best";
const RAW: &str = "ringtap-vhost";
/// qemu-storage-daemon as it comes passes on no flush, so that only what it is at its best has comparisons.
const DAEMON: &str = "qsd-vhost-writeback";
const AS_IT_COMES: &str = "qsd-vhost";
const LOOP: &str = "host-loop";
const OVERLAY: &str = "ringtap-overlay";
const QEMU_OVERLAY: &str = "virtio-overlay";
/// Shows whether a load could show a difference.
const SLOW: &str = "slow";

/// Load, arm, against: one family.
const COMPARISONS: &[(&str, &str, &str)] = &[
    (READ, RAW, DEFAULT),
    (READ, BEST, DEFAULT),
    (WRITE, RAW, DEFAULT),
    (WRITE, RAW, DAEMON),
    (WRITE, RAW, LOOP),
    (WRITE, OVERLAY, QEMU_OVERLAY),
    (SYNCED, RAW, DEFAULT),
    (SYNCED, RAW, DAEMON),
    (SEQUENTIAL, RAW, DEFAULT),
];

/// The plan: twelve rounds, each a boot of one guest with the disks of all arms.
pub fn plan() -> PlanFile {
    let list = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let of = |load: &str| {
        let compared = COMPARISONS.iter().filter(|one| one.0 == load);
        let mut arms: Vec<&str> = compared.flat_map(|one| [one.1, one.2]).collect();
        arms.extend([DEFAULT, RAW, SLOW]);
        arms.sort_unstable();
        arms.dedup();
        (load.to_owned(), list(&arms))
    };
    let arms = [DEFAULT, BEST, AS_IT_COMES, DAEMON, RAW, OVERLAY, QEMU_OVERLAY, LOOP, SLOW];
    PlanFile {
        stages: Some(list(&[Stage::Vm.name()])),
        backends: Some(list(&arms)),
        workloads: Some(list(&[READ, WRITE, SYNCED, SEQUENTIAL])),
        only: Some(BTreeMap::from([READ, WRITE, SYNCED, SEQUENTIAL].map(of))),
        rounds: Some(12),
        size: Some("64M".into()),
        seconds: Some(0.4),
        ramp: Some(0.0),
        ..PlanFile::default()
    }
}

/// Its question, as far as the plan has what it is about.
pub fn question(plan: &Plan) -> Vec<Question> {
    let primary: Vec<_> = COMPARISONS
        .iter()
        .filter_map(|&(load, arm, against)| {
            Some(Pair { stage: Stage::Vm, arm, against }.on(plan, workload::find(load)?))
        })
        .flatten()
        .collect();
    let question = Question { name: QUESTION.into(), asks: ASKS.into(), primary };
    Some(question).filter(|question| !question.primary.is_empty()).into_iter().collect()
}
