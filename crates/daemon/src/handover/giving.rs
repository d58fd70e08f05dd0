//! The server that hands over, until it ends or goes on.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ringtap_export::fuse;
use sd_notify::NotifyState;

use super::bitmaps::Passed;
use super::channel::{CHANNEL, Channel, Kind};
use super::closing::failed;
use super::come::{UNDER_WAY, asked, leave_all, lock, whole};
use super::state::{
    DeviceState, DiskState, GroupState, ListenerState, MountState, SaveState, State, encode,
};
use super::still::Still;
use super::storage;
use crate::identity::identity;
use crate::left_out::LeftOut;
use crate::pid_file::PidFile;
use crate::running::{Running, is_failed};
use crate::signals::notify;
use crate::transports::Transport;
use crate::{Address, Error, described, plan};

/// How long the next server may take to prepare, where nobody has said.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long it may take once the disks stand still, and how long requests may that are in flight.
const PAUSE: Duration = Duration::from_secs(10);
/// How long it may take to say why it does not listen.
const SAYS_WHY: Duration = Duration::from_secs(1);
/// How long clients may take that are about to choose their export.
const HANDSHAKES: Duration = Duration::from_millis(500);
/// What of a job's end is waited for, and of files that are being written.
const SETTLED: Duration = Duration::from_secs(10);

/// How a server is to be followed by another.
#[derive(Debug, Default)]
pub(crate) struct Wish {
    /// The program; else the one at the path that this one was started from.
    pub(crate) binary: Option<PathBuf>,
    /// Which process asks for that program, where one says so.
    pub(crate) asker: Option<u32>,
    /// How long it may take to prepare.
    pub(crate) patience: Option<Duration>,
    /// Whether NBD clients that speak TLS are closed once their requests are answered.
    pub(crate) closes_tls: bool,
}

/// What is done with how a handover has ended.
pub(crate) type Told = Box<dyn FnOnce(&mut Running, Result<u32, Error>)>;

/// As [`hand_over`], once jobs have ended that the next server goes on with, and what is written of them stays.
pub(crate) fn begin(running: &mut Running, wish: Wish, told: Told) {
    if running.ending_jobs.is_some() {
        return told(running, Err(failed("another process is about to take over already")));
    }
    if running.at_work().next().is_none() {
        let end = hand_over(running, &wish);
        return told(running, end);
    }
    let may = running.may_pass_jobs_on();
    if let Err(why) = may.and_then(|()| running.may_be_handed_over(&wish, true)) {
        return told(running, Err(failed(why)));
    }
    let patience = wish.patience.unwrap_or(PATIENCE);
    let then = move |running: &mut Running, ended: Result<(), String>| {
        let end = ended.map_err(failed).and_then(|()| hand_over(running, &wish));
        running.pending.resumes_jobs |= end.is_err();
        told(running, end);
    };
    running.end_jobs_for_next(patience, Box::new(then));
}

/// Hand all over to another process, which has the id that is given: this one is to end and to touch nothing.
///
/// # Errors
/// Where that is not to be, and why: this server goes on as before.
fn hand_over(running: &mut Running, wish: &Wish) -> Result<u32, Error> {
    running.may_be_handed_over(wish, false).map_err(failed)?;
    // They would be greeted here, and cut off.
    let newcomers = running.newcomers.have_wait();
    let (state, files) = running.state()?;
    let body = encode(&state).map_err(failed)?;
    let mut next = Next::start(wish, state)?;
    tracing::info!("handing over to process {}, which prepares", next.process.id());
    let files: Vec<&dyn AsFd> = files.iter().map(|file| file as &dyn AsFd).collect();
    next.tell(Kind::State, &body, &files)?;
    let patience = wish.patience.unwrap_or(PATIENCE);
    next.expect(Kind::Ready, patience)?;
    storage::settle(running, patience.max(PAUSE)).map_err(failed)?;
    storage::answers(running, PAUSE).map_err(failed)?;
    if let Some(keeper) = &running.keeper {
        keeper.settle(SETTLED);
    }
    let nbd = running.servers.values().filter_map(|serving| match &*serving.transport {
        Transport::Nbd { server, .. } => Some(server.clone()),
        _ => None,
    });
    let nbd: Vec<_> = nbd.collect();
    // Who comes from now on is the next server's, or comes here after all.
    let _new_ones_wait: Vec<_> = nbd.iter().map(|server| server.have_new_ones_wait()).collect();
    let until = Instant::now() + HANDSHAKES;
    nbd.iter().for_each(|server| server.wait_for_handshakes(until));
    // Guests and clients have gone on meanwhile; what else has changed nobody has carried out, for this thread does.
    running.may_be_handed_over(wish, false).map_err(failed)?;
    let bitmaps = running.bitmaps_passed();
    let still = Still::stand(running, PAUSE)?;
    tracing::debug!("images are closed after {:?}", still.since());
    // Nothing changes the disks any more: what jobs have left to do is known.
    let bitmaps = bitmaps.into_iter().map(Passed::state).collect();
    let going = (bitmaps, running.jobs_passed());
    // What guests have set aside until the disks stood still would be in no copy.
    let end = running.scratch_is_empty().map_err(failed);
    let silent = running.newcomers.silent();
    let mut tell = |body: &[u8], files: &[&dyn AsFd]| next.tell(Kind::Connections, body, files);
    let end = end.and_then(|()| still.pass(going, &silent, &mut tell));
    let pause = patience.min(PAUSE);
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
            newcomers.for_ever();
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
    /// What it is told.
    state: State,
    goes_on: bool,
}

impl Next {
    fn start(wish: &Wish, state: State) -> Result<Next, Error> {
        let binary = match &wish.binary {
            Some(path) => path.clone(),
            None => own_path().map_err(|error| {
                failed(format!("where this program is cannot be found: {error}"))
            })?,
        };
        let failed =
            |error: io::Error| failed(format!("cannot start {}: {error}", binary.display()));
        let chosen = wish.binary.as_ref().map(|_| wish.asker.unwrap_or(0));
        let started = ringtap_sandbox::Next::start(&binary, chosen, CHANNEL);
        let (process, channel) = started.map_err(failed)?;
        let next = Next { process, channel: Channel(channel), state, goes_on: false };
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
        let is_reset = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionReset;
        let unheard = said.as_ref().is_err_and(is_reset);
        let has_not_looked = kind == Kind::State || (kind == Kind::Ready && unheard);
        match if unheard { Ok(None) } else { said } {
            Ok(Some(message)) if message.kind == kind => Ok(()),
            Ok(Some(message)) if message.kind == Kind::Failed => {
                let why = message.text;
                let cure = self.state.what_to_do(&why).map(|cure| format!("; {cure}"));
                let cure = cure.unwrap_or_default();
                Err(failed(format!("the new process cannot take over: {why}{cure}")))
            }
            Ok(Some(message)) => Err(failed(format!(
                "the new process says {:?} where {kind:?} is due",
                message.kind
            ))),
            Ok(None) if is_told_to_end() => Err(failed(ENDS)),
            Ok(None) => {
                let how = self.how_it_ended();
                let cure = if has_not_looked { KNOWS_NONE } else { "" };
                Err(failed(format!("the new process has ended: {how}{cure}")))
            }
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

/// Of a program that knows of no handover, too: it begins as a server of its own, and finds images and sockets in use.
const KNOWS_NONE: &str = ". It has not looked at what it was to take over; a program from before `ringtap upgrade` \
                          never does: to go back to one, stop this server and start that program";
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
    fn may_be_handed_over(&self, wish: &Wish, jobs_end: bool) -> Result<(), String> {
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
        self.names_passed()?;
        self.scratch_is_empty()?;
        if let Some(disk) = self.opening() {
            return Err(format!("{} is being opened: try again", disk.path.display()));
        }
        let pending = &self.pending;
        if !pending.exports.is_empty() || pending.nbd {
            return Err("an export is about to come or to go: try again".into());
        }
        let mut jobs = self.at_work().filter(|_| !jobs_end);
        if let Some((id, _)) = jobs.next() {
            return Err(format!("the job {id} is at work: wait for it, or cancel it"));
        }
        for (id, served) in &self.disks {
            let node = served.node();
            if is_failed(served) {
                return Err(format!("the disk {node} was stopped by a panic: restart the server"));
            }
            let ends = jobs_end && self.at_work().any(|(_, job)| job.disks.contains(id));
            let changing = pending.changing.contains(id) && !ends;
            if changing || pending.bitmaps_changing.contains(id) {
                return Err(format!("the disk {node} is being changed: try again"));
            }
            let shows = served.moment.is_some() && !self.moment_is_passed_on(*id, jobs_end);
            if shows && !pending.targets.contains(id) {
                return Err(format!(
                    "the disk {node} kept the moment of a backup that has broken: remove its exports and the node first"
                ));
            }
            if served.ties.shows.is_some() || shows {
                return Err(format!(
                    "the disk {node} is part of a snapshot or backup that is not done"
                ));
            }
            if served.vbd.is_paused() {
                return Err(format!(
                    "the disk {node} is paused, and the next process would not know it: resume it first"
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
        }
        self.may_pass_bitmaps_on()?;
        for serving in self.servers.values() {
            if serving.closing {
                return Err("an export is about to go: try again".into());
            }
            if serving.held_up {
                let title = serving.transport.title();
                return Err(format!(
                    "{title} still waits for requests in flight since an upgrade failed: see to the storage"
                ));
            }
            serving.transport.must_stay(wish.closes_tls).map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// What the next server prepares from, and the descriptors that go with it: the first comes after the state itself.
    fn state(&self) -> Result<(State, Vec<OwnedFd>), Error> {
        let names = self.names_passed().map_err(failed)?;
        let program = env!("CARGO_PKG_VERSION").into();
        let bitmaps = self.with_bitmaps_passed();
        let mut state = State { program, names, bitmaps, ..State::default() };
        let unkept = |node: &str, why: String| failed(format!("the disk {node}: {why}"));
        for served in self.disks.values() {
            let described =
                described::of_disk(&served.disk).map_err(|why| unkept(served.node(), why))?;
            let (file, passes) = (served.disk.keeping.file.clone(), served.disk.keeping.passes);
            state.disks.push(DiskState { described, file, left_out: None, passes });
        }
        for LeftOut { disk, error, .. } in &self.left_out {
            let node = disk.node_name.as_deref().unwrap_or_default();
            let described = described::of_disk(disk).map_err(|why| unkept(node, why))?;
            let (file, left_out) = (disk.keeping.file.clone(), Some(error.to_string()));
            let passes = disk.keeping.passes;
            state.disks.push(DiskState { described, file, left_out, passes });
        }
        for (name, group) in &self.groups {
            let described = described::of_group(name, group).map_err(|why| unkept(name, why))?;
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
                Transport::Fuse(_) | Transport::Ublk(_) | Transport::Xen { .. } => {}
            }
        }
        for (place, socket) in &self.listening {
            listen(place.clone(), socket.try_clone().map_err(no_more)?);
        }
        for (id, serving) in &self.servers {
            let Transport::Ublk(server) = &*serving.transport else { continue };
            let number = server.number();
            let disks = self.disks_of(*id).map(|served| served.node().to_owned());
            state.devices.extend(disks.map(|disk| DeviceState { disk, number }));
        }
        for serving in self.servers.values() {
            let Transport::Fuse(server) = &*serving.transport else { continue };
            if let Some(fuse::Passed { device, made }) = server.pass().map_err(no_more)? {
                files.push(device);
                let (path, device) = (server.path().to_owned(), files.len());
                state.mounts.push(MountState { path, device, made });
            }
        }
        for job in self.jobs_passed() {
            let is_by_bitmap = job.saved.as_ref().is_some_and(SaveState::is_by_bitmap);
            state.by_bitmaps.extend(is_by_bitmap.then(|| job.id.clone()));
            state.backups.extend(job.saved.is_some().then(|| job.id.clone()));
            let is_shown = job.saved.as_ref().is_some_and(|saved| saved.shown.is_some());
            state.moments.extend(is_shown.then(|| job.id.clone()));
            state.jobs.push(job.id);
        }
        state.meet_errors = self.jobs_that_meet_errors();
        state.checkpoints = self.jobs_with_checkpoints();
        state.ended = self.ended_jobs();
        Ok((state, files))
    }
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
