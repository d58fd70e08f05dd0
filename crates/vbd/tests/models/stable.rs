//! What is acknowledged as stable is stable at that step, and what is acknowledged outlives a kill; with
//! flushes of several threads that one of them carries out for all.

use ringtap_sim::Fault;
use ringtap_sim::threads::{choose, must_notice, try_orders};
use ringtap_vbd::Kind;

use crate::world::{End, Format, Known, World, flush, join, qcow2, serve, write, write_durably};

/// Each thread writes to room that the image has to find, and flushes.
fn flushes_of_all(format: Format, stride: u64) {
    let world = World::new(format, 1, true);
    let vbd = world.open();
    let threads = (0..3u64).map(|thread| {
        let ends = world.clone();
        world.thread(&vbd, async move |vbd, io| {
            let mut all = Vec::new();
            for round in 0..2u64 {
                let (offset, len) = ((2 * thread + round) * stride, 512);
                let value = (1 + 2 * thread + round) as u8;
                write(&vbd, &io, offset, len, value).await;
                all.push(Known { offset, len, value });
                ends.end_here(End::Kill, &all);
                if thread < 2 {
                    flush(&vbd, &io).await;
                    ends.end_here(End::PowerCut, &all);
                }
            }
        })
    });
    join(threads.collect::<Vec<_>>());
    world.look();
}

fn flushes_of_qcow2() {
    flushes_of_all(qcow2(64 << 10, 1024, false), 1024);
}

fn flushes_of_subclusters() {
    flushes_of_all(qcow2(256 << 10, 16384, true), 2048);
}

fn flushes_of_a_vhd() {
    flushes_of_all(Format::Vhd { size: 64 << 10, block: 4096 }, 4096);
}

fn syncs_of_a_file() {
    flushes_of_all(Format::Raw { size: 4096 }, 512);
}

/// Any operation fails, and the page cache forgets what it had for that file; what is acknowledged is stable all the same.
fn syncs_that_fail() {
    let world = World::new(Format::Raw { size: 4096 }, 1, true);
    world.disk.forget_on_failed_sync(true);
    let vbd = world.open();
    let fails = world.disk.operations() + 1 + choose() % 8;
    world.disk.fail_operations(fails..fails + 1, Fault::Errno(libc::EIO));
    let threads = (0..2u64).map(|thread| {
        let ends = world.clone();
        world.thread(&vbd, async move |vbd, io| {
            let mut all = Vec::new();
            for round in 0..2u64 {
                let (offset, len) = ((2 * thread + round) * 512, 512);
                let value = (1 + 2 * thread + round) as u8;
                let end = serve(&vbd, &io, Kind::Write, (offset, len), value, false).await;
                if end.is_ok() {
                    all.push(Known { offset, len, value });
                }
                if serve(&vbd, &io, Kind::Flush, (0, 0), 0, false).await.is_ok() {
                    ends.end_here(End::PowerCut, &all);
                }
            }
        })
    });
    join(threads.collect::<Vec<_>>());
    world.look();
}

/// One thread writes to new room and leaves it at that; another writes to the same room durably. Nothing waited
/// for a flush before, and the file takes durable writes. A third may flush.
fn durable_beside_new(format: Format, cluster: u64, flushes: bool) {
    let world = World::new(format, 512, true);
    let vbd = world.open();
    join([world.thread(&vbd, async move |vbd, io| {
        write(&vbd, &io, 0, 512, 1).await;
        for _ in 0..4 {
            flush(&vbd, &io).await;
        }
    })]);
    let ends = world.clone();
    let durable = world.thread(&vbd, async move |vbd, io| {
        let known = Known { offset: cluster + 512, len: 512, value: 3 };
        write_durably(&vbd, &io, known.offset, known.len, known.value).await;
        ends.end_here(End::PowerCut, &[known]);
    });
    let ends = world.clone();
    let new = world.thread(&vbd, async move |vbd, io| {
        let known = Known { offset: cluster, len: 512, value: 2 };
        write(&vbd, &io, known.offset, known.len, known.value).await;
        ends.end_here(End::Kill, &[known]);
    });
    let flusher = flushes.then(|| {
        world.thread(&vbd, async move |vbd, io| {
            write(&vbd, &io, 2 * cluster, 512, 4).await;
            flush(&vbd, &io).await;
        })
    });
    join([durable, new].into_iter().chain(flusher));
    world.look();
}

fn durable_on_qcow2() {
    durable_beside_new(qcow2(64 << 10, 1024, false), 1024, false);
}

fn durable_on_a_vhd() {
    durable_beside_new(Format::Vhd { size: 64 << 10, block: 4096 }, 4096, false);
}

fn durable_on_a_vhd_that_is_flushed() {
    durable_beside_new(Format::Vhd { size: 64 << 10, block: 4096 }, 4096, true);
}

#[test]
fn a_flush_serves_all_that_were_acknowledged_before_it_began() {
    try_orders("group flush of qcow2", 1600, flushes_of_qcow2);
    try_orders("group flush of qcow2 with subclusters", 800, flushes_of_subclusters);
    must_notice("turn joined", 4000, flushes_of_qcow2);
    must_notice("dirty forgotten", 4000, flushes_of_qcow2);
    must_notice("turn ended in silence", 1000, flushes_of_qcow2);
}

#[test]
fn a_flush_of_a_vhd_serves_all_that_were_acknowledged_before_it_began() {
    try_orders("group flush of VHD", 1600, flushes_of_a_vhd);
    must_notice("turn joined", 4000, flushes_of_a_vhd);
    must_notice("turn ended in silence", 1000, flushes_of_a_vhd);
}

#[test]
fn a_sync_serves_all_that_were_acknowledged_before_it_began() {
    try_orders("group sync of a file", 1600, syncs_of_a_file);
    must_notice("turn joined", 4000, syncs_of_a_file);
    must_notice("turn ended in silence", 4000, syncs_of_a_file);
    try_orders("syncs that fail", 4000, syncs_that_fail);
    must_notice("turns beside one another", 20_000, syncs_that_fail);
}

#[test]
fn a_durable_write_to_room_that_another_found_is_stable() {
    try_orders("durable write over a new entry", 4000, durable_on_qcow2);
    must_notice("dirty late", 10_000, durable_on_qcow2);
    try_orders("durable write to a new block", 4000, durable_on_a_vhd);
    must_notice("dirty late", 10_000, durable_on_a_vhd);
    try_orders("durable write beside a flush", 1600, durable_on_a_vhd_that_is_flushed);
    must_notice("dirty forgotten", 10_000, durable_on_a_vhd_that_is_flushed);
}
