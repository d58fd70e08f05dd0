//! One ring as a [`Queue`]: requests handed to slots, bytes copied a turn at a time, answers gathered
//! and published.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use ringtap_io::{Buffer, Io, Mem, Signal};
use ringtap_vbd::{Error, Kind, Refusal, Request, Vbd};

use super::buffer_cache::BufferCache;
use super::copies::Copies;
use super::gntdev::{Foreign, Way};
use super::persistent::PersistentGrants;
use super::record::{Left, Record};
use super::ring::{BackRing, RingError};
use super::wire::{self, Action, Asked, INDIRECT_SEGMENTS, PAGE, SEGMENT, Segment, Status};
use crate::queue::Queue;

/// With so many bytes for its requests a ring takes no more of them: a frontend has no more of this
/// host's memory than that and what one request takes.
pub(super) const MOST_BYTES: usize = 16 << 20;
/// Copied to a guest in one go: it begins with the first answers while others are still copied.
const AT_ONCE: usize = 64 << 10;
/// Bytes of the longest description of segments.
const TABLE: usize = INDIRECT_SEGMENTS * SEGMENT;

/// A ring being served. All of it belongs to one thread.
pub(crate) struct XenQueue<F> {
    io: Io,
    state: RefCell<State<F>>,
    stopping: Cell<bool>,
}

struct State<F> {
    /// Whose log is told of what is refused.
    vbd: Rc<Vbd>,
    ring: BackRing,
    foreign: F,
    /// Pages that stay mapped, where the frontend goes on using the same.
    kept: Option<PersistentGrants>,
    /// Whether discards were offered.
    discards: bool,
    record: Option<Record>,
    /// What a killed server left, to be served first.
    left: VecDeque<Left>,
    slots: Vec<Slot>,
    idle: Vec<u16>,
    /// Slots that are served, to be published.
    ended: Vec<(u16, Status)>,
    /// The slot whose request waits for all others to end, and lets none begin.
    barrier: Option<u16>,
    /// Bytes that the slots' requests may need.
    bytes: usize,
    buffers: BufferCache,
    copies: Copies,
    turn: Turn,
}

/// What one call of [`XenQueue::poll`] works on; kept for its memory.
#[derive(Default)]
struct Turn {
    /// Slots whose data is still to be found.
    fetched: Vec<u16>,
    /// Slots whose segments are still to be read, with their number and the grant of the table.
    indirect: Vec<(u16, usize, u32)>,
    tables: Vec<u8>,
    failed: Vec<u16>,
}

#[derive(Default)]
struct Slot {
    id: u64,
    operation: u8,
    action: Option<Action>,
    offset: u64,
    segments: Vec<Segment>,
    /// Bytes counted for it, whatever its segments turn out to be.
    room: usize,
    /// Where its bytes are while the disk has them.
    memory: Option<Buffer>,
    given: Option<Request>,
    /// What follows when the request given has ended well.
    then: Option<Request>,
    wake: Rc<Signal>,
}

impl Slot {
    /// Bytes of its segments.
    fn len(&self) -> usize {
        self.segments.iter().map(|segment| usize::from(segment.len)).sum()
    }
}

/// What is remembered of a ring's requests: where, and those that a killed server left.
pub(crate) struct Remembered {
    pub(crate) record: Option<Record>,
    pub(crate) left: Vec<Left>,
}

const FLUSH: Request =
    Request { kind: Kind::Flush, offset: 0, len: 0, mem: Mem::EMPTY, fua: false };

impl<F: Foreign> XenQueue<F> {
    /// Serve a ring. What `left` names is served first.
    pub(crate) fn new(
        io: Io,
        vbd: Rc<Vbd>,
        ring: BackRing,
        foreign: F,
        kept: Option<PersistentGrants>,
        discards: bool,
        Remembered { record, left }: Remembered,
    ) -> XenQueue<F> {
        let slots: Vec<Slot> = (0..left.iter().map(|left| left.tag + 1).max().unwrap_or(0))
            .map(|_| Slot::default())
            .collect();
        let used = |tag: &u16| left.iter().any(|left| left.tag == *tag);
        let idle = (0..slots.len() as u16).filter(|tag| !used(tag)).collect();
        let state = State {
            vbd,
            ring,
            foreign,
            kept,
            discards,
            record,
            left: left.into(),
            slots,
            idle,
            ended: vec![],
            barrier: None,
            bytes: 0,
            buffers: BufferCache::default(),
            copies: Copies::default(),
            turn: Turn::default(),
        };
        XenQueue { io, state: RefCell::new(state), stopping: Cell::new(false) }
    }

    /// Slots that are there from the beginning: the caller starts their tasks.
    pub(crate) fn slots(&self) -> u16 {
        self.state.borrow().slots.len() as u16
    }

    /// Fetch what the frontend has put, `most` requests of it, and give it to idle slots; what a
    /// killed server left is fetched whole. Gives the tags of slots that are new: the caller starts
    /// their tasks. An error means that the queue must stop.
    pub(crate) fn poll(&self, new: &mut Vec<u16>, most: usize) -> Result<(), RingError> {
        let state = &mut *self.state.borrow_mut();
        let taken = self.take(state, new, most);
        state.read_tables();
        state.find_memory(&self.io);
        state.begin(&self.io);
        state.pass_barrier(&self.io);
        taken
    }

    fn take(&self, state: &mut State<F>, new: &mut Vec<u16>, most: usize) -> Result<(), RingError> {
        let mut taken = 0;
        while !self.stopping.get() && state.may_take() && (taken < most || !state.left.is_empty()) {
            taken += 1;
            if let Some(Left { tag, raw }) = state.left.pop_front() {
                state.parse(tag, &raw);
                continue;
            }
            let Some(raw) = state.ring.fetch()? else { return Ok(()) };
            let tag = match state.idle.pop() {
                Some(tag) => tag,
                None => {
                    state.slots.push(Slot::default());
                    let tag = (state.slots.len() - 1) as u16;
                    new.push(tag);
                    tag
                }
            };
            if let Some(record) = &mut state.record {
                record.fetched(tag, &raw);
            }
            state.parse(tag, &raw);
        }
        Ok(())
    }

    /// Show the frontend what was answered, or the first of it where much is to be copied; whether it wants
    /// to be called.
    pub(crate) fn publish(&self) -> bool {
        let state = &mut *self.state.borrow_mut();
        if state.ended.is_empty() {
            return false;
        }
        let count = state.copy_out();
        let first = state.ring.published();
        for (ahead, (tag, status)) in (0..).zip(&state.ended[..count]) {
            let slot = &state.slots[usize::from(*tag)];
            if let Some(record) = &state.record {
                record.answering(*tag, first.wrapping_add(ahead));
            }
            state.ring.put(ahead, slot.id, slot.operation, *status);
        }
        let call = state.ring.publish(count as u32);
        for place in 0..count {
            let (tag, _) = state.ended[place];
            if let Some(record) = &state.record {
                record.published(tag);
            }
            state.release(tag);
        }
        state.ended.drain(..count);
        state.pass_barrier(&self.io);
        call
    }

    /// Whether there are answers that the frontend has not been shown.
    pub(crate) fn has_answers(&self) -> bool {
        !self.state.borrow().ended.is_empty()
    }

    /// Whether there is something that a slot could take.
    pub(crate) fn has_requests(&self) -> bool {
        let state = self.state.borrow();
        state.may_take() && (!state.left.is_empty() || state.ring.has_requests())
    }

    /// Ask to be called; true if there is something already.
    pub(crate) fn enable_calls(&self) -> bool {
        self.state.borrow().ring.enable_calls() && self.has_requests()
    }

    /// Whether every slot is idle and every answer published.
    pub(crate) fn is_drained(&self) -> bool {
        self.in_flight() == 0
    }

    /// Requests given to slots and not answered.
    pub(crate) fn in_flight(&self) -> usize {
        let state = self.state.borrow();
        state.busy()
    }

    /// Requests that have ended and were not published.
    #[cfg(test)]
    pub(super) fn answers(&self) -> usize {
        self.state.borrow().ended.len()
    }

    /// Bytes of the buffers that slots hold.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        let held = |slot: &Slot| Some(slot.memory.as_ref()?.bytes().len());
        self.state.borrow().slots.iter().filter_map(held).sum()
    }

    /// End every slot's loop.
    pub(crate) fn stop(&self) {
        self.stopping.set(true);
        for slot in &self.state.borrow().slots {
            slot.wake.notify(&self.io);
        }
    }
}

impl<F: Foreign> State<F> {
    fn may_take(&self) -> bool {
        let room = !self.idle.is_empty()
            || !self.left.is_empty()
            || self.slots.len() < self.ring.size() as usize;
        room && self.barrier.is_none() && self.bytes < MOST_BYTES
    }

    fn end(&mut self, tag: u16, status: Status) {
        self.ended.push((tag, status));
    }

    /// Answer a request that does not come to the device.
    #[cold]
    fn refuse(&mut self, tag: u16, offset: Option<u64>, status: Status, why: &'static str) {
        let operation = wire::name(self.slots[usize::from(tag)].operation);
        self.vbd.tell_of_refusal(&Refusal { operation, offset, length: None, why });
        self.end(tag, status);
    }

    fn parse(&mut self, tag: u16, raw: &wire::Raw) {
        let slot = &mut self.slots[usize::from(tag)];
        let parsed = wire::parse(self.ring.abi(), raw, &mut slot.segments);
        (slot.id, slot.operation) = (parsed.id, parsed.operation);
        (slot.action, slot.given, slot.then) = (None, None, None);
        let pages = match parsed.asked {
            Ok(Asked::Indirect { segments, .. }) => segments,
            _ => slot.segments.len(),
        };
        slot.room = (pages * PAGE).next_power_of_two();
        self.bytes += slot.room;
        match parsed.asked {
            Err(Status::Unsupported) => {
                self.refuse(tag, None, Status::Unsupported, "this device has no such operation");
            }
            Err(status) => self.refuse(tag, None, status, "it is malformed"),
            Ok(Asked::Discard { offset, .. }) if !self.discards => {
                let why = "discards were not offered";
                self.refuse(tag, Some(offset), Status::Unsupported, why);
            }
            Ok(Asked::Discard { offset, len }) => {
                slot.given = Some(Request { kind: Kind::Discard, offset, len, ..FLUSH });
                self.turn.fetched.push(tag);
            }
            Ok(Asked::Data { action, offset }) => {
                (slot.action, slot.offset) = (Some(action), offset);
                if action == Action::Barrier {
                    self.barrier = Some(tag);
                }
                self.turn.fetched.push(tag);
            }
            Ok(Asked::Indirect { action, offset, segments, table }) => {
                (slot.action, slot.offset) = (Some(action), offset);
                self.turn.indirect.push((tag, segments, table));
                self.turn.fetched.push(tag);
            }
        }
    }

    /// Read the segments of indirect requests out of the frontend's pages.
    fn read_tables(&mut self) {
        let Turn { indirect, tables, failed, .. } = &mut self.turn;
        if indirect.is_empty() {
            return;
        }
        tables.resize(indirect.len() * TABLE, 0);
        let whole = |(_, count, grant): &(u16, usize, u32)| {
            [Segment { grant: *grant, offset: 0, len: (count * SEGMENT) as u16 }]
        };
        let kept = self.kept.as_mut().map(|kept| {
            kept.map(&self.foreign, indirect.iter().flat_map(whole));
            &*kept
        });
        for (one, table) in indirect.iter().zip(tables.chunks_exact_mut(TABLE)) {
            let domain = self.foreign.domain();
            self.copies.add(one.0, domain, kept, &whole(one), table, Way::FromFrontend);
        }
        // SAFETY: the tables are held here, and read only below.
        unsafe { self.copies.make(&self.foreign, |tag| failed.push(tag)) };
        for ((tag, count, _), table) in indirect.drain(..).zip(tables.chunks_exact(TABLE)) {
            let segments = &mut self.slots[usize::from(tag)].segments;
            if wire::list(&table[..count * SEGMENT], segments).is_err() {
                failed.push(tag);
            }
        }
        self.drop_failed();
    }

    /// Requests that failed before they began are answered so.
    fn drop_failed(&mut self) {
        while let Some(tag) = self.turn.failed.pop() {
            let fetched = &mut self.turn.fetched;
            if let Some(place) = fetched.iter().position(|one| *one == tag) {
                fetched.remove(place);
                let offset = Some(self.slots[usize::from(tag)].offset);
                let why = "its segments make no sense, or its pages cannot be had";
                self.refuse(tag, offset, Status::Failed, why);
            }
        }
    }

    /// Give the requests memory, and have there what is to be written.
    fn find_memory(&mut self, io: &Io) {
        let domain = self.foreign.domain();
        let kept = self.kept.as_mut().map(|kept| {
            let all = |tag: &u16| self.slots[usize::from(*tag)].segments.iter().copied();
            kept.map(&self.foreign, self.turn.fetched.iter().flat_map(all));
            &*kept
        });
        for tag in &self.turn.fetched {
            let slot = &mut self.slots[usize::from(*tag)];
            let len = slot.len();
            if len == 0 {
                continue;
            }
            let Ok(mut buffer) = self.buffers.take(io, len) else {
                self.turn.failed.push(*tag);
                continue;
            };
            if slot.action != Some(Action::Read) {
                let bytes = buffer.bytes_mut();
                self.copies.add(*tag, domain, kept, &slot.segments, bytes, Way::FromFrontend);
            }
            slot.memory = Some(buffer);
        }
        let failed = &mut self.turn.failed;
        // SAFETY: the buffers are held by their slots, which have not begun.
        unsafe { self.copies.make(&self.foreign, |tag| failed.push(tag)) };
        self.drop_failed();
    }

    /// Say what each request is, and wake its slot.
    fn begin(&mut self, io: &Io) {
        for tag in self.turn.fetched.drain(..) {
            let slot = &mut self.slots[usize::from(tag)];
            if let Some(action) = slot.action {
                let mem = match &slot.memory {
                    None => Mem::EMPTY,
                    Some(buffer) => buffer.mem().window(0, slot.len()),
                };
                let (offset, len) = (slot.offset, mem.len() as u64);
                let kind = if action == Action::Read { Kind::Read } else { Kind::Write };
                let data = Request { kind, offset, len, mem, fua: false };
                (slot.given, slot.then) = match action {
                    Action::Read | Action::Write => (Some(data), None),
                    _ if len == 0 => (Some(FLUSH), None),
                    _ => (Some(FLUSH), Some(Request { fua: true, ..data })),
                };
            }
            if self.barrier != Some(tag) {
                slot.wake.notify(io);
            }
        }
    }

    /// Slots with a request that was taken and is not yet published. What a killed server left and
    /// nobody took up stays in the record.
    fn busy(&self) -> usize {
        self.slots.len() - self.idle.len() - self.left.len()
    }

    /// Whether one request is being served, and no more.
    fn is_alone(&self) -> bool {
        self.busy() - self.ended.len() == 1
    }

    /// Let a barrier begin once every other request has ended.
    fn pass_barrier(&mut self, io: &Io) {
        if let Some(tag) = self.barrier.filter(|_| self.is_alone()) {
            self.slots[usize::from(tag)].wake.notify(io);
        }
    }

    /// Copy what was read to where the frontend wants it, for the first of those that have ended: of how many.
    fn copy_out(&mut self) -> usize {
        let (domain, kept) = (self.foreign.domain(), self.kept.as_ref());
        let (mut count, mut bytes) = (0, 0);
        for (tag, status) in &self.ended {
            if bytes >= AT_ONCE {
                break;
            }
            count += 1;
            let slot = &mut self.slots[usize::from(*tag)];
            let read = slot.action == Some(Action::Read) && *status == Status::Done;
            let len = slot.len();
            if let (true, Some(buffer)) = (read, &mut slot.memory) {
                bytes += len;
                let local = buffer.bytes_mut();
                self.copies.add(*tag, domain, kept, &slot.segments, local, Way::ToFrontend);
            }
        }
        let (ended, slots, vbd) = (&mut self.ended, &self.slots, &self.vbd);
        // SAFETY: the buffers are held by their slots, whose requests have ended.
        unsafe {
            self.copies.make(&self.foreign, |tag| {
                for one in ended.iter_mut().filter(|one| one.0 == tag && one.1 == Status::Done) {
                    one.1 = Status::Failed;
                    let slot = &slots[usize::from(tag)];
                    let (offset, length) = (Some(slot.offset), Some(slot.len() as u64));
                    let why = "its pages cannot be written to";
                    vbd.tell_of_refusal(&Refusal { operation: "read", offset, length, why });
                }
            });
        }
        count
    }

    /// A slot's request is answered.
    fn release(&mut self, tag: u16) {
        let slot = &mut self.slots[usize::from(tag)];
        self.bytes -= std::mem::take(&mut slot.room);
        if let Some(buffer) = slot.memory.take() {
            self.buffers.keep(buffer);
        }
        if self.barrier == Some(tag) {
            self.barrier = None;
        }
        self.idle.push(tag);
    }
}

impl<F: Foreign> Queue for XenQueue<F> {
    #[inline]
    async fn next(&self, tag: u16) -> Option<Request> {
        loop {
            let wake = {
                let mut state = self.state.borrow_mut();
                let held = state.barrier == Some(tag) && !state.is_alone();
                let slot = state.slots.get_mut(usize::from(tag))?;
                if let Some(request) = slot.given.take_if(|_| !held) {
                    return Some(request);
                }
                slot.wake.clone()
            };
            if self.stopping.get() {
                return None;
            }
            wake.wait(&self.io).await;
        }
    }

    #[inline]
    fn reply(&self, tag: u16, end: Result<(), Error>) {
        let mut state = self.state.borrow_mut();
        let slot = &mut state.slots[usize::from(tag)];
        match slot.then.take() {
            Some(then) if end.is_ok() => slot.given = Some(then),
            _ => state.end(tag, Status::of(end)),
        }
    }
}
