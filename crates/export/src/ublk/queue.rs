//! One queue of a ublk device as a [`Queue`]: a slot's answer and its next request are one command.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;

use ringtap_io::{Io, Op, OpenFile};
use ringtap_vbd::{Error, Kind, Request};

use super::descriptors::Descriptors;
use super::wire::{COMMIT_AND_FETCH, FETCH, io_command};
use crate::arena::Arena;
use crate::queue::Queue;

/// A queue being served. All of it belongs to one thread.
pub(crate) struct UblkQueue {
    io: Io,
    device: Arc<OpenFile>,
    index: u16,
    descriptors: Descriptors,
    arena: Arena,
    slots: RefCell<Vec<Slot>>,
    under_way: Cell<usize>,
    failed: Cell<Option<i32>>,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// What its request is answered with when it ends well: the bytes moved.
    moved: i32,
    /// The answer; none before the first request.
    answer: Option<i32>,
}

impl UblkQueue {
    pub(crate) fn new(
        io: Io,
        device: Arc<OpenFile>,
        index: u16,
        depth: u16,
        most_bytes: usize,
    ) -> io::Result<UblkQueue> {
        Ok(UblkQueue {
            io,
            descriptors: Descriptors::map(&*device, index, depth)?,
            arena: Arena::new(depth.into(), most_bytes)?,
            device,
            index,
            slots: RefCell::new(vec![Slot::default(); depth.into()]),
            under_way: Cell::new(0),
            failed: Cell::new(None),
        })
    }

    /// Requests fetched and not answered.
    pub(crate) fn under_way(&self) -> usize {
        self.under_way.get()
    }

    /// The errno by which the driver refused a command, should it have.
    pub(crate) fn failed(&self) -> Option<i32> {
        self.failed.get()
    }

    /// The request that a slot's fetch has brought.
    fn fetched(&self, tag: u16) -> Result<Request, Error> {
        let asked = self.descriptors.get(tag).parse(self.arena.each())?;
        let moves = matches!(asked.kind, Kind::Read | Kind::Write);
        let len = if moves { asked.len as usize } else { 0 };
        if let Some(slot) = self.slots.borrow_mut().get_mut(usize::from(tag)) {
            slot.moved = len as i32;
        }
        Ok(Request {
            kind: asked.kind,
            offset: asked.offset,
            len: asked.len,
            mem: self.arena.mem(tag.into(), len),
            fua: asked.fua,
        })
    }
}

impl Queue for UblkQueue {
    async fn next(&self, tag: u16) -> Option<Request> {
        loop {
            let slot = *self.slots.borrow().get(usize::from(tag))?;
            let (command, result) = match slot.answer {
                None => (FETCH, 0),
                Some(result) => (COMMIT_AND_FETCH, result),
            };
            let address = self.arena.address(tag.into());
            let payload = io_command(self.index, tag, result, address);
            let file = self.device.handle();
            match self.io.run(Op::Command { file, command, payload }).await {
                0 => {}
                end if -end == libc::ENODEV => return None,
                end => {
                    self.failed.set(Some(-end));
                    return None;
                }
            }
            match self.fetched(tag) {
                Ok(request) => {
                    self.under_way.set(self.under_way.get() + 1);
                    return Some(request);
                }
                Err(error) => {
                    let mut slots = self.slots.borrow_mut();
                    slots[usize::from(tag)].answer = Some(-error.errno());
                }
            }
        }
    }

    fn reply(&self, tag: u16, end: Result<(), Error>) {
        self.under_way.set(self.under_way.get() - 1);
        if let Some(slot) = self.slots.borrow_mut().get_mut(usize::from(tag)) {
            slot.answer = Some(end.map_or_else(|error| -error.errno(), |()| slot.moved));
        }
    }
}
