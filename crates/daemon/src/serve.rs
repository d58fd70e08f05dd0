//! From the configuration to the last flush.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use ringtap_export::{give_back_startup, ublk};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

use crate::facts::{DiskFacts, NotServed, say_ready};
use crate::folder::{Looked, ReadFile};
use crate::handover::{self, Taking, Wish};
use crate::identity::tell_of_another_file;
use crate::ids::DiskId;
use crate::keep;
use crate::keeper::Keeper;
use crate::late;
use crate::look;
use crate::metrics::Metrics;
use crate::opened::{self, Opened, Wrap, record_formats};
use crate::pid_file::PidFile;
use crate::plan::Plan;
use crate::running::{Event, Running, Served, is_failed};
use crate::signals::{Signalled, notify, notify_reloading, prepare_notify};
use crate::stats::AllStats;
use crate::stopping::{Left, close_all, wait_for_checks};
use crate::threads::contained;
use crate::tls::led_away;
use crate::{Address, Config, ControlAt, Disk, Error, NbdTls, Sandbox, control, process, sandbox};

/// Serve the disks until SIGTERM or SIGINT. Returns once every request taken has ended, the images
/// are flushed and the sockets removed. Where a server ended by itself the others do, too, but for
/// block devices of this host: they are served until the process ends, and then wait for the next one,
/// for what is mounted on them must not lose its disk. So it is where SIGQUIT has come in the place of SIGTERM.
///
/// A disk whose image cannot be opened is left out, unless the configuration is strict: the others are served.
/// SIGHUP has it tried again; where it still was not served at the end, [`Error::NotServed`] comes then.
///
/// A disk that a panic stops is served no more; the others are, and [`Error::Panicked`] comes at the end.
pub fn serve(config: Config) -> Result<(), Error> {
    serve_wrapped(config, Arc::new(|_, image| image))
}

/// As [`serve`], by a process that has the command line for itself: another takes its place when it is told to
/// (SIGUSR2, `__ringtap_upgrade`), and it takes that of the one that started it for this. `read` reads what is passed on
/// of disks, as files of a folder.
pub fn serve_upgradable(config: Config, read: ReadFile) -> Result<(), Error> {
    handover::note_program();
    let mut taking = Taking::begin()?;
    let end = run(config, Arc::new(|_, image| image), Some(&read), &mut taking);
    if let (Err(error), Some(taking)) = (&end, &taking) {
        taking.give_up(error);
    }
    end
}

/// As [`serve`], of images that tests have put others before.
#[doc(hidden)]
pub fn serve_wrapped(config: Config, wrap: Wrap) -> Result<(), Error> {
    run(config, wrap, None, &mut None)
}

fn run(
    mut config: Config,
    wrap: Wrap,
    read: Option<&ReadFile>,
    taking: &mut Option<Taking>,
) -> Result<(), Error> {
    let (mut looked, mut not_served) = (Looked::default(), vec![]);
    let told = match &*taking {
        None => {
            looked = look::load(&mut config)?;
            config = config.checked()?;
            None
        }
        Some(_) => Some(operators_words(&config)?),
    };
    process::raise_descriptor_limit();
    let in_own_namespace = leave_mount_namespace(told.as_ref().unwrap_or(&config));
    if in_own_namespace {
        sandbox::broker_comes_along();
    }
    let (events, inbox) = channel();
    process::choose_engine()?;
    if matches!(config.sandbox, Sandbox::On { .. }) {
        prepare_notify();
    }
    let mut confined = Some(sandbox::confine(told.as_ref().unwrap_or(&config))?);
    if let (Some(taking), Some(read)) = (&*taking, read) {
        (looked, not_served) = taking.configure(&mut config, read)?;
        config = config.checked()?;
        taking.look_only(&mut config);
    }
    let signals = Signalled::listen()?;

    let credentials = config.nbd_tls.as_ref().map(NbdTls::load).transpose()?;
    let Opened { config, vbds, mut left_out, named } = Opened::open(config, &wrap)?;
    if taking.is_some() && !left_out.is_empty() {
        return Err(left_out.swap_remove(0).error);
    }
    left_out.extend(handover::left_out(not_served));
    // Images that come from another server are not.
    if let Some(confined) = confined.take_if(|_| taking.is_none()) {
        confined.images_are_open(&left_out);
    }
    let tell = events.clone();
    ringtap_stores::rbd::tell_of_resizes(move || {
        _ = tell.send(Event::Do(Box::new(|running| look_at_sizes(running, false))));
    });
    let mut running = Running::new(config, vbds, credentials, events.clone(), wrap)?;
    (running.looked, running.upgradable) = (looked, read.is_some());
    running.pending.nodes.extend(left_out.iter().filter_map(|left| left.disk.node_name.clone()));
    running.left_out = left_out;
    let ids: Vec<DiskId> = running.disks.keys().copied().collect();
    let wanted: Vec<_> = running.disks.iter().map(|(id, served)| (*id, &served.disk)).collect();
    let not_served = running.left_out.iter().map(|left| &left.disk);
    // What comes from the server before this one was accepted there, and is mounted: nobody answers who looks at it.
    let shown = running.disks.values().filter(|_| taking.is_none());
    shown.into_iter().try_for_each(Served::hides_none)?;
    let plan = Plan::bind(&running.config, &wanted, not_served)?;
    let ways = running.config.control.iter().map(control::Way::prepare);
    let ways = ways.collect::<Result<Vec<_>, _>>()?;
    running.listening.extend(ways.iter().filter_map(control::Way::socket));
    if in_own_namespace {
        let_go_of_disks(&running);
    }
    let taken = taking.is_some();
    taking.iter_mut().try_for_each(|taking| taking.take_over(&mut running))?;
    if let Some(confined) = confined {
        confined.images_are_open(&running.left_out);
    }
    signals.tell(running.events.clone())?;
    let _pid_file = running.config.pid_file.as_deref().map(PidFile::write).transpose()?;
    // A server of block devices may need any of it when memory is short.
    if !taken && running.disks.values().all(|served| served.disk.ublk.is_none()) {
        give_back_startup();
    }
    running.start_devices(&ids)?;
    running.start(plan, &ids)?;
    running.start_xen()?;
    record_formats(&named);
    let unshown = begin_to_keep(&mut running, &inbox, &ids)?;
    taking.iter_mut().for_each(Taking::goes_on);
    if let Some(why) = unshown.into_iter().next().filter(|_| running.config.strict && !taken) {
        running.stop(true, &mut Left::default());
        return Err(Error::File(why));
    }
    control::resume(&mut running, &inbox, &ids);
    let control = control::Server::start(ways, &events, &running.told, &running.newcomers)?;
    let metrics = running.config.metrics.as_ref();
    let (mode, newcomers) = (running.config.socket_mode, &running.newcomers);
    let metrics =
        metrics.map(|address| Metrics::start(address, mode, running.events.clone(), newcomers));
    let mut metrics = metrics.transpose()?;
    running.listening.extend(metrics.iter_mut().flat_map(|metrics| metrics.sockets.drain(..)));
    running.handover_pause = taking.take().map(Taking::done);
    if taken {
        running.disks.values().for_each(tell_where);
        say_status(&running);
    } else {
        announce(&running);
    }

    let outcome = attend(&mut running, &inbox);
    if running.handed_over.is_some() {
        // Who asked for it is answered, and nothing else is done: all there was is another's. What is left ends with the
        // process, and removes nothing.
        running.keeper = None;
        drop(inbox);
        drop(metrics);
        drop(control);
        sandbox::end_broker();
        std::process::exit(0);
    }
    notify(&[NotifyState::Stopping]);
    tracing::info!("stopping: requests in flight run to their end");
    running.quit = true;
    running.cancel_jobs();
    running.disks.values().for_each(|served| {
        served.vbd.give_up_waiting();
        served.vbd.lift_limits();
        served.vbd.go_on();
    });
    let mut left = Left::default();
    let devices = outcome.is_ok() && !running.leaves_devices;
    running.stop(devices, &mut left);
    running.tell_of_gone_exports(devices);
    running.wait_for_pending(&mut left);
    let mut late = None;
    for event in inbox.try_iter() {
        match event {
            Event::Do(what) => keep::carry_out(&mut running, what),
            Event::Tried(tried) => tried.close(),
            Event::Attached(attached) => _ = running.attach(*attached),
            event if !is_expected(&running, &event) => late = late.or(event.failure()),
            _ => {}
        }
    }
    let kept = if devices { vec![] } else { ids_of_devices(&running) };
    let flushed = close_all(&running, &kept, &mut left);
    wait_for_checks(std::mem::take(&mut running.pending.checks));
    // What was still being written is stable, and told, after this.
    running.keeper = None;
    // Clients whose commands came too late are told so.
    drop(inbox);
    drop(metrics);
    drop(control);
    let (panicked, count) = (panicked(&running), running.disks.len());
    outcome
        .and(late.map_or(Ok(()), Err))
        .and(flushed)
        .and(left.outcome(&mut running))
        .and(panicked)
        .and_then(|()| opened::outcome(std::mem::take(&mut running.left_out), count))
        .and_then(|()| running.looked.outcome())
}

/// What the operator says, by the command line and in the folder, whatever another server hands over: that decides what this
/// one reaches.
fn operators_words(config: &Config) -> Result<Config, Error> {
    let mut told = Config { strict: false, ..config.clone() };
    if told.sandbox != Sandbox::Off {
        look::load(&mut told)?;
    }
    Ok(told)
}

/// Show the disks as is written down, and from then on write down what changes. Why exports are not there.
fn begin_to_keep(
    running: &mut Running,
    inbox: &Receiver<Event>,
    ids: &[DiskId],
) -> Result<Vec<String>, Error> {
    let mut wrong = vec![];
    // Who comes before its export is there would be told that there is none of that name.
    running.pending.nbd_waits = Some(vec![]);
    running.nbd_goes_on();
    for id in ids {
        wrong.extend(control::replay(running, inbox, *id));
    }
    running.pending.nbd_waits = None;
    let Some(folder) = running.config.folder.clone() else { return Ok(wrong) };
    wrong.iter().for_each(|why| tracing::error!("not shown: {why}"));
    if folder.keep {
        let mut keeper = Keeper::start(&folder.path, running.events.clone())?;
        keeper.know(running);
        running.keeper = Some(keeper);
    }
    Ok(wrong)
}

/// The disks whose block devices are there.
fn ids_of_devices(running: &Running) -> Vec<DiskId> {
    let there = |id: &DiskId| running.device_of(*id).is_some_and(|device| device.is_there());
    running.disks.keys().copied().filter(there).collect()
}

/// Whether it is the end of a server whose disks are all stopped.
fn is_expected(running: &Running, event: &Event) -> bool {
    matches!(event, Event::Ended { of: Some(of), .. } if running.expects_end(*of))
}

/// An error where a panic has stopped a disk.
fn panicked(running: &Running) -> Result<(), Error> {
    let failed = || running.disks.values().filter(|served| is_failed(served));
    match failed().find_map(|served| served.vbd.health().failure()) {
        Some(panic) => Err(Error::panicked(failed().map(|served| &*served.disk.path), panic)),
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
fn let_go_of_disks(running: &Running) {
    let disks = || running.disks.values().map(|served| &served.disk);
    let images = disks().map(|disk| &*disk.path);
    let sockets = disks().flat_map(|disk| disk.nbd.iter().chain(&disk.vhost_user));
    let sockets = sockets.filter_map(|address| match address {
        Address::Unix(path) => Some(&**path),
        _ => None,
    });
    let config = &running.config;
    let others = config.pid_file.iter().map(|path| &**path);
    let others = others.chain(config.control.iter().map(ControlAt::path));
    let others = others.chain([Path::new(".")]);
    if let Err(error) = ublk::let_go_of_disks(images.chain(sockets).chain(others)) {
        tracing::warn!("cannot look for file systems on ublk devices: {error}");
    }
}

/// Everything listens: say so to whoever waits for it.
fn announce(running: &Running) {
    let facts: Vec<DiskFacts> = running.disks.values().map(|disk| disk.facts.clone()).collect();
    running.disks.values().for_each(tell_where);
    let disks = running.left_out.iter().map(NotServed::new);
    let not_served = disks.chain(running.looked.wrong.iter().map(NotServed::of_file));
    let not_served: Vec<NotServed> = not_served.collect();
    say_ready(running.config.announce, &facts, &not_served);
    say_status(running);
}

fn tell_where(disk: &Served) {
    disk.vbd.span().in_scope(|| tracing::info!("serving {}", disk.facts.line()));
}

/// systemd takes no message of more than 4096 bytes.
const LONGEST_STATUS: usize = 1024;

/// Tell the service manager that all that can be is served.
fn say_status(running: &Running) {
    let served = running.disks.len();
    let disks = running.left_out.iter().map(|left| &*left.disk.path);
    let out: Vec<&Path> = disks.chain(running.looked.wrong.keys().map(|file| &**file)).collect();
    let status = match &out[..] {
        [] if running.config.xen.is_some() => "serving Xen's guests".to_owned(),
        [] => format!("serving {served} disk(s)"),
        out => {
            let paths: Vec<_> = out.iter().map(|path| path.to_string_lossy()).collect();
            format!("serving {served} of {} disks, not {}", served + out.len(), paths.join(", "))
        }
    };
    // In one message: a manager that is slow to read would have this process wait.
    notify(&[NotifyState::Ready, NotifyState::Status(&short(&status))]);
}

/// One line of text, of at most [`LONGEST_STATUS`] bytes.
fn short(text: &str) -> String {
    let mut line: String =
        text.chars().map(|char| if char.is_control() { '?' } else { char }).collect();
    if line.len() > LONGEST_STATUS {
        let fits = |at: &usize| line.is_char_boundary(*at);
        line.truncate((0..=LONGEST_STATUS - 3).rev().find(fits).unwrap_or(0));
        line.push_str("...");
    }
    line
}

/// Do what signals ask, until one asks to stop or a server ends by itself.
fn attend(running: &mut Running, inbox: &Receiver<Event>) -> Result<(), Error> {
    for event in inbox {
        let end = keep::keeping(running, |running| handle(running, inbox, event));
        if !running.leaving.is_empty() {
            running.close_leaving();
        }
        if std::mem::take(&mut running.pending.resumes_jobs) {
            let ids: Vec<DiskId> = running.disks.keys().copied().collect();
            control::resume(running, inbox, &ids);
        }
        if let ControlFlow::Break(end) = end {
            return end;
        }
    }
    Ok(())
}

fn handle(
    running: &mut Running,
    inbox: &Receiver<Event>,
    event: Event,
) -> ControlFlow<Result<(), Error>> {
    match event {
        Event::Failed => {
            // Those that offer others as well go on.
            running.close_failed();
            let served = || running.disks.values();
            let others_come = !running.config.control.is_empty() || running.config.xen.is_some();
            if !others_come && served().all(is_failed) {
                return ControlFlow::Break(panicked(running));
            }
        }
        Event::Ended { server, of: Some(of), .. } if running.expects_end(of) => {
            tracing::info!("{server} is closed");
            running.server_ended(of);
        }
        Event::Ended { of: Some(of), result: Ok(()), .. } if running.is_held_up(of) => {
            running.goes_on_late(of);
        }
        Event::Ended { server, of: Some(of), result } if running.was_added(of) => {
            let why = result.err().map(|error| error.to_string()).unwrap_or_default();
            tracing::error!("the {server} server ended by itself: {why}");
            running.server_ended(of);
        }
        Event::Signal(SIGHUP) => {
            notify_reloading();
            running.disks.values().for_each(|served| served.vbd.try_again());
            reload(running);
            look::look_again(running);
            late::try_again(running);
            know(running);
            say_tried(running);
        }
        Event::Tried(tried) => {
            if let Some(id) = late::tried(running, *tried) {
                let wrong = control::replay(running, inbox, id);
                wrong.iter().for_each(|why| tracing::error!("not shown: {why}"));
                control::resume(running, inbox, &[id]);
                know(running);
            }
            say_tried(running);
        }
        Event::Attached(attached) => {
            if let Some(id) = running.attach(*attached) {
                control::resume(running, inbox, &[id]);
            }
        }
        Event::Signal(SIGUSR2) if running.opening().is_some() => running.pending.upgrade = true,
        Event::Signal(SIGUSR2) => {
            let told = |running: &mut Running, end: Result<u32, Error>| {
                if let Err(error) = &end {
                    tracing::error!("no other process takes over: {error}");
                }
                handover::tell_asker(&end);
                running.handed_over = end.ok();
            };
            handover::begin(running, Wish::default(), Box::new(told));
            if running.handed_over.is_some() {
                return ControlFlow::Break(Ok(()));
            }
        }
        Event::Signal(SIGUSR1) => {
            AllStats::of(running.disks.values()).print();
        }
        Event::Signal(signal) => {
            running.leaves_devices = signal == SIGQUIT;
            return ControlFlow::Break(Ok(()));
        }
        Event::Do(what) => {
            contained(|| what(running));
            if running.handed_over.is_some() {
                return ControlFlow::Break(Ok(()));
            }
            if running.quit {
                tracing::info!("a client of the control socket asks to stop");
                return ControlFlow::Break(Ok(()));
            }
        }
        Event::Ended { server, result, .. } => {
            let source = result.err().unwrap_or_else(|| "without a word".into());
            return ControlFlow::Break(Err(Error::Server { server, source }));
        }
    }
    ControlFlow::Continue(())
}

/// What there is now is what the folder says.
fn know(running: &mut Running) {
    if let Some(mut keeper) = running.keeper.take() {
        keeper.know(running);
        running.keeper = Some(keeper);
    }
}

/// Once all disks that were left out have been tried again: say so, and go on with what has waited for that.
fn say_tried(running: &mut Running) {
    if running.opening().is_some() {
        return;
    }
    say_status(running);
    if std::mem::take(&mut running.pending.upgrade) {
        // Whoever has sent it attends.
        let _ = running.events.send(Event::Signal(SIGUSR2));
    }
}

/// Look again how large the images are, and tell the guests; read the certificates again.
fn reload(running: &Running) {
    let named = running.tls_creds.values().chain(running.nbd_creds.iter().map(|(_, named)| named));
    let named = named.filter_map(|named| named.server.as_ref());
    for credentials in running.credentials.iter().chain(named) {
        match credentials.reload() {
            Ok(()) => tracing::info!("new NBD clients meet the certificates that are there now"),
            Err(error) => {
                let confined = running.config.sandbox != Sandbox::Off;
                let why = led_away(&error, confined);
                tracing::error!("those read before stay in use: {error}{why}");
            }
        }
    }
    look_at_sizes(running, true);
}

/// Look again how large the images are, and tell the guests.
fn look_at_sizes(running: &Running, asked: bool) {
    for (id, served) in &running.disks {
        let path = served.disk.path.display();
        let _disk = served.vbd.span().enter();
        match served.vbd.reload_size() {
            Ok(true) => {
                tracing::info!("{path}: now {} bytes", served.vbd.size());
                running.transports_of(*id).iter().for_each(|transport| transport.resized());
            }
            Ok(false) if !asked => continue,
            Ok(false) => tracing::info!("{path}: still {} bytes", served.vbd.size()),
            Err(error) => tracing::error!("cannot find the size of {path}: {error}"),
        }
        tell_of_another_file(&served.disk.path, served.file);
    }
}
