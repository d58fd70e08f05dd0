//! The order of the arms within each round.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::running::Running;

/// Puts first the first of those arms that most loads run on: it is the reference and runs twice, and a load that it does not run
/// has no control, and no answer.
pub fn first_of_most(arms: &mut Vec<Running>) {
    let most = arms.iter().map(|arm| arm.rounds().count()).max();
    if let Some(at) = arms.iter().position(|arm| Some(arm.rounds().count()) == most) {
        let reference = arms.remove(at);
        arms.insert(0, reference);
    }
}

/// For each round a permutation of `arms` arms.
///
/// Rows of a Williams square, in which over a full set every arm stands equally often in every place and equally often
/// behind every other; each row is followed by its mirror, so that after any even number of rounds a steady drift has
/// hit all arms alike. Which arm has which number, and which rows come first, the seed decides.
pub fn balanced(arms: usize, rounds: usize, seed: u64) -> Vec<Vec<usize>> {
    if arms == 0 {
        return vec![Vec::new(); rounds];
    }
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut label: Vec<usize> = (0..arms).collect();
    label.shuffle(&mut random);
    // 0, n-1, 1, n-2, 2, …: each step between neighbours is another one modulo n.
    let zigzag: Vec<usize> =
        (0..arms).map(|i| if i % 2 == 0 { i / 2 } else { arms - 1 - i / 2 }).collect();
    // With an even number of arms the mirror of a row is itself a row: half of them, with mirrors, are the square.
    let mut shifts: Vec<usize> = (0..if arms % 2 == 0 { arms / 2 } else { arms }).collect();
    shifts.shuffle(&mut random);
    let mut rows = Vec::with_capacity(rounds);
    for shift in shifts.iter().cycle() {
        let row: Vec<usize> = zigzag.iter().map(|place| label[(place + shift) % arms]).collect();
        let mirror: Vec<usize> = row.iter().rev().copied().collect();
        rows.push(row);
        rows.push(mirror);
        if rows.len() >= rounds {
            break;
        }
    }
    rows.truncate(rounds);
    rows
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn every_round_has_every_arm_once() {
        for arms in 1..9 {
            for row in balanced(arms, 7, 3) {
                let mut sorted = row.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..arms).collect::<Vec<_>>());
            }
        }
        assert_eq!(balanced(0, 2, 1), vec![Vec::<usize>::new(); 2]);
    }

    #[test]
    fn a_full_set_balances_places_and_neighbours() {
        for arms in [4, 5, 6, 7] {
            let rounds = if arms % 2 == 0 { arms } else { 2 * arms };
            let mut places: HashMap<(usize, usize), usize> = HashMap::new();
            let mut neighbours: HashMap<(usize, usize), usize> = HashMap::new();
            for row in balanced(arms, rounds, 9) {
                for (place, arm) in row.iter().enumerate() {
                    *places.entry((place, *arm)).or_default() += 1;
                }
                for pair in row.windows(2) {
                    *neighbours.entry((pair[0], pair[1])).or_default() += 1;
                }
            }
            assert!(
                places.len() == arms * arms && places.values().all(|n| *n == rounds / arms),
                "{arms} arms"
            );
            let pairs = arms * (arms - 1);
            assert!(
                neighbours.len() == pairs,
                "{arms} arms: {} of {pairs} neighbours",
                neighbours.len()
            );
            let each = rounds * (arms - 1) / pairs;
            assert!(neighbours.values().all(|n| *n == each), "{arms} arms");
        }
    }

    #[test]
    fn two_rounds_cancel_a_steady_drift() {
        let rows = balanced(8, 2, 5);
        for arm in 0..8 {
            let places: usize =
                rows.iter().map(|row| row.iter().position(|a| *a == arm).unwrap()).sum();
            assert_eq!(places, 7);
        }
    }

    #[test]
    fn the_seed_decides() {
        assert_eq!(balanced(6, 6, 1), balanced(6, 6, 1));
        assert_ne!(balanced(6, 6, 1), balanced(6, 6, 2));
    }
}
