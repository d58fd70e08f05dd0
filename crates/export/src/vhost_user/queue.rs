//! One virtqueue as a [`Queue`]: chains handed to slots, answers gathered and published.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use ringtap_io::{Io, Signal};
use ringtap_vbd::{Error, Kind, Request, Vbd};

use super::dirty_log::Logging;
use super::inflight::QueueInflight;
use super::memory::Memory;
use super::request::{Asked, Chain, ID_BYTES};
use super::virtqueue::{RingError, Virtqueue};
use crate::queue::Queue;

/// Bytes that requests of one ring may hold at a time. More chains are taken from it as these end; one that is
/// larger than that is served alone.
pub(crate) const BUDGET: usize = 64 << 20;
/// What a request that names no memory may hold, to write zeros or around them.
const ZEROS: u64 = 1 << 20;
/// Nor does one hold more than this beyond what it moves.
const MOST_AROUND: u64 = 2 << 20;

/// A virtqueue being served. All of it belongs to one thread.
pub(crate) struct VirtioQueue {
    io: Io,
    vbd: Rc<Vbd>,
    identity: [u8; ID_BYTES],
    state: RefCell<State>,
    stopping: Cell<bool>,
}

struct State {
    ring: Virtqueue,
    memory: Arc<Memory>,
    inflight: Option<QueueInflight>,
    /// While the guest is being migrated.
    logging: Option<Logging>,
    /// Heads that a killed server left, to be served first.
    left: VecDeque<u16>,
    slots: Vec<Slot>,
    idle: Vec<u16>,
    /// Heads answered since the last batch was published.
    answered: Vec<u16>,
    /// Bytes that the requests in flight may hold, and what each may beyond those it moves.
    held: usize,
    around: usize,
    /// The slot of a chain that was taken and waits until there is budget for it.
    waiting: Option<u16>,
}

struct Slot {
    chain: Chain,
    given: Option<Request>,
    /// Bytes that the answer puts into the guest's memory beside the status; where it fails, maybe.
    reads: usize,
    /// What the request may hold.
    holds: usize,
    wake: Rc<Signal>,
}

impl VirtioQueue {
    /// Serve a ring from where `inflight` says that a server before this one left off.
    pub(crate) fn new(
        io: Io,
        mut ring: Virtqueue,
        memory: Arc<Memory>,
        mut inflight: Option<QueueInflight>,
        logging: Option<Logging>,
        identity: [u8; ID_BYTES],
        vbd: Rc<Vbd>,
    ) -> VirtioQueue {
        let mut left = VecDeque::new();
        if let Some(inflight) = &mut inflight {
            left.extend(inflight.take_up(ring.next_used()));
            // What was fetched and not answered lies before what was not fetched.
            ring.set_next_available(ring.next_used().wrapping_add(left.len() as u16));
        }
        let state = State {
            ring,
            memory,
            inflight,
            logging,
            left,
            slots: Vec::new(),
            idle: Vec::new(),
            answered: Vec::new(),
            held: 0,
            around: vbd.info().discard_alignment.min(MOST_AROUND) as usize,
            waiting: None,
        };
        VirtioQueue { io, vbd, identity, state: RefCell::new(state), stopping: Cell::new(false) }
    }

    /// Fetch what the guest has made available, `most` chains of it, and give it to idle slots. What
    /// a killed server left is fetched whole. Gives the tags of slots that are new: the caller
    /// starts their tasks. An error means that the queue must stop.
    pub(crate) fn poll(&self, new: &mut Vec<u16>, most: usize) -> Result<(), RingError> {
        let state = &mut *self.state.borrow_mut();
        let mut fetched = 0;
        while !self.stopping.get()
            && state.waiting.is_none()
            && (fetched < most || !state.left.is_empty())
        {
            fetched += 1;
            let tag = match state.idle.pop() {
                Some(tag) => tag,
                None if state.slots.len() < usize::from(state.ring.size()) => {
                    if state.left.is_empty() && !state.ring.has_available() {
                        return Ok(());
                    }
                    let (chain, wake) = (Chain::default(), Rc::default());
                    state.slots.push(Slot { chain, given: None, reads: 0, holds: 0, wake });
                    let tag = (state.slots.len() - 1) as u16;
                    new.push(tag);
                    tag
                }
                None => return Ok(()),
            };
            match self.give(state, tag) {
                Ok(true) => {}
                Ok(false) => {
                    state.idle.push(tag);
                    return Ok(());
                }
                Err(error) => {
                    state.idle.push(tag);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Give one chain to a slot; false where there is none.
    fn give(&self, state: &mut State, tag: u16) -> Result<bool, RingError> {
        let State { ring, memory, inflight, left, slots, .. } = state;
        let head = match left.pop_front() {
            Some(head) => head,
            None => {
                let Some(head) = ring.fetch()? else { return Ok(false) };
                if let Some(inflight) = inflight {
                    inflight.fetched(head);
                }
                head
            }
        };
        let slot = &mut slots[usize::from(tag)];
        // SAFETY: the memory stays mapped: it is replaced only while no slot has a request (see
        // `replace_memory`), and this slot is idle, so its last request has been served.
        let asked = unsafe { slot.chain.parse(ring, memory, head)? };
        match asked {
            Asked::Device(request) => {
                slot.given = Some(request);
                slot.reads = if request.kind == Kind::Read { request.mem.len() } else { 0 };
                slot.holds = held_by(&request, state.around, slot.chain.storage());
                state.waiting = Some(tag);
                state.resume(&self.io);
            }
            Asked::Identity(mem) => {
                let written = mem.copy_from(&self.identity);
                slot.reads = written;
                state.answer(tag, Ok(()), written);
            }
            Asked::Bad(error, refusal) => {
                slot.reads = 0;
                self.vbd.tell_of_refusal(&refusal);
                state.answer(tag, Err(error), 0);
            }
        }
        Ok(true)
    }

    /// Show the guest what was answered.
    #[inline]
    pub(crate) fn publish(&self) {
        let state = &mut *self.state.borrow_mut();
        if state.answered.is_empty() {
            return;
        }
        state.ring.publish(state.answered.len() as u16);
        state.log_words();
        if let Some(inflight) = &state.inflight {
            inflight.answered(state.answered.iter().copied(), state.ring.next_used());
        }
        state.answered.clear();
    }

    /// Answers published that the guest has not been told of, nor declined to be.
    #[inline]
    pub(crate) fn unnotified(&self) -> u16 {
        self.state.borrow().ring.unnotified()
    }

    /// Whether the guest wants to be told of them.
    #[inline]
    pub(crate) fn must_notify(&self) -> bool {
        self.state.borrow_mut().ring.must_notify()
    }

    /// Whether there is something available that a slot could take.
    pub(crate) fn has_available(&self) -> bool {
        let state = self.state.borrow();
        let room = !state.idle.is_empty() || state.slots.len() < usize::from(state.ring.size());
        room && state.waiting.is_none() && (!state.left.is_empty() || state.ring.has_available())
    }

    /// Whether there is something yet that a killed server left.
    pub(crate) fn has_left(&self) -> bool {
        !self.state.borrow().left.is_empty()
    }

    /// Ask for kicks; true if there is something already.
    pub(crate) fn enable_kicks(&self) -> bool {
        let came = {
            let state = self.state.borrow();
            let came = state.ring.enable_kicks();
            state.log_words();
            came
        };
        came && self.has_available()
    }

    pub(crate) fn disable_kicks(&self) {
        let state = self.state.borrow();
        state.ring.disable_kicks();
        state.log_words();
    }

    /// Whether every slot is idle and every answer published.
    pub(crate) fn is_drained(&self) -> bool {
        let state = self.state.borrow();
        state.idle.len() == state.slots.len() && state.answered.is_empty()
    }

    /// Places of the ring.
    pub(crate) fn size(&self) -> u16 {
        self.state.borrow().ring.size()
    }

    /// Requests given to slots and not answered.
    pub(crate) fn in_flight(&self) -> usize {
        let state = self.state.borrow();
        state.slots.len() - state.idle.len()
    }

    /// Whether the guest's memory, or the log of what is written to it, was cut short.
    pub(crate) fn has_lost_memory(&self) -> bool {
        let state = self.state.borrow();
        state.memory.is_cut() || state.logging.as_ref().is_some_and(Logging::is_cut)
    }

    /// From now on log into this, or nothing.
    pub(crate) fn set_logging(&self, logging: Option<Logging>) {
        self.state.borrow_mut().logging = logging;
    }

    /// Use other memory and the ring as it lies in it. Only while drained.
    pub(crate) fn replace_memory(&self, memory: Arc<Memory>, ring: Virtqueue) {
        let state = &mut *self.state.borrow_mut();
        state.ring = ring;
        state.memory = memory;
    }

    /// The available index reached.
    pub(crate) fn next_available(&self) -> u16 {
        self.state.borrow().ring.next_available()
    }

    /// End every slot's loop.
    pub(crate) fn stop(&self) {
        self.stopping.set(true);
        for slot in &self.state.borrow().slots {
            slot.wake.notify(&self.io);
        }
    }
}

/// What a request may hold until it is answered: a copy of its bytes, of what lies around them in the image's
/// own units, and the list of its memory.
fn held_by(request: &Request, around: usize, storage: usize) -> usize {
    let bytes = match request.kind {
        Kind::Read | Kind::Write => request.mem.len(),
        Kind::Discard | Kind::WriteZeroes { .. } => request.len.min(ZEROS) as usize,
        Kind::Flush => return storage,
    };
    bytes + around + storage
}

impl State {
    /// Let the chain that waits be served, if there is budget.
    #[inline]
    fn resume(&mut self, io: &Io) {
        let Some(tag) = self.waiting else { return };
        let slot = &self.slots[usize::from(tag)];
        if self.held == 0 || self.held + slot.holds <= BUDGET {
            self.held += slot.holds;
            self.waiting = None;
            slot.wake.notify(io);
        }
    }

    #[inline]
    fn answer(&mut self, tag: u16, end: Result<(), Error>, written: usize) {
        let slot = &mut self.slots[usize::from(tag)];
        self.held -= std::mem::take(&mut slot.holds);
        let chain = &mut slot.chain;
        let written = chain.answer(end, written);
        let ahead = self.answered.len() as u16;
        self.ring.put_used(ahead, chain.head, written);
        if let Some(logging) = &self.logging {
            logging.wrote(&self.memory, chain.iovecs().1, slot.reads);
            logging.wrote(&self.memory, &[chain.status()], 1);
            let (offset, len) = self.ring.used_entry(ahead);
            logging.wrote_used(offset, len);
        }
        chain.rest();
        if let Some(inflight) = &self.inflight {
            inflight.answering(chain.head);
        }
        self.answered.push(chain.head);
        self.idle.push(tag);
    }
}

impl State {
    /// The used index was written to, or what asks for kicks.
    #[inline]
    fn log_words(&self) {
        if let Some(logging) = &self.logging {
            for (offset, len) in self.ring.used_words() {
                logging.wrote_used(offset, len);
            }
        }
    }
}

impl Queue for VirtioQueue {
    #[inline]
    async fn next(&self, tag: u16) -> Option<Request> {
        loop {
            let wake = {
                let mut state = self.state.borrow_mut();
                let waits = state.waiting == Some(tag);
                let slot = state.slots.get_mut(usize::from(tag))?;
                match slot.given.take_if(|_| !waits) {
                    Some(request) => return Some(request),
                    None => slot.wake.clone(),
                }
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
        let written = if end.is_ok() { state.slots[usize::from(tag)].reads } else { 0 };
        state.answer(tag, end, written);
        state.resume(&self.io);
    }
}
