//! What a serving process waits for: signals, and servers that end by themselves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};

use ringtap_io::Panic;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use crate::Error;
use crate::handover;
use crate::late::Tried;
use crate::running::{Running, ServerId};
use crate::xen::Attached;

/// Our threads wait and log; they need no more.
const STACK: usize = 256 << 10;
/// Those that carry out what takes long have the futures of a whole job there, which are large where nothing is optimised.
const WORKING_STACK: usize = 1 << 20;
/// Signals that ask to stop; SIGQUIT, to leave block devices of this host for the next server.
const STOPS: [i32; 3] = [SIGTERM, SIGINT, SIGQUIT];
/// What a second of them ends with: 128 + SIGINT, as shells count.
const AT_ONCE: i32 = 130;

/// What a serving process waits for.
pub(crate) enum Event {
    Signal(i32),
    /// A server ended.
    Ended {
        server: String,
        /// Which of those that are running.
        of: Option<ServerId>,
        result: Result<(), Box<dyn std::error::Error + Send + Sync>>,
    },
    /// A panic has stopped a disk.
    Failed,
    /// A disk that was left out has been tried again.
    Tried(Box<Tried>),
    /// Xen's toolstack wants a disk served.
    Attached(Box<Attached>),
    /// Something that another thread wants to be done to what is running.
    Do(Box<dyn FnOnce(&mut Running) + Send>),
}

impl Event {
    pub(crate) fn failure(self) -> Option<Error> {
        match self {
            Event::Ended { server, result: Err(source), .. } => {
                Some(Error::Server { server, source })
            }
            _ => None,
        }
    }
}

/// Signals that are kept until somebody is told of them.
pub(crate) struct Signalled(Signals);

impl Signalled {
    /// From now on they are kept. The second that asks to stop ends the process at once.
    pub(crate) fn listen() -> Result<Signalled, Error> {
        let failed = |source| Error::Process { tried: "set up signals", source };
        let asked = Arc::new(AtomicBool::new(false));
        for signal in STOPS {
            let asked = asked.clone();
            // The first sets the flag, the second finds it set, also where two threads take one each at
            // the same moment.
            let action = move || {
                if asked.swap(true, SeqCst) {
                    low_level::exit(AT_ONCE);
                }
            };
            // SAFETY: an atomic swap and `_exit` are all it does: both may be done in a signal handler.
            unsafe { low_level::register(signal, action) }.map_err(failed)?;
        }
        let all = STOPS.into_iter().chain([SIGHUP, SIGUSR1, SIGUSR2]);
        Signals::new(all).map_err(failed).map(Signalled)
    }

    /// Have them come as events, those of the past first: by a thread.
    pub(crate) fn tell(self, events: Sender<Event>) -> Result<(), Error> {
        let Signalled(mut signals) = self;
        spawn_vital("signals", move || {
            for signal in signals.forever() {
                if STOPS.contains(&signal) {
                    handover::told_to_end();
                }
                if events.send(Event::Signal(signal)).is_err() {
                    return;
                }
            }
        })?;
        Ok(())
    }
}

/// Start a thread. A panic in it is reported, and ends what it does alone: disks are served on.
pub(crate) fn spawn(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    spawn_with(name, STACK, run)
}

/// The same for one that moves bytes.
pub(crate) fn spawn_working(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    spawn_with(name, WORKING_STACK, run)
}

fn spawn_with(
    name: &str,
    stack: usize,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    let role = name.to_owned();
    spawn_that(name, stack, move || {
        if Panic::catch(run).is_err() {
            tracing::error!(
                "the thread {role:?} has ended by a panic; what it did is not done until a restart"
            );
        }
    })
}

/// Start a thread without which the process is of no use.
fn spawn_vital(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    spawn_that(name, STACK, || {
        if Panic::catch(run).is_err() {
            std::process::abort();
        }
    })
}

fn spawn_that(
    name: &str,
    stack: usize,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    thread::Builder::new()
        .name(name.to_owned())
        .stack_size(stack)
        .spawn(run)
        .map_err(|source| Error::Process { tried: "start a thread", source })
}

/// Do something for a client of the control socket: a panic in it is reported, and ends that command alone. What it
/// held is dropped, and whoever waits for that is told so.
pub(crate) fn contained<T>(work: impl FnOnce() -> T) -> Option<T> {
    Panic::catch(work).ok()
}

/// Have the service manager take what the broker tells it, which is another process (systemd 254; before that the unit says so).
pub(crate) fn prepare_notify() {
    const FROM_ALL: NotifyState<'_> = NotifyState::Custom("NOTIFYACCESS=all");
    if ringtap_sandbox::is_there() {
        // What is wrong with it is told by who tells something.
        let _ = sd_notify::notify(&[FROM_ALL]);
    }
}

/// Tell the service manager.
pub(crate) fn notify(states: &[NotifyState]) {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let lines: String = states.iter().map(|state| format!("{state}\n")).collect();
    let told = ringtap_sandbox::ask::notify(&lines);
    if let Err(error) = told.unwrap_or_else(|| sd_notify::notify(states)) {
        tracing::warn!("cannot tell the service manager: {error}");
    }
}

/// Tell the service manager that the images are looked at again.
pub(crate) fn notify_reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!("cannot read the clock: {error}"),
    }
}
