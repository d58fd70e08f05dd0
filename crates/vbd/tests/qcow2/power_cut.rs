//! Power cuts at any turn, over chains of images of every kind.

use ringtap_sim::{Bench as _, End, SECTOR, all_well, seeds};

use crate::bench::Bench;

const ASKS: usize = 40;

/// Look at a cut at many turns; let the power go at one of them, or close; open what is left; put an
/// overlay upon it, perhaps; go on.
pub fn trial(mut bench: Bench, every: u64) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(bench.seed);
    let mut guest = bench.guest();
    let sound = bench.sabotage.is_none() && bench.lie.is_none();
    for _ in 0..3 {
        let leaked = bench.check()?;
        if rng.bool() {
            bench.disk.cut_power_at_turn(rng.u64(1..150));
        }
        let asks = bench.asks(&mut rng, ASKS);
        let close = rng.bool();
        bench.run(&guest, asks, close, Some((End::PowerCut, every)))?;
        let failures = guest.failures();
        // What is compressed goes to new room each time: a small device may have none before a flush.
        let may_fail = |error: &str| !sound || bench.packs && error == "Full";
        let allowed = failures.iter().all(|failure| may_fail(&failure.error));
        assert!(allowed, "seed {}: {failures:?}", bench.seed);
        if close && !bench.disk.is_cut() {
            bench.disk.cut_power_at_turn(u64::MAX);
            let leaks = bench.check()?;
            // Those of an earlier cut stay until a repair.
            if leaks > leaked {
                return Err(format!("{leaks} clusters leak after a clean end, {leaked} before"));
            }
        }
        bench.disk.cut_power_at_turn(u64::MAX);
        (bench, guest) = bench.ends(End::PowerCut, rng.u64(..), &guest)?;
        if rng.bool() {
            bench.take_snapshot(&mut rng);
        }
        if rng.u8(0..3) == 0 {
            let found = bench.read_all()?;
            bench.size += rng.u64(0..3) * 8 * SECTOR as u64;
            bench.add_layer(&mut rng);
            guest = guest.on_larger_disk(&found, bench.sectors()).map_err(|w| w.to_string())?;
        }
    }
    Ok(())
}

#[test]
fn power_cuts_leave_what_was_promised() {
    all_well(seeds(60), (), |seed| trial(Bench::new(seed), 8));
}

#[test]
fn power_cuts_leave_what_was_compressed() {
    all_well(seeds(40), "packing", |seed| trial(Bench::packing(seed), 8));
}
