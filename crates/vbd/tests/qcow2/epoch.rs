//! A cluster that a request may still use is not used for anything else, whatever becomes of its entry.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ringtap_image::qcow2::{CreateOptions, Header, Parts, Qcow2, Sabotage, create};
use ringtap_image::{CacheMode, Container, Traits};
use ringtap_io::{Io, Tasks};
use ringtap_sim::{Disk, Sim};
use ringtap_vbd::{Error, Kind, Request, Vbd};

use crate::slow::Held;

const CLUSTER: u64 = 8192;

async fn serve(vbd: &Vbd, io: &Io, kind: Kind, cluster: u64, value: u8) -> Result<Vec<u8>, Error> {
    let len = if kind == Kind::Flush { 0 } else { CLUSTER };
    let mut buffer = io.buffer(CLUSTER as usize).map_err(Error::Os)?;
    buffer.bytes_mut().fill(value);
    let (offset, mem) = (cluster * CLUSTER, buffer.mem());
    vbd.serve(io, Request { kind, offset, len, mem, fua: false }).await?;
    Ok(buffer.bytes().to_vec())
}

/// An image whose first cluster was written with ones, and flushed.
fn written(sabotage: Option<Sabotage>, hold: &Rc<Cell<bool>>) -> (Tasks, Rc<Vbd>) {
    let disk = Disk::new(512);
    let file = disk.add_file(0, 1);
    let mut tasks = Tasks::new(Box::new(Held::new(Sim::new(&disk, 1), hold)));
    let io = tasks.io().clone();
    let vbd = tasks.block_on(async move {
        let container = Container::simulated(file, 0, Traits::FILE);
        let options =
            CreateOptions { size: 1 << 20, cluster_size: CLUSTER, ..CreateOptions::default() };
        create(&io, &container, None, &options).await.expect("an image");
        let header = Header::read(&io, &container).await.expect("a header");
        let parts = Parts { sabotage, ..Parts::default() };
        let image = Qcow2::open(&io, container, header, parts).await.expect("an image");
        let vbd = Vbd::new(Box::new(image), CacheMode::None);
        serve(&vbd, &io, Kind::Write, 0, 1).await.expect("written");
        serve(&vbd, &io, Kind::Flush, 0, 0).await.expect("flushed");
        Rc::new(vbd)
    });
    (tasks, vbd.expect("the simulation runs"))
}

/// Let a read begin, discard what it reads, flush as often as it takes, write elsewhere; then let the
/// read go on. Gives what it read.
fn read_over_a_discard(sabotage: Option<Sabotage>) -> Vec<u8> {
    let hold = Rc::new(Cell::new(false));
    let (mut tasks, vbd) = written(sabotage, &hold);
    hold.set(true);
    let read = Rc::new(RefCell::new(Vec::new()));
    let (into, reader, io) = (read.clone(), vbd.clone(), tasks.io().clone());
    tasks.spawn(async move {
        *into.borrow_mut() = serve(&reader, &io, Kind::Read, 0, 0xee).await.expect("read");
    });
    tasks.run_ready();
    tasks.turn(false).expect("the simulation runs");
    let io = tasks.io().clone();
    let others = tasks.block_on(async move {
        serve(&vbd, &io, Kind::Discard, 0, 0).await?;
        for cluster in 1..5 {
            serve(&vbd, &io, Kind::Flush, 0, 0).await?;
            serve(&vbd, &io, Kind::Write, cluster, 2).await?;
        }
        Ok::<_, Error>(())
    });
    others.expect("the simulation runs").expect("served");
    assert!(read.borrow().is_empty());
    hold.set(false);
    tasks.run().expect("the simulation runs");
    read.take()
}

#[test]
fn a_read_in_flight_keeps_its_cluster() {
    assert_eq!(read_over_a_discard(None), vec![1; CLUSTER as usize]);
    // Were it otherwise, the read would give what was written elsewhere.
    assert_eq!(read_over_a_discard(Some(Sabotage::NoGrace)), vec![2; CLUSTER as usize]);
}

/// Discard a cluster, and write a part of another when the first may be used again; gives the rest.
fn rest_of_a_recycled_cluster(sabotage: Option<Sabotage>) -> Vec<u8> {
    let (mut tasks, vbd) = written(sabotage, &Rc::default());
    let io = tasks.io().clone();
    let read = tasks.block_on(async move {
        serve(&vbd, &io, Kind::Discard, 0, 0).await?;
        for _ in 0..3 {
            serve(&vbd, &io, Kind::Flush, 0, 0).await?;
        }
        let mut buffer = io.buffer(512).map_err(Error::Os)?;
        buffer.bytes_mut().fill(2);
        let (offset, len, mem) = (CLUSTER, 512, buffer.mem());
        vbd.serve(&io, Request { kind: Kind::Write, offset, len, mem, fua: false }).await?;
        serve(&vbd, &io, Kind::Read, 1, 0xee).await
    });
    read.expect("the simulation runs").expect("served").split_off(512)
}

#[test]
fn recycled_room_shows_nothing_of_its_past() {
    assert_eq!(rest_of_a_recycled_cluster(None), vec![0; CLUSTER as usize - 512]);
    // Were it taken for zeros unpunched, it would.
    let past = rest_of_a_recycled_cluster(Some(Sabotage::StaleIsFresh));
    assert_eq!(past, vec![1; CLUSTER as usize - 512]);
}
