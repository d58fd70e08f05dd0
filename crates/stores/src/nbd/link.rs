//! One thread's connection: two tasks of that thread move its bytes, and find another when it is lost.

use std::cell::{Cell, OnceCell, RefCell};
use std::io::{self, ErrorKind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringtap_io::{Io, Mem, Op, Session, Signal};
use tracing::{error, info, warn};

use super::Nbd;
use super::dial::Connection;
use super::far::Far;
use super::handshake::Agreed;
use super::landing::{Data, Landing};
use super::outgoing::Outgoing;
use super::redial::News;
use super::replies::{Reply, Says, parse};
use super::requests::{Requests, Who, tell};
use super::wire::cmd;

/// Received at once beside what goes where it belongs.
const LANDING: usize = 64 << 10;
/// Data of a read from so many bytes on goes where it belongs at once; less is received together with what follows it.
const DIRECT: usize = 32 << 10;

/// A connection that held for so long was no fault of what was sent on it.
const HOLDS: Duration = Duration::from_secs(1);

/// So long is waited for a first connection before what is asked goes another way.
const SOON: Duration = Duration::from_secs(1);

/// Within that time of one connection all others that are looked for are there, if the server has room.
const RETURNS: Duration = Duration::from_millis(1500);

/// Whose connection it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// A thread's own.
    Near,
    /// That of all who have none.
    Owner,
}

/// What is in flight of one thread.
pub(super) struct Link {
    nbd: Arc<Nbd>,
    role: Role,
    agreed: Agreed,
    requests: RefCell<Requests>,
    outgoing: RefCell<Outgoing>,
    /// There is something to send, or nothing will be any more.
    more: Signal,
    /// No connection came in the time that requests wait for one.
    given_up: Cell<bool>,
    /// This connection has had a reply.
    heard: Cell<bool>,
    /// There was a connection.
    connected: Cell<bool>,
    /// There is one.
    stands: Cell<bool>,
    /// The owner, where requests went there.
    far: OnceCell<Rc<Far>>,
    /// Requests go there from now on.
    passes: Cell<bool>,
    /// The connection is given up for the owner's, as soon as nothing is in flight.
    leaving: Cell<bool>,
    /// Something may be in flight no more.
    idle: Signal,
    /// There will be no connection any more, for the server has no room for it.
    left: Cell<bool>,
}

/// Who ended a connection, and why.
enum End {
    Ours(String),
    Theirs(String),
}

impl Link {
    /// One whose tasks run on the thread of `io`.
    pub(super) fn start(nbd: Arc<Nbd>, io: &Io, role: Role) -> Rc<Link> {
        let link = Rc::new(Link {
            agreed: nbd.agreed,
            nbd,
            role,
            requests: RefCell::default(),
            outgoing: RefCell::default(),
            more: Signal::default(),
            given_up: Cell::new(false),
            heard: Cell::new(false),
            connected: Cell::new(false),
            stands: Cell::new(false),
            far: OnceCell::new(),
            passes: Cell::new(false),
            leaving: Cell::new(false),
            idle: Signal::default(),
            left: Cell::new(false),
        });
        let (keeper, io_of_it) = (link.clone(), io.clone());
        io.spawn_beside(async move { keeper.keep(&io_of_it).await });
        link
    }

    /// Begin an operation.
    pub(super) fn begin(&self, io: &Io, who: Who, op: Op) {
        if self.given_up.get() {
            tell(io, who, -libc::EIO);
        } else if self.requests.borrow_mut().begin(io, &self.agreed, who, op) {
            self.more.notify(io);
        }
    }

    /// Nobody waits for it any more: its memory is not used from now on. Whether it was here.
    pub(super) fn cancel(&self, io: &Io, is_it: impl Fn(&Who) -> bool) -> bool {
        let mut requests = self.requests.borrow_mut();
        if let Some(cookie) = requests.sent(&is_it) {
            self.outgoing.borrow_mut().copy_rest(cookie);
        }
        let was = requests.cancel(io, is_it);
        if self.leaving.get() {
            self.idle.notify(io);
        }
        was
    }

    /// Where what is asked goes for now, if not here.
    pub(super) fn passes_to(&self) -> Option<&Rc<Far>> {
        self.far.get().filter(|_| self.passes.get())
    }

    /// Where requests have gone that did not stay here.
    pub(super) fn far(&self) -> Option<&Rc<Far>> {
        self.far.get()
    }

    /// Whether its place is another's.
    pub(super) fn has_left(&self) -> bool {
        self.left.get()
    }

    /// Whether there is a thread of the owner's: not where a test makes connections.
    fn may_pass(&self) -> bool {
        #[cfg(test)]
        return self.nbd.wishes.is_none();
        #[cfg(not(test))]
        true
    }

    /// Have all that is asked go by the owner's connection. Only who is not connected has anything to hand on.
    fn pass_on(&self, io: &Io) {
        let far = self.far.get_or_init(|| Far::new(self.nbd.owner()));
        self.passes.set(true);
        if self.stands.get() {
            return;
        }
        let waiting = self.requests.borrow_mut().take_unsent();
        for (who, op) in waiting {
            if let Who::Here(key) = who {
                far.begin(io, key, op);
            }
        }
    }

    /// What is done where a first connection, or the owner's, does not come soon, and again until it is there.
    fn look_for_room(self: &Rc<Self>, io: &Io) {
        if !self.may_pass() {
            return;
        }
        let patience = self.nbd.uri.reconnect.unwrap_or_default();
        let soon = (patience / 4).clamp(Duration::from_millis(100), SOON).as_nanos() as u64;
        let (link, door) = (Rc::downgrade(self), io.clone());
        io.spawn_beside(async move {
            loop {
                door.sleep(soon).await;
                let Some(link) = link.upgrade().filter(|link| !link.stands.get()) else {
                    return;
                };
                match link.role {
                    Role::Near => return link.pass_on(&door),
                    Role::Owner => link.nbd.places.want(),
                }
            }
        });
    }

    /// Give the connection up where the owner has none and the server no room for it.
    async fn make_room(&self, io: &Io, connection: &Connection, broken: &Cell<bool>) {
        let (places, began) = (&self.nbd.places, Instant::now());
        loop {
            if !self.leaving.get() {
                if !places.are_wanted(|| broken.get()).await {
                    return;
                }
                // The server may have been away: then the owner comes in soon by itself.
                let young = RETURNS.saturating_sub(began.elapsed());
                if !young.is_zero() {
                    io.sleep(young.as_nanos() as u64).await;
                    continue;
                }
                if !places.answer() {
                    continue;
                }
                self.leaving.set(true);
                self.pass_on(io);
            }
            let idle = self.idle.wait(io);
            if broken.get() {
                return;
            }
            if places.are_met() {
                // There was room after all.
                self.leaving.set(false);
                self.passes.set(false);
                continue;
            }
            if self.requests.borrow().is_empty() {
                break;
            }
            idle.await;
        }
        self.leave();
        connection.channel.shut();
    }

    /// There will be no connection here any more.
    fn leave(&self) {
        if !self.left.replace(true) {
            self.nbd.places.leave(true);
        }
    }

    /// Have a connection for as long as the store is open.
    async fn keep(self: Rc<Link>, io: &Io) {
        let (mut first, mut lost) = (self.nbd.take_spare(), None);
        // Connections in a row that did not hold.
        let mut brief = 0;
        while !self.nbd.is_closed() {
            let Some(connection) = (match first.take() {
                Some(connection) => Some(connection),
                None => self.connect(io, lost, brief).await,
            }) else {
                break;
            };
            let began = Instant::now();
            let (why, since) = self.talk(io, connection).await;
            let held = since.saturating_duration_since(began);
            self.outgoing.borrow_mut().clear();
            if self.nbd.is_closed() || self.left.get() {
                break;
            }
            let Some(patience) = self.nbd.uri.reconnect else {
                error!(
                    "{}: the connection is lost ({why}): requests fail from now on",
                    self.nbd.uri
                );
                break;
            };
            // One that takes connections, answers nothing and breaks them has not come back.
            if self.heard.replace(false) || held > patience {
                lost = None;
            }
            brief = if held > HOLDS { 0 } else { brief + 1 };
            let (since, _) = *lost.get_or_insert_with(|| {
                warn!(
                    "{}: the connection is lost ({why}); connecting again, for {} s before requests fail",
                    self.nbd.uri,
                    patience.as_secs()
                );
                (since, 0)
            });
            lost = lost.map(|(since, times)| (since, times + 1));
            let late = self.requests.borrow_mut().send_again(io, &self.agreed, patience);
            if late > 0 {
                error!(
                    "{}: {late} requests fail: each connection that they were sent on was lost, for over {} s ({why})",
                    self.nbd.uri,
                    patience.as_secs()
                );
            }
            if since.elapsed() > patience {
                self.give_up(io, &why);
            }
        }
        self.given_up.set(true);
        self.requests.borrow_mut().fail(io, libc::EIO);
    }

    fn give_up(&self, io: &Io, why: &str) {
        if !self.given_up.replace(true) {
            error!("{}: {why}: requests fail until the server is back", self.nbd.uri);
        }
        self.requests.borrow_mut().fail(io, libc::EIO);
    }

    /// Another connection, for one that was lost at that moment and looked for so many times since, the last `brief` of which
    /// did not hold; none where the store was closed.
    async fn connect(
        self: &Rc<Self>,
        io: &Io,
        lost: Option<(Instant, u32)>,
        brief: u32,
    ) -> Option<Connection> {
        let (since, times) = lost.unwrap_or_else(|| (Instant::now(), 0));
        let attempt = self.nbd.redial(since, times.max(brief));
        if !self.connected.get() || self.role == Role::Owner {
            self.look_for_room(io);
        }
        loop {
            match attempt.next().await {
                News::Connected(connection) => {
                    self.given_up.set(false);
                    if times == 1 {
                        info!("{}: connected again", self.nbd.uri);
                    }
                    return Some(*connection);
                }
                // It is there, and has no room for one more.
                News::TooLong(why) if self.may_pass() && self.nbd.has_connections(RETURNS) => {
                    match self.role {
                        Role::Near => {
                            warn!(
                                "{}: no further connection ({why}): queues share those that there are; connections=N in the \
                             URI asks for no more than that",
                                self.nbd.uri
                            );
                            self.pass_on(io);
                            self.leave();
                            return None;
                        }
                        Role::Owner => {
                            self.nbd.places.want();
                            self.give_up(io, &format!("no further connection: {why}"));
                        }
                    }
                }
                News::TooLong(_) if self.passes.get() => {}
                News::TooLong(why) => self.give_up(io, &why),
                News::Closed => return None,
            }
        }
    }

    /// Send and receive until the connection breaks; why it did, and when.
    async fn talk(self: &Rc<Link>, io: &Io, connection: Connection) -> (String, Instant) {
        let connection = Rc::new(connection);
        let _known = self.nbd.know(&connection);
        self.connected.set(true);
        self.stands.set(true);
        self.passes.set(self.leaving.get());
        if self.role == Role::Owner {
            self.nbd.places.meet();
        }
        let broken = Rc::new(Cell::new(false));
        let sender = (self.clone(), io.clone(), connection.clone(), broken.clone());
        io.spawn_beside(async move {
            let (link, io, connection, broken) = sender;
            link.send(&io, &connection, &broken).await;
        });
        if self.role == Role::Near {
            let maker = (self.clone(), io.clone(), connection.clone(), broken.clone());
            io.spawn_beside(async move {
                let (link, io, connection, broken) = maker;
                link.make_room(&io, &connection, &broken).await;
            });
        }
        let end = self.receive(io, &connection).await;
        let since = Instant::now();
        broken.set(true);
        if self.role == Role::Owner {
            self.nbd.places.miss();
        }
        if let End::Ours(_) = end {
            self.see_off(io, &connection).await;
        }
        connection.channel.shut();
        self.stands.set(false);
        self.more.notify(io);
        if self.role == Role::Near {
            self.idle.notify(io);
            self.nbd.places.tell();
        }
        let (End::Ours(why) | End::Theirs(why)) = end;
        (why, since)
    }

    /// What the server has taken of a connection that we end may yet be carried out: it must not be after what is sent on the
    /// next. So nothing more is sent, and the server is waited for to close it, for as long as requests wait.
    async fn see_off(&self, io: &Io, connection: &Rc<Connection>) {
        let Ok(mut rest) = io.buffer(LANDING) else { return };
        connection.channel.shut_sending();
        let over = Rc::new(Cell::new(false));
        let patience = self.nbd.uri.reconnect.unwrap_or_default().as_nanos() as u64;
        let (door, late, is_over) = (io.clone(), Rc::downgrade(connection), over.clone());
        io.spawn_beside(async move {
            door.sleep(patience).await;
            if let Some(connection) = late.upgrade().filter(|_| !is_over.get()) {
                connection.channel.shut();
            }
        });
        loop {
            match connection.channel.receive(Mem::EMPTY, rest.bytes_mut()) {
                Ok(0) => break,
                // Others have their turn, whatever the server sends.
                Ok(_) => io.next_turn().await,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if io.run(Op::PollIn { file: connection.channel.file() }).await < 0 {
                        break;
                    }
                }
                Err(_) => break,
            }
        }
        over.set(true);
    }

    async fn send(&self, io: &Io, connection: &Connection, broken: &Cell<bool>) {
        let channel = &connection.channel;
        while !broken.get() {
            let more = self.more.wait(io);
            self.fill();
            let flushed = match self.send_some(connection) {
                Ok(flushed) => flushed,
                Err(error) if error.kind() == ErrorKind::WouldBlock => false,
                Err(_) => {
                    // Who receives sees why.
                    channel.shut();
                    return;
                }
            };
            if !flushed {
                io.run(Op::PollOut { file: channel.file() }).await;
            } else if self.outgoing.borrow().is_empty() {
                more.await;
            }
        }
    }

    fn fill(&self) {
        let mut outgoing = self.outgoing.borrow_mut();
        let mut requests = self.requests.borrow_mut();
        while !outgoing.is_full() {
            let Some((cookie, request)) = requests.take_next() else { return };
            outgoing.push(self.agreed.replies, cookie, request.command, request.mem());
        }
    }

    /// Whether all of it has gone into the socket.
    fn send_some(&self, connection: &Connection) -> io::Result<bool> {
        let mut outgoing = self.outgoing.borrow_mut();
        if !outgoing.is_empty() {
            let sent = connection.channel.send(outgoing.parts())?;
            outgoing.sent(sent);
        }
        connection.channel.flush()
    }

    async fn receive(&self, io: &Io, connection: &Connection) -> End {
        let channel = &connection.channel;
        let Ok(bytes) = io.buffer(LANDING) else {
            return End::Ours("there is no memory left".into());
        };
        let mut landing = Landing::new(bytes);
        loop {
            let mem = match self.look(io, &mut landing) {
                Ok(mem) => mem,
                Err(why) => return End::Ours(why),
            };
            landing.make_room();
            let moved = if mem.len() < DIRECT && !channel.is_encrypted() {
                let room = landing.bytes.mem().window(landing.end, usize::MAX);
                match io.run(Op::Recv { file: channel.file(), mem: room }).await {
                    moved if moved >= 0 => Ok((moved as usize, 0)),
                    error => Err(io::Error::from_raw_os_error(-error)),
                }
            } else {
                let end = landing.end;
                let moved = channel.receive(mem, &mut landing.bytes.bytes_mut()[end..]);
                moved.map(|moved| (moved, mem.len()))
            };
            match moved {
                Ok((0, _)) => return End::Theirs("the server closed it".into()),
                Ok((moved, direct)) => landing.received(moved, direct),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let end = io.run(Op::PollIn { file: channel.file() }).await;
                    if end < 0 {
                        return End::Theirs(io::Error::from_raw_os_error(-end).to_string());
                    }
                }
                Err(error) => return End::Theirs(error.to_string()),
            }
        }
    }

    /// Look at all that was received; where data is wanted next, the memory that it goes to.
    fn look(&self, io: &Io, landing: &mut Landing) -> Result<Mem, String> {
        let mut requests = self.requests.borrow_mut();
        loop {
            if let Some(data) = &mut landing.data {
                let request = requests.find(data.cookie);
                let mem = request.as_ref().map_or(Mem::EMPTY, |request| request.mem());
                let mem = mem.window(data.at as usize, data.left as usize);
                let here = &landing.bytes.bytes()[landing.start..landing.end];
                let taken = (here.len() as u64).min(data.left) as usize;
                mem.copy_from(&here[..taken]);
                landing.start += taken;
                data.at += taken as u64;
                data.left -= taken as u64;
                if data.left > 0 {
                    return Ok(mem.window(taken, usize::MAX));
                }
                let (cookie, done) = (data.cookie, data.done);
                landing.data = None;
                if done && self.answered(io, &mut requests, cookie) {
                    self.more.notify(io);
                }
                continue;
            }
            let here = &landing.bytes.bytes()[landing.start..landing.end];
            let parsed = parse(here, &self.agreed).map_err(|broken| broken.to_string())?;
            let Some((reply, taken)) = parsed else { return Ok(Mem::EMPTY) };
            landing.start += taken;
            let (cookie, says, done) = match reply {
                Reply::Simple { cookie, error } => {
                    let request = requests.find(cookie).ok_or(UNASKED)?;
                    let reads = request.command.kind == cmd::READ;
                    match error {
                        0 if reads => {
                            let (offset, len) = (request.command.offset, request.command.len);
                            (cookie, Says::Data { offset, len }, true)
                        }
                        0 => (cookie, Says::Nothing, true),
                        error => (cookie, Says::Failed(error), true),
                    }
                }
                Reply::Chunk { cookie, says, done } => (cookie, says, done),
            };
            let request = requests.find(cookie).ok_or(UNASKED)?;
            match says {
                Says::Nothing => {}
                // It goes away, and another may come in its place: then all is asked again.
                Says::Failed(libc::ESHUTDOWN) => return Err("the server is shutting down".into()),
                Says::Failed(error) if request.error == 0 => request.error = error,
                Says::Failed(_) => {}
                Says::Status(holds) => request.holds = Some(holds),
                Says::Data { offset, len } | Says::Hole { offset, len } => {
                    let command = request.command;
                    let at = offset.wrapping_sub(command.offset);
                    let fits = at.checked_add(len).is_some_and(|end| end <= command.len);
                    // In order, so that each byte comes once.
                    let next = offset >= command.offset && at == request.got;
                    if command.kind != cmd::READ || !fits || !next {
                        return Err(
                            "the server breaks the protocol: data that nobody asked for".into()
                        );
                    }
                    request.got += len;
                    if let Says::Data { .. } = says {
                        landing.data = Some(Data { cookie, at, left: len, done });
                        continue;
                    }
                    request.mem().window(at as usize, len as usize).zero();
                }
            }
            if done && self.answered(io, &mut requests, cookie) {
                self.more.notify(io);
            }
        }
    }

    /// The last reply to a request has come. Of one that was answered before all of it was sent the rest is sent all
    /// the same, and its memory is not ours any more.
    fn answered(&self, io: &Io, requests: &mut Requests, cookie: u64) -> bool {
        self.heard.set(true);
        let mut outgoing = self.outgoing.borrow_mut();
        if !outgoing.is_empty() {
            outgoing.copy_rest(cookie);
        }
        if self.leaving.get() {
            self.idle.notify(io);
        }
        requests.answered(io, &self.agreed, cookie)
    }
}

const UNASKED: &str = "the server breaks the protocol: a reply to no request";
