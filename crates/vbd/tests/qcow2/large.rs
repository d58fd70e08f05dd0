//! Several queue threads on one image, and images whose tables do not fit in memory.

use std::path::Path;
use std::process::Command;

use ringtap_image::{CacheMode, Format, OpenOptions};
use ringtap_io::{Io, Mem, Ring, Tasks};
use ringtap_vbd::{Error, Kind, Request, Vbd};

const BLOCK: usize = 4096;

fn qemu_img(args: &[&str]) {
    let command = [&["60", "qemu-img"], args].concat();
    let end = Command::new("timeout").args(&command).output().expect("qemu-img runs");
    let text = String::from_utf8_lossy(&end.stderr).into_owned();
    assert!(end.status.success(), "{command:?}: {text}");
}

fn open(path: &Path, table_memory: Option<u64>) -> Vbd {
    let (format, cache) = (Some(Format::Qcow2), CacheMode::Writeback);
    let options = OpenOptions { format, cache, table_memory, ..OpenOptions::default() };
    let image = ringtap_image::open(path, &options).unwrap_or_else(|error| panic!("{error}"));
    Vbd::new(image, cache)
}

/// Bytes that tell their block.
fn pattern(block: u64) -> Vec<u8> {
    (block + 1).to_le_bytes().repeat(BLOCK / 8)
}

async fn write(vbd: &Vbd, io: &Io, block: u64) -> Result<(), Error> {
    let mut buffer = io.buffer(BLOCK).map_err(Error::Os)?;
    buffer.bytes_mut().copy_from_slice(&pattern(block));
    let (offset, len, mem) = (block * BLOCK as u64, BLOCK as u64, buffer.mem());
    vbd.serve(io, Request { kind: Kind::Write, offset, len, mem, fua: false }).await
}

async fn discard(vbd: &Vbd, io: &Io, block: u64) -> Result<(), Error> {
    let (offset, len, mem) = (block * BLOCK as u64, BLOCK as u64, Mem::EMPTY);
    vbd.serve(io, Request { kind: Kind::Discard, offset, len, mem, fua: false }).await
}

async fn discard_cluster(vbd: &Vbd, io: &Io, block: u64) -> Result<(), Error> {
    let (offset, len, mem) = (block * BLOCK as u64, 1 << 16, Mem::EMPTY);
    vbd.serve(io, Request { kind: Kind::Discard, offset, len, mem, fua: false }).await
}

async fn holds(vbd: &Vbd, io: &Io, block: u64) -> Result<bool, Error> {
    let buffer = io.buffer(BLOCK).map_err(Error::Os)?;
    let (offset, len, mem) = (block * BLOCK as u64, BLOCK as u64, buffer.mem());
    vbd.serve(io, Request { kind: Kind::Read, offset, len, mem, fua: false }).await?;
    Ok(buffer.bytes() == pattern(block))
}

/// Discard and write these blocks, many at a time, with flushes among them, and read them.
fn work(vbd: &Vbd, blocks: &[u64]) {
    let mut tasks = Tasks::new(Box::new(Ring::new().expect("a ring")));
    for part in blocks.chunks(blocks.len().div_ceil(16)) {
        let (vbd, io, part) = (vbd.fork(), tasks.io().clone(), part.to_vec());
        tasks.spawn(async move {
            for (count, block) in part.iter().enumerate() {
                discard(&vbd, &io, *block).await.expect("discarded");
                write(&vbd, &io, *block).await.expect("written");
                if count % 32 == 31 {
                    vbd.flush(&io).await.expect("flushed");
                }
            }
            for block in &part {
                assert!(holds(&vbd, &io, *block).await.expect("read"), "block {block}");
            }
        });
    }
    tasks.run().expect("the ring turns");
}

fn try_image(options: &str, size: &str, blocks: &[u64], threads: usize, memory: Option<u64>) {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a folder");
    let path = dir.path().join("image.qcow2");
    let text = path.display().to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &text, size]);
    let vbd = open(&path, memory);
    std::thread::scope(|scope| {
        for number in 0..threads {
            let own: Vec<u64> = blocks.iter().copied().skip(number).step_by(threads).collect();
            let vbd = vbd.fork();
            scope.spawn(move || work(&vbd, &own));
        }
    });
    let mut tasks = Tasks::new(Box::new(Ring::new().expect("a ring")));
    let io = tasks.io().clone();
    let closed = tasks.block_on(async move {
        let end = vbd.close(&io).await;
        drop(vbd);
        end
    });
    closed.expect("the ring turns").expect("closed");
    qemu_img(&["check", "-q", "-f", "qcow2", &text]);
    let vbd = open(&path, memory);
    let (io, blocks) = (tasks.io().clone(), blocks.to_vec());
    let all = async move {
        for block in &blocks {
            assert!(holds(&vbd, &io, *block).await.expect("read"), "block {block}");
        }
    };
    tasks.block_on(all).expect("the ring turns");
}

fn shuffled(count: u64, step: u64) -> Vec<u64> {
    let mut blocks: Vec<u64> = (0..count).map(|block| block * step).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut blocks);
    blocks
}

#[test]
fn threads_share_an_image() {
    for options in ["cluster_size=64k", "extended_l2=on", "cluster_size=4k,refcount_bits=64"] {
        try_image(options, "64M", &shuffled(2000, 1), 3, None);
    }
}

/// A slice of a table maps 8 MiB or more here: with 64 frames in memory nearly every block misses.
#[test]
fn tables_come_and_go() {
    let step = (1 << 40) / 600 / BLOCK as u64;
    try_image("cluster_size=64k", "1T", &shuffled(600, step), 2, Some(0));
    try_image("extended_l2=on", "1T", &shuffled(300, 2 * step), 2, Some(0));
}

/// All slices begin as patterns here, each gets a frame when it is changed, and 64 frames are too few.
#[test]
fn patterns_become_tables() {
    let blocks = shuffled(1500, 173);
    for options in ["cluster_size=4k", "cluster_size=16k,extended_l2=on"] {
        let options = format!("{options},preallocation=metadata");
        try_image(&options, "1G", &blocks, 2, Some(0));
    }
}

/// A table's slice maps this much of the disk.
const SLICE: u64 = (1024 / 8) << 16;

/// With too few frames an entry is first read alone, and remembered apart from its slice: not for
/// longer than it holds.
#[test]
fn an_entry_read_alone_is_not_remembered_when_it_has_changed() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let path = dir.path().join("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", &path.display().to_string(), "64G"]);
    let vbd = open(&path, Some(0));
    let block = |slice: u64, cluster: u64| (slice * SLICE + (cluster << 16)) / BLOCK as u64;
    // Those remembered in places of their own.
    let others: Vec<u64> = (0..400).filter(|slice| slice % 8 != 0).collect();
    let mut tasks = Tasks::new(Box::new(Ring::new().expect("a ring")));
    let io = tasks.io().clone();
    let all = async move {
        for slice in others.iter().chain([&0]) {
            for cluster in [0, 5] {
                write(&vbd, &io, block(*slice, cluster)).await.expect("written");
            }
        }
        let away = async || {
            vbd.flush(&io).await.expect("flushed");
            for slice in &others {
                for cluster in [0, 5] {
                    assert!(holds(&vbd, &io, block(*slice, cluster)).await.expect("read"));
                }
            }
        };
        for _ in 0..3 {
            away().await;
            assert!(holds(&vbd, &io, block(0, 0)).await.expect("read"));
            discard_cluster(&vbd, &io, block(0, 0)).await.expect("discarded");
            // It is given another cluster than it had, which is not free yet.
            write(&vbd, &io, block(0, 0)).await.expect("written");
            away().await;
            away().await;
            assert!(holds(&vbd, &io, block(0, 0)).await.expect("read"), "an old entry");
        }
    };
    tasks.block_on(all).expect("the ring turns");
}

/// The largest disks that qemu-img makes, written by us and read by QEMU. Writes to them hung for ever.
#[test]
fn the_largest_disks_are_written() {
    let (done, all) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for (options, size) in [
            ("cluster_size=512", 1 << 37),
            ("cluster_size=64k", 1 << 51),
            ("cluster_size=512k", 1 << 57),
            ("cluster_size=1M", 1 << 59),
            ("cluster_size=2M", 1 << 61),
            ("cluster_size=2M,extended_l2=on", 1 << 60),
        ] {
            try_largest(options, size);
        }
        done.send(()).expect("it is waited for");
    });
    let end = all.recv_timeout(std::time::Duration::from_secs(120));
    assert!(end.is_ok(), "a disk hangs, or see above");
}

fn try_largest(options: &str, size: u64) {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let path = dir.path().join("image.qcow2");
    let text = path.display().to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &text, &size.to_string()]);
    let len = 4 << 20;
    // At the disk's end, too, and across the border of two tables.
    let places = [4096, size / 2 - len / 2, size / 8 * 5 + 512, size - len];
    let vbd = open(&path, None);
    let mut tasks = Tasks::new(Box::new(Ring::new().expect("a ring")));
    let io = tasks.io().clone();
    let all = async move {
        for (byte, offset) in (1..).zip(places) {
            let mut buffer = io.buffer(len as usize).expect("memory");
            buffer.bytes_mut().fill(byte);
            let mem = buffer.mem();
            let write = Request { kind: Kind::Write, offset, len, mem, fua: false };
            vbd.serve(&io, write).await.expect("written");
        }
        let (offset, len, mem) = (places[1], len / 2, Mem::EMPTY);
        let kind = Kind::WriteZeroes { unmap: true, fast: false };
        vbd.serve(&io, Request { kind, offset, len, mem, fua: false }).await.expect("zeroed");
        vbd.flush(&io).await.expect("flushed");
        vbd.close(&io).await.expect("closed");
    };
    tasks.block_on(all).expect("the ring turns");
    qemu_img(&["check", "-q", "-f", "qcow2", &text]);
    let options = OpenOptions::default();
    let container = ringtap_image::Container::open(&path, &options).expect("an image");
    let report = ringtap_image::on_a_ring(&path, |io| async move {
        ringtap_image::qcow2::check(&io, &container, ringtap_image::qcow2::Repair::Nothing).await
    });
    let report = report.expect("a ring").expect("checked");
    assert!(report.is_clean(), "{size} bytes: {report:?}");
    let mut reads = vec!["-r".to_owned(), "-f".to_owned(), "qcow2".to_owned(), text];
    for (byte, offset) in [1, 2, 3, 4].into_iter().zip(places) {
        let (zeros, rest) = if byte == 2 { (len / 2, len / 2) } else { (0, len) };
        for (byte, offset, len) in [(0, offset, zeros), (byte, offset + zeros, rest)] {
            reads.extend(["-c".to_owned(), format!("read -P {byte} {offset} {len}")]);
        }
    }
    let end = Command::new("timeout").arg("60").arg("qemu-io").args(&reads).output();
    let end = end.expect("qemu-io runs");
    let said = String::from_utf8_lossy(&end.stdout).into_owned();
    assert!(end.status.success() && !said.contains("failed"), "{size} bytes: {said}");
}
