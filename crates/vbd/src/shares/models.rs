//! Models of shares: what threads take at once of an allowance is not given twice, whatever a plan does meanwhile, and who waits
//! hears that nobody's share is set any more.

use std::rc::Rc;
use std::sync::{Arc, Mutex};

use ringtap_io::{Io, Mem};
use ringtap_sim::Disk;
use ringtap_sim::threads::{must_notice, queue, spawn, try_orders};

use super::allowance::Allowance;
use super::{BackingDevice, Share};
use crate::door::Door;
use crate::limits::{Lines, Throttle};
use crate::{Kind, Request};

/// Three threads take twice each: what each is given is its own.
fn nothing_is_given_twice() {
    let allowance = Arc::new(Allowance::default());
    allowance.set(0, 1000);
    let given: Arc<Mutex<Vec<u64>>> = Arc::default();
    let takers = (0..3).map(|_| {
        let (allowance, given) = (allowance.clone(), given.clone());
        spawn(move || {
            for _ in 0..2 {
                let (when, _) = allowance.take(0, 1);
                given.lock().expect("nobody panics").push(when);
            }
        })
    });
    takers.collect::<Vec<_>>().into_iter().for_each(|taker| taker.join().expect("ended well"));
    let mut given = given.lock().expect("nobody panics").clone();
    given.sort_unstable();
    assert_eq!(given, [0, 1, 2, 3, 4, 5].map(|slot| slot * 1_000_000));
}

/// Two threads take while a plan doubles the rate: what they owe by either rate, and no more.
fn a_plan_neither_forgives_nor_doubles_a_debt() {
    let allowance = Arc::new(Allowance::default());
    allowance.set(0, 1000);
    allowance.take(0, 1000);
    let mut threads: Vec<_> = (0..2)
        .map(|_| {
            let allowance = allowance.clone();
            spawn(move || _ = allowance.take(0, 1000))
        })
        .collect();
    let planner = allowance.clone();
    threads.push(spawn(move || planner.set(0, 2000)));
    threads.into_iter().for_each(|thread| thread.join().expect("ended well"));
    let (owed, rate) = allowance.take(0, 0);
    // The least: what was taken at the new rate before the debt was looked at has been made half of once more. The most: both
    // looked at the old rate, and took when the debt had been made half of.
    assert!(rate == 2000 && (1_000_000_000..=2_500_000_000).contains(&owed), "{owed}");
}

/// Requests of two queues wait for what a device never gives them, until shares are taken away.
fn who_waits_hears_of_it() {
    let device = BackingDevice::default();
    let throttle = Arc::new(Throttle::new(Arc::<Door>::default()));
    throttle.lies_on(device, false);
    throttle.set_share(Share { weight: 1, ..Share::default() }).expect("a share");
    throttle.owe();
    let queue = |throttle: Arc<Throttle>| {
        let disk = Disk::new(512);
        let mut tasks = queue(&disk);
        let lines = Rc::new(Lines::default());
        for _ in 0..2 {
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
    threads.push(spawn(move || throttle.set_share(Share::default()).expect("none")));
    threads.into_iter().for_each(|thread| thread.join().expect("ended well"));
}

async fn pass(io: &Io, lines: &Lines, throttle: &Throttle) {
    let request = Request { kind: Kind::Read, offset: 0, len: 4096, mem: Mem::EMPTY, fua: false };
    lines.pass(io, throttle, &request).await;
}

#[test]
fn shares_hold_for_all_and_change_for_all() {
    try_orders("allowance", 10_000, nothing_is_given_twice);
    must_notice("share taken twice", 3000, nothing_is_given_twice);
    try_orders("allowance and plan", 10_000, a_plan_neither_forgives_nor_doubles_a_debt);
    must_notice("debt kept", 3000, a_plan_neither_forgives_nor_doubles_a_debt);
    try_orders("shares changed", 2_000, who_waits_hears_of_it);
}
