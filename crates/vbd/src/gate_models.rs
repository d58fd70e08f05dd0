//! A model of the gate: who reads a block, changes it and writes it back does so alone.

use std::sync::Arc;

use ringtap_io::sync::atomic::{AtomicU64, Ordering::SeqCst};
use ringtap_sim::Disk;
use ringtap_sim::threads::{alone, must_notice, spawn, try_orders};

use crate::gate::Gate;

/// A block of two halves. Two threads write all of it; two others change a half each, as partial writes do.
fn nothing_is_written_back_over() {
    let gate = Arc::new(Gate::default());
    let block: Arc<[AtomicU64; 2]> = Arc::default();
    let disk = Disk::new(512);
    let mut threads = Vec::new();
    for writer in 1..=2u64 {
        let (gate, block, disk) = (gate.clone(), block.clone(), disk.clone());
        let writers = gate.add_writers();
        threads.push(spawn(move || {
            alone(&disk, async move |_| {
                for round in 1..=2 {
                    let ticket = gate.enter(&writers).await;
                    // Guests order what they write over: each thread has a half of its own.
                    block[writer as usize - 1].store(round, SeqCst);
                    let seen = block[writer as usize - 1].load(SeqCst);
                    drop(ticket);
                    assert_eq!(seen & 0xff, round, "written back over while it was written");
                    let seen = block[writer as usize - 1].load(SeqCst);
                    assert_eq!(seen & 0xff, round, "written back over");
                }
            });
        }));
    }
    for half in 0..2 {
        let (gate, block, disk) = (gate.clone(), block.clone(), disk.clone());
        threads.push(spawn(move || {
            alone(&disk, async move |_| {
                let _alone = gate.alone().await;
                let mut read = [0, 1].map(|at| block[at].load(SeqCst));
                read[half] |= 0x100;
                (0..2).for_each(|at| block[at].store(read[at], SeqCst));
            });
        }));
    }
    for thread in threads {
        thread.join().expect("ended well");
    }
}

#[test]
fn partial_writes_are_alone() {
    try_orders("write gate", 60_000, nothing_is_written_back_over);
    must_notice("gate looked at first", 10_000, nothing_is_written_back_over);
    must_notice("gate not waited at", 60_000, nothing_is_written_back_over);
    must_notice("gate left in silence", 3000, nothing_is_written_back_over);
    must_notice("listened late", 3000, nothing_is_written_back_over);
    must_notice("slept before looking", 3000, nothing_is_written_back_over);
}
