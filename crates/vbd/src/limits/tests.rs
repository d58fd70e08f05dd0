//! Limits in simulated time: how many requests pass in how many seconds of it, where who sleeps is woken late.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ringtap_image::{CacheMode, Container, Raw, Traits};
use ringtap_io::{File, Op, Tasks, Time};

use super::{Limits, Rate, Rates, ThrottleGroup};
use crate::timed::{self, SECOND};
use crate::{Kind, Request, Vbd};

/// How long a disk takes for anything.
const SERVICE: Time = 50_000;
const SIZE: u64 = 1 << 30;

/// A disk that takes the same time for everything, and timers that are late by up to so much.
fn tasks(late: Time) -> Tasks {
    let mut rng = fastrand::Rng::with_seed(7);
    timed::tasks(move |now, op| {
        let (takes, result) = match op {
            Op::Read { mem, .. } | Op::Write { mem, .. } => (SERVICE, mem.len() as i32),
            Op::Timeout { nanos } => (nanos + rng.u64(0..=late), -libc::ETIME),
            _ => (SERVICE, 0),
        };
        (now + takes, result)
    })
}

fn vbd() -> Vbd {
    let container = Container::simulated(File::from_parts(0, 0), SIZE, Traits::FILE);
    Vbd::new(Box::new(Raw::new(container)), CacheMode::None)
}

fn iops(average: u64) -> Limits {
    let total = Rate { average, ..Rate::default() };
    Limits { iops: Rates { total, ..Rates::default() }, ..Limits::default() }
}

/// When each request of a load ended.
type Ends = Rc<RefCell<Vec<Time>>>;

/// Keep so many requests of one kind in flight on a queue until it is over.
fn load(
    tasks: &mut Tasks,
    vbd: &Rc<Vbd>,
    depth: usize,
    kind: Kind,
    len: u64,
    over: &Rc<Cell<bool>>,
) -> Ends {
    let ends = Ends::default();
    for slot in 0..depth as u64 {
        let (io, vbd, over, ends) = (tasks.io().clone(), vbd.clone(), over.clone(), ends.clone());
        tasks.spawn(async move {
            let buffer = io.buffer(len as usize).expect("memory");
            while !over.get() {
                let (offset, mem) = (slot * len, buffer.mem());
                let request = Request { kind, offset, len, mem, fua: false };
                vbd.serve(&io, request).await.expect("served");
                ends.borrow_mut().push(io.now());
            }
        });
    }
    ends
}

/// Let all go on for so long.
fn run(tasks: &mut Tasks, time: Time) {
    let end = tasks.io().now() + time;
    let io = tasks.io().clone();
    tasks.block_on(async move { io.sleep(end.saturating_sub(io.now())).await }).expect("a sleep");
}

/// Of those that ended within so much time, from one moment on.
fn within(ends: &Ends, from: Time, time: Time) -> f64 {
    let ends = ends.borrow();
    ends.iter().filter(|end| (from..from + time).contains(end)).count() as f64
}

#[track_caller]
fn near(found: f64, wanted: f64, share: f64) {
    assert!((found - wanted).abs() <= wanted * share, "{found}, not {wanted} within {share}");
}

/// What passes in four seconds by so many queues of that depth.
fn passed(limits: Limits, queues: usize, depth: usize, kind: Kind, len: u64) -> f64 {
    let (mut tasks, vbd, over) = (tasks(70_000), vbd(), Rc::default());
    vbd.set_limits(limits);
    let all: Vec<Ends> = (0..queues)
        .map(|_| load(&mut tasks, &Rc::new(vbd.fork()), depth, kind, len, &over))
        .collect();
    run(&mut tasks, 4 * SECOND);
    all.iter().map(|ends| ends.borrow().len() as f64).sum()
}

#[test]
fn caps_are_hit_within_a_hundredth() {
    for (rate, queues, depth) in [
        (100, 1, 1),
        (100, 4, 32),
        (1000, 1, 1),
        (1000, 16, 4),
        (10_000, 1, 1),
        (10_000, 4, 8),
        (100_000, 1, 32),
        (100_000, 4, 16),
    ] {
        near(passed(iops(rate), queues, depth, Kind::Read, 4096), 4.0 * rate as f64, 0.01);
    }
}

#[test]
fn bytes_are_counted_and_each_way_by_itself() {
    let write = Rate { average: 100_000_000, ..Rate::default() };
    let bps = Rates { write, ..Rates::default() };
    let limits = Limits { bps, ..iops(50_000) };
    near(passed(limits, 2, 8, Kind::Write, 65536) * 65536.0, 400e6, 0.01);
    // Discards move nothing.
    near(passed(limits, 2, 8, Kind::Discard, 65536), 200_000.0, 0.01);
    near(passed(limits, 2, 8, Kind::Read, 65536), 200_000.0, 0.01);
    let larger = Limits { iops_size: 4096, ..iops(8000) };
    near(passed(larger, 1, 8, Kind::Read, 16384), 8000.0, 0.01);
}

#[test]
fn a_burst_lasts_as_long_as_it_may() {
    let total = Rate { average: 100, burst: 2000, burst_seconds: 2 };
    let limits = Limits { iops: Rates { total, ..Rates::default() }, ..Limits::default() };
    let (mut tasks, vbd, over) = (tasks(70_000), Rc::new(vbd()), Rc::default());
    // There was a rest before.
    run(&mut tasks, 100 * SECOND);
    vbd.set_limits(limits);
    let began = tasks.io().now();
    let ends = load(&mut tasks, &vbd, 32, Kind::Read, 4096, &over);
    run(&mut tasks, 6 * SECOND);
    near(within(&ends, began, 2 * SECOND), 4000.0, 0.02);
    near(within(&ends, began + 3 * SECOND, 3 * SECOND), 300.0, 0.02);
}

#[test]
fn a_request_larger_than_its_bucket_passes_and_pays() {
    let (mut tasks, vbd) = (tasks(0), Rc::new(vbd()));
    let total = Rate { average: 1 << 20, ..Rate::default() };
    vbd.set_limits(Limits { bps: Rates { total, ..Rates::default() }, ..Limits::default() });
    let (io, began) = (tasks.io().clone(), tasks.io().now());
    let times = tasks.block_on(async move {
        let buffer = io.buffer(4 << 20).expect("memory");
        let (offset, len, mem) = (0, 4 << 20, buffer.mem());
        let large = Request { kind: Kind::Read, offset, len, mem, fua: false };
        vbd.serve(&io, large).await.expect("served");
        let first = io.now();
        vbd.serve(&io, Request { len: 512, mem: mem.window(0, 512), ..large })
            .await
            .expect("served");
        let flushed = io.now();
        vbd.serve(&io, Request { kind: Kind::Flush, len: 0, ..large }).await.expect("flushed");
        // Nothing waits: no timer is left.
        assert_eq!(io.in_flight(), 0);
        [first - began, flushed - began, io.now() - flushed]
    });
    let [first, second, flush] = times.expect("nothing fails");
    assert!(first < SECOND / 100 && flush <= SERVICE, "{first} {flush}");
    near(second as f64, 4e9, 0.01);
}

#[test]
fn limits_that_change_hold_at_once() {
    let (mut tasks, vbd, over) = (tasks(70_000), Rc::new(vbd()), Rc::default());
    vbd.set_limits(iops(10));
    let ends = load(&mut tasks, &vbd, 32, Kind::Read, 4096, &over);
    run(&mut tasks, SECOND);
    for (rate, share) in [(10_000, 0.01), (10, 0.15), (1000, 0.01)] {
        vbd.set_limits(iops(rate));
        let began = tasks.io().now();
        run(&mut tasks, 2 * SECOND);
        near(within(&ends, began + SECOND / 10, SECOND), rate as f64, share);
    }
    vbd.set_limits(Limits::default());
    let began = tasks.io().now();
    run(&mut tasks, SECOND);
    assert!(within(&ends, began, SECOND) > 500_000.0);
    assert_eq!(vbd.inspect().limits.waiting, 0);
}

#[test]
fn a_disk_whose_requests_are_held_stands_still_at_once() {
    let (mut tasks, vbd, over) = (tasks(0), Rc::new(vbd()), Rc::default());
    vbd.set_limits(iops(1));
    let ends = load(&mut tasks, &vbd, 16, Kind::Write, 4096, &over);
    run(&mut tasks, 3 * SECOND);
    assert!(vbd.inspect().limits.waiting >= 15);
    let (io, still) = (tasks.io().clone(), vbd.clone());
    let took = tasks.block_on(async move {
        let before = io.now();
        let quiesced = still.quiesce(&io, SECOND).await.expect("still");
        let took = io.now() - before;
        io.sleep(10 * SECOND).await;
        drop(quiesced);
        took
    });
    assert!(took.expect("nothing fails") <= 2 * SERVICE);
    let began = tasks.io().now();
    run(&mut tasks, 20 * SECOND);
    // Those that were due meanwhile have waited for the disk.
    near(within(&ends, began, 20 * SECOND), 30.0, 0.05);
}

#[test]
fn a_queue_that_ends_is_not_held_but_counted() {
    let (mut tasks, vbd, over) = (tasks(0), Rc::new(vbd()), Rc::default());
    vbd.set_limits(iops(10));
    let ends = load(&mut tasks, &vbd, 64, Kind::Read, 4096, &over);
    run(&mut tasks, SECOND);
    let began = tasks.io().now();
    over.set(true);
    let hurry = vbd.hurry();
    run(&mut tasks, SECOND / 100);
    near(within(&ends, began, SECOND / 100), 64.0, 0.0);
    drop(hurry);
    let again = load(&mut tasks, &Rc::new(vbd.fork()), 1, Kind::Read, 4096, &Rc::default());
    run(&mut tasks, 8 * SECOND);
    // It pays for the 64, which is more than six seconds.
    let paid = within(&again, began, 10 * SECOND);
    assert!((10.0..20.0).contains(&paid), "{paid}");
}

/// A front-end waits for its queues to stop, and its guest stands still with it.
#[test]
fn queues_that_a_guest_stops_are_not_held_and_their_disk_pays() {
    let (mut tasks, group, over) = (tasks(0), ThrottleGroup::new(iops(10)), Rc::default());
    let disks = [Rc::new(vbd()), Rc::new(vbd())];
    disks.iter().for_each(|disk| disk.set_group(Some(group.clone())));
    let queues = [Rc::new(disks[0].fork()), Rc::new(disks[0].fork())];
    let ends: Vec<_> =
        queues.iter().map(|one| load(&mut tasks, one, 32, Kind::Read, 4096, &over)).collect();
    run(&mut tasks, SECOND);
    over.set(true);
    // One after the other, as front-ends do.
    for (queue, ends) in queues.iter().zip(&ends) {
        let (began, leave) = (tasks.io().now(), queue.leave());
        run(&mut tasks, SECOND / 100);
        drop(leave);
        assert!(within(ends, began, SECOND / 100) > 1.0, "held");
    }
    run(&mut tasks, SECOND / 10);
    let served: usize = ends.iter().map(|ends| ends.borrow().len()).sum();
    let (began, over) = (tasks.io().now(), Rc::default());
    let later = load(&mut tasks, &Rc::new(disks[0].fork()), 1, Kind::Read, 4096, &over);
    let other = load(&mut tasks, &disks[1], 1, Kind::Read, 4096, &over);
    run(&mut tasks, 5 * SECOND);
    assert!(served >= 64, "{served} of what they had asked");
    near(within(&later, began, 5 * SECOND), 0.0, 0.0);
    assert!(within(&other, began, 5 * SECOND) > 5.0, "another disk of the group pays");
    run(&mut tasks, 5 * SECOND);
    assert!(!later.borrow().is_empty(), "it has paid");
}

#[test]
fn who_ends_over_and_over_has_a_queue_more_than_the_limits_and_the_others_pay_for_a_second() {
    let (mut tasks, group) = (tasks(0), ThrottleGroup::new(iops(100)));
    let disks = [Rc::new(vbd()), Rc::new(vbd())];
    disks.iter().for_each(|disk| disk.set_group(Some(group.clone())));
    let began = tasks.io().now();
    let mut all = vec![];
    for _ in 0..10 {
        let (client, over) = (Rc::new(disks[0].fork()), Rc::new(Cell::new(false)));
        let ends = load(&mut tasks, &client, 200, Kind::Read, 4096, &over);
        run(&mut tasks, SECOND / 10);
        over.set(true);
        let leave = client.leave();
        while ends.borrow().len() < 200 {
            run(&mut tasks, SECOND / 10);
        }
        drop(leave);
        all.push(ends);
    }
    let took = (tasks.io().now() - began) as f64 / SECOND as f64;
    let served: usize = all.iter().map(|ends| ends.borrow().len()).sum();
    assert!(served as f64 <= 200.0 + 100.0 * (took + 1.5), "{served} in {took} s");
    let began = tasks.io().now();
    let other = load(&mut tasks, &disks[1], 1, Kind::Read, 4096, &Rc::default());
    run(&mut tasks, 2 * SECOND);
    assert!(within(&other, began, 2 * SECOND) > 60.0, "it waits for the debt of the other");
}

#[test]
fn the_disks_of_a_group_share_its_limits_and_take_turns() {
    let (mut tasks, group, over) = (tasks(70_000), ThrottleGroup::new(iops(1000)), Rc::default());
    let disks = [Rc::new(vbd()), Rc::new(vbd())];
    disks.iter().for_each(|disk| disk.set_group(Some(group.clone())));
    let [loud, quiet] = [32, 2].map(|depth| {
        load(&mut tasks, &disks[usize::from(depth == 2)], depth, Kind::Read, 4096, &over)
    });
    let began = tasks.io().now();
    run(&mut tasks, 4 * SECOND);
    let [loud_had, quiet_had] = [&loud, &quiet].map(|ends| within(ends, began, 4 * SECOND));
    near(loud_had + quiet_had, 4000.0, 0.01);
    near(quiet_had, 2000.0, 0.05);
    // Its own limits hold, too; and so do others of the group, for all of it.
    disks[0].set_limits(iops(100));
    let began = tasks.io().now();
    run(&mut tasks, 2 * SECOND);
    near(within(&loud, began, 2 * SECOND), 200.0, 0.03);
    near(within(&quiet, began, 2 * SECOND), 1800.0, 0.03);
    group.set(iops(50));
    let began = tasks.io().now();
    run(&mut tasks, 4 * SECOND);
    near(within(&loud, began, 4 * SECOND) + within(&quiet, began, 4 * SECOND), 200.0, 0.05);
    disks[1].set_group(None);
    let began = tasks.io().now();
    run(&mut tasks, SECOND);
    assert!(within(&quiet, began, SECOND) > 10_000.0);
}

#[test]
fn a_stopped_disk_holds_nobody() {
    let (mut tasks, vbd) = (tasks(0), Rc::new(vbd()));
    vbd.set_limits(iops(1));
    let ends: Rc<Cell<u32>> = Rc::default();
    for _ in 0..8 {
        let (io, vbd, ends) = (tasks.io().clone(), vbd.clone(), ends.clone());
        tasks.spawn(async move {
            let buffer = io.buffer(4096).expect("memory");
            let (offset, len, mem) = (0, 4096, buffer.mem());
            let request = Request { kind: Kind::Read, offset, len, mem, fua: false };
            let _ = vbd.serve(&io, request).await;
            ends.set(ends.get() + 1);
        });
    }
    run(&mut tasks, SECOND / 2);
    assert_eq!(ends.get(), 1);
    vbd.health().fail(ringtap_io::Panic::of("a test".to_owned()));
    run(&mut tasks, SECOND / 100);
    assert_eq!(ends.get(), 8);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let with = |total| Limits { iops: Rates { total, ..Rates::default() }, ..Limits::default() };
    let rate = |average, burst, burst_seconds| with(Rate { average, burst, burst_seconds });
    for (limits, said) in [
        (rate(10, 5, 0), "less than"),
        (rate(0, 5, 0), "needs the limit"),
        (rate(10, 0, 2), "needs the burst"),
        (rate(u64::MAX, 0, 0), "at most"),
        (Limits { iops_size: 4096, ..Limits::default() }, "iops-size"),
    ] {
        assert!(limits.check().expect_err(said).contains(said), "{limits:?}");
    }
    assert_eq!(rate(10, 20, 3).check(), Ok(()));
    assert!(Limits::default().is_none() && !iops(1).is_none());
}

#[test]
fn without_limits_no_request_looks_at_any() {
    let vbd = vbd();
    let leads_on = || vbd.shared.door.leads_on();
    assert!(!leads_on());
    vbd.set_limits(iops(10));
    assert!(leads_on());
    vbd.set_limits(Limits::default());
    assert!(!leads_on());
    let group = ThrottleGroup::default();
    vbd.set_group(Some(group.clone()));
    assert!(!leads_on());
    group.set(iops(10));
    assert!(leads_on());
    vbd.set_group(None);
    assert!(!leads_on());
}
