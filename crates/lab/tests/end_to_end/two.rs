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
    costs_what_both_did(both, &[Metric::ClientCpu]);
    for metric in [Metric::Keeps, Metric::SecondKeeps, Metric::SumIops] {
        assert!(both.metrics[&metric].value > 0.0, "{both:?}");
    }
    let analysis = report::load(&bench.out()).unwrap();
    assert!(report::page::render(&analysis).contains("two guests at once"));
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
        "--stages two --rounds 1 --seconds 0.3 --backends native,qemu-nbd --workloads two-read,quiet-write,durability",
    );
    let ended = run::run(&plan, &bench.env, &bench.out(), &Stop::default()).unwrap();
    bench.assert_clean();
    assert_eq!((ended.state, ended.failures), (State::Complete, 0));
    let samples = samples(&bench.out());
    for sample in samples.iter().filter(|sample| sample.workload != "durability") {
        let served: &[Metric] = if sample.arm == "qemu-nbd" { &[Metric::ServerCpu] } else { &[] };
        costs_what_both_did(sample, &[served, &[Metric::ClientCpu]].concat());
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

/// The cost is of the time that both run, by the I/Os of both: what the kernel counted of the servers' bytes in that time is
/// what both loads asked for, and neither half of it nor what each had alone as well.
fn costs_what_both_did(sample: &Sample, parts: &[Metric]) {
    let value = |metric: Metric| sample.metrics.get(&metric).map(|value| value.value);
    let parts: Vec<f64> = parts
        .iter()
        .map(|part| value(*part).unwrap_or_else(|| panic!("no {part:?}: {sample:?}")))
        .collect();
    let kernel = value(Metric::KernelCpu).unwrap();
    let path = value(Metric::PathCpu).unwrap();
    assert!(parts.iter().all(|part| *part > 0.0), "{sample:?}");
    assert!((path - kernel - parts.iter().sum::<f64>()).abs() < 1e-6 * path, "{sample:?}");
    assert!(value(Metric::StealCpu).is_some() && value(Metric::MachineCpu).is_some());
    let ledger = sample.ledger.as_ref().unwrap();
    let asked = ledger.program.unwrap();
    let Some(moved) = ledger.server.map(|moved| moved.read + moved.written) else {
        assert!(asked > 0.0 && sample.arm.starts_with("native"), "{sample:?}");
        return;
    };
    // A machine so busy that a load of 1.5 s took four times as long has one guest go far ahead of the other.
    let held_up = sample.seconds > 6.0;
    assert!(held_up || (0.8..1.3).contains(&(moved / asked)), "{moved} of {asked}: {sample:?}");
}

#[test]
fn two_guests_cost_what_both_did() {
    let bench = Bench::new();
    if let Err(missing) = bench.env.appliance() {
        panic!("{}: {}", missing.reason, missing.remedy);
    }
    let plan = bench.plan(
        "--stages two-guests --rounds 1 --seconds 1.5 --backends qsd-vhost --workloads two-read,quiet-write",
    );
    run::run(&plan, &bench.env, &bench.out(), &Stop::default()).unwrap();
    bench.assert_clean();
    let mut samples = samples(&bench.out());
    samples.retain(|sample| sample.workload != "durability");
    assert_eq!(samples.len(), 4);
    // On a busy machine two guests may come too far apart; that is said, and no number is made of it.
    let (apart, both): (Vec<_>, Vec<_>) = samples.iter().partition(|s| s.error.is_some());
    let said = |s: &&Sample| s.error.as_ref().is_some_and(|e| e.contains("time in common"));
    assert!(apart.iter().all(said) && !both.is_empty(), "{apart:?}");
    // Nor of its cost, where the lab itself was held up.
    let too_busy = |s: &&Sample| s.note.as_ref().is_some_and(|note| note.contains("too busy"));
    let (untold, told): (Vec<&Sample>, Vec<&Sample>) = both.into_iter().partition(too_busy);
    assert!(untold.iter().all(|s| !s.metrics.contains_key(&Metric::PathCpu)) && !told.is_empty());
    for sample in told {
        costs_what_both_did(sample, &[Metric::ServerCpu, Metric::ClientCpu]);
    }
}
