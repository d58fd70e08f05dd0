//! One descriptor of the FUSE device as a [`Queue`]: each message read into a slot's own memory.

use std::cell::RefCell;
use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;

use ringtap_io::{File, Io, OpenFile, Signal};
use ringtap_vbd::{Error, Kind, Request, Vbd};

use super::request::{Answer, Asked, Facts, seek, understand};
use super::wire::{self, Head, IN_HEADER, WRITE_HEADER, op};
use crate::arena::Arena;
use crate::queue::Queue;

/// Arguments that follow a header, of messages without data. The longest (SETATTR) has 88 bytes.
const MOST_ARGUMENTS: usize = 512;

/// What needs no memory is carried out in pieces of this, at multiples of it: a request about all of a large disk holds up neither
/// a pause nor the end.
const PIECE: u64 = 1 << 30;

/// The first piece of a request, and what follows it.
fn cut(mut request: Request) -> (Request, Option<Request>) {
    let end = request.offset.saturating_add(request.len);
    let first = (request.offset / PIECE + 1).saturating_mul(PIECE);
    let moves = matches!(request.kind, Kind::Read | Kind::Write);
    if moves || first >= end {
        return (request, None);
    }
    request.len = first - request.offset;
    (request, Some(Request { offset: first, len: end - first, ..request }))
}

/// Why no more messages were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// There are none.
    All,
    /// Every slot is at work.
    Slots,
    /// The file system is unmounted.
    Gone,
}

/// A descriptor being served. All of it belongs to one thread.
pub(crate) struct FuseQueue {
    io: Io,
    device: OpenFile,
    arena: Arena,
    vbd: Rc<Vbd>,
    facts: Facts,
    state: RefCell<State>,
}

struct State {
    slots: Vec<Slot>,
    most: usize,
    idle: Vec<u16>,
    stopping: bool,
}

struct Slot {
    unique: u64,
    given: Option<Request>,
    /// What of the same message follows that.
    rest: Option<Request>,
    answer: Answer,
    wake: Rc<Signal>,
}

impl FuseQueue {
    /// Serve a descriptor with up to `slots` requests at a time, each of `each` bytes at most.
    pub(crate) fn new(
        io: Io,
        device: OpenFile,
        vbd: Rc<Vbd>,
        facts: Facts,
        slots: u16,
        each: usize,
    ) -> io::Result<FuseQueue> {
        let most = usize::from(slots);
        let state = State { slots: Vec::new(), most, idle: Vec::new(), stopping: false };
        let arena = Arena::new(most, each)?;
        Ok(FuseQueue { io, device, arena, vbd, facts, state: RefCell::new(state) })
    }

    /// The device, to wait for.
    pub(crate) fn device(&self) -> File {
        self.device.handle()
    }

    /// Requests given to slots and not answered.
    pub(crate) fn in_flight(&self) -> usize {
        let state = self.state.borrow();
        state.slots.len() - state.idle.len()
    }

    /// Whether another request could be taken.
    pub(crate) fn has_room(&self) -> bool {
        let state = self.state.borrow();
        !state.idle.is_empty() || state.slots.len() < state.most
    }

    /// Read messages while there are some, and give them to idle slots. Gives the tags of slots
    /// that are new: the caller starts their tasks.
    pub(crate) fn take(self: &Rc<Self>, new: &mut Vec<u16>) -> io::Result<Taken> {
        let state = &mut *self.state.borrow_mut();
        loop {
            let tag = match state.idle.last() {
                Some(tag) => *tag,
                None if state.slots.len() < state.most => {
                    let tag = state.slots.len() as u16;
                    let (answer, wake) = (Answer::Empty, Rc::default());
                    state.slots.push(Slot { unique: 0, given: None, rest: None, answer, wake });
                    state.idle.push(tag);
                    new.push(tag);
                    tag
                }
                None => return Ok(Taken::Slots),
            };
            let mut head = [0; WRITE_HEADER];
            match self.arena.read(usize::from(tag), self.device.as_fd(), &mut head) {
                Ok(read) => self.give(state, tag, &head, read),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => return Ok(Taken::All),
                    Some(libc::ENODEV | libc::ECONNABORTED) => return Ok(Taken::Gone),
                    // ENOENT: its caller was killed before it could be read.
                    Some(libc::EINTR | libc::ENOENT) => {}
                    _ => return Err(error),
                },
            }
        }
    }

    /// One message of `read` bytes, the first of them in `head`, the others in the slot's memory.
    fn give(self: &Rc<Self>, state: &mut State, tag: u16, head: &[u8; WRITE_HEADER], read: usize) {
        let piece = usize::from(tag);
        let Some(message) = Head::parse(&head[..read.min(WRITE_HEADER)]) else { return };
        let carried = read.saturating_sub(WRITE_HEADER);
        let mut arguments = [0; MOST_ARGUMENTS];
        let fit = read.min(WRITE_HEADER).saturating_sub(IN_HEADER);
        arguments[..fit].copy_from_slice(&head[IN_HEADER..IN_HEADER + fit]);
        let mut len = fit;
        if message.opcode != op::WRITE {
            len += self.arena.mem(piece, carried).copy_to(&mut arguments[fit..]);
        }
        let memory = |len| self.arena.mem(piece, len);
        let asked = match message.len == read {
            true => understand(message, &arguments[..len], carried, memory, &self.vbd, &self.facts),
            false => Asked::Failed(libc::EIO),
        };
        match asked {
            Asked::Device(request, answer) => {
                state.idle.pop();
                let slot = &mut state.slots[piece];
                let (first, rest) = cut(request);
                (slot.unique, slot.answer) = (message.unique, answer);
                (slot.given, slot.rest) = (Some(first), rest);
                slot.wake.notify(&self.io);
            }
            Asked::Seek { offset, data } => {
                state.idle.pop();
                self.io.spawn(self.clone().seek(tag, message.unique, offset, data));
            }
            Asked::Answer(bytes) => self.say(piece, message.unique, 0, &bytes, 0),
            Asked::Failed(errno) => self.say(piece, message.unique, errno, &[], 0),
            Asked::Nothing => {}
        }
    }

    /// Answer where data or a hole begins, which may take reading what says so.
    async fn seek(self: Rc<Self>, tag: u16, unique: u64, offset: u64, data: bool) {
        match seek(&self.vbd, &self.io, offset, data).await {
            Ok(at) => self.say(tag.into(), unique, 0, &at.to_ne_bytes(), 0),
            Err(errno) => self.say(tag.into(), unique, errno, &[], 0),
        }
        self.state.borrow_mut().idle.push(tag);
    }

    /// Answer: `bytes`, then the first `data` bytes of the slot's memory.
    fn say(&self, piece: usize, unique: u64, errno: i32, bytes: &[u8], data: usize) {
        let header = wire::answer_header(unique, errno, bytes.len() + data);
        let joined;
        let head = if bytes.is_empty() {
            &header[..]
        } else {
            joined = [&header[..], bytes].concat();
            &joined[..]
        };
        if let Err(error) = self.arena.write(piece, self.device.as_fd(), head, data) {
            match error.raw_os_error() {
                // Who asked was killed, or the file system is unmounted: nobody waits for it.
                Some(libc::ENOENT | libc::ENODEV | libc::ECONNABORTED) => {}
                _ => tracing::error!("cannot answer a request of the FUSE device: {error}"),
            }
        }
    }

    /// End every slot's loop.
    pub(crate) fn stop(&self) {
        let state = &mut *self.state.borrow_mut();
        state.stopping = true;
        for slot in &state.slots {
            slot.wake.notify(&self.io);
        }
    }
}

impl Queue for FuseQueue {
    async fn next(&self, tag: u16) -> Option<Request> {
        loop {
            let wake = {
                let mut state = self.state.borrow_mut();
                let stopping = state.stopping;
                let slot = state.slots.get_mut(usize::from(tag))?;
                if let Some(request) = slot.given.take() {
                    return Some(request);
                }
                if stopping {
                    return None;
                }
                slot.wake.clone()
            };
            wake.wait(&self.io).await;
        }
    }

    fn reply(&self, tag: u16, end: Result<(), Error>) {
        let piece = usize::from(tag);
        let (unique, answer, stopped) = {
            let state = &mut *self.state.borrow_mut();
            let slot = &mut state.slots[piece];
            let rest = slot.rest.take();
            if let (Ok(()), Some(rest), false) = (&end, rest, state.stopping) {
                (slot.given, slot.rest) = {
                    let (first, rest) = cut(rest);
                    (Some(first), rest)
                };
                return;
            }
            (slot.unique, slot.answer, rest.is_some())
        };
        // Part of it was done, which may be done again.
        let end = if stopped { end.and(Err(Error::Os(libc::EINTR))) } else { end };
        match (end, answer) {
            (Err(error), _) => self.say(piece, unique, error.errno(), &[], 0),
            (Ok(()), Answer::Empty) => self.say(piece, unique, 0, &[], 0),
            (Ok(()), Answer::Data(len)) => self.say(piece, unique, 0, &[], len),
            (Ok(()), Answer::Written(len)) => {
                let mut out = [0; 8];
                out[..4].copy_from_slice(&len.to_ne_bytes());
                self.say(piece, unique, 0, &out, 0);
            }
        }
        self.state.borrow_mut().idle.push(tag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringtap_io::Mem;

    #[test]
    fn what_needs_no_memory_is_carried_out_in_pieces() {
        let pieces = |kind, offset, len| {
            let mut rest = Some(Request { kind, offset, len, mem: Mem::EMPTY, fua: true });
            let mut pieces = vec![];
            while let Some(request) = rest {
                let (first, next) = cut(request);
                assert!((first.kind, first.fua) == (kind, true));
                pieces.push((first.offset, first.len));
                rest = next;
            }
            pieces
        };
        let zeroes = Kind::WriteZeroes { unmap: true, fast: false };
        assert_eq!(pieces(zeroes, 512, PIECE - 512), [(512, PIECE - 512)]);
        let three = [(512, PIECE - 512), (PIECE, PIECE), (2 * PIECE, 512)];
        assert_eq!(pieces(zeroes, 512, 2 * PIECE), three);
        assert_eq!(pieces(zeroes, u64::MAX - 1, 1), [(u64::MAX - 1, 1)]);
        assert_eq!(pieces(Kind::Flush, 0, 0), [(0, 0)]);
        assert_eq!(pieces(Kind::Write, 0, 2 * PIECE), [(0, 2 * PIECE)], "its memory is one");
    }
}
