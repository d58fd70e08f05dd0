//! Mirrors to targets of a known speed, in simulated time: whether they come to an end, and how much guests are slowed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use ringtap_image::{CacheMode, Container, Error, Raw, Traits};
use ringtap_io::{File, Op, Tasks, Time};

use super::terms::{Ending, Mirror};
use crate::timed::{self, SECOND};
use crate::{Behind, Job, Kind, Phase, Request, Vbd};

const SIZE: u64 = 256 << 20;
/// What a guest writes at once, and how many requests it has in flight.
const LEN: u64 = 64 << 10;
const DEPTH: u64 = 4;
/// How long the disk takes for each: so a guest writes 62.5 MiB/s where nothing slows it.
const SERVICE: Time = 1_000_000;
const GUEST_RATE: f64 = (LEN * SECOND / SERVICE) as f64;

/// Two devices, each of which does one thing after the other: the disk in a fixed time, the target by its bytes, so many in a second.
fn devices(rate: u64) -> Tasks {
    let mut free = [0; 2];
    timed::tasks(move |now, op| {
        let mut serve = |file: File, len: u64| {
            let takes = match file.slot() {
                0 => SERVICE * len / LEN,
                _ => len * SECOND / rate,
            };
            let free: &mut Time = &mut free[file.slot() as usize % 2];
            *free = (*free).max(now) + takes;
            *free
        };
        match op {
            // The disk reads for the job beside what guests do: it is the target that is slow.
            Op::Read { mem, .. } => (now, mem.len() as i32),
            Op::Write { file, mem, .. } => (serve(file, mem.len() as u64), mem.len() as i32),
            Op::ZeroRange { file, len, .. } | Op::PunchHole { file, len, .. } => {
                (serve(file, len), 0)
            }
            Op::Timeout { nanos } => (now + nanos, -libc::ETIME),
            _ => (now, 0),
        }
    })
}

fn device(slot: u32) -> Vbd {
    let container = Container::simulated(File::from_parts(slot, 0), SIZE, Traits::FILE);
    Vbd::new(Box::new(Raw::new(container)), CacheMode::None)
}

/// What came of a mirror.
struct Seen {
    /// How long it took, if it ended well while guests wrote.
    took: Option<Time>,
    /// Bytes that guests wrote in a second from when requests changed both.
    guest: f64,
    told: Vec<Behind>,
}

/// A mirror, under guests that write as fast as they can, for so long at most, and are silent then.
fn mirrored(rate: f64, max_slowdown: u32, limit: Time) -> Seen {
    mirrored_within(SIZE, rate, max_slowdown, limit)
}

/// The same of guests that write within so many bytes.
fn mirrored_within(area: u64, rate: f64, max_slowdown: u32, limit: Time) -> Seen {
    let rate = (GUEST_RATE * rate) as u64;
    let mut tasks = devices(rate);
    let (io, from, to) = (tasks.io().clone(), device(0), device(1));
    let mut mirror = Mirror::new(from.disk().clone(), to.disk().clone());
    mirror.max_slowdown = Some(max_slowdown);
    let job = Job::new();
    let told: Arc<Mutex<Vec<Behind>>> = Arc::default();
    let notes = told.clone();
    job.hear_behind(move |behind| notes.lock().expect("the list").push(behind));
    let (over, written) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(0u64)));
    for slot in 0..DEPTH {
        let (io, guest) = (io.clone(), from.fork());
        let (over, written) = (over.clone(), written.clone());
        tasks.spawn(async move {
            let buffer = io.buffer(LEN as usize).expect("memory");
            let mut rng = fastrand::Rng::with_seed(slot);
            while !over.get() {
                let offset = rng.u64(0..area / LEN) * LEN;
                let (kind, len, mem) = (Kind::Write, LEN, buffer.mem());
                guest.serve(&io, Request { kind, offset, len, mem, fua: false }).await.expect("ok");
                written.set(written.get() + LEN);
            }
        });
    }
    let began = io.now();
    let both: Rc<Cell<Option<(Time, u64)>>> = Rc::default();
    let ended = Rc::new(RefCell::new(None));
    let (own, tell, stops, count) = (io.clone(), ended.clone(), over.clone(), written.clone());
    let (steers, since) = (job.clone(), both.clone());
    tasks.spawn(async move {
        let nothing = async || Ok::<_, Error>(());
        mirror.run(&own, &job, Ending::Copy, nothing).await.expect("a copy");
        *tell.borrow_mut() = Some((own.now(), count.get(), stops.get()));
        stops.set(true);
    });
    let (own, counts, looks) = (io.clone(), written.clone(), ended.clone());
    let rate = tasks.block_on(async move {
        let end = own.now() + limit;
        loop {
            own.sleep(SECOND / 100).await;
            let now = looks.borrow().unwrap_or((own.now(), counts.get(), false));
            if since.get().is_none() && steers.progress().phase == Phase::Both {
                since.set(Some((own.now(), counts.get())));
            }
            if own.now() >= end || looks.borrow().is_some() {
                let (then, before) = since.get().unwrap_or((began, 0));
                let took = (now.0 - then).max(1) as f64 / SECOND as f64;
                break (now.1 - before) as f64 / took;
            }
        }
    });
    let guest = rate.expect("a rate");
    let took = ended.borrow().map(|(when, ..)| when - began);
    over.set(true);
    // With guests silent it always ends.
    tasks.run().expect("the simulation runs");
    assert!(ended.borrow().is_some());
    let told = told.lock().expect("the list").clone();
    Seen { took, guest: guest / GUEST_RATE, told }
}

#[test]
fn a_target_that_takes_four_fifths_of_what_guests_write_is_caught_up_with() {
    for rate in [0.85, 0.95, 1.1] {
        let Seen { took, guest, told } = mirrored(rate, 20, 120 * SECOND);
        println!("{rate}: {took:?} ns, guests {guest:.3}, {told:?}");
        assert!(took.is_some(), "{rate}: it does not come to an end");
        assert!(guest > 0.79, "{rate}: guests are slowed to {guest:.3}");
    }
}

#[test]
fn a_slower_target_lets_guests_go_on_and_says_so() {
    let Seen { took, guest, told } = mirrored(0.5, 20, 60 * SECOND);
    println!("guests {guest:.3}, {told:?}");
    assert_eq!(took, None, "it ends though the target is too slow");
    assert!(guest > 0.79, "guests are slowed to {guest:.3}");
    let [Behind { target_rate, guest_rate }] = told[..] else { panic!("{told:?}") };
    let [target, writes] = [target_rate, guest_rate].map(|rate| rate as f64 / GUEST_RATE);
    assert!((0.45..0.55).contains(&target), "{told:?}");
    assert!((0.79..1.01).contains(&writes), "{told:?}");
}

/// Less than may be on its way to the target: there is always room, and somebody else has what is written to.
#[test]
fn a_slower_target_is_told_of_though_guests_write_the_same_over_and_over() {
    let Seen { took, guest, told } = mirrored_within(16 << 20, 0.3, 20, 60 * SECOND);
    println!("guests {guest:.3}, {told:?}");
    assert_eq!(took, None, "it ends though the target is too slow");
    assert!(guest > 0.79, "guests are slowed to {guest:.3}");
    let Some(Behind { target_rate, guest_rate }) = told.first() else { panic!("nobody is told") };
    assert!(target_rate < guest_rate, "{told:?}");
}

#[test]
fn guests_that_may_be_slowed_more_let_a_slower_target_catch_up() {
    let Seen { took, guest, .. } = mirrored(0.5, 60, 120 * SECOND);
    println!("{took:?} ns, guests {guest:.3}");
    assert!(took.is_some() && guest > 0.39, "{took:?}, {guest:.3}");
    let Seen { took, guest, .. } = mirrored(0.85, 0, 30 * SECOND);
    println!("{took:?}, guests {guest:.3}");
    assert!(took.is_none() && guest > 0.99, "{took:?}, {guest:.3}");
}
