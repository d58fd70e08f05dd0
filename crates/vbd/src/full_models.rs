//! A model of requests that wait for room: whoever says that there is some reaches all of them, and those who find none
//! once more wait for the next time.

use std::sync::Arc;

use ringtap_io::sync::atomic::{AtomicU64, Ordering::SeqCst};
use ringtap_sim::Disk;
use ringtap_sim::threads::{alone, must_notice, spawn, try_orders};

use crate::full::{Full, GivenUp};

/// Three requests take a place each; somebody makes one place after the other and tells each time.
fn everybody_finds_room() {
    let (full, room) = (Arc::new(Full::default()), Arc::new(AtomicU64::new(0)));
    full.wait_for_room(|| ());
    let mut threads = Vec::new();
    for _ in 0..3 {
        let (full, room) = (full.clone(), room.clone());
        threads.push(spawn(move || {
            alone(&Disk::new(512), async move |_| {
                loop {
                    let tries = full.tries();
                    let take = |left: u64| left.checked_sub(1);
                    if room.fetch_update(SeqCst, SeqCst, take).is_ok() {
                        return;
                    }
                    assert!(full.wait(tries, &GivenUp::default()).await, "given up");
                }
            });
        }));
    }
    for _ in 0..3 {
        room.fetch_add(1, SeqCst);
        full.try_again();
    }
    for thread in threads {
        thread.join().expect("ended well");
    }
    assert_eq!((full.waiting(), room.load(SeqCst)), (0, 0));
}

/// Of two requests that find no room one comes by somebody who is given up: it alone ends.
fn one_is_given_up() {
    let (full, gone) = (Arc::new(Full::default()), Arc::new(GivenUp::default()));
    full.wait_for_room(|| ());
    let ends = [gone.clone(), Arc::default()].map(|by| {
        let full = full.clone();
        spawn(move || alone(&Disk::new(512), async move |_| full.wait(full.tries(), &by).await))
    });
    full.give_up_those(&gone);
    let [given_up, other] = ends;
    assert!(!given_up.join().expect("it ends"));
    full.give_up();
    assert!(!other.join().expect("it ends"));
}

#[test]
fn who_is_given_up_hears_of_it() {
    try_orders("room given up", 10_000, one_is_given_up);
    must_notice("room given up in silence", 1000, one_is_given_up);
}

#[test]
fn who_waits_for_room_hears_of_it() {
    try_orders("room waited for", 10_000, everybody_finds_room);
    must_notice("room told in silence", 1000, everybody_finds_room);
    must_notice("listened late", 3000, everybody_finds_room);
}
