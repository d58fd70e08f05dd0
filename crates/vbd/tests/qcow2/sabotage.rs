//! Tests that notice nothing are worth nothing: what is broken on purpose has to be caught.

use std::fmt::Debug;

use ringtap_image::qcow2::Sabotage;
use ringtap_sim::{Lie, caught};

use crate::bench::Bench;
use crate::power_cut::trial;

const TRIALS: u64 = 24;
/// How many of them have to fail at least.
const FEWEST: usize = 3;

/// Makes a bench of a seed.
type Make = fn(u64) -> Bench;

/// Try many seeds, looking at a power cut in every `every`th turn.
fn is_caught(what: impl Debug, every: u64, new: Make, make: impl Fn(&mut Bench)) {
    caught(what, FEWEST, TRIALS, |seed| {
        let mut bench = new(seed);
        make(&mut bench);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| trial(bench, every)))
            .is_ok_and(|end| end.is_err())
    });
}

#[test]
fn broken_images_are_caught() {
    let (plain, packing): (Make, Make) = (Bench::new, Bench::packing);
    for (sabotage, every, new) in [
        (Sabotage::TablesFirst, 8, plain),
        (Sabotage::L1First, 8, plain),
        (Sabotage::RefcountsLate, 8, plain),
        (Sabotage::EarlyReuse, 2, plain),
        (Sabotage::PackedLate, 2, packing),
        (Sabotage::SharedUncounted, 8, packing),
    ] {
        is_caught(sabotage, every, new, |bench| bench.sabotage = Some(sabotage));
    }
}

#[test]
fn lying_disks_are_caught() {
    for lie in [Lie::SyncDoesNothing, Lie::EarlyWrites, Lie::ZeroDoesNothing] {
        is_caught(lie, 8, Bench::new, |bench| bench.lie = Some(lie));
    }
}
