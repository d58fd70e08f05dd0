//! Disks that are elsewhere.

use ringtap_lab::report::ranking::{self, Generator};

use super::*;

#[test]
fn disks_elsewhere_for_real() {
    let bench = Bench::of_this_build();
    let plan = bench.plan(
        "--stages remote --rounds 2 --seconds 0.3 --workloads randread-4k-qd32,write-4k-fsync,start",
    );
    let ended = run::run(&plan, &bench.env, &bench.out(), &Stop::default()).unwrap();
    bench.assert_clean();
    let samples = samples(&bench.out());
    let failed: Vec<_> =
        samples.iter().filter_map(|s| s.error.as_ref().map(|e| (&s.arm, &s.workload, e))).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!((ended.state, ended.failures), (State::Complete, 0));

    let analysis = report::load(&bench.out()).unwrap();
    let arms = &analysis.run.arms;
    let skipped = |name: &str| analysis.run.skipped.iter().find(|skip| skip.backend == name);
    // What is not installed is left out by name, with what would help.
    for name in
        ["qsd-on-qemu-nbd", "ringtap-on-qemu-nbd", "ringtap-on-nbdkit", "ringtap-on-ringtap"]
            .iter()
            .chain(&["qsd-rbd", "ringtap-rbd", "fio-rbd", "http-lazy", "http-boot-list"])
    {
        let runs = arms.iter().any(|arm| arm.name == *name);
        let left_out = skipped(name).filter(|skip| skip.workload.is_none());
        if let Some(skip) = left_out {
            println!("skipped: {name}: {}", skip.missing.reason);
        }
        assert!(runs || left_out.is_some_and(|skip| !skip.missing.remedy.is_empty()), "{name}");
    }
    let median = |arm: &str, workload: &str, metric: Metric| {
        let of = |s: &&Sample| s.arm == arm && s.workload == workload;
        let mut values: Vec<f64> =
            samples.iter().filter(of).map(|sample| sample.metrics[&metric].value).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    for arm in arms {
        let starts = arm.name.starts_with("http-");
        let value = match starts {
            true => median(&arm.name, "start", Metric::Elapsed),
            false => median(&arm.name, "randread-4k-qd32", Metric::Iops),
        };
        assert!(value.is_some_and(|value| value > 0.0), "{}: {value:?}", arm.name);
        println!("{}: {value:?}", arm.name);
    }
    // One load drives Ringtap and QEMU's client; fio's own engine is another.
    let generator = |name: &str| arms.iter().find(|arm| arm.name == name).map(ranking::generator);
    assert_eq!(generator("ringtap-on-qemu-nbd"), Some(Generator::Load));
    assert!(generator("fio-rbd").is_none_or(|by| by == Generator::Rbd));
    // Flushes are counted through both servers.
    let flushes = |arm: &str| analysis.durability.iter().find(|check| check.arm == arm);
    assert!(flushes("ringtap-on-qemu-nbd").is_none_or(|check| check.durable));
    assert!(report::page::render(&analysis).contains("disks that are elsewhere"));
}
