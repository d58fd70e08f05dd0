//! A model of the door: an image is replaced while nobody is using the former one.

use std::sync::Arc;

use ringtap_image::Epochs;
use ringtap_io::sync::atomic::{AtomicU64, Ordering::SeqCst};
use ringtap_io::sync::step;
use ringtap_sim::Disk;
use ringtap_sim::threads::{alone, must_notice, spawn, try_orders};

use crate::door::{Door, NEXT};

/// What all see: each image has epochs of its own, and one of them is the disk.
#[derive(Default)]
struct World {
    door: Door,
    images: [Arc<Epochs>; 3],
    /// Images that are another's backing file by now.
    replaced: AtomicU64,
}

/// A request: it is in the image that it has a handle of, leaves the epoch for a while, as one that found no room
/// does, and begins anew.
async fn request(world: &World, rests: bool) {
    let mut rests = rests;
    loop {
        let number = world.door.image();
        let level = world.images[(number / NEXT) as usize].add_thread();
        let ticket = level.enter();
        if !world.door.lets_in(number) {
            drop(ticket);
            world.door.open().await;
            continue;
        }
        let used = || assert!(world.replaced.load(SeqCst) <= number, "replaced while it is used");
        step();
        used();
        if !std::mem::take(&mut rests) {
            return;
        }
        let waiting = world.door.wait_outside();
        drop(ticket);
        step();
        used();
        drop(waiting);
    }
}

fn nobody_uses_the_former_image() {
    let (world, disk) = (Arc::new(World::default()), Disk::new(512));
    let mut threads = Vec::new();
    for rests in [false, true] {
        let (world, disk) = (world.clone(), disk.clone());
        threads.push(spawn(move || {
            alone(&disk, async move |_| {
                for _ in 0..2 {
                    request(&world, rests).await;
                }
            });
        }));
    }
    let (changer, disk) = (world.clone(), disk.clone());
    threads.push(spawn(move || {
        alone(&disk, async move |_| {
            for number in 0..2usize {
                changer.door.shut().await;
                changer.door.drain(&changer.images[number]).await;
                changer.replaced.store(NEXT * (number as u64 + 1), SeqCst);
                changer.door.replaced();
                changer.door.unlock();
            }
        });
    }));
    for thread in threads {
        thread.join().expect("ended well");
    }
}

#[test]
fn images_are_replaced_alone() {
    try_orders("image replaced", 20_000, nobody_uses_the_former_image);
    must_notice("door shut without waiting", 3000, nobody_uses_the_former_image);
    must_notice("those outside forgotten", 20_000, nobody_uses_the_former_image);
    must_notice("door not looked at", 20_000, nobody_uses_the_former_image);
    must_notice("door opened in silence", 3000, nobody_uses_the_former_image);
    must_notice("listened late", 20_000, nobody_uses_the_former_image);
}
