//! From the configuration to the last flush.

use std::path::Path;
use std::sync::mpsc::{Receiver, channel};

use ringtap_export::{give_back_startup, nbd, ublk};
use ringtap_io::Tasks;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGUSR1};

use crate::events::{Event, listen_for_signals, notify, notify_reloading};
use crate::facts::{AllStats, DiskFacts, NotServed, say_ready};
use crate::late;
use crate::opened::{self, LeftOut, Opened, Wrap, record_formats, tell_of_another_file};
use crate::pid_file::PidFile;
use crate::plan::Plan;
use crate::running::{Running, Served, is_failed};
use crate::{Address, Config, Disk, Error, NbdTls, process};

/// Serve the disks until SIGTERM or SIGINT. Returns once every request taken has ended, the images
/// are flushed and the sockets removed. Where a server ended by itself the others do, too, but for
/// block devices of this host: they are served until the process ends, and then wait for the next one,
/// for what is mounted on them must not lose its disk.
///
/// A disk whose image cannot be opened is left out, unless the configuration is strict: the others are served.
/// SIGHUP has it tried again; where it still was not served at the end, [`Error::NotServed`] comes then.
///
/// A disk that a panic stops is served no more; the others are, and [`Error::Panicked`] comes at the end.
pub fn serve(config: Config) -> Result<(), Error> {
    serve_wrapped(config, &|_, image| image)
}

/// As [`serve`], of images that tests have put others before.
#[doc(hidden)]
pub fn serve_wrapped(config: Config, wrap: Wrap<'_>) -> Result<(), Error> {
    let config = config.checked()?;
    process::raise_descriptor_limit();
    let in_own_namespace = leave_mount_namespace(&config);
    let (events, inbox) = channel();
    listen_for_signals(events.clone())?;
    process::choose_engine()?;

    let credentials = config.nbd_tls.as_ref().map(NbdTls::load).transpose()?;
    let Opened { config, vbds, mut left_out, named } = Opened::open(config, wrap)?;
    let plan = Plan::bind(&config, left_out.iter().map(|left| &left.disk))?;
    if in_own_namespace {
        let_go_of_disks(&config);
    }
    let _pid_file = config.pid_file.as_deref().map(PidFile::write).transpose()?;
    // A server of block devices may need any of it when memory is short.
    if config.disks.iter().all(|disk| disk.ublk.is_none()) {
        give_back_startup();
    }
    let mut running = Running::new(config, vbds, credentials, events)?;
    running.start_devices(0)?;
    running.start(plan, 0)?;
    record_formats(&named);
    announce(&running, &left_out);

    let outcome = attend(&mut running, &mut left_out, wrap, &inbox);
    notify(&[NotifyState::Stopping]);
    tracing::info!("stopping: requests under way run to their end");
    running.stop(outcome.is_ok());
    let disks = &running.disks;
    let late = inbox.try_iter().filter(|event| !is_expected(disks, event)).find_map(Event::failure);
    let stays = |disk: &Served| disk.ublk.as_ref().is_some_and(|device| device.is_there());
    let kept: Vec<bool> = disks.iter().map(|disk| outcome.is_err() && stays(disk)).collect();
    let flushed = flush(&running.config, disks, &kept);
    outcome
        .and(late.map_or(Ok(()), Err))
        .and(flushed)
        .and(panicked(&running.config, disks))
        .and_then(|()| opened::outcome(left_out, disks.len()))
}

/// Whether it is the end of a server whose disks are all stopped.
fn is_expected(disks: &[Served], event: &Event) -> bool {
    matches!(event, Event::Ended { disks: of, .. } if of.iter().all(|disk| is_failed(&disks[*disk])))
}

/// An error where a panic has stopped a disk.
fn panicked(config: &Config, disks: &[Served]) -> Result<(), Error> {
    let failed = || disks.iter().zip(&config.disks).filter(|(served, _)| is_failed(served));
    match failed().find_map(|(served, _)| served.vbd.health().failure()) {
        Some(panic) => Err(Error::panicked(failed().map(|(_, disk)| &*disk.path), panic)),
        None => Ok(()),
    }
}

/// A server of block devices keeps out of the namespace in which they are mounted, unless it has to
/// mount something there itself.
fn leave_mount_namespace(config: &Config) -> bool {
    let any = |has: fn(&Disk) -> bool| config.disks.iter().any(has);
    if !any(|disk| disk.ublk.is_some()) || any(|disk| !disk.fuse.is_empty()) {
        return false;
    }
    let left = ublk::leave_mount_namespace();
    if let Err(error) = &left {
        tracing::debug!("cannot have a mount namespace of its own (CAP_SYS_ADMIN): {error}");
    }
    left.is_ok()
}

/// There it lets go of the disks it might serve, but for those in which its own files lie.
fn let_go_of_disks(config: &Config) {
    let images = config.disks.iter().map(|disk| &*disk.path);
    let sockets = config.disks.iter().flat_map(|disk| disk.nbd.iter().chain(&disk.vhost_user));
    let sockets = sockets.filter_map(|address| match address {
        Address::Unix(path) => Some(&**path),
        _ => None,
    });
    let others = config.pid_file.as_deref().into_iter().chain([Path::new(".")]);
    if let Err(error) = ublk::let_go_of_disks(images.chain(sockets).chain(others)) {
        tracing::warn!("cannot look for file systems on ublk devices: {error}");
    }
}

/// Everything listens: say so to whoever waits for it.
fn announce(running: &Running, left_out: &[LeftOut]) {
    let facts: Vec<DiskFacts> = running.disks.iter().map(|disk| disk.facts.clone()).collect();
    running.disks.iter().for_each(tell_where);
    let not_served: Vec<NotServed> = left_out.iter().map(NotServed::new).collect();
    say_ready(running.config.announce, &facts, &not_served);
    say_status(running, left_out);
}

fn tell_where(disk: &Served) {
    disk.vbd.span().in_scope(|| tracing::info!("serving {}", disk.facts.line()));
}

/// Tell the service manager that all that can be is served.
fn say_status(running: &Running, left_out: &[LeftOut]) {
    let served = running.disks.len();
    let status = match left_out {
        [] => format!("serving {served} disk(s)"),
        out => {
            let paths: Vec<_> = out.iter().map(|left| left.disk.path.to_string_lossy()).collect();
            format!("serving {served} of {} disks, not {}", served + out.len(), paths.join(", "))
        }
    };
    notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
}

/// Do what signals ask, until one asks to stop or a server ends by itself.
fn attend(
    running: &mut Running,
    left_out: &mut Vec<LeftOut>,
    wrap: Wrap<'_>,
    inbox: &Receiver<Event>,
) -> Result<(), Error> {
    for event in inbox {
        match event {
            Event::Failed => {
                // Those that offer others as well go on.
                running.close_failed();
                if running.disks.iter().all(is_failed) {
                    return panicked(&running.config, &running.disks);
                }
            }
            Event::Ended { ref server, .. } if is_expected(&running.disks, &event) => {
                tracing::info!("{server} is closed");
            }
            Event::Signal(SIGHUP) => {
                notify_reloading();
                reload(running);
                late::try_again(running, left_out, wrap);
                say_status(running, left_out);
            }
            Event::Signal(SIGUSR1) => {
                let vbds = running.disks.iter().map(|disk| &disk.vbd);
                AllStats::of(&running.config, vbds).print();
            }
            Event::Signal(_) => return Ok(()),
            Event::Ended { server, result, .. } => {
                let source = result.err().unwrap_or_else(|| "without a word".into());
                return Err(Error::Server { server, source });
            }
        }
    }
    Ok(())
}

/// Look again how large the images are, and tell the guests; read the certificates again.
fn reload(running: &Running) {
    match running.credentials.as_ref().map(nbd::Credentials::reload) {
        Some(Ok(())) => tracing::info!("new NBD clients meet the certificates that are there now"),
        Some(Err(error)) => tracing::error!("those read before stay in use: {error}"),
        None => {}
    }
    for (disk, served) in running.config.disks.iter().zip(&running.disks) {
        let path = disk.path.display();
        let _disk = served.vbd.span().enter();
        match served.vbd.reload_size() {
            Ok(true) => {
                tracing::info!("{path}: now {} bytes", served.vbd.size());
                served.vhost_user.iter().for_each(|server| server.resized());
                served.fuse.iter().for_each(|server| server.resized());
                served.ublk.iter().for_each(|server| server.resized());
            }
            Ok(false) => tracing::info!("{path}: still {} bytes", served.vbd.size()),
            Err(error) => tracing::error!("cannot find the size of {path}: {error}"),
        }
        tell_of_another_file(&disk.path, served.file);
    }
}

/// Make stable what every disk was given, and close it, unless it is `kept` for its block device, whose
/// threads go on. The first failure is returned, after all were tried.
fn flush(config: &Config, disks: &[Served], kept: &[bool]) -> Result<(), Error> {
    let failed = |path: &Path, source| Err(Error::Flush { path: path.to_owned(), source });
    let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
    let mut outcome = Ok(());
    for ((disk, served), kept) in config.disks.iter().zip(disks).zip(kept.iter().copied()) {
        if is_failed(served) {
            continue;
        }
        let _disk = served.vbd.span().enter();
        let (vbd, io) = (served.vbd.clone(), tasks.io().clone());
        if let Some(server) = served.ublk.as_ref().filter(|_| kept) {
            let device = server.path().display();
            tracing::warn!("{device} stays: it waits for the next server of its image");
        }
        let flushed = tasks
            .block_on(async move {
                if kept { vbd.fork().flush(&io).await } else { vbd.close(&io).await }
            })
            .map_err(|source| Error::Process { tried: "drive the io_uring", source })?;
        if let Err(error) = flushed {
            tracing::error!("cannot flush {}: {error}", disk.path.display());
            outcome = outcome.and(failed(&disk.path, error));
        }
    }
    outcome
}
