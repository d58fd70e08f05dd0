//! A handle that reads an image while another writes to it.

use ringtap_image::qcow2::{CreateOptions, Header, Parts, Qcow2, create};
use ringtap_image::{CacheMode, Container, Image, Traits};
use ringtap_io::{File, Io, Tasks};
use ringtap_sim::{Disk, SECTOR, Sim};
use ringtap_vbd::{Kind, Request, Vbd};

const CLUSTER: u64 = 4096;
/// Clusters that are compressed, and then written to.
const PACKED: u64 = 16;

fn container(disk: &Disk, file: File, read_only: bool) -> Container {
    let traits =
        Traits { read_only, request_alignment: 512, memory_alignment: 512, ..Traits::FILE };
    Container::simulated(file, disk.size(file), traits)
}

async fn open(io: &Io, disk: &Disk, file: File, read_only: bool) -> Box<dyn Image> {
    let container = container(disk, file, read_only);
    let header = Header::read(io, &container).await.expect("a header");
    Box::new(Qcow2::open(io, container, header, Parts::default()).await.expect("an image"))
}

async fn request(io: &Io, vbd: &Vbd, kind: Kind, offset: u64, bytes: &mut [u8]) -> bool {
    let mut buffer = io.buffer(bytes.len()).expect("memory");
    buffer.bytes_mut().copy_from_slice(bytes);
    let (len, mem) = (bytes.len() as u64, buffer.mem());
    let end = vbd.serve(io, Request { kind, offset, len, mem, fua: false }).await;
    bytes.copy_from_slice(buffer.bytes());
    end.is_ok()
}

/// Whether what the writer leaves alone reads as it was, by a handle that was there before.
fn reads_as_it_was(beside: bool) -> bool {
    let disk = Disk::new(SECTOR);
    let file = disk.add_file(0, 512);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 1)));
    let io = tasks.io().clone();
    let mut rng = fastrand::Rng::with_seed(7);
    let mut held = vec![0u8; (PACKED * CLUSTER) as usize];
    // They become half as large.
    held.chunks_mut(16).for_each(|piece| rng.fill(&mut piece[..8]));
    let task = async move {
        let options =
            CreateOptions { size: 1 << 20, cluster_size: CLUSTER, ..CreateOptions::default() };
        create(&io, &container(&disk, file, false), None, &options).await.expect("an image");
        let first = Vbd::new(open(&io, &disk, file, false).await, CacheMode::None);
        first.compress(&io, 0, &held).await.expect("compressed");
        first.disk().close(&io).await.expect("closed");
        let reader = Vbd::new(open(&io, &disk, file, true).await, CacheMode::None);
        // Its tables are in memory from now on.
        assert!(request(&io, &reader, Kind::Read, 0, &mut [0; 512]).await);
        let image = open(&io, &disk, file, false).await;
        image.read_beside(beside);
        let writer = Vbd::new(image, CacheMode::None);
        for cluster in 0..PACKED {
            let mut some = [0xeeu8; 512];
            assert!(request(&io, &writer, Kind::Write, cluster * CLUSTER, &mut some).await);
        }
        for _ in 0..4 {
            writer.flush(&io).await.expect("stable");
        }
        let mut others = vec![0xffu8; (64 * CLUSTER) as usize];
        assert!(request(&io, &writer, Kind::Write, PACKED * CLUSTER, &mut others).await);
        writer.flush(&io).await.expect("stable");
        let mut same = true;
        for cluster in 0..PACKED {
            let offset = cluster * CLUSTER + 512;
            let mut found = vec![0; (CLUSTER - 512) as usize];
            same &= request(&io, &reader, Kind::Read, offset, &mut found).await;
            same &= found == held[offset as usize..][..found.len()];
        }
        same
    };
    tasks.block_on(task).expect("the simulation runs")
}

#[test]
fn room_that_is_freed_stays_while_another_handle_reads_it() {
    assert!(reads_as_it_was(true));
    assert!(!reads_as_it_was(false), "nothing is used again: the test shows nothing");
}
