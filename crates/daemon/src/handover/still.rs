//! Disks that stand still for another process, and go on here where it does not take them.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringtap_export::{nbd, vhost_user};
use rustix::time::{ClockId, clock_gettime};

use super::closing::{self, Going, bring_back, failed};
use super::come::lock;
use super::state::{BitmapState, Client, Connections, FrontEnd, JobState, MessageState, encode};
use crate::Error;
use crate::at_once::at_once;
use crate::ids::{DiskId, ServerId};
use crate::residence::Residence;
use crate::running::{Running, Served, Serving};
use crate::threads::contained;
use crate::transports::Transport;

/// How soon it is seen that threads have ended.
const SOON: Duration = Duration::from_micros(200);

/// Wait until a server's thread has ended, though no longer than so; whether it has. Requests that wait for space fail
/// then, for nobody can say here that there is some.
fn wait_for(serving: &mut Serving, disks: &BTreeMap<DiskId, Served>, until: Instant) -> bool {
    while !serving.has_ended() {
        if Instant::now() > until {
            return false;
        }
        for served in disks.values().filter(|served| served.vbd.waiting_for_room() > 0) {
            served.vbd.give_up_waiting();
        }
        std::thread::sleep(SOON);
    }
    serving.join();
    true
}

/// Whether a disk's image is here and closed by one before it is opened by the other. One that is only read is if it has the one
/// below open, too.
pub(super) fn goes(served: &Served) -> bool {
    let is_free = served.disk.options.read_only && served.ties.upon.is_none();
    !served.disk.incoming && !is_free && !served.disk.is_null()
}

/// All disks stand still: no server takes requests, and images are closed.
pub(super) struct Still {
    began: u64,
    residences: Vec<Arc<Residence>>,
    front_ends: Vec<(ServerId, String, vhost_user::Connection)>,
    sessions: Vec<(ServerId, String, nbd::Session)>,
    modified: Vec<(PathBuf, u64)>,
    /// Servers that still wait for requests in flight.
    late: Vec<ServerId>,
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl Still {
    /// Have all requests end, which may take so long, and no more begin; then close the images, which may take as long.
    pub(super) fn stand(running: &mut Running, limit: Duration) -> Result<Still, Error> {
        let mut still = Still {
            began: now(),
            residences: vec![],
            front_ends: vec![],
            sessions: vec![],
            modified: vec![],
            late: vec![],
        };
        running.lie_as_they_did();
        let until = Instant::now() + limit;
        *lock(&running.handing_over) = Some(vec![]);
        for serving in running.servers.values_mut() {
            serving.transport.hand_over(true);
            serving.raise();
        }
        for (id, serving) in &mut running.servers {
            if !wait_for(serving, &running.disks, until) {
                still.late.push(*id);
                continue;
            }
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
                Transport::Ublk(_) | Transport::Xen { .. } => {}
            }
        }
        if let Some(serving) = still.late.first().and_then(|late| running.servers.get(late)) {
            let title = serving.transport.title();
            let why = format!(
                "requests of {title} have not ended after {} s, and their clients send no others until they have: see to the storage of its disks",
                limit.as_secs()
            );
            still.thaw(running);
            return Err(failed(why));
        }
        let going: Vec<(DiskId, crate::Disk)> = running
            .disks
            .iter()
            .filter(|(_, served)| goes(served))
            .map(|(id, served)| (*id, served.disk.clone()))
            .collect();
        let going: Vec<Going> = going
            .into_iter()
            .filter_map(|(id, disk)| Some(Going { id, residence: running.residence_of(id)?, disk }))
            .collect();
        tracing::debug!("requests have ended after {:?}", still.since());
        running.moments_rest();
        let closed = closing::close(&going, limit);
        let late = closed.as_ref().err().map_or(&[][..], |(_, late)| &late[..]);
        running.pending.changing.extend(late);
        let of = |going: &&Going| !late.contains(&going.id);
        still.residences = going.iter().filter(of).map(|going| going.residence.clone()).collect();
        match closed {
            Ok(()) => Ok(still),
            Err((error, _)) => {
                still.thaw(running);
                Err(error)
            }
        }
    }

    pub(super) fn since(&self) -> Duration {
        Duration::from_nanos(now().saturating_sub(self.began))
    }

    /// Tell the next server what goes on there, with the descriptors for that.
    pub(super) fn pass(
        &self,
        (bitmaps, jobs): (Vec<BitmapState>, Vec<JobState>),
        silent: &[Arc<OwnedFd>],
        tell: impl FnOnce(&[u8], &[&dyn AsFd]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut files: Vec<&dyn AsFd> = vec![];
        let mut add = |file| {
            files.push(file);
            files.len()
        };
        let began = self.began;
        let mut connections = Connections { began, bitmaps, jobs, ..Connections::default() };
        for (_, place, connection) in &self.front_ends {
            let socket = add(&connection.socket);
            let requests = connection.requests.as_ref().map(|file| add(file));
            let messages = connection.messages.iter().map(|message| MessageState {
                request: message.request,
                payload: hex::encode(&message.payload),
                files: message.files.iter().map(|file| add(file)).collect(),
            });
            let messages = messages.collect();
            let place = place.clone();
            connections.vhost_user.push(FrontEnd { place, socket, requests, messages });
        }
        connections.control = silent.iter().map(|socket| add(&**socket)).collect();
        connections.modified.clone_from(&self.modified);
        for (_, place, session) in &self.sessions {
            connections.nbd.push(Client {
                place: place.clone(),
                socket: add(&session.socket),
                export: session.export.clone(),
                structured: session.structured,
                extended: session.extended,
                contexts: session.contexts,
                input: hex::encode(&session.input),
            });
        }
        tell(&encode(&connections).map_err(failed)?, &files)
    }

    /// Go on as before; a client that still waits for requests does so once they have ended.
    pub(super) fn thaw(self, running: &mut Running) {
        let ended = lock(&running.handing_over).take().unwrap_or_default();
        bring_back(|| in_parallel(&self.residences, |residence| residence.take_over()));
        for served in running.disks.values() {
            served.residence.stays();
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
            if !self.late.contains(&id) {
                if let Err(error) = running.start_again(id) {
                    tracing::error!("an export has ended: {error}");
                }
            } else if ended.contains(&id) {
                running.goes_on_late(id);
            } else if let Some(serving) = running.servers.get_mut(&id) {
                serving.haste = None;
                match serving.transport.stays(&serving.stop) {
                    true => tracing::info!("{} goes on", serving.transport.title()),
                    // Its end is told.
                    false => serving.held_up = true,
                }
            }
        }
    }
}

/// Do the same to each, on a few threads. The first failure, after all were tried.
pub(super) fn in_parallel<T: Sync>(
    all: &[T],
    work: impl Fn(&T) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let try_one = |one| contained(|| work(one)).unwrap_or_else(|| Err(failed("a thread panicked")));
    let ends = at_once(all.iter().collect(), try_one);
    ends.into_iter().collect()
}
