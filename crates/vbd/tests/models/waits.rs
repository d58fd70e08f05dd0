//! Threads that wait for what another does for both of them: brings a table, makes one, finds room, frees memory, writes the
//! header. A word that is not given, or given to nobody, ends a model as a deadlock.

use ringtap_sim::threads::{must_notice, try_orders};
use ringtap_vbd::{Error, Kind};

use crate::world::{World, flush, join, qcow2, read, serve, write};

const CLUSTER: u64 = 512;
/// What one table says of.
const TABLE: u64 = 64 * CLUSTER;

/// Two threads write where no table is.
fn a_table_is_made() {
    let world = World::new(qcow2(2 * TABLE, CLUSTER, false), 1, true);
    let vbd = world.open();
    let threads = [0, 1].map(|thread| {
        world.thread(&vbd, async move |vbd, io| {
            write(&vbd, &io, thread * CLUSTER, CLUSTER, 1 + thread as u8).await;
        })
    });
    join(threads);
    join([world.thread(&vbd, async move |vbd, io| {
        for cluster in 0..3u8 {
            let found = read(&vbd, &io, u64::from(cluster) * CLUSTER, CLUSTER).await;
            assert_eq!(found, [(cluster + 1) % 3; CLUSTER as usize], "cluster {cluster}");
        }
        vbd.close(&io).await.expect("closed");
    })]);
    world.check();
}

/// An image that was just opened, read by two threads.
fn a_table_is_brought() {
    let world = World::new(qcow2(2 * TABLE, CLUSTER, false), 1, true);
    let vbd = world.open();
    join([world.thread(&vbd, async move |vbd, io| {
        write(&vbd, &io, 0, 2 * CLUSTER, 1).await;
        vbd.close(&io).await.expect("closed");
    })]);
    drop(vbd);
    let vbd = world.open();
    let threads = [0, 1].map(|thread| {
        world.thread(&vbd, async move |vbd, io| {
            let found = read(&vbd, &io, thread * CLUSTER, CLUSTER).await;
            assert_eq!(found, [1; CLUSTER as usize]);
        })
    });
    join(threads);
}

/// Three threads write to a table each, with memory for two.
fn memory_is_freed() {
    let world = World::new(qcow2(3 * TABLE, CLUSTER, false), 1, true);
    let vbd = world.open();
    let threads = (0..3u64).map(|thread| {
        world.thread(&vbd, async move |vbd, io| {
            write(&vbd, &io, thread * TABLE, CLUSTER, 1 + thread as u8).await;
            if thread == 0 {
                flush(&vbd, &io).await;
            }
        })
    });
    join(threads.collect::<Vec<_>>());
    join([world.thread(&vbd, async move |vbd, io| {
        for table in 0..3 {
            let found = read(&vbd, &io, table * TABLE, CLUSTER).await;
            assert_eq!(found, [1 + table as u8; CLUSTER as usize], "table {table}");
        }
    })]);
}

/// An image that was just opened, to which two threads write what needs room: one finds out where there is some.
fn room_is_found() {
    let world = World::new(qcow2(TABLE, CLUSTER, false), 1, true);
    let vbd = world.open();
    join([world.thread(&vbd, async move |vbd, io| {
        write(&vbd, &io, 0, CLUSTER, 1).await;
        vbd.close(&io).await.expect("closed");
    })]);
    drop(vbd);
    let vbd = world.open();
    let threads = [1, 2].map(|thread| {
        world.thread(&vbd, async move |vbd, io| {
            write(&vbd, &io, thread * CLUSTER, CLUSTER, 1 + thread as u8).await;
        })
    });
    join(threads);
    join([world.thread(&vbd, async move |vbd, io| {
        for cluster in 0..3 {
            let found = read(&vbd, &io, cluster * CLUSTER, CLUSTER).await;
            assert_eq!(found, [1 + cluster as u8; CLUSTER as usize], "cluster {cluster}");
        }
        vbd.close(&io).await.expect("closed");
    })]);
    world.check();
}

/// Two threads meet an entry each that cannot be, and say so in the header.
fn an_image_contradicts_itself() {
    let world = World::new(qcow2(2 * TABLE, CLUSTER, false), 1, true);
    world.refer_to_nowhere();
    let vbd = world.open();
    let threads = [0, 1].map(|thread| {
        world.thread(&vbd, async move |vbd, io| {
            let place = (thread * TABLE, CLUSTER);
            let end = serve(&vbd, &io, Kind::Read, place, 0, false).await;
            assert_eq!(end, Err(Error::Corrupt));
        })
    });
    join(threads);
}

#[test]
fn whoever_waits_for_a_table_to_be_made_is_told() {
    try_orders("a table made", 4000, a_table_is_made);
    must_notice("made in silence", 4000, a_table_is_made);
}

#[test]
fn whoever_waits_for_room_to_be_found_is_told() {
    try_orders("room found", 4000, room_is_found);
    must_notice("grown in silence", 4000, room_is_found);
}

#[test]
fn whoever_waits_for_a_table_to_be_read_is_told() {
    try_orders("a table brought", 4000, a_table_is_brought);
    must_notice("loaded in silence", 4000, a_table_is_brought);
}

#[test]
fn whoever_waits_for_memory_is_told() {
    try_orders("memory for tables", 1600, memory_is_freed);
    must_notice("freed in silence", 10_000, memory_is_freed);
}

#[test]
fn whoever_waits_for_the_header_is_told() {
    try_orders("the header", 4000, an_image_contradicts_itself);
    must_notice("header in silence", 10_000, an_image_contradicts_itself);
}
