//! Failing operations and full disks: one requester's error each, nothing lost, nothing broken.

use ringtap_sim::{Ask, Bench as _, End, Fault, all_well, random_asks, seeds};

use crate::bench::{Bench, SLOTS};

/// A run in which operation number `n` fails; then a flush, and a cut that must lose nothing. Gives
/// whether there was an operation `n`.
fn run_with_fault(seed: u64, n: u64, fault: Fault) -> bool {
    let context = format!("seed {seed}, operation {n} gives {fault:?}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut bench = Bench::new(seed);
    if bench.layers.iter().all(|layer| layer.options.is_none()) {
        bench.add_layer(&mut rng);
    }
    // The page cache drops what it could not write.
    bench.disk.forget_on_failed_sync(true);
    let before = bench.disk.operations();
    bench.disk.fail_operations(before + n..before + n + 1, fault);
    let guest = bench.guest();
    let Some((mut tasks, served)) = bench.session() else { return true };
    let mut run = |asks: Vec<Ask>| {
        guest.spawn(&mut tasks, &served, SLOTS, asks);
        tasks.run().expect("the simulation runs");
        if let Some(wrong) = guest.wrong() {
            panic!("{context}: {wrong}");
        }
    };
    run(random_asks(&mut rng, bench.sectors(), 12));
    let met = bench.disk.operations() >= before + n;
    bench.disk.heal();
    let failures = guest.failures().len();
    run(vec![Ask::Flush]);
    run(vec![Ask::Read(0..bench.sectors())]);
    let later = guest.failures().split_off(failures);
    assert!(
        later.is_empty() || failures > 0 && bench.flushes_stay_failed(),
        "{context}: {later:?}"
    );
    if let Err(wrong) = bench.ends(End::PowerCut, seed, &guest) {
        panic!("{context}: {wrong}");
    }
    met
}

#[test]
fn every_operation_may_fail_once() {
    for seed in seeds(4) {
        let faults = [
            Fault::Errno(libc::EIO),
            Fault::Errno(libc::ENOSPC),
            Fault::Errno(libc::EINTR),
            Fault::Short,
        ];
        for fault in faults {
            let mut n = 1;
            while run_with_fault(seed, n, fault) {
                n += 1;
            }
            assert!(n > 5, "the run had operations to fail");
        }
    }
}

#[test]
fn a_full_disk_fails_writes_and_loses_nothing() {
    let (mut full, mut seen) = (0, 0);
    all_well(seeds(60), (), |seed| {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut bench = Bench::new(seed);
        if bench.layers.iter().all(|layer| layer.options.is_none()) {
            bench.add_layer(&mut rng);
        }
        let used: u64 = bench.layers.iter().map(|layer| bench.disk.allocated(layer.file)).sum();
        bench.disk.limit_space(used + rng.u64(0..64) * 1024);
        let guest = bench.guest();
        let asks = random_asks(&mut rng, bench.sectors(), 40);
        bench.run(&guest, asks, rng.bool(), None)?;
        bench.ends(End::PowerCut, seed, &guest)?;
        let failures = guest.failures();
        assert!(failures.iter().all(|failure| failure.error == "Full"), "{seed}: {failures:?}");
        full += failures.len();
        seen += 1;
        Ok::<_, String>(())
    });
    assert!(full > seen, "{full} failures in {seen} runs");
}

#[test]
fn room_that_was_freed_and_flushed_is_had_again_on_a_full_disk() {
    let mut full = 0;
    for seed in seeds(100) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut bench = Bench::new(seed);
        if bench.layers.iter().all(|layer| layer.options.is_none()) {
            bench.add_layer(&mut rng);
        }
        let used: u64 = bench.layers.iter().map(|layer| bench.disk.allocated(layer.file)).sum();
        bench.disk.limit_space(used + rng.u64(32..64) * 1024);
        let guest = bench.guest();
        let Some((mut tasks, served)) = bench.session() else { continue };
        let mut run = |asks: Vec<Ask>| {
            guest.spawn(&mut tasks, &served, 1, asks);
            tasks.run().expect("the simulation runs");
            if let Some(wrong) = guest.wrong() {
                panic!("seed {seed}: {wrong}");
            }
            guest.failures().len()
        };
        let all = 0..bench.sectors();
        let write = |from: u64| Ask::Write { range: from..from + 1, durable: false };
        let options = bench.layers.last().and_then(|layer| layer.options.as_ref());
        let cluster = options.expect("an image").cluster_size;
        let mut starts = all.clone().step_by(8);
        let refused = starts.find(|from| run(vec![write(*from)]) > 0);
        // What it had of its own is freed below, if that is as much as a cluster and its table.
        if refused.is_none_or(|from| from * 512 < 3 * cluster) {
            continue;
        }
        // Zeros in a part of a cluster, and what a flush writes, may need room of their own.
        let zeros = Ask::Zero { range: all.clone(), unmap: true, durable: false };
        let before = guest.failures().len();
        if run(vec![zeros]) > before || run(vec![Ask::Flush]) > before {
            continue;
        }
        assert_eq!(run(vec![write(0)]), before, "seed {seed}: {:?}", guest.failures());
        full += 1;
        if let Err(wrong) = bench.ends(End::PowerCut, seed, &guest) {
            panic!("seed {seed}: {wrong}");
        }
    }
    assert!(full > 5, "{full}");
}
