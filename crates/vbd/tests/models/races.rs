//! Threads that find room, free it and read it beside one another.

use ringtap_image::qcow2::Sabotage;
use ringtap_io::sync::broken;
use ringtap_sim::threads::{choose, must_notice, try_orders};

use crate::world::{End, Known, World, discard, flush, join, qcow2, read, write};

/// An image that was opened just now, so that nobody knows yet which clusters are free: one thread finds that
/// out, while the flush of another drops refcounts from memory.
fn space_is_found_beside_a_flush() {
    const CLUSTER: u64 = 1024;
    let world = World::new(qcow2(64 << 10, CLUSTER, false), 1, true);
    let vbd = world.open();
    join([world.thread(&vbd, async move |vbd, io| {
        write(&vbd, &io, 0, 12 * CLUSTER, 1).await;
        discard(&vbd, &io, 4 * CLUSTER, CLUSTER).await;
        vbd.close(&io).await.expect("closed");
    })]);
    drop(vbd);
    let vbd = world.open();
    let finder = world.thread(&vbd, async move |vbd, io| {
        write(&vbd, &io, 20 * CLUSTER, CLUSTER, 2).await;
        write(&vbd, &io, 22 * CLUSTER, CLUSTER, 3).await;
    });
    let flusher = world.thread(&vbd, async move |vbd, io| {
        for cluster in 0..3 {
            discard(&vbd, &io, cluster * CLUSTER, CLUSTER).await;
            flush(&vbd, &io).await;
        }
    });
    join([finder, flusher]);
    let expected = |cluster| match cluster {
        3 | 5..12 => 1,
        20 => 2,
        22 => 3,
        _ => 0,
    };
    join([world.thread(&vbd, async move |vbd, io| {
        for cluster in 0..24 {
            let found = read(&vbd, &io, cluster * CLUSTER, CLUSTER).await;
            assert_eq!(found, [expected(cluster); CLUSTER as usize], "cluster {cluster}");
        }
        vbd.close(&io).await.expect("closed");
    })]);
    world.check();
}

/// The last cluster, of which the disk has only a part that ends within a block: it goes to room that held
/// something else, so what lies behind the disk's end is zeroed, while another thread writes before that.
fn the_last_cluster() {
    const CLUSTER: u64 = 16384;
    const WHOLE: u64 = 8;
    let size = WHOLE * CLUSTER + 2048;
    let world = World::new(qcow2(size, CLUSTER, true), 4096, false);
    let vbd = world.open();
    join([world.thread(&vbd, async move |vbd, io| {
        // So much that what is freed is worth being used again.
        write(&vbd, &io, 0, WHOLE * CLUSTER, 1).await;
        flush(&vbd, &io).await;
        discard(&vbd, &io, 0, WHOLE * CLUSTER).await;
        for _ in 0..3 {
            flush(&vbd, &io).await;
        }
    })]);
    let writers = [512, 1024].map(|at| {
        world.thread(&vbd, async move |vbd, io| {
            write(&vbd, &io, WHOLE * CLUSTER + at, 512, (at / 512) as u8).await;
        })
    });
    join(writers);
    let known = [512, 1024].map(|at| Known {
        offset: WHOLE * CLUSTER + at,
        len: 512,
        value: (at / 512) as u8,
    });
    world.end_here(End::Kill, &known);
    world.look();
}

/// One thread reads a cluster, while another discards it and writes to others, which take its place.
fn a_reader_beside_new_use() {
    const CLUSTER: u64 = 1024;
    let mut world = World::new(qcow2(64 << 10, CLUSTER, false), 1, true);
    world.sabotage = broken("no epochs").then_some(Sabotage::NoGrace);
    let vbd = world.open();
    join([world.thread(&vbd, async move |vbd, io| {
        write(&vbd, &io, 0, 2 * CLUSTER, 1).await;
        flush(&vbd, &io).await;
    })]);
    let reader = world.thread(&vbd, async move |vbd, io| {
        for _ in 0..3 {
            let found = read(&vbd, &io, 0, 2 * CLUSTER).await;
            let other = found.iter().any(|byte| *byte > 1);
            assert!(!other, "somebody else's bytes");
        }
    });
    let writer = world.thread(&vbd, async move |vbd, io| {
        discard(&vbd, &io, choose() % 2 * CLUSTER, CLUSTER).await;
        for cluster in 2..6 {
            flush(&vbd, &io).await;
            write(&vbd, &io, cluster * CLUSTER, CLUSTER, 2).await;
        }
    });
    join([reader, writer]);
}

/// More tables than there is memory for: threads read and write all over the disk.
fn tables_come_and_go() {
    const CLUSTER: u64 = 512;
    const TABLE: u64 = 64 * CLUSTER;
    let world = World::new(qcow2(5 * TABLE, CLUSTER, false), 1, true);
    let vbd = world.open();
    let threads = (0..2u64).map(|thread| {
        world.thread(&vbd, async move |vbd, io| {
            let place = |table: u64| table * TABLE + thread * CLUSTER;
            for table in 0..4 {
                write(&vbd, &io, place(table), CLUSTER, 1 + table as u8).await;
            }
            for _ in 0..6 {
                let table = choose() % 5;
                let found = read(&vbd, &io, place(table), CLUSTER).await;
                let value = if table == 4 { 0 } else { 1 + table as u8 };
                assert_eq!(found, [value; CLUSTER as usize], "table {table}");
            }
        })
    });
    join(threads.collect::<Vec<_>>());
}

#[test]
fn refcounts_that_a_flush_dropped_are_read_again() {
    try_orders("refcounts beside a flush", 1600, space_is_found_beside_a_flush);
    must_notice("refcounts dropped", 10_000, space_is_found_beside_a_flush);
}

#[test]
fn nobody_writes_to_the_last_cluster_while_what_is_behind_it_is_zeroed() {
    try_orders("the disk's end", 1600, the_last_cluster);
    must_notice("end shared", 10_000, the_last_cluster);
    must_notice("settled in silence", 2000, the_last_cluster);
}

#[test]
fn a_cluster_stays_while_somebody_reads_it() {
    try_orders("readers beside discards", 1600, a_reader_beside_new_use);
    must_notice("no epochs", 10_000, a_reader_beside_new_use);
}

#[test]
fn tables_are_found_while_others_take_their_place() {
    try_orders("tables of an image", 400, tables_come_and_go);
    must_notice("slot kept", 1000, tables_come_and_go);
}
