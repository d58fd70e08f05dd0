//! The usual question, asked of a real guest: one round, so that there are points and no answers.

use std::path::Path;

use ringtap_lab::report::lines;
use ringtap_lab::run;
use ringtap_lab::sample::{Metric, Stage};
use ringtap_lab::stop::Stop;

use super::{Bench, report, samples};

#[test]
fn the_usual_question_runs_load_by_load_after_its_flushes_are_counted() {
    let bench = Bench::new();
    if let Err(missing) = bench.env.pc() {
        panic!("{}: {}", missing.reason, missing.remedy);
    }
    // Without a ringtap: its ways are rows with the reason.
    let plan = bench.plan("--rounds 1 --seconds 0.1");
    assert_eq!(plan.stages, [Stage::Vm]);
    run::run(&plan, &bench.env, &bench.out(), &Stop::default()).unwrap();
    bench.assert_clean();
    let samples = samples(&bench.out());
    assert!(samples.iter().all(|sample| sample.error.is_none()), "{samples:?}");
    let (checks, loads) =
        samples.split_at(samples.iter().position(|s| s.workload != "durability").unwrap());
    let flushes = |arm: &str| {
        let of = checks.iter().find(|sample| sample.arm == arm).unwrap_or_else(|| panic!("{arm}"));
        of.metrics[&Metric::FlushPerSync].value
    };
    // As it comes it says that it keeps no writes back, and does: its guest never flushes.
    // What others on this machine flush meanwhile counts, too.
    assert!(flushes("qsd-vhost") < 0.1, "{}", flushes("qsd-vhost"));
    for arm in ["virtio-default", "virtio-best", "qsd-vhost-writeback", "host-loop"] {
        assert!(flushes(arm) >= 0.9, "{arm}: {}", flushes(arm));
    }
    assert!(loads.iter().all(|sample| sample.boot == Some(0) && sample.workload != "durability"));
    // What is compared in a load runs side by side.
    let mut order: Vec<&str> = loads.iter().map(|sample| sample.workload.as_str()).collect();
    order.dedup();
    assert_eq!(order, ["randread-4k-qd1", "randwrite-4k-qd32", "write-4k-fsync", "read-1m-qd8"]);
    for sample in loads {
        let cost = |metric: Metric| sample.metrics.get(&metric).map(|value| value.value);
        if let (Some(machine), Some(path)) = (cost(Metric::MachineCpu), cost(Metric::PathCpu)) {
            assert!(machine >= 0.999 * path, "one clock: {machine} of the machine, {path} of it");
        }
    }
    let analysis = report::load(&bench.out()).unwrap();
    let text = lines::render(&analysis, Path::new("/report.html"), Some(100));
    assert!(text.starts_with("No answer yet") && text.lines().count() <= 10, "{text}");
    assert!(text.contains("qemu-storage-daemon says an fsync is done"), "{text}");
}
