//! The server that hands over, until it ends or goes on.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ringtap_export::{fuse, nbd, vhost_user};
use ringtap_io::Tasks;
use ringtap_vbd::DirtyBitmap;
use rustix::time::{ClockId, clock_gettime};
use sd_notify::NotifyState;

use super::channel::{Channel, Kind};
use super::state::{
    Client, Connections, DiskState, FrontEnd, GroupState, ListenerState, MessageState, MountState,
    State, digits, encode,
};
use super::{CHANNEL, UNDER_WAY, asked, leave_all, lock, whole};
use crate::control::JobStatus;
use crate::events::notify;
use crate::opened::identity;
use crate::pid_file::PidFile;
use crate::residence::Residence;
use crate::running::{DiskId, Running, Served, ServerId, Serving, is_failed};
use crate::transports::Transport;
use crate::{Address, Error, kept, plan};

/// How long the next server may take to prepare, where nobody has said.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long it may take once the disks stand still.
const PAUSE: Duration = Duration::from_secs(10);
/// How long it may take to say why it does not listen.
const SAYS_WHY: Duration = Duration::from_secs(1);
/// How long clients may take that are about to choose their export.
const HANDSHAKES: Duration = Duration::from_millis(500);
/// What of a job's end is waited for, and of files that are being written.
const SETTLED: Duration = Duration::from_secs(10);
/// How long it is tried to open images again that somebody else has meanwhile, and how often.
const COMES_BACK: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(100);
/// How soon it is seen that threads have ended.
const SOON: Duration = Duration::from_micros(200);

/// How a server is to be followed by another.
#[derive(Debug, Default)]
pub(crate) struct Wish {
    /// The program; else the one at the path that this one was started from.
    pub(crate) binary: Option<PathBuf>,
    /// How long it may take to prepare.
    pub(crate) patience: Option<Duration>,
}

fn failed(why: impl Into<String>) -> Error {
    Error::Upgrade(why.into())
}

/// Hand all over to another process, which has the id that is given: this one is to end and to touch nothing.
///
/// # Errors
/// Where that is not to be, and why: this server goes on as before.
pub(crate) fn hand_over(running: &mut Running, wish: &Wish) -> Result<u32, Error> {
    running.may_be_handed_over().map_err(failed)?;
    let (state, files) = running.state()?;
    let mut next = Next::start(wish)?;
    tracing::info!("handing over to process {}, which prepares", next.process.id());
    let files: Vec<&dyn AsFd> = files.iter().map(|file| file as &dyn AsFd).collect();
    next.tell(Kind::State, &encode(&state).map_err(failed)?, &files)?;
    next.expect(Kind::Ready, wish.patience.unwrap_or(PATIENCE))?;
    running.flush_all();
    for serving in running.servers.values() {
        if let Transport::Nbd { server, .. } = &*serving.transport {
            server.wait_for_handshakes(HANDSHAKES);
        }
    }
    // Guests and clients have gone on meanwhile; what else has changed nobody has carried out, for this thread does.
    running.may_be_handed_over().map_err(failed)?;
    let still = Still::stand(running)?;
    tracing::debug!("images are closed after {:?}", still.since());
    let end = still.pass(&mut next);
    let pause = wish.patience.unwrap_or(PAUSE).min(PAUSE);
    match end.and_then(|()| next.expect(Kind::Taken, pause)) {
        Ok(()) => {
            leave_all(true);
            let pid = next.process.id();
            notify(&[NotifyState::MainPid(pid)]);
            // Who waits for this process to end finds the other in it.
            if let Some(path) = &running.config.pid_file {
                if let Err(error) = PidFile::say(path, pid) {
                    tracing::warn!("cannot write {}: {error}", path.display());
                }
            }
            tracing::debug!("images are open again after {:?}", still.since());
            tracing::info!("process {pid} serves from now on");
            next.let_go();
            Ok(pid)
        }
        Err(error) => {
            next.end();
            if next.has_taken() {
                // It was, for a moment, the one that serves: what it left is taken up as after any kill.
                leave_all(true);
                tracing::error!(
                    "the new process took over, and too late: both end, start the server again"
                );
                std::process::exit(1);
            }
            tracing::error!("{error}; this server goes on");
            still.thaw(running);
            Err(error)
        }
    }
}

/// The next server, which is killed when this drops, unless it was let go.
struct Next {
    process: ringtap_sandbox::Next,
    channel: Channel,
    goes_on: bool,
}

impl Next {
    fn start(wish: &Wish) -> Result<Next, Error> {
        let binary = match &wish.binary {
            Some(path) => path.clone(),
            None => own_path().map_err(|error| {
                failed(format!("where this program is cannot be found: {error}"))
            })?,
        };
        let failed =
            |error: io::Error| failed(format!("cannot start {}: {error}", binary.display()));
        let chosen = wish.binary.is_some();
        let started = ringtap_sandbox::Next::start(&binary, chosen, CHANNEL);
        let (process, channel) = started.map_err(failed)?;
        let next = Next { process, channel: Channel(channel), goes_on: false };
        let channel = &next.channel.0;
        channel.set_write_timeout(Some(PAUSE)).map_err(failed)?;
        let mut under_way = lock(&UNDER_WAY);
        under_way.0 = Some(channel.try_clone().map_err(failed)?);
        match under_way.1 {
            true => Err(self::failed(ENDS)),
            false => Ok(next),
        }
    }

    fn tell(&mut self, kind: Kind, body: &[u8], files: &[&dyn AsFd]) -> Result<(), Error> {
        let Err(error) = self.channel.send_file(kind, body, files) else { return Ok(()) };
        // What it has said, or how it ended, says more.
        self.expect(kind, SAYS_WHY)?;
        Err(failed(format!("the new process does not take what it is told: {error}")))
    }

    /// Wait until it says that.
    fn expect(&mut self, kind: Kind, patience: Duration) -> Result<(), Error> {
        let said = self.channel.receive(Some(Instant::now() + patience));
        match said {
            Ok(Some(message)) if message.kind == kind => Ok(()),
            Ok(Some(message)) if message.kind == Kind::Failed => {
                Err(failed(format!("the new process cannot take over: {}", message.text)))
            }
            Ok(Some(message)) => Err(failed(format!(
                "the new process says {:?} where {kind:?} is due",
                message.kind
            ))),
            Ok(None) if is_told_to_end() => Err(failed(ENDS)),
            Ok(None) => Err(failed(format!("the new process has ended: {}", self.how_it_ended()))),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                Err(failed(format!("the new process was not done after {} s", patience.as_secs())))
            }
            Err(error) => Err(failed(format!("the new process cannot be heard: {error}"))),
        }
    }

    fn how_it_ended(&mut self) -> String {
        for _ in 0..50 {
            match self.process.ended() {
                Some(status) => {
                    return match (status.code(), status.signal()) {
                        (Some(code), _) => format!("status {code}; see what it printed"),
                        (_, signal) => format!("signal {}", signal.unwrap_or(0)),
                    };
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
        "it closed the channel".to_owned()
    }

    /// It is no more when this returns.
    fn end(&mut self) {
        self.process.end();
    }

    /// Whether it said after all that it has taken over.
    fn has_taken(&mut self) -> bool {
        let soon = Instant::now() + SAYS_WHY;
        matches!(self.channel.receive(Some(soon)), Ok(Some(said)) if said.kind == Kind::Taken)
    }

    fn let_go(mut self) {
        self.goes_on = true;
        if is_told_to_end() {
            // It came too late for this process, and is meant for whoever serves.
            self.process.stop();
        }
    }
}

const ENDS: &str = "this server is told to end: no other takes over";

fn is_told_to_end() -> bool {
    lock(&UNDER_WAY).1
}

impl Drop for Next {
    fn drop(&mut self) {
        lock(&UNDER_WAY).0 = None;
        if !self.goes_on {
            self.end();
        }
    }
}

/// Where the program that runs was when it was started: what is there now is the next.
fn own_path() -> io::Result<PathBuf> {
    STARTED.get().cloned().map_or_else(std::env::current_exe, Ok)
}

static STARTED: OnceLock<PathBuf> = OnceLock::new();

/// Note where this program is, before another takes its place.
pub(crate) fn note_program() {
    if let Ok(path) = std::env::current_exe() {
        // The same where it is noted again.
        let _ = STARTED.set(path);
    }
}

impl Running {
    /// Why this server cannot be followed by another now.
    fn may_be_handed_over(&self) -> Result<(), String> {
        if !self.upgradable {
            return Err("this server is part of another program".into());
        }
        if std::process::id() == 1 {
            return Err("this server is the first process of its container, which ends with it: start the container anew".into());
        }
        let by_systemd = std::env::var("SYSTEMD_EXEC_PID").ok();
        let of_systemd = by_systemd == Some(std::process::id().to_string());
        if of_systemd && std::env::var_os("NOTIFY_SOCKET").is_none() {
            return Err("systemd would not learn of the new process, and kill it: the unit needs Type=notify".into());
        }
        if let Some(name) = self.secrets.keys().chain(self.graph.names()).next() {
            return Err(format!(
                "{name} was named at run time and is no disk: the next process would not know it; remove it first"
            ));
        }
        let pending = &self.pending;
        if !pending.exports.is_empty() || pending.nbd {
            return Err("an export is about to come or to go: try again".into());
        }
        if let Some((id, _)) =
            self.jobs.iter().find(|(_, job)| job.status() != JobStatus::Concluded)
        {
            return Err(format!("the job {id} is at work: wait for it, or cancel it"));
        }
        for (id, served) in &self.disks {
            let node = served.node();
            if is_failed(served) {
                return Err(format!("the disk {node} was stopped by a panic: restart the server"));
            }
            if pending.changing.contains(id) || pending.bitmaps_changing.contains(id) {
                return Err(format!("the disk {node} is being changed: try again"));
            }
            if !kept::stands_alone(served) || served.moment.is_some() {
                return Err(format!(
                    "the disk {node} is part of a snapshot or backup that is not done"
                ));
            }
            if served.vbd.waiting_for_room() > 0 {
                return Err(format!("requests of the disk {node} wait for space: make room first"));
            }
            if served.file.is_some() && identity(&served.disk.path) != served.file {
                return Err(format!(
                    "{} is another file now than the one that the disk {node} has open: the next process would serve that",
                    served.disk.path.display()
                ));
            }
            if served.ties.in_file.is_some() || served.ties.by_image {
                return Err(format!(
                    "images of the disk {node} have names of their own: the next process would not know them"
                ));
            }
            let lost = |one: &DirtyBitmap| !one.persistent;
            if let Some(one) = served.vbd.dirty_bitmaps().into_iter().find(lost) {
                let name = &one.name;
                return Err(format!(
                    "the disk {node} has the bitmap {name}, which ends with this process: remove it first"
                ));
            }
        }
        for serving in self.servers.values() {
            if serving.closing {
                return Err("an export is about to go: try again".into());
            }
            serving.transport.must_stay().map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// What the next server prepares from, and the descriptors that go with it: the first comes after the state itself.
    fn state(&self) -> Result<(State, Vec<OwnedFd>), Error> {
        let mut state = State { program: env!("CARGO_PKG_VERSION").into(), ..State::default() };
        let unkept = |node: &str, why: String| failed(format!("the disk {node}: {why}"));
        for served in self.disks.values() {
            let described =
                kept::of_disk(&served.disk).map_err(|why| unkept(served.node(), why))?;
            let file = served.disk.keeping.file.clone();
            state.disks.push(DiskState { described, file, left_out: None });
        }
        for (disk, why) in &self.left_out {
            let node = disk.node_name.as_deref().unwrap_or_default();
            let described = kept::of_disk(disk).map_err(|why| unkept(node, why))?;
            let (file, left_out) = (disk.keeping.file.clone(), Some(why.clone()));
            state.disks.push(DiskState { described, file, left_out });
        }
        for (name, group) in &self.groups {
            let described = kept::of_group(name, group).map_err(|why| unkept(name, why))?;
            let file = self.looked.groups.get(name).cloned();
            state.groups.push(GroupState { described, file });
        }
        let mut files = vec![];
        let mut listen = |place: Address, socket: OwnedFd| {
            files.push(socket);
            let (asked, place, socket) = (asked(&place), whole(&place), files.len());
            state.listeners.push(ListenerState { asked, place, socket });
        };
        let no_more = |error: io::Error| failed(format!("a socket cannot be passed on: {error}"));
        for serving in self.servers.values() {
            match &*serving.transport {
                Transport::Nbd { server, .. } => {
                    for listener in server.listeners() {
                        let socket = listener.as_fd().try_clone_to_owned().map_err(no_more)?;
                        listen(plan::place(listener), socket);
                    }
                }
                Transport::VhostUser { path, server } => {
                    listen(Address::Unix(path.into()), server.listener().map_err(no_more)?);
                }
                Transport::Fuse(_) | Transport::Ublk(_) => {}
            }
        }
        for (place, socket) in &self.listening {
            listen(place.clone(), socket.try_clone().map_err(no_more)?);
        }
        for serving in self.servers.values() {
            let Transport::Fuse(server) = &*serving.transport else { continue };
            if let Some(fuse::Passed { device, made }) = server.pass().map_err(no_more)? {
                files.push(device);
                let (path, device) = (server.path().to_owned(), files.len());
                state.mounts.push(MountState { path, device, made });
            }
        }
        Ok((state, files))
    }

    /// Make stable what there is, so that there is little left to do while the disks stand still.
    fn flush_all(&self) {
        let Ok(reactor) = ringtap_io::reactor() else { return };
        let mut tasks = Tasks::new(reactor);
        for served in self.disks.values().filter(|served| goes(served)) {
            let (vbd, io) = (served.vbd.clone(), tasks.io().clone());
            // What fails here fails again where it counts.
            let _ = tasks.block_on(async move { vbd.fork().flush(&io).await });
        }
        if let Some(keeper) = &self.keeper {
            keeper.settle(SETTLED);
        }
    }
}

/// Wait until a server's thread has ended. Requests that wait for space fail then, for nobody can say here that there is some.
fn wait_for(serving: &mut Serving, disks: &BTreeMap<DiskId, Served>) {
    while !serving.has_ended() {
        for served in disks.values().filter(|served| served.vbd.waiting_for_room() > 0) {
            served.vbd.give_up_waiting();
        }
        std::thread::sleep(SOON);
    }
    serving.join();
}

/// Whether a disk's image is here and closed by one before it is opened by the other.
fn goes(served: &Served) -> bool {
    !served.disk.incoming && !served.disk.options.read_only && !served.disk.is_null()
}

/// All disks stand still: no server takes requests, and images are closed.
struct Still {
    began: u64,
    residences: Vec<Arc<Residence>>,
    front_ends: Vec<(ServerId, String, vhost_user::Connection)>,
    sessions: Vec<(ServerId, String, nbd::Session)>,
    modified: Vec<(PathBuf, u64)>,
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl Still {
    /// Have all requests end, and no more begin.
    fn stand(running: &mut Running) -> Result<Still, Error> {
        let mut still = Still {
            began: now(),
            residences: vec![],
            front_ends: vec![],
            sessions: vec![],
            modified: vec![],
        };
        running.handing_over.store(true, SeqCst);
        for serving in running.servers.values_mut() {
            serving.transport.hand_over(true);
            serving.stop.raise();
        }
        for (id, serving) in &mut running.servers {
            wait_for(serving, &running.disks);
            match &*serving.transport {
                Transport::VhostUser { path, server } => match server.left() {
                    Ok(Some(left)) => still.front_ends.push((*id, path.clone(), left)),
                    Ok(None) => {}
                    Err(error) => tracing::error!("a front-end is let go: {error}"),
                },
                Transport::Nbd { places, server, .. } => {
                    let first = places.first().map(|(place, _)| place.to_string());
                    let first = first.unwrap_or_default();
                    let left = server.left().into_iter();
                    still.sessions.extend(left.map(|session| (*id, first.clone(), session)));
                }
                Transport::Fuse(server) => {
                    let modified = server.modified().map(|since| since.as_nanos() as u64);
                    let path = server.path().to_owned();
                    still.modified.extend(modified.map(|modified| (path, modified)));
                }
                Transport::Ublk(_) => {}
            }
        }
        let going: Vec<(DiskId, crate::Disk)> = running
            .disks
            .iter()
            .filter(|(_, served)| goes(served))
            .map(|(id, served)| (*id, served.disk.clone()))
            .collect();
        let residences: Vec<_> = going
            .into_iter()
            .filter_map(|(id, disk)| Some((running.residence_of(id)?, disk)))
            .collect();
        still.residences = residences.iter().map(|(residence, _)| residence.clone()).collect();
        tracing::debug!("requests have ended after {:?}", still.since());
        let closed = in_parallel(&residences, |(residence, disk)| residence.hand_over(disk));
        match closed {
            Ok(()) => Ok(still),
            Err(error) => {
                still.thaw(running);
                Err(error)
            }
        }
    }

    fn since(&self) -> Duration {
        Duration::from_nanos(now().saturating_sub(self.began))
    }

    /// Tell the next server what goes on there.
    fn pass(&self, next: &mut Next) -> Result<(), Error> {
        let mut files: Vec<&dyn AsFd> = vec![];
        let mut add = |file| {
            files.push(file);
            files.len()
        };
        let mut connections = Connections { began: self.began, ..Connections::default() };
        for (_, place, connection) in &self.front_ends {
            let socket = add(&connection.socket);
            let requests = connection.requests.as_ref().map(|file| add(file));
            let messages = connection.messages.iter().map(|message| MessageState {
                request: message.request,
                payload: digits(&message.payload),
                files: message.files.iter().map(|file| add(file)).collect(),
            });
            let messages = messages.collect();
            let place = place.clone();
            connections.vhost_user.push(FrontEnd { place, socket, requests, messages });
        }
        connections.modified.clone_from(&self.modified);
        for (_, place, session) in &self.sessions {
            connections.nbd.push(Client {
                place: place.clone(),
                socket: add(&session.socket),
                export: session.export.clone(),
                structured: session.structured,
                extended: session.extended,
                contexts: session.contexts,
                input: digits(&session.input),
            });
        }
        next.tell(Kind::Connections, &encode(&connections).map_err(failed)?, &files)
    }

    /// Go on as before.
    fn thaw(self, running: &mut Running) {
        running.handing_over.store(false, SeqCst);
        let began = Instant::now();
        while let Err(error) = in_parallel(&self.residences, |residence| residence.take_over()) {
            tracing::error!("a disk is not there again yet: {error}");
            if began.elapsed() > COMES_BACK {
                break;
            }
            std::thread::sleep(LOOK);
        }
        for served in running.disks.values() {
            served.vbd.wait_again();
        }
        for (id, _, connection) in self.front_ends {
            let transport = running.servers.get(&id).map(|serving| serving.transport.clone());
            if let Some(Transport::VhostUser { server, .. }) = transport.as_deref() {
                server.adopt(connection);
            }
        }
        for (id, _, session) in self.sessions {
            let transport = running.servers.get(&id).map(|serving| serving.transport.clone());
            if let Some(Transport::Nbd { server, .. }) = transport.as_deref() {
                server.adopt(session);
            }
        }
        let ids: Vec<ServerId> = running.servers.keys().copied().collect();
        for id in ids {
            if let Err(error) = running.start_again(id) {
                tracing::error!("an export has ended: {error}");
            }
        }
    }
}

/// Do the same to each, on a few threads. The first failure, after all were tried.
pub(super) fn in_parallel<T: Sync>(
    all: &[T],
    work: impl Fn(&T) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    const MOST: usize = 8;
    let threads = all.len().clamp(1, MOST);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let run = || {
        let mut end = Ok(());
        while let Some(one) = all.get(next.fetch_add(1, SeqCst)) {
            end = end.and(work(one));
        }
        end
    };
    std::thread::scope(|scope| {
        let spawned: Vec<_> = (1..threads).map(|_| scope.spawn(run)).collect();
        let own = run();
        spawned.into_iter().fold(own, |end, thread| {
            end.and(thread.join().unwrap_or_else(|_| Err(failed("a thread panicked"))))
        })
    })
}

/// Tell `ringtap upgrade PID`, if it waits, what has become of it: it has made an abstract socket for that.
pub(crate) fn tell_asker(end: &Result<u32, Error>) {
    let text = match end {
        Ok(pid) => format!("ok {pid}"),
        Err(error) => format!("error {error}"),
    };
    if let Err(error) = ringtap_sandbox::ask::tell_asker(&text) {
        tracing::debug!("nobody waits to be told of the upgrade: {error}");
    }
}
