//! From the configuration to the last flush.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use ringtap_export::{Stop, fuse, give_back_startup, nbd, ublk, vhost_user};
use ringtap_io::{Panic, Ring, Tasks};
use ringtap_vbd::{Health, Listening, Vbd};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGUSR1};

use crate::events::{Event, listen_for_signals, notify, notify_reloading, spawn};
use crate::facts::{AllStats, DiskFacts, NotServed, say_ready};
use crate::opened::{Identity, Opened, Wrap, identity};
use crate::pid_file::PidFile;
use crate::plan::{self, Plan};
use crate::{Address, Config, Disk, Error, NbdTls, TlsMode, process};

/// A disk being served.
struct Served {
    vbd: Arc<Vbd>,
    /// Has a panic that stops it told of.
    _listening: Listening,
    vhost_user: Vec<Arc<vhost_user::Server>>,
    fuse: Vec<Arc<fuse::Server>>,
    ublk: Option<Arc<ublk::Server>>,
    facts: DiskFacts,
    /// Which file the image was, as it was opened.
    file: Option<Identity>,
}

/// Serve the disks until SIGTERM or SIGINT. Returns once every request taken has ended, the images
/// are flushed and the sockets removed. Where a server ended by itself the others do, too, but for
/// block devices of this host: they are served until the process ends, and then wait for the next one,
/// for what is mounted on them must not lose its disk.
///
/// A disk whose image cannot be opened is left out, unless the configuration is strict: the others are served,
/// and [`Error::NotServed`] comes at the end.
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
    // Asked for here so that a host without io_uring is told at the start, not to the first guest.
    drop(Ring::new().map_err(Error::Ring)?);

    let credentials = config.nbd_tls.as_ref().map(NbdTls::load).transpose()?;
    let mut opened = Opened::open(config, wrap)?;
    let served = |(disk, vbd): (&Disk, Vbd)| Served {
        facts: DiskFacts::new(disk, &vbd),
        file: identity(&disk.path),
        _listening: tell_of_failure(&vbd, &events),
        vbd: Arc::new(vbd),
        vhost_user: vec![],
        fuse: vec![],
        ublk: None,
    };
    let vbds = std::mem::take(&mut opened.vbds);
    let mut disks: Vec<Served> = opened.config.disks.iter().zip(vbds).map(served).collect();
    let config = &opened.config;
    let mut plan = Plan::bind(config, opened.not_served.iter().map(|(disk, _)| disk))?;
    if in_own_namespace {
        let_go_of_disks(config);
    }
    let _pid_file = config.pid_file.as_deref().map(PidFile::write).transpose()?;
    let new_stop =
        || Stop::new().map_err(|source| Error::Process { tried: "make an eventfd", source });
    let (stop, stop_devices) = (new_stop()?, new_stop()?);
    let mut groups = vec![];
    for group in &plan.nbd {
        groups.push(NbdStop { disks: group.disks.clone(), stop: new_stop()? });
    }
    // A server of block devices may need any of it when memory is short.
    if config.disks.iter().all(|disk| disk.ublk.is_none()) {
        give_back_startup();
    }
    let devices = start_devices(config, &mut disks, &stop_devices, &events)?;
    let tls = credentials.as_ref();
    let mut threads = start(config, tls, &mut plan, &mut disks, &stop, &groups, &events)?;
    opened.record_formats();
    announce(config, &disks, &opened.facts());

    let outcome = attend(config, &disks, &groups, tls, &inbox);
    notify(&[NotifyState::Stopping]);
    tracing::info!("stopping: requests under way run to their end");
    stop.raise();
    groups.iter().for_each(|group| group.stop.raise());
    if outcome.is_ok() {
        stop_devices.raise();
        threads.extend(devices);
    }
    for thread in threads {
        // One that panicked has said so to its disk.
        let _ = thread.join();
    }
    let late =
        inbox.try_iter().filter(|event| !is_expected(&disks, event)).find_map(Event::failure);
    let stays = |disk: &Served| disk.ublk.as_ref().is_some_and(|device| device.is_there());
    let kept: Vec<bool> = disks.iter().map(|disk| outcome.is_err() && stays(disk)).collect();
    let flushed = flush(config, &disks, &kept);
    drop(plan);
    outcome
        .and(late.map_or(Ok(()), Err))
        .and(flushed)
        .and(panicked(config, &disks))
        .and_then(|()| opened.outcome())
}

/// The disks of an NBD server, and the word to stop for it.
struct NbdStop {
    disks: Vec<usize>,
    stop: Stop,
}

/// Have it said, and heard by who attends, when a panic stops the disk.
fn tell_of_failure(vbd: &Vbd, events: &Sender<Event>) -> Listening {
    let (span, events) = (vbd.span().clone(), events.clone());
    vbd.health().when_failed(move |panic| {
        span.in_scope(|| {
            tracing::error!(
                "stopped by a panic: {panic}. Its guests get I/O errors and its exports close; nothing more is \
                 written of what the image has in memory, and its restart log stays for the next server, \
                 which can have the image once this process has ended"
            );
        });
        let _ = events.send(Event::Failed);
    })
}

fn is_failed(disk: &Served) -> bool {
    disk.vbd.health().failure().is_some()
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

/// Make the block devices of this host, and start a thread for each.
fn start_devices(
    config: &Config,
    disks: &mut [Served],
    stop: &Stop,
    events: &Sender<Event>,
) -> Result<Vec<JoinHandle<()>>, Error> {
    let mut devices = vec![];
    for (place, (disk, served)) in config.disks.iter().zip(disks.iter_mut()).enumerate() {
        let Some(id) = disk.ublk else { continue };
        let span = served.vbd.span().clone();
        let _disk = span.enter();
        let options = ublk::Options { queues: disk.queues };
        let device = ublk::Device::open(&disk.path, id, &served.vbd, &options)?;
        let server = Arc::new(ublk::Server::start(device, served.vbd.clone())?);
        served.facts.set_ublk(server.path().display().to_string());
        served.ublk = Some(server.clone());
        devices.push((place, served.vbd.clone(), server));
    }
    let start = |(place, vbd, server): (usize, Arc<Vbd>, Arc<ublk::Server>)| {
        let (stop, events) = (stop.clone(), events.clone());
        spawn(&vbd.thread_name("ublk"), move || {
            let _disk = vbd.span().enter();
            let result = server.serve(&stop).map_err(Into::into);
            let server = format!("ublk {}", server.path().display());
            let _ = events.send(Event::Ended { server, disks: vec![place], result });
        })
    };
    devices.into_iter().map(start).collect()
}

/// Start a thread for each server of the plan.
fn start(
    config: &Config,
    credentials: Option<&nbd::Credentials>,
    plan: &mut Plan,
    disks: &mut [Served],
    stop: &Stop,
    groups: &[NbdStop],
    events: &Sender<Event>,
) -> Result<Vec<JoinHandle<()>>, Error> {
    let mut threads = vec![];
    let nbd_budget = nbd::Budget::new(config.nbd_limits.memory_of_all);
    for (group, NbdStop { stop, .. }) in plan.nbd.drain(..).zip(groups) {
        let places: Vec<_> = group.listeners.iter().map(plan::place).collect();
        for (place, tls) in places.iter().zip(&group.tls) {
            for disk in &group.disks {
                disks[*disk].facts.add_nbd(place, *tls == TlsMode::Require);
            }
        }
        let tls = group.tls.iter().map(|mode| mode.with(credentials)).collect();
        let exports = group.disks.iter().map(|disk| nbd::NamedExport {
            name: config.disks[*disk].name.clone(),
            description: config.disks[*disk].path.display().to_string(),
            vbd: disks[*disk].vbd.clone(),
        });
        let server = nbd::Server::new(group.listeners, exports.collect())
            .with_limits(config.nbd_limits)
            .with_budget(nbd_budget.clone())
            .with_tls(tls);
        let (stop, events) = (stop.clone(), events.clone());
        let name = format!("NBD {}", places.first().map(ToString::to_string).unwrap_or_default());
        let healths: Vec<Arc<Health>> =
            group.disks.iter().map(|disk| disks[*disk].vbd.health().clone()).collect();
        let lone = match group.disks[..] {
            [disk] => Some(disks[disk].vbd.clone()),
            _ => None,
        };
        let thread = lone.as_ref().map_or("nbd".to_owned(), |vbd| vbd.thread_name("nbd"));
        threads.push(spawn(&thread, move || {
            let _disk = lone.as_ref().map(|vbd| vbd.span().enter());
            let served = Panic::catch(|| server.serve(&stop));
            let result = match served {
                Ok(end) => end.map_err(Into::into),
                // Without their listener none of them can be had.
                Err(panic) => {
                    healths.iter().for_each(|health| health.fail(panic.clone()));
                    Err(panic.into())
                }
            };
            let _ = events.send(Event::Ended { server: name, disks: group.disks, result });
        })?);
    }
    for socket in plan.vhost_user.drain(..) {
        let (disk, served) = (&config.disks[socket.disk], &mut disks[socket.disk]);
        let path = plan::unix_path(&socket.listener).display().to_string();
        served.facts.add_vhost_user(path.clone());
        let options = vhost_user::Options { queues: disk.queues, serial: disk.serial.clone() };
        let server =
            Arc::new(vhost_user::Server::new(socket.listener, served.vbd.clone(), options));
        served.vhost_user.push(server.clone());
        let (stop, events) = (stop.clone(), events.clone());
        let vbd = served.vbd.clone();
        threads.push(spawn(&vbd.thread_name("vu"), move || {
            let _disk = vbd.span().enter();
            let result = server.serve(&stop).map_err(Into::into);
            let (server, disks) = (format!("vhost-user {path}"), vec![socket.disk]);
            let _ = events.send(Event::Ended { server, disks, result });
        })?);
    }
    for file in plan.fuse.drain(..) {
        let served = &mut disks[file.disk];
        let server = Arc::new(fuse::Server::new(file.mount, served.vbd.clone(), file.options));
        let path = server.path().display().to_string();
        served.facts.add_fuse(path.clone());
        served.fuse.push(server.clone());
        let (stop, events) = (stop.clone(), events.clone());
        let vbd = served.vbd.clone();
        threads.push(spawn(&vbd.thread_name("fuse"), move || {
            let _disk = vbd.span().enter();
            let result = server.serve(&stop).map_err(Into::into);
            let (server, disks) = (format!("FUSE {path}"), vec![file.disk]);
            let _ = events.send(Event::Ended { server, disks, result });
        })?);
    }
    Ok(threads)
}

/// Everything listens: say so to whoever waits for it.
fn announce(config: &Config, disks: &[Served], not_served: &[NotServed]) {
    let facts: Vec<DiskFacts> = disks.iter().map(|disk| disk.facts.clone()).collect();
    for (disk, facts) in disks.iter().zip(&facts) {
        disk.vbd.span().in_scope(|| tracing::info!("serving {}", facts.line()));
    }
    say_ready(config.announce, &facts, not_served);
    let status = match not_served {
        [] => format!("serving {} disk(s)", facts.len()),
        out => {
            let paths: Vec<&str> = out.iter().map(NotServed::disk).collect();
            let of = facts.len() + out.len();
            format!("serving {} of {of} disks, not {}", facts.len(), paths.join(", "))
        }
    };
    notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
}

/// Do what signals ask, until one asks to stop or a server ends by itself.
fn attend(
    config: &Config,
    disks: &[Served],
    groups: &[NbdStop],
    credentials: Option<&nbd::Credentials>,
    inbox: &Receiver<Event>,
) -> Result<(), Error> {
    for event in inbox {
        match event {
            Event::Failed => {
                // Those that offer others as well go on.
                let none_left =
                    |group: &&NbdStop| group.disks.iter().all(|disk| is_failed(&disks[*disk]));
                groups.iter().filter(none_left).for_each(|group| group.stop.raise());
                if disks.iter().all(is_failed) {
                    return panicked(config, disks);
                }
            }
            Event::Ended { ref server, .. } if is_expected(disks, &event) => {
                tracing::info!("{server} is closed");
            }
            Event::Signal(SIGHUP) => reload(config, disks, credentials),
            Event::Signal(SIGUSR1) => {
                AllStats::of(config, disks.iter().map(|disk| &*disk.vbd)).print();
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
fn reload(config: &Config, disks: &[Served], credentials: Option<&nbd::Credentials>) {
    notify_reloading();
    match credentials.map(nbd::Credentials::reload) {
        Some(Ok(())) => tracing::info!("new NBD clients meet the certificates that are there now"),
        Some(Err(error)) => tracing::error!("those read before stay in use: {error}"),
        None => {}
    }
    for (disk, served) in config.disks.iter().zip(disks) {
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
        match (served.file, identity(&disk.path)) {
            (Some(_), None) => tracing::warn!(
                "{path}: its file was deleted or moved away; what is served is still that file, and \
                 where it was deleted it is gone when this ends"
            ),
            (Some(opened), Some(now)) if opened != now => tracing::warn!(
                "{path}: another file has taken its place; what is served is still the one that was \
                 opened: start the server again to serve the new one"
            ),
            _ => {}
        }
    }
    notify(&[NotifyState::Ready]);
}

/// Make stable what every disk was given, and close it, unless it is `kept` for its block device, whose
/// threads go on. The first failure is returned, after all were tried.
fn flush(config: &Config, disks: &[Served], kept: &[bool]) -> Result<(), Error> {
    let failed = |path: &Path, source| Err(Error::Flush { path: path.to_owned(), source });
    let mut tasks = Tasks::new(Box::new(Ring::new().map_err(Error::Ring)?));
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
            .block_on(async move { if kept { vbd.flush(&io).await } else { vbd.close(&io).await } })
            .map_err(|source| Error::Process { tried: "drive the io_uring", source })?;
        if let Err(error) = flushed {
            tracing::error!("cannot flush {}: {error}", disk.path.display());
            outcome = outcome.and(failed(&disk.path, error));
        }
    }
    outcome
}
