//! One bitmap, step by step.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;

use ringtap_image::record::Transaction;
use ringtap_io::Io;
use ringtap_sim::Refuses;
use ringtap_vbd::{BitmapChange, Kind, Request, Vbd};

use super::{End, GRANULE, REGION, World, marked};

pub async fn change(io: &Io, vbd: &Vbd, changes: Vec<BitmapChange>) {
    let staged = vbd.stage_bitmaps(io, changes).await.expect("staged");
    let still = vbd.quiesce(io, 1 << 40).await.expect("nothing is in flight");
    staged.switch(&still).await;
    drop(still);
    staged.commit(io).await.expect("stable");
}

/// The marks of the only bitmap, or that they are lost.
pub fn only(vbd: &Vbd) -> Option<Vec<u64>> {
    let all = vbd.dirty_bitmaps();
    assert_eq!(all.len(), 1);
    let known = all[0].lost.is_none();
    known.then(|| marked(&all[0].marks).into_iter().collect())
}

#[test]
fn an_image_that_was_put_back_or_written_to_has_lost_its_marks() {
    for (seed, end) in [End::Kill, End::Cut, End::Close].into_iter().cycle().take(30).enumerate() {
        for foreign in [false, true] {
            let (mut world, vbd) = World::quiet(seed as u64);
            world.write(&vbd, 7);
            let before = world.disk.save(world.image, 1).expect("a file");
            world.disk.pass(1_000_000_000);
            world.write(&vbd, 9);
            let own = vbd.fork();
            let clear = vec![BitmapChange::Clear("b".into())];
            world.alone(async move |io| change(&io, &own, clear).await);
            world.write(&vbd, 3);
            if end == End::Close {
                let own = vbd.fork();
                world.alone(async move |io| own.disk().close(&io).await.expect("closed"));
            }
            world.end(end);
            drop(vbd);
            world.disk.pass(1_000_000_000);
            if foreign {
                // As by `cp`, and by `cp -p`.
                world.disk.restore(world.image, &before, seed % 2 == 0);
            }
            let found = only(&world.open());
            match (foreign, end) {
                (true, _) => assert_eq!(found, None, "seed {seed}, {end:?}"),
                (false, End::Cut) => {
                    assert_eq!(found, Some((0..REGION / GRANULE).collect()), "seed {seed}");
                }
                (false, _) => assert_eq!(found, Some(vec![3]), "seed {seed}, {end:?}"),
            }
            // It stays so.
            world.end(End::Kill);
            assert_eq!(only(&world.open()).is_none(), foreign);
        }
    }
}

#[test]
fn a_region_costs_one_sync_and_then_nothing() {
    let (world, vbd) = World::quiet(1);
    let operations = |granule: u64| {
        let before = world.disk.operations();
        world.write(&vbd, granule);
        world.disk.operations() - before
    };
    assert_eq!(operations(0), 3, "the log's write, its sync, and the request's own");
    assert_eq!((operations(0), operations(5), operations(15)), (1, 1, 1));
    assert_eq!((operations(16), operations(17), vbd.bitmap_log_syncs()), (3, 1, 2));
    let own = vbd.fork();
    world.alone(async move |io| change(&io, &own, vec![BitmapChange::Clear("b".into())]).await);
    assert_eq!((operations(0), operations(0)), (3, 1), "it is clean again");
    assert_eq!(only(&vbd), Some(vec![0]));
}

#[test]
fn a_log_that_cannot_be_written_ends_the_bitmaps_and_not_the_guest() {
    let (world, vbd) = World::quiet(2);
    world.disk.break_range(world.sidecar, 0..1 << 20, Refuses::Writes);
    world.write(&vbd, 1);
    world.write(&vbd, 40);
    assert_eq!(only(&vbd), None);
    let own = vbd.fork();
    world.alone(async move |io| {
        let staged = own.stage_bitmaps(&io, vec![BitmapChange::Clear("b".into())]).await;
        let Ok(staged) = staged else { return };
        let still = own.quiesce(&io, 1 << 40).await.expect("nothing is in flight");
        staged.switch(&still).await;
        drop(still);
        staged.commit(&io).await.expect_err("nothing is kept any more");
    });
    assert!(world.memory.is_empty(), "nor does a killed server leave any");
}

/// Write to a granule.
pub async fn dirty(io: &Io, vbd: &Vbd, granule: u64) {
    let buffer = io.buffer(GRANULE as usize).expect("memory");
    let (kind, mem, fua) = (Kind::Write, buffer.mem(), false);
    let request = Request { kind, offset: granule * GRANULE, len: GRANULE, mem, fua };
    vbd.serve(io, request).await.expect("written");
}

fn add(name: &str, persistent: bool) -> BitmapChange {
    let (name, recording) = (name.into(), true);
    BitmapChange::Add { name, granularity: GRANULE, persistent, recording }
}

fn granules_of(vbd: &Vbd, name: &str) -> Option<Vec<u64>> {
    let all = vbd.dirty_bitmaps();
    let one = all.iter().find(|one| one.name == name)?;
    Some(marked(&one.marks).into_iter().collect())
}

/// As a transaction adds a bitmap and begins a backup by another, or a backup ends meanwhile.
#[test]
fn what_is_staged_is_marked_whoever_else_comes_and_goes() {
    for persistent in [false, true] {
        let (world, vbd) = World::quiet(4);
        let own = vbd.fork();
        world.alone(async move |io| {
            let staged =
                own.stage_bitmaps(&io, vec![add("new", persistent)]).await.expect("staged");
            let still = own.quiesce(&io, 1 << 40).await.expect("nothing is in flight");
            staged.switch(&still).await;
            let of = own.dirty_bitmaps().remove(0);
            let successor = own.succeed_bitmap(&of, &still);
            drop(still);
            dirty(&io, &own, 5).await;
            drop(successor);
            dirty(&io, &own, 9).await;
            staged.commit(&io).await.expect("stable");
        });
        assert_eq!(granules_of(&vbd, "new"), Some(vec![5, 9]), "persistent: {persistent}");
    }
}

/// As a backup ends, which replaces its bitmap's marks, while a client changes others.
#[test]
fn a_change_begins_from_what_the_one_before_has_left() {
    let (world, vbd) = World::quiet(5);
    let own = vbd.fork();
    world.alone(async move |io| {
        let first = own.stage_bitmaps(&io, vec![add("new", false)]).await.expect("staged");
        let second = own.fork();
        let (theirs, ended) = (io.clone(), Rc::new(Cell::new(false)));
        let tell = ended.clone();
        io.spawn(async move {
            change(&theirs, &second, vec![BitmapChange::Clear("b".into())]).await;
            tell.set(true);
        });
        io.sleep(1000).await;
        let still = own.quiesce(&io, 1 << 40).await.expect("nothing is in flight");
        first.switch(&still).await;
        drop(still);
        assert!(!ended.get(), "it has not waited");
        first.commit(&io).await.expect("stable");
        while !ended.get() {
            io.sleep(1000).await;
        }
        dirty(&io, &own, 3).await;
    });
    assert_eq!(granules_of(&vbd, "new"), Some(vec![3]));
    assert_eq!(granules_of(&vbd, "b"), Some(vec![3]));
}

/// The changes of another disk of the same transaction could not be made stable.
#[test]
fn a_change_that_was_presented_is_taken_back() {
    for end in [End::Kill, End::Close] {
        let (mut world, vbd) = World::quiet(4);
        world.write(&vbd, 3);
        let own = vbd.fork();
        world.alone(async move |io| {
            let clear = vec![BitmapChange::Clear("b".into())];
            let mut staged = own.stage_bitmaps(&io, clear).await.expect("staged");
            let still = own.quiesce(&io, 1 << 40).await.expect("nothing is in flight");
            staged.switch(&still).await;
            drop(still);
            staged.put(&io, None).await.expect("written");
            staged.present(&io).await.expect("stable");
            dirty(&io, &own, 5).await;
            staged.take_back(&io).await;
        });
        assert_eq!(only(&vbd), Some(vec![3, 5]), "{end:?}");
        if end == End::Close {
            let own = vbd.fork();
            world.alone(async move |io| own.disk().close(&io).await.expect("closed"));
        }
        world.end(end);
        drop(vbd);
        assert_eq!(only(&world.open()), Some(vec![3, 5]), "{end:?}");
    }
}

/// The server is stopped as it has written the changes of this disk, and those of another disk or not.
#[test]
fn a_change_of_several_disks_holds_once_all_of_it_is_written() {
    let regions = |regions: std::ops::Range<u64>| {
        let per = REGION / GRANULE;
        Some((regions.start * per..regions.end * per).collect::<Vec<u64>>())
    };
    for (end, decided, wanted) in [
        (End::Kill, false, Some(vec![3, 20])),
        (End::Kill, true, Some(vec![20])),
        (End::Cut, false, regions(0..2)),
        (End::Cut, true, regions(1..2)),
    ] {
        let Ok(transaction) = Transaction::begin(&["/one", "/two"].map(Path::new)) else {
            eprintln!("skipped: there is nowhere to record an image");
            return;
        };
        let (mut world, vbd) = World::quiet(4);
        world.write(&vbd, 3);
        let (own, part) = (vbd.fork(), transaction.part(0));
        transaction.writes_down(&part).expect("written down");
        let staged = world.alone(async move |io| {
            let clear = vec![BitmapChange::Clear("b".into())];
            let mut staged = own.stage_bitmaps(&io, clear).await.expect("staged");
            let still = own.quiesce(&io, 1 << 40).await.expect("nothing is in flight");
            staged.switch(&still).await;
            drop(still);
            staged.put(&io, Some(part)).await.expect("written");
            staged.present(&io).await.expect("stable");
            dirty(&io, &own, 20).await;
            staged
        });
        if decided {
            transaction.decide().expect("decided");
        }
        world.memory.set_killed(true);
        drop((staged, vbd));
        world.memory.set_killed(false);
        world.end(end);
        assert_eq!(only(&world.open()), wanted, "{end:?}, decided: {decided}");
        // It is taken back for good.
        transaction.call_off();
        world.end(End::Kill);
        assert_eq!(only(&world.open()), wanted, "{end:?}, decided: {decided}");
    }
}
