//! What waits until a descriptor can be read from or written to: epoll, told once of each descriptor, and
//! edge by edge, so that who is to wait tries first.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

use crate::{Alarm, File, Key, Op, Time};

/// The doorbell's own event.
const DOORBELL: u64 = u64::MAX;
/// Events that are taken at once.
const EVENTS: usize = 64;

pub(super) struct Doorbell(OwnedFd);

impl Alarm for Doorbell {
    fn ring(&self) {
        // Nobody reads it: each write is an edge. It cannot be full before 2^64 of them.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

pub(super) struct Waits {
    epoll: OwnedFd,
    doorbell: Arc<Doorbell>,
    rung: bool,
    /// The files that epoll was told of, and whether it takes them.
    told: HashMap<u64, bool>,
    waiting: Vec<(File, Key, Op)>,
    /// Files with an event that nobody has looked at.
    ready: Vec<u64>,
    events: Vec<epoll::Event>,
}

fn name_of(file: File) -> u64 {
    u64::from(file.generation()) << 32 | u64::from(file.slot())
}

impl Waits {
    pub(super) fn new() -> io::Result<Waits> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let edges = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, &event, EventData::new_u64(DOORBELL), edges)?;
        Ok(Waits {
            epoll,
            doorbell: Arc::new(Doorbell(event)),
            rung: false,
            told: HashMap::new(),
            waiting: Vec::new(),
            ready: Vec::new(),
            events: Vec::with_capacity(EVENTS),
        })
    }

    pub(super) fn doorbell(&self) -> Arc<Doorbell> {
        self.doorbell.clone()
    }

    pub(super) fn take_rung(&mut self) -> bool {
        std::mem::take(&mut self.rung)
    }

    /// Whether it is told when the file can be read from or written to; files on a disk cannot be waited for.
    pub(super) fn watches(&mut self, file: File, fd: RawFd) -> io::Result<bool> {
        let name = name_of(file);
        if let Some(told) = self.told.get(&name) {
            return Ok(*told);
        }
        // Handles of files that are gone; their descriptors epoll forgets by itself.
        self.told.retain(|other, _| *other as u32 != file.slot());
        // SAFETY: the descriptor is open while the file's `OpenFile` lives, which outlives its operations.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let edges = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let data = EventData::new_u64(name);
        let told = match epoll::add(&self.epoll, fd, data, edges) {
            // The same open file under the same number as another that was closed here.
            Err(rustix::io::Errno::EXIST) => epoll::modify(&self.epoll, fd, data, edges),
            told => told,
        };
        let takes = match told {
            Ok(()) => true,
            Err(rustix::io::Errno::PERM) => false,
            Err(error) => return Err(error.into()),
        };
        self.told.insert(name, takes);
        Ok(takes)
    }

    /// An operation waits for the next event of its file, which it has tried before.
    pub(super) fn add(&mut self, file: File, key: Key, op: Op) {
        self.waiting.push((file, key, op));
    }

    pub(super) fn cancel(&mut self, key: Key) -> bool {
        let place = self.waiting.iter().position(|(_, other, _)| *other == key);
        place.inspect(|place| _ = self.waiting.swap_remove(*place)).is_some()
    }

    pub(super) fn cancel_file(&mut self, file: File, ended: &mut Vec<Key>) {
        self.waiting.retain(|(other, key, _)| {
            let stays = *other != file;
            ended.extend((!stays).then_some(*key));
            stays
        });
    }

    /// Sleep until there are events, at most for so long.
    pub(super) fn wait(&mut self, limit: Option<Time>) -> io::Result<()> {
        let limit = limit.map(|nanos| Timespec {
            tv_sec: (nanos / 1_000_000_000) as i64,
            tv_nsec: (nanos % 1_000_000_000) as _,
        });
        self.events.clear();
        let spare = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(self.epoll.as_fd(), spare, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in self.events.drain(..) {
            match event.data.u64() {
                DOORBELL => self.rung = true,
                name => self.ready.push(name),
            }
        }
        Ok(())
    }

    /// Those that wait for files with events; they wait no more.
    pub(super) fn take_ready(&mut self, to: &mut Vec<(File, Key, Op)>) {
        for name in self.ready.drain(..) {
            self.waiting.retain(|one| {
                let stays = name_of(one.0) != name;
                to.extend((!stays).then_some(*one));
                stays
            });
        }
    }
}
