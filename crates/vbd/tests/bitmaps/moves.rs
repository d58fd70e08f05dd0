//! A disk that goes on in another image, stopped before, at and after the pivot.

use ringtap_image::Raw;
use ringtap_image::bitmap_store::Binding;

use super::single::{dirty, only};
use super::{End, GRANULE, REGION, SIZE, World, container};

/// How far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Announced,
    Replaced,
    Rebound,
}

/// The marks that the next server finds; none where there is no bitmap, or it is lost. `announced`: how often it was said that
/// the disk is about to go on there; but for the last time nothing came of it.
fn stopped(step: Step, end: End, announced: u32) -> Option<Vec<u64>> {
    let (mut world, vbd) = World::quiet(3);
    world.write(&vbd, 7);
    let other = world.disk.add_file(SIZE, 512);
    let (own, time) = (vbd.fork(), world.disk.clone());
    let held = container(&world.disk, other).with_time(move || time.modified(other));
    world.disk.watch(other, held.witness().clone());
    let (boot, booted) = (world.boot, world.booted);
    world.alone(async move |io| {
        let binding = || Binding::simulated(&held, "the other".into(), boot, booted);
        for time in 0..announced {
            if time > 0 {
                // What was copied there meanwhile.
                held.write(&io, 0, &[1; 4096]).await.expect("written");
                own.disk().forget_announced();
            }
            own.disk().announce_rebind(&io, binding()).await.expect("noted");
        }
        dirty(&io, &own, 9).await;
        if step >= Step::Replaced {
            let still = own.quiesce(&io, 1 << 40).await.expect("nothing is in flight");
            still.replace(Box::new(Raw::new(held.clone()))).expect("it takes its place");
        }
        dirty(&io, &own, 12).await;
        if step >= Step::Rebound {
            own.disk().rebind_bitmaps(&io, binding()).await.expect("written");
            dirty(&io, &own, 14).await;
        }
    });
    world.memory.set_killed(true);
    drop(vbd);
    world.memory.set_killed(false);
    if step >= Step::Replaced {
        (world.image, world.identity) = (other, "the other");
    }
    world.end(end);
    let vbd = world.open();
    if vbd.dirty_bitmaps().is_empty() {
        return None;
    }
    let found = only(&vbd);
    // What comes later is noted as ever.
    world.write(&vbd, 40);
    drop(vbd);
    world.end(End::Kill);
    let later = found.clone().map(|found| found.into_iter().chain([40]).collect());
    assert_eq!(only(&world.open()), later, "{step:?}, {end:?}");
    found
}

#[test]
fn marks_are_found_in_the_image_that_the_disk_is_in() {
    let region: Vec<u64> = (0..REGION / GRANULE).collect();
    for (step, marked) in [
        (Step::Announced, vec![7, 9, 12]),
        (Step::Replaced, vec![7, 9, 12]),
        (Step::Rebound, vec![7, 9, 12, 14]),
    ] {
        assert_eq!(stopped(step, End::Kill, 1), Some(marked), "{step:?}");
        assert_eq!(stopped(step, End::Cut, 1), Some(region.clone()), "{step:?}");
    }
    // What this is for.
    for end in [End::Kill, End::Cut] {
        assert_eq!(stopped(Step::Replaced, end, 0), None, "{end:?}");
    }
}

#[test]
fn marks_are_exact_in_an_image_that_a_disk_nearly_went_on_in_before() {
    for announced in [2, 3] {
        assert_eq!(stopped(Step::Replaced, End::Kill, announced), Some(vec![7, 9, 12]));
        assert_eq!(stopped(Step::Rebound, End::Kill, announced), Some(vec![7, 9, 12, 14]));
    }
}
