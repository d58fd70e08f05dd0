//! Power cuts and failing disks under a VBD on VHDs of every kind, on the simulated disk: at every turn
//! the image that a cut would leave opens, checks clean and holds what it may hold.
//! `RINGTAP_SEEDS` sets how many seeds each kind is tried with; a failure names its seed.

mod bench;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/container.rs"]
mod container;
mod walk;

use std::rc::Rc;

use ringtap_image::vhd::{self, Sabotage};
use ringtap_io::Tasks;
use ringtap_sim::{
    Ask, Bench as _, Disk, End, Fault, SECTOR, Sim, all_well, caught, random_asks, seeds,
};
use ringtap_vbd::{Kind, Request};

use bench::{Bench, CASES, Case, SECTORS, SLOTS, run};
use common::Served;

/// Look at a cut at every turn; let the power go at one of them; open what is left; go on; cut again.
fn trial(seed: u64, case: Case, sabotage: Option<Sabotage>) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut bench, mut guest) = Bench::new(seed, case);
    for _ in 0..2 {
        let cut = (rng.u8(0..4) > 0).then(|| rng.u64(1..120));
        let asks = random_asks(&mut rng, SECTORS, 30);
        vhd::sabotage(sabotage);
        let end = bench.run_after(&guest, asks, true, |disk| {
            if let Some(turns) = cut {
                disk.cut_power_at_turn(disk.turns() + turns);
            }
        });
        vhd::sabotage(None);
        end?;
        let failures = guest.failures();
        assert!(failures.is_empty(), "seed {seed}, {case:?}: {failures:?}");
        (bench, guest) = bench.ends(End::PowerCut, rng.u64(..), &guest)?;
    }
    Ok(())
}

/// A killed server is no power cut: the guest lives on, and finds all that was acknowledged, flushed or
/// not.
#[test]
fn a_killed_server_loses_nothing_that_was_acknowledged() {
    for case in CASES {
        all_well(seeds(12), case, |seed| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let (mut bench, mut guest) = Bench::new(seed, case);
            for _ in 0..4 {
                let turns = rng.u64(1..120);
                let asks = random_asks(&mut rng, SECTORS, 40);
                let cut = |disk: &Disk| disk.cut_power_at_turn(disk.turns() + turns);
                bench.run_after(&guest, asks, false, cut)?;
                (bench, guest) = bench.ends(End::Kill, rng.u64(..), &guest)?;
            }
            // And what a power cut may take after all that is what was never flushed.
            bench.ends(End::PowerCut, seed, &guest)
        });
    }
}

fn try_power_cuts(case: Case) {
    all_well(seeds(8), case, |seed| trial(seed, case, None));
}

#[test]
fn power_cuts_under_a_fixed_vhd() {
    try_power_cuts(Case::Fixed);
}

#[test]
fn power_cuts_under_a_dynamic_vhd() {
    try_power_cuts(Case::Dynamic);
}

#[test]
fn power_cuts_under_a_dynamic_vhd_on_a_device() {
    try_power_cuts(Case::DynamicOnDevice);
}

#[test]
fn power_cuts_under_a_differencing_vhd() {
    try_power_cuts(Case::Differencing);
    try_power_cuts(Case::Deep);
}

#[test]
fn sabotage_is_caught() {
    for (case, sabotage) in [
        (Case::DynamicOnDevice, Sabotage::RoomIsZeros),
        (Case::DynamicOnDevice, Sabotage::NoBarrier),
        (Case::Dynamic, Sabotage::NoBarrier),
        (Case::Differencing, Sabotage::NoBarrier),
        (Case::Differencing, Sabotage::BitsFirst),
    ] {
        caught((case, sabotage), 1, 16, |seed| trial(seed, case, Some(sabotage)).is_err());
    }
}

/// A run in which operation number `n` fails; then a flush, and a cut that must lose nothing. Gives
/// whether the run had an operation `n`.
fn run_with_fault(seed: u64, case: Case, n: u64, fault: Fault) -> bool {
    let context = format!("seed {seed}, {case:?}, operation {n} gives {fault:?}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let (bench, guest) = Bench::new(seed, case);
    // The page cache drops what it could not write.
    bench.disk.forget_on_failed_sync(true);
    let asks = random_asks(&mut rng, SECTORS, 12);
    let vbd = bench.vbd(false);
    let last = bench.disk.operations() + n;
    bench.disk.fail_operations(last..last + 1, fault);
    if let Err(wrong) = bench.run_on(&vbd, &guest, asks, false) {
        panic!("{context}: {wrong}");
    }
    let met = bench.disk.operations() >= last;
    bench.disk.heal();
    let failures = guest.failures().len();
    if let Err(wrong) = bench.run_on(&vbd, &guest, vec![Ask::Flush], false) {
        panic!("{context}: {wrong}");
    }
    // Through the page cache a failed flush is never made good.
    let stays_failed = failures > 0 && bench.align == 1;
    assert!(guest.failures().len() == failures || stays_failed, "{context}");
    if let Err(wrong) = bench.ends(End::PowerCut, seed, &guest) {
        panic!("{context}: {wrong}");
    }
    met
}

#[test]
fn every_operation_may_fail_once() {
    for case in CASES {
        for seed in seeds(2) {
            for fault in [Fault::Errno(libc::EIO), Fault::Errno(libc::ENOSPC), Fault::Short] {
                let mut n = 1;
                while run_with_fault(seed, case, n, fault) {
                    n += 1;
                }
                assert!(n > 5, "the run had operations to fail");
            }
        }
    }
}

/// Fault, flush and cut while the same image stays open: what a failed flush left is made good.
#[test]
fn a_flush_that_failed_is_made_good() {
    let mut failed = 0;
    for case in [Case::Dynamic, Case::DynamicOnDevice, Case::Differencing] {
        let flushes = all_well(seeds(8), case, |seed| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let (mut bench, guest) = Bench::new(seed, case);
            bench.align = bench.align.max(512);
            let asks = random_asks(&mut rng, SECTORS, 40);
            let end = bench.run_after(&guest, asks, true, |disk| {
                for _ in 0..4 {
                    let n = disk.operations() + rng.u64(5..100);
                    disk.fail_operations(n..n + 1, Fault::Errno(libc::EIO));
                }
            });
            let flushes = guest.failures().into_iter().filter(|failure| failure.ask == Ask::Flush);
            end.map(|()| flushes.count())
        });
        failed += flushes.into_iter().sum::<usize>();
    }
    assert!(failed > 0);
}

#[test]
fn a_full_disk_fails_writes_and_loses_nothing() {
    let mut full = 0;
    for case in [Case::Dynamic, Case::Differencing] {
        all_well(seeds(8), case, |seed| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let (bench, guest) = Bench::new(seed, case);
            let used: u64 = bench.chain.iter().map(|file| bench.disk.allocated(*file)).sum();
            let asks = random_asks(&mut rng, SECTORS, 40);
            bench.run_after(&guest, asks, true, |disk| {
                disk.limit_space(used + rng.u64(8..80) * 512);
                disk.cut_power_at_turn(disk.turns() + rng.u64(40..250));
            })?;
            bench.ends(End::PowerCut, seed, &guest)?;
            let failures = guest.failures();
            assert!(failures.iter().all(|failure| failure.error == "Full"), "{failures:?}");
            full += failures.len();
            Ok::<_, String>(())
        });
    }
    assert!(full > 10, "{full}");
}

#[test]
fn a_clean_close_leaves_a_footer_at_the_very_end() {
    for seed in seeds(20) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (bench, guest) = Bench::new(seed, Case::Dynamic);
        let vbd_bench = bench.clone();
        let asks = random_asks(&mut rng, SECTORS, 20);
        let (guest_too, served) = (guest.clone(), Rc::new(Served::new(bench.vbd(false))));
        let mut tasks = Tasks::new(Box::new(Sim::new(&bench.disk, seed)));
        guest_too.spawn(&mut tasks, &served, SLOTS, asks);
        tasks.run().expect("runs");
        run(&bench.disk, move |io| async move {
            served.vbd.close(&io).await.expect("closed");
            let file = *vbd_bench.chain.last().expect("an image");
            let report = vhd::check(&io, &vbd_bench.container(file, true), false).await;
            let report = report.expect("a report");
            assert_eq!((report.footers, report.leaked), (vec![], 0), "seed {seed}");
        });
        // Closed is stable.
        let left = bench.after(End::PowerCut, seed).read_whole();
        assert_eq!(left, bench.read_whole(), "seed {seed}");
        assert!(left.is_ok(), "seed {seed}: {left:?}");
    }
}

/// Writes to a fresh image cost one operation each, but for the file's growth: metadata waits for a
/// flush, which writes it once.
#[test]
fn a_fresh_write_is_one_operation() {
    for case in [Case::Dynamic, Case::Differencing] {
        let (mut bench, _) = Bench::new(4, case);
        bench.align = 512;
        let vbd = Rc::new(bench.vbd(false));
        let ask = |kind, sector: u64, sectors: u64| {
            let (vbd, before) = (vbd.clone(), bench.disk.operations());
            run(&bench.disk, move |io| async move {
                let buffer = io.buffer(sectors as usize * SECTOR).expect("memory");
                let (offset, len) = (sector * SECTOR as u64, sectors * SECTOR as u64);
                let request = Request { kind, offset, len, mem: buffer.mem(), fua: false };
                vbd.serve(&io, request).await.expect("served");
            });
            bench.disk.operations() - before
        };
        ask(Kind::Write, 0, 1);
        ask(Kind::Write, 88, 8);
        // Now and then room is reserved and the footer moved, in ever larger steps, or the parent's bitmap
        // is read.
        let costs: Vec<u64> = (0..12).map(|number| ask(Kind::Write, number * 8, 8)).collect();
        let cheap = costs.iter().filter(|cost| **cost == 1).count();
        assert!(cheap >= 6, "{case:?}: {costs:?}");
        let again: Vec<u64> = (0..12).map(|number| ask(Kind::Write, number * 8, 8)).collect();
        assert_eq!(again, [1; 12], "{case:?}");
        // Twelve bitmaps at most, the table's sector read and written, two syncs.
        assert!(ask(Kind::Flush, 0, 0) <= 12 + 2 + 2, "{case:?}");
        assert_eq!(ask(Kind::Flush, 0, 0), 1, "{case:?}: nothing is left to write");
    }
}
