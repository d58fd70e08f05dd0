//! The server that takes over, until all is its own.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ringtap_export::{fuse, nbd, ublk, vhost_user};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, getppid};
use rustix::time::{ClockId, clock_gettime};

use super::channel::{CHANNEL, Channel, Files, Kind};
use super::come::{COME, Listening, leave_all, lock};
use super::names::DiskNames;
use super::state::{BitmapState, Client, Connections, JobState, State, decode};
use super::still::in_parallel;
use crate::folder::{Looked, ReadFile};
use crate::left_out::LeftOut;
use crate::running::Running;
use crate::{Config, Disk, Error, Keeping};

/// A server that begins as the next of another.
pub(crate) struct Taking {
    channel: Channel,
    state: State,
    began: u64,
    /// How long disks stood still, once they do not.
    stood_still: Option<Duration>,
    /// The server before this one.
    giver: Option<Pid>,
}

fn failed(why: impl Into<String>) -> Error {
    Error::Upgrade(why.into())
}

/// The number of the descriptor by which a server passes on what it serves, if one does.
fn channel() -> Option<String> {
    let told = std::env::var_os(CHANNEL)?;
    // What a server of this host starts inherits its environment, and is not meant.
    let parent = getppid()?.as_raw_nonzero().to_string();
    let (by, number) = told.to_str()?.split_once(':')?;
    (by == parent).then(|| number.to_owned())
}

/// Whether this process is to take over from a server that goes on until then.
pub fn takes_over() -> bool {
    channel().is_some()
}

impl Taking {
    /// What the server before this one passes on, if there is one. Called once in the life of a process.
    pub(crate) fn begin() -> Result<Option<Taking>, Error> {
        let Some(number) = channel() else { return Ok(None) };
        let giver = getppid();
        let number = number.parse::<RawFd>().ok().filter(|number| *number > 2);
        let number = number.ok_or_else(|| failed(format!("{CHANNEL} is no descriptor")))?;
        // SAFETY: whoever sets the variable has made this descriptor for this process alone, and nothing here has
        // looked at it before: this runs once, at the start.
        let socket = unsafe { OwnedFd::from_raw_fd(number) };
        rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)
            .map_err(|error| failed(format!("{CHANNEL}: {error}")))?;
        // From now on until the commit point what is at the names of this server's is another's.
        leave_all(true);
        let channel = Channel(UnixStream::from(socket));
        match receive(&channel, Kind::State).and_then(|(body, files)| prepare(&body, files)) {
            Ok(state) => Ok(Some(Taking { channel, state, began: 0, stood_still: None, giver })),
            Err(why) => {
                let _ = channel.send(Kind::Failed, &why, &[]);
                Err(failed(why))
            }
        }
    }

    /// It cannot be: the server before this one goes on.
    pub(crate) fn give_up(&self, error: &Error) {
        let _ = self.channel.send(Kind::Failed, &error.to_string(), &[]);
    }

    /// Put what was served into the configuration, instead of what the command line and the folder say; those that were
    /// not served come apart.
    pub(crate) fn configure(
        &self,
        config: &mut Config,
        read: &ReadFile,
    ) -> Result<(Looked, Vec<(Disk, String)>), Error> {
        let (mut looked, mut left_out) = (Looked::default(), vec![]);
        (config.disks, config.groups) = (vec![], vec![]);
        for group in &self.state.groups {
            let described = described(read, &group.described)?;
            for (name, allotment) in described.groups {
                looked.groups.extend(group.file.clone().map(|file| (name.clone(), file)));
                config.groups.push((name, allotment));
            }
        }
        for disk in &self.state.disks {
            let found = described(read, &disk.described)?.disk;
            let found = found.ok_or_else(|| failed("its state describes a disk that is none"))?;
            let (file, passes) = (disk.file.clone(), disk.passes);
            let keeping = Keeping { file, passes, ..found.keeping.clone() };
            let mut found = Disk { keeping, ..found };
            let is_it = |one: &&DiskNames| Some(&one.disk) == found.node_name.as_ref();
            if let Some(named) = self.state.names.disks.iter().find(is_it) {
                found.options.layers = named.layers;
                found.keeping.lies_upon = named.upon.is_some();
            }
            match &disk.left_out {
                None => config.disks.push(found),
                Some(why) => left_out.push((found, why.clone())),
            }
        }
        Ok((looked, left_out))
    }

    /// Have images come that are written to only once the server before this one has closed them.
    pub(crate) fn look_only(&self, config: &mut Config) {
        for disk in &mut config.disks {
            let is_free = disk.options.read_only && !disk.keeping.lies_upon;
            if !disk.incoming && !is_free && !disk.is_null() {
                disk.keeping.comes = true;
                disk.incoming = true;
            }
        }
    }

    /// Say that all is prepared, and take what goes on here. Whatever fails, the server before this one goes on.
    pub(crate) fn take_over(&mut self, running: &mut Running) -> Result<(), Error> {
        running.names_come(&self.state.names).map_err(failed)?;
        running.ended_jobs_come(&self.state.ended).map_err(failed)?;
        self.prepare_devices(running)?;
        let told = self.channel.send(Kind::Ready, "", &[]);
        told.map_err(|error| failed(format!("the server before this one has gone: {error}")))?;
        let (body, files) = receive(&self.channel, Kind::Connections).map_err(failed)?;
        let (began, bitmaps, jobs) = connect(&body, files).map_err(failed)?;
        self.began = began;
        let coming = running.disks.iter().filter(|(_, served)| served.disk.keeping.comes);
        let ids: Vec<_> = coming.map(|(id, _)| *id).collect();
        let residences: Vec<Arc<_>> =
            ids.iter().filter_map(|id| running.residence_of(*id)).collect();
        in_parallel(&residences, |residence| residence.take_over())?;
        for id in ids {
            running.pending.away.remove(&id);
            if let Some(served) = running.disks.get_mut(&id) {
                (served.disk.keeping.comes, served.disk.incoming) = (false, false);
                served.disk.keeping.lies_upon = false;
            }
        }
        // Nobody is served yet, and nothing has changed since.
        running.bitmaps_come(&bitmaps).map_err(failed)?;
        jobs.into_iter().try_for_each(|job| running.job_comes(job)).map_err(failed)?;
        // None of their requests comes before the word below is said.
        let devices = lock(&COME).devices.iter().map(|(_, device)| device.clone()).collect();
        let devices: Vec<Arc<ublk::Server>> = devices;
        in_parallel(&devices, |device| Ok(device.claim()?))?;
        // Where nobody hears it the server before this one is gone, and this is all that there is; or it lives, has given up
        // waiting, and goes on.
        let told = self.channel.send(Kind::Taken, "", &[]);
        if told.is_err() && self.giver_lives() {
            return Err(failed("the server before this one does not wait any more"));
        }
        leave_all(false);
        Ok(())
    }

    /// Have threads and memory for block devices that come: the server before this one serves them still.
    fn prepare_devices(&self, running: &Running) -> Result<(), Error> {
        for come in &self.state.devices {
            let found = running.disks.values().find(|served| served.node() == come.disk);
            let served = found.ok_or_else(|| {
                failed(format!("its state has no disk {} for a device", come.disk))
            })?;
            let span = served.vbd.span().clone();
            let _disk = span.enter();
            let (image, vbd) = (&served.disk.path, &served.vbd);
            let device = ublk::Device::of_server_before(image, come.number, vbd)?;
            let server = Arc::new(ublk::Server::prepare(device, vbd.clone())?);
            lock(&COME).devices.push((come.disk.clone(), server));
        }
        Ok(())
    }

    /// Whether the server before this one, or its broker, which ends soon after it, is still there.
    fn giver_lives(&self) -> bool {
        const TRIES: u32 = 200;
        (0..TRIES).all(|_| {
            let lives = getppid() == self.giver;
            if lives {
                std::thread::sleep(Duration::from_millis(5));
            }
            lives
        })
    }

    /// All disks are served again; what else is to be done no guest waits for.
    pub(crate) fn goes_on(&mut self) {
        let now = clock_gettime(ClockId::Monotonic);
        let now = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        self.stood_still = Some(Duration::from_nanos(now.saturating_sub(self.began)));
    }

    /// All is served: how long it was not. What nobody has asked for ends.
    pub(crate) fn done(self) -> Duration {
        let mut come = lock(&COME);
        for (place, _) in come.front_ends.drain(..) {
            tracing::error!("a front-end is let go: nothing is served at {place}");
        }
        for (place, _) in come.sessions.drain(..) {
            tracing::error!("an NBD client is let go: nothing is served at {place}");
        }
        for (path, _) in come.mounts.drain(..) {
            tracing::error!("{} is mounted, and nobody serves it", path.display());
        }
        for (_, device) in come.devices.drain(..) {
            tracing::error!("{} waits for a server: nothing shows it", device.path().display());
        }
        for left in come.listeners.drain(..) {
            tracing::warn!("the socket {} is closed: nothing is served there", left.asked);
        }
        let pause = self.stood_still.unwrap_or_default();
        let count = self.state.disks.len();
        tracing::info!("{count} disk(s) taken over; they stood still for {pause:?}");
        pause
    }
}

fn receive(channel: &Channel, kind: Kind) -> Result<(Vec<u8>, Files), String> {
    // The server before this one kills whoever takes too long.
    let said = channel.receive(None).or_else(|error| match error.kind() {
        std::io::ErrorKind::ConnectionReset => Ok(None),
        _ => Err(error.to_string()),
    })?;
    let said = said.ok_or("the server before this one has given up")?;
    if said.kind != kind {
        return Err(format!("it says {:?} where {kind:?} is due", said.kind));
    }
    Files::of(said.files).map_err(|error| error.to_string())
}

fn prepare(body: &[u8], mut files: Files) -> Result<State, String> {
    let state: State = decode(body)?;
    for listener in &state.listeners {
        let (asked, place) = (listener.asked.clone(), listener.place.clone());
        let socket = files.take(listener.socket)?;
        lock(&COME).listeners.push(Listening { asked, place, socket });
    }
    for mount in &state.mounts {
        let passed = fuse::Passed { device: files.take(mount.device)?, made: mount.made };
        lock(&COME).mounts.push((mount.path.clone(), passed));
    }
    Ok(state)
}

/// When disks stood still, and what goes on of them.
type Going = (u64, Vec<BitmapState>, Vec<JobState>);

fn connect(body: &[u8], mut files: Files) -> Result<Going, String> {
    let connections: Connections = decode(body)?;
    for front_end in connections.vhost_user {
        let mut messages = vec![];
        for message in front_end.messages {
            let payload =
                hex::decode(&message.payload).map_err(|_| "a message is no hexadecimal digits")?;
            let come: Result<_, String> =
                message.files.iter().map(|place| files.take(*place)).collect();
            messages.push(vhost_user::Message { request: message.request, payload, files: come? });
        }
        let socket = files.take(front_end.socket)?;
        let requests = front_end.requests.map(|place| files.take(place)).transpose()?;
        let connection = vhost_user::Connection { socket, requests, messages };
        lock(&COME).front_ends.push((front_end.place, connection));
    }
    for client in connections.nbd {
        let socket = files.take(client.socket)?;
        let input = hex::decode(&client.input)
            .map_err(|_| "what a client sent is no hexadecimal digits")?;
        let Client { place, export, structured, extended, contexts, .. } = client;
        let session = nbd::Session { socket, export, structured, extended, contexts, input };
        lock(&COME).sessions.push((place, session));
    }
    for place in connections.control {
        let socket = files.take(place)?;
        lock(&COME).control.push(socket);
    }
    for (path, nanos) in connections.modified {
        lock(&COME).modified.push((path, Duration::from_nanos(nanos)));
    }
    Ok((connections.began, connections.bitmaps, connections.jobs))
}

/// What a text describes as a file of a folder would.
fn described(read: &ReadFile, text: &str) -> Result<crate::Described, Error> {
    let wrong = |error: std::io::Error| failed(format!("its state cannot be read: {error}"));
    let file = memfd_create("disk", MemfdFlags::CLOEXEC).map_err(|error| wrong(error.into()))?;
    let mut file = File::from(file);
    file.write_all(text.as_bytes()).map_err(wrong)?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    read(Path::new(&path)).map_err(failed)
}

/// Those that the server before this one did not serve either.
pub(crate) fn left_out(disks: Vec<(Disk, String)>) -> Vec<LeftOut> {
    let left = |(disk, why): (Disk, String)| {
        let label = disk.node_name.clone().unwrap_or_default();
        LeftOut { disk, label, error: Error::File(why), opening: None }
    };
    disks.into_iter().map(left).collect()
}
