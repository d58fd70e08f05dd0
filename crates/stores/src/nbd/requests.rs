//! What one session has in flight, and how an operation becomes requests.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ringtap_io::{Ender, Holds, Io, Key, Mem, Op};

use super::handshake::Agreed;
use super::wire::{can, cmd, cmd_flag};

/// What requests without data move at most, where lengths have 32 bits.
const MOST_RANGE: u64 = 1 << 30;

/// Who is told of an operation's end.
pub(super) enum Who {
    /// A task of this thread.
    Here(Key),
    /// One of another, which calls it by this number.
    There(u64, Ender),
    /// Nobody any more.
    Nobody,
}

/// A request as it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Command {
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// An operation in flight.
pub(super) struct Request {
    pub(super) who: Who,
    op: Op,
    /// Bytes of its range that are done with.
    done: u64,
    /// The write is done with, and is being made stable.
    settles: bool,
    /// What was sent last, or is to be.
    pub(super) command: Command,
    pub(super) sent: bool,
    /// Bytes of a read that have come.
    pub(super) got: u64,
    /// What the server says of a range.
    pub(super) holds: Option<Holds>,
    /// The error that one of its chunks has told, a positive errno.
    pub(super) error: i32,
    order: u64,
    /// When the first connection that it was in flight on was lost.
    lost: Option<Instant>,
}

struct Slot {
    generation: u32,
    request: Option<Request>,
}

/// What is in flight, and what of it is to be sent.
#[derive(Default)]
pub(super) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u32>,
    queue: VecDeque<u32>,
    begun: u64,
}

/// The next request of an operation, or its end.
enum Next {
    Send(Command),
    End(i32),
}

impl Request {
    /// The memory that it moves bytes to or from: what its last request moves of it.
    pub(super) fn mem(&self) -> Mem {
        match (&self.who, self.op) {
            (Who::Nobody, _) => Mem::EMPTY,
            (_, Op::Read { mem, .. } | Op::Write { mem, .. }) => {
                mem.window(0, self.command.len as usize)
            }
            _ => Mem::EMPTY,
        }
    }

    /// What is to be asked of the server next.
    fn next(&self, agreed: &Agreed) -> Next {
        let most = u64::from(agreed.most);
        let range = match agreed.replies {
            super::handshake::Replies::Extended => u64::MAX >> 1,
            _ => MOST_RANGE,
        };
        let send = |kind, flags, offset, len| Next::Send(Command { kind, flags, offset, len });
        let zeroes = |flags, offset: u64, len: u64| {
            let fast = if agreed.can(can::FAST_ZERO) { cmd_flag::FAST_ZERO } else { 0 };
            match agreed.can(can::WRITE_ZEROES) {
                true if len > 0 => send(cmd::WRITE_ZEROES, flags | fast, offset, len.min(range)),
                true => Next::End(0),
                false => Next::End(-libc::EOPNOTSUPP),
            }
        };
        match self.op {
            // Only a ring reaches that.
            Op::Read { mem, .. } | Op::Write { mem, .. } if mem.is_kernels() => {
                Next::End(-libc::EOPNOTSUPP)
            }
            Op::Read { offset, mem, .. } => {
                let len = (mem.len() as u64).min(agreed.size.saturating_sub(offset)).min(most);
                if len == 0 { Next::End(0) } else { send(cmd::READ, 0, offset, len) }
            }
            Op::Write { .. } if self.settles => send(cmd::FLUSH, 0, 0, 0),
            Op::Write { offset, mem, durable, .. } => {
                let len = (mem.len() as u64).min(agreed.size.saturating_sub(offset)).min(most);
                let fua = durable && agreed.can(can::FUA);
                match len {
                    0 if mem.is_empty() => Next::End(0),
                    0 => Next::End(-libc::ENOSPC),
                    len => send(cmd::WRITE, if fua { cmd_flag::FUA } else { 0 }, offset, len),
                }
            }
            Op::Sync { .. } if agreed.can(can::FLUSH) => send(cmd::FLUSH, 0, 0, 0),
            // A server without flushes has nothing that is not stable.
            Op::Sync { .. } => Next::End(0),
            Op::PunchHole { offset, len, .. } => zeroes(0, offset + self.done, len - self.done),
            Op::ZeroRange { offset, len, .. } => {
                zeroes(cmd_flag::NO_HOLE, offset + self.done, len - self.done)
            }
            Op::Forget { offset, len, .. } => match agreed.can(can::TRIM) {
                true if len > self.done => {
                    send(cmd::TRIM, 0, offset + self.done, (len - self.done).min(range))
                }
                true => Next::End(0),
                false => Next::End(-libc::EOPNOTSUPP),
            },
            Op::Status { offset, len, .. } => match agreed.status {
                // As reads find it there.
                _ if offset >= agreed.size => {
                    Next::End(Holds { len, hole: true, zero: true }.to_result())
                }
                Some(_) => {
                    let block = u64::from(agreed.block);
                    let (from, whole) = (offset / block * block, agreed.size / block * block);
                    let end = offset.saturating_add(len).min(whole).next_multiple_of(block);
                    match end.saturating_sub(from).min(range) {
                        // No whole block.
                        0 => Next::End(Holds { len, hole: false, zero: false }.to_result()),
                        len => send(cmd::BLOCK_STATUS, cmd_flag::REQ_ONE, from, len),
                    }
                }
                None => Next::End(Holds { len, hole: false, zero: false }.to_result()),
            },
            _ => Next::End(-libc::EOPNOTSUPP),
        }
    }

    /// The server has done what was asked last: whether there is more to ask.
    fn goes_on(&mut self, agreed: &Agreed) -> bool {
        match self.op {
            Op::Write { durable: true, .. } if !self.settles => {
                self.settles = !agreed.can(can::FUA) && agreed.can(can::FLUSH);
                self.settles
            }
            Op::PunchHole { len, .. } | Op::ZeroRange { len, .. } | Op::Forget { len, .. } => {
                self.done += self.command.len;
                self.done < len
            }
            _ => false,
        }
    }

    /// The result of an operation that is done with.
    fn result(&self) -> i32 {
        match (self.op, self.error) {
            (_, error) if error != 0 => -error,
            (Op::Read { .. }, _) if self.got != self.command.len => -libc::EIO,
            (Op::Read { .. }, _) => self.command.len as i32,
            (Op::Write { .. }, _) if self.settles => self.done as i32,
            (Op::Write { .. }, _) => self.command.len as i32,
            (Op::Status { offset, len, .. }, _) => self.holds.map_or(-libc::EIO, |holds| {
                // It was asked from the start of a block on, and to the end of one.
                match holds.len.saturating_sub(offset - self.command.offset).min(len) {
                    0 => Holds { len: Holds::STEP, hole: false, zero: false },
                    len => Holds { len, ..holds },
                }
                .to_result()
            }),
            _ => 0,
        }
    }
}

/// Say that an operation has ended.
pub(super) fn tell(io: &Io, who: Who, result: i32) {
    match who {
        Who::Here(key) => io.ended(key, result),
        Who::There(_, ender) => ender.end(result),
        Who::Nobody => {}
    }
}

impl Requests {
    /// Begin an operation. Whether there is something to send by it.
    pub(super) fn begin(&mut self, io: &Io, agreed: &Agreed, who: Who, op: Op) -> bool {
        let command = Command { kind: 0, flags: 0, offset: 0, len: 0 };
        self.begun += 1;
        let (order, holds) = (self.begun, None);
        let mut request = Request {
            who,
            op,
            done: 0,
            settles: false,
            command,
            sent: false,
            got: 0,
            holds,
            error: 0,
            order,
            lost: None,
        };
        match request.next(agreed) {
            Next::End(result) => {
                tell(io, request.who, result);
                return false;
            }
            Next::Send(command) => request.command = command,
        }
        let place = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, request: None });
            (self.slots.len() - 1) as u32
        });
        self.slots[place as usize].request = Some(request);
        self.queue.push_back(place);
        true
    }

    /// The next to be sent, with its cookie.
    pub(super) fn take_next(&mut self) -> Option<(u64, &Request)> {
        let place = loop {
            let place = self.queue.pop_front()?;
            match self.slots[place as usize].request {
                Some(_) => break place,
                // One that was cancelled meanwhile.
                None => self.free.push(place),
            }
        };
        let slot = &mut self.slots[place as usize];
        let request = slot.request.as_mut()?;
        request.sent = true;
        Some((cookie(place, slot.generation), request))
    }

    /// That of a cookie, if it was sent.
    pub(super) fn find(&mut self, cookie: u64) -> Option<&mut Request> {
        let slot = self.slots.get_mut(cookie as u32 as usize)?;
        let is_that = slot.generation == (cookie >> 32) as u32;
        slot.request.as_mut().filter(|request| is_that && request.sent)
    }

    /// The last reply to it has come. Whether there is something to send by it.
    pub(super) fn answered(&mut self, io: &Io, agreed: &Agreed, cookie: u64) -> bool {
        let place = cookie as u32;
        let Some(request) = self.find(cookie) else { return false };
        // Of a write that is to be made stable yet.
        let moved = request.command.len;
        if request.error == 0 && request.goes_on(agreed) {
            if request.settles {
                request.done = moved;
            }
            if let Next::Send(command) = request.next(agreed) {
                request.command = command;
                request.sent = false;
                request.lost = None;
                self.renew(place);
                self.queue.push_back(place);
                return true;
            }
        }
        let result = request.result();
        self.remove(io, place, result);
        false
    }

    /// No reply to what was sent before is one to what is sent now.
    fn renew(&mut self, place: u32) {
        let slot = &mut self.slots[place as usize];
        slot.generation = slot.generation.wrapping_add(1);
    }

    fn remove(&mut self, io: &Io, place: u32, result: i32) {
        self.renew(place);
        if let Some(request) = self.slots[place as usize].request.take() {
            // The place of one that is still to be sent is free when its turn comes.
            if request.sent {
                self.free.push(place);
            }
            tell(io, request.who, result);
        }
    }

    /// The connection is gone: all are to be sent again, in their order. The first that had no answer goes last, for it may be what
    /// the server broke the connection on; those that have waited over so long a time of connections that were lost fail. How
    /// many those are.
    pub(super) fn send_again(&mut self, io: &Io, agreed: &Agreed, patience: Duration) -> usize {
        self.free_queued();
        let now = Instant::now();
        let mut places: Vec<(u64, u32)> = Vec::new();
        let mut late: Vec<u32> = Vec::new();
        let sent = self.slots.iter_mut().filter_map(|slot| slot.request.as_mut());
        if let Some(first) = sent.filter(|it| it.sent).min_by_key(|it| it.order) {
            self.begun += 1;
            first.order = self.begun;
        }
        for (place, slot) in self.slots.iter_mut().enumerate() {
            let Some(request) = &mut slot.request else { continue };
            slot.generation = slot.generation.wrapping_add(1);
            if matches!(request.who, Who::Nobody) {
                slot.request = None;
                self.free.push(place as u32);
                continue;
            }
            if request.sent && now - *request.lost.get_or_insert(now) > patience {
                late.push(place as u32);
                continue;
            }
            (request.sent, request.got, request.error, request.holds) = (false, 0, 0, None);
            // What was written may be lost with the server, so that a flush alone would not make it stable.
            if std::mem::take(&mut request.settles) {
                request.done = 0;
            }
            if let Next::Send(command) = request.next(agreed) {
                request.command = command;
            }
            places.push((request.order, place as u32));
        }
        places.sort_unstable();
        self.queue.extend(places.into_iter().map(|(_, place)| place));
        late.iter().for_each(|place| self.remove(io, *place, -libc::EIO));
        late.len()
    }

    /// Nothing is to be sent: places of those that were cancelled meanwhile are free.
    fn free_queued(&mut self) {
        while let Some(place) = self.queue.pop_front() {
            if self.slots[place as usize].request.is_none() {
                self.free.push(place);
            }
        }
    }

    /// All end with an error.
    pub(super) fn fail(&mut self, io: &Io, errno: i32) {
        for place in 0..self.slots.len() as u32 {
            if self.slots[place as usize].request.is_some() {
                self.remove(io, place, -errno);
            }
        }
        self.free_queued();
    }

    fn place_of(&self, is_it: impl Fn(&Who) -> bool) -> Option<usize> {
        self.slots
            .iter()
            .position(|slot| slot.request.as_ref().is_some_and(|request| is_it(&request.who)))
    }

    /// The cookie of one of those, where it has been sent or is being sent.
    pub(super) fn sent(&self, is_it: impl Fn(&Who) -> bool) -> Option<u64> {
        let place = self.place_of(is_it)?;
        let slot = &self.slots[place];
        let sent = slot.request.as_ref().is_some_and(|request| request.sent);
        sent.then(|| cookie(place as u32, slot.generation))
    }

    /// Nobody waits for one of those any more: the memory that it names is not used from now on. Whether there was one.
    pub(super) fn cancel(&mut self, io: &Io, is_it: impl Fn(&Who) -> bool) -> bool {
        let Some(place) = self.place_of(is_it) else { return false };
        let Some(request) = &mut self.slots[place].request else { return false };
        if !request.sent {
            self.remove(io, place as u32, -libc::ECANCELED);
            return true;
        }
        let who = std::mem::replace(&mut request.who, Who::Nobody);
        tell(io, who, -libc::ECANCELED);
        true
    }

    /// Nothing is in flight or to be sent.
    pub(super) fn is_empty(&self) -> bool {
        self.slots.iter().all(|slot| slot.request.is_none())
    }

    /// All that there are, of which none was ever sent, in their order.
    pub(super) fn take_unsent(&mut self) -> Vec<(Who, Op)> {
        let mut taken = vec![];
        while let Some(place) = self.queue.pop_front() {
            if let Some(request) = self.slots[place as usize].request.take() {
                taken.push((request.who, request.op));
            }
            self.free.push(place);
        }
        taken
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        // Those of this thread's own tasks are gone with them.
        for slot in &mut self.slots {
            if let Some(Request { who: Who::There(_, ender), .. }) = slot.request.take() {
                ender.end(-libc::EIO);
            }
        }
    }
}

fn cookie(place: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(place)
}
