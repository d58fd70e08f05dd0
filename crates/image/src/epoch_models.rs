//! Models of epochs: what was freed rests until nobody can be looking at it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use ringtap_io::sync::atomic::AtomicUsize;
use ringtap_io::sync::{Mutex, step};
use ringtap_sim::Disk;
use ringtap_sim::threads::{alone, must_notice, spawn, try_orders};

use crate::Epochs;

const PLACES: usize = 4;

/// Where something lies, and which places have been given to somebody else since.
#[derive(Default)]
struct World {
    epochs: Arc<Epochs>,
    current: AtomicUsize,
    /// Places that were freed, and when.
    resting: Mutex<Vec<(usize, u64)>>,
    reused: [AtomicBool; PLACES],
}

/// Requests read by the place they found; one thread moves what they read, as writes and discards do, and
/// another, as a flush does, gives away places that have rested.
fn freed_places_rest() {
    let world = Arc::new(World::default());
    let mut threads = Vec::new();
    for _ in 0..2 {
        let (world, thread) = (world.clone(), world.epochs.add_thread());
        threads.push(spawn(move || {
            for _ in 0..2 {
                let ticket = thread.enter();
                let place = world.current.load(SeqCst);
                for _ in 0..2 {
                    step();
                    assert!(!world.reused[place].load(SeqCst), "place {place} under a reader");
                }
                drop(ticket);
            }
        }));
    }
    let mover = world.clone();
    threads.push(spawn(move || {
        for next in 1..PLACES {
            let place = mover.current.load(SeqCst);
            mover.current.store(next, SeqCst);
            let mut resting = mover.resting.lock().expect("no panic");
            resting.push((place, mover.epochs.epoch()));
        }
        // A queue thread comes and goes.
        drop(mover.epochs.add_thread().enter());
    }));
    let flusher = world.clone();
    threads.push(spawn(move || {
        for _ in 0..6 {
            let mut resting = std::mem::take(&mut *flusher.resting.lock().expect("no panic"));
            resting.retain(|(place, epoch)| {
                let over = flusher.epochs.is_over(*epoch);
                if over {
                    flusher.reused[*place].store(true, SeqCst);
                }
                !over
            });
            flusher.resting.lock().expect("no panic").append(&mut resting);
        }
    }));
    for thread in threads {
        thread.join().expect("ended well");
    }
    // Nobody is left: everything may be used again.
    assert!(world.epochs.is_over(world.epochs.epoch()));
}

/// One request, which frees what it has read itself, beside a flush: in so few steps that most orders with few
/// changes of thread are tried.
fn own_place_rests() {
    let world = Arc::new(World::default());
    let (request, thread) = (world.clone(), world.epochs.add_thread());
    let request = spawn(move || {
        let ticket = thread.enter();
        let place = request.current.load(SeqCst);
        let epoch = request.epochs.epoch();
        request.resting.lock().expect("no panic").push((place, epoch));
        step();
        assert!(!request.reused[place].load(SeqCst), "place {place} under its reader");
        drop(ticket);
    });
    // Time moves on while nothing rests, too.
    world.epochs.is_over(0);
    let resting = std::mem::take(&mut *world.resting.lock().expect("no panic"));
    for (place, epoch) in resting {
        if world.epochs.is_over(epoch) {
            world.reused[place].store(true, SeqCst);
        }
    }
    request.join().expect("ended well");
}

/// Who waits for an epoch's end is woken by the last request of it, and not before.
fn an_end_is_waited_for() {
    let epochs = Arc::new(Epochs::default());
    let mut threads = Vec::new();
    let thread = epochs.add_thread();
    threads.push(spawn(move || {
        let ticket = thread.enter();
        step();
        drop(ticket);
    }));
    let (disk, thread) = (Disk::new(512), epochs.add_thread());
    let held = thread.enter();
    let epoch = epochs.epoch();
    let waits = epochs.clone();
    let over = Arc::new(AtomicBool::new(false));
    let seen = over.clone();
    threads.push(spawn(move || {
        alone(&disk, async move |_| waits.over(epoch).await);
        seen.store(true, SeqCst);
    }));
    step();
    assert!(!over.load(SeqCst), "over with a request in flight");
    drop(held);
    for thread in threads {
        thread.join().expect("ended well");
    }
}

#[test]
fn who_waits_for_requests_to_end_is_woken() {
    try_orders("the end of an epoch", 4000, an_end_is_waited_for);
    must_notice("ended in silence", 4000, an_end_is_waited_for);
}

#[test]
fn nothing_freed_is_used_again_under_a_reader() {
    try_orders("epochs", 24_000, freed_places_rest);
    must_notice("rest of one epoch", 6000, freed_places_rest);
    try_orders("epochs, in few steps", 80_000, own_place_rests);
    must_notice("epoch not seen again", 400_000, own_place_rests);
}
