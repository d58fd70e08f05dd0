//! One connection past its handshake: the tasks that receive, serve and send.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringtap_io::{Buffer, Io, Op, OpenFile, Signal, Time};
use ringtap_vbd::Vbd;
use rustix::net::{Shutdown, shutdown};

use super::alarm::Alarm;
use super::answer::Reply;
use super::batch::Batch;
use super::budget::Share;
use super::context::Contexts;
use super::handshake::Choice;
use super::input::Input;
use super::limits::Limits;
use super::memory::Memory;
use super::peer::Peer;
use super::pipes::Pipes;
use super::receive::Gone;
use super::reply::{Head, To};
use super::request::{Command, Header, Rules};
use super::slot::{Job, Slot, Slots};
use super::tls::Sealer;
use super::wire::errno;
use crate::tuning::BEGUN_AT_ONCE;

/// How long a connection keeps its memory after the last request.
pub(super) const REST: Duration = Duration::from_secs(1);
/// How long one may take to send the rest of a request, or to take replies, when another server is to have it.
const LEAVES: Duration = Duration::from_secs(1);

/// A connection that has its export.
pub(super) struct Connection {
    pub(super) io: Io,
    pub(super) vbd: Vbd,
    pub(super) memory: Memory,
    pub(super) pipes: Pipes,
    pub(super) structured: bool,
    extended: bool,
    /// Whether the last large read ended in zeros.
    pub(super) zeros_expected: Cell<bool>,
    pub(super) contexts: Contexts,
    socket: Arc<OpenFile>,
    peer: Peer,
    alarm: Arc<Alarm>,
    limits: Limits,
    share: Rc<Share>,
    slots: Slots,
    gathering: RefCell<Batch>,
    gathered: Signal,
    /// Requests so far, and how many they were when the alarm rang last.
    requests: Cell<u64>,
    seen: Cell<u64>,
    armed: Cell<bool>,
    /// When the client last did something, to within [`REST`].
    active: Cell<Time>,
    /// Since when the client is waited for: to take a reply, and to send the rest of a payload.
    sending: Cell<Option<Time>>,
    paying: Rc<Cell<Option<Time>>>,
    /// Since when it is to send a part of a payload that room was made for.
    part: Cell<Option<Time>>,
    /// When the word to stop came.
    stopping: Cell<Option<u64>>,
    /// Whether another server can have the client; whether it is to leave, and whether that is between two requests.
    may_leave: bool,
    leaving: Cell<bool>,
    between: Cell<bool>,
    broken: Cell<bool>,
    ended: Cell<bool>,
    /// Whether the client is still to be told that nothing follows.
    farewell: Cell<bool>,
    told: Signal,
}

pub(super) fn close(socket: &OpenFile, how: Shutdown) {
    // It fails where the client was faster.
    let _ = shutdown(socket, how);
}

/// Why no more requests are taken.
#[derive(Debug)]
enum End {
    Disconnected,
    Gone,
    Nonsense(u32),
    TooLong(u64),
    Stopped,
    HandedOver,
}

impl From<Gone> for End {
    fn from(_: Gone) -> End {
        End::Gone
    }
}

/// What a connection is made of.
pub(super) struct Accepted {
    pub(super) vbd: Vbd,
    pub(super) choice: Choice,
    pub(super) socket: Arc<OpenFile>,
    pub(super) peer: Peer,
    pub(super) alarm: Arc<Alarm>,
    pub(super) limits: Limits,
    pub(super) share: Share,
    pub(super) sealer: Option<Sealer>,
}

impl Connection {
    /// The connection of a client that has chosen.
    pub(super) fn new(io: Io, of: Accepted, input: &Input) -> io::Result<Rc<Connection>> {
        let Accepted { vbd, choice, socket, peer, alarm, limits, share, sealer } = of;
        let share = Rc::new(share);
        let batch = Batch::new(&io, limits.requests).map_err(io::Error::from_raw_os_error)?;
        let sending = Batch::new(&io, limits.requests).map_err(io::Error::from_raw_os_error)?;
        let connection = Rc::new(Connection {
            memory: Memory::new(io.clone(), limits.memory, share.clone()),
            pipes: Pipes::new(share.clone()),
            slots: Slots::new(io.clone(), limits.requests),
            vbd,
            structured: choice.structured,
            extended: choice.extended,
            contexts: choice.contexts,
            zeros_expected: Cell::new(false),
            socket,
            peer,
            alarm,
            limits,
            share,
            gathering: RefCell::new(batch),
            gathered: Signal::default(),
            requests: Cell::new(0),
            seen: Cell::new(0),
            armed: Cell::new(true),
            active: Cell::new(io.now()),
            sending: Cell::new(None),
            paying: input.paying.clone(),
            part: Cell::new(None),
            stopping: Cell::new(None),
            // What is deciphered here nobody can go on with.
            may_leave: sealer.is_none(),
            leaving: Cell::new(false),
            between: Cell::new(false),
            broken: Cell::new(false),
            ended: Cell::new(false),
            farewell: Cell::new(false),
            told: Signal::default(),
            io: io.clone(),
        });
        if sealer.is_some() {
            // What is in a pipe nobody can seal.
            connection.pipes.refuse();
            connection.farewell.set(true);
        }
        let keeps_up = connection.clone();
        io.spawn_beside(async move { keeps_up.vbd.keep_up(&keeps_up.io).await });
        io.spawn(connection.clone().send_replies(sending, sealer));
        Ok(connection)
    }

    /// Until it is over; where the client goes on elsewhere, what it has sent that was not looked at.
    pub(super) async fn serve(self: Rc<Self>, mut input: Input) -> Option<Vec<u8>> {
        let Err(end) = self.receive(&mut input).await;
        let handed_over = matches!(end, End::HandedOver);
        if matches!(end, End::Gone | End::Nonsense(_) | End::TooLong(_)) {
            // What was written later over another connection is not to be written over.
            self.vbd.lose();
        }
        match end {
            End::Nonsense(magic) => {
                tracing::warn!("an NBD client sent {magic:#010x} where a request begins: closed");
            }
            End::TooLong(len) => {
                tracing::warn!("an NBD client announced {len} bytes, more than 32 MiB: closed");
            }
            end => tracing::debug!(requests = self.requests.get(), "an NBD client left: {end:?}"),
        }
        // Where it is the server that ends, nothing is held.
        let _hurry = self.vbd.leave();
        self.slots.rest().await;
        // One that cannot is closed, with no answer to what it asks last: it asks again where it connects again.
        let goes_on = handed_over && self.stopping.get().is_none() && self.may_leave;
        if self.stopping.get().is_some() && self.vbd.health().failure().is_none() {
            if let Err(error) = self.vbd.flush(&self.io).await {
                tracing::error!("the last flush of an NBD connection failed: {error}");
            }
        }
        self.vbd.account_cpu_time();
        self.ended.set(true);
        self.slots.close();
        self.gathered.notify(&self.io);
        if goes_on {
            return (!self.broken.get()).then(|| input.bytes().to_vec());
        }
        self.alarm.set(REST);
        while self.farewell.get() {
            self.told.wait(&self.io).await;
        }
        None
    }

    /// Whether no request is begun any more, for another server is to have it.
    fn hands_over(&self) -> bool {
        self.leaving.get() && self.stopping.get().is_none()
    }

    /// Take requests until there are no more to take.
    async fn receive(self: &Rc<Self>, input: &mut Input) -> Result<std::convert::Infallible, End> {
        let socket = self.socket.handle();
        let mut in_one_go = 0;
        loop {
            let header = loop {
                if self.hands_over() {
                    return Err(End::HandedOver);
                }
                match Header::parse(input.bytes(), self.extended) {
                    Some(Ok(header)) => break header,
                    Some(Err(magic)) => return Err(End::Nonsense(magic.0)),
                    None if self.stopping.get().is_some() => return Err(End::Stopped),
                    None => {
                        self.between.set(true);
                        let filled = input.fill(&self.io, socket).await;
                        self.between.set(false);
                        // One that has left meanwhile is found to have left there.
                        if filled.is_err() && self.hands_over() {
                            return Err(End::HandedOver);
                        }
                        filled?;
                    }
                }
            };
            input.consume(Header::len_of(self.extended));
            if header.is_absurd() {
                return Err(End::TooLong(header.len));
            }
            let mut header = header;
            let mut command = header.check(&self.rules());
            if command == Ok(Command::Disconnect) {
                return Err(End::Disconnected);
            }
            if self.stopping.get().is_some() {
                command = Err(errno::ESHUTDOWN);
            }
            let needed = command.map_or(0, |command| self.memory_for(command, &header));
            let payload = header.payload() as usize;
            let (mut buffer, mut room) = (None, usize::MAX);
            if needed > 0 {
                let taken = match payload {
                    0 => self.memory.take(needed).await.map(|buffer| (buffer, needed)),
                    _ => self.memory.take_for_payload(needed).await,
                };
                match taken {
                    Ok(taken) => (buffer, room) = (Some(taken.0), taken.1),
                    Err(_) => command = Err(errno::ENOMEM),
                }
            }
            if payload > 0 {
                match &mut buffer {
                    Some(buffer) => self.take_payload(input, buffer, payload, room).await?,
                    None => input.discard(&self.io, socket, payload).await?,
                }
            }
            if let (Ok(Command::NarrowBlockStatus { one }), Some(room)) = (command, &buffer) {
                let narrowed = header.narrow(&room.bytes()[..payload], &self.rules());
                command = narrowed.map(|(narrow, of)| {
                    header = narrow;
                    Command::BlockStatus { one, of }
                });
            }
            if command.is_err() {
                buffer.take().into_iter().for_each(|room| self.memory.give_back(room));
            }
            let slot = self.slots.take(|number, slot| self.start(number, slot)).await;
            self.slots.hand(slot, Job { header, command, buffer });
            self.requests.set(self.requests.get() + 1);
            if !self.armed.replace(true) {
                self.arm();
            }
            in_one_go += 1;
            if in_one_go == BEGUN_AT_ONCE {
                in_one_go = 0;
                self.io.next_turn().await;
            }
        }
    }

    /// Take a payload, with room in the buffer for the first bytes, and for more as those come.
    async fn take_payload(
        &self,
        input: &mut Input,
        buffer: &mut Buffer,
        payload: usize,
        mut room: usize,
    ) -> Result<(), Gone> {
        let mut done = 0;
        loop {
            let part = done..payload.min(room);
            done = part.end;
            self.part.set(Some(self.io.now()));
            input.payload(&self.io, self.socket.handle(), buffer, part).await?;
            self.part.set(None);
            if done == payload {
                break;
            }
            room = self.memory.take_rest(room).await;
        }
        // A buffer is given back as large as it is.
        while room < buffer.bytes().len() {
            room = self.memory.take_rest(room).await;
        }
        self.memory.has_rest();
        Ok(())
    }

    fn rules(&self) -> Rules {
        Rules {
            size: self.vbd.size(),
            read_only: self.vbd.info().read_only,
            structured: self.structured,
            contexts: self.contexts,
        }
    }

    fn start(self: &Rc<Self>, number: usize, slot: Rc<Slot>) {
        let connection = self.clone();
        self.io.spawn(async move {
            while let Some(job) = slot.next(&connection.io).await {
                let (header, reply) = connection.carry_out(job).await;
                connection.gather(number, &header, reply);
            }
        });
    }

    /// Whether nobody waits for replies any more, or the server does not wait for them.
    pub(super) fn is_over(&self) -> bool {
        self.stopping.get().is_some() || self.broken.get()
    }

    /// Put a reply where the next send finds it.
    fn gather(&self, slot: usize, header: &Header, reply: Reply) {
        let mut batch = self.gathering.borrow_mut();
        let (to, offset) = (To::from(header), header.offset);
        match reply {
            Reply::Failed(error, words) if self.structured => {
                batch.head(&Head::error(to, error, words));
            }
            Reply::Failed(error, _) => batch.head(&Head::simple(header.cookie, error)),
            // Only a read must be answered by chunks, even where there is nothing to read; and all,
            // where headers are extended.
            Reply::Done if self.structured && header.is_read() || self.extended => {
                batch.head(&Head::none(to));
            }
            Reply::Done => batch.head(&Head::simple(header.cookie, 0)),
            Reply::Data(buffer, len) => {
                batch.head(&self.data_head(header, len));
                batch.data(&buffer, 0..len);
                batch.buffers.push(buffer);
            }
            Reply::Piped(pipe, piped, buffer, len) => {
                batch.head(&self.data_head(header, piped + len));
                batch.piped(pipe, piped);
                batch.data(&buffer, 0..len);
                batch.buffers.push(buffer);
            }
            Reply::Hole(len) => batch.head(&Head::hole(to, true, offset, len as u32)),
            Reply::Parts(buffer, mut parts) => {
                parts.gather(header, &buffer, &mut batch);
                batch.buffers.push(buffer);
                batch.buffers.push(parts.heads);
            }
            Reply::Status(buffer, len) => {
                batch.data(&buffer, 0..len);
                batch.buffers.push(buffer);
            }
        }
        batch.slots.push(slot);
        self.gathered.notify(&self.io);
    }

    /// What stands before `len` bytes that a read gave.
    fn data_head(&self, header: &Header, len: usize) -> Head {
        match self.structured {
            true => Head::data(header.into(), true, header.offset, len as u32),
            false => Head::simple(header.cookie, 0),
        }
    }

    /// Send what is gathered, again and again; more gathers meanwhile.
    async fn send_replies(self: Rc<Self>, mut sending: Batch, mut sealer: Option<Sealer>) {
        let socket = self.socket.handle();
        loop {
            while self.gathering.borrow().is_empty() {
                if self.ended.get() {
                    if let Some(sealer) = sealer.as_mut().filter(|_| !self.broken.get()) {
                        // It may have gone already.
                        let _ = sealer.close(&self.io, socket, &self.sending).await;
                    }
                    self.farewell.set(false);
                    self.told.notify(&self.io);
                    return;
                }
                self.gathered.wait(&self.io).await;
            }
            std::mem::swap(&mut sending, &mut *self.gathering.borrow_mut());
            if !self.broken.get() {
                let sent = match &mut sealer {
                    None => sending.send(&self.io, socket, &self.sending).await,
                    Some(sealer) => {
                        sending.send_sealed(&self.io, socket, sealer, &self.sending).await
                    }
                };
                self.sending.set(None);
                if let Err(error) = sent {
                    let error = io::Error::from_raw_os_error(error);
                    tracing::debug!("cannot send to an NBD client: {error}");
                    self.broken.set(true);
                    close(&self.socket, Shutdown::Both);
                }
            }
            sending.buffers.drain(..).for_each(|buffer| self.memory.give_back(buffer));
            for pipe in sending.pipes.drain(..) {
                // What a client did not take is still in it.
                if self.broken.get() { self.pipes.close(pipe) } else { self.pipes.give_back(pipe) }
            }
            sending.slots.drain(..).for_each(|slot| self.slots.release(slot));
            sending.clear();
        }
    }

    /// Let the alarm ring when the client may have come to rest.
    fn arm(&self) {
        self.alarm.set_unless_called(REST);
        let stops = self.alarm.is_stopped() && self.stopping.get().is_none();
        if stops || self.alarm.is_leaving() && !self.leaving.get() {
            self.alarm.ring();
        }
    }

    pub(super) fn alarm_rang(self: &Rc<Self>) {
        if self.alarm.was_called() {
            self.memory.look_again();
        }
        if self.ended.get() {
            // It does not even take a farewell.
            close(&self.socket, Shutdown::Both);
            return;
        }
        if self.alarm.is_stopped() {
            self.stop();
            return;
        }
        if self.alarm.is_leaving() {
            self.leave();
            return;
        }
        let rests = self.slots.all_free() && !self.memory.is_used() && !self.memory.is_waited_for();
        let seen = self.seen.replace(self.requests.get());
        let now = self.io.now();
        if seen != self.requests.get() {
            self.active.set(now);
        }
        let waited = self.client_keeps_waiting(now);
        if self.has_stalled(now) || self.is_idle(now, rests, waited) {
            close(&self.socket, Shutdown::Both);
        } else if rests && seen == self.requests.get() {
            self.memory.trim();
            self.pipes.trim();
            self.armed.set(false);
            if let Some(idle) = self.limits.idle {
                let left = idle.saturating_sub(since(self.active.get(), now));
                self.alarm.set_unless_stopped(left);
            }
        } else {
            self.arm();
        }
    }

    /// How long the client has taken no byte of a reply, or sent none of a payload.
    fn client_keeps_waiting(&self, now: Time) -> Option<Duration> {
        let times = [self.sending.get(), self.paying.get()];
        times.into_iter().flatten().map(|from| since(from, now)).max()
    }

    /// Whether the client holds what others wait for, and does nothing to give it back.
    fn has_stalled(&self, now: Time) -> bool {
        // A byte now and then does not keep room.
        let times = [self.sending.get(), self.part.get()];
        let waited = times.into_iter().flatten().map(|from| since(from, now)).max();
        let stalled = waited.is_some_and(|waited| waited >= self.limits.stalled)
            && self.share.is_borrower()
            && self.share.is_wanted();
        if stalled {
            tracing::warn!(
                "an NBD client ({}) neither takes its replies nor sends its data, and others wait for \
                 the memory (--nbd-memory): closed",
                self.peer
            );
        }
        stalled
    }

    fn is_idle(&self, now: Time, rests: bool, waited: Option<Duration>) -> bool {
        let rested = if rests { since(self.active.get(), now) } else { Duration::ZERO };
        let idle =
            self.limits.idle.is_some_and(|idle| rested.max(waited.unwrap_or_default()) >= idle);
        if idle {
            tracing::info!("an NBD client ({}) was idle for too long: closed", self.peer);
        }
        idle
    }

    /// Take no more requests; those in flight end and are answered, within the time there is.
    fn stop(self: &Rc<Self>) {
        let drain = self.limits.drain;
        let Some(since) = self.stopping.get() else {
            self.stopping.set(Some(self.io.now()));
            self.alarm.set(drain);
            self.armed.set(true);
            let connection = self.clone();
            self.io.spawn(async move {
                let _hurry = connection.vbd.hurry();
                connection.slots.rest().await;
                // The receiver may be waiting for a request that is not wanted any more.
                close(&connection.socket, Shutdown::Read);
            });
            return;
        };
        let passed = Duration::from_nanos(self.io.now().saturating_sub(since));
        match drain.checked_sub(passed).filter(|left| !left.is_zero()) {
            Some(left) => self.alarm.set(left),
            None => {
                tracing::warn!("an NBD client does not take its last replies: closed");
                close(&self.socket, Shutdown::Both);
            }
        }
    }

    /// Take no more requests; when those in flight have ended and are answered another server may have the client.
    fn leave(self: &Rc<Self>) {
        // All disks of the server stand still meanwhile.
        let limit = self.limits.drain.min(LEAVES);
        self.alarm.set_unless_called(limit);
        if self.alarm.is_stopped() {
            self.alarm.ring();
        }
        self.armed.set(true);
        if self.leaving.replace(true) {
            // What is waited for may as well be the disk, which is not the client's doing.
            let waited = self.client_keeps_waiting(self.io.now());
            if waited.is_some_and(|waited| waited >= limit) {
                tracing::warn!(
                    "an NBD client takes no replies, or sends no rest of a request, and another server is to have it: closed"
                );
                close(&self.socket, Shutdown::Both);
            }
            return;
        }
        let connection = self.clone();
        self.io.spawn(async move {
            let _hurry = connection.vbd.hurry();
            connection.slots.rest().await;
            // Nothing is being sent: what is waited for at most is a request that is yet to come.
            if connection.hands_over() && connection.between.get() {
                connection.io.run(Op::Cancel { file: connection.socket.handle() }).await;
            }
        });
    }
}

fn since(from: Time, now: Time) -> Duration {
    Duration::from_nanos(now.saturating_sub(from))
}
