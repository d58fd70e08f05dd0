//! Two loads on one device at once.

use super::*;

/// Two virtual PCs, whose clocks are their own.
#[test]
fn two_virtual_pcs_load_one_device_at_once() {
    let bench = Bench::new();
    if let Err(missing) = bench.env.pc() {
        panic!("{}: {}", missing.reason, missing.remedy);
    }
    let plan = bench.plan(
        "--stages two-vms --rounds 1 --seconds 0.4 --backends virtio-raw --workloads two-read,durability",
    );
    let ended = run::run(&plan, &bench.env, &bench.out(), &Stop::default()).unwrap();
    bench.assert_clean();
    let samples = samples(&bench.out());
    let failed: Vec<_> = samples.iter().filter_map(|s| s.error.as_ref()).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!(ended.state, State::Complete);
    let both = samples.iter().find(|s| s.workload == "two-read").unwrap();
    for metric in [Metric::Keeps, Metric::SecondKeeps, Metric::SumIops] {
        assert!(both.metrics[&metric].value > 0.0, "{both:?}");
    }
    let analysis = report::load(&bench.out()).unwrap();
    assert!(report::html::render(&analysis).contains("two guests at once"));
    if let Some(check) = analysis.durability.first() {
        assert_eq!((check.stage, check.arm.as_str()), (Stage::TwoVms, "virtio-raw"));
    } else {
        assert!(analysis.run.skipped.iter().any(|s| s.workload.as_deref() == Some("durability")));
    }
}

#[test]
fn two_loads_share_a_device() {
    let bench = Bench::new();
    let plan = bench.plan(
        "--stages two --rounds 1 --seconds 0.2 --backends native,qemu-nbd --workloads two-read,quiet-write,durability",
    );
    let ended = run::run(&plan, &bench.env, &bench.out(), &Stop::default()).unwrap();
    bench.assert_clean();
    assert_eq!((ended.state, ended.failures), (State::Complete, 0));
    let samples = samples(&bench.out());
    for sample in samples.iter().filter(|sample| sample.workload != "durability") {
        let value = |metric| sample.metrics[&metric].value;
        assert!(value(Metric::SumIops) > 0.0 && value(Metric::Keeps) > 0.0);
        assert!(value(Metric::SecondKeeps) > 0.0);
        assert!((0.0..=1.0).contains(&value(Metric::FirstShare)));
        if sample.workload == "two-read" {
            assert!((0.5..=1.0).contains(&value(Metric::Jain)), "{}", value(Metric::Jain));
        }
    }
    let analysis = report::load(&bench.out()).unwrap();
    let counted = |arm: &str| {
        let mut all = analysis.durability.iter();
        all.any(|check| check.stage == Stage::Two && check.arm == arm && check.durable)
    };
    let skipped = analysis.run.skipped.iter().any(|s| s.workload.as_deref() == Some("durability"));
    assert!(skipped || (counted("native") && counted("qemu-nbd")), "{:?}", analysis.durability);
}
