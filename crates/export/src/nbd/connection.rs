//! One connection: a thread, a ring, and the tasks that receive, serve and send.

use std::cell::{Cell, RefCell};
use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringtap_io::{File, Io, Op, OpenFile, Ring, Signal, Tasks};
use ringtap_vbd::Vbd;
use rustix::net::{Shutdown, shutdown};

use super::alarm::Alarm;
use super::batch::Batch;
use super::carry_out::Reply;
use super::context::Contexts;
use super::handshake::{Choice, Facts, Handshake, Refusal, Step};
use super::input::{Gone, Input};
use super::memory::Memory;
use super::pipes::Pipes;
use super::reply::Head;
use super::request::{Command, Header, Rules};
use super::server::{Limits, NamedExport, facts};
use super::slot::{Job, Slot, Slots};
use super::wire::errno;
use crate::poll::{Poller, Wait};

/// How long a connection keeps its memory after the last request.
const REST: Duration = Duration::from_secs(1);

/// How many requests are begun before the disk is given them. With all that a client sends at once the
/// whole depth would move in step, and the disk idle while the software works.
const AT_ONCE: u32 = 4;

/// A connection that has its export.
pub(super) struct Connection {
    pub(super) io: Io,
    pub(super) vbd: Vbd,
    pub(super) memory: Memory,
    pub(super) pipes: Pipes,
    pub(super) structured: bool,
    /// Whether the last large read ended in zeros.
    pub(super) zeros_expected: Cell<bool>,
    pub(super) contexts: Contexts,
    socket: Arc<OpenFile>,
    alarm: Arc<Alarm>,
    limits: Limits,
    slots: Slots,
    gathering: RefCell<Batch>,
    gathered: Signal,
    /// Requests so far, and how many they were when the alarm rang last.
    requests: Cell<u64>,
    seen: Cell<u64>,
    armed: Cell<bool>,
    /// When the word to stop came.
    stopping: Cell<Option<u64>>,
    broken: Cell<bool>,
    ended: Cell<bool>,
}

/// Serve one client on the calling thread, from the greeting to the last reply.
pub(super) fn run(
    socket: OwnedFd,
    alarm: Arc<Alarm>,
    exports: Arc<[NamedExport]>,
    refusal: Option<Refusal>,
    limits: Limits,
) -> io::Result<()> {
    let mut tasks = Tasks::new(Box::new(Ring::new()?));
    let socket = Arc::new(OpenFile::new(socket));
    let io = tasks.io().clone();
    let current = Rc::new(Current::default());
    tasks.spawn(watch(io.clone(), alarm.clone(), socket.clone(), current.clone()));
    alarm.set_unless_stopped(limits.handshake);
    let outcome = Rc::new(RefCell::new(None));
    let keep = outcome.clone();
    let (watched, ringing) = (current.clone(), alarm.clone());
    tasks.spawn(async move {
        let end = serve(io, socket.clone(), alarm, exports, refusal, limits, &current).await;
        close(&socket, Shutdown::Both);
        keep.replace(Some(end));
    });
    drive(&mut tasks, || outcome.borrow().is_some())?;
    watched.over.set(true);
    ringing.ring();
    tasks.run()?;
    outcome.take().unwrap_or(Ok(()))
}

/// Run the tasks until it is done, looking again at once where the next event comes soon.
fn drive(tasks: &mut Tasks, done: impl Fn() -> bool) -> io::Result<()> {
    let io = tasks.io().clone();
    let mut poller = Poller::default();
    loop {
        tasks.run_ready();
        if done() {
            return Ok(());
        }
        // What was asked for is handed over by the very system call that waits.
        if poller.spin(io.now(), waits_for(&io)) {
            tasks.turn(false)?;
            if tasks.has_ready() {
                poller.event(io.now());
            }
            std::hint::spin_loop();
        } else {
            tasks.turn(true)?;
            poller.event(io.now());
        }
    }
}

/// The alarm and the next request are always waited for; what is more is under way on the disk.
fn waits_for(io: &Io) -> Wait {
    Wait::of(io.under_way().saturating_sub(2))
}

/// What the alarm rings for.
#[derive(Default)]
struct Current {
    connection: RefCell<Option<Rc<Connection>>>,
    over: Cell<bool>,
}

/// Whenever the alarm rings, see what for.
async fn watch(io: Io, alarm: Arc<Alarm>, socket: Arc<OpenFile>, current: Rc<Current>) {
    loop {
        io.run(Op::ReadEvent { file: alarm.file() }).await;
        if current.over.get() {
            return;
        }
        let connection = current.connection.borrow().clone();
        match connection {
            Some(connection) => connection.alarm_rang(),
            None => {
                let why = if alarm.is_stopped() { "the server stops" } else { "it takes too long" };
                tracing::debug!("an NBD handshake ended: {why}");
                close(&socket, Shutdown::Both);
            }
        }
    }
}

async fn serve(
    io: Io,
    socket: Arc<OpenFile>,
    alarm: Arc<Alarm>,
    exports: Arc<[NamedExport]>,
    refusal: Option<Refusal>,
    limits: Limits,
    current: &Current,
) -> io::Result<()> {
    let facts = exports.iter().map(facts).collect();
    let mut input = Input::new(&io).map_err(io::Error::from_raw_os_error)?;
    let Some(choice) = shake_hands(&io, socket.handle(), &mut input, facts, refusal).await else {
        return Ok(());
    };
    let Some(export) = exports.get(choice.export) else { return Ok(()) };
    // Every task of the thread serves this one disk from now on.
    let _disk = export.vbd.span().clone().entered();
    name_thread(&export.vbd.thread_name("nbd"));
    tracing::debug!(export = export.name, "an NBD client has its export");
    let connection = Connection::new(io, export.vbd.fork(), choice, socket, alarm, limits)?;
    *current.connection.borrow_mut() = Some(connection.clone());
    connection.alarm.set_unless_stopped(REST);
    connection.clone().serve(input).await;
    current.connection.borrow_mut().take();
    Ok(())
}

/// Name the calling thread, which began before it was known what it is for.
fn name_thread(name: &str) {
    if let Ok(name) = CString::new(name) {
        // What it is called is of no consequence to its work.
        let _ = rustix::thread::set_name(&name);
    }
}

async fn shake_hands(
    io: &Io,
    socket: File,
    input: &mut Input,
    facts: Vec<Facts>,
    refusal: Option<Refusal>,
) -> Option<Choice> {
    let mut handshake = Handshake::new(facts, refusal);
    let mut output = handshake.greeting().to_vec();
    loop {
        if !output.is_empty() {
            send(io, socket, &output).await?;
            output.clear();
        }
        let (used, step) = handshake.advance(input.bytes(), &mut output);
        input.consume(used);
        match step {
            Step::Again => {}
            Step::More => input.fill(io, socket).await.ok()?,
            Step::Transmission(choice) => {
                send(io, socket, &output).await?;
                return Some(choice);
            }
            Step::Close(why) => {
                tracing::debug!("an NBD handshake ended: {why}");
                send(io, socket, &output).await?;
                return None;
            }
        }
    }
}

async fn send(io: &Io, socket: File, bytes: &[u8]) -> Option<()> {
    let mut buffer = io.buffer(bytes.len()).ok()?;
    buffer.bytes_mut().copy_from_slice(bytes);
    let mut sent = 0;
    while sent < bytes.len() {
        let rest = buffer.mem().window(sent, usize::MAX);
        match io.run(Op::Send { file: socket, mem: rest }).await {
            n if n > 0 => sent += n as usize,
            n if n == -libc::EINTR => {}
            _ => return None,
        }
    }
    Some(())
}

fn close(socket: &OpenFile, how: Shutdown) {
    // It fails where the client was faster.
    let _ = shutdown(socket, how);
}

/// Why no more requests are taken.
#[derive(Debug)]
enum End {
    Disconnected,
    Gone,
    Nonsense(u32),
    Stopped,
}

impl From<Gone> for End {
    fn from(_: Gone) -> End {
        End::Gone
    }
}

impl Connection {
    fn new(
        io: Io,
        vbd: Vbd,
        choice: Choice,
        socket: Arc<OpenFile>,
        alarm: Arc<Alarm>,
        limits: Limits,
    ) -> io::Result<Rc<Connection>> {
        let batch = Batch::new(&io, limits.requests).map_err(io::Error::from_raw_os_error)?;
        let sending = Batch::new(&io, limits.requests).map_err(io::Error::from_raw_os_error)?;
        let connection = Rc::new(Connection {
            memory: Memory::new(io.clone(), limits.memory),
            pipes: Pipes::default(),
            slots: Slots::new(io.clone(), limits.requests),
            vbd,
            structured: choice.structured,
            contexts: choice.contexts,
            zeros_expected: Cell::new(false),
            socket,
            alarm,
            limits,
            gathering: RefCell::new(batch),
            gathered: Signal::default(),
            requests: Cell::new(0),
            seen: Cell::new(0),
            armed: Cell::new(true),
            stopping: Cell::new(None),
            broken: Cell::new(false),
            ended: Cell::new(false),
            io: io.clone(),
        });
        io.spawn(connection.clone().send_replies(sending));
        Ok(connection)
    }

    async fn serve(self: Rc<Self>, mut input: Input) {
        let Err(end) = self.receive(&mut input).await;
        match end {
            End::Nonsense(magic) => {
                tracing::warn!("an NBD client sent {magic:#010x} where a request begins: closed");
            }
            end => tracing::debug!(requests = self.requests.get(), "an NBD client left: {end:?}"),
        }
        self.slots.rest().await;
        if self.stopping.get().is_some() {
            if let Err(error) = self.vbd.flush(&self.io).await {
                tracing::error!("the last flush of an NBD connection failed: {error}");
            }
        }
        self.vbd.account_cpu_time();
        self.ended.set(true);
        self.slots.close();
        self.gathered.notify(&self.io);
    }

    /// Take requests until there are no more to take.
    async fn receive(self: &Rc<Self>, input: &mut Input) -> Result<std::convert::Infallible, End> {
        let socket = self.socket.handle();
        let mut in_one_go = 0;
        loop {
            let header = loop {
                match Header::parse(input.bytes()) {
                    Some(Ok(header)) => break header,
                    Some(Err(magic)) => return Err(End::Nonsense(magic.0)),
                    None if self.stopping.get().is_some() => return Err(End::Stopped),
                    None => input.fill(&self.io, socket).await?,
                }
            };
            input.consume(Header::LEN);
            let mut command = header.check(&self.rules());
            if command == Ok(Command::Disconnect) {
                return Err(End::Disconnected);
            }
            if self.stopping.get().is_some() {
                command = Err(errno::ESHUTDOWN);
            }
            let needed = command.map_or(0, |command| self.memory_for(command, &header));
            let mut buffer = None;
            if needed > 0 {
                match self.memory.take(needed).await {
                    Ok(room) => buffer = Some(room),
                    Err(_) => command = Err(errno::ENOMEM),
                }
            }
            let payload = header.payload() as usize;
            if payload > 0 {
                match &mut buffer {
                    Some(buffer) => input.payload(&self.io, socket, buffer, payload).await?,
                    None => input.discard(&self.io, socket, payload).await?,
                }
            }
            let slot = self.slots.take(|number, slot| self.start(number, slot)).await;
            self.slots.hand(slot, Job { header, command, buffer });
            self.requests.set(self.requests.get() + 1);
            if !self.armed.replace(true) {
                self.arm();
            }
            in_one_go += 1;
            if in_one_go == AT_ONCE {
                in_one_go = 0;
                self.io.next_turn().await;
            }
        }
    }

    fn rules(&self) -> Rules {
        Rules {
            size: self.vbd.size(),
            read_only: self.vbd.info().read_only,
            structured: self.structured,
            status: !self.contexts.is_empty(),
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

    /// Put a reply where the next send finds it.
    fn gather(&self, slot: usize, header: &Header, reply: Reply) {
        let mut batch = self.gathering.borrow_mut();
        let (cookie, offset) = (header.cookie, header.offset);
        match reply {
            Reply::Failed(error, words) if self.structured => {
                batch.head(&Head::error(cookie, error, words));
            }
            Reply::Failed(error, _) => batch.head(&Head::simple(cookie, error)),
            // Only a read must be answered by chunks, even where there is nothing to read.
            Reply::Done if self.structured && header.is_read() => batch.head(&Head::none(cookie)),
            Reply::Done => batch.head(&Head::simple(cookie, 0)),
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
            Reply::Hole(len) => batch.head(&Head::hole(cookie, true, offset, len as u32)),
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
            true => Head::data(header.cookie, true, header.offset, len as u32),
            false => Head::simple(header.cookie, 0),
        }
    }

    /// Send what is gathered, again and again; more gathers meanwhile.
    async fn send_replies(self: Rc<Self>, mut sending: Batch) {
        loop {
            while self.gathering.borrow().is_empty() {
                if self.ended.get() {
                    return;
                }
                self.gathered.wait(&self.io).await;
            }
            std::mem::swap(&mut sending, &mut *self.gathering.borrow_mut());
            if !self.broken.get() {
                if let Err(error) = sending.send(&self.io, self.socket.handle()).await {
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
        self.alarm.set(REST);
        if self.alarm.is_stopped() && self.stopping.get().is_none() {
            self.alarm.ring();
        }
    }

    fn alarm_rang(self: &Rc<Self>) {
        if self.alarm.is_stopped() {
            self.stop();
            return;
        }
        self.vbd.account_cpu_time();
        if self.seen.replace(self.requests.get()) == self.requests.get() && self.slots.all_free() {
            self.memory.trim();
            self.pipes.trim();
            self.armed.set(false);
        } else {
            self.arm();
        }
    }

    /// Take no more requests; those under way end and are answered, within the time there is.
    fn stop(self: &Rc<Self>) {
        let drain = self.limits.drain;
        let Some(since) = self.stopping.get() else {
            self.stopping.set(Some(self.io.now()));
            self.alarm.set(drain);
            self.armed.set(true);
            let connection = self.clone();
            self.io.spawn(async move {
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
}
