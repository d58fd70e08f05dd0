//! The device behind a vhost-user socket, driven by the blkio crate.

use crate::buffers::Buffers;
use crate::engine::{Done, Engine, Op};
use crate::outcome::Outcome;
use crate::{Error, LoadArgs};
use blkio::{Blkio, Blkioq, Completion, Errno, ReqFlags, iovec};
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

/// A server that answers nothing for this long is given up.
const STALL: Duration = Duration::from_secs(30);

/// Connects to `socket`, runs the load, leaves.
pub fn run(args: &LoadArgs, socket: &Path) -> anyhow::Result<Outcome> {
    let failed = |what| {
        let socket = socket.to_path_buf();
        move |source| Error::Blkio { what, socket, source }
    };
    let path = socket
        .to_str()
        .ok_or_else(|| Error::Arguments(format!("--socket {}: not UTF-8", socket.display())))?;

    let mut device =
        Blkio::new("virtio-blk-vhost-user").map_err(failed("cannot load the driver"))?;
    device.set_str("path", path).map_err(failed("cannot set the path"))?;
    device.set_bool("read-only", !args.rw.writes()).map_err(failed("cannot set read-only"))?;
    device.connect().map_err(failed("cannot connect"))?;
    let capacity = device.get_u64("capacity").map_err(failed("cannot read the capacity"))?;
    let segments = device.get_i32("max-segments").map_err(failed("cannot read max-segments"))?;
    check_segments(args, segments)?;

    let queues = args.queues as i32;
    let kind = if args.poll {
        ["num-poll-queues", "num-queues"]
    } else {
        ["num-queues", "num-poll-queues"]
    };
    for (property, value) in [(kind[0], queues), (kind[1], 0), ("queue-size", queue_size(args)?)] {
        device.set_i32(property, value).map_err(failed("cannot set up queues"))?;
    }
    let started = device.start().map_err(failed("cannot start queues"))?;
    let started = if args.poll { started.poll_queues } else { started.queues };

    // One region for all queues: a guest's memory is one region too.
    let bs = args.bs as usize;
    let share = Buffers::bytes(bs, args.depth);
    let region =
        device.alloc_mem_region(share * started.len()).map_err(failed("cannot allocate memory"))?;
    device.map_mem_region(&region).map_err(failed("cannot share memory"))?;

    let builders = started
        .into_iter()
        .enumerate()
        .map(|(i, queue)| {
            let base = NonNull::new((region.addr + i * share) as *mut u8);
            // SAFETY: the region is page-aligned memory of blkio's, `share` bytes of it are this
            // queue's alone, and `device`, which frees it, outlives the threads.
            let buffers = base.map(|base| unsafe { Buffers::within(base, bs, args.depth) });
            let segment = args.segment.unwrap_or(args.bs) as usize;
            let socket = socket.to_path_buf();
            move || {
                let buffers = buffers.ok_or_else(|| Error::Arguments("no memory".into()))?;
                Ok(VhostUser::new(queue, buffers, segment, args.depth, socket))
            }
        })
        .collect();
    let tally = crate::drive(args, capacity, builders)?;
    drop(device);

    let wait = if args.poll { "polling" } else { "eventfd" };
    let driver = format!("blkio virtio-blk-vhost-user, {wait}");
    Ok(Outcome::new(args, driver, socket.display().to_string(), tally))
}

/// The virtqueue size: asked for, or 256 as QEMU's client, or what the depth needs.
fn queue_size(args: &LoadArgs) -> Result<i32, Error> {
    let needed = args.depth as u64 * args.descriptors();
    let size = match args.queue_size {
        Some(size) => u64::from(size),
        // Beyond 1024 few servers go; what does not fit waits in blkio.
        None => needed.next_power_of_two().clamp(256, 1024),
    };
    if size < args.descriptors() {
        return Err(Error::Arguments(format!(
            "a request of {} segments needs {} descriptors and the queue has {size}: raise --queue-size or --segment",
            args.descriptors() - 2,
            args.descriptors()
        )));
    }
    Ok(size as i32)
}

fn check_segments(args: &LoadArgs, most: i32) -> Result<(), Error> {
    let asked = args.descriptors() - 2;
    if asked > most.max(1) as u64 {
        return Err(Error::Arguments(format!(
            "the server takes {most} segments per request and --segment makes {asked}"
        )));
    }
    Ok(())
}

struct VhostUser {
    queue: Blkioq,
    buffers: Buffers,
    // blkio keeps pointers into these lists while a request is in flight.
    segments: Vec<Box<[iovec]>>,
    completions: Vec<MaybeUninit<Completion>>,
    in_flight: usize,
    socket: PathBuf,
}

// SAFETY: the iovecs point into `buffers`, which may itself move to another thread, and are only
// read through `queue`, which moves along.
unsafe impl Send for VhostUser {}

impl VhostUser {
    fn new(
        queue: Blkioq,
        buffers: Buffers,
        segment: usize,
        depth: usize,
        socket: PathBuf,
    ) -> VhostUser {
        let scatter = |slot| -> Box<[iovec]> {
            let piece = |start: usize| iovec {
                iov_base: buffers.pointer(slot).wrapping_add(start).cast(),
                iov_len: segment.min(buffers.len() - start),
            };
            (0..buffers.len()).step_by(segment).map(piece).collect()
        };
        VhostUser {
            segments: (0..depth).map(scatter).collect(),
            completions: (0..depth).map(|_| MaybeUninit::uninit()).collect(),
            in_flight: 0,
            queue,
            buffers,
            socket,
        }
    }
}

impl Engine for VhostUser {
    fn list(&mut self, slot: usize, op: Op, offset: u64) {
        self.in_flight += 1;
        let none = ReqFlags::empty();
        let (buffer, len) = (self.buffers.pointer(slot), self.buffers.len());
        let list = &self.segments[slot];
        let (segments, count) = (list.as_ptr(), list.len() as u32);
        match op {
            Op::Flush => self.queue.flush(slot, none),
            Op::Read if count == 1 => self.queue.read(offset, buffer, len, slot, none),
            Op::Write if count == 1 => self.queue.write(offset, buffer, len, slot, none),
            Op::Read => self.queue.readv(offset, segments, count, slot, none),
            Op::Write => self.queue.writev(offset, segments, count, slot, none),
        }
    }

    fn turn(&mut self, done: &mut Vec<Done>) -> Result<(), Error> {
        let begin = Instant::now();
        loop {
            let mut wait = Duration::from_secs(1);
            match self.queue.do_io(&mut self.completions, 1, Some(&mut wait), None) {
                Ok(count) => {
                    self.in_flight -= count;
                    done.extend(self.completions[..count].iter().map(|completion| {
                        // SAFETY: do_io has filled the first `count` entries.
                        let completion = unsafe { completion.assume_init_ref() };
                        Done { slot: completion.user_data, result: completion.ret }
                    }));
                    return Ok(());
                }
                Err(e) if e.errno() == Errno::INTR => {}
                Err(e) if e.errno() == Errno::TIME && begin.elapsed() < STALL => {}
                Err(e) if e.errno() == Errno::TIME => {
                    return Err(Error::Stalled {
                        target: self.socket.display().to_string(),
                        in_flight: self.in_flight,
                        seconds: STALL.as_secs(),
                    });
                }
                Err(source) => {
                    let socket = self.socket.clone();
                    return Err(Error::Blkio { what: "cannot carry on", socket, source });
                }
            }
        }
    }

    fn buffers(&mut self) -> &mut Buffers {
        &mut self.buffers
    }
}
