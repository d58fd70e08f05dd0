//! Power cuts and kills at each turn of a run in which one overlay after the other takes an image's place: every boundary
//! between two writes is one of these.

use ringtap_sim::{Bench, End, Guest, Promise, seeds};

use super::{Below, Chain, SECTORS, Wrong};

/// Stop a run at that turn; whether it had come to its end by then.
fn stopped(
    below: Below,
    seed: u64,
    turn: u64,
    end: End,
    wrong: Option<Wrong>,
) -> Result<bool, String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let chain = Chain::upon(below, seed, wrong);
    let guest = Guest::new(SECTORS, Promise::Flush);
    chain.run_until(Some(turn), &guest, &mut rng)?;
    let over = !chain.disk.is_cut();
    let seed_of_end = if end == End::Kill { turn } else { turn ^ seed };
    let found = chain.after(end, seed_of_end).finds(&guest, end);
    found.map_err(|why| format!("{below:?}, seed {seed}, turn {turn}: {why}"))?;
    Ok(over)
}

/// Each turn of one run, or each of so many; gives how many there were.
fn every(below: Below, seed: u64, step: usize, wrong: Option<Wrong>) -> Result<u64, String> {
    for turn in (1..).step_by(step) {
        let over = stopped(below, seed, turn, End::PowerCut, wrong)?;
        stopped(below, seed, turn, End::Kill, wrong)?;
        if over {
            return Ok(turn);
        }
    }
    Ok(0)
}

#[test]
fn nothing_is_lost_whichever_turn_of_a_snapshot_is_the_last() {
    for (below, step) in [(Below::Raw, 1), (Below::Qcow2, 1), (Below::Luks, 3)] {
        for seed in seeds(2) {
            let turns = every(below, seed, step, None).unwrap_or_else(|why| panic!("{why}"));
            println!("{below:?}, seed {seed}: {turns} turns");
            assert!(turns > 100, "{below:?}: {turns} turns");
        }
    }
}

#[test]
fn a_turn_that_loses_something_is_found() {
    for wrong in [Wrong::FormerForgotten, Wrong::LogsBelowIgnored, Wrong::PivotToldLate] {
        let caught = (0..16).any(|seed| every(Below::Qcow2, seed, 1, Some(wrong)).is_err());
        assert!(caught, "{wrong:?}");
    }
}
