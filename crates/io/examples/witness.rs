//! Instructions that noting a change of a watched file takes, as the ring does it, to be counted by
//! `valgrind --tool=callgrind target/release/examples/witness TURNS CHANGES`: so many turns, each of so many
//! changes that are begun and have ended. Reading the clock, twice a turn, is not in it.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ringtap_io::{Watch, Witness, Words};

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<u64>());
    let (Some(Ok(turns)), Some(Ok(changes))) = (args.next(), args.next()) else {
        eprintln!("usage: witness TURNS CHANGES");
        std::process::exit(2);
    };
    let words: Arc<[AtomicU64]> = (0..Witness::WORDS).map(|_| AtomicU64::new(0)).collect();
    let words: Words = Arc::new(words);
    let witness = Arc::new(Witness::default());
    witness.start(words, 0);
    let mut watch = Watch::new(witness);
    for turn in 0..turns {
        let now = black_box(turn);
        let mut era = 0;
        for _ in 0..changes {
            era = black_box(&mut watch).begin(4096);
        }
        watch.settle_begun(now);
        for _ in 0..changes {
            black_box(&mut watch).end(era, Some(4096));
        }
        watch.settle_ended(now);
    }
}
