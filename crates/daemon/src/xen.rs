//! The disks that Xen's toolstack names, served until a signal ends it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ringtap_export::Stop;
use ringtap_export::xen::{Disks, Options, Server, Wanted};
use ringtap_image::{OpenOptions, Place, open_place, record};
use ringtap_io::Ring;
use ringtap_vbd::Vbd;
use rustix::fs::{FlockOperation, flock};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGUSR1};

use crate::events::{Event, listen_for_signals, notify, notify_reloading, spawn};
use crate::facts::{AllStats, say_ready};
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
    /// A file to hold the process id while it serves.
    pub pid_file: Option<PathBuf>,
    /// How to tell that disks are waited for.
    pub announce: Announce,
}

/// Serve the disks of Xen's guests until SIGTERM or SIGINT.
pub fn serve_xen(config: XenConfig) -> Result<(), Error> {
    process::raise_descriptor_limit();
    let (events, inbox) = channel();
    listen_for_signals(events.clone())?;
    drop(Ring::new().map_err(Error::Ring)?);
    let open = Arc::new(Open { options: config.options, disks: Mutex::default() });
    let options = Options { queues: config.queues, persistent: config.persistent };
    let server = Arc::new(Server::new(options, open.clone())?);
    let _lock = lock(Path::new(LOCK))?;
    let _pid_file = config.pid_file.as_deref().map(PidFile::write).transpose()?;
    let stop = Stop::new().map_err(|source| Error::Process { tried: "make an eventfd", source })?;
    let (theirs, their_stop) = (server.clone(), stop.clone());
    let thread = spawn("xen", move || {
        let result = theirs.serve(&their_stop).map_err(Into::into);
        let _ = events.send(Event::Ended { server: "Xen".into(), disks: vec![], result });
    })?;
    say_ready(config.announce, &[], &[]);
    notify(&[NotifyState::Ready, NotifyState::Status("serving Xen's guests")]);
    let outcome = attend(&server, &open, &inbox);
    notify(&[NotifyState::Stopping]);
    tracing::info!(
        "stopping: requests under way run to their end; guests wait for the next server"
    );
    stop.raise();
    // One that panicked has ended the process.
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
                notify(&[NotifyState::Ready]);
            }
            Event::Signal(SIGUSR1) => open.print_stats(),
            Event::Signal(_) => return Ok(()),
            Event::Failed => {}
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
    disks: Mutex<BTreeMap<String, (String, Weak<Vbd>)>>,
}

impl Disks for Open {
    fn open(&self, wanted: &Wanted<'_>) -> Result<Arc<Vbd>, String> {
        let target: Target = wanted.params.parse().map_err(|error| format!("{error}"))?;
        let mut options = self.options.clone();
        options.format = target.format;
        options.read_only = wanted.read_only;
        options.force_format = target.force_format;
        options.cache = target.cache.unwrap_or(options.cache);
        let place = Place::hold(&target.path).unwrap_or_else(|_| (&target.path).into());
        let image = open_place(&place, &options).map_err(|error| error.to_string())?;
        if let Some(format) = options.format.filter(|_| !image.info().read_only) {
            record::confirm_format(&place, format);
        }
        // Its threads have names of their own: of the domain, the device and the ring.
        let vbd = Arc::new(Vbd::new(image, options.cache).named(wanted.name, wanted.name));
        let mut disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        let disk = (wanted.params.to_owned(), Arc::downgrade(&vbd));
        disks.insert(wanted.name.to_owned(), disk);
        Ok(vbd)
    }

    fn closed(&self, name: &str) {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}

impl Open {
    fn print_stats(&self) {
        let disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let open = disks
            .into_iter()
            .filter_map(|(name, (disk, vbd))| Some(((disk, name), vbd.upgrade()?)));
        AllStats::named(open).print();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let open = Open { options: OpenOptions::default(), disks: Mutex::default() };
        let wanted = |params| Wanted { name: "xen1-51712", params, read_only: true };
        let vbd = open.open(&wanted("null:1M")).expect("a disk");
        assert!(vbd.info().read_only);
        let error = open.open(&wanted("qcow2:/nonexistent/a")).err().expect("none there");
        assert!(error.contains("/nonexistent/a"), "{error}");
    }
}
