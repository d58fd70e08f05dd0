//! Restart logs of arbitrary words: what a killed server left, changed at will. The image opens or is refused, at
//! once; what opens is served.
//!
//! The input: what to change of the log, or of the bits of bitmaps beside it, nine bytes each: which word (one byte,
//! modulo those that were used), and what it becomes.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use bolero::check;
use ringtap_image::qcow2::{self, BitmapChange, CreateOptions, Header, Parts, Qcow2};
use ringtap_image::{CacheMode, Container, Identity, Image, OpenError, RestartLog, Traits, vhd};
use ringtap_io::{File, Io};
use ringtap_sim::Disk;
use ringtap_vbd::{Kind, Request, Vbd};

use common::{Writes, run, use_image};

const IDENTITY: Identity = Identity { boot: 1, file: (2, 3) };
const NOTES: u64 = 40;

type Words = Arc<[AtomicU64]>;

fn zeros(count: usize) -> Words {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

/// Words for the bits of bitmaps, beside the log.
const BESIDE: usize = 128;

/// The memory that a killed server leaves.
#[derive(Clone)]
struct Memory {
    words: Words,
    beside: Words,
}

fn log(memory: &Memory) -> RestartLog {
    let log = RestartLog::with(Arc::new(memory.words.clone()), IDENTITY, u64::MAX);
    log.with_memory(memory.beside.clone())
}

async fn open(
    io: &Io,
    container: Container,
    memory: &Memory,
    of_qcow2: bool,
) -> Result<Box<dyn Image>, OpenError> {
    let log = log(memory).of(&container);
    if of_qcow2 {
        let header = Header::read(io, &container).await?;
        let parts = Parts { restart: Some(log), ..Parts::default() };
        Ok(Box::new(Qcow2::open(io, container, header, parts).await?))
    } else {
        vhd::open_in_with(io, container, None, Some(log)).await
    }
}

/// The file, and when it was written to, for a log to be believed.
fn container(disk: &Disk, file: File) -> Container {
    let times = disk.clone();
    let container = Container::simulated(file, disk.size(file), Traits::FILE);
    let container = container.with_time(move || times.modified(file));
    disk.watch(file, container.witness().clone());
    container
}

/// An image that a killed server left, with changes in its log.
struct Left {
    disk: Disk,
    file: File,
    words: Vec<u64>,
    beside: Vec<u64>,
}

fn leave(of_qcow2: bool) -> Left {
    let disk = Disk::new(512);
    let file = disk.add_file(0, 1);
    let memory = Memory { words: zeros(RestartLog::words_for(NOTES)), beside: zeros(BESIDE) };
    let (server, again) = (memory.clone(), disk.clone());
    let container = move || container(&again, file);
    let made = container.clone();
    run(&disk, move |io| async move {
        if of_qcow2 {
            let options =
                CreateOptions { size: 64 << 10, cluster_size: 1024, ..Default::default() };
            qcow2::create(&io, &made(), None, &options).await.expect("made");
            let bitmap =
                |name: &str| BitmapChange::Add { name: name.into(), granularity: Some(512) };
            let changes = [bitmap("one"), bitmap("another")];
            qcow2::change_bitmaps(&io, &made(), &changes).await.expect("bitmaps");
        } else {
            let options = vhd::CreateOptions {
                size: 64 << 10,
                kind: vhd::Kind::Dynamic,
                force_size: true,
                block_size: Some(4096),
                parent: None,
                id: Some([1; 16]),
            };
            vhd::create(&io, &made(), &options).await.expect("made");
        }
    });
    run(&disk, move |io| async move {
        let vbd = Vbd::new(
            open(&io, container(), &server, of_qcow2).await.expect("opened"),
            CacheMode::None,
        );
        for place in 0..8u64 {
            let mut buffer = io.buffer(1024).expect("memory");
            buffer.bytes_mut().fill(place as u8 + 1);
            let (offset, len, mem) = (place * 6144, 1024, buffer.mem());
            let request = Request { kind: Kind::Write, offset, len, mem, fua: false };
            vbd.serve(&io, request).await.expect("written");
            if place == 3 {
                let flush = Request { kind: Kind::Flush, offset: 0, len: 0, ..request };
                vbd.serve(&io, flush).await.expect("flushed");
            }
        }
    });
    let values = |words: &Words| words.iter().map(|word| word.load(SeqCst)).collect();
    Left { disk, file, words: values(&memory.words), beside: values(&memory.beside) }
}

/// The words, of which some have changed.
fn changed(words: &[u64], input: &[u8]) -> Words {
    let words: Words = words.iter().map(|word| AtomicU64::new(*word)).collect();
    let used = words.iter().rposition(|word| word.load(SeqCst) != 0).map_or(1, |last| last + 1);
    for change in input.chunks_exact(9) {
        let [place, value @ ..] = change else { continue };
        let value = u64::from_le_bytes(value.try_into().expect("eight bytes"));
        words[usize::from(*place) % used].store(value, SeqCst);
    }
    words
}

fn take_up(left: &Left, of_qcow2: bool, words: &[u8], beside: &[u8]) {
    let words = changed(&left.words, words);
    let memory = Memory { words, beside: changed(&left.beside, beside) };
    if let Some(found) = log(&memory).left() {
        assert!(found.records.len() as u64 <= 2 * NOTES);
    }
    let disk = left.disk.after_kill(1);
    let container = container(&disk, left.file);
    run(&disk, move |io| async move {
        match open(&io, container, &memory, of_qcow2).await {
            // A log that says of two clusters that they are in one place is found out by a walk of the whole
            // image only; nobody but its owner writes there.
            Ok(image) => use_image(&io, image, Writes::MayCross).await,
            Err(error) => assert!(error.to_string().len() > 20, "{error}"),
        }
    });
}

#[test]
fn restart_log_of_qcow2() {
    let left = leave(true);
    check!().with_iterations(300).for_each(|input: &[u8]| take_up(&left, true, input, &[]));
}

#[test]
fn restart_log_of_a_vhd() {
    let left = leave(false);
    check!().with_iterations(300).for_each(|input: &[u8]| take_up(&left, false, input, &[]));
}

#[test]
fn kept_bits_of_bitmaps() {
    let left = leave(true);
    assert_ne!(left.beside[0], 0, "the server left bits");
    check!().with_iterations(300).for_each(|input: &[u8]| take_up(&left, true, &[], input));
}
