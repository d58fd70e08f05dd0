//! What a tracker notes: every request that may have changed the disk, whichever image the disk is by then.

#[path = "common/container.rs"]
mod container;

use ringtap_image::{CacheMode, Image};
use ringtap_io::{Io, Mem};
use ringtap_sim::{Disk, Fault, alone};
use ringtap_vbd::{Error, Kind, Request, Tracker, Vbd};

const REGION: u64 = 4096;
const REGIONS: u64 = 32;

fn raw(disk: &Disk) -> Box<dyn Image> {
    container::raw(disk, disk.add_file(REGION * REGIONS, 512))
}

async fn ask(vbd: &Vbd, io: &Io, kind: Kind, region: u64) -> Result<(), Error> {
    let buffer = io.buffer(REGION as usize).expect("memory");
    let moves = matches!(kind, Kind::Read | Kind::Write);
    let mem = if moves { buffer.mem() } else { Mem::EMPTY };
    let len = if kind == Kind::Flush { 0 } else { REGION };
    vbd.serve(io, Request { kind, offset: region * REGION, len, mem, fua: false }).await
}

fn marked(tracker: &Tracker) -> Vec<u64> {
    let mut found = vec![];
    while let Some(range) = tracker.next(found.last().map_or(0, |last| (last + 1) * REGION), 1) {
        found.push(range.start / REGION);
    }
    found
}

const ZERO: Kind = Kind::WriteZeroes { unmap: true, fast: false };

#[test]
fn whatever_may_change_the_disk_is_marked_until_nobody_wants_to_know() {
    let disk = Disk::new(512);
    let (vbd, next) = (Vbd::new(raw(&disk), CacheMode::None), raw(&disk));
    alone(&disk.clone(), 5, async move |io| {
        ask(&vbd, &io, Kind::Write, 1).await.expect("written");
        let (one, two) = (vbd.track(REGION), vbd.track(2 * REGION));
        for (region, kind) in [(3, Kind::Write), (5, Kind::Discard), (7, ZERO), (9, Kind::Read)] {
            ask(&vbd, &io, kind, region).await.expect("served");
        }
        ask(&vbd, &io, Kind::Flush, 0).await.expect("flushed");
        disk.fail_operations(0..u64::MAX, Fault::Errno(libc::EIO));
        ask(&vbd, &io, Kind::Write, 11).await.expect_err("the disk is broken");
        disk.heal();
        assert_eq!(ask(&vbd, &io, Kind::Write, REGIONS).await, Err(Error::Range));
        assert_eq!(marked(&one), [3, 5, 7, 11]);
        assert_eq!(
            (one.changed(), one.marked(), two.marked()),
            (4 * REGION, 4 * REGION, 8 * REGION)
        );
        assert_eq!(two.granularity(), 2 * REGION);

        let still = vbd.quiesce(&io, 1 << 40).await.expect("nothing is in flight");
        still.replace(next).expect("as large");
        drop(still);
        assert_eq!(one.take(5 * REGION, 1), Some(5 * REGION..6 * REGION));
        drop(two);
        ask(&vbd.fork(), &io, Kind::Write, 13).await.expect("written");
        assert_eq!(marked(&one), [3, 7, 11, 13]);
        one.clear();
        one.mark(2 * REGION..4 * REGION);
        assert_eq!(one.take(0, u64::MAX), Some(2 * REGION..4 * REGION));
        assert!(!one.is_marked(0..REGION * REGIONS));
    });
}
