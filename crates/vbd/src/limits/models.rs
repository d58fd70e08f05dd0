//! Models of limits: what threads take at once is not given twice, and who waits hears of other limits.

use std::rc::Rc;
use std::sync::{Arc, Mutex};

use ringtap_io::{Io, Mem};
use ringtap_sim::Disk;
use ringtap_sim::threads::{must_notice, queue, spawn, try_orders};

use super::bucket::Bucket;
use super::{Limits, Lines, Rate, Rates, Throttle, ThrottleGroup};
use crate::door::Door;
use crate::{Kind, Request};

/// Three threads take twice each from a bucket: what each is given is its own.
fn nothing_is_given_twice() {
    let bucket = Arc::new(Bucket::new(1000, 0));
    let given: Arc<Mutex<Vec<u64>>> = Arc::default();
    let takers = (0..3).map(|_| {
        let (bucket, given) = (bucket.clone(), given.clone());
        spawn(move || {
            for _ in 0..2 {
                let when = bucket.take(0, 1);
                given.lock().expect("nobody panics").push(when);
            }
        })
    });
    takers.collect::<Vec<_>>().into_iter().for_each(|taker| taker.join().expect("ended well"));
    let mut given = given.lock().expect("nobody panics").clone();
    given.sort_unstable();
    assert_eq!(given, [0, 1, 2, 3, 4, 5].map(|slot| slot * 1_000_000));
}

/// Of bytes.
fn limits() -> Limits {
    let total = Rate { average: 1, ..Rate::default() };
    Limits { bps: Rates { total, ..Rates::default() }, ..Limits::default() }
}

async fn pass(io: &Io, lines: &Lines, throttle: &Throttle) {
    // Once it has been lent, there is nothing more to be had for ever.
    let len = 1 << 60;
    let request = Request { kind: Kind::Read, offset: 0, len, mem: Mem::EMPTY, fua: false };
    lines.pass(io, throttle, &request).await;
}

/// Requests of two queues wait for ever, until their limits, and those of their group, are lifted.
fn who_waits_hears_of_it() {
    let group = ThrottleGroup::new(limits());
    let throttle = Arc::new(Throttle::new(Arc::<Door>::default()));
    throttle.set(limits());
    throttle.set_group(Some(group.clone()));
    let queue = |throttle: Arc<Throttle>| {
        let disk = Disk::new(512);
        let mut tasks = queue(&disk);
        let lines = Rc::new(Lines::default());
        for _ in 0..3 {
            let (io, lines, throttle) = (tasks.io().clone(), lines.clone(), throttle.clone());
            tasks.spawn(async move { pass(&io, &lines, &throttle).await });
        }
        tasks.run().expect("the simulation runs");
    };
    let mut threads: Vec<_> = (0..2)
        .map(|_| {
            let throttle = throttle.clone();
            spawn(move || queue(throttle))
        })
        .collect();
    threads.push(spawn(move || {
        throttle.set(Limits::default());
        group.set(Limits::default());
    }));
    threads.into_iter().for_each(|thread| thread.join().expect("ended well"));
}

#[test]
fn limits_hold_for_all_and_change_for_all() {
    try_orders("bucket", 10_000, nothing_is_given_twice);
    must_notice("budget taken twice", 3000, nothing_is_given_twice);
    try_orders("limits changed", 10_000, who_waits_hears_of_it);
    must_notice("limits changed in silence", 3000, who_waits_hears_of_it);
    must_notice("line left in silence", 3000, who_waits_hears_of_it);
    must_notice("listened late", 10_000, who_waits_hears_of_it);
}
