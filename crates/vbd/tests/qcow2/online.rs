//! A check of an image that is served: at whatever moment, while its guest goes on, it finds what is wrong and nothing else.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ringtap_image::qcow2::{CreateOptions, Header, Parts, Qcow2, Report, Sabotage, create};
use ringtap_image::{CacheMode, Container, Traits};
use ringtap_io::{Io, Tasks};
use ringtap_sim::{Disk, SECTOR, Sim, seeds, turn_all};
use ringtap_vbd::{Kind, Request, Vbd};

use crate::bench::{Bench, SLOTS};
use crate::common::Served;

const ASKS: usize = 300;
const CHECKS: usize = 12;

/// What checks found, one after the other, while a guest went on.
#[derive(Default)]
struct Seen {
    reports: RefCell<Vec<Report>>,
    /// In how many of them the guest changed the disk while the tables were looked at.
    overlapped: Cell<usize>,
}

async fn look(seen: &Seen, vbd: &Vbd, io: &Io) -> Result<(), String> {
    for _ in 0..CHECKS {
        let begun = vbd.online_check(io).await.map_err(|error| error.to_string())?;
        let begun = begun.expect("qcow2 has something to check");
        let before = vbd.disk().changes();
        let report = begun.run(io).await.map_err(|error| error.to_string())?;
        let changed = vbd.disk().changes() != before;
        seen.overlapped.set(seen.overlapped.get() + usize::from(changed));
        seen.reports.borrow_mut().push(report);
    }
    Ok(())
}

/// A bench whose topmost image is qcow2, with a snapshot in it, perhaps.
fn bench(seed: u64, sabotage: Option<Sabotage>) -> Bench {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut bench = Bench::new(seed);
    while bench.layers.last().is_none_or(|layer| layer.options.is_none()) {
        bench.add_layer(&mut rng);
    }
    if rng.bool() {
        bench.take_snapshot(&mut rng);
    }
    bench.sabotage = sabotage;
    bench
}

/// Check the image over and over beside a guest; whether anything was wrong, and how often the guest went on meanwhile.
fn trial(seed: u64, sabotage: Option<Sabotage>) -> Result<usize, String> {
    let bench = bench(seed, sabotage);
    let mut rng = fastrand::Rng::with_seed(seed);
    let sim = |of: u64| Tasks::new(Box::new(Sim::new(&bench.disk, seed ^ (of << 32))));
    let mut all = [sim(0), sim(1)];
    let vbd = bench.open(&mut all[0]).expect("the power stays").expect("the image opens");
    let guest = bench.guest();
    let served = Rc::new(Served::new(vbd.fork()));
    guest.spawn(&mut all[0], &served, SLOTS, bench.asks(&mut rng, ASKS));
    let (seen, io) = (Rc::new(Seen::default()), all[1].io().clone());
    let (theirs, end) = (seen.clone(), Rc::new(RefCell::new(None)));
    let told = end.clone();
    all[1].spawn(async move {
        let ended = look(&theirs, &vbd, &io).await;
        *told.borrow_mut() = Some(ended);
    });
    turn_all(&bench.disk, &mut all);
    end.borrow_mut().take().expect("the checks have ended")?;
    if let Some(wrong) = guest.wrong() {
        return Err(wrong.to_string());
    }
    match seen.reports.borrow().iter().find(|report| !report.is_clean()) {
        Some(report) => Err(format!("{report:?}")),
        None => Ok(seen.overlapped.get()),
    }
}

#[test]
fn a_served_image_is_clean_at_every_moment() {
    let mut overlapped = 0;
    for seed in seeds(60) {
        overlapped += trial(seed, None).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
    println!("the guest went on in {overlapped} checks");
    assert!(overlapped > 0, "no check had a guest beside it: nothing was shown");
}

#[test]
fn checks_that_look_at_another_moment_are_noticed() {
    for sabotage in [Sabotage::MomentNotKept, Sabotage::MomentMiscounted] {
        let noticed = (0..60).filter(|seed| trial(*seed, Some(sabotage)).is_err()).count();
        println!("{sabotage:?}: noticed in {noticed} of 60");
        assert!(noticed > 0, "{sabotage:?} is hidden");
    }
}

/// Check an image as it was before its refcount table moved, which is somewhere else by then.
fn over_a_table_that_moves(sabotage: Option<Sabotage>) -> Report {
    let disk = Disk::new(SECTOR);
    let file = disk.add_file(0, SECTOR);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 1)));
    let io = tasks.io().clone();
    let container = move || {
        let traits = Traits { request_alignment: 512, memory_alignment: 512, ..Traits::FILE };
        Container::simulated(file, disk.size(file), traits)
    };
    let task = async move {
        // A table of one cluster tells of 2 MiB.
        let options = CreateOptions {
            size: 8 << 20,
            cluster_size: 512,
            refcount_bits: 64,
            ..CreateOptions::default()
        };
        create(&io, &container(), None, &options).await.expect("an image");
        let header = Header::read(&io, &container()).await.expect("a header");
        let table = header.refcount_table_offset;
        let parts = Parts { sabotage, ..Parts::default() };
        let image = Qcow2::open(&io, container(), header, parts).await.expect("an image");
        let vbd = Vbd::new(Box::new(image), CacheMode::None);
        const LEN: u64 = 64 << 10;
        let buffer = io.buffer(LEN as usize).expect("memory");
        let write = async |number: u64| {
            let (kind, offset, mem) = (Kind::Write, number * LEN, buffer.mem());
            let request = Request { kind, offset, len: LEN, mem, fua: false };
            vbd.serve(&io, request).await.expect("written");
            vbd.flush(&io).await.expect("stable");
        };
        write(0).await;
        let begun = vbd.online_check(&io).await.expect("begun").expect("a check");
        for number in 1..100 {
            write(number).await;
        }
        let now = Header::read(&io, &container()).await.expect("a header");
        assert_ne!(now.refcount_table_offset, table, "the table has not moved: nothing is shown");
        begun.run(&io).await.expect("looked at")
    };
    tasks.block_on(task).expect("the simulation runs")
}

#[test]
fn an_image_whose_refcount_table_has_moved_is_looked_at_as_it_was() {
    let report = over_a_table_that_moves(None);
    assert!(report.is_clean(), "{report:?}");
    assert!(!over_a_table_that_moves(Some(Sabotage::MomentNotKept)).is_clean());
}

#[test]
fn of_an_image_that_was_closed_meanwhile_nothing_is_said() {
    let bench = bench(3, None);
    let mut tasks = Tasks::new(Box::new(Sim::new(&bench.disk, 3)));
    let vbd = bench.open(&mut tasks).expect("the power stays").expect("the image opens");
    let io = tasks.io().clone();
    let end = tasks.block_on(async move {
        let begun = vbd.online_check(&io).await.expect("begun").expect("a check");
        let second = vbd.online_check(&io).await.map(|_| ()).expect_err("one at a time");
        assert!(second.to_string().contains("being checked already"), "{second}");
        vbd.disk().close(&io).await.expect("closed");
        let why = begun.run(&io).await.expect_err("nobody knows");
        assert!(why.to_string().contains("closed meanwhile"), "{why}");
    });
    end.expect("the simulation runs");
}
