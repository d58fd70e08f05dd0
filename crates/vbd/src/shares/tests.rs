//! Shares in simulated time: what each tenant has of a device that serves so many requests at once, and the others in the order
//! in which they came.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ringtap_image::{CacheMode, Container, Raw, Traits};
use ringtap_io::{File, Op, Tasks, Time};

use super::{BackingDevice, Share, Who};
use crate::limits::ThrottleGroup;
use crate::timed::{self, SECOND};
use crate::{Kind, Request, Vbd};

const SIZE: u64 = 1 << 30;

/// How long it takes for a request, and for each byte beside.
const SERVICE: Time = 150_000;
const NANOS_PER_KIB: u64 = 1000;

/// A device: so many requests are served at once, each for a time that a seed blurs, and by its bytes. Timers are late by up to so much.
fn queued(parts: usize, late: Time, seed: u64, slower: Rc<Cell<u64>>) -> Tasks {
    // When each part of it has nothing more to do.
    let (mut free, mut rng) = (vec![0; parts], fastrand::Rng::with_seed(seed));
    timed::tasks(move |now, op| {
        let mut serve = |rng: &mut fastrand::Rng, len: usize| {
            let takes = (SERVICE + len as u64 * NANOS_PER_KIB / 1024) * slower.get();
            let takes = takes - takes / 4 + rng.u64(0..=takes / 2);
            let Some(free) = free.iter_mut().min() else { return now };
            *free = Time::max(*free, now) + takes;
            *free
        };
        match op {
            Op::Read { mem, .. } | Op::Write { mem, .. } => {
                (serve(&mut rng, mem.len()), mem.len() as i32)
            }
            Op::Timeout { nanos } => (now + nanos + rng.u64(0..=late), -libc::ETIME),
            _ => (serve(&mut rng, 0), 0),
        }
    })
}

/// What one tenant asks for.
#[derive(Clone, Copy)]
struct Load {
    depth: usize,
    len: u64,
    share: Share,
}

fn load(depth: usize, weight: u32) -> Load {
    Load { depth, len: 4096, share: Share { weight, ..Share::default() } }
}

/// A device with its tenants at work.
struct Stage {
    tasks: Tasks,
    device: BackingDevice,
    slower: Rc<Cell<u64>>,
    at_work: Vec<AtWork>,
}

struct AtWork {
    vbd: Rc<Vbd>,
    /// How long each request took, and when it had ended.
    ends: Rc<RefCell<Vec<(Time, Time)>>>,
    over: Rc<Cell<bool>>,
}

impl Stage {
    fn new(parts: usize, seed: u64) -> Stage {
        let slower = Rc::new(Cell::new(1));
        let tasks = queued(parts, 80_000, seed, slower.clone());
        Stage { tasks, device: BackingDevice::default(), slower, at_work: vec![] }
    }

    fn disk(&self, share: Share) -> Rc<Vbd> {
        let container = Container::simulated(File::from_parts(0, 0), SIZE, Traits::FILE);
        let vbd = Vbd::new(Box::new(Raw::new(container)), CacheMode::None);
        vbd.lies_on(self.device.clone());
        vbd.set_share(share).expect("a share that can be had");
        Rc::new(vbd)
    }

    /// One more at work: which.
    fn begin(&mut self, of: Load) -> usize {
        let vbd = self.disk(of.share);
        self.begin_on(vbd, of)
    }

    fn begin_on(&mut self, vbd: Rc<Vbd>, of: Load) -> usize {
        let (ends, over) = (Rc::default(), Rc::default());
        let work = AtWork { vbd, ends, over };
        for slot in 0..of.depth as u64 {
            let (io, vbd) = (self.tasks.io().clone(), work.vbd.clone());
            let (ends, over) = (work.ends.clone(), work.over.clone());
            self.tasks.spawn(async move {
                let buffer = io.buffer(of.len as usize).expect("memory");
                while !over.get() {
                    let (offset, mem, began) = (slot * of.len, buffer.mem(), io.now());
                    let (kind, len, fua) = (Kind::Read, of.len, false);
                    vbd.serve(&io, Request { kind, offset, len, mem, fua }).await.expect("served");
                    ends.borrow_mut().push((io.now(), io.now() - began));
                }
            });
        }
        self.at_work.push(work);
        self.at_work.len() - 1
    }

    /// Let all go on for so long: how many requests of each ended meanwhile.
    fn run(&mut self, time: Time) -> Vec<f64> {
        let io = self.tasks.io().clone();
        let (from, end) = (io.now(), io.now() + time);
        self.tasks
            .block_on(async move { io.sleep(end.saturating_sub(io.now())).await })
            .expect("a sleep");
        let ended = |work: &AtWork| {
            let ends = work.ends.borrow();
            ends.iter().filter(|(when, _)| (from..end).contains(when)).count() as f64
        };
        self.at_work.iter().map(ended).collect()
    }

    /// What 99 of 100 requests of one took no longer than, of those that ended in so much time before now.
    fn p99(&self, which: usize, time: Time) -> Time {
        let now = self.tasks.io().now();
        let ends = self.at_work[which].ends.borrow();
        let mut took: Vec<Time> =
            ends.iter().filter(|(when, _)| *when + time >= now).map(|(_, took)| *took).collect();
        took.sort_unstable();
        took[took.len() * 99 / 100]
    }
}

/// What a load has in two seconds of a device that is its own, with nobody's share set.
fn alone(parts: usize, of: Load) -> (f64, Time) {
    let mut stage = Stage::new(parts, 5);
    stage.begin(Load { share: Share::default(), ..of });
    stage.run(SECOND / 2);
    let had = stage.run(2 * SECOND)[0];
    (had, stage.p99(0, 2 * SECOND))
}

/// And what several have of one, when they have been at work for a second.
fn together(parts: usize, loads: &[Load]) -> (Stage, Vec<f64>) {
    let mut stage = Stage::new(parts, 5);
    loads.iter().for_each(|load| _ = stage.begin(*load));
    stage.run(SECOND);
    let had = stage.run(2 * SECOND);
    (stage, had)
}

fn jain(of: &[f64]) -> f64 {
    let (sum, squares): (f64, f64) = (of.iter().sum(), of.iter().map(|it| it * it).sum());
    sum * sum / (of.len() as f64 * squares)
}

#[test]
fn two_that_want_the_same_have_the_same_and_lose_nothing() {
    for parts in [1, 3, 16] {
        let (whole, _) = alone(parts, load(32, 0));
        // One of them has four times as many requests in flight.
        for depths in [[32, 32], [32, 128]] {
            let (_, had) = together(parts, &depths.map(|depth| load(depth, 100)));
            let sum = had.iter().sum::<f64>() / whole;
            println!(
                "{parts} parts, depths {depths:?}: {had:?}, Jain {:.4}, sum {sum:.3}",
                jain(&had)
            );
            assert!(jain(&had) >= 0.99 && sum >= 0.95);
        }
    }
}

#[test]
fn weights_hold_within_a_twentieth() {
    for (parts, len) in [(1, 4096), (4, 4096), (4, 65536)] {
        let loads = [1, 2, 4].map(|weight| Load { len, ..load(32, weight * 100) });
        let (whole, _) = alone(parts, Load { len, ..load(64, 0) });
        let (_, had) = together(parts, &loads);
        let by = [had[1] / had[0], had[2] / had[0]];
        let sum = had.iter().sum::<f64>() / whole;
        println!(
            "{parts} parts, {len} bytes: {had:?}, 1 : {:.3} : {:.3}, sum {sum:.3}",
            by[0], by[1]
        );
        assert!((by[0] - 2.0).abs() < 0.1 && (by[1] - 4.0).abs() < 0.2 && sum >= 0.95);
    }
}

#[test]
fn a_quiet_one_keeps_its_reads_beside_a_loud_one() {
    for parts in [3, 8] {
        let (quiet, p99) = alone(parts, load(1, 0));
        let (whole, _) = alone(parts, load(32, 0));
        let (_, plain) = together(parts, &[load(1, 0), load(32, 0)]);
        let (stage, had) = together(parts, &[load(1, 100), load(32, 100)]);
        let after = stage.p99(0, 2 * SECOND);
        println!(
            "{parts} parts: alone {quiet}, plain {:.3}, with shares {:.3}; p99 {:.2} times, all {:.3}",
            plain[0] / quiet,
            had[0] / quiet,
            after as f64 / p99 as f64,
            (had[0] + had[1]) / whole,
        );
        assert!(plain[0] < 0.5 * quiet, "nothing was wrong without shares");
        assert!(had[0] >= 0.8 * quiet && after <= 2 * p99);
    }
}

#[test]
fn floors_come_first() {
    let floor = |weight, floor_iops| Load {
        share: Share { weight, floor_iops, floor_bps: 0 },
        ..load(32, 0)
    };
    let (stage, had) = together(3, &[floor(1, 8000), load(32, 10_000), load(128, 10_000)]);
    println!("{had:?} {:?}", stage.device.shares());
    assert!(had[0] >= 2.0 * 8000.0 * 0.97 && had[0] < 2.0 * 8000.0 * 1.1);
    // In bytes of larger requests, likewise.
    let bytes = Share { weight: 1, floor_bps: 300 << 20, floor_iops: 0 };
    let large = Load { depth: 16, len: 65536, share: bytes };
    let (_, had) = together(3, &[large, load(32, 10_000)]);
    let rate = had[0] * 65536.0 / 2.0 / f64::from(1 << 20);
    println!("{rate} MiB/s");
    assert!((rate - 300.0).abs() < 20.0);
    // What cannot be had is refused, where it is known how much can.
    let (stage, _) = together(3, &[load(32, 100), load(32, 0)]);
    let much = Share { floor_iops: 1_000_000, ..Share::default() };
    let why = stage.at_work[0].vbd.set_share(much).expect_err("more than there is");
    assert!(why.contains("more than the device has been seen to serve"), "{why}");
    assert_eq!(stage.at_work[0].vbd.share(), Share { weight: 100, ..Share::default() });
}

#[test]
fn what_one_does_not_want_is_the_others() {
    let (whole, _) = alone(3, load(32, 0));
    let (mut stage, had) = together(3, &[load(32, 900), load(32, 100)]);
    assert!(had[1] < 0.15 * whole, "{had:?}");
    stage.at_work[0].over.set(true);
    stage.run(SECOND / 10);
    let after = stage.run(2 * SECOND)[1];
    assert!(after >= 0.95 * whole, "{after} of {whole} {:?}", stage.device.shares());
}

#[test]
fn shares_that_change_hold_within_a_tenth_of_a_second() {
    let (mut stage, had) = together(3, &[load(32, 100), load(32, 100)]);
    let ratio = |had: &[f64]| had[1] / had[0];
    assert!((ratio(&had) - 1.0).abs() < 0.05);
    for weight in [400, 50, 300] {
        stage.at_work[1].vbd.set_share(Share { weight, ..Share::default() }).expect("a share");
        stage.run(SECOND / 10);
        let wanted = f64::from(weight) / 100.0;
        let had = stage.run(SECOND);
        println!("weight {weight}: {had:?}, {:.3}", ratio(&had));
        assert!((ratio(&had) / wanted - 1.0).abs() < 0.06);
    }
    // With none set nobody is held, and nothing is looked at.
    for work in &stage.at_work {
        work.vbd.set_share(Share::default()).expect("none");
    }
    stage.run(SECOND / 10);
    assert!(stage.at_work.iter().all(|work| !work.vbd.shared.door.is_limited()));
    assert!(stage.at_work.iter().all(|work| work.vbd.inspect().limits.waiting == 0));
    assert_eq!(stage.device.shares().rate, 0);
}

#[test]
fn a_device_that_becomes_slower_is_shared_as_before() {
    let (mut stage, _) = together(3, &[load(32, 100), load(32, 300)]);
    stage.slower.set(4);
    stage.run(3 * SECOND);
    let had = stage.run(4 * SECOND);
    println!("{had:?}");
    assert!((had[1] / had[0] / 3.0 - 1.0).abs() < 0.05);
    let (whole, _) = alone(3, load(32, 0));
    assert!(had[0] + had[1] >= 0.9 * whole / 4.0 * 2.0, "{had:?} of {whole}");
}

/// A request of many times what comes in within a plan's time passes, and is paid for.
#[test]
fn a_large_request_passes_and_is_paid_for() {
    let large = Load { depth: 2, len: 16 << 20, share: Share { weight: 1, ..Share::default() } };
    let (stage, had) = together(3, &[large, load(32, 10_000)]);
    println!("{had:?} {:?}", stage.device.shares());
    let all = stage.at_work[0].ends.borrow().len();
    assert!(all > 0, "it hangs");
    let bytes = had[0] * f64::from(16 << 20);
    assert!(bytes < had[1] * 36864.0 * 0.2, "it has not paid: {had:?}");
}

#[test]
fn disks_of_a_group_are_one_tenant() {
    let mut stage = Stage::new(3, 5);
    let group = ThrottleGroup::default();
    let share = Share { weight: 200, ..Share::default() };
    group.set_share(share).expect("a share");
    for _ in 0..2 {
        let disk = stage.disk(Share::default());
        disk.set_group(Some(group.clone()));
        stage.begin_on(disk, load(32, 0));
    }
    stage.begin(load(32, 100));
    stage.run(SECOND);
    let had = stage.run(2 * SECOND);
    println!("{had:?}");
    assert!(((had[0] + had[1]) / had[2] / 2.0 - 1.0).abs() < 0.05);
    let state = stage.at_work[0].vbd.shared.throttle.fairness().expect("a tenant");
    assert_eq!((state.tenant.share, state.tenant.who), (share, super::Who::Group));
    // One that has a share of its own is none of them; and with none of the group each is by itself.
    stage.at_work[0].vbd.set_share(Share { weight: 100, ..Share::default() }).expect("a share");
    stage.run(SECOND / 10);
    let had = stage.run(2 * SECOND);
    assert!((had[1] / had[0] / 2.0 - 1.0).abs() < 0.05, "{had:?}");
    group.set_share(Share::default()).expect("none");
    stage.run(SECOND / 10);
    let had = stage.run(2 * SECOND);
    assert!(jain(&had) > 0.99, "{had:?}");
}

#[test]
fn a_job_has_what_is_left() {
    let mut stage = Stage::new(3, 5);
    let disk = stage.disk(Share { weight: 100, ..Share::default() });
    let (tenant, io) = (disk.shared.throttle.job().expect("a device"), stage.tasks.io().clone());
    let moved = Rc::new(Cell::new(0.0));
    let (own, of) = (moved.clone(), disk.clone());
    stage.tasks.spawn(async move {
        let buffer = io.buffer(65536).expect("memory");
        loop {
            tenant.wait_to_move(&io, 65536, || false).await;
            let (kind, offset, len, mem, fua) = (Kind::Read, 0, 65536, buffer.mem(), false);
            let request = Request { kind, offset, len, mem, fua };
            of.within(async |pass| pass.carry_out(&io, &request).await).await.expect("served");
            own.set(own.get() + 1.0);
        }
    });
    stage.run(SECOND);
    let alone = moved.replace(0.0);
    stage.begin_on(disk, load(32, 100));
    stage.run(SECOND);
    moved.set(0.0);
    let had = stage.run(2 * SECOND);
    let part = moved.get() * (65536.0 + 32768.0) / (had[0] * 36864.0);
    println!("alone {alone}, beside {}, {part:.3} of what the disk has", moved.get());
    assert!(part < 0.12 && moved.get() > 0.0 && alone > 2000.0);
}

/// No plan is made, and no timer runs, of a device without requests.
#[test]
fn nothing_runs_on_a_device_at_rest() {
    let (mut stage, _) = together(3, &[load(32, 100), load(1, 300)]);
    stage.at_work.iter().for_each(|work| work.over.set(true));
    stage.run(SECOND / 10);
    assert_eq!(stage.tasks.io().in_flight(), 0);
    // Whoever comes then has all of it at once.
    let (io, vbd) = (stage.tasks.io().clone(), stage.at_work[0].vbd.clone());
    let took = stage.tasks.block_on(async move {
        io.sleep(10 * SECOND).await;
        let (buffer, began) = (io.buffer(4096).expect("memory"), io.now());
        let (kind, offset, len, mem, fua) = (Kind::Read, 0, 4096, buffer.mem(), false);
        vbd.serve(&io, Request { kind, offset, len, mem, fua }).await.expect("served");
        io.now() - began
    });
    assert!(took.expect("nothing fails") < 2 * SERVICE);
}

/// The same seed, the same plans.
#[test]
fn what_is_planned_follows_from_what_is_seen() {
    let loads = [load(8, 100), load(32, 700), load(1, 0)];
    assert_eq!(together(2, &loads).1, together(2, &loads).1);
}

#[test]
fn without_shares_nobody_looks_at_any() {
    let stage = Stage::new(1, 1);
    let share = |weight| Share { weight, ..Share::default() };
    let (one, other) = (stage.disk(Share::default()), stage.disk(Share::default()));
    let limited = || [&one, &other].map(|vbd| vbd.shared.door.is_limited());
    assert_eq!(limited(), [false, false]);
    one.set_share(share(50)).expect("a share");
    assert_eq!(limited(), [true, true]);
    // Of another device.
    other.lies_on(BackingDevice::default());
    assert_eq!(limited(), [true, false]);
    other.lies_on(stage.device.clone());
    assert_eq!(limited(), [true, true]);
    drop(one);
    assert!(!other.shared.door.is_limited());
    assert!(other.set_share(share(10_001)).expect_err("too much").contains("1 to 10000"));
}

#[test]
fn shares_of_tenants_that_are_gone_hold_no_more() {
    let device = BackingDevice::default();
    let share = Share { weight: 7, ..Share::default() };
    let first = device.join(share, Who::Disk);
    let second = device.join(Share::default(), Who::Job);
    let active = || {
        device.look_who_has_shares();
        device.is_active()
    };
    assert!(active());
    first.set_share(share);
    second.set_share(share);
    drop(first);
    assert!(active(), "the other's is set");
    second.set_share(Share::default());
    assert!(!active());
    // What is only asked for is nobody's.
    assert!(device.refuse(None, share).is_none() && !active());
    second.set_share(share);
    assert!(active());
    drop(second);
    assert!(!active());
}
