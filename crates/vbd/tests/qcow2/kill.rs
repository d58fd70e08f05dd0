//! Servers that are killed while their guests live on: nothing acknowledged may be missing, flushed or
//! not.

use ringtap_image::qcow2::Sabotage;
use ringtap_sim::random_asks;

use crate::bench::{Bench, Watch, seeds};

const ASKS: usize = 40;

/// Look at a kill at many turns; let it happen at one; let the next server take the image up; go on.
/// After all that the power goes.
fn trial(mut bench: Bench) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(bench.seed);
    let mut guest = bench.guest();
    for _ in 0..4 {
        // Often so early that the next server is killed while it takes the image up.
        let most = if rng.bool() { 20 } else { 200 };
        bench.disk.cut_power_at_turn(rng.u64(1..most));
        let watch = Watch::of_kills(&bench, &guest, 10);
        let asks = random_asks(&mut rng, bench.sectors(), ASKS);
        bench.run(&guest, asks, false, Some(watch.clone())).map_err(|w| w.to_string())?;
        if let Some(wrong) = watch.wrong() {
            return Err(format!("a kill would leave: {wrong}"));
        }
        bench = bench.after_kill(rng.u64(..));
        guest = guest.after_kill();
        bench.after_kill(0).look_alive(&guest)?;
    }
    bench.after_power_cut(bench.seed).look(&guest)?;
    Ok(())
}

#[test]
fn a_killed_server_loses_nothing_that_was_acknowledged() {
    for seed in seeds(150) {
        if let Err(wrong) = trial(Bench::new(seed)) {
            panic!("seed {seed}: {wrong}");
        }
    }
}

#[test]
fn losing_the_log_is_noticed() {
    for sabotage in [Sabotage::RestartLogIgnored, Sabotage::RestartLogDropped] {
        let caught = (0..30).filter(|seed| {
            let mut bench = Bench::new(*seed);
            bench.sabotage = Some(sabotage);
            trial(bench).is_err()
        });
        let caught = caught.count();
        println!("{sabotage:?}: {caught} of 30");
        assert!(caught > 5, "{sabotage:?} is hidden in all but {caught} of 30 seeds");
    }
}

/// Two servers that do not see each other's logs (of two users, or in two containers): what the first
/// left is void once the second has written.
#[test]
fn a_log_that_another_server_passed_by_is_void() {
    for seed in seeds(60) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let first = Bench::new(seed);
        let mut asks = || random_asks(&mut rng, first.sectors(), ASKS);
        let guest = first.guest();
        first.run(&guest, asks(), false, None).expect("served");
        let first = first.after_kill(seed);
        let second = first.with_log_of(&Bench::new(seed));
        let guest = second.look(&guest).expect("as after a power cut");
        second.run(&guest, asks(), false, None).expect("served");
        // Takes up its own log, makes that stable, and is killed.
        let holds = second.read_all().expect("read");
        let third = second.with_log_of(&first);
        let found = third.read_all().expect("read");
        assert!(found == holds, "seed {seed}: a stale log changed the disk");
        third.check().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}
