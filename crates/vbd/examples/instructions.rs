//! Serves requests of 4 KiB and nothing else, for a tool that counts the instructions that takes:
//!
//!     valgrind --tool=callgrind --callgrind-out-file=/dev/null target/release/examples/instructions raw-read 200000
//!
//! Every operation completes at once, so that what is counted is this program's own. What one request takes
//! is the difference of two counts, by the difference of their requests.

use std::io;

use ringtap_image::qcow2::{CreateOptions, Parts, Qcow2, create};
use ringtap_image::{CacheMode, Container, Image, Null, Raw, Traits};
use ringtap_io::{File, Key, Op, Reactor, Tasks, Time};
use ringtap_sim::{Chances, Disk, Sim};
use ringtap_vbd::{Kind, Request, Vbd};

const LEN: u64 = 4096;
const SIZE: u64 = 64 << 20;

/// A disk on which nothing takes time.
struct AtOnce;

impl Reactor for AtOnce {
    fn turn(
        &mut self,
        submit: &mut Vec<(Key, Op)>,
        done: &mut Vec<(Key, i32)>,
        _: bool,
    ) -> io::Result<()> {
        done.extend(submit.drain(..).map(|(key, op)| match op {
            Op::Read { mem, .. } | Op::Write { mem, .. } => (key, mem.len() as i32),
            _ => (key, 0),
        }));
        Ok(())
    }

    fn now(&self) -> Time {
        0
    }
}

/// A qcow2 image all of whose clusters are there.
fn qcow2() -> Box<dyn Image> {
    let disk = Disk::new(512);
    let container = Container::simulated(disk.add_file(0, 1), 0, Traits::FILE);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 5).chances(Chances::NEVER)));
    let io = tasks.io().clone();
    let image = tasks.block_on(async move {
        let options = CreateOptions { size: SIZE, ..Default::default() };
        let header = create(&io, &container, None, &options).await.expect("made");
        let image = Qcow2::open(&io, container, header, Parts::default()).await.expect("opened");
        let vbd = Vbd::new(image.fork(), CacheMode::Writeback);
        let buffer = io.buffer(1 << 20).expect("memory");
        for offset in (0..SIZE).step_by(1 << 20) {
            let (len, mem) = (1 << 20, buffer.mem());
            let request = Request { kind: Kind::Write, offset, len, mem, fua: false };
            vbd.serve(&io, request).await.expect("written");
        }
        vbd.flush(&io).await.expect("flushed");
        image
    });
    Box::new(image.expect("the simulation runs"))
}

fn main() {
    let mut args = std::env::args().skip(1);
    let (what, count) = (args.next().expect("what"), args.next().expect("how many"));
    let count: u64 = count.parse().expect("a number");
    let raw = || Raw::new(Container::simulated(File::from_parts(0, 0), SIZE, Traits::FILE));
    let (image, kind): (Box<dyn Image>, Kind) = match &*what {
        "null-write" => (Box::new(Null::new(SIZE, false)), Kind::Write),
        "raw-read" => (Box::new(raw()), Kind::Read),
        "raw-write" => (Box::new(raw()), Kind::Write),
        "qcow2-read" => (qcow2(), Kind::Read),
        "qcow2-write" => (qcow2(), Kind::Write),
        other => {
            panic!("{other} is none of null-write, raw-read, raw-write, qcow2-read, qcow2-write")
        }
    };
    let mut tasks = Tasks::new(Box::new(AtOnce));
    let (io, vbd) = (tasks.io().clone(), Vbd::new(image, CacheMode::Writeback));
    let served = tasks.block_on(async move {
        let buffer = io.buffer(LEN as usize).expect("memory");
        let mut offset = 0;
        for _ in 0..count {
            let request = Request { kind, offset, len: LEN, mem: buffer.mem(), fua: false };
            vbd.serve(&io, request).await.expect("served");
            // All over the disk, aligned.
            offset = (offset + 37 * LEN) % SIZE;
        }
    });
    served.expect("nothing fails");
}
