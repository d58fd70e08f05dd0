//! Servers that are killed while their guests live on: nothing acknowledged may be missing, flushed or
//! not.

use std::cell::RefCell;
use std::rc::Rc;

use ringtap_image::qcow2::Sabotage;
use ringtap_sim::{Bench as _, Disk, End, Guest, Saved, all_well, caught, random_asks, seeds};

use crate::bench::Bench;

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
        let asks = random_asks(&mut rng, bench.sectors(), ASKS);
        bench.run(&guest, asks, false, Some((End::Kill, 10)))?;
        (bench, guest) = bench.ends(End::Kill, rng.u64(..), &guest)?;
    }
    bench.ends(End::PowerCut, bench.seed, &guest).map(drop)
}

#[test]
fn a_killed_server_loses_nothing_that_was_acknowledged() {
    all_well(seeds(150), (), |seed| trial(Bench::new(seed)));
}

#[test]
fn losing_the_log_is_noticed() {
    for sabotage in [Sabotage::RestartLogIgnored, Sabotage::RestartLogDropped] {
        caught(sabotage, 6, 30, |seed| {
            let mut bench = Bench::new(seed);
            bench.sabotage = Some(sabotage);
            trial(bench).is_err()
        });
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
        let first = first.after(End::Kill, seed);
        let second = first.without_log();
        let guest = second.finds(&guest, End::PowerCut).expect("as after a power cut");
        second.run(&guest, asks(), false, None).expect("served");
        // Takes up its own log, makes that stable, and is killed.
        let holds = second.read_all().expect("read");
        let third = second.with_log_of(&first);
        let found = third.read_all().expect("read");
        assert!(found == holds, "seed {seed}: a stale log changed the disk");
        third.check().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}

/// How an image comes to be in another state than its killed server left it.
#[derive(Clone, Copy, Debug)]
enum Back {
    /// An older state is written over it, some time later.
    Copied,
    /// The same, with the time that it had then: it may be at once.
    CopiedWithTime,
    /// Somebody who does not know the log writes to it.
    Written,
}

/// A copy of the image at some turn of a run, its end included.
fn copy_during(bench: &Bench, guest: &Guest, rng: &mut fastrand::Rng) -> Saved {
    let kept: Rc<RefCell<Option<Saved>>> = Rc::default();
    let file = bench.top();
    let (keep, odds) = (kept.clone(), rng.u64(1..40));
    let mut own = fastrand::Rng::with_seed(rng.u64(..));
    let asks = random_asks(rng, bench.sectors(), ASKS);
    let look = move |cut: &Disk| {
        if own.u64(0..odds) == 0 {
            *keep.borrow_mut() = cut.save(file, own.u64(..));
        }
    };
    bench.run_looking(guest, asks, look).expect("served");
    let saved = kept.borrow_mut().take();
    saved.or_else(|| bench.disk.save(file, 0)).expect("a file")
}

/// An image that was put back reads as what was put back, whatever its killed server left; or it is refused,
/// which gives false: a copy may be of the very moment at which the server was killed.
fn put_back(seed: u64, back: Back) -> Result<bool, String> {
    let mut bench = Bench::new(seed);
    let mut rng = fastrand::Rng::with_seed(seed ^ 0x5a5a);
    let guest = bench.guest();
    let saved = copy_during(&bench, &guest, &mut rng);
    bench = bench.after(End::Kill, rng.u64(..));
    // More is written after the copy was taken, and the server is killed with some of it in flight.
    let guest = guest.after_kill();
    bench.disk.cut_power_at_turn(rng.u64(20..200));
    bench.run(&guest, random_asks(&mut rng, bench.sectors(), ASKS), false, None).expect("served");
    bench = bench.after(End::Kill, rng.u64(..));
    let file = bench.top();
    match back {
        Back::Copied => {
            bench.disk.pass(rng.u64(1_100_000_000..10_000_000_000));
            bench.disk.restore(file, &saved, false);
        }
        Back::CopiedWithTime => bench.disk.restore(file, &saved, true),
        Back::Written => {
            bench.disk.pass(rng.u64(1_100_000_000..10_000_000_000));
            let other = bench.without_log();
            let guest = other.guest();
            other.run(&guest, random_asks(&mut rng, bench.sectors(), ASKS), rng.bool(), None).ok();
            bench = bench.with_disk_of(&other);
        }
    }
    let holds = bench.after(End::Kill, 0).without_log().read_all()?;
    let found = match bench.read_all() {
        Err(refused) if refused.contains("--restart-log use") => return Ok(false),
        found => found?,
    };
    if found != holds {
        let differs = found.iter().zip(&holds).position(|(one, other)| one != other);
        return Err(format!("byte {differs:?} does not read as what was put back"));
    }
    bench.check().map(|_| true)
}

#[test]
fn a_log_is_of_no_other_state_of_its_image() {
    let (mut all, mut refused) = (0, 0);
    for back in [Back::Copied, Back::CopiedWithTime, Back::Written] {
        let read = all_well(seeds(60), back, |seed| put_back(seed, back));
        all += read.len();
        refused += read.iter().filter(|read| !**read).count();
    }
    println!("{refused} of {all} refused");
    assert!(refused <= 1 + all / 1000, "{refused} of {all} refused");
}
