//! dd's table: whose caches, and who lies about them.

use ringtap_lab::report::Analysis;
use ringtap_lab::report::caches;
use ringtap_lab::run::folder::{Arm, State};
use ringtap_lab::sample::{Metric, Sample, Stage};

use super::{record, samples};

fn arm(stage: Stage, name: &str, cached: bool) -> Arm {
    let (remark, command) = (None, None);
    let (name, backend): (String, String) = (name.into(), name.into());
    Arm { stage, name, backend, title: String::new(), cached, remark, command }
}

#[test]
fn a_page_cache_is_somebodys() {
    for (stage, name, cached, whose) in [
        (Stage::Vm, "virtio-default", true, "the host's"),
        (Stage::Vm, "virtio-raw", false, "none"),
        (Stage::Vm, "loop", true, "the guest's"),
        (Stage::TwoGuests, "loop", true, "the guest's"),
        (Stage::Host, "loop", true, "this machine's"),
        (Stage::Xen, "file", true, "the first domain's"),
        (Stage::Xen, "phy-lvm", false, "none"),
    ] {
        assert_eq!(caches::page_cache(&arm(stage, name, cached)), whose, "{stage} {name}");
    }
}

#[test]
fn who_says_that_something_is_on_the_disk_when_it_is_not_is_seen() {
    let one = samples(1).remove(0);
    let sample = |name: &str, workload: &str, metric, value: f64, note: &str| Sample {
        stage: Stage::Vm,
        arm: name.into(),
        workload: workload.into(),
        metrics: [(metric, value.into())].into(),
        note: Some(note.into()),
        ..one.clone()
    };
    let mut run = record(1, State::Complete);
    run.plan.workloads = vec!["dd-latency-direct".into(), "durability".into()];
    run.arms = vec![
        arm(Stage::Vm, "virtio-default", true),
        arm(Stage::Vm, "virtio-cache-off", true),
        arm(Stage::Vm, "virtio-unsafe", true),
    ];
    let told = |cache: &str| format!("n flushes; the guest was told: {cache}");
    let all: Vec<Sample> = [
        ("virtio-default", 1.01, "write back"),
        ("virtio-cache-off", 1.0, "write through"),
        ("virtio-unsafe", 0.0, "write back"),
    ]
    .iter()
    .flat_map(|(name, flushes, cache)| {
        let check = sample(name, "durability", Metric::FlushPerSync, *flushes, &told(cache));
        [sample(name, "dd-latency-direct", Metric::TimePerOp, 5e4, ""), check]
    })
    .collect();
    let table = caches::table(&Analysis::new(run, &all)).unwrap();
    let last = |at: usize| table.rows[at].last().unwrap().as_str();
    let cache: Vec<&str> = table.rows.iter().map(|row| row[2].as_str()).collect();
    assert_eq!(cache, ["on", "off", "on"], "{table:?}");
    assert_eq!([last(0), last(1), last(2)], ["1.01", "1.00", "0.00: it lies"]);
}
