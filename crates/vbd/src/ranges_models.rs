//! A model of ranges: a disk and its copy, written to by two and copied by a third, end alike.

use std::sync::Arc;

use ringtap_io::sync::atomic::{AtomicU64, Ordering::SeqCst};
use ringtap_sim::Disk;
use ringtap_sim::threads::{alone, must_notice, spawn, try_orders};

use crate::ranges::Ranges;

/// Two regions; one range covers both.
#[derive(Default)]
struct World {
    disk: [AtomicU64; 2],
    copy: [AtomicU64; 2],
}

fn both_end_alike() {
    let (world, ranges) = (Arc::new(World::default()), Arc::new(Ranges::default()));
    let mut threads = Vec::new();
    for writer in 0..2u64 {
        let (world, ranges) = (world.clone(), ranges.clone());
        threads.push(spawn(move || {
            alone(&Disk::new(512), async move |_| {
                for round in 1..=2 {
                    let held = ranges.ask(0..1 + writer);
                    assert!(held.ours(|| false).await);
                    for region in 0..=writer as usize {
                        world.disk[region].store(10 * writer + round, SeqCst);
                        world.copy[region].store(10 * writer + round, SeqCst);
                    }
                }
            });
        }));
    }
    let (job, all) = (world.clone(), ranges.clone());
    threads.push(spawn(move || {
        alone(&Disk::new(512), async move |_| {
            for region in 0..2 {
                let held = all.ask(region as u64..region as u64 + 1);
                assert!(held.ours(|| false).await);
                job.copy[region].store(job.disk[region].load(SeqCst), SeqCst);
            }
        });
    }));
    for thread in threads {
        thread.join().expect("ended well");
    }
    for region in 0..2 {
        let values = [&world.disk, &world.copy].map(|cells| cells[region].load(SeqCst));
        assert_eq!(values[0], values[1], "region {region}");
    }
}

#[test]
fn a_range_is_one_users() {
    try_orders("ranges", 20_000, both_end_alike);
    must_notice("range not waited for", 3000, both_end_alike);
    must_notice("range left in silence", 3000, both_end_alike);
    must_notice("listened late", 3000, both_end_alike);
}
