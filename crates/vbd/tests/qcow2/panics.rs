//! Panics while a guest's requests are in flight: they fail, nothing more is written, and the next server
//! of the image has all that was acknowledged.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use ringtap_sim::{Bench as _, End, random_asks, seeds};

use crate::bench::Bench;

const ASKS: usize = 40;

#[derive(Default)]
struct Seen {
    panicked: AtomicBool,
    /// What the image was asked to do after that.
    touched: AtomicBool,
}

/// Panic at one of the image's steps, however they come.
fn set_trap(bench: &mut Bench, after: u64) -> Arc<Seen> {
    let (left, seen) = (AtomicU64::new(after), Arc::<Seen>::default());
    let theirs = seen.clone();
    bench.trap = Some(Arc::new(move |what, offset| {
        // What forks it are threads that only now begin.
        if what == "fork" {
            return;
        }
        theirs.touched.fetch_or(theirs.panicked.load(SeqCst), SeqCst);
        if left.fetch_sub(1, SeqCst) == 1 {
            theirs.panicked.store(true, SeqCst);
            panic!("as the test has it, at {what} {offset}");
        }
    }));
    seen
}

/// Panic; see what that leaves as the next server finds it, which panics, too; and so on.
fn trial(mut bench: Bench) -> Result<usize, String> {
    let mut rng = fastrand::Rng::with_seed(bench.seed);
    let (mut guest, mut panics) = (bench.guest(), 0);
    for _ in 0..4 {
        let most = if rng.bool() { 30 } else { 300 };
        let seen = set_trap(&mut bench, rng.u64(1..most));
        let asks = random_asks(&mut rng, bench.sectors(), ASKS);
        bench.run(&guest, asks, true, Some((End::Kill, 10)))?;
        bench.trap = None;
        if seen.touched.load(SeqCst) {
            return Err("the image of a disk that is stopped was used".to_owned());
        }
        panics += usize::from(seen.panicked.load(SeqCst));
        bench = bench.after(End::Kill, rng.u64(..));
        guest = bench.finds(&guest, End::Kill)?;
    }
    bench.ends(End::PowerCut, bench.seed, &guest).map(|_| panics)
}

#[test]
fn a_disk_that_panicked_loses_nothing_that_was_acknowledged() {
    std::panic::set_hook(Box::new(|_| {}));
    let trials = seeds(150).map(|seed| trial(Bench::new(seed)).map_err(|why| (seed, why)));
    let panics: Result<usize, _> = trials.sum();
    drop(std::panic::take_hook());
    let panics = panics.unwrap_or_else(|(seed, why)| panic!("seed {seed}: {why}"));
    println!("{panics} panics");
    assert!(panics > 100 || std::env::var_os("RINGTAP_SEED").is_some(), "only {panics}");
}
