//! The disks that Xen's toolstack names, served until a signal ends it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};

use ringtap_export::Stop;
use ringtap_export::xen::{Disks, Options, Server, Wanted};
use ringtap_image::{OpenError, OpenOptions, Place, open_place, record};
use ringtap_io::Panic;
use ringtap_vbd::{Vbd, WeakDisk};
use rustix::fs::{FlockOperation, flock};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGUSR1};

use crate::events::{Event, Signalled, notify, notify_reloading, spawn};
use crate::facts::{AllStats, say_ready};
use crate::opened::{Identity, identity, tell_of_another_file};
use crate::pid_file::PidFile;
use crate::{Announce, Error, Target, process};

/// Held by the one server of this host, with its process id inside.
const LOCK: &str = "/run/ringtap/xen.lock";

/// How Xen's guests are served.
#[derive(Clone, Debug)]
pub struct XenConfig {
    /// How images are opened, but for what their target says.
    pub options: OpenOptions,
    /// The most rings of a disk.
    pub queues: u16,
    /// Whether guests may have pages kept mapped.
    pub persistent: bool,
    /// Percent of its own time that each answer is held back, for the lab.
    pub hold: u32,
    /// A file to hold the process id while it serves.
    pub pid_file: Option<PathBuf>,
    /// How to tell that disks are waited for.
    pub announce: Announce,
}

/// Serve the disks of Xen's guests until SIGTERM or SIGINT.
pub fn serve_xen(config: XenConfig) -> Result<(), Error> {
    process::raise_descriptor_limit();
    let (events, inbox) = channel();
    Signalled::listen()?.tell(events.clone())?;
    process::choose_engine()?;
    let (options, hold) = (config.options, config.hold);
    let open = Arc::new(Open { options, hold, disks: Mutex::default() });
    let options = Options { queues: config.queues, persistent: config.persistent };
    let server = Arc::new(Server::new(options, open.clone())?);
    let _lock = lock(Path::new(LOCK))?;
    let _pid_file = config.pid_file.as_deref().map(PidFile::write).transpose()?;
    let stop = Stop::new().map_err(|source| Error::Process { tried: "make an eventfd", source })?;
    let (theirs, their_stop) = (server.clone(), stop.clone());
    let thread = spawn("xen", move || {
        let served = Panic::catch(|| theirs.serve(&their_stop).map_err(Into::into));
        let result = served.unwrap_or_else(|panic| Err(panic.into()));
        let _ = events.send(Event::Ended { server: "Xen".into(), of: None, result });
    })?;
    say_ready(config.announce, &[], &[]);
    notify(&[NotifyState::Ready, NotifyState::Status("serving Xen's guests")]);
    let outcome = attend(&server, &open, &inbox);
    notify(&[NotifyState::Stopping]);
    tracing::info!(
        "stopping: requests in flight run to their end; guests wait for the next server"
    );
    stop.raise();
    // One that panicked has told of it.
    let _ = thread.join();
    let late = inbox.try_iter().find_map(Event::failure);
    outcome.and(late.map_or(Ok(()), Err))
}

fn attend(server: &Server, open: &Open, inbox: &Receiver<Event>) -> Result<(), Error> {
    for event in inbox {
        match event {
            Event::Signal(SIGHUP) => {
                notify_reloading();
                server.resized();
                open.tell_of_other_files();
                notify(&[NotifyState::Ready]);
            }
            Event::Signal(SIGUSR1) => open.print_stats(),
            Event::Signal(_) => return Ok(()),
            Event::Failed | Event::Tried(_) | Event::Do(_) => {}
            Event::Ended { server, result, .. } => {
                let source = result.err().unwrap_or_else(|| "without a word".into());
                return Err(Error::Server { server, source });
            }
        }
    }
    Ok(())
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

/// Opens images, and remembers them for statistics.
struct Open {
    options: OpenOptions,
    /// Percent of its own time that each answer is held back.
    hold: u32,
    disks: Mutex<BTreeMap<String, Disk>>,
}

/// A disk that is open.
#[derive(Clone)]
struct Disk {
    /// What the toolstack was told.
    params: String,
    path: PathBuf,
    /// Which file it was.
    file: Option<Identity>,
    vbd: WeakDisk,
}

impl Disks for Open {
    fn open(&self, wanted: &Wanted<'_>) -> Result<ringtap_vbd::Disk, String> {
        let target: Target = wanted.params.parse().map_err(|error| format!("{error}"))?;
        let mut options = self.options.clone();
        options.format = target.format;
        options.read_only = wanted.read_only;
        options.force_format = target.force_format;
        options.cache = target.cache.unwrap_or(options.cache);
        let choice = target.restart_log.or(options.restart_log.take());
        let place = Place::hold(&target.path).unwrap_or_else(|_| (&target.path).into());
        let image = match open_place(&place, &options) {
            // Heeded here alone: what was chosen for one disk in doubt is not to void a log that is sound, of
            // another or of the same disk when it is attached the next time.
            Err(OpenError::RestartLogInDoubt { .. } | OpenError::RestartLogMissing { .. })
                if choice.is_some() =>
            {
                options.restart_log = choice;
                open_place(&place, &options)
            }
            opened => opened,
        };
        let image = image.map_err(|error| error.to_string())?;
        if let Some(format) = options.format.filter(|_| !image.info().read_only) {
            record::confirm_format(&place, format);
        }
        // Its threads have names of their own: of the domain, the device and the ring.
        let vbd = Vbd::new(image, options.cache).named(wanted.name, wanted.name);
        let vbd = ringtap_vbd::Disk::from(vbd.held_back(self.hold));
        let mut disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        let disk = Disk {
            params: wanted.params.to_owned(),
            file: identity(&target.path),
            path: target.path,
            vbd: vbd.downgrade(),
        };
        disks.insert(wanted.name.to_owned(), disk);
        Ok(vbd)
    }

    fn closed(&self, name: &str) {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}

impl Open {
    fn all(&self) -> BTreeMap<String, Disk> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn print_stats(&self) {
        let open = self
            .all()
            .into_iter()
            .filter_map(|(name, disk)| Some(((disk.params, name), disk.vbd.upgrade()?)));
        AllStats::named(open).print();
    }

    fn tell_of_other_files(&self) {
        for disk in self.all().values() {
            let Some(vbd) = disk.vbd.upgrade() else { continue };
            vbd.span().in_scope(|| tell_of_another_file(&disk.path, disk.file));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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

    #[test]
    fn an_image_that_cannot_be_opened_is_told_of() {
        let open = Open { options: OpenOptions::default(), hold: 0, disks: Mutex::default() };
        let wanted = |params| Wanted { name: "xen1-51712", params, read_only: true };
        let vbd = open.open(&wanted("null:1M")).expect("a disk");
        assert!(vbd.info().read_only);
        let error = open.open(&wanted("qcow2:/nonexistent/a")).err().expect("none there");
        assert!(error.contains("/nonexistent/a"), "{error}");
    }

    fn wanted(params: &str) -> Wanted<'_> {
        Wanted { name: "xen1-51712", params, read_only: false }
    }

    /// Move a block; what is in memory then.
    fn transfer(vbd: &ringtap_vbd::Disk, kind: Kind, byte: u8) -> Vec<u8> {
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
    fn opener() -> (Open, tempfile::TempDir) {
        let dir = tempfile::tempdir().expect("a folder");
        let made = std::process::Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2"])
            .arg(dir.path().join("a"))
            .arg("16M")
            .status();
        assert!(made.expect("qemu-img").success());
        (Open { options: OpenOptions::default(), hold: 0, disks: Mutex::default() }, dir)
    }

    #[test]
    fn a_log_in_doubt_is_decided_about_and_one_that_is_sound_is_taken_up_whatever_was_chosen() {
        let (mut open, dir) = opener();
        let logs = dir.path().join("logs");
        ringtap_image::set_folder(&logs).expect("a folder");
        let target = |choice: &str| format!("qcow2{choice}:{}/a", dir.path().display());
        // As a killed server leaves it: nothing is closed.
        drop(open.open(&wanted(&target(""))).expect("a new image"));
        for log in std::fs::read_dir(&logs).expect("the logs").flatten() {
            std::fs::remove_file(log.path()).expect("lost");
        }
        let error = open.open(&wanted(&target(""))).err().expect("in doubt");
        assert!(error.contains("--restart-log"), "{error}");
        drop(open.open(&wanted(&target(",restart-log=drop"))).expect("decided for this disk"));
        transfer(&open.open(&wanted(&target(""))).expect("a sound log"), Kind::Write, 7);
        let again = open.open(&wanted(&target(",restart-log=drop"))).expect("the log is sound");
        assert_eq!(transfer(&again, Kind::Read, 0), [7; 4096]);
        drop(again);
        open.options.restart_log = Some(ringtap_image::RestartChoice::Drop);
        for log in std::fs::read_dir(&logs).expect("the logs").flatten() {
            std::fs::remove_file(log.path()).expect("lost");
        }
        drop(open.open(&wanted(&target(""))).expect("decided for all"));
    }

    #[test]
    fn a_file_that_is_gone_or_another_is_told() {
        #[derive(Clone, Default)]
        struct Log(Arc<Mutex<Vec<u8>>>);
        impl Write for Log {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().expect("the log").write(bytes)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let log = Log::default();
        let writer = log.clone();
        let heard = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
        let _heard = tracing::subscriber::set_default(heard.finish());
        let (open, dir) = opener();
        let raw = dir.path().join("raw");
        std::fs::write(&raw, [0; 4096]).expect("an image");
        let _vbd = loop {
            // Tests beside this one may have come upon the same span just before the log was there.
            tracing::callsite::rebuild_interest_cache();
            let vbd = open.open(&wanted(&format!("raw:{}", raw.display()))).expect("served");
            if !vbd.span().is_disabled() {
                break vbd;
            }
        };
        let said = || {
            tracing::callsite::rebuild_interest_cache();
            open.tell_of_other_files();
            let all = std::mem::take(&mut *log.0.lock().expect("the log"));
            String::from_utf8(all).expect("text")
        };
        assert_eq!(said(), "");
        std::fs::remove_file(&raw).expect("removed");
        let gone = said();
        assert!(gone.contains("xen1-51712") && gone.contains("deleted or moved away"), "{gone}");
        std::fs::write(&raw, [0; 4096]).expect("another");
        assert!(said().contains("another file has taken its place"));
    }
}
