//! Disks that Xen's toolstack names: they come to those that are served, and go when their guests give them back.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use ringtap_export::Stop;
use ringtap_export::xen::{Disks, Options, Server, Wanted};
use ringtap_image::{Format, OpenError, Place};
use ringtap_vbd::Vbd;
use rustix::fs::{FlockOperation, flock};

use crate::attached::{Attached, Leaving};
use crate::entry::Entry;
use crate::ids::{DiskId, ServerId};
use crate::opened::{Wrap, device, record_formats};
use crate::running::{Event, Export, Running, Serving, is_failed, new_stop};
use crate::transports::Transport;
use crate::{Disk, Error, Target, XenConfig, end, successor};

/// Held by the one server of this host, with its process id inside.
const LOCK: &str = "/run/ringtap/xen.lock";
/// How often a device that waits for its image to be closed looks whether the server ends.
const LOOK: Duration = Duration::from_millis(50);

impl Running {
    /// Serve what Xen's toolstack names from now on, where that was asked for.
    pub(crate) fn start_xen(&mut self) -> Result<(), Error> {
        let Some(config) = self.config.xen.clone() else { return Ok(()) };
        let (id, stop) = (self.next_server(), new_stop()?);
        let options = Options { queues: config.queues, persistent: config.persistent };
        let (wrap, events) = (self.wrap.clone(), self.events.clone());
        let toolstack = Toolstack { config, wrap, events, server: id, stop: stop.clone() };
        let server = Server::new(options, Arc::new(toolstack))?;
        let lock = lock(Path::new(LOCK))?;
        let transport = Arc::new(Transport::Xen { server, _lock: lock });
        let thread = self.start_thread(id, &transport, &stop, None)?;
        self.servers.insert(id, Serving::new(transport, stop, thread, false, vec![], None));
        Ok(())
    }

    /// One of the toolstack's disks comes to those that are served; which it is.
    pub(crate) fn attach(&mut self, attached: Attached) -> Option<DiskId> {
        let Attached { disk, vbd, named, server, tell } = attached;
        let name = disk.name.clone();
        if self.disks.values().any(|served| served.node() == name) {
            let _ = tell.send(Err("a disk of this name is being closed: try again".into()));
            return None;
        }
        let shown = vbd.disk().clone();
        let id = match self.add(disk, vbd) {
            Ok(id) => id,
            Err(error) => {
                let _ = tell.send(Err(error.to_string()));
                return None;
            }
        };
        record_formats(named.as_slice());
        self.add_export(None, id, server, &name);
        // Where nobody listens any more the server ends, and closes it with all others.
        let _ = tell.send(Ok(shown));
        Some(id)
    }

    /// A guest has given its disk back: have jobs at it end, and other exports, and close it then.
    fn detach(&mut self, server: ServerId, name: &str, tell: Sender<()>) {
        let of = |export: &&Export| export.server == server && export.name == name;
        let Some(export) = self.exports.iter().find(of).filter(|_| !self.quit) else { return };
        let (disk, id) = (export.disk, export.id.clone());
        self.export_is_gone(&id);
        self.leaving.push(Leaving { disk, tell });
    }

    /// What is at work on a disk is to end, whenever it has begun.
    fn free(&mut self, disk: DiskId) {
        self.jobs.values_mut().filter(|entry| entry.disks.contains(&disk)).for_each(Entry::cancel);
        let others = self.exports.iter().filter(|export| export.disk == disk && !export.closing);
        let others: Vec<String> = others.map(|export| export.id.clone()).collect();
        others.iter().for_each(|id| self.close_export(id, Box::new(|_| {})));
    }

    /// Close those that their guests have given back, and that nothing is at work on any more.
    pub(crate) fn close_leaving(&mut self) {
        let all = std::mem::take(&mut self.leaving);
        all.iter().for_each(|one| self.free(one.disk));
        let (free, used): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|one| self.is_free(one.disk));
        self.leaving = used;
        for Leaving { disk, tell } in free {
            let Some(served) = self.take_back(disk) else { continue };
            let stays = self.in_time_with("close", (served, tell), |(served, tell)| {
                let _disk = served.vbd.span().clone().entered();
                match end::close(&served) {
                    Ok(()) if is_failed(&served) => {
                        tracing::warn!("closed as a killed server leaves it, after a panic");
                    }
                    Ok(()) => tracing::info!("closed"),
                    Err(error) => {
                        tracing::error!("{error}; writes that were not flushed before may be lost");
                    }
                }
                // Its lock goes with it, before the toolstack is told.
                drop(served);
                drop(tell);
                Box::new(|_| {})
            });
            if let Some((served, tell)) = stays {
                self.put_back(disk, served);
                self.leaving.push(Leaving { disk, tell });
            }
        }
    }

    fn is_free(&self, disk: DiskId) -> bool {
        let pending = &self.pending;
        let changes = pending.changing.contains(&disk) || pending.bitmaps_changing.contains(&disk);
        !changes && !self.is_shown(disk) && self.user_of_disk(disk).is_none()
    }
}

/// Two servers would both take each disk.
fn lock(path: &Path) -> Result<File, Error> {
    let failed = |source| Error::Process { tried: "make /run/ringtap/xen.lock", source };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    let options = File::options().read(true).write(true).create(true).truncate(false).to_owned();
    let mut file = options.open(path).map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut text = String::new();
            let process = file.read_to_string(&mut text).ok().map(|_| text.trim().to_owned());
            let process = process.filter(|text| !text.is_empty());
            return Err(Error::XenServed { process });
        }
        Err(error) => return Err(failed(error.into())),
    }
    file.set_len(0).map_err(failed)?;
    writeln!(file, "{}", std::process::id()).map_err(failed)?;
    Ok(file)
}

/// A disk, and what is to be recorded of it.
type Opened = (Disk, Vbd, Option<(Place, Format)>);

/// What the devices' threads ask of the server.
struct Toolstack {
    config: XenConfig,
    wrap: Wrap,
    events: Sender<Event>,
    server: ServerId,
    stop: Stop,
}

impl Toolstack {
    /// Open what is wanted, on the device's own thread: storage may be slow.
    fn opened(&self, wanted: &Wanted<'_>) -> Result<Opened, String> {
        let target: Target = wanted.params.parse().map_err(|error| format!("{error}"))?;
        let mut options = self.config.options.clone();
        options.format = target.format;
        options.read_only = wanted.read_only;
        options.force_format = target.force_format;
        options.cache = target.cache.unwrap_or(options.cache);
        let choice = target.restart_log.or(options.restart_log.take());
        let mut disk = Disk {
            name: wanted.name.into(),
            node_name: Some(wanted.name.into()),
            hold: self.config.hold,
            ..Disk::new(target.path, options)
        };
        successor::follow(&mut disk).map_err(|error| error.to_string())?;
        let opened = match device(&disk, wanted.name, &self.wrap) {
            // Heeded here alone: what was chosen for one disk in doubt is not to void a log that is sound, of
            // another or of the same disk when it is attached the next time.
            Err(Error::Open(
                OpenError::RestartLogInDoubt { .. }
                | OpenError::RestartLogMissing { .. }
                | OpenError::NoRestartLog { .. },
            )) if choice.is_some() => {
                disk.options.restart_log = choice;
                let opened = device(&disk, wanted.name, &self.wrap);
                disk.options.restart_log = None;
                opened
            }
            opened => opened,
        };
        let (vbd, named) = opened.map_err(|error| error.to_string())?;
        Ok((disk, vbd.named(wanted.name, wanted.name), named))
    }
}

impl Disks for Toolstack {
    fn open(&self, wanted: &Wanted<'_>) -> Result<ringtap_vbd::Disk, String> {
        let (disk, vbd, named) = self.opened(wanted)?;
        let (tell, told) = channel();
        let attached = Attached { disk, vbd, named, server: self.server, tell };
        let ends = |_| "the server ends".to_owned();
        self.events.send(Event::Attached(Box::new(attached))).map_err(|_| ends(()))?;
        loop {
            match told.recv_timeout(LOOK) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Timeout) if !self.stop.is_raised() => {}
                Err(_) => return Err(ends(())),
            }
        }
    }

    fn close(&self, name: &str) {
        let (tell, gone) = channel();
        let (server, name) = (self.server, name.to_owned());
        let detach = move |running: &mut Running| running.detach(server, &name, tell);
        if self.events.send(Event::Do(Box::new(detach))).is_err() {
            return;
        }
        // Where the server ends all is closed, and nobody attends to this.
        while gone.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) && !self.stop.is_raised() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringtap_image::OpenOptions;
    use ringtap_io::Tasks;
    use ringtap_vbd::{Kind, Request};

    #[test]
    fn the_second_server_is_told_who_the_first_is() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("below/lock");
        let first = lock(&path).expect("nobody has it");
        let error = lock(&path).expect_err("it is taken").to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        drop(first);
        lock(&path).expect("it is free again");
    }

    fn toolstack() -> (Toolstack, std::sync::mpsc::Receiver<Event>) {
        let (options, queues, persistent, hold) = (OpenOptions::default(), 4, true, 0);
        let config = XenConfig { options, queues, persistent, hold };
        let (events, inbox) = channel();
        let (wrap, stop): (Wrap, _) = (Arc::new(|_, image| image), new_stop().expect("a stop"));
        (Toolstack { config, wrap, events, server: ServerId::of_test(1), stop }, inbox)
    }

    #[test]
    fn an_image_that_cannot_be_opened_is_told_of() {
        let (open, _inbox) = toolstack();
        let wanted = |params| Wanted { name: "xen1-51712", params, read_only: true };
        let (disk, vbd, _) = open.opened(&wanted("null:1M")).expect("a disk");
        assert!(vbd.is_read_only() && disk.node_name.as_deref() == Some("xen1-51712"));
        let error = open.opened(&wanted("qcow2:/nonexistent/a")).err().expect("none there");
        assert!(error.contains("/nonexistent/a"), "{error}");
    }

    #[test]
    fn a_server_that_ends_keeps_no_device_waiting() {
        let (open, inbox) = toolstack();
        let wanted = Wanted { name: "xen1-51712", params: "null:1M", read_only: true };
        open.stop.raise();
        let why = open.open(&wanted).err().expect("nobody attends");
        assert_eq!(why, "the server ends");
        open.close("xen1-51712");
        drop(inbox);
        assert_eq!(open.open(&wanted).err().as_deref(), Some("the server ends"));
        open.close("xen1-51712");
    }

    fn wanted(params: &str) -> Wanted<'_> {
        Wanted { name: "xen1-51712", params, read_only: false }
    }

    /// Move a block; what is in memory then.
    fn transfer(vbd: &Vbd, kind: Kind, byte: u8) -> Vec<u8> {
        let mut tasks = Tasks::new(ringtap_io::reactor().expect("a reactor"));
        let (io, vbd) = (tasks.io().clone(), vbd.fork());
        let moved = tasks.block_on(async move {
            let mut buffer = io.buffer(4096).expect("memory");
            buffer.bytes_mut().fill(byte);
            let request = Request { kind, offset: 0, len: 4096, mem: buffer.mem(), fua: false };
            vbd.serve(&io, request).await.expect("moved");
            buffer.bytes().to_vec()
        });
        moved.expect("io_uring")
    }

    /// Opens images, and a folder with one.
    fn opener() -> (Toolstack, tempfile::TempDir) {
        let dir = tempfile::tempdir().expect("a folder");
        let made = std::process::Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2"])
            .arg(dir.path().join("a"))
            .arg("16M")
            .status();
        assert!(made.expect("qemu-img").success());
        (toolstack().0, dir)
    }

    #[test]
    fn a_log_in_doubt_is_decided_about_and_one_that_is_sound_is_taken_up_whatever_was_chosen() {
        let (mut open, dir) = opener();
        let logs = dir.path().join("logs");
        ringtap_image::set_folder(&logs).expect("a folder");
        let target = |choice: &str| format!("qcow2{choice}:{}/a", dir.path().display());
        // As a killed server leaves it: nothing is closed.
        drop(open.opened(&wanted(&target(""))).expect("a new image"));
        for log in std::fs::read_dir(&logs).expect("the logs").flatten() {
            std::fs::remove_file(log.path()).expect("lost");
        }
        let error = open.opened(&wanted(&target(""))).err().expect("in doubt");
        assert!(error.contains("--restart-log"), "{error}");
        drop(open.opened(&wanted(&target(",restart-log=drop"))).expect("decided for this disk"));
        transfer(&open.opened(&wanted(&target(""))).expect("a sound log").1, Kind::Write, 7);
        let again = open.opened(&wanted(&target(",restart-log=drop"))).expect("the log is sound");
        assert_eq!(transfer(&again.1, Kind::Read, 0), [7; 4096]);
        drop(again);
        open.config.options.restart_log = Some(ringtap_image::RestartChoice::Drop);
        for log in std::fs::read_dir(&logs).expect("the logs").flatten() {
            std::fs::remove_file(log.path()).expect("lost");
        }
        drop(open.opened(&wanted(&target(""))).expect("decided for all"));
    }
}
