//! An image that is replaced by an overlay on itself over and over, under a guest of Xen that checks what it reads: as in
//! tests/tests/xen/replaced.rs, in one process and many times.
//!
//! `RINGTAP_REPLACEMENTS` sets how often; after every 32 the overlays are merged while the disk stands still.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Instant;

use ringtap_image::{Place, qcow2};
use ringtap_io::Io;
use ringtap_tests::replacements::{LEVELS, Pauses, wanted};

use super::*;

const BLOCKS: u64 = SIZE / PAGE as u64;
/// Requests at a time.
const LOT: u64 = 8;
const MINUTE: u64 = 60_000_000_000;

/// Ends the load, also where the test fails.
struct Enough<'a>(&'a AtomicBool);

impl Drop for Enough<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// Write lots of blocks and read others back, until it is enough; then all of them. Gives how many were read.
fn check_as_a_guest(vbd: Vbd, enough: &AtomicBool) -> u64 {
    let abi = Abi::Wide;
    let mut front = Frontend::new(abi).expect("memory");
    let mut back = Backend::new(&front, vbd, None, true, 0).expect("a ring");
    let mut holds = vec![0u8; BLOCKS as usize];
    let (mut lot, mut read) = (0, 0);
    let grant = |n: u64| 1 + n as u32;
    let mut last = 0;
    while last < BLOCKS {
        if enough.load(SeqCst) {
            last += LOT;
        }
        let is_over = last > 0;
        let now = lot;
        let block = |n: u64| match is_over {
            true => last - LOT + n,
            false => (now * 61 + n * 7) % BLOCKS,
        };
        if !is_over {
            for n in 0..LOT {
                let byte = 1 + ((lot + n) % 250) as u8;
                holds[block(n) as usize] = byte;
                front.fill(grant(n), byte);
                front.put(&transfer(abi, WRITE, n, block(n), &[grant(n)]));
            }
            if lot % 8 == 0 {
                front.put(&request(abi, [FLUSH, 0, 0, 0], LOT, 0, &[]));
            }
            back.serve().expect("a sound ring");
            assert!(front.take().iter().all(|answer| answer.status == 0), "a write failed");
            lot += 1;
        }
        (0..LOT).for_each(|n| front.put(&transfer(abi, READ, n, block(n), &[grant(n)])));
        back.serve().expect("a sound ring");
        let answers = front.take();
        let well = answers.iter().filter(|answer| answer.status == 0).count() as u64;
        assert_eq!(well, LOT, "{answers:?}");
        for n in 0..LOT {
            let (found, wanted) = (front.page(grant(n)), holds[block(n) as usize]);
            assert!(found.iter().all(|byte| *byte == wanted), "block {}: {wanted}", block(n));
        }
        read += LOT;
    }
    read
}

fn qemu_img(args: &[&str]) {
    assert!(Command::new("qemu-img").args(args).status().expect("qemu-img").success(), "{args:?}");
}

fn options(format: Format) -> OpenOptions {
    let cache = CacheMode::Writeback;
    OpenOptions { format: Some(format), cache, ..OpenOptions::default() }
}

/// Puts overlays on the image, and merges them.
struct Operator {
    io: Io,
    vbd: Vbd,
    dir: PathBuf,
    /// The images, the deepest first.
    chain: Vec<PathBuf>,
    /// How many overlays held something.
    held: usize,
    pauses: Pauses,
}

impl Operator {
    async fn overlay(&mut self, name: String) {
        let (below, path) = (self.chain.last().expect("an image"), self.dir.join(name));
        let format = if self.chain.len() == 1 { "raw" } else { "qcow2" };
        let [base, file] = [below, &path].map(|path| path.display().to_string());
        qemu_img(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", format, &file]);
        let empty = path.metadata().expect("the overlay").len();
        let current = self.vbd.disk().image().expect("an image");
        let place = Place::from(&path);
        let image = qcow2::open_upon(&self.io, &place, &options(Format::Qcow2), current).await;
        let image = image.expect("an overlay");
        let began = Instant::now();
        let still = self.vbd.quiesce(&self.io, MINUTE).await.expect("requests end");
        let drain = began.elapsed();
        let former = still.overlay(image).expect("it takes the image's place");
        drop(still);
        let [pause, drain] = [began.elapsed(), drain].map(|time| time.as_nanos() as u64);
        self.pauses.add_one(pause, drain);
        former.settle(&self.io).await.expect("stable");
        self.io.sleep(2_000_000).await;
        self.held += usize::from(path.metadata().expect("the overlay").len() > empty);
        self.chain.push(path);
    }

    async fn merge(&mut self, name: String) {
        let (top, path) = (self.chain.last().expect("an image"), self.dir.join(name));
        let [from, to] = [top, &path].map(|path| path.display().to_string());
        let still = self.vbd.quiesce(&self.io, MINUTE).await.expect("requests end");
        let before = still.image().expect("an image");
        before.flush(&self.io).await.expect("stable");
        qemu_img(&["convert", "-U", "-f", "qcow2", "-O", "raw", &from, &to]);
        let merged = open(&path, &options(Format::Raw)).expect("an image");
        drop(still.replace(merged).expect("it takes the overlays' place"));
        drop(still);
        before.close(&self.io).await.expect("closed");
        drop(before);
        for old in std::mem::replace(&mut self.chain, vec![path]) {
            std::fs::remove_file(old).expect("removed");
        }
    }
}

#[test]
fn an_image_is_replaced_over_and_over() {
    let wanted = wanted(LEVELS + LEVELS / 4);
    let dir = tempfile::tempdir().expect("a folder");
    let vbd = disk(dir.path());
    let enough = AtomicBool::new(false);
    let (read, held) = thread::scope(|scope| {
        let theirs = vbd.fork();
        let load = scope.spawn(|| check_as_a_guest(theirs, &enough));
        let over = Enough(&enough);
        let mut tasks = Tasks::new(ringtap_io::reactor().expect("a reactor"));
        let chain = vec![dir.path().join("disk")];
        let io = tasks.io().clone();
        let (vbd, dir, pauses) = (vbd.fork(), dir.path().into(), Pauses::default());
        let operator = Operator { io, vbd, dir, chain, held: 0, pauses };
        let held = tasks.block_on(replace(operator, wanted)).expect("the reactor");
        drop(over);
        (load.join().expect("the guest finds what it wrote"), held)
    });
    println!("{wanted} replacements, {held} overlays held something, {read} blocks read back");
    assert!(held > wanted / 4, "of {wanted} overlays {held} were written to");
}

async fn replace(mut operator: Operator, wanted: usize) -> usize {
    for number in 1..=wanted {
        operator.overlay(format!("{number}.qcow2")).await;
        if operator.chain.len() > LEVELS || number == wanted {
            operator.merge(format!("{number}.raw")).await;
        }
    }
    operator.pauses.print("Xen's ring");
    operator.held
}
