//! One queue of a ublk device as a [`Queue`]: a slot's answer and its next request are one command.
//!
//! Without zero copy the driver copies a request's bytes to and from the slot's memory. With it the
//! request's own pages are registered with this thread's ring, at the slot's place; where somebody
//! must look at the bytes after all (a hole, a cluster in part) they are copied here, through the
//! device's file.
//!
//! All of that memory is there before the first request. Short of memory, the kernel writes pages out
//! to this very device, and a page that the server would have to ask for then might never come.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use ringtap_io::{Io, Mem, Op, OpenFile, Signal};
use ringtap_vbd::{Error, Kind, Request, Vbd};

use super::descriptors::Descriptors;
use super::pieces::Pieces;
use super::wire::{COMMIT_AND_FETCH, DeviceInfo, FETCH, bytes_of, io_command, register_at};
use crate::arena::Arena;
use crate::queue::Queue;

/// With zero copy so many requests of a queue may be copied at a time; others wait.
const COPIES: usize = 16;

/// A queue being served. All of it belongs to one thread.
pub(crate) struct UblkQueue {
    io: Io,
    vbd: Rc<Vbd>,
    device: Arc<OpenFile>,
    index: u16,
    zero_copy: bool,
    descriptors: Descriptors,
    /// A piece a slot; with zero copy those that `pieces` gives out.
    arena: Arena,
    pieces: Pieces,
    slots: RefCell<Vec<Slot>>,
    in_flight: Cell<usize>,
    reads: Cell<usize>,
    /// Slots that have asked for a request.
    fetching: Cell<usize>,
    /// Slots that keep their answers until the thread leaves.
    holding: Cell<usize>,
    leaving: Cell<Leaving>,
    left_now: Signal,
    failed: Cell<Option<i32>>,
    /// Slots whose tasks a panic has ended.
    left: RefCell<Vec<u16>>,
}

/// Whether the thread lets go of the device.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Leaving {
    #[default]
    No,
    /// Once what it has is served. No slot asks for more.
    Soon,
    /// With the next call of the ring.
    Now,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// What its request is answered with when it ends well: the bytes moved.
    moved: i32,
    /// The answer; none before the first request.
    answer: Option<i32>,
    /// Whether its request is a read.
    is_read: bool,
    /// Whether the bytes that were read have still to be copied to the request's pages.
    copies: bool,
    /// The piece it was given for that, with zero copy.
    piece: Option<usize>,
}

fn pieces_of(info: &DeviceInfo) -> usize {
    let slots = usize::from(info.depth);
    if info.is_zero_copy() { slots.min(COPIES) } else { slots }
}

impl UblkQueue {
    /// The memory of one.
    pub(crate) fn arena(info: &DeviceInfo) -> io::Result<Arena> {
        let arena = Arena::new(pieces_of(info), info.most_bytes as usize)?;
        arena.bring_in()?;
        Ok(arena)
    }

    /// Queue `index` of `device`, with its memory.
    pub(crate) fn new(
        io: Io,
        vbd: Rc<Vbd>,
        device: Arc<OpenFile>,
        index: u16,
        info: &DeviceInfo,
        arena: Arena,
    ) -> io::Result<UblkQueue> {
        let depth = info.depth;
        let (slots, pieces) = (usize::from(depth), pieces_of(info));
        Ok(UblkQueue {
            io,
            vbd,
            zero_copy: info.is_zero_copy(),
            descriptors: Descriptors::map(&*device, index, depth)?,
            arena,
            pieces: Pieces::new(pieces, slots),
            device,
            index,
            slots: RefCell::new(vec![Slot::default(); slots]),
            in_flight: Cell::new(0),
            reads: Cell::new(0),
            fetching: Cell::new(0),
            holding: Cell::new(0),
            leaving: Cell::default(),
            left_now: Signal::default(),
            failed: Cell::new(None),
            left: RefCell::default(),
        })
    }

    /// Requests fetched and not answered.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.get()
    }

    /// How many of them are reads.
    pub(crate) fn reads(&self) -> usize {
        self.reads.get()
    }

    /// From now on no slot asks for another request; answers are kept. So it ends, however many requests wait, and none is
    /// taken that is not answered: at the end each slot asks for one, as it has all along or with its answer.
    pub(crate) fn leave_soon(&self) {
        if self.leaving.get() == Leaving::No {
            self.leaving.set(Leaving::Soon);
        }
    }

    /// Whether it is to be left, all that was taken is served, and nothing is in flight but what slots have asked for.
    pub(crate) fn may_leave(&self, tasks: usize) -> bool {
        let fetching = self.fetching.get();
        self.leaving.get() == Leaving::Soon
            && self.in_flight.get() == 0
            && self.io.in_flight() == fetching
            && tasks == fetching + self.holding.get()
    }

    /// Have all answers given that were kept.
    pub(crate) fn leave_now(&self) {
        self.leaving.set(Leaving::Now);
        self.left_now.notify(&self.io);
    }

    /// Until the thread leaves, where it is about to.
    async fn keep_answer(&self) {
        if self.leaving.get() != Leaving::Soon {
            return;
        }
        self.holding.set(self.holding.get() + 1);
        while self.leaving.get() == Leaving::Soon {
            self.left_now.wait(&self.io).await;
        }
        self.holding.set(self.holding.get() - 1);
    }

    /// The errno by which the driver refused a command, should it have.
    pub(crate) fn failed(&self) -> Option<i32> {
        self.failed.get()
    }

    /// Slots whose tasks a panic has ended: their requests have failed, and the next tasks say so.
    pub(crate) fn take_left(&self) -> Vec<u16> {
        let left = self.left.take();
        for tag in &left {
            self.change(*tag, |slot| {
                (slot.answer, slot.copies) = (Some(-libc::EIO), false);
                if let Some(piece) = slot.piece.take() {
                    self.pieces.give_back(&self.io, piece);
                }
            });
        }
        left
    }

    fn change(&self, tag: u16, change: impl FnOnce(&mut Slot)) {
        if let Some(slot) = self.slots.borrow_mut().get_mut(usize::from(tag)) {
            change(slot);
        }
    }

    /// The request that a slot's fetch has brought, and whether its bytes must be copied here.
    fn fetched(&self, tag: u16) -> Result<(Request, bool), Error> {
        let asked = self.descriptors.get(tag).parse(self.arena.each())?;
        let moves = matches!(asked.kind, Kind::Read | Kind::Write);
        let len = if moves { asked.len as usize } else { 0 };
        self.change(tag, |slot| (slot.moved, slot.copies) = (len as i32, false));
        let untouched = |vbd: &Vbd| vbd.moves_untouched(asked.kind, asked.offset, asked.len);
        let (mem, copies) = match self.zero_copy {
            false => (self.arena.mem(tag.into(), len), false),
            true if !moves => (self.arena.mem(0, 0), false),
            true => (Mem::of_kernel(tag, len), !(asked.registered && untouched(&self.vbd))),
        };
        let (kind, offset, len, fua) = (asked.kind, asked.offset, asked.len, asked.fua);
        Ok((Request { kind, offset, len, mem, fua }, copies))
    }

    /// The request with memory that can be looked at: a write's bytes are there, a read's are copied
    /// with the answer.
    async fn copied(&self, tag: u16, request: Request) -> Result<Request, Error> {
        let piece = self.pieces.take(&self.io, tag.into()).await;
        self.change(tag, |slot| slot.piece = Some(piece));
        let mem = self.arena.mem(piece, request.len as usize);
        if request.kind == Kind::Write {
            let at = bytes_of(self.index, tag);
            self.arena.read_at(piece, &*self.device, at, mem.len()).map_err(os)?;
        } else {
            self.change(tag, |slot| slot.copies = true);
        }
        Ok(Request { mem, ..request })
    }

    /// Copy what was read to the request's pages, where that was left to us.
    fn copy_back(&self, tag: u16, slot: &Slot) -> Result<(), Error> {
        match slot.piece {
            Some(piece) if slot.copies => {
                let at = bytes_of(self.index, tag);
                self.arena.write_at(piece, &*self.device, at, slot.moved as usize).map_err(os)
            }
            _ => Ok(()),
        }
    }
}

fn os(error: io::Error) -> Error {
    Error::Os(error.raw_os_error().unwrap_or(libc::EIO))
}

impl Queue for UblkQueue {
    async fn next(&self, tag: u16) -> Option<Request> {
        loop {
            let slot = *self.slots.borrow().get(usize::from(tag))?;
            if slot.answer.is_some() {
                self.keep_answer().await;
            }
            let (command, result) = match slot.answer {
                None => (FETCH, 0),
                Some(result) => (COMMIT_AND_FETCH, result),
            };
            let address = if self.zero_copy { 0 } else { self.arena.address(tag.into()) };
            let payload = io_command(self.index, tag, result, address);
            let file = self.device.handle();
            let buffer = self.zero_copy.then(|| register_at(tag));
            self.fetching.set(self.fetching.get() + 1);
            let end = self.io.run(Op::Command { file, command, payload, buffer }).await;
            self.fetching.set(self.fetching.get() - 1);
            match end {
                0 => {}
                end if -end == libc::ENODEV => return None,
                end => {
                    self.failed.set(Some(-end));
                    return None;
                }
            }
            match self.fetched(tag) {
                Ok((request, copies)) => {
                    self.in_flight.set(self.in_flight.get() + 1);
                    let is_read = request.kind == Kind::Read;
                    self.reads.set(self.reads.get() + usize::from(is_read));
                    self.change(tag, |slot| slot.is_read = is_read);
                    if !copies {
                        return Some(request);
                    }
                    match self.copied(tag, request).await {
                        Ok(request) => return Some(request),
                        Err(error) => self.reply(tag, Err(error)),
                    }
                }
                Err(error) => self.change(tag, |slot| slot.answer = Some(-error.errno())),
            }
        }
    }

    /// Where the bytes of a request lie may have changed since that was looked at.
    async fn instead(&self, tag: u16, request: Request, error: Error) -> Result<Request, Error> {
        match error {
            Error::Unsupported if request.mem.is_kernels() => self.copied(tag, request).await,
            _ => Err(error),
        }
    }

    fn panicked(&self, tag: u16) {
        // Nobody else looks at the list but between panics.
        self.left.borrow_mut().push(tag);
    }

    fn reply(&self, tag: u16, end: Result<(), Error>) {
        self.in_flight.set(self.in_flight.get().saturating_sub(1));
        self.change(tag, |slot| {
            self.reads.set(self.reads.get().saturating_sub(usize::from(slot.is_read)));
            let end = end.and_then(|()| self.copy_back(tag, slot));
            slot.answer = Some(end.map_or_else(|error| -error.errno(), |()| slot.moved));
            if let Some(piece) = slot.piece.take() {
                self.pieces.give_back(&self.io, piece);
            }
        });
    }
}
